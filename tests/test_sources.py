"""What sources promise: each record once or counted, in one order, in parts, flat memory, one-line errors."""

import gzip
import importlib
import json
import lzma
import os
import pathlib
import pickle
import random
import subprocess
import sys
import textwrap

import fsspec
import numpy as np
import pytest
import tensorflow_datasets as tfds

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, presets
from diffeq_nnx.data import holdout, sources
from diffeq_nnx.data.sources import Counts, Options, catalog
from diffeq_nnx.data.sources.files import zstd  # the standard one, or its backport
from tests.conftest import told

SKIP = Options(bad_records="skip")
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}
MEMORY = fsspec.filesystem("memory")


def jsonl(texts, key="text"):
  return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


@pytest.fixture
def bucket():
  """The URL of an empty folder of fsspec's in-memory file system, in place of a bucket."""
  yield "memory://bucket"
  MEMORY.store.clear()


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


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_compressed_and_plain_files_read_alike_in_sorted_order(tmp_path, bucket, place):
  texts = ["one\r\ntwo", "drei \u2581 ü", "\U0001f642", "vier\n"]
  root = str(tmp_path) if place == "local" else bucket
  for index, (text, (suffix, opener)) in enumerate(zip(texts, OPENERS.items())):
    record = json.dumps({"text": text, "other": 1}).encode() + b"\n\n"
    for name, content in ((f"{index}.txt{suffix}", text.encode()), (f"deep/{index}.jsonl{suffix}", record)):
      (tmp_path / "deep").mkdir(exist_ok=True)
      with opener(tmp_path / name, "wb") as file:
        file.write(content)
      MEMORY.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
  assert list(data.documents(f"text:{root}/*.txt*")) == texts
  assert list(data.documents(f"jsonl:{root}/**/*.jsonl*")) == texts
  assert list(data.documents(f"jsonl:{root}/deep/2.jsonl*, {root}/deep/[013].jsonl*")) == texts


def test_several_frames_or_members_in_a_file_are_all_read(tmp_path):
  for suffix, module in ((".gz", gzip), (".xz", lzma), (".zst", zstd)):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(module.compress(jsonl(["a"])) + module.compress(jsonl(["b"])))
    assert list(data.documents(f"jsonl:{tmp_path}/a.jsonl{suffix}")) == ["a", "b"]


def test_home_expands_and_documents_are_read_lazily(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "a.jsonl").write_text('{"text": "first"}\nbroken\n')
  documents = data.documents("jsonl:~/a.jsonl")
  assert next(documents) == "first"
  assert "line 2" in told(lambda: next(documents))


def test_builtin_stays_the_same():
  documents = list(data.documents("builtin"))
  assert len(documents) > 50 and all(documents) and documents == list(data.documents("builtin"))
  assert data.fingerprint("builtin") == data.fingerprint("builtin")


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_fingerprints_follow_the_files_and_how_they_are_read(tmp_path, bucket, place):
  def write(content):
    (tmp_path / "a.jsonl").write_bytes(content)
    MEMORY.pipe("/bucket/a.jsonl", content)

  root = str(tmp_path) if place == "local" else bucket
  write(jsonl(["x"]))
  ways = [("jsonl", Options()), ("text", Options()), ("jsonl", SKIP), ("jsonl", Options(text_key="other"))]
  seen = [data.fingerprint(f"{kind}:{root}/*.jsonl", options=options) for kind, options in ways]
  assert seen[0] == data.fingerprint(f"jsonl:{root}/*.jsonl", "data.validation")
  write(jsonl(["y"]))  # of the same size
  seen.append(data.fingerprint(f"jsonl:{root}/*.jsonl"))
  write(jsonl(["xy"]))
  seen.append(data.fingerprint(f"jsonl:{root}/*.jsonl"))
  assert len({*seen, data.fingerprint("builtin")}) == len(seen) + 1


def test_a_kept_listing_hides_no_change(bucket, monkeypatch):
  listing, find = {}, type(MEMORY).find

  def cached_find(self, path, **options):  # as file systems over a network do
    if path not in listing:
      listing[path] = find(self, path, **options)
    return listing[path]

  monkeypatch.setattr(type(MEMORY), "find", cached_find)
  monkeypatch.setattr(type(MEMORY), "invalidate_cache", lambda self, path=None: listing.clear())
  seen = set()
  for index in range(3):
    MEMORY.pipe(f"/bucket/{index}.jsonl", jsonl(["x"]))
    seen.add(data.fingerprint(f"jsonl:{bucket}/*.jsonl"))
  assert len(seen) == 3


