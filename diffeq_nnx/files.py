"""Files and folders on a disk or in a bucket; what this module writes is there whole or not at all.

A path is local, or the URL of a bucket that fsspec has a package for (gs://bucket/run, s3://bucket/run). No module that
writes asks which. A local file is written beside its place and renamed. A bucket shows an object when all of it
has arrived; it has no folders to rename, so a folder has one file that is removed first and written last, and is
incomplete without it. Libraries that know local files only are given one, which is then copied.
"""

from collections.abc import Iterator
import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import posixpath
import shutil
import tempfile
import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffeq_nnx.errors import UserError, first_line

UPLOAD_SECONDS = 60.0  # how often `Growing` copies to a bucket
TRANSFERS = 16  # at the same time

for _protocol in ("gcs", "s3", "abfs", "hf"):  # also for orbax: a kept listing hides what other processes change
  fsspec.config.conf.setdefault(_protocol, {})["use_listings_cache"] = False


def absolute(path: str) -> str:
  """A local path, `~` expanded and absolute; a URL as it is, without a slash at its end."""
  return path.rstrip("/") if is_url(path) else os.path.abspath(os.path.expanduser(path))


def is_url(path: str) -> bool:
  """Whether a path names a file system of fsspec."""
  return "://" in path


def file_system(path: str) -> fsspec.AbstractFileSystem:
  """The file system that holds a path.

  Raises:
    UserError: fsspec knows no such protocol, or its package is not installed.
  """
  if not is_url(path):
    return LocalFileSystem()
  for name in ("gcsfs", "s3fs", "fsspec"):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # they print a traceback of what they then raise
  try:
    return fsspec.core.url_to_fs(path)[0]
  except (ImportError, ValueError) as error:
    raise UserError(f"{path}: this kind of URL can't be used ({first_line(error, 200)})") from error


@contextlib.contextmanager
def _accessing(path: str) -> Iterator[fsspec.AbstractFileSystem]:
  """The file system of a path; every error becomes an OSError whose strerror says what it was."""
  try:
    yield file_system(path)
  except (UserError, KeyboardInterrupt):
    raise
  except OSError as error:
    if not is_url(path):
      raise
    missing = isinstance(error, FileNotFoundError)
    text = "no such bucket or object" if missing else f"{type(error).__name__}: {first_line(error, 300)}"
    raise OSError(errno.ENOENT if missing else errno.EIO, text, path) from error
  except Exception as error:  # packages for buckets raise what they like
    raise OSError(errno.EIO, f"{type(error).__name__}: {first_line(error, 300)}", path) from error


def exists(path: str) -> bool:
  """Whether there is a file or folder."""
  with _accessing(path) as fs:
    return fs.exists(path)


def is_folder(path: str) -> bool:
  """Whether there is a folder; in a bucket, whether there are objects below the path."""
  with _accessing(path) as fs:
    return fs.isdir(path)


def sizes(folder: str) -> dict[str, int]:
  """Bytes of each file in a folder, and 0 for a folder in it, by name; one request. {} if the folder is not there."""
  with _accessing(folder) as fs:
    try:
      found = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
      return {}
    root = fs._strip_protocol(folder).rstrip("/")  # which some buckets list too
    return {
      posixpath.basename(one["name"].rstrip("/")): one["size"] or 0 for one in found if one["name"].rstrip("/") != root
    }


def read(path: str) -> bytes:
  """The content of a file."""
  with _accessing(path) as fs:
    return fs.cat_file(path)


def read_json(path: str) -> Any:
  """The content of a JSON file."""
  return json.loads(read(path))


def make_folder(path: str) -> None:
  """Makes a folder and those above it; a bucket needs none."""
  if not is_url(path):
    os.makedirs(path, exist_ok=True)


def check_writable(folder: str) -> None:
  """Writes a file in a folder, which may be missing, and removes it; raises OSError if that can't be."""
  make_folder(folder)
  path = os.path.join(folder, ".writable")
  write(path, b"")
  remove(path)


def remove(path: str) -> None:
  """Removes a file, or a folder with what is in it; nothing happens if it is not there."""
  with _accessing(path) as fs, contextlib.suppress(FileNotFoundError):
    fs.rm(path, recursive=fs.isdir(path))


def move_folder(path: str, to: str) -> None:
  """Moves a folder, in a bucket object by object; what was at `to` is removed."""
  remove(to)
  if not is_url(path):
    os.makedirs(os.path.dirname(to), exist_ok=True)
    shutil.move(path, to)
    return
  with _accessing(path) as fs:
    names = [os.path.relpath(name, fs._strip_protocol(path)) for name in fs.find(path)]
    fs.copy(*([posixpath.join(place, name) for name in names] for place in (path, to)), batch_size=TRANSFERS)
    fs.rm(path, recursive=True)


