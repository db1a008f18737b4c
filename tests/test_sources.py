"""What sources promise: each record once or counted, in one order, in parts, flat memory, one-line errors."""

import bz2
import functools
import gzip
import json
import lzma
import pathlib
import random
import sys
import tracemalloc
import types

import fsspec
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.data import sources
from diffeq_nnx.data.preparation import preparing
from diffeq_nnx.data.sources import Counts, Options, files
from diffeq_nnx.data.sources.compressed import zstd  # the standard one, or its backport
from tests.conftest import told

SKIP = Options(bad_records="skip")
COMPRESS = {
  ".gz": lambda content: gzip.compress(content, 1),
  ".xz": lambda content: lzma.compress(content, preset=0),
  ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE, preset=0),
  ".bz2": lambda content: bz2.compress(content, 1),
  ".zst": lambda content: zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1}),
}
SKIPPED = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"aside"  # a frame of zstd that holds no content
BETWEEN = {".gz": bytes(7), ".xz": bytes(8), ".zst": SKIPPED}  # what may stand after a member
MEMORY = fsspec.filesystem("memory")
NOISE = random.Random(0).randbytes(1000)


def fingerprint(*arguments, **options):
  return data.open_source(*arguments, **options).fingerprint()


def jsonl(texts, key="text"):
  return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


@pytest.fixture
def bucket():
  """The URL of an empty folder of fsspec's in-memory file system, in place of a bucket."""
  yield "memory:///bucket"
  MEMORY.store.clear()


@pytest.fixture(params=["local", "bucket"])
def root(request, tmp_path, bucket):
  """An empty folder or bucket."""
  return str(tmp_path) if request.param == "local" else bucket


def write(path, content):
  """Writes a file in a folder or a bucket."""
  with fsspec.open(path, "wb", auto_mkdir=True) as file:
    file.write(content)
  return path


def test_compressed_and_plain_files_read_alike_in_sorted_order(root):
  texts = ["one\r\ntwo", "drei \u2581 ü", "\U0001f642", "vier\n", "five", "six"]
  for index, (text, (suffix, compress)) in enumerate(zip(texts, [("", bytes), *COMPRESS.items()])):
    record = json.dumps({"text": text, "other": 1}).encode() + b"\n\n"
    write(f"{root}/{index}.txt{suffix}", compress(text.encode()))
    write(f"{root}/deep/{index}.jsonl{suffix}", compress(record))
  assert list(data.documents(f"text:{root}/*.txt*")) == texts
  assert list(data.documents(f"jsonl:{root}/**/*.jsonl*")) == texts
  assert list(data.documents(f"jsonl:{root}/deep/2.jsonl*, {root}/deep/[013-5].jsonl*")) == texts


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_member_of_a_file_is_read_or_a_later_one_that_is_damaged_is_an_error(tmp_path, suffix):
  """With what each format allows between members and at the end; the last is larger than one read.

  Damaged: a byte of a header, what is no member at all, an end that is missing, and a changed checksum.
  """
  texts = ["a", "b", NOISE.hex() * 300]
  between = BETWEEN.get(suffix, b"")
  path = write(f"{tmp_path}/a.jsonl{suffix}", b"".join(COMPRESS[suffix](jsonl([text])) + between for text in texts))
  assert list(data.documents(f"jsonl:{path}")) == texts
  first, second = (COMPRESS[suffix](jsonl([text])) for text in "ab")
  header = bytes([second[0] ^ 0x55]) + second[1:]
  checked = second[:-5] + bytes([second[-5] ^ 1]) + second[-4:] if suffix == ".gz" else second[:-4] + bytes(4)
  path = tmp_path / f"a.jsonl{suffix}"
  for later in (header, b"g", b"garbage" * 9, second[:3], second[:-3], checked, bytes(3) + header):
    path.write_bytes(first + later)
    message = told(lambda: list(data.documents(f"jsonl:{path}")))
    assert f"{path} can't be read (" in message and message.endswith("; it is damaged or truncated: restore it")
  if suffix != ".gz":  # which allows any number of zeros
    path.write_bytes(first + bytes(3) + second)
    assert "can't be read (" in told(lambda: list(data.documents(f"jsonl:{path}")))


