"""Prepared tokens on disk: shards in ArrayRecord files, and the manifest that describes them.

The manifest is written last: a directory without one is incomplete, and nothing in it is read. A shard is a sequence of
records of `RECORD_TOKENS` tokens, the last of them shorter, little-endian; the shards of a split in order are its
tokens.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import resource
import threading
from typing import Any

from array_record.python import array_record_module
import numpy as np

from diffeq_nnx.data import tokenizers
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.files import read_json

VERSION = 1  # of the format (RECORD_TOKENS too) and of tokenization: raise it when either changes
MANIFEST = "manifest.json"
RECORD_TOKENS = 16384  # the smallest read: a window of 1024 tokens lies in 1.06 records on average
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # for random access
_WRITE_OPTIONS = "group_size:1,uncompressed"
_RESTORE = "restore it, or prepare the directory again"


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file of a split.

  Attributes:
    file: Name in the directory.
    tokens: Number of tokens.
    size: Bytes of the file.
    sha256: Of the file, in hex.
  """

  file: str
  tokens: int
  size: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
  """One side of a corpus.

  Attributes:
    tokens: [num_tokens] uint16 or uint32, an array or `Tokens`: the documents, each followed by the end-of-text id and,
      where the tokenizer has one (`bos_id`), preceded by the begin mark.
    num_bytes: UTF-8 bytes of the text, marks excluded.
    num_documents: Number of documents.
  """

  tokens: "np.ndarray | Tokens"
  num_bytes: int
  num_documents: int

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes of text per token, marks counted as tokens."""
    return self.num_bytes / len(self.tokens)


class Tokens:
  """The tokens of a split as one long array, whose slices are read from its shards; safe for threads."""

  def __init__(self, paths: list[str], sizes: list[int], dtype: np.dtype):
    """Opens no file yet.

    Args:
      paths: The shards' files, in order.
      sizes: Numbers of tokens of the shards.
      dtype: Type of the tokens.
    """
    self.paths, self.sizes, self.dtype = paths, sizes, np.dtype(dtype)
    self._ends = list(itertools.accumulate(sizes))
    self._readers: list[Any] = [None] * len(paths)
    self._lock = threading.Lock()
    _allow_open_files(len(paths))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, part: slice) -> np.ndarray:
    """Tokens `part.start` to `part.stop - 1` as far as they exist: [num_tokens].

    Raises:
      UserError: If a shard is missing or damaged.
      IndexError: For anything but a slice of step 1.
    """
    if not isinstance(part, slice) or part.step not in (None, 1):
      raise IndexError(f"{part}: only slices of step 1 can be read")
    start, stop, _ = part.indices(len(self))
    pieces = []
    number = bisect.bisect_right(self._ends, start)
    while start < stop:
      offset = self._ends[number] - self.sizes[number]
      end = min(stop, self._ends[number])
      pieces.append(self._read(number, start - offset, end - offset))
      start, number = end, number + 1
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, self.dtype)])

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """All tokens, in memory."""
    del copy
    return self[:].astype(dtype or self.dtype, copy=False)

  def _read(self, number: int, start: int, stop: int) -> np.ndarray:
    """Tokens start to stop - 1 of one shard, at least one token."""
    first, last = start // RECORD_TOKENS, (stop - 1) // RECORD_TOKENS
    offset = first * RECORD_TOKENS
    num_bytes = (min((last + 1) * RECORD_TOKENS, self.sizes[number]) - offset) * self.dtype.itemsize
    try:
      data = b"".join((self._readers[number] or self._open(number)).read(range(first, last + 1)))
      problem = None if len(data) == num_bytes else f"{len(data)} bytes, expected {num_bytes}"
    except UserError:
      raise
    except Exception as error:  # array_record raises bare RuntimeError
      if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        raise UserError(
          f"{self.paths[number]}: can't be opened (too many open files); every shard stays open: raise the limit, for "
          "example with ulimit -n 4096"
        ) from error
      problem = first_line(error, 200)
    if problem:
      raise UserError(f"{self.paths[number]}: record {first} can't be read ({problem}): damaged or missing; {_RESTORE}")
    return np.frombuffer(data, self.dtype.newbyteorder("<"))[start - offset : stop - offset]

  def _open(self, number: int) -> Any:
    with self._lock:
      if self._readers[number] is None:
        with open(self.paths[number], "rb"):
          pass  # array_record reports no error for a file that it can't open
        reader = array_record_module.ArrayRecordReader(self.paths[number], _READ_OPTIONS)
        expected = -(-self.sizes[number] // RECORD_TOKENS)
        if reader.num_records() != expected:  # 0 for a truncated file
          raise UserError(
            f"{self.paths[number]}: holds {reader.num_records()} records, expected {expected}: damaged; {_RESTORE}"
          )
        self._readers[number] = reader
      return self._readers[number]


def _allow_open_files(number: int) -> None:
  """Raises this process's limit of open files for so many shards, as far as permitted."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = number + 512  # the rest of the process needs some too
  if resource.RLIM_INFINITY not in (soft, hard) and soft < limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))


