"""Parquet files, and data sets of the Hugging Face hub and of folders: the records of JSON lines, in columns."""

import os
import pickle
import shutil
import time

from huggingface_hub import HfFileSystem
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffeq_nnx import data
from diffeq_nnx.data import sources
from diffeq_nnx.data.sources import Counts, Options, hub, parquet
from tests.conftest import Lazy, told
from tests.hub_server import COMMIT, serving
from tests.test_data import prose, write_jsonl

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
    write_jsonl(folder / "lines" / f"{name}.jsonl", records_of(part))
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

  reads, iter_batches = [], pq.ParquetFile.iter_batches

  def spy(*arguments, **options):
    reads.append(options)
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
  # one row group at a time, and of it the needed column; with threads a program that stops reading while they read is
  # aborted, or never ends, mostly with large files
  assert len(reads) == 2 * (1 + 10 + 10)
  assert all(len(one["row_groups"]) == 1 and one["columns"] == ["text"] and not one["use_threads"] for one in reads)
  assert len(sources.open_source(corpus["parquet"]).parts) == 6 + 4
  test = corpus["saved splits"].replace(":train", ":test")
  assert list(data.documents(test, options=Options(text_key="other"))) == ["x" * 50]


def forms_of(records, folder):
  """Sources with these records: a folder of Parquet by two ways, one of JSON lines, and a saved data set."""
  write_parquet(folder / "parquet" / "a.parquet", records)
  (folder / "lines").mkdir()
  write_jsonl(folder / "lines" / "a.jsonl", records)
  datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
  return [f"parquet:{folder}/parquet/*", *(f"hf:{folder}/{name}" for name in ("parquet", "lines", "saved"))]


def test_a_record_in_columns_is_the_one_that_json_lines_hold(tmp_path, monkeypatch):
  """Tools too; without fields of a struct that it lacks; with values of several types where `datasets` writes JSON."""
  turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0.5}]
  pair = {"prompt": "ask", "completion": "answer"}
  chats = [{"messages": turns, "tools": None}, {"messages": turns[:1], "tools": [{"name": "look"}]}]
  chats = [{**one, "chat_template_kwargs": {"thinking": False}} for one in chats]
  records = [{**chat, "id": 1, **pair} for chat in chats]
  mixed = [{"messages": [{"role": "user", "content": value}], "id": 1} for value in ("x", ["y"], {"z": 1}, 2)]
  seen = []
  monkeypatch.setattr(parquet.records, "read_document", lambda record, options: str(seen.append(record)))
  options = Options(records="chat", chat_template="-")
  for source in forms_of(records, tmp_path / "plain"):
    seen.clear()
    assert len(list(data.documents(source, options=options))) == 2
    assert seen == chats
    seen.clear()
    assert len(list(data.documents(source, options=Options(records="completion")))) == 2
    assert seen == [pair, pair]
  (tmp_path / "mixed").mkdir()
  write_jsonl(tmp_path / "mixed" / "a.jsonl", mixed)
  datasets.load_dataset(str(tmp_path / "mixed"), split="train").to_parquet(tmp_path / "json.parquet")
  for source in (f"hf:{tmp_path}/mixed", f"parquet:{tmp_path}/json.parquet"):
    seen.clear()
    list(data.documents(source, options=options))
    assert seen == [{"messages": one["messages"]} for one in mixed]
  calls = pa.array(
    [[{"arguments": [("a", "1")]}]], pa.list_(pa.struct({"arguments": pa.map_(pa.string(), pa.string())}))
  )
  pq.write_table(pa.table({"messages": calls}), tmp_path / "map.parquet")
  seen.clear()
  list(data.documents(f"parquet:{tmp_path}/map.parquet", options=options))
  assert seen == [{"messages": [{"arguments": {"a": "1"}}]}]


def test_a_change_behind_a_link_to_a_folder_is_noticed(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "folder" / "data").symlink_to(tmp_path / "elsewhere")
  (tmp_path / "folder" / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: data/train*}]\n---\n")
  states = []
  for word in ("first", "second"):
    write_jsonl(tmp_path / "elsewhere" / "train.jsonl", [{"text": word}])
    states.append(sources.open_source(f"hf:{tmp_path}/folder").fingerprint())
  assert states[0] != states[1]


