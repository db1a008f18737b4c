"""Sources in TFDS data sets: splits, versions, features, downloads, damage, reading without TensorFlow."""

import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, presets
from diffeq_nnx.data import sources
from diffeq_nnx.data.sources import Counts, Options, catalog
from tests.attacks import ROOT
from tests.conftest import told


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
  """What a download without a network looks like."""

  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="offline", description="offline")]

  def _split_generators(self, dl_manager):
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


@pytest.mark.parametrize(
  "split,expected",
  [
    ("", slice(None)),
    (":1.0.0:train[:20%]", slice(10)),
    (":train[-3:]", slice(-3, None)),
    (":1.*.*:train[48:]", slice(48, None)),
  ],
)
def test_tfds_splits_and_versions(tfds_dir, split, expected):
  documents = data.documents(f"tfds:written_text/en{split}", options=Options(tfds_dir=tfds_dir))
  assert list(documents) == WrittenText.texts("en", "train")[expected]


def test_tfds_reads_another_feature_and_counts_what_is_not_utf8(tfds_dir, caplog):
  titles = data.documents("tfds:written_text/odd:validation", options=Options(text_key="title", tfds_dir=tfds_dir))
  assert list(titles) == ["title 0", "title 1", "title 2"]
  name = "tfds:written_text/odd:train"
  message = told(lambda: list(data.documents(name, options=Options(tfds_dir=tfds_dir))))
  where = "written_text/odd/1.0.0:train record 20"
  assert message.startswith(f"data.source={name}: {where}: not UTF-8 (")
  source = sources.open_source(name, options=Options(tfds_dir=tfds_dir, bad_records="skip"))
  texts = ["" if isinstance(text, bytes) else text for text in WrittenText.texts("odd", "train")]
  assert list(source.records()) == texts
  assert source.counts == Counts(50, 47, 1, {"not UTF-8": 2}, {"not UTF-8": where})
  assert "2 of 50 records skipped as bad: 2 not UTF-8" in caplog.text


def test_tfds_parts_are_the_whole_however_they_are_shared_out(tfds_dir):
  """Each can be pickled for a process of its own, and they can be read in any order."""
  source = sources.open_source("tfds:written_text/en:train[5:31]+validation", options=Options(tfds_dir=tfds_dir))
  texts = WrittenText.texts("en", "train")[5:31] + WrittenText.texts("en", "validation")
  assert list(source.documents()) == list(source.documents()) == texts
  assert source.counts == Counts(len(texts), len(texts))
  parts = pickle.loads(pickle.dumps(source.parts))
  found = [[*source.read(part, counts=Counts())] for part in reversed(parts)]
  assert sum(found[::-1], []) == texts and len({part.name for part in parts}) == len(parts) == 4


def test_tfds_fingerprints_follow_version_split_and_files_and_damage_is_told(tfds_dir, tmp_path):
  def open_source(name="tfds:written_text/en"):
    return data.open_source(name, options=Options(tfds_dir=str(tmp_path), bad_records="skip"))

  folder = tmp_path / "written_text" / "en"
  shutil.copytree(f"{tfds_dir}/written_text/en", folder)
  first = open_source().fingerprint()
  assert first == open_source("tfds:written_text/en:1.0.0:train").fingerprint()
  assert first != open_source("tfds:written_text/en:validation").fingerprint()
  (file,) = folder.glob("1.0.0/*train.array_record*")
  os.utime(file, ns=(1, 1))
  touched = open_source().fingerprint()
  shutil.copytree(folder / "1.0.0", folder / "1.1.0")
  info = folder / "1.1.0" / "dataset_info.json"
  info.write_text(info.read_text().replace('"1.0.0"', '"1.1.0"'))
  assert len({first, touched, open_source().fingerprint()}) == 3  # the newest version on disk is meant
  file = folder / "1.1.0" / file.name
  content = file.read_bytes()
  file.write_bytes(content[:100] + bytes(len(content) - 100))
  assert "can't be read" in told(lambda: list(open_source().documents()))
  file.unlink()
  assert "can't be read (No such file or directory); remove it and prepare" in told(open_source)
  info.write_text(info.read_text().replace("array_record", "tfrecord"))
  assert "as tfrecord, which needs TensorFlow; prepare it again with tfds build written_text/en" in told(open_source)


