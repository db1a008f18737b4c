"""The sources `text:` and `jsonl:`: local files and URLs, plain or compressed, opened through fsspec.

Each file is one part, except that a local file of JSON lines that is not compressed is divided into ranges of lines.
etils.epath, the other candidate, has no `**`, and reads `gs://` through TensorFlow where that is installed.
"""

from collections.abc import Iterator
import dataclasses
import functools
import glob
import json
import os
import sys
from typing import Any, BinaryIO
import zlib

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffeq_nnx.data.documents import Document
from diffeq_nnx.data.sources import compressed
from diffeq_nnx.data.sources.records import BadRecord, Options, make_rule, read_document
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import check_url, is_url

PART_BYTES = 32 << 20  # of a large file that is read in parts
_LOCAL_ERRORS = (*compressed.ERRORS, zlib.error)
# Fields that change with the version of a remote file; each file system has some of them.
_VERSION_FIELDS = ["generation", "etag", "ETag", "blob_id", "md5Hash", "crc32c", "mtime", "LastModified", "created"]


@dataclasses.dataclass(frozen=True)
class File:
  """A file, or the lines of one that begin in a range of bytes, as a part of a source."""

  kind: str  # "text" (the file is one document) or "jsonl" (each line is one)
  path: str  # or URL
  prefix: str  # the start of error messages
  options: Options = Options()  # how a JSON object is read
  version: tuple = ()  # for a URL, its size or None, and fields that identify this version of the file
  start: int = 0  # the first byte of the range
  stop: int = sys.maxsize  # one more than the last byte of the range

  @property
  def name(self) -> str:
    """See `records.Part`."""
    return f"{self.path} from byte {self.start}" if self.start else self.path

  @property
  def size(self) -> int:
    """See `records.Part`. It is `PART_BYTES` where a file system does not tell."""
    if is_url(self.path):
      return self.version[0] or PART_BYTES
    return min(os.path.getsize(self.path), self.stop) - self.start

  def divide(self) -> list["File"]:
    """Divides the file into ranges of `PART_BYTES` if each range can be read without what is before it."""
    compression = fsspec.utils.infer_compression(self.path) or compressed.is_supported(self.path)
    if self.kind != "jsonl" or is_url(self.path) or compression:
      return [self]
    starts = range(0, os.path.getsize(self.path), PART_BYTES)
    return [dataclasses.replace(self, start=start, stop=start + PART_BYTES) for start in starts] or [self]

  def read(self) -> Iterator[Document | BadRecord]:
    """See `records.Part.read`."""
    errors = Exception if is_url(self.path) else _LOCAL_ERRORS  # each file system has errors of its own
    try:
      ours = compressed.is_supported(self.path)
      # of a zip fsspec reads one member only
      with open_bytes(self.path, None if ours or self.path.endswith(".zip") else "infer") as file:
        content = compressed.decompress(file, self.path) if ours else file
        yield from self._read_text(content) if self.kind == "text" else self._read_lines(content)
    except UserError:
      raise
    except errors as error:
      raise UserError(describe_unreadable(self.prefix, self.path, error)) from error

  def state(self) -> list:
    """Returns the name, the size in bytes and the modification time (ns), or for a URL its version.

    Raises UserError if a local file can't be accessed.
    """
    if is_url(self.path):
      return [self.path, *self.version]
    try:
      stat = os.stat(self.path)
    except OSError as error:
      raise UserError(describe_unreadable(self.prefix, self.path, error)) from error
    return [os.path.abspath(self.path), stat.st_size, stat.st_mtime_ns]

  def _read_text(self, file: BinaryIO) -> Iterator[str | BadRecord]:
    data = file.read()
    try:
      text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
      yield self._make_not_utf8(data.count(b"\n", 0, error.start) + 1, error)
      return
    empty = not data
    del data  # this frame lives on while the caller works on the text
    yield self._make_empty() if empty else text

  def _read_lines(self, file: BinaryIO) -> Iterator[Document | BadRecord]:
    at = number = 0
    if self.start:  # the line that holds the byte before the range is of the range before
      file.seek(self.start - 1)
      at = self.start - 1 + len(file.readline())
    for number, line in enumerate(file, start=1):
      if at >= self.stop:
        return
      at += len(line)
      if line.strip():
        yield self._parse_line(number, line)
    if number == self.start == 0:
      yield self._make_empty()

  def _parse_line(self, number: int, line: bytes) -> Document | BadRecord:
    """Returns the document of one line of JSON, which is the `number`-th of the range."""
    rule = make_rule(self.options)
    try:
      record = json.loads(line.decode("utf-8-sig" if number == 1 and not self.start else "utf-8"))
    except UnicodeDecodeError as error:
      return self._make_not_utf8(number, error)
    except (ValueError, RecursionError) as error:
      return self._make_bad("not JSON", number, f"not JSON ({error}); {rule}")
    if not isinstance(record, dict):
      return self._make_bad("not an object", number, f"of type {type(record).__name__}, not an object; {rule}")
    document = read_document(record, self.options)
    return self._make_bad(document.reason, number, document.detail) if isinstance(document, BadRecord) else document

  def _make_empty(self) -> BadRecord:
    detail = "the file is empty; every file must hold text: fill it, remove it or narrow the glob"
    return BadRecord("empty files", detail, self.path)

  def _make_not_utf8(self, number: int, error: UnicodeDecodeError) -> BadRecord:
    return self._make_bad("not UTF-8", number, f"not UTF-8 ({error.reason}); convert the file, for example with iconv")

  def _make_bad(self, reason: str, number: int, detail: str) -> BadRecord:
    """Returns the bad record in the `number`-th line of the range."""
    before = 1 + _count_newlines(self.path, self.start - 1) if self.start else 0
    return BadRecord(reason, detail, f"{self.path} line {before + number}")


