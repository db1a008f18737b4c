"""The sources `text:` and `jsonl:`: local files and URLs, plain or compressed, opened through fsspec.

Each file is one part, except that a local file of JSON lines that is not compressed is divided into ranges of lines.
etils.epath, the other candidate, has no `**`, and reads `gs://` through TensorFlow where that is installed.
"""

from collections.abc import Iterator
import dataclasses
import functools
import glob
import io
import json
import os
import sys
from typing import Any
import urllib.parse

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffeq_nnx.data.documents import Document
from diffeq_nnx.data.sources import records
from diffeq_nnx.data.sources.records import BadRecord, Options, Part
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import check_url, is_url, make_dict

PART_BYTES = 32 << 20  # of a large file that is read in parts, and of a file whose size its file system does not tell
# Fields that change with the version of a remote file; each file system has some of them.
_VERSION_FIELDS = ["generation", "etag", "ETag", "blob_id", "md5Hash", "crc32c", "mtime", "LastModified", "created"]


def make_parts(kind: str, path: str, size: int) -> list[Part]:
  """Makes the parts of a file: ranges of `PART_BYTES` if each can be read without what is before it, else all of it.

  A file of size 0 may be one whose file system does not tell, and is one part.
  """
  if kind == "text":
    return [Part(path, size, functools.partial(_read_text, path))]
  step = sys.maxsize if not size or is_url(path) or _find_compression(path) else PART_BYTES
  parts = []
  for start in range(0, max(size, 1), step):
    name = f"{path} from byte {start}" if start else path
    parts.append(Part(name, min(step, size - start), functools.partial(_read_lines, path, start, start + step)))
  return parts


def _find_compression(path: str) -> str | None:
  """Returns fsspec's name of a file's compression, by its end, or in a web URL by that of what is before a "?"."""
  file = urllib.parse.urlsplit(path).path if path.startswith(("http://", "https://")) else path
  return fsspec.utils.infer_compression(file)


def _open(path: str) -> Any:
  compression = _find_compression(path)
  return open_bytes(path, None if compression == "zip" else compression)  # of a zip fsspec reads one member only


def _read_text(path: str, prefix: str, options: Options) -> Iterator[str | BadRecord]:
  """Reads a file as one document; see `records.Part`."""
  with _open(path) as file:
    data = file.read()
  if b"\0" in data:
    yield BadRecord("files with NUL bytes", "holds NUL bytes, as archives and UTF-16 do; unpack or convert it", path)
    return
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    number = data.count(b"\n", 0, error.start) + 1
    yield records.make_not_utf8(error, f"{path} line {number}")
    return
  empty = not text
  del data  # this frame lives on while the caller works on the text
  yield _make_empty(path) if empty else text


def _read_lines(path: str, start: int, stop: int, prefix: str, options: Options) -> Iterator[Document | BadRecord]:
  """Reads the lines of a file that begin in a range of bytes, each as one document; see `records.Part`."""
  at = number = 0
  with _open(path) as file:
    if start:  # the line that holds the byte before the range is of the range before
      file.seek(start - 1)
      at = start - 1 + len(file.readline())
    # a file of fsspec looks for its place before each line, which that of a web server may not tell
    for number, line in enumerate(io.BufferedReader(file) if is_url(path) else file, start=1):
      if at >= stop:
        return
      at += len(line)
      if line.strip():
        document = _parse_line(line, options, "utf-8-sig" if number == 1 and not start else "utf-8")
        if isinstance(document, BadRecord):
          before = _count_newlines(path, start - 1) + 1 if start else 0
          document = dataclasses.replace(document, where=f"{path} line {before + number}")
        yield document
  if number == start == 0:
    yield _make_empty(path)


def _make_empty(path: str) -> BadRecord:
  detail = "the file is empty; every file must hold text: fill it, remove it or narrow the glob"
  return BadRecord("empty files", detail, path)


def _parse_line(line: bytes, options: Options, encoding: str) -> Document | BadRecord:
  """Returns the document of one line of JSON, or a `BadRecord` without its place."""
  try:
    record = json.loads(line.decode(encoding), object_pairs_hook=make_dict)
  except UnicodeDecodeError as error:
    return records.make_not_utf8(error)
  except (ValueError, RecursionError) as error:
    return BadRecord("not JSON", f"not JSON ({error}); {records.make_rule(options)}")
  if not isinstance(record, dict):
    problem = f"of type {type(record).__name__}, not an object"
    return BadRecord("not an object", f"{problem}; {records.make_rule(options)}")
  return records.read_document(record, options)


_counted = ("", 0, 0)  # a file, a place in it, and the newlines before that


