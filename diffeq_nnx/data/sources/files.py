"""The sources `text:` and `jsonl:`: local files and URLs, plain or compressed, opened through fsspec.

Each file is a part. etils.epath, the other candidate, has no `**`, and reads `gs://` through TensorFlow where that is
installed.
"""

from collections.abc import Iterator
import dataclasses
import glob
import json
import os
from typing import Any, BinaryIO
import zlib

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffeq_nnx.data.sources import compressed
from diffeq_nnx.data.sources.records import BadRecord, Options
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import check_url, is_url

_LOCAL_ERRORS = (*compressed.ERRORS, zlib.error)
# Fields that change with the version of a remote file; each file system has some of them.
_VERSION_FIELDS = ["generation", "etag", "ETag", "blob_id", "md5Hash", "crc32c", "mtime", "LastModified", "created"]


@dataclasses.dataclass(frozen=True)
class File:
  """A file as a part of a source.

  Attributes:
    kind: "text" (the file is one document) or "jsonl" (each line is one).
    name: Path or URL.
    prefix: The start of error messages.
    text_key: The key that holds a JSON object's text.
    version: For a URL, fields that identify this version of the file; () for a path.
  """

  kind: str
  name: str
  prefix: str
  text_key: str = "text"
  version: tuple = ()

  def read(self) -> Iterator[str | BadRecord]:
    """See `records.Part.read`."""
    errors = Exception if is_url(self.name) else _LOCAL_ERRORS  # each file system has errors of its own
    try:
      # local names may contain "::", which fsspec.open takes for a chain of URLs; of a zip it reads one member only
      opener, ours = fsspec.open if is_url(self.name) else LocalFileSystem().open, compressed.is_read(self.name)
      with opener(self.name, "rb", compression=None if ours or self.name.endswith(".zip") else "infer") as file:
        content = compressed.members(file, self.name) if ours else file
        yield from self._text(content) if self.kind == "text" else self._jsonl(content)
    except UserError:
      raise
    except errors as error:
      raise UserError(_unreadable(self.prefix, self.name, error)) from error

  def state(self) -> list:
    """Name, size in bytes and modification time (ns), or for a URL its version.

    Raises:
      UserError: If a local file can't be accessed.
    """
    if is_url(self.name):
      return [self.name, *self.version]
    try:
      stat = os.stat(self.name)
    except OSError as error:
      raise UserError(_unreadable(self.prefix, self.name, error)) from error
    return [os.path.abspath(self.name), stat.st_size, stat.st_mtime_ns]

  def _text(self, file: BinaryIO) -> Iterator[str | BadRecord]:
    data = file.read()
    try:
      text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
      yield self._not_utf8(data.count(b"\n", 0, error.start) + 1, error)
      return
    empty = not data
    del data  # this frame lives on while the caller works on the text
    yield self._empty() if empty else text

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
      detail = f"no key {key} (its keys: {names}); {rule}; data.text_key names the key"
      return BadRecord(f"without key {key}", where, detail)
    text = record[self.text_key]
    if not isinstance(text, str):
      detail = f"{key} is of type {type(text).__name__}, not a string; {rule}"
      return BadRecord(f"where {key} is not a string", where, detail)
    try:
      text.encode()  # JSON escapes can spell half a surrogate pair, which UTF-8 can't hold
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
  """The files that a source names, one part for each, sorted by name.

  Args:
    kind: "text" or "jsonl".
    globs: Paths, URLs and globs of both, separated by commas; `~` expands.
    prefix: The start of error messages.
    options: Names the key that holds a JSON object's text.

  Raises:
    UserError: For a glob that matches nothing, or a file system that can't be accessed.
  """
  files: dict[str, tuple] = {}
  for pattern in filter(None, (part.strip() for part in globs.split(","))):
    matches = _remote(pattern, prefix) if is_url(pattern) else _local(pattern)
    if not matches:
      place = "" if is_url(pattern) else f" (from {os.getcwd()})"
      raise UserError(f"{prefix} no file matches {pattern}{place}; give a path that exists")
    files |= matches
  if not files:
    raise UserError(f"{prefix} no file matches an empty glob; write for example {kind}:~/corpus/*.{kind}")
  return [File(kind, name, prefix, options.text_key, files[name]) for name in sorted(files)]


def _local(pattern: str) -> dict[str, tuple]:
  path = os.path.expanduser(pattern)
  # an existing name that contains [ or * is taken literally
  matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
  return dict.fromkeys(matches, ())


def _remote(pattern: str, prefix: str) -> dict[str, tuple]:
  """The URLs that match, each with its version."""
  protocol = pattern.partition("://")[0]
  check_url(pattern)
  try:
    fs, path = fsspec.core.url_to_fs(pattern)
    fs.invalidate_cache()  # an old listing would hide changes
    found = fs.glob(path, detail=True)
  except ImportError as error:
    raise UserError(
      f"{prefix} {protocol}:// needs a package that is not installed ({_reason(error)}); install it with pip"
    ) from error
  except Exception as error:
    if protocol not in fsspec.available_protocols():
      raise UserError(
        f"{prefix} {protocol}:// is not a known protocol ({_reason(error)}); use for example gs:// or hf://"
      ) from error
    raise UserError(
      f"{prefix} {pattern} can't be listed ({_reason(error)}); check the network, the name and your credentials"
    ) from error
  for name, info in found.items():
    if info.get("type") == "directory":
      raise UserError(_unreadable(prefix, fs.unstrip_protocol(name), IsADirectoryError()))
  return {fs.unstrip_protocol(name): _version(info) for name, info in found.items()}


def _version(info: dict[str, Any]) -> tuple:
  known = (f"{field}={info[field]}" for field in _VERSION_FIELDS if info.get(field) is not None)
  return (info.get("size"), *known)


def _reason(error: BaseException) -> str:
  return " ".join(str(error).split()) or type(error).__name__


def _unreadable(prefix: str, name: str, error: BaseException) -> str:
  if isinstance(error, IsADirectoryError):
    return f"{prefix} {name} is a directory, not a file; name files in it, as in {name.rstrip('/')}/*.txt"
  if isinstance(error, OSError) and error.strerror:
    return f"{prefix} {name} can't be read ({error.strerror}); make it readable or narrow the glob"
  if isinstance(error, compressed.WindowTooLarge):
    return f"{prefix} {name} can't be read ({_reason(error)}); compress it again with a smaller window, as --long=27"
  action = "check the network, or restore the file" if is_url(name) else "it is damaged or truncated: restore it"
  return f"{prefix} {name} can't be read ({_reason(error)}); {action}"
