"""Files and folders on a disk or in a bucket. What this module writes is there whole or not at all.

A path is local, or the URL of a bucket that fsspec has a package for (gs://bucket/run, s3://bucket/shards), and no
module that writes asks which. A local file is written beside its place and renamed. A bucket shows an object when all
of it has arrived. It has no folders to rename, so one file of a folder is removed first and written last, and the
folder is incomplete without it. Libraries that know local files only are given one, which is then copied.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import errno
import fcntl
import glob
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

from diffeq_nnx.errors import RunError, UserError, first_line

UPLOAD_SECONDS = 60.0  # how often `Growing` copies to a bucket
TRANSFERS = 16  # at the same time
LOCK = ".lock"  # in a local folder, the file that is locked while a process works there

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_PLACE = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError, FileNotFoundError)

for _protocol in ("gcs", "s3", "abfs", "hf"):  # also for orbax: a kept listing hides what other processes change
  fsspec.config.conf.setdefault(_protocol, {})["use_listings_cache"] = False


def absolute(path: str) -> str:
  """Returns a local path absolute and with `~` expanded, and a URL without a slash at its end.

  Raises UserError where the user has no home directory, for which `~` would stand.
  """
  if is_url(path):
    return path.rstrip("/")
  if (expanded := os.path.expanduser(path)).startswith("~"):
    raise UserError(f"{path}: there is no home directory; set HOME, or name another path")
  return os.path.abspath(expanded)


def is_url(path: str) -> bool:
  """Whether a path names a file system of fsspec."""
  return "://" in os.fspath(path)


def is_name(value: Any) -> bool:
  """Whether a value, read from a file, is the name of a file in the same folder."""
  return isinstance(value, str) and os.path.basename(value) == value and value not in ("", os.curdir, os.pardir)


def is_refused(error: BaseException) -> bool:
  """Whether an error says that a file can't be read now, and not that it is missing."""
  return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError)


@contextlib.contextmanager
def writing(place: str, advice: str, begun: bool = False) -> Iterator[None]:
  """A context of code that writes to a place, whose OSError becomes an error of one line.

  Raises:
    UserError: nothing can be written there, by its name or its permissions; the line ends with the advice.
    RunError: any other cause, such as a full disk; or, with `begun`, any cause, and the line ends with the advice.
  """
  try:
    yield
  except OSError as error:
    problem = f"{place}: can't be written ({error.strerror or error})"
    if begun:
      raise RunError(f"{problem}; {advice}") from error
    if isinstance(error, _OF_PLACE) or error.errno in (errno.EROFS, errno.ENAMETOOLONG):
      raise UserError(f"{problem}; {advice}") from error
    cure = "make room, and run the same command again" if error.errno in _FULL else f"try again, or {advice}"
    raise RunError(f"{problem}; {cure}") from error


def check_url(path: str) -> None:
  """Raises UserError for a URL through fsspec's `reference`: it names a file of templates, which can compute."""
  if any(link.partition("://")[0] == "reference" for link in path.split("::")):
    raise UserError(f"{path}: URLs through reference:: are not read; name the files themselves")