def _count_newlines(path: str, stop: int) -> int:
  """Counts the newlines before byte `stop` of a file, from where the last call ended if it was for an earlier place."""
  global _counted
  known, at, count = _counted
  if known != path or at > stop:
    at = count = 0
  with open(path, "rb") as file:
    file.seek(at)
    while chunk := file.read(min(stop - at, 1 << 20)):
      count, at = count + chunk.count(b"\n"), at + len(chunk)
  _counted = path, at, count
  return count


def open_bytes(path: str, compression: str | None = None) -> Any:
  """Opens a local file or a URL; raises what its file system raises. For `compression` see `fsspec.open`."""
  # local names may contain "::", which fsspec.open takes for a chain of URLs
  return (fsspec.open if is_url(path) else LocalFileSystem().open)(path, "rb", compression=compression)


def resolve(kind: str, globs: str, prefix: str) -> tuple[list[Part], list]:
  """Finds the files that a source of the kind "text" or "jsonl" names, as `list_files`; see `sources.RESOLVERS`."""
  found, states = list_files(kind, globs, prefix)
  return [part for path, size in found for part in make_parts(kind, path, size)], states


def list_files(kind: str, globs: str, prefix: str) -> tuple[list[tuple[str, int]], list]:
  """Lists the files that a source names, each with its size in bytes, and what changes with each file.

  `globs` are paths, URLs and globs of both, separated by commas; `~` expands. The files are sorted by their names, and
  a file is there once if links give its folder several names. The state of each is its name, its size, and the time of
  its last change (ns), or for a URL what identifies this version. Raises UserError for a glob that matches nothing, or
  a file or file system that can't be accessed.
  """
  versions: dict[str, tuple] = {}
  for pattern in filter(None, (part.strip() for part in globs.split(","))):
    matches = _find_remote(pattern, prefix) if is_url(pattern) else _find_local(pattern, prefix)
    if not matches:
      place = "" if is_url(pattern) else f" (from {os.getcwd()})"
      raise UserError(f"{prefix} no file matches {pattern}{place}; give a path that exists")
    versions |= matches
  if not versions:
    raise UserError(f"{prefix} no file matches an empty glob; write for example {kind}:~/corpus/*.{kind}")
  named: dict[str, str] = {}  # one name of each file, whatever links lead to it
  for name in sorted(versions):
    folder, file = os.path.split(name)  # files that link to one blob are several documents
    named.setdefault(name if is_url(name) else os.path.join(os.path.realpath(folder), file), name)
  found, states = [], []
  for name in named.values():
    size, *version = versions[name]
    found.append((name, PART_BYTES if size is None else size))
    states.append([name if is_url(name) else os.path.abspath(name), size, *version])
  return found, states


def _find_local(pattern: str, prefix: str) -> dict[str, tuple]:
  """Returns the files that match, each with its size and the time of its last change (ns)."""
  path, versions = os.path.expanduser(pattern), {}
  # an existing name that contains [ or * is taken literally
  for name in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
    with records.reading(prefix, name):
      stat = os.stat(name)
    versions[name] = (stat.st_size, stat.st_mtime_ns)
  return versions


def _find_remote(pattern: str, prefix: str) -> dict[str, tuple]:
  """Returns the URLs that match, each with its size and fields that identify this version."""
  protocol = pattern.partition("://")[0]
  check_url(pattern)
  try:
    fs, path = fsspec.core.url_to_fs(pattern)
    fs.invalidate_cache()  # an old listing would hide changes
    found = fs.glob(path, detail=True)
  except ImportError as error:
    raise UserError(
      f"{prefix} {protocol}:// needs a package that is not installed ({records.reason(error)}); install it with pip"
    ) from error
  except Exception as error:
    if protocol not in fsspec.available_protocols():
      raise UserError(
        f"{prefix} {protocol}:// is not a known protocol ({records.reason(error)}); use for example gs:// or hf://"
      ) from error
    raise UserError(
      f"{prefix} {pattern} can't be listed ({records.reason(error)}); check the network, the name and your credentials"
    ) from error
  versions = {}
  for name, info in found.items():
    name = fs.unstrip_protocol(name)
    if "/." in name and "/." not in pattern:  # as for local files, a pattern does not match hidden ones
      continue
    with records.reading(prefix, name):
      if info.get("type") == "directory":
        raise IsADirectoryError
    if info.get("contentEncoding"):  # of Google Cloud Storage, whose sizes are then not those of what is read
      problem = f"is stored with Content-Encoding {info['contentEncoding']}, and would be cut when it is read"
      raise UserError(f"{prefix} {name} {problem}; upload the file without this option")
    known = (f"{field}={info[field]}" for field in _VERSION_FIELDS if info.get(field) is not None)
    versions[name] = (info.get("size"), *known)
  return versions
