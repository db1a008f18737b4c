"""Parquet files, and data sets of the Hugging Face hub and of folders: the records of JSON lines, in columns."""

import io
import os
import pickle
import random
import sys
import time

import fsspec
from huggingface_hub import HfFileSystem
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffeq_nnx import data
from diffeq_nnx.data import sources
from diffeq_nnx.data.sources import Counts, Options, hub, parquet
from tests import test_masks
from tests.conftest import Lazy, told
from tests.hub_server import COMMIT, serving
from tests.test_data import prose

datasets = Lazy("datasets")

SKIP = Options(bad_records="skip")
TEXTS = [*prose(60), "", "drei \u2581 \u00fc\r\n", "\U0001f642"]


def write_parquet(path, records, rows=7):
  """Row groups of seven records."""
  path.parent.mkdir(parents=True, exist_ok=True)
  pq.write_table(pa.Table.from_pylist(records), path, row_group_size=rows)


def records_of(texts):
  return [{"id": number, "text": text, "other": "x" * 50} for number, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_datasets")
  monkeypatch.setattr(hub, "ROWS_PER_SHARD", 16)
  monkeypatch.setattr(hub, "BATCH_ROWS", 5)
  monkeypatch.setattr(parquet, "BATCH_ROWS", 3)
  datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def corpus(folder):
  """The same documents in each form: sources by name."""
  for name, part in (("0", TEXTS[:40]), ("1", TEXTS[40:])):
    write_parquet(folder / "parquet" / f"{name}.parquet", records_of(part))
    (folder / "lines").mkdir(exist_ok=True)
    test_masks.write(folder / "lines" / f"{name}.jsonl", records_of(part))
  whole = datasets.Dataset.from_list(records_of(TEXTS))
  whole.save_to_disk(folder / "saved")
  datasets.DatasetDict({"train": whole, "test": whole.select([3])}).save_to_disk(folder / "splits")
  return {
    "jsonl": f"jsonl:{folder}/lines/*.jsonl",
    "parquet": f"parquet:{folder}/parquet/*.parquet",
    "folder of parquet": f"hf:{folder}/parquet",
    "folder of lines": f"hf:{folder}/lines:train",
    "saved": f"hf:{folder}/saved",
    "saved splits": f"hf:{folder}/splits:train",
  }


def test_every_form_of_the_same_records_gives_the_same_documents(corpus, monkeypatch):
  from datasets.packaged_modules.parquet.parquet import Parquet

  threads, iter_batches = [], pq.ParquetFile.iter_batches

  def spy(*arguments, **options):
    threads.append(options["use_threads"])
    return iter_batches(*arguments, **options)

  monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
  monkeypatch.setattr(Parquet, "_generate_tables", None)
  for form, name in corpus.items():
    source = sources.open_source(name)
    assert next(source.records()) == TEXTS[0], form  # reading may stop early
    assert list(source.records()) == TEXTS, form
    assert source.counts == Counts(len(TEXTS), len(TEXTS) - 1, 1), form
    parts, read = pickle.loads(pickle.dumps((source.parts, source.read)))
    hub._open.cache_clear()  # as in another process
    assert [text for part in parts for text in read(part, counts=Counts())] == TEXTS, form
    assert len({part.name for part in parts}) == len(parts) >= 2, form
    assert all(part.size > 0 for part in parts), form
  # with threads a program that stops reading while they read is aborted, or never ends, mostly with large files
  assert len(threads) == 2 * (1 + 10 + 10) and not any(threads)
  assert len(sources.open_source(corpus["parquet"]).parts) == 6 + 4
  test = corpus["saved splits"].replace(":train", ":test")
  assert list(data.documents(test, options=Options(text_key="other"))) == ["x" * 50]


class CountingFile(io.FileIO):
  """A file that adds the ranges of bytes that are read to a list."""

  ranges = []

  def read(self, size=-1):
    start = self.tell()
    content = super().read(size)
    self.ranges.append((start, start + len(content)))
    return content


def test_one_row_group_is_read_at_a_time_and_of_it_the_needed_columns(tmp_path, monkeypatch):
  """By the ranges of bytes that are read while the documents of a part are taken."""
  noise, path, read = random.Random(0), tmp_path / "a.parquet", CountingFile.ranges
  make = lambda: noise.randbytes(5000).hex()
  write_parquet(path, [{"id": number, "text": make(), "other": make()} for number in range(63)], rows=21)
  monkeypatch.setattr(parquet.files, "open_bytes", CountingFile)
  source = sources.open_source(f"parquet:{path}")
  chunks = [pq.read_metadata(path).row_group(index).column(1) for index in range(3)]
  end = path.stat().st_size - 2**16  # with the footer pyarrow reads what is before it
  assert all(stop == 4 or start >= end for start, stop in read) and len(source.parts) == 3
  for part, chunk in zip(source.parts, chunks):
    read.clear()
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    assert len(list(source.read(part, counts=Counts()))) == 21
    inside = [(start, stop) for start, stop in read if 4 <= start < end]
    assert inside and all(first <= start and stop <= first + chunk.total_compressed_size for start, stop in inside)


def forms_of(records, folder):
  """Sources with these records: a folder of Parquet by two ways, one of JSON lines, and a saved data set."""
  write_parquet(folder / "parquet" / "a.parquet", records)
  (folder / "lines").mkdir()
  test_masks.write(folder / "lines" / "a.jsonl", records)
  datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
  return [f"parquet:{folder}/parquet/*", *(f"hf:{folder}/{name}" for name in ("parquet", "lines", "saved"))]


def test_a_record_in_columns_is_the_one_that_json_lines_hold(tmp_path, monkeypatch):
  """Without the fields of a struct that it lacks, and with values of several types where `datasets` writes JSON."""
  turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0.5}]
  pair = {"prompt": "ask", "completion": "answer"}
  records = [{"messages": turns, "id": 1, **pair}, {"messages": turns[:1], "id": 2, **pair}]
  mixed = [{"messages": [{"role": "user", "content": value}], "id": 1} for value in ("x", ["y"], {"z": 1}, 2)]
  seen = []
  monkeypatch.setattr(parquet, "read_document", lambda record, options: str(seen.append(record)))
  options = Options(records="chat", chat_template="")
  for source in forms_of(records, tmp_path / "plain"):
    seen.clear()
    assert len(list(data.documents(source, options=options))) == 2
    assert seen == [{"messages": one["messages"]} for one in records]
    seen.clear()
    assert len(list(data.documents(source, options=Options(records="completion")))) == 2
    assert seen == [pair, pair]
  (tmp_path / "mixed").mkdir()
  test_masks.write(tmp_path / "mixed" / "a.jsonl", mixed)
  datasets.load_dataset(str(tmp_path / "mixed"), split="train").to_parquet(tmp_path / "json.parquet")
  for source in (f"hf:{tmp_path}/mixed", f"parquet:{tmp_path}/json.parquet"):
    seen.clear()
    list(data.documents(source, options=options))
    assert seen == [{"messages": one["messages"]} for one in mixed]


