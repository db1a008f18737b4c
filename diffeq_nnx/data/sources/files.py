"""The sources `text:` and `jsonl:`: files here or behind a URL, plain or compressed; each is a part.

Local files are opened by Python itself. URLs (`gs://`, `s3://`, `hf://`, `https://`) go through fsspec, which
streams, expands `**`, says what version a file has, and has an in-memory file system to test with.
etils.epath, the other candidate, is a layer over fsspec that has no `**`, and where TensorFlow is installed
it reads `gs://` through that.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import glob
import gzip
import json
import lzma
import os
import sys
from typing import Any, BinaryIO
import zlib

from diffeq_nnx.data.sources.records import BadRecord, Options
from diffeq_nnx.errors import UserError

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd  # unlike `zstandard`, it notices a file that was cut short

_DECOMPRESS = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}
_LOCAL_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
# What tells one version of a remote file from the next: each file system has some of these.
_VERSION_FIELDS = (
  "generation", "etag", "ETag", "blob_id", "md5Hash", "crc32c", "mtime", "LastModified", "created",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class File:
  """A file as a part of a source.

  Attributes:
    kind: "text" (the file is one document) or "jsonl" (each line is one).
    name: Its path or URL.
    prefix: How an error line begins.
    text_key: The key that holds a JSON object's text.
    version: For a URL, what tells this version of the file from another; () for a path.
  """

  kind: str
  name: str
  prefix: str
  text_key: str = "text"
  version: tuple = ()

  def read(self) -> Iterator[str | BadRecord]:
    """See `records.Part.read`."""
    errors = Exception if _is_url(self.name) else _LOCAL_ERRORS  # each file system has errors of its own
    try:
      with contextlib.ExitStack() as stack:
        file = _open(self.name, stack)
        yield from self._text(file) if self.kind == "text" else self._jsonl(file)
    except UserError:
      raise
    except errors as error:
      raise UserError(_unreadable(self.prefix, self.name, error)) from error

  def state(self) -> list:
    """What changes when the file does: name, size (bytes) and a time or version.

    Raises:
      UserError: If a local file can't be examined.
    """
    if _is_url(self.name):
      return [self.name, *self.version]
    try:
      stat = os.stat(self.name)
    except OSError as error:
      raise UserError(_unreadable(self.prefix, self.name, error)) from error
    return [os.path.abspath(self.name), stat.st_size, stat.st_mtime_ns]

  def _text(self, file: BinaryIO) -> Iterator[str | BadRecord]:
    data = file.read()
    if not data:
      yield self._empty()
      return
    try:
      text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
      yield self._not_utf8(data.count(b"\n", 0, error.start) + 1, error)
      return
    del data  # the caller holds on to this frame while it works on the text
    yield text

  def _jsonl(self, file: BinaryIO) -> Iterator[str | BadRecord]:
    number = 0
    for number, line in enumerate(file, start=1):
      if line.strip():
        yield self._record(number, line)
    if number == 0:
      yield self._empty()

  def _record(self, number: int, line: bytes) -> str | BadRecord:
    """The text of one line of JSON."""
    where, key = f"{self.name} line {number}", json.dumps(self.text_key)
    rule = f'each line must be like {{{key}: "..."}}'
    try:
      record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
      return self._not_utf8(number, error)
    except (ValueError, RecursionError) as error:
      return BadRecord("not JSON", where, f"not JSON ({error}); {rule}")
    if not isinstance(record, dict):
      return BadRecord("not an object", where, f"of type {type(record).__name__}, not an object; {rule}")
    if self.text_key not in record:
      names = ", ".join(map(repr, list(record)[:10])) or "none"
      return BadRecord(
        f"without key {key}", where, f"no key {key} (its keys: {names}); {rule}; data.text_key names the key"
      )
    text = record[self.text_key]
    if not isinstance(text, str):
      detail = f"{key} is of type {type(text).__name__}, not a string; {rule}"
      return BadRecord(f"where {key} is not a string", where, detail)
    try:
      text.encode()  # JSON escapes can spell half a character, which no UTF-8 text holds
    except UnicodeEncodeError as error:
      detail = f"{key} holds a lone surrogate at character {error.start}; remove it"
      return BadRecord("with a lone surrogate", where, detail)
    return text

  def _empty(self) -> BadRecord:
    detail = "the file is empty; every file must hold text: fill it, remove it or narrow the glob"
    return BadRecord("empty files", self.name, detail)

  def _not_utf8(self, line: int, error: UnicodeDecodeError) -> BadRecord:
    detail = f"not UTF-8 ({error.reason}); convert the file, for example with iconv"
    return BadRecord("not UTF-8", f"{self.name} line {line}", detail)


def resolve(kind: str, globs: str, prefix: str, options: Options) -> list[File]:
  """The files that a source names.

  Args:
    kind: "text" or "jsonl".
    globs: Paths, URLs and globs of both, separated by commas; `~` expands.
    prefix: How an error line begins.
    options: Which key holds a JSON object's text.

  Returns:
    One part for each file, sorted by name, so that their order depends on the names alone.

  Raises:
    UserError: For a glob that matches nothing, or a file system that can't be reached.
  """
  files = {}
  for pattern in filter(None, (part.strip() for part in globs.split(","))):
    matches = _remote(pattern, prefix) if _is_url(pattern) else _local(pattern)
    if not matches:
      place = "" if _is_url(pattern) else f" (from {os.getcwd()})"
      raise UserError(f"{prefix} no file matches {pattern}{place}; give a path that exists")
    files |= matches
  if not files:
    raise UserError(f"{prefix} no file matches an empty glob; write for example {kind}:~/corpus/*.{kind}")
  return [File(kind, name, prefix, options.text_key, files[name]) for name in sorted(files)]


def _is_url(name: str) -> bool:
  return "://" in name


def _local(pattern: str) -> dict[str, tuple]:
  path = os.path.expanduser(pattern)
  # A file whose very name holds [ or * is meant as it stands.
  matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
  return dict.fromkeys(matches, ())


def _remote(pattern: str, prefix: str) -> dict[str, tuple]:
  """The URLs that match, each with its version."""
  fs, path = _file_system(pattern, prefix)
  try:
    fs.invalidate_cache()  # a listing kept from before would hide what has changed since
    found = fs.glob(path, detail=True)
  except Exception as error:
    raise UserError(
      f"{prefix} {pattern} can't be listed ({_reason(error)}); look at the network, the name and your "
      "credentials"
    ) from error
  for name, info in found.items():
    if info.get("type") == "directory":
      raise UserError(_unreadable(prefix, fs.unstrip_protocol(name), IsADirectoryError()))
  return {fs.unstrip_protocol(name): _version(info) for name, info in found.items()}


def _version(info: dict[str, Any]) -> tuple:
  known = (f"{field}={info[field]}" for field in _VERSION_FIELDS if info.get(field) is not None)
  return (info.get("size"), *known)


def _file_system(url: str, prefix: str = "") -> tuple[Any, str]:
  """The fsspec file system of a URL, and the path in it."""
  import fsspec  # needed for URLs only

  protocol = url.partition("://")[0]
  try:
    return fsspec.core.url_to_fs(url)
  except ImportError as error:
    raise UserError(
      f"{prefix} {protocol}:// needs a package that is not installed ({_reason(error)}); install it with pip"
    ) from error
  except ValueError as error:
    raise UserError(
      f"{prefix} {protocol}:// is not known ({_reason(error)}); use for example gs:// or hf://"
    ) from error


def _open(name: str, stack: contextlib.ExitStack) -> BinaryIO:
  """Opens a file for reading what was in it before compression; the stack closes it."""
  if _is_url(name):
    fs, path = _file_system(name)
    file = stack.enter_context(fs.open(path, "rb"))
  else:
    file = stack.enter_context(open(name, "rb"))
  decompress = _DECOMPRESS.get(os.path.splitext(name)[1])
  return stack.enter_context(decompress(file, "rb")) if decompress else file


def _reason(error: BaseException) -> str:
  return " ".join(str(error).split()) or type(error).__name__


def _unreadable(prefix: str, name: str, error: BaseException) -> str:
  if isinstance(error, IsADirectoryError):
    return f"{prefix} {name} is a directory, not a file; name files in it, as in {name.rstrip('/')}/*.txt"
  if isinstance(error, OSError) and error.strerror:
    return f"{prefix} {name} can't be read ({error.strerror}); make it readable or narrow the glob"
  if _is_url(name):
    return f"{prefix} {name} can't be read ({_reason(error)}); look at the network, or restore the file"
  return f"{prefix} {name} can't be read ({_reason(error)}): damaged or cut short; restore the file"