@contextlib.contextmanager
def replacing(path: str, at: str | None = None) -> Iterator[str]:
  """A temporary local name, derived from `at` or `path`, whose file becomes that at `path` after the block."""
  if is_url(path):
    with tempfile.TemporaryDirectory() as folder:
      part = os.path.join(folder, posixpath.basename(path))
      yield part
      with _accessing(path) as fs:
        fs.put_file(part, path)
    return
  part = f"{at or path}.{os.getpid()}"
  try:
    yield part
    descriptor = os.open(part, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(part, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(part)
    raise


@contextlib.contextmanager
def replacing_folder(path: str, last: str) -> Iterator[str]:
  """A new local folder, which replaces `path` after the block; in a bucket the file named `last` is written last."""
  path = absolute(path)
  if is_url(path):
    with tempfile.TemporaryDirectory() as folder:
      yield folder
      copy_folder(folder, path, last)
    return
  temporary = path + ".unfinished"
  try:
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    yield temporary
    if os.path.isdir(path):
      shutil.rmtree(path)
    os.replace(temporary, path)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def place_to_build(path: str, cache: str) -> str:
  """A folder to build what belongs at `path`: that itself, or for a bucket a local one in the folder `cache`."""
  name = f"for_bucket_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
  place = os.path.join(cache, name) if is_url(path) else path
  make_folder(place)
  return place


def publish(place: str, path: str, last: str) -> None:
  """Copies what was built in a `place_to_build` to its bucket, if the file named `last` is there, and removes it."""
  if place != path:
    if exists(os.path.join(place, last)):
      copy_folder(place, path, last)
    remove(place)


def copy_folder(folder: str, path: str, last: str) -> None:
  """Copies a local folder to a bucket, and removes what is there beside.

  The file named `last` is removed first, unless it is there and the same, and written last.
  """
  names = [os.path.relpath(os.path.join(place, name), folder) for place, _, files in os.walk(folder) for name in files]
  early = sorted(set(names) - {last})
  with _accessing(path) as fs:
    root = fs._strip_protocol(path).rstrip("/")
    there = {os.path.relpath(name, root) for name in fs.find(path)} if fs.exists(path) else set()
    if last in there and read(posixpath.join(path, last)) != pathlib.Path(folder, last).read_bytes():
      fs.rm(posixpath.join(path, last))
    for name in there - set(names):
      fs.rm(posixpath.join(path, name))
    fs.put(
      [os.path.join(folder, name) for name in early],
      [posixpath.join(path, name) for name in early],
      batch_size=TRANSFERS,
    )
    if last in names:
      fs.put_file(os.path.join(folder, last), posixpath.join(path, last))


@contextlib.contextmanager
def local(path: str) -> Iterator[str]:
  """A local name for a file or folder, for libraries that know no buckets: a copy of one in a bucket, until the end."""
  if not is_url(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    target = os.path.join(folder, posixpath.basename(path.rstrip("/")))
    with _accessing(path) as fs:
      fs.get(path, target, recursive=fs.isdir(path), batch_size=TRANSFERS)
    yield target


def write(path: str, content: bytes) -> None:
  """Writes a file, whole or not at all."""
  if is_url(path):
    with _accessing(path) as fs:
      fs.pipe_file(path, content)
    return
  with replacing(path) as part, open(part, "wb") as file:
    file.write(content)


def write_json(path: str, content: Any, at: str | None = None) -> None:
  """Writes a JSON file, whole or not at all; `at` as for `replacing`."""
  with replacing(path, at) as part, open(part, "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)
    file.write("\n")


class Growing:
  """Files of a folder that grow, which those of a bucket can't.

  They are written in `folder`, which is the folder itself where it is local. Of a bucket it is a temporary one, from
  which files that have changed are copied every `UPLOAD_SECONDS` beside the work, and by `upload`.
  """

  def __init__(self, path: str, first: tuple[str, ...] = ()):
    """`first`: names of files that are copied from a bucket before."""
    self._path = path
    self.folder = tempfile.mkdtemp() if is_url(path) else path
    self._uploaded: dict[str, tuple[int, float]] = {}
    self._lock = threading.Lock()
    self._thread: threading.Thread | None = None
    self._since = time.monotonic()
    if is_url(path):
      for name in first:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, name), "wb") as file:
          file.write(read(posixpath.join(path, name)))

  def grown(self) -> None:
    """Tells that files have grown; starts to copy them if it is time."""
    busy = self._thread is not None and self._thread.is_alive()
    if is_url(self._path) and not busy and time.monotonic() - self._since > UPLOAD_SECONDS:
      self._since = time.monotonic()
      self._thread = threading.Thread(target=self._beside, daemon=True)
      self._thread.start()

  def _beside(self) -> None:
    with contextlib.suppress(OSError):  # the next `upload` raises what lasts
      self.upload()

  def upload(self) -> None:
    """Copies what has changed; raises OSError."""
    if not is_url(self._path):
      return
    with self._lock, _accessing(self._path) as fs:
      for place, _, files in os.walk(self.folder):
        for name in files:
          path = os.path.join(place, name)
          stat = os.stat(path)
          if self._uploaded.get(path) != (stat.st_size, stat.st_mtime):
            fs.put_file(path, posixpath.join(self._path, os.path.relpath(path, self.folder)))
            self._uploaded[path] = (stat.st_size, stat.st_mtime)

  def close(self) -> None:
    """Copies the rest; raises OSError."""
    try:
      self.upload()
    finally:
      if is_url(self._path):
        shutil.rmtree(self.folder, ignore_errors=True)