@functools.lru_cache(1)
def _count_newlines(path: str, stop: int) -> int:
  """Counts the newlines before byte `stop` of a file."""
  count = 0
  with open(path, "rb") as file:
    while chunk := file.read(min(stop, 1 << 20)):
      count, stop = count + chunk.count(b"\n"), stop - len(chunk)
  return count


def open_bytes(path: str, compression: str | None = None) -> Any:
  """Opens a local file or a URL; raises what its file system raises. For `compression` see `fsspec.open`."""
  # local names may contain "::", which fsspec.open takes for a chain of URLs
  return (fsspec.open if is_url(path) else LocalFileSystem().open)(path, "rb", compression=compression)


def resolve(kind: str, globs: str, prefix: str, options: Options) -> tuple[list[File], list]:
  """Finds the files that a source of the kind "text", "jsonl" or "parquet" names.

  Args:
    globs: Paths, URLs and globs of both, separated by commas; `~` expands.
    prefix: The start of error messages.

  Returns:
    The parts of the files, sorted by name, and the state of each file (see `File.state`).

  Raises:
    UserError: For a glob that matches nothing, or a file system that can't be accessed.
  """
  versions: dict[str, tuple] = {}
  for pattern in filter(None, (part.strip() for part in globs.split(","))):
    matches = _find_remote(pattern, prefix) if is_url(pattern) else dict.fromkeys(_find_local(pattern), ())
    if not matches:
      place = "" if is_url(pattern) else f" (from {os.getcwd()})"
      raise UserError(f"{prefix} no file matches {pattern}{place}; give a path that exists")
    versions |= matches
  if not versions:
    raise UserError(f"{prefix} no file matches an empty glob; write for example {kind}:~/corpus/*.{kind}")
  found = [File(kind, name, prefix, options, versions[name]) for name in sorted(versions)]
  states = [file.state() for file in found]
  return [part for file in found for part in file.divide()], states


def _find_local(pattern: str) -> list[str]:
  path = os.path.expanduser(pattern)
  # an existing name that contains [ or * is taken literally
  return [path] if os.path.exists(path) else glob.glob(path, recursive=True)


def _find_remote(pattern: str, prefix: str) -> dict[str, tuple]:
  """Returns the URLs that match, each with its version."""
  protocol = pattern.partition("://")[0]
  check_url(pattern)
  try:
    fs, path = fsspec.core.url_to_fs(pattern)
    fs.invalidate_cache()  # an old listing would hide changes
    found = fs.glob(path, detail=True)
  except ImportError as error:
    raise UserError(
      f"{prefix} {protocol}:// needs a package that is not installed ({reason(error)}); install it with pip"
    ) from error
  except Exception as error:
    if protocol not in fsspec.available_protocols():
      raise UserError(
        f"{prefix} {protocol}:// is not a known protocol ({reason(error)}); use for example gs:// or hf://"
      ) from error
    raise UserError(
      f"{prefix} {pattern} can't be listed ({reason(error)}); check the network, the name and your credentials"
    ) from error
  for name, info in found.items():
    if info.get("type") == "directory":
      raise UserError(describe_unreadable(prefix, fs.unstrip_protocol(name), IsADirectoryError()))
  return {fs.unstrip_protocol(name): _read_version(info) for name, info in found.items()}


def _read_version(info: dict[str, Any]) -> tuple:
  known = (f"{field}={info[field]}" for field in _VERSION_FIELDS if info.get(field) is not None)
  return (info.get("size"), *known)


def reason(error: BaseException) -> str:
  """Returns what an error says in one line, or its type if it says nothing."""
  return " ".join(str(error).split()) or type(error).__name__


def describe_unreadable(prefix: str, name: str, error: BaseException) -> str:
  """Returns the message, which begins with `prefix`, that a file can't be read because of an error."""
  if isinstance(error, IsADirectoryError):
    return f"{prefix} {name} is a directory, not a file; name files in it, as in {name.rstrip('/')}/*"
  if isinstance(error, OSError) and error.strerror:
    return f"{prefix} {name} can't be read ({error.strerror}); make it readable or narrow the glob"
  if compressed.is_window_too_large(error):
    problem = "its zstd window is larger than 2 GiB"
    return f"{prefix} {name} can't be read ({problem}); compress it again with a smaller window, as --long=27"
  action = "check the network, or restore the file" if is_url(name) else "it is damaged or truncated: restore it"
  return f"{prefix} {name} can't be read ({reason(error)}); {action}"
