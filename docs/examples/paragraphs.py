"""The paragraphs of a file as documents: configs/tiny.py with a data source of our own."""

import functools
import os
import runpy

from diffeq_nnx.data import sources


def read(path, prefix, options):
  """Yields the documents of a file; errors may begin with `prefix`, and `options` are the keys of `data`."""
  with open(path, encoding="utf-8") as file:
    yield from file.read().split("\n\n")


def resolve(path, prefix, options):
  """The parts of paragraphs:PATH, and a JSON value that changes with the source, as its cache must."""
  size = os.path.getsize(path)  # small parts are prepared together
  return [sources.Part(path, size, functools.partial(read, path))], [path, size, os.path.getmtime(path)]


sources.RESOLVERS["paragraphs"] = resolve


def get_config(choice=""):
  """The experiment of configs/tiny.py on the paragraphs of this project's README."""
  config = runpy.run_path("configs/tiny.py")["get_config"](choice)
  config.data.source = "paragraphs:README.md"
  config.data.tokenizer, config.model.vocab_size = "bytes", 257
  return config
