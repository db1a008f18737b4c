"""Where text comes from: `builtin`, `text:GLOB` and `jsonl:GLOB`, read lazily, document by document."""

import difflib
import glob
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from diffeq_nnx.errors import UserError

KINDS = ("builtin", "text:GLOB", "jsonl:GLOB")
_RECORD = 'each line must be like {"text": "..."}'
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


def documents(source: str, key: str = "data.source") -> Iterator[str]:
  """Yields the documents of a source, one at a time, in an order that depends on the source alone.

  Args:
    source: `builtin` (the prose of Python's own help topics), `text:GLOB` (each file one document, UTF-8) or
      `jsonl:GLOB` (one JSON object a line, its text under "text"). GLOB may be several globs separated by
      commas; `~` expands; files are read in sorted order, `.gz` and `.xz` directly.
    key: The configuration key that errors name.

  Returns:
    An iterator of non-empty strings; empty texts and blank JSON lines are passed over. No more than one
    document is held in memory.

  Raises:
    UserError: At the call for an unknown kind or a glob that matches nothing; while iterating for a file that
      can't be read, is empty, or isn't UTF-8 or JSON of that form, and for a source with no text at all.
  """
  prefix = f"{key}={source}:"
  kind, files = _resolve(source, key)
  return _nonempty(_read(kind, files, prefix), prefix)


def fingerprint(source: str, key: str = "data.source") -> str:
  """Tells one state of a source from another without reading its files.

  Args:
    source: As in `documents`.
    key: The configuration key that errors name.

  Returns:
    The hex SHA-256 of the kind and of each file's absolute path, size (bytes) and modification time (ns); for
    `builtin`, of the text itself.

  Raises:
    UserError: For an unknown kind, a glob that matches nothing, or a file that can't be examined.
  """
  kind, files = _resolve(source, key)
  if kind == "builtin":
    state = [kind, list(_builtin())]
  else:
    state = [kind]
    for path in files:
      try:
        stat = os.stat(path)
      except OSError as error:
        raise UserError(_unreadable(f"{key}={source}:", path, error)) from error
      state.append([os.path.abspath(path), stat.st_size, stat.st_mtime_ns])
  return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _resolve(source: str, key: str) -> tuple[str, list[str]]:
  """Splits a source into its kind and the sorted files that its globs match."""
  prefix = f"{key}={source}:"
  kind, colon, globs = source.partition(":")
  if kind == "builtin" and not colon:
    return kind, []
  if kind not in ("text", "jsonl") or not colon:
    kinds = ", ".join(KINDS)
    raise UserError(f"{prefix} unknown kind of source; use one of {kinds}; nearest: {_nearest(source)}")
  files = set()
  for pattern in filter(None, (part.strip() for part in globs.split(","))):
    path = os.path.expanduser(pattern)
    # A file whose very name holds [ or * is meant as it stands.
    matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if not matches:
      raise UserError(f"{prefix} no file matches {pattern} (from {os.getcwd()}); give a path that exists")
    files.update(matches)
  if not files:
    raise UserError(f"{prefix} no file matches an empty glob; write for example {kind}:~/corpus/*.{kind}")
  return kind, sorted(files)


def _nearest(source: str) -> str:
  """The source that the writer most likely meant."""
  kind, colon, rest = source.partition(":")
  if not colon and (os.sep in source or "." in source):
    return f"{'jsonl' if '.json' in source else 'text'}:{source}"
  name = difflib.get_close_matches(kind.lower(), ("builtin", "text", "jsonl"), n=1, cutoff=0.0)[0]
  return name if name == "builtin" else f"{name}:{rest or 'GLOB'}"


def _nonempty(texts: Iterator[str], prefix: str) -> Iterator[str]:
  found = False
  for text in texts:
    if text:
      found = True
      yield text
  if not found:
    raise UserError(f"{prefix} holds no text at all; give a source with at least one non-empty document")


def _read(kind: str, files: list[str], prefix: str) -> Iterator[str]:
  if kind == "builtin":
    yield from _builtin()
  for path in files:
    try:
      with _open(path) as file:
        yield from _text(file, path, prefix) if kind == "text" else _jsonl(file, path, prefix)
    except _READ_ERRORS as error:
      raise UserError(_unreadable(prefix, path, error)) from error


def _builtin() -> Iterator[str]:
  from pydoc_data.topics import topics  # half a megabyte, needed for this kind only

  return (topics[name] for name in sorted(topics))


def _open(path: str) -> BinaryIO:
  if path.endswith(".gz"):
    return gzip.open(path, "rb")
  return lzma.open(path, "rb") if path.endswith(".xz") else open(path, "rb")


def _text(file: BinaryIO, path: str, prefix: str) -> Iterator[str]:
  data = file.read()
  if not data:
    raise UserError(_empty(prefix, path))
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = data.count(b"\n", 0, error.start) + 1
    raise UserError(_not_utf8(prefix, path, line, error)) from error
  del data  # the caller holds on to this frame while it works on the text
  yield text


def _jsonl(file: BinaryIO, path: str, prefix: str) -> Iterator[str]:
  number = 0
  for number, line in enumerate(file, start=1):
    if not line.strip():
      continue
    where = f"{prefix} {path} line {number}"
    try:
      record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
      raise UserError(_not_utf8(prefix, path, number, error)) from error
    except (ValueError, RecursionError) as error:
      raise UserError(f"{where}: not JSON ({error}); {_RECORD}") from error
    if not isinstance(record, dict):
      raise UserError(f"{where}: of type {type(record).__name__}, not an object; {_RECORD}")
    if "text" not in record:
      names = ", ".join(map(repr, list(record)[:10])) or "none"
      raise UserError(f'{where}: no key "text" (its keys: {names}); {_RECORD}')
    text = record["text"]
    if not isinstance(text, str):
      raise UserError(f'{where}: "text" is of type {type(text).__name__}, not a string; {_RECORD}')
    try:
      text.encode()  # JSON escapes can spell half a character, which no UTF-8 text holds
    except UnicodeEncodeError as error:
      at = error.start
      raise UserError(f'{where}: "text" holds a lone surrogate at character {at}; remove it') from error
    yield text
  if number == 0:
    raise UserError(_empty(prefix, path))


def _empty(prefix: str, path: str) -> str:
  return f"{prefix} {path} is empty; every file must hold text: fill it, remove it or narrow the glob"


def _not_utf8(prefix: str, path: str, line: int, error: UnicodeDecodeError) -> str:
  return f"{prefix} {path} line {line}: not UTF-8 ({error.reason}); convert the file, for example with iconv"


def _unreadable(prefix: str, path: str, error: BaseException) -> str:
  if isinstance(error, IsADirectoryError):
    return f"{prefix} {path} is a directory, not a file; name files in it, as in {path.rstrip('/')}/*.txt"
  if isinstance(error, OSError) and error.strerror:
    return f"{prefix} {path} can't be read ({error.strerror}); make it readable or narrow the glob"
  reason = " ".join(str(error).split()) or type(error).__name__
  return f"{prefix} {path} can't be read ({reason}): damaged or cut short; restore the file"
