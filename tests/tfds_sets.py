"""TFDS data sets that tests write, and a small size of the parts that sources are read in."""

import importlib
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow_datasets as tfds

from diffeq_nnx.data.sources import catalog


class WrittenText(tfds.core.GeneratorBasedBuilder):
  """Fifty records for training, some of them odd, and three for validation; written in this order."""

  VERSION = tfds.core.Version("1.0.0")
  SUPPORTED_VERSIONS = [tfds.core.Version("1.1.0")]
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name, description=name) for name in ("en", "odd")]

  def _info(self):
    features = {"text": tfds.features.Text(), "title": tfds.features.Text(), "length": np.int64}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples("train"), "validation": self._generate_examples("validation")}

  def _generate_examples(self, split):
    for index, text in enumerate(self.texts(self.builder_config.name, split)):
      yield index, {"text": text, "title": f"title {index}", "length": len(text)}

  @staticmethod
  def texts(name, split):
    texts = [f"{split} {index} é _START_ARTICLE_" for index in range(50 if split == "train" else 3)]
    if (name, split) == ("odd", "train"):
      texts[7], texts[20], texts[30] = "", b"\xff\xfe", b"caf\xe9"
    return texts


class FailingText(WrittenText):
  """What a download without a network, or a builder without its dependency, looks like."""

  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name, description=name) for name in ("offline", "beam")]

  def _split_generators(self, dl_manager):
    if self.builder_config.name == "beam":
      importlib.import_module("no_such_apache_beam")
    raise ConnectionError("Max retries exceeded\nwith much advice")


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("tfds")
  for name in ("en", "odd"):
    builder = WrittenText(config=name, data_dir=directory, file_format="array_record")
    builder.download_and_prepare()
  return str(directory)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
  monkeypatch.setattr(catalog, "RECORDS_PER_PART", 8)
  monkeypatch.setattr(catalog, "_RECORDS_PER_READ", 3)


def in_subprocess(code):
  """Runs code in a fresh Python and returns what it printed."""
  code = "import sys\n" + textwrap.dedent(code)
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent.parent
  )
  assert done.returncode == 0, done.stderr
  return done.stdout