@pytest.mark.parametrize("suffix", [".xz", ".bz2", ".zst"])
def test_a_damaged_later_member_is_an_error_in_a_folder_of_datasets_too(tmp_path, suffix):
  first, second = (COMPRESS[suffix](jsonl([text] * 50)) for text in "ab")
  path = pathlib.Path(write(f"{tmp_path}/data/a.jsonl{suffix}", first + second))
  assert len(list(data.documents(f"hf:{path.parent}"))) == 100
  path.write_bytes(first + bytes([second[0] ^ 1]) + second[1:])
  assert "can't be" in told(lambda: list(data.documents(f"hf:{path.parent}")))


def test_a_file_with_several_names_is_read_once(tmp_path):
  write(f"{tmp_path}/real/a.jsonl", jsonl(["a"]))
  (tmp_path / "latest").symlink_to(tmp_path / "real")
  real, link = tmp_path / "real" / "a.jsonl", tmp_path / "latest" / "a.jsonl"
  assert list(data.documents(f"jsonl:{real},{link},{tmp_path}/real/../real/a.jsonl")) == ["a"]
  (tmp_path / "b.jsonl").symlink_to(real)  # as a cache keeps files of equal content
  assert list(data.documents(f"jsonl:{real},{tmp_path}/b.jsonl")) == ["a", "a"]


def with_window(content, exponent):
  """A zstd frame that asks for a window of 2^exponent bytes, as that of `zstd --long=exponent`."""
  compressor = zstd.ZstdCompressor()
  frame = bytearray(compressor.compress(content) + compressor.flush())
  assert not frame[4] & 0x20  # else it has no byte for the window
  frame[5] = (exponent - 10) << 3
  return bytes(frame)


def test_zstd_windows_up_to_2_gib_are_read_and_larger_ones_are_named(tmp_path):
  read = lambda *frames: list(data.documents(f"jsonl:{write(f'{tmp_path}/a.jsonl.zst', b''.join(frames))}"))
  frames = [with_window(jsonl([str(exponent)]), exponent) for exponent in (20, 27, 28, 31)]
  assert read(*frames) == ["20", "27", "28", "31"]
  message = told(lambda: read(frames[0], with_window(jsonl(["y"]), 32)))
  assert "can't be read (its zstd window is larger than 2 GiB); compress it again" in message


def test_a_web_url_with_a_question_is_decompressed_by_its_path(tmp_path, monkeypatch):
  whole = {"a.jsonl.gz": gzip.compress(b'{"text": "a"}'), "a.jsonl.xz": lzma.compress(b'{"text": "a"}')}
  for name, content in whole.items():
    (tmp_path / name).write_bytes(content)
    (part,) = files.make_parts("jsonl", f"https://host/{name}?download=true", len(content))
    opened = lambda path, mode, compression, name=name: fsspec.open(str(tmp_path / name), mode, compression=compression)
    monkeypatch.setattr(files, "fsspec", types.SimpleNamespace(open=opened, utils=fsspec.utils))
    assert list(part.read("", Options())) == ["a"]


def test_a_file_that_is_larger_when_it_is_read_is_read_to_its_end(tmp_path, monkeypatch):
  """As those of file systems that tell no sizes."""
  monkeypatch.setattr(files, "PART_BYTES", 8)
  (tmp_path / "a.jsonl").write_bytes(b"")
  ((part,), _) = files.resolve("jsonl", str(tmp_path / "a.jsonl"), "")
  (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
  assert list(part.read("", Options())) == ["a", "b"]


def test_lines_of_json_end_at_line_feeds_alone(tmp_path):
  """Other characters that end lines elsewhere are text; a carriage return is JSON's white space."""
  texts = [f"one{mark}two" for mark in ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c")]
  lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]  # JSON has the last three as escapes alone
  (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).replace(": ", ":\r").encode())
  assert list(data.documents(f"jsonl:{tmp_path}/a.jsonl")) == texts


def test_home_expands_another_key_may_hold_the_text_and_documents_are_read_lazily(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "a.jsonl").write_bytes(jsonl(["first"], 'the "body"') + b"broken\n")
  documents = data.documents("jsonl:~/a.jsonl", options=Options(text_key='the "body"'))
  assert next(documents) == "first"
  assert "line 2" in told(lambda: next(documents))