def test_tfds_errors_name_key_value_and_way_out(tfds_dir):
  en = "written_text/en"
  for name, part in (
    (f"{en}:test", f"{en}/1.0.0 has no split 'test' (Unknown split 'test'. Should be"),
    (f"{en}:train[:0]", f"split 'train[:0]' of {en}/1.0.0 holds no records"),
    (f"{en}:2.0.0", f"{en}:2.0.0 is not in {{}}, and TFDS can't make it"),
    ("wrtten_text/en", "nearest in the catalog: written_text"),
    ("Written Text", "'Written Text' can't be opened in {} (Parsing builder name string"),
    ("failing_text/offline", "is not in {}; set data.download=True to download failing_text/offline/1.0.0 (of unknown"),
    ("wiki40b/en", "run tfds build wiki40b/en --file_format=array_record --data_dir={}, or set data.tfds_dir to the"),
  ):
    message = told(lambda: data.documents(f"tfds:{name}", options=Options(tfds_dir=tfds_dir)))
    assert message.startswith(f"data.source=tfds:{name}: ") and part.replace("{}", tfds_dir) in message
  message = told(lambda: data.documents(f"tfds:{en}", options=Options(text_key="length", tfds_dir=tfds_dir)))
  assert message.startswith("data.text_key=length: ") and message.endswith("use one of text, title")
  message = told(lambda: data.documents(f"tfds:{en}", options=Options(tfds_dir="gs://bucket")))
  assert message.startswith("data.tfds_dir=gs://bucket: ") and "gcsfuse" in message


def test_tfds_downloads_when_told_to_and_says_so(tmp_path, caplog, capfd):
  options = Options(tfds_dir=str(tmp_path), download=True)
  found = list(data.documents("tfds:written_text/en:validation", options=options))
  assert found == WrittenText.texts("en", "validation")
  (line,) = caplog.messages
  assert line.startswith("data.source=tfds:written_text/en:validation: downloading written_text/en/1.0.0 (of unknown")
  assert capfd.readouterr().out == ""
  message = told(lambda: data.documents("tfds:failing_text/offline", options=options))
  assert f"can't be downloaded to {tmp_path} (ConnectionError: Max retries exceeded); check the" in message


def test_wikitext103_is_cut_at_titles_only_and_loses_nothing(tmp_path, monkeypatch):
  head = " \n = Title A = \n \n Text . \n = not after a blank line = \n \n = = Section = = \n \n x = y \n \n"
  parts = [head, " = B : c = \n \n Ünïcode \u2028 @-@ \r\n", "no blank line = C = \n \n", " = D = \n"]
  files = {"wiki.train.raw": parts, "wiki.valid.raw": parts[:1], "wiki.test.raw": parts[3:]}
  (tmp_path / "wikitext-103-raw").mkdir()
  for name, texts in files.items():
    (tmp_path / "wikitext-103-raw" / name).write_bytes("".join(texts).encode())
  urls = []

  def download_and_extract(_, url):
    urls.append(url)
    return tmp_path

  monkeypatch.setattr(tfds.download.DownloadManager, "download_and_extract", download_and_extract)
  config = config_lib.default()
  presets.apply(config, presets.CORPORA["wikitext103"])
  options = Options(tfds_dir=str(tmp_path / "tfds"), download=config.data.download)
  assert list(data.documents(config.data.source, options=options)) == [head, parts[1] + parts[2], parts[3]]
  assert list(data.documents(config.data.validation, options=options)) == parts[:1]
  assert list(data.documents("tfds:wikitext103:test", options=options)) == parts[3:]
  assert len(urls) == 1  # the first use prepares all splits


def test_packages_of_sources_are_needed_only_where_one_is_named():
  program = """
import sys
packages = {"parquet:pyproject.toml": "pyarrow", "hf:name": "datasets", "tfds:lm1b": "tensorflow_datasets"}
sys.modules |= dict.fromkeys(packages.values())  # as if they were not installed
from diffeq_nnx import data
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import hub
list(data.documents("builtin"))
for source, package in packages.items():
  try:
    data.open_source(source)
  except UserError as error:
    print(f"needs {package}" in str(error), str(error).rpartition("; ")[2])
"""
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
  extras = [f"True run pip install 'diffeq-nnx[{name}]'" for name in ("hf", "hf", "tfds")]
  assert done.stdout.splitlines() == extras, done.stderr
