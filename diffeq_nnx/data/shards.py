"""Prepared tokens on disk: shards in ArrayRecord files, and the manifest that says what they hold.

A directory is whole when its manifest is there; nothing in it is read before. A shard is a run of records of
`RECORD_TOKENS` tokens, the last of them shorter, little-endian; the shards of a split, one after the other, are its
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

VERSION = 1  # of the format (RECORD_TOKENS too) and of how text becomes tokens: raise it when either changes
MANIFEST = "manifest.json"
RECORD_TOKENS = 16384  # read at least at a time: a window of 1024 tokens lies in 1.06 records on average
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # what random access wants
_WRITE_OPTIONS = "group_size:1,uncompressed"


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file of a split.

  Attributes:
    file: Its name in the directory.
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
    tokens: [num_tokens] uint16 or uint32, an array or `Tokens`: the documents, each with the end-of-text id after it
      and, where the tokenizer has one (`bos_id`), the begin mark before it.
    num_bytes: UTF-8 bytes of the text, marks excluded.
    num_documents: Number of documents.
  """

  tokens: "np.ndarray | Tokens"
  num_bytes: int
  num_documents: int

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes of text to a token, marks counted as tokens."""
    return self.num_bytes / len(self.tokens)


class Tokens:
  """The tokens of a split as one long array, of which slices are read from its shards; for any number of threads."""

  def __init__(self, paths: list[str], sizes: list[int], dtype: np.dtype):
    """Opens no file yet.

    Args:
      paths: Of the shards, in order.
      sizes: Tokens in each of them.
      dtype: Of the tokens.
    """
    self.dtype, self._record_tokens = np.dtype(dtype), RECORD_TOKENS
    self.paths, self.sizes = paths, sizes
    self._disk_dtype = self.dtype.newbyteorder("<")
    self._ends = list(itertools.accumulate(sizes))
    self._readers: list[Any] = [None] * len(paths)
    self._lock = threading.Lock()
    _allow_open_files(len(paths))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, part: slice) -> np.ndarray:
    """Tokens `part.start` to `part.stop - 1`, as far as there are any: [num_tokens].

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
      upto = min(stop, self._ends[number])
      pieces.append(self._read(number, start - offset, upto - offset))
      start, number = upto, number + 1
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, self.dtype)])

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """All tokens, in memory."""
    del copy
    return self[:].astype(dtype or self.dtype, copy=False)

  def _read(self, number: int, start: int, stop: int) -> np.ndarray:
    """Tokens start to stop - 1 of one shard, of which there is at least one."""
    first, last = start // self._record_tokens, (stop - 1) // self._record_tokens
    try:
      records = (self._readers[number] or self._open(number)).read(range(first, last + 1))
    except UserError:
      raise
    except Exception as error:  # array_record raises bare RuntimeError
      if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        raise UserError(
          f"{self.paths[number]}: can't be opened (too many open files); every shard is kept open: raise the limit, "
          "for example with ulimit -n 4096"
        ) from error
      raise self._damaged(number, first, first_line(error, 200)) from error
    data = records[0] if len(records) == 1 else b"".join(records)
    offset = first * self._record_tokens
    expected = min((last + 1) * self._record_tokens, self.sizes[number]) - offset
    if len(data) != expected * self.dtype.itemsize:
      raise self._damaged(number, first, f"{len(data)} bytes where {expected * self.dtype.itemsize} belong")
    return np.frombuffer(data, self._disk_dtype)[start - offset : stop - offset]

  def _open(self, number: int) -> Any:
    with self._lock:
      if self._readers[number] is None:
        with open(self.paths[number], "rb"):
          pass  # array_record says nothing of a file that it can't open
        reader = array_record_module.ArrayRecordReader(self.paths[number], _READ_OPTIONS)
        wanted = -(-self.sizes[number] // self._record_tokens)
        if reader.num_records() != wanted:  # what a file that was cut short gives is none
          raise UserError(
            f"{self.paths[number]}: holds {reader.num_records()} records where {wanted} belong: damaged; restore "
            "the file, or prepare the directory again"
          )
        self._readers[number] = reader
      return self._readers[number]

  def _damaged(self, number: int, record: int, what: str) -> UserError:
    return UserError(
      f"{self.paths[number]}: record {record} can't be read ({what}): damaged or gone; restore the file, or prepare "
      "the directory again"
    )


def _allow_open_files(number: int) -> None:
  """Raises this process's own limit of open files, as far as it may, for so many shards more."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = number + 512  # and what else is open
  if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def join(splits: Sequence[Split]) -> Split:
  """Splits of `Tokens` of one type, one after the other."""
  first = splits[0]
  if len(splits) == 1:
    return first
  paths = [path for split in splits for path in split.tokens.paths]
  sizes = [size for split in splits for size in split.tokens.sizes]
  tokens = Tokens(paths, sizes, first.tokens.dtype)
  return Split(tokens, sum(split.num_bytes for split in splits), sum(split.num_documents for split in splits))


def write_shard(path: str, tokens: np.ndarray, name: str) -> Shard:
  """Writes tokens [num_tokens] to a file that is to be called `name`.

  Raises:
    OSError: If they can't be written.
  """
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
  """Of a file, in hex."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(directory: str, label: str) -> dict[str, Any] | None:
  """A directory's manifest, or None if it has none.

  Raises:
    UserError: For one that can't be read, has something missing or is of another version; the line begins with
      `label`.
  """
  path = os.path.join(directory, MANIFEST)
  try:
    with open(path, encoding="utf-8") as file:
      manifest = json.load(file)
    version = manifest["version"]
    if version == VERSION:
      _check_form(manifest)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as error:
    raise UserError(f"{label}: {path} can't be read ({error.strerror}); make it readable") from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{label}: {path} is damaged; restore it, or prepare the directory again") from error
  if version != VERSION:
    raise UserError(f"{label}: {path} is of version {version}, and this program reads {VERSION}; prepare it again")
  return manifest


def _check_form(manifest: dict[str, Any]) -> None:
  """Raises ValueError, KeyError or TypeError unless all is there that is read later."""
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
  """What a directory with shards holds.

  Attributes:
    tokenizer: The one that the shards were made with.
    splits: By name, "train" and "validation".
    manifest: The manifest.
  """

  tokenizer: Tokenizer
  splits: dict[str, Split]
  manifest: dict[str, Any]

  def digest(self, split: str) -> str:
    """Tells the tokens of a split from others, in hex."""
    files = [shard["sha256"] for shard in self.manifest["splits"][split]["shards"]]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def open_directory(directory: str, manifest: dict[str, Any], label: str) -> Directory:
  """What a manifest names, after a look at the size of every file.

  Raises:
    UserError: For a missing shard, one of another size, or another tokenizer.
  """
  splits = {}
  for name, info in manifest["splits"].items():
    shards = [Shard(**shard) for shard in info["shards"]]
    paths = [os.path.join(directory, shard.file) for shard in shards]
    for path, shard in zip(paths, shards):
      _check_size(path, shard.size, label)
    sizes = [shard.tokens for shard in shards]
    tokens = Tokens(paths, sizes, np.dtype(manifest["dtype"]))
    splits[name] = Split(tokens, info["bytes"], info["documents"])
  info = manifest["tokenizer"]
  path = os.path.join(directory, info["file"])
  tokenizer = tokenizers.load(path, begin_mark=info["bos_id"] is not None, key=f"{label}: tokenizer")
  if tokenizer.hash != info["hash"]:
    raise UserError(
      f"{label}: {path} is another tokenizer ({tokenizer.hash[:12]}) than that of {MANIFEST} ({info['hash'][:12]}); "
      "restore the file, or prepare the directory again"
    )
  return Directory(tokenizer, splits, manifest)


def _check_size(path: str, size: int, label: str) -> None:
  try:
    found = os.path.getsize(path)
  except OSError as error:
    raise UserError(
      f"{label}: {path} is not there ({error.strerror}); restore it, or prepare the directory again"
    ) from error
  if found != size:
    raise UserError(
      f"{label}: {path} has {found} bytes where {size} belong: damaged; restore it, or prepare the directory again"
    )
