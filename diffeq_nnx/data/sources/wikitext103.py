"""WikiText-103, which TFDS's catalog lacks, as a TFDS data set: `tfds:wikitext103:train`, for example."""

from collections.abc import Iterator
import re
from typing import Any

import tensorflow_datasets as tfds

# A copy of the paper's zip, whose original address is gone.
_URL = "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip"
_FILES = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
_TITLE = re.compile(r" = [^=]+ = \n")  # sections have = = and more


class Wikitext103(tfds.core.GeneratorBasedBuilder):
  """The raw (not <unk>) variant of https://arxiv.org/abs/1609.07843: one record for each article.

  The records of a split add up to its file. Preparation holds the largest file, 540 MB, in memory.
  """

  VERSION = tfds.core.Version("1.0.0")

  def _info(self) -> tfds.core.DatasetInfo:
    features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
    directory = dl_manager.download_and_extract(_URL) / "wikitext-103-raw"
    return {split: self._generate_examples(directory / name) for split, name in _FILES.items()}

  def _generate_examples(self, path: Any) -> Iterator[tuple[int, dict[str, str]]]:
    with open(path, encoding="utf-8", newline="\n") as file:
      for index, text in enumerate(articles(file)):
        yield index, {"text": text}


def articles(lines: Iterator[str]) -> Iterator[str]:
  """Yields articles: each begins at a title line that follows a blank line, and goes on to the next such line."""
  article: list[str] = []
  blank = False
  for line in lines:
    if blank and _TITLE.fullmatch(line) and any(not before.isspace() for before in article):
      yield "".join(article)
      article = []
    article.append(line)
    blank = line.isspace()
  if article:
    yield "".join(article)