def test_another_key_may_hold_the_text(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(jsonl(["x", "y"], 'the "body"'))
  assert list(data.documents(f"jsonl:{tmp_path}/a.jsonl", options=Options('the "body"'))) == ["x", "y"]


def test_parts_are_the_whole_however_they_are_shared_out(tmp_path, tfds_dir):
  for index in range(7):
    (tmp_path / f"{index}.jsonl").write_bytes(jsonl(f"{index}.{row}" for row in range(index + 1)))
  for name, texts in (
    (f"jsonl:{tmp_path}/*.jsonl", [f"{index}.{row}" for index in range(7) for row in range(index + 1)]),
    ("tfds:written_text/en:train", WrittenText.texts("en", "train")),
    (
      "tfds:written_text/en:train[5:31]+validation",
      WrittenText.texts("en", "train")[5:31] + WrittenText.texts("en", "validation"),
    ),
  ):
    source = sources.open_source(name, options=Options(tfds_dir=tfds_dir))
    assert list(source.documents()) == list(source.documents()) == texts
    parts = pickle.loads(pickle.dumps(source.parts))
    assert len(parts) > 3 and len({part.name for part in parts}) == len(parts)
    for processes in (1, 2, 3, len(parts), 20):
      counts, found = Counts(), []
      for process in reversed(range(processes)):
        its = Counts()
        found.extend(text for part in parts[process::processes] for text in source.read(part, counts=its))
        counts.add(its)
      assert sorted(found) == sorted(texts) and counts == source.counts == Counts(len(texts), len(texts))


NOISE, FIRST = random.Random(0).randbytes(1000), b'{"text": "x"}\n'
BAD_FILES = {
  "empty.text": (b"", ": the file is empty"),
  "empty.jsonl": (b"", ": the file is empty"),
  "latin.text": (b"fine\ncaf\xe9\n", " line 2: not UTF-8"),
  "cut.text.gz": (gzip.compress(NOISE)[:500], " can't be read"),
  "cut.text.xz": (lzma.compress(NOISE)[:500], " can't be read"),
  "cut.text.zst": (zstd.compress(NOISE)[:500], " can't be read"),
  "plain.text.gz": (b"plain", " can't be read"),
  "plain.text.xz": (b"plain", " can't be read"),
  "plain.text.zst": (b"plain", " can't be read"),
  "broken.jsonl": (FIRST + b"{", " line 2: not JSON"),
  "list.jsonl": (FIRST + b"[1]", " line 2: of type list, not an object"),
  "key.jsonl": (FIRST + b'{"txt": "x"}', """ line 2: no key "text" (its keys: 'txt')"""),
  "nokey.jsonl": (FIRST + b"{}", ' line 2: no key "text" (its keys: none)'),
  "type.jsonl": (FIRST + b'{"text": 3}', ' line 2: "text" is of type int'),
  "latin.jsonl": (FIRST + b'{"text": "\xe9"}', " line 2: not UTF-8"),
  "half.jsonl": (FIRST + b'{"text": "\\ud800"}', ' line 2: "text" holds a lone surrogate'),
}


@pytest.mark.parametrize("place", ["local", "bucket"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_errors_in_files_name_key_value_file_and_line(tmp_path, bucket, name, place):
  content, part = BAD_FILES[name]
  (tmp_path / name).write_bytes(content)
  MEMORY.pipe(f"/bucket/{name}", content)
  path = f"{tmp_path}/{name}" if place == "local" else f"memory:///bucket/{name}"
  source = f"{name.split('.')[1]}:{path}"
  message = told(lambda: list(data.documents(source, "data.validation")))
  assert message.startswith(f"data.validation={source}: {path}{part}")
  if "can't be read" in part:  # nobody can tell how much is lost: no choice
    assert told(lambda: list(data.documents(source, "data.validation", SKIP))) == message
  else:
    assert message.endswith("; or set data.bad_records=skip to skip and count such records")


def test_skipped_records_are_counted_exactly_and_told_once(tmp_path, caplog):
  lines = [
    b'{"text": "1"}',
    b"",
    b"{",
    b'{"text": ""}',
    b"[1]",
    b'{"text": "2"}',
    b"{",
    b'{"text": "\xe9"}',
    b'{"text": 3}',
    b'{"txt": "x"}',
    b'{"text": "\\ud800"}',
    b'{"text": "3"}',
  ]
  (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
  (tmp_path / "b.jsonl").write_bytes(b"")
  (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(b"no\n" + jsonl(["4"])))
  source = sources.open_source(f"jsonl:{tmp_path}/*.jsonl*", "data.validation", SKIP)
  assert list(source.records()) == ["1", "", "", "", "2", "", "", "", "", "", "3", "", "", "4"]
  assert list(source.documents()) == ["1", "2", "3", "4"]
  assert source.counts == Counts(
    records=14,
    documents=4,
    empty=1,
    bad={
      "not JSON": 3,
      "not an object": 1,
      "not UTF-8": 1,
      'where "text" is not a string': 1,
      'without key "text"': 1,
      "with a lone surrogate": 1,
      "empty files": 1,
    },
    examples={
      "not JSON": f"{tmp_path}/a.jsonl line 3",
      "not an object": f"{tmp_path}/a.jsonl line 5",
      "not UTF-8": f"{tmp_path}/a.jsonl line 8",
      'where "text" is not a string': f"{tmp_path}/a.jsonl line 9",
      'without key "text"': f"{tmp_path}/a.jsonl line 10",
      "with a lone surrogate": f"{tmp_path}/a.jsonl line 11",
      "empty files": f"{tmp_path}/b.jsonl",
    },
  )
  assert source.counts.num_bad == 9
  (line,) = caplog.messages
  told_all = f"data.validation={source.source}: 9 of 14 records skipped as bad: 3 not JSON (first: "
  assert line.startswith(told_all)
  (tmp_path / "a.jsonl").write_bytes(b"{")
  (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(jsonl([""])))
  message = told(lambda: list(data.documents(source.source, options=SKIP)))
  assert "holds no text (2 of 3 records skipped as bad: 1 not JSON" in message


def test_a_corpus_keeps_the_counts_and_loses_nothing_uncounted(tmp_path, caplog):
  texts = [f"a line of text number {index} " * 3 for index in range(60)]
  (tmp_path / "a.jsonl").write_bytes(jsonl(texts[:30]) + b'{"text": 7}\n' + jsonl(["", *texts[30:]]))
  config = config_lib.DataConfig(
    source=f"jsonl:{tmp_path}/a.jsonl", cache_dir=str(tmp_path / "cache"), bad_records="skip"
  )
  corpus = data.load(config, 300, seed=0)
  assert corpus.train.splits[0].num_documents + corpus.validation.num_documents == 60
  assert len(caplog.messages) == 1 and "1 of 62 records skipped as bad" in caplog.text
  (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
  counts = json.loads(manifest.read_text())["records"]["data.source"]
  assert [counts[name] for name in ("records", "documents", "empty")] == [62, 60, 1]
  assert counts["bad"] == {'where "text" is not a string': 1}


@pytest.mark.parametrize(
  ("source", "part"),
  [
    (
      "buildin",
      "unknown kind of source; use one of builtin, text:GLOB, jsonl:GLOB, tfds:NAME/CONFIG:SPLIT, shards:DIR; "
      "nearest: builtin",
    ),
    ("shards:/data", "prepared shards hold tokens, but text is needed here; use one of builtin"),
    (
      "gs://bucket/a.jsonl",
      "unknown kind of source; use one of builtin, text:GLOB, jsonl:GLOB, "
      "tfds:NAME/CONFIG:SPLIT, shards:DIR; nearest: jsonl:gs://bucket/a.jsonl",
    ),
    (
      "tdfs:lm1b:train",
      "unknown kind of source; use one of builtin, text:GLOB, jsonl:GLOB, "
      "tfds:NAME/CONFIG:SPLIT, shards:DIR; nearest: tfds:lm1b:train",
    ),
    ("tfds:", "unknown kind"),
    ("jsonl:memory://bucket/*.jsonl", "no file matches memory://bucket/*.jsonl; give"),
    ("text:memory://bucket/deep", "memory:///bucket/deep is a directory"),
    ("text:foo://bucket/a", "foo:// is not a known protocol (Protocol not known: foo)"),
    ("text:s3://bucket/a", "s3:// needs a package that is not installed (Install s3fs"),
    ("", "unknown kind"),
    ("text:", "no file matches"),
    ("text:{}", "{} is a directory"),
    ("text:{}/a.jsonl,{}/*.none", "no file matches {}/*.none"),
    ("text:{}/loop", "{}/loop can't be read (Too many levels"),
    ("jsonl:{}/a.jsonl", "holds no text; give"),
  ],
)
def test_errors_in_sources_name_key_value_and_rule(tmp_path, bucket, monkeypatch, source, part):
  monkeypatch.setitem(sys.modules, "s3fs", None)
  MEMORY.pipe("/bucket/deep/a.txt", b"x")
  (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
  (tmp_path / "loop").symlink_to(tmp_path / "loop")
  source, part = source.replace("{}", str(tmp_path)), part.replace("{}", str(tmp_path))
  message = told(lambda: list(data.documents(source)))
  assert message.startswith(f"data.source={source}: {part}")


def test_a_bucket_that_fails_is_one_line(bucket, monkeypatch):
  MEMORY.pipe("/bucket/a.jsonl", jsonl(["x"]) * 3)

  def fail(*_, **__):
    raise RuntimeError("HTTP 403\nForbidden")

  source = sources.open_source(f"jsonl:{bucket}/a.jsonl")
  monkeypatch.setattr(type(MEMORY), "_open", fail)
  message = told(lambda: list(source.documents()))
  assert "memory:///bucket/a.jsonl can't be read (HTTP 403 Forbidden); check the network" in message
  monkeypatch.setattr(type(MEMORY), "info", fail)
  monkeypatch.setattr(type(MEMORY), "find", fail)
  message = told(lambda: sources.open_source(f"jsonl:{bucket}/*.jsonl"))
  assert "memory://bucket/*.jsonl can't be listed (HTTP 403 Forbidden)" in message


@pytest.mark.parametrize(
  "split,expected",
  [
    ("", slice(None)),
    (":train", slice(None)),
    (":1.0.0:train[:20%]", slice(10)),
    (":train[-3:]", slice(-3, None)),
    (":1.0.0", slice(None)),
    (":1.*.*:train[48:]", slice(48, None)),
  ],
)
def test_tfds_splits_and_versions(tfds_dir, split, expected):
  documents = data.documents(f"tfds:written_text/en{split}", options=Options(tfds_dir=tfds_dir))
  assert list(documents) == WrittenText.texts("en", "train")[expected]


def test_tfds_reads_another_feature_and_counts_what_is_not_utf8(tfds_dir, caplog):
  titles = data.documents("tfds:written_text/odd:validation", options=Options("title", tfds_dir=tfds_dir))
  assert list(titles) == ["title 0", "title 1", "title 2"]
  name = "tfds:written_text/odd:train"
  message = told(lambda: list(data.documents(name, options=Options(tfds_dir=tfds_dir))))
  where = "written_text/odd/1.0.0:train record 20"
  assert message.startswith(f"data.source={name}: {where}: 'text' is not UTF-8 (")
  source = sources.open_source(name, options=Options(tfds_dir=tfds_dir, bad_records="skip"))
  texts = ["" if isinstance(text, bytes) else text for text in WrittenText.texts("odd", "train")]
  assert list(source.records()) == texts
  assert source.counts == Counts(50, 47, 1, {"not UTF-8": 2}, {"not UTF-8": where})
  assert "2 of 50 records skipped as bad: 2 not UTF-8" in caplog.text


def test_tfds_fingerprints_follow_version_split_and_files(tmp_path):
  def fingerprint(name="tfds:written_text/en:train"):
    return data.fingerprint(name, options=Options(tfds_dir=str(tmp_path)))

  WrittenText(config="en", data_dir=tmp_path, file_format="array_record").download_and_prepare()
  first = fingerprint()
  assert first == fingerprint("tfds:written_text/en:1.0.0") != fingerprint("tfds:written_text/en:validation")
  (file,) = tmp_path.glob("**/*train.array_record*")
  os.utime(file, ns=(1, 1))
  touched = fingerprint()
  (tmp_path / "written_text/en/1.0.0").rename(tmp_path / "1.0.0")
  (tmp_path / "1.0.0").rename(tmp_path / "written_text/en/1.1.0")
  info = tmp_path / "written_text/en/1.1.0/dataset_info.json"
  info.write_text(info.read_text().replace('"1.0.0"', '"1.1.0"'))
  assert len({first, touched, fingerprint()}) == 3  # the newest version on disk is meant


@pytest.mark.parametrize(
  "name,part",
  [
    ("written_text/en:test", "written_text/en/1.0.0 has no split 'test' (Unknown split 'test'. Should be"),
    ("written_text/en:train[", "has no split 'train[' (Error parsing split"),
    ("written_text/en:train[:0]", "split 'train[:0]' of written_text/en/1.0.0 holds no records"),
    ("written_text/en:2.0.0", "written_text/en:2.0.0 is not in {}, and TFDS can't make it"),
    ("written_text/fr", "written_text/fr is not in {}, and TFDS can't make it"),
    ("wrtten_text/en", "wrtten_text/en is not in {}, and TFDS can't make it"),
    ("Written Text", "'Written Text' can't be opened in {} (Parsing builder name string"),
    (
      "failing_text/offline",
      "failing_text/offline/1.0.0 is not in {}; set data.download=True to download "
      "failing_text/offline/1.0.0 (of unknown size) and prepare it there, or set data.tfds_dir to the ",
    ),
    (
      "wiki40b/en",
      "wiki40b/en/1.3.0 (of unknown size) and prepare it there, run tfds "
      "build wiki40b/en --file_format=array_record --data_dir={}, or set data.tfds_dir to the directory",
    ),
  ],
)
def test_tfds_errors_name_key_value_and_way_out(tfds_dir, name, part):
  message = told(lambda: data.documents(f"tfds:{name}", options=Options(tfds_dir=tfds_dir)))
  assert message.startswith(f"data.source=tfds:{name}: ") and part.replace("{}", tfds_dir) in message
  if name.startswith("wrt"):
    assert message.endswith("nearest in the catalog: written_text")


def test_tfds_errors_in_options(tfds_dir):
  name = "tfds:written_text/en"
  for key in ("length", "body"):
    message = told(lambda: data.documents(name, options=Options(key, tfds_dir=tfds_dir)))
    assert message.startswith(f"data.text_key={key}: ") and message.endswith("use one of text, title")
  message = told(lambda: data.documents(name, options=Options(tfds_dir="gs://bucket")))
  assert message.startswith("data.tfds_dir=gs://bucket: ") and "gcsfuse" in message


def test_tfds_downloads_when_told_to_and_says_so(tmp_path, caplog, capfd):
  options = Options(tfds_dir=str(tmp_path), download=True)
  assert list(data.documents("tfds:written_text/en:validation", options=options)) == WrittenText.texts(
    "en", "validation"
  )
  assert caplog.messages == [
    "data.source=tfds:written_text/en:validation: downloading written_text/en/1.0.0 (of unknown size) "
    f"and preparing it in {tmp_path}"
  ]
  assert capfd.readouterr().out == ""
  message = told(lambda: data.documents("tfds:failing_text/offline", options=options))
  assert f"can't be downloaded to {tmp_path} (ConnectionError: Max retries exceeded); check the" in message
  message = told(lambda: data.documents("tfds:failing_text/beam", options=options))
  assert "can't be prepared without no_such_apache_beam; prepare it once on a machine that has it" in message


def test_tfds_files_that_are_damaged_gone_or_of_another_format(tmp_path):
  def documents():
    return data.documents("tfds:written_text/en", options=Options(tfds_dir=str(tmp_path), bad_records="skip"))

  WrittenText(config="en", data_dir=tmp_path, file_format="array_record").download_and_prepare()
  (file,) = tmp_path.glob("**/*train.array_record*")
  content = file.read_bytes()
  file.write_bytes(content[:100] + bytes(len(content) - 100))
  assert "can't be read" in told(lambda: list(documents()))
  file.unlink()
  assert "can't be read (No such file or directory); remove it and prepare" in told(documents)
  info = file.parent / "dataset_info.json"
  info.write_text(info.read_text().replace("array_record", "tfrecord"))
  message = told(documents)
  assert "as tfrecord, which needs TensorFlow; prepare it again with tfds build written_text/en" in message


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
  presets.CORPORA["wikitext103"](config)
  options = Options(tfds_dir=str(tmp_path / "tfds"), download=config.data.download)
  assert list(data.documents(config.data.source, options=options)) == [head, parts[1] + parts[2], parts[3]]
  assert list(data.documents(config.data.validation, options=options)) == parts[:1]
  assert list(data.documents("tfds:wikitext103:test", options=options)) == parts[3:]
  assert len(urls) == 1  # the first use prepares all splits


def in_subprocess(code):
  """Runs code in a fresh Python and returns what it printed."""
  code = "import sys\n" + textwrap.dedent(code)
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent.parent
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_tfds_is_read_without_tensorflow(tfds_dir):
  printed = in_subprocess(f"""
    from diffeq_nnx.data import sources
    options = sources.Options(tfds_dir={tfds_dir!r})
    documents = list(sources.documents("tfds:written_text/en", options=options))
    print(len(documents), "tensorflow_datasets" in sys.modules, "tensorflow" in sys.modules)
  """)
  assert printed == "50 True False\n"


def test_tfds_is_needed_only_where_it_is_named():
  printed = in_subprocess("""
    sys.modules["tensorflow_datasets"] = None
    from diffeq_nnx.data import sources
    list(sources.documents("builtin"))
    try:
      sources.documents("tfds:lm1b")
    except sources.UserError as error:
      print(error)
  """)
  assert printed == (
    "data.source=tfds:lm1b: needs tensorflow_datasets, which is not installed; run pip install 'diffeq-nnx[tfds]'\n"
  )


@pytest.mark.parametrize("suffix", OPENERS)
def test_memory_stays_flat(tmp_path, suffix):
  """50 MB of text, of which the largest document has 1 MB, in less than 12 MB."""
  rng = random.Random(0)
  lines = jsonl(f"{rng.random()} " * (50_000 if row == 200 else 500) for row in range(400))
  opener = (lambda path, mode: gzip.open(path, mode, compresslevel=1)) if suffix == ".gz" else OPENERS[suffix]
  with opener(tmp_path / f"a.jsonl{suffix}", "wb") as file:
    for _ in range(50_000_000 // len(lines)):
      file.write(lines)
  printed = in_subprocess(f"""
    import tracemalloc
    from diffeq_nnx.data import sources
    tracemalloc.start()
    size = sum(len(text) for text in sources.documents("jsonl:{tmp_path}/*"))
    print(size, tracemalloc.get_traced_memory()[1])
  """)
  size, peak = map(int, printed.split())
  assert size > 40_000_000 and peak < 12_000_000


@pytest.mark.parametrize("num_records,fraction,seed", [(1000, 0.0005, 2357), (1001, 0.1, 0), (7, 0.5, 3)])
def test_the_permutation_split_is_that_of_hf_datasets(num_records, fraction, seed):
  """From the definition: shuffle all indices, the first ceil(fraction n) are held out, the rest train."""
  shuffled = np.random.default_rng(seed).permutation(num_records).tolist()
  num_test = -int(-(fraction * num_records) // 1)
  test, train = shuffled[:num_test], shuffled[num_test:]
  config = config_lib.DataConfig(validation_split="permutation", validation_fraction=fraction)
  present = np.arange(num_records) != train[0]  # an empty one moves no other
  sides = holdout.sides(present, config, seed)
  assert np.flatnonzero(sides == holdout.SIDES["validation"]).tolist() == sorted(test)
  assert np.flatnonzero(sides == holdout.SIDES["train"]).tolist() == sorted(train[1:])
  assert holdout.permuted(num_records, fraction, seed).tolist() == test


def test_openwebtext_holds_out_as_many_documents_as_nanogpt():
  """Its data/openwebtext/prepare.py gives 8,009,762 for training and 4,007 for validation."""
  config = config_lib.default()
  presets.CORPORA["openwebtext"](config)
  config = config_lib.from_config_dict(config).data
  held_out = holdout.permuted(8_013_769, config.validation_fraction, config.validation_seed)
  assert (config.validation_split, config.validation_seed, len(held_out)) == ("permutation", 2357, 4007)


def test_a_split_that_leaves_one_side_empty_is_refused():
  config = config_lib.DataConfig(source="text:x", validation_split="permutation", validation_fraction=0.9)
  message = told(lambda: holdout.sides(np.ones(2, np.bool_), config, 0))
  assert message.startswith("data.source=text:x: 2 documents can't be divided") and "permutation" in message