@contextlib.contextmanager
def _accessing(path: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
  """Yields the file system that holds a path, and the path without the protocol.

  Raises:
    UserError: fsspec knows no such protocol, its package is not installed, `check_url` refuses the path, or it is a
      pattern in a bucket, of which fsspec's `rm` would remove every match.
    OSError: for every error within; its strerror says what it was.
  """
  if is_url(path):
    check_url(path)
  if is_url(path) and not path.startswith("http") and glob.has_magic(path):
    raise UserError(f"{path}: in a bucket *, ? and [ make a path a pattern; name a path without them")
  for name in ("gcsfs", "s3fs", "fsspec") if is_url(path) else ():
    logging.getLogger(name).setLevel(logging.CRITICAL)  # they print a traceback of what they then raise
  try:
    try:
      found = fsspec.core.url_to_fs(path) if is_url(path) else (LocalFileSystem(), path)
    except (ImportError, ValueError) as error:
      raise UserError(f"{path}: this kind of URL can't be used ({first_line(error, 200)})") from error
    yield found
  except Exception as error:  # packages for buckets raise what they like
    if isinstance(error, UserError) or isinstance(error, OSError) and not is_url(path):
      raise
    if isinstance(error, FileNotFoundError):
      raise FileNotFoundError(errno.ENOENT, "no such bucket or object", path) from error
    # gcsfs has no type for what is forbidden, and botocore's for missing credentials is an Exception
    refused = isinstance(error, PermissionError) or str(error).startswith("Forbidden:")
    refused |= getattr(error, "code", None) in (401, 403) or type(error).__name__ == "NoCredentialsError"
    kind = errno.EACCES if refused else errno.EIO
    raise OSError(kind, f"{type(error).__name__}: {first_line(error, 300)}", path) from error


def exists(path: str) -> bool:
  """Whether there is a file or folder."""
  with _accessing(path) as (fs, place):
    return fs.exists(place)


def is_folder(path: str) -> bool:
  """Whether there is a folder; in a bucket, whether there are objects below the path."""
  with _accessing(path) as (fs, place):
    return fs.isdir(place)


def list_sizes(folder: str) -> dict[str, int]:
  """Returns the bytes of each file in a folder, and 0 for a folder in it, by name; {} if the folder is not there."""
  with _accessing(folder) as (fs, root):
    try:
      found = {one["name"].rstrip("/"): one["size"] or 0 for one in fs.ls(root, detail=True)}
    except (FileNotFoundError, NotADirectoryError):
      return {}
    return {posixpath.basename(name): size for name, size in found.items() if name != root}  # some buckets list it too


def read(path: str) -> bytes:
  """Returns the content of a file."""
  with _accessing(path) as (fs, place):
    return fs.cat_file(place)


def read_ranges(ranges: list[tuple[str, int, int]]) -> list[bytes | Exception]:
  """Reads ranges of bytes of files on disks and in buckets, and returns an error in place of its bytes.

  A range is a path, the first byte and the last one plus 1.
  """
  found: dict[tuple[str, int, int], Any] = {}
  kind = lambda one: fsspec.core.split_protocol(one[0])[0] if is_url(one[0]) else None
  for protocol in set(map(kind, ranges)):
    those = [one for one in ranges if kind(one) == protocol]
    with _accessing(those[0][0]) as (fs, _):
      found |= zip(those, fs.cat_ranges(*map(list, zip(*those)), on_error="return"))
  return [found[one] for one in ranges]


def sha256(path: str) -> str:
  """Computes the SHA-256 of a file, in hex."""
  with _accessing(path) as (fs, place), fs.open(place, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: str) -> Any:
  """Reads a JSON file; raises ValueError if it isn't JSON."""
  try:
    return json.loads(read(path))
  except RecursionError as error:
    raise ValueError("nested too deeply") from error


def read_notes(path: str) -> dict[str, Any]:
  """Returns the JSON object in a file that may be gone or damaged, in whose place it returns {}."""
  try:
    known = read_json(path)
  except (OSError, ValueError):
    return {}
  return known if isinstance(known, dict) else {}


def make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes the dict of an object of JSON; raises ValueError if a key is there twice, of which json keeps the last."""
  if len(made := dict(pairs)) < len(pairs):
    twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
    raise ValueError(f"it gives {twice!r} twice")
  return made


def parse_json(content: bytes, path: str, label: str | None = None) -> Any:
  """Returns the JSON value that a file holds; raises UserError if it isn't JSON, or an object has a key twice."""
  try:
    return json.loads(content.decode("utf-8-sig"), object_pairs_hook=make_dict)
  except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
    problem = f"{os.path.basename(path)} is not JSON ({error}); correct or restore it"
    raise UserError(f"{label}: {problem}" if label else problem) from error


def hash_json(value: Any) -> str:
  """Returns the SHA-256 of a value of JSON's types, in hex; the order of keys does not count."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def make_folder(path: str) -> None:
  """Makes a folder and those above it, which a bucket does not need."""
  if not is_url(path):
    os.makedirs(os.path.expanduser(path), exist_ok=True)


def check_writable(folder: str) -> None:
  """Writes a file in a folder, which may be missing, and removes it; raises OSError if that fails."""
  make_folder(folder)
  path = os.path.join(folder, ".writable")
  write(path, b"")
  remove(path)


def remove(path: str) -> None:
  """Removes a file, or a folder with what is in it, if it is there."""
  with _accessing(path) as (fs, place), contextlib.suppress(FileNotFoundError):
    fs.rm(place, recursive=fs.isdir(place))


def move_folder(path: str, to: str) -> None:
  """Moves a folder, in a bucket object by object, and removes what was at `to`."""
  remove(to)
  if not is_url(path):
    make_folder(os.path.dirname(to))
    shutil.move(os.path.expanduser(path), os.path.expanduser(to))
    return
  with _accessing(path) as (fs, place):
    found = _find_objects(fs, place)
    fs.copy(found, [posixpath.join(to, os.path.relpath(name, place)) for name in found], batch_size=TRANSFERS)
    fs.rm(place, recursive=True)


def lock(descriptor: int, shared: bool = False) -> bool:
  """Locks an open file until it is closed; False if another process has locked it. Shared locks admit each other.

  Raises OSError where the file system has no locks.
  """
  try:
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    return True
  except (BlockingIOError, PermissionError):
    return False


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
  """Yields a temporary local name, of a hidden file. Its file becomes the one at `path` after the block."""
  if is_url(path):
    with tempfile.TemporaryDirectory() as folder:
      part = os.path.join(folder, posixpath.basename(path))
      yield part
      with _accessing(path) as (fs, place):
        fs.put_file(part, place)
    return
  path = os.path.expanduser(path)
  part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
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
  """Yields a new local folder, which replaces `path` after the block. In a bucket the file `last` is written last.

  A link stays, and the folder that it leads to is replaced. A mounted folder, which can't be, gets the files, and keeps
  those of other names.
  """
  path = absolute(path)
  if is_url(path):
    with tempfile.TemporaryDirectory() as folder:
      yield folder
      publish(folder, path, last)
    return
  path = os.path.realpath(path)
  mounted = os.path.ismount(path)
  temporary = os.path.join(path, ".unfinished") if mounted else path + ".unfinished"
  try:
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    yield temporary
    if mounted:
      remove(os.path.join(path, last))
      for name in sorted(os.listdir(temporary), key=lambda name: name == last):
        remove(os.path.join(path, name))
        os.replace(os.path.join(temporary, name), os.path.join(path, name))
      return
    if os.path.isdir(path):
      shutil.rmtree(path)
    os.replace(temporary, path)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def make_place_to_build(path: str, cache: str) -> str:
  """Makes a local folder to build what belongs at `path`, which is `path` itself unless that is in a bucket."""
  name = f"for_bucket_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
  parent = absolute("~/.cache/diffeq_nnx" if is_url(cache) else cache)
  place = os.path.join(parent, name) if is_url(path) else path
  make_folder(place)
  return place


def _list_files(folder: str) -> list[str]:
  """Lists the files in a local folder and the folders in it, by their paths from it, in order."""
  return sorted(os.path.relpath(os.path.join(top, name), folder) for top, _, names in os.walk(folder) for name in names)


def _find_objects(fs: fsspec.AbstractFileSystem, root: str) -> list[str]:
  """Lists the objects below a path, without the empty ones named `folder/` that cloud consoles make."""
  return [name for name in fs.find(root) if not name.endswith("/")]


def publish(folder: str, path: str, last: str, replaces: Callable[[str], bool] = lambda name: True) -> None:
  """Copies a local folder to a bucket, and removes other files there whose names `replaces` holds for.

  The file named `last` is removed first, unless it is there and the same, and written last.
  """
  names = _list_files(folder)
  early = [name for name in names if name != last]
  with _accessing(path) as (fs, root):
    place = lambda name: posixpath.join(root, name)
    there = {os.path.relpath(name, root) for name in _find_objects(fs, root)} if fs.exists(root) else set()
    if last in there and fs.cat_file(place(last)) != pathlib.Path(folder, last).read_bytes():
      fs.rm(place(last))
    for name in filter(replaces, there - set(names)):
      fs.rm(place(name))
    fs.put([os.path.join(folder, name) for name in early], list(map(place, early)), batch_size=TRANSFERS)
    fs.put_file(os.path.join(folder, last), place(last))


@contextlib.contextmanager
def local(path: str) -> Iterator[str]:
  """Yields a local name for a file or folder, for libraries that know no buckets. It is a copy of one in a bucket."""
  if not is_url(path):
    yield os.path.expanduser(path)
    return
  with tempfile.TemporaryDirectory() as folder:
    target = os.path.join(folder, posixpath.basename(path.rstrip("/")))
    with _accessing(path) as (fs, place):
      fs.get(place, target, recursive=fs.isdir(place), batch_size=TRANSFERS)
    yield target


def write(path: str, content: bytes) -> None:
  """Writes a file, whole or not at all."""
  with replacing(path) as part, open(part, "wb") as file:
    file.write(content)


def write_json(path: str, content: Any) -> None:
  """Writes a JSON file, whole or not at all."""
  write(path, f"{json.dumps(content, indent=1)}\n".encode())


class Growing:
  """A folder whose files grow, which those of a bucket can't.

  They are written in `folder`, which is the folder itself if it is local. For a bucket it is a temporary folder, from
  which files that have changed are copied every `UPLOAD_SECONDS` beside the work, and by `upload`.
  """

  def __init__(self, path: str, first: tuple[str, ...] = ()):
    """Copies the files named `first` from a bucket."""
    self._bucket = path if is_url(path) else None
    self.folder = os.path.expanduser(path) if self._bucket is None else tempfile.mkdtemp()
    self._uploaded: dict[str, tuple[int, float]] = {}
    self._lock = threading.Lock()
    self._since = time.monotonic()
    for name in first if self._bucket else ():
      with contextlib.suppress(FileNotFoundError):
        pathlib.Path(self.folder, name).write_bytes(read(posixpath.join(path, name)))

  def note_growth(self) -> None:
    """Records that files have grown, and starts to copy them if it is time."""
    if self._bucket and not self._lock.locked() and time.monotonic() - self._since > UPLOAD_SECONDS:
      self._since = time.monotonic()
      threading.Thread(target=self._try_upload, daemon=True).start()

  def _try_upload(self) -> None:
    with contextlib.suppress(OSError):  # the next `upload` raises what lasts
      self.upload()

  def upload(self) -> None:
    """Copies what has changed to the bucket; raises OSError."""
    if self._bucket is None:
      return
    with self._lock, _accessing(self._bucket) as (fs, root):
      for name in _list_files(self.folder):
        stat = os.stat(path := os.path.join(self.folder, name))
        if self._uploaded.get(name) != (stat.st_size, stat.st_mtime):
          fs.put_file(path, posixpath.join(root, name))
          self._uploaded[name] = (stat.st_size, stat.st_mtime)

  def close(self) -> None:
    """Copies the rest to the bucket; raises OSError."""
    try:
      self.upload()
    finally:
      if self._bucket:
        shutil.rmtree(self.folder, ignore_errors=True)


def check_place(workdir: str, flag: str = "workdir") -> None:
  """Raises UserError where orbax keeps no checkpoints: in other buckets than gs://, and at paths with patterns."""
  if "://" in workdir and not workdir.startswith("gs://"):
    raise UserError(
      f"{flag}={workdir}: orbax keeps checkpoints on disks and at gs:// only; name a disk or gs://..., and copy the "
      "directory when the run is finished (text and shards may be in other buckets)"
    )
  path = absolute(workdir)
  if is_url(path) and ("#" in path or {"", ".", ".."} & set(path.split("/")[3:])):
    raise UserError(
      f"{flag}={workdir}: libraries read #, //, /./ and /../ in a URL in different ways; name a path without them"
    )
  if found := next((one for one in path if one in "[*?\\" or "\ud800" <= one <= "\udfff"), None):
    raise UserError(f"{flag}={workdir}: orbax keeps no checkpoints where a path has {found!r}; name another directory")
