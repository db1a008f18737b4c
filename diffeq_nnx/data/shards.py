"""Prepared tokens: shards, and the manifest that describes them, in a directory or under a URL of a bucket.

The manifest is written last: a directory without one is incomplete, and nothing in it is read. A shard is its tokens,
little-endian, then a CRC-32 (uint32) of each record of `RECORD_TOKENS` tokens, the last of which may be shorter; the
shards of a split in order are its tokens.
"""

import bisect
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import os
from typing import Any
import zlib

import numpy as np

from diffeq_nnx import files
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data import tokenizers
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import RunError, UserError, first_line

VERSION = 2  # of the format (RECORD_TOKENS too) and of tokenization: raise it when either changes
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
RECORD_TOKENS = 16384  # the smallest read: a window of 1024 tokens lies in 1.06 records on average
_CHECKSUM = np.dtype("<u4")
_RESTORE = "restore it, or prepare the directory again"


@dataclasses.dataclass(frozen=True)
class Padding:
  """That each document is a row of its own, padded (data.rows=padded)."""

  too_long: str  # what becomes of a document that is longer than a row: cut | drop
  end_mark: int  # which ends the documents of a split that has no masks


@dataclasses.dataclass(frozen=True)
class Split:
  """One side of a corpus: documents, each between the tokenizer's begin mark, if it has one, and its end mark.

  If it is masked, a token on disk has the bits of `documents.encode`, and conversations have no marks around them.
  """

  tokens: "Tokens"  # [num_tokens] uint16 or uint32
  num_bytes: int  # UTF-8 bytes of the text that counts, marks excluded
  num_documents: int
  num_counted: int | None = None  # tokens that count as targets; None: all do, and the split has no masks
  padding: Padding | None = None  # None: rows are windows of all tokens
  joined: bool = False  # whether it is of several sources, one after another

  @property
  def masked(self) -> bool:
    """Whether the split says which tokens count."""
    return self.num_counted is not None

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes of text per target, of what counts, marks counted as tokens."""
    return self.num_bytes / self.num_targets

  @property
  def num_targets(self) -> int:
    """Tokens that count as targets; of windows all do."""
    if self.num_counted is not None:
      return self.num_counted
    return len(self.tokens) - (self.num_documents if self.padding else 0)  # the first of a row is none


class Tokens:
  """The tokens of a split as one long array, whose slices are read from its shards; safe for threads."""

  def __init__(self, paths: list[str], sizes: list[int], dtype: np.dtype, cached: str | None = None):
    """Opens no file yet.

    `paths` are the shards' files in order. Those that are in buckets are in buckets of one cloud. `sizes` are the
    numbers of tokens of the shards. `cached` is the manifest of shards that can be made again: it is removed if one is
    damaged, so that they are.
    """
    self.paths, self.sizes, self.dtype, self.cached = paths, sizes, np.dtype(dtype), cached
    self._ends = list(itertools.accumulate(sizes))
    self._checksums: dict[int, np.ndarray] = {}  # by shard, [records] uint32

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, part: slice) -> np.ndarray:
    """Tokens `part.start` to `part.stop - 1` as far as they exist: [num_tokens].

    Raises:
      UserError: If a shard is missing or damaged.
      RunError: If one that can be made again is.
      IndexError: For anything but a slice of step 1.
    """
    return self.read([part])[0]

  def read(self, parts: Sequence[slice]) -> list[np.ndarray]:
    """Reads several slices, from a bucket at the same time; raises what `__getitem__` raises."""
    pieces = [self._locate(part) for part in parts]
    found = iter(self._fetch([piece for some in pieces for piece in some]))
    return [np.concatenate([np.zeros(0, self.dtype), *itertools.islice(found, len(one))]) for one in pieces]

  def _locate(self, part: slice) -> list[tuple[int, int, int]]:
    """Divides a slice among shards: the number of each, the first token of the slice there, and the last one plus 1."""
    if not isinstance(part, slice) or part.step not in (None, 1):
      raise IndexError(f"{part}: only slices of step 1 can be read")
    start, stop, _ = part.indices(len(self))
    pieces = []
    number = bisect.bisect_right(self._ends, start)
    while start < stop:
      offset = self._ends[number] - self.sizes[number]
      end = min(stop, self._ends[number])
      pieces.append((number, start - offset, end - offset))
      start, number = end, number + 1
    return pieces

  def _fetch(self, pieces: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Reads pieces as returned by `_locate` and checks them. Each has at least one token."""
    self._fetch_checksums({number for number, _, _ in pieces} - self._checksums.keys())
    records = [(number, start // RECORD_TOKENS, -(-stop // RECORD_TOKENS)) for number, start, stop in pieces]
    size = self.dtype.itemsize
    step = RECORD_TOKENS * size
    ranges = [(number, first * step, min(last * step, self.sizes[number] * size)) for number, first, last in records]
    found = []
    for (number, start, stop), (_, first, last), data in zip(pieces, records, self._read_ranges(ranges)):
      sums = [zlib.crc32(data[at : at + step]) for at in range(0, len(data), step)]
      if sums != self._checksums[number][first:last].tolist():
        problem = f"{self.paths[number]}: damaged in records {first} to {last - 1}"
        if self.cached is not None:
          with contextlib.suppress(OSError):  # another process has removed it, or it is a stranger's
            files.remove(self.cached)
        raise self._error(problem, ", which makes it again from the text")
      tokens = np.frombuffer(data, self.dtype.newbyteorder("<"))
      found.append(tokens[start - first * RECORD_TOKENS : stop - first * RECORD_TOKENS])
    return found

  def _error(self, problem: str, then: str = "") -> UserError | RunError:
    if self.cached is None:
      return UserError(f"{problem}; {_RESTORE}")
    return RunError(f"{problem}; run the same command again{then}, or remove {os.path.dirname(self.cached)}")

  def _fetch_checksums(self, numbers: set[int]) -> None:
    ranges = []
    for number in sorted(numbers):
      start = self.sizes[number] * self.dtype.itemsize
      num_records = -(-self.sizes[number] // RECORD_TOKENS)
      ranges.append((number, start, start + num_records * _CHECKSUM.itemsize))
    for (number, _, _), data in zip(ranges, self._read_ranges(ranges)):
      self._checksums[number] = np.frombuffer(data, _CHECKSUM)

  def _read_ranges(self, ranges: list[tuple[int, int, int]]) -> list[bytes]:
    """Reads a range of bytes of each shard; a range is the shard's number, the first byte and the last one plus 1."""
    places = [(self.paths[number], start, stop) for number, start, stop in ranges]
    found: list[bytes] = []
    for (path, start, stop), data in zip(places, files.read_ranges(places)):
      if isinstance(data, Exception) or len(data) != stop - start:
        problem = first_line(data, 200) if isinstance(data, Exception) else f"{len(data)} bytes, not {stop - start}"
        raise self._error(f"{path}: bytes from {start} can't be read ({problem}): damaged or missing")
      found.append(data)
    return found


def join(splits: Sequence[Split]) -> Split:
  """Concatenates splits whose tokens have one dtype, and which are all masked or all without masks."""
  paths = [path for split in splits for path in split.tokens.paths]
  sizes = [size for split in splits for size in split.tokens.sizes]
  fields = ("num_bytes", "num_documents", *(["num_counted"] if splits[0].masked else []))
  sums = {field: sum(getattr(split, field) for split in splits) for field in fields}
  tokens = Tokens(paths, sizes, splits[0].tokens.dtype, splits[0].tokens.cached)  # an entry of the cache is alone
  return dataclasses.replace(splits[0], tokens=tokens, joined=len(splits) > 1, **sums)


def write_shard(path: str, tokens: np.ndarray) -> dict[str, Any]:
  """Writes tokens [num_tokens] to a file, and returns what the manifest says about it; raises OSError if it fails.

  That is its name, the numbers of its tokens and bytes, and its SHA-256 in hex.
  """
  tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
  records = [tokens[start : start + RECORD_TOKENS] for start in range(0, len(tokens), RECORD_TOKENS)]
  sums = np.array([zlib.crc32(record.tobytes()) for record in records], _CHECKSUM)
  sha256, size = hashlib.sha256(), 0
  with files.replacing(path) as part, open(part, "wb") as file:
    for record in (*records, sums):
      data = record.tobytes()  # since numpy's tofile does not tell when a full disk takes a part of it only
      sha256.update(data)
      size += file.write(data)
  return {"file": os.path.basename(path), "tokens": len(tokens), "size": size, "sha256": sha256.hexdigest()}


def read_manifest(directory: str, label: str) -> dict[str, Any] | None:
  """Reads a directory's manifest; returns None if it has none.

  Raises UserError if it can't be read, is incomplete or has another version; the message begins with `label`.
  """
  path = os.path.join(directory, MANIFEST)
  try:
    manifest = files.read_json(path)
    if (version := manifest["version"]) != VERSION:
      raise UserError(f"{label}: {path} has version {version}, this program reads {VERSION}; prepare it again")
    _check_fields(manifest)
    return manifest
  except (FileNotFoundError, NotADirectoryError):
    return None
  except UserError:  # also for a URL that can't be used
    raise
  except OSError as error:
    raise UserError(f"{label}: {path} can't be read ({error.strerror}); make it readable") from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{label}: {path} is damaged; {_RESTORE}") from error


def _check_fields(manifest: dict[str, Any]) -> None:
  """Raises ValueError, KeyError or TypeError unless a manifest has all that is used later, and names its own files."""
  tokenizer, splits, masked = manifest["tokenizer"], manifest["splits"], manifest.get("masked", False)
  manifest["recipe"]["source"], tokenizer["bos_id"]
  shards = [shard for info in splits.values() for shard in info["shards"]]
  keys = ("tokens", "bytes", "documents", *(["counted"] if masked else []))
  counts = [info[key] for info in splits.values() for key in keys]
  counts += [shard[key] for shard in shards for key in ("tokens", "size")]
  fits = (
    manifest["dtype"] in (("uint32",) if masked else ("uint16", "uint32")),
    not masked or all(info["counted"] for info in splits.values()),
    splits.keys() == set(SPLITS),
    all(type(count) is int and count >= 0 for count in counts),
    all(info["tokens"] == sum(shard["tokens"] for shard in info["shards"]) for info in splits.values()),
    all(map(files.is_name, [tokenizer["file"], *(shard["file"] for shard in shards)])),
    all(isinstance(text, str) for text in [tokenizer["hash"], *(shard["sha256"] for shard in shards)]),
  )
  if not all(fits):
    raise ValueError


@dataclasses.dataclass(frozen=True)
class Directory:
  """An opened directory of shards."""

  tokenizer: Tokenizer
  splits: dict[str, Split]  # "train" and "validation"
  manifest: dict[str, Any]

  def hash_tokens(self, split: str) -> str:
    """Returns a hash of the tokens of a split, in hex."""
    return files.hash_json([shard["sha256"] for shard in self.manifest["splits"][split]["shards"]])


def open_directory(directory: str, manifest: dict[str, Any], label: str, cached: bool = False) -> Directory:
  """Opens what a manifest describes, after checking the size of every file; `cached`: it can be made again.

  Raises UserError for a missing shard, one of another size, or another tokenizer.
  """
  splits, found, again = {}, files.list_sizes(directory), os.path.join(directory, MANIFEST) if cached else None
  for name, info in manifest["splits"].items():
    paths = [os.path.join(directory, shard["file"]) for shard in info["shards"]]
    for path, shard in zip(paths, info["shards"]):
      size, expected = found.get(shard["file"]), shard["size"]
      if size is None:
        raise UserError(f"{label}: {path} is not there; {_RESTORE}")
      if size != expected:
        raise UserError(f"{label}: {path} has {size} bytes, expected {expected}: damaged; {_RESTORE}")
    tokens = Tokens(paths, [shard["tokens"] for shard in info["shards"]], np.dtype(manifest["dtype"]), again)
    counted = info["counted"] if manifest.get("masked") else None
    splits[name] = Split(tokens, info["bytes"], info["documents"], counted)
  info = manifest["tokenizer"]
  path, config = os.path.join(directory, info["file"]), DataConfig(begin_mark=info["bos_id"] is not None)
  tokenizer = tokenizers.load(path, config, lossless=True, key=f"{label}: tokenizer")
  if tokenizer.hash != info["hash"]:
    raise UserError(
      f"{label}: {path} is another tokenizer ({tokenizer.hash[:12]}) than that of {MANIFEST} ({info['hash'][:12]}); "
      f"{_RESTORE}"
    )
  if tokenizer.hash_chat_template() != info.get("chat_template"):
    raise UserError(f"{label}: {tokenizers.CHAT_TEMPLATE} there is not that of {MANIFEST}; {_RESTORE}")
  return Directory(tokenizer, splits, manifest)