def test_fingerprints_follow_the_files_and_how_they_are_read(root):
  path = write(f"{root}/a.jsonl", jsonl(["x"]))
  ways = [("jsonl", Options()), ("text", Options()), ("jsonl", SKIP), ("jsonl", Options(text_key="other"))]
  seen = [fingerprint(f"{kind}:{root}/*.jsonl", options=options) for kind, options in ways]
  assert seen[0] == fingerprint(f"jsonl:{root}/*.jsonl", "data.validation")
  for text in ("y", "xy"):  # the first of the same size
    write(path, jsonl([text]))
    seen.append(fingerprint(f"jsonl:{root}/*.jsonl"))
  assert len({*seen, fingerprint("builtin")}) == len(seen) + 1


def test_a_kept_listing_hides_no_change(bucket, monkeypatch):
  find = functools.cache(type(MEMORY).find)  # file systems over a network keep listings
  monkeypatch.setattr(type(MEMORY), "find", lambda self, path, **options: find(self, path, **options))
  monkeypatch.setattr(type(MEMORY), "invalidate_cache", lambda self, path=None: find.cache_clear())
  seen = set()
  for index in range(3):
    MEMORY.pipe(f"/bucket/{index}.jsonl", jsonl(["x"]))
    seen.add(fingerprint(f"jsonl:{bucket}/*.jsonl"))
  assert len(seen) == 3


