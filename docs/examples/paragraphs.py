"""The paragraphs of a file as documents: configs/tiny.py with a data source of our own."""

import dataclasses
import os
import runpy

from diffeq_nnx.data import sources


@dataclasses.dataclass(frozen=True)
class Paragraphs:
  """A part: the paragraphs of a file, each one document."""

  name: str
  size: int = 0  # bytes, about; small parts are prepared together

  def read(self, prefix, options):
    """Yields the documents; errors may begin with `prefix`, and `options` are the keys of `data`."""
    with open(self.name, encoding="utf-8") as file:
      yield from file.read().split("\n\n")


def resolve(path, prefix, options):
  """The parts of paragraphs:PATH, and a JSON value that changes with the source, as its cache must."""
  return [Paragraphs(path)], [path, os.path.getsize(path), os.path.getmtime(path)]


sources.RESOLVERS["paragraphs"] = resolve


def get_config(choice=""):
  """The experiment of configs/tiny.py on the paragraphs of this project's README."""
  config = runpy.run_path("configs/tiny.py")["get_config"](choice)
  config.data.source = "paragraphs:README.md"
  config.data.tokenizer, config.model.vocab_size = "bytes", 257
  return config