def test_tools_of_a_conversation_in_a_column_of_their_own_are_told(tmp_path):
  turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
  records = [{"messages": turns, "tools": None}, {"messages": turns, "tools": [{"name": "look"}]}]
  options = Options(records="chat", chat_template=test_masks.TEMPLATE, bad_records="skip")
  for source in forms_of(records, tmp_path):
    opened = sources.open_source(source, options=options)
    assert len([one for one in opened.documents() if one]) == 1 and opened.counts.bad == {"with tools": 1}


def bad_text():
  """A column that says it is text; the second of its three values is none."""
  return pa.Array.from_buffers(pa.string(), 3, pa.array([b"fine", b"caf\xe9", b"end"]).buffers())


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_bad_rows_are_named_or_counted(tmp_path, form, caplog):
  folder = tmp_path / "a"
  write_parquet(folder / "0.parquet", records_of(["one", None, "three", None]), rows=2)
  pq.write_table(pa.table({"text": bad_text()}), folder / "1.parquet")
  write_parquet(folder / "2.parquet", [{"text": 5}, {"text": 6}])
  name = f"parquet:{folder}/*" if form == "parquet" else f"hf:{folder}"
  message = told(lambda: list(data.documents(name)))
  place = f"{folder}/0.parquet row 2"
  assert message.startswith(f'data.source={name}: {place}: "text" is of type NoneType, not a string; each record must')
  assert message.endswith("; or set data.bad_records=skip to skip and count such records")
  source = sources.open_source(name, options=SKIP)
  assert [text for text in source.records() if text] == ["one", "three", "fine", "end"]
  assert source.counts.bad == {'where "text" is not a string': 4, "not UTF-8": 1}
  assert source.counts.records == 9 and "5 of 9 records skipped" in caplog.text
  assert source.counts.examples["not UTF-8"].endswith("1.parquet row 2")
  message = told(lambda: list(data.documents(f"parquet:{folder}/2.parquet")))
  assert f'{folder}/2.parquet row 1: "text" is of type int, not a string' in message


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_files_that_are_no_whole_parquet_file_are_errors(tmp_path, place):
  write_parquet(tmp_path / "whole.parquet", records_of(TEXTS))
  whole = (tmp_path / "whole.parquet").read_bytes()
  group = pq.read_metadata(tmp_path / "whole.parquet").row_group(2).column(1)
  start = group.dictionary_page_offset or group.data_page_offset
  changed = whole[: start + 30] + bytes(30) + whole[start + 60 :]
  for content, part in (
    (b"", "is not a Parquet file; name Parquet files"),
    (b'{"text": "x"}\n' * 99, "is not a Parquet file; name Parquet files"),
    (whole[: len(whole) // 2], "can't be read (Parquet magic bytes not found in footer"),
    (whole[:6], "can't be read ("),
    (changed, "can't be read ("),
  ):
    (tmp_path / "a.parquet").write_bytes(content)
    fsspec.filesystem("memory").pipe("/bucket/a.parquet", content)
    path = f"{tmp_path}/a.parquet" if place == "local" else "memory:///bucket/a.parquet"
    message = told(lambda: list(data.documents(f"parquet:{path}", options=SKIP)))
    assert message.startswith(f"data.source=parquet:{path}: {path} {part}")
    assert message.count("damaged or truncated") == (place == "local" and "can't be read" in part)
  fsspec.filesystem("memory").store.clear()


def test_a_missing_column_is_an_error_that_names_the_key_and_the_columns(corpus, folder):
  for form, name in corpus.items():
    for key, column, options in (
      ("text_key", "body", Options(text_key="body", bad_records="error")),
      ("prompt_key", "prompt", Options(records="completion")),
      ("messages_key", "messages", Options(records="chat", chat_template="")),
    ):
      message = told(lambda name=name, options=options: list(data.documents(name, options=options)))
      assert message.startswith(f"data.source={name}: {folder}/"), form
      assert f'"{column}"' in message and "'id', 'text', 'other'" in message, form
      assert f"; data.{key} names the {'key' if form == 'jsonl' else 'column'}" in message, form


@pytest.mark.parametrize(
  "source,part",
  [
    ("hf:./none", "there is no folder"),
    ("hf:{}/parquet:test", "{}/parquet has no split 'test'; use one of train"),
    ("hf:{}/splits:test[:1]:x", "{}/splits has no configuration 'test[:1]'; it has: none"),
    ("hf:{}/splits:validation", "{}/splits has no split 'validation'; use one of train, test"),
    ("hf:{}/empty", "{}/empty can't be opened ("),
  ],
)
def test_errors_in_data_sets_name_what_is_there(corpus, folder, source, part):
  (folder / "empty").mkdir(exist_ok=True)
  source, part = source.replace("{}", str(folder)), part.replace("{}", str(folder))
  message = told(lambda: data.open_source(source))
  assert message.startswith(f"data.source={source}: {part}")


def test_without_the_packages_one_line_says_what_to_install(corpus, monkeypatch):
  for form, missing in (("parquet", "pyarrow.parquet"), ("saved", "datasets")):
    with monkeypatch.context() as patched:
      patched.setitem(sys.modules, missing, None)
      message = told(lambda form=form: data.open_source(corpus[form]))
    assert message.endswith("which is not installed; run pip install 'diffeq-nnx[hf]'")


def test_fingerprints_follow_files_splits_and_columns(tmp_path):
  path = tmp_path / "parquet" / "a.parquet"
  for source in (f"parquet:{path}", f"hf:{path.parent}"):
    write_parquet(path, records_of(TEXTS[:10]))
    seen = [data.open_source(source, options=Options(text_key=key)).fingerprint() for key in ("text", "other")]
    os.utime(path, ns=(1, 1))
    seen.append(data.open_source(source).fingerprint())
    write_parquet(path, records_of(TEXTS[:9]))
    seen.append(data.open_source(source).fingerprint())
    assert seen[-1] == data.open_source(source).fingerprint() and len(set(seen)) == 4
    assert len(list(data.open_source(source).records())) == 9


def test_a_folder_whose_readme_names_other_files_is_refused(tmp_path):
  (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
  folder = tmp_path / "given"
  folder.mkdir()
  (folder / "a.jsonl").write_text('{"text": "x"}\n')
  for pattern in (f"{tmp_path}/secret.jsonl", "../secret.jsonl"):
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {pattern}\n---\n")
    message = told(lambda: list(data.documents(f"hf:{folder}")))
    assert message.startswith(f"data.source=hf:{folder}: its README.md names {tmp_path}/") and "outside" in message


@pytest.fixture
def served(tmp_path, monkeypatch):
  """A hub with five data sets, of which one has two configurations, and one is of JSON lines."""
  root = tmp_path / "served"
  for name in ("plain", "private", "gated"):
    for file, texts in (("train-0", TEXTS[:30]), ("train-1", TEXTS[30:]), ("test-0", ["held"])):
      write_parquet(root / "org" / name / "data" / f"{file}.parquet", records_of(texts))
  for name in ("en", "de"):
    write_parquet(root / "org" / "two" / name / "train.parquet", records_of([name]))
  (root / "org" / "lines").mkdir()
  for number, texts in enumerate((TEXTS[:30], TEXTS[30:])):
    test_masks.write(root / "org" / "lines" / f"{number}.jsonl", records_of(texts))
  lines = [f"- config_name: {name}\n  data_files: {name}/*.parquet" for name in ("en", "de")]
  (root / "org" / "two" / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
  with serving(root, tmp_path / "cache") as server:
    for name, value in {
      "HF_ENDPOINT": server.url,
      "HF_HUB_OFFLINE": False,
      "HF_UPDATE_DOWNLOAD_COUNTS": False,
      "HUB_DATASETS_URL": server.url + "/datasets/{repo_id}/resolve/{revision}/{path}",
    }.items():
      monkeypatch.setattr(datasets.config, name, value)
    HfFileSystem.clear_instance_cache()
    yield server
    HfFileSystem.clear_instance_cache()


def test_a_data_set_of_the_hub_is_streamed_at_the_commit_of_its_revision(served, monkeypatch):
  source = sources.open_source("hf:org/plain")
  assert [part.name.split("/data/")[0] for part in source.parts] == [f"hf://datasets/org/plain@{COMMIT}"] * 2
  assert list(source.records()) == TEXTS
  assert list(data.documents("hf:org/plain@main:test")) == ["held"]
  lines = sources.open_source("hf:org/lines@main")
  assert list(lines.records()) == TEXTS and [part.revision for part in lines.parts] == [COMMIT] * 2
  for name, texts in (("two:en", ["en"]), ("two:de:train", ["de"]), (f"two@{COMMIT}:de", ["de"])):
    assert list(data.documents(f"hf:org/{name}")) == texts
  monkeypatch.setenv("HF_TOKEN", "secret")
  assert [list(data.documents(f"hf:org/{name}:test")) for name in ("private", "gated")] == [["held"]] * 2
  seen = {source.fingerprint(), data.open_source("hf:org/plain:test").fingerprint()}
  assert data.open_source("hf:org/plain@main:train").fingerprint() in seen
  served.commit = "1" * 40  # the branch has moved
  assert data.open_source("hf:org/plain").fingerprint() not in seen


def test_what_the_hub_refuses_is_said_with_a_remedy(served):
  for name, *parts in (
    ("org/none", "the hub has no such data set; correct the name", "HF_TOKEN"),
    ("org/gated", "this data set is behind a gate", "ask for access", "HF_TOKEN"),
    ("a/b/c", "can't be fetched from the hub ("),
    ("org/two", "can't be opened (", "'en', 'de'"),
    ("org/two:fr", "can't be opened (", "'en', 'de'"),
    ("org/two:fr:train", "has no configuration 'fr'; it has: en, de"),
    ("org/plain:all", "has no split 'all'; use one of train, test"),
  ):
    message = told(lambda name=name: data.open_source(f"hf:{name}"))
    assert message.startswith(f"data.source=hf:{name}: ") and all(part in message for part in parts), message


def test_without_a_network_one_line_says_so(served, monkeypatch):
  source = sources.open_source("hf:org/plain")
  monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between its attempts
  served.shutdown()
  served.server_close()
  message = told(lambda: data.open_source("hf:org/plain"))
  assert "it can't be fetched from the hub (" in message and message.endswith("to the network, or name a folder")
  message = told(lambda: list(source.documents()))
  assert "train-0.parquet can't be read (" in message and "; check the network" in message