BAD_FILES = {  # of compressed ones one of each kind: what is damaged in each format is above
  "empty.text": (b"", ": the file is empty"),
  "mark.text": (b"\xef\xbb\xbf", ": the file is empty"),
  "twice.jsonl": (b'{"text": "x", "text": "y"}', " line 1: not JSON (it gives 'text' twice)"),
  "latin.text": (b"fine\ncaf\xe9\n", " line 2: not UTF-8"),
  "cut.text.gz": (gzip.compress(NOISE)[:500], " can't be read"),
  "nothing.text.xz": (b"", " can't be read"),
  "archive.text": (b"a.txt\0\0text", ": holds NUL bytes, as archives and UTF-16 do"),
  "archive.text.ZIP": (b"PK\3\4\0\0text", ": holds NUL bytes, as archives and UTF-16 do"),
  "key.jsonl": (b'{"text": "x"}\n{"txt": "x"}', """ line 2: no key "text" (its keys: 'txt')"""),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_errors_in_files_name_key_value_file_and_line(tmp_path, name):
  content, part = BAD_FILES[name]
  path = write(f"{tmp_path}/{name}", content)
  source = f"{name.split('.')[1]}:{path}"
  message = told(lambda: list(data.documents(source, "data.validation")))
  assert message.startswith(f"data.validation={source}: {path}{part}")
  if "can't be read" in part:  # nobody can tell how much is lost: no choice
    assert told(lambda: list(data.documents(source, "data.validation", SKIP))) == message
  else:
    assert message.endswith("; or set data.bad_records=skip to skip and count such records")


def test_skipped_records_are_counted_exactly_and_told_once(tmp_path, caplog):
  bad = {  # each kind, and the line that holds its first
    b"{": ("not JSON", 3),
    b"[1]": ("not an object", 5),
    b'{"text": "\xe9"}': ("not UTF-8", 8),
    b'{"text": 3}': ('where "text" is not a string', 9),
    b'{"txt": "x"}': ('without key "text"', 10),
    b'{"text": "\\ud800"}': ("with a lone surrogate", 11),
  }
  json_, list_, *others = bad
  lines = [b'{"text": "1"}', b"", json_, b'{"text": ""}', list_, b'{"text": "2"}', json_, *others, b'{"text": "3"}']
  (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
  (tmp_path / "b.jsonl").write_bytes(b"")
  (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(b"no\n" + jsonl(["4"])))
  source = sources.open_source(f"jsonl:{tmp_path}/*.jsonl*", "data.validation", SKIP)
  assert list(source.records()) == ["1", "", "", "", "2", "", "", "", "", "", "3", "", "", "4"]
  assert list(source.documents()) == ["1", "2", "3", "4"]
  counts = dict.fromkeys([kind for kind, _ in bad.values()], 1) | {"not JSON": 3, "empty files": 1}
  examples = {kind: f"{tmp_path}/a.jsonl line {number}" for kind, number in bad.values()}
  examples["empty files"] = f"{tmp_path}/b.jsonl"
  assert source.counts == Counts(records=14, documents=4, empty=1, bad=counts, examples=examples)
  assert source.counts.num_bad == 9
  (line,) = caplog.messages
  assert line.startswith(f"data.validation={source.source}: 9 of 14 records skipped as bad: 3 not JSON (first: ")


UNKNOWN = f"unknown kind of source; use one of {', '.join(sources.KINDS)}"


@pytest.mark.parametrize(
  ("source", "part"),
  [
    ("buildin", f"{UNKNOWN}; nearest: builtin"),
    ("gs://bucket/a.jsonl", f"{UNKNOWN}; nearest: jsonl:gs://bucket/a.jsonl"),
    ("tfds:", "unknown kind"),
    ("shards:/data", "prepared shards hold tokens, but text is needed here; use one of builtin"),
    ("text:memory://bucket/deep", "memory:///bucket/deep is a directory"),
    ("text:foo://bucket/a", "foo:// is not a known protocol (Protocol not known: foo)"),
    ("text:abfs://bucket/a", "abfs:// needs a package that is not installed (Install adlfs"),
    ("text:{}", "{} is a directory"),
    ("text:{}/a.jsonl,{}/*.none", "no file matches {}/*.none"),
    ("text:{}/loop", "{}/loop can't be read (Too many levels"),
    ("jsonl:{}/a.jsonl", "holds no text; give"),
  ],
)
def test_errors_in_sources_name_key_value_and_rule(tmp_path, bucket, monkeypatch, source, part):
  monkeypatch.setitem(sys.modules, "adlfs", None)
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
  assert f"{bucket}/a.jsonl can't be read (HTTP 403 Forbidden); check the network" in message
  monkeypatch.setattr(type(MEMORY), "info", fail)
  monkeypatch.setattr(type(MEMORY), "find", fail)
  message = told(lambda: sources.open_source(f"jsonl:{bucket}/*.jsonl"))
  assert f"{bucket}/*.jsonl can't be listed (HTTP 403 Forbidden)" in message


def test_memory_stays_flat(tmp_path):
  """1.8 MB of text in a file for each way of reading, of which the largest document has 0.2 MB, in less than 1.2 MB."""
  rng = random.Random(0)
  content = 2 * jsonl(f"{rng.random()} " * (10_000 if row == 50 else 400) for row in range(100))
  assert 1_800_000 < len(content) < 1_900_000
  for suffix in ("", ".gz", ".xz", ".zst"):
    path = write(f"{tmp_path}/a.jsonl{suffix}", COMPRESS[suffix](content) if suffix else content)
    tracemalloc.start()
    size = sum(len(text) for text in data.documents(f"jsonl:{path}"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 0.8 * len(content) and peak < 1_200_000, (path, peak)


def test_each_side_has_a_document_unless_all_are_equal():
  texts = [f"document {number}" for number in range(20)]
  for fraction, expected in ((1e-9, 1), (1 - 1e-9, 19)):
    limit = preparing.choose_limit(texts, config_lib.DataConfig(validation_fraction=fraction), 3)
    assert sum(preparing.compute_score(text.encode(), 3) < limit for text in texts) == expected
  message = told(lambda: preparing.choose_limit(["same", "same"], config_lib.DataConfig(source="text:x"), 3))
  assert message.startswith("data.source=text:x: 2 documents can't be divided")


@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_file_in_parts_is_the_file(tmp_path, monkeypatch, size):
  """Wherever it is cut: each record once, in order, with the number of its line."""
  monkeypatch.setattr(sources.files, "PART_BYTES", size)
  content = b'\xef\xbb\xbf{"text": "one"}\n\n{"text": 7}\n{"text": "' + b"long" * 30 + b'"}\r\nbroken\n{"text": "last"}'
  (tmp_path / "a.jsonl").write_bytes(content)
  source = sources.open_source(f"jsonl:{tmp_path}/a.jsonl", options=SKIP)
  assert len(source.parts) == -(-len(content) // size)
  assert list(source.records()) == ["one", "", "long" * 30, "", "last"]
  assert sorted(source.counts.examples.values()) == [f"{tmp_path}/a.jsonl line 3", f"{tmp_path}/a.jsonl line 5"]