def bad_text():
  """A column that says it is text; the second of its three values is none."""
  return pa.Array.from_buffers(pa.string(), 3, pa.array([b"fine", b"caf\xe9", b"end"]).buffers())


def test_bad_rows_are_named_or_counted(tmp_path, caplog):
  folder = tmp_path / "a"
  write_parquet(folder / "0.parquet", records_of(["one", None, "three", None]), rows=2)
  pq.write_table(pa.table({"text": bad_text()}), folder / "1.parquet")
  write_parquet(folder / "2.parquet", [{"text": 5}, {"text": 6}])
  name = f"parquet:{folder}/*"
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


def test_files_that_are_no_whole_parquet_file_are_errors(tmp_path):
  write_parquet(tmp_path / "whole.parquet", records_of(TEXTS))
  whole = (tmp_path / "whole.parquet").read_bytes()
  group = pq.read_metadata(tmp_path / "whole.parquet").row_group(2).column(1)
  start = group.dictionary_page_offset or group.data_page_offset
  changed = whole[: start + 30] + bytes(30) + whole[start + 60 :]
  for content, part in (
    (b'{"text": "x"}\n' * 99, "is not a Parquet file; name Parquet files"),
    (whole[: len(whole) // 2], "can't be read (Parquet magic bytes not found in footer"),
    (changed, "can't be read ("),
  ):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    message = told(lambda: list(data.documents(f"parquet:{path}", options=SKIP)))
    assert message.startswith(f"data.source=parquet:{path}: {path} {part}")


def test_a_missing_column_is_an_error_that_names_the_key_and_the_columns(corpus, folder):
  for form, name in corpus.items():
    message = told(lambda name=name: list(data.documents(name, options=Options(text_key="body"))))
    assert message.startswith(f"data.source={name}: {folder}/"), form
    assert '"body"' in message and "'id', 'text', 'other'" in message, form
    assert f"; data.text_key names the {'key' if form == 'jsonl' else 'column'}" in message, form


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
    write_jsonl(root / "org" / "lines" / f"{number}.jsonl", records_of(texts))
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
  assert list(lines.records()) == TEXTS and all(COMMIT in part.read.args[1] for part in lines.parts)
  for name, texts in (("two:en", ["en"]), ("two:de:train", ["de"]), (f"two@{COMMIT}:de", ["de"])):
    assert list(data.documents(f"hf:org/{name}")) == texts
  monkeypatch.setenv("HF_TOKEN", "secret")
  assert [list(data.documents(f"hf:org/{name}:test")) for name in ("private", "gated")] == [["held"]] * 2
  seen = {source.fingerprint(), data.open_source("hf:org/plain:test").fingerprint()}
  assert data.open_source("hf:org/plain@main:train").fingerprint() in seen
  served.commit = "1" * 40  # the branch has moved, and the files are the same
  assert data.open_source("hf:org/plain").fingerprint() == source.fingerprint()
  shutil.copy(served.root / "org/plain/data/test-0.parquet", served.root / "org/plain/data/train-9.parquet")
  served.commit = "2" * 40
  assert data.open_source("hf:org/plain").fingerprint() not in seen and not source.has_changed()


def test_what_the_hub_refuses_is_said_with_a_remedy_and_a_network_that_goes_is_told(served, monkeypatch):
  for name, *parts in (
    ("./none", "there is no folder"),
    ("org/none", "the hub has no such data set; correct the name", "HF_TOKEN"),
    ("org/gated", "this data set is behind a gate", "ask for access", "HF_TOKEN"),
    ("a/b/c", "can't be fetched from the hub ("),
    ("org/two", "can't be opened (", "'en', 'de'"),
    ("org/two:fr:train", "has no configuration 'fr'; it has: en, de"),
    ("org/plain:all", "has no split 'all'; use one of train, test"),
  ):
    message = told(lambda name=name: data.open_source(f"hf:{name}"))
    assert message.startswith(f"data.source=hf:{name}: ") and all(part in message for part in parts), message
  source = sources.open_source("hf:org/plain")
  monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between its attempts
  served.shutdown()
  served.server_close()
  message = told(lambda: list(source.documents()))
  assert "train-0.parquet can't be read (" in message and "; check the network" in message