def join(splits: Sequence[Split]) -> Split:
  """The concatenation of splits whose `Tokens` have one type."""
  first = splits[0]
  if len(splits) == 1:
    return first
  paths = [path for split in splits for path in split.tokens.paths]
  sizes = [size for split in splits for size in split.tokens.sizes]
  tokens = Tokens(paths, sizes, first.tokens.dtype)
  return Split(tokens, sum(split.num_bytes for split in splits), sum(split.num_documents for split in splits))


def write_shard(path: str, tokens: np.ndarray, name: str) -> Shard:
  """Writes tokens [num_tokens] to a file that will be renamed to `name`; raises OSError if it fails."""
  tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
  try:
    writer = array_record_module.ArrayRecordWriter(path, _WRITE_OPTIONS)
    for start in range(0, len(tokens), RECORD_TOKENS):
      writer.write(tokens[start : start + RECORD_TOKENS].tobytes())
    writer.close()
  except Exception as error:  # array_record raises bare RuntimeError
    raise OSError(first_line(error, 200)) from error
  return Shard(name, len(tokens), os.path.getsize(path), sha256(path))


def sha256(path: str) -> str:
  """The SHA-256 of a file, in hex."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(directory: str, label: str) -> dict[str, Any] | None:
  """A directory's manifest, or None if it has none.

  Raises:
    UserError: If it can't be read, is incomplete or has another version; the message begins with `label`.
  """
  path = os.path.join(directory, MANIFEST)
  try:
    manifest = read_json(path)
    version = manifest["version"]
    if version == VERSION:
      _check_fields(manifest)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as error:
    raise UserError(f"{label}: {path} can't be read ({error.strerror}); make it readable") from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{label}: {path} is damaged; {_RESTORE}") from error
  if version != VERSION:
    raise UserError(f"{label}: {path} has version {version}, this program reads {VERSION}; prepare it again")
  return manifest


def _check_fields(manifest: dict[str, Any]) -> None:
  """Raises ValueError, KeyError or TypeError unless a manifest has all that is used later."""
  manifest["recipe"]["source"]
  [manifest["tokenizer"][name] for name in ("file", "hash", "bos_id")]
  if manifest["dtype"] not in ("uint16", "uint32"):
    raise ValueError
  for name in ("train", "validation"):
    info = manifest["splits"][name]
    [info[key] for key in ("bytes", "documents")]
    if info["tokens"] != sum(Shard(**shard).tokens for shard in info["shards"]):
      raise ValueError


@dataclasses.dataclass(frozen=True)
class Directory:
  """An opened directory of shards.

  Attributes:
    tokenizer: The tokenizer of the shards.
    splits: By name, "train" and "validation".
    manifest: The manifest.
  """

  tokenizer: Tokenizer
  splits: dict[str, Split]
  manifest: dict[str, Any]

  def digest(self, split: str) -> str:
    """A hash of the tokens of a split, in hex."""
    files = [shard["sha256"] for shard in self.manifest["splits"][split]["shards"]]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def open_directory(directory: str, manifest: dict[str, Any], label: str) -> Directory:
  """Opens what a manifest describes, after checking the size of every file.

  Raises:
    UserError: For a missing shard, one of another size, or another tokenizer.
  """
  splits = {}
  for name, info in manifest["splits"].items():
    shards = [Shard(**shard) for shard in info["shards"]]
    paths = [os.path.join(directory, shard.file) for shard in shards]
    for path, shard in zip(paths, shards):
      try:
        size = os.path.getsize(path)
      except OSError as error:
        raise UserError(f"{label}: {path} is not there ({error.strerror}); {_RESTORE}") from error
      if size != shard.size:
        raise UserError(f"{label}: {path} has {size} bytes, expected {shard.size}: damaged; {_RESTORE}")
    tokens = Tokens(paths, [shard.tokens for shard in shards], np.dtype(manifest["dtype"]))
    splits[name] = Split(tokens, info["bytes"], info["documents"])
  info = manifest["tokenizer"]
  path = os.path.join(directory, info["file"])
  tokenizer = tokenizers.load(path, begin_mark=info["bos_id"] is not None, key=f"{label}: tokenizer")
  if tokenizer.hash != info["hash"]:
    raise UserError(
      f"{label}: {path} is another tokenizer ({tokenizer.hash[:12]}) than that of {MANIFEST} ({info['hash'][:12]}); "
      f"{_RESTORE}"
    )
  return Directory(tokenizer, splits, manifest)
