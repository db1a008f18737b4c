"""A directory of prepared shards: locking it, checking that it is complete, and its unfinished work."""

from collections.abc import Iterator, Sequence
import contextlib
import fcntl
import glob
import multiprocessing
import os
import re
import shutil
from typing import Any

from absl import logging

from diffeq_nnx import files
from diffeq_nnx.data import shards, tokenizers
from diffeq_nnx.errors import UserError

UNFINISHED = ".unfinished"
_NAMES = (
  rf"(manifest\.json|tokenizer\.(model|json)|{re.escape(tokenizers.CHAT_TEMPLATE)}|(train|validation)-\d+-\d+\.tokens)"
)
_OURS = re.compile(rf"{_NAMES}|\.{_NAMES}\.\d+")  # the second are hidden files that a killed process left


@contextlib.contextmanager
def lock(directory: str, label: str, wait: bool = False, what: str = "is preparing it") -> Iterator[None]:
  """Keeps a second process out of a directory; raises UserError if there is one, or waits for it.

  Processes of other hosts are noticed where the file system shares locks, as NFS does.

  Raises UserError in a worker process that imports the program which started it, and would wait for it forever.
  """
  if getattr(multiprocessing.current_process(), "_inheriting", False):
    raise UserError(
      f"{label}: a program that prepares text is imported by its worker processes; start it under "
      "`if __name__ == '__main__':`"
    )
  try:  # NFS locks a file that can be written, on all hosts, and no directory
    descriptor = os.open(os.path.join(directory, files.LOCK), os.O_RDWR | os.O_CREAT, 0o666)
  except OSError:
    descriptor = os.open(directory, os.O_RDONLY)
  try:
    try:
      if not files.lock(descriptor):
        if not wait:
          raise UserError(f"{label}: another process {what}; wait for it, or stop it")
        logging.warning("%s: another process %s; waiting", label, what)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
      logging.warning("%s: can't be locked (%s); make sure that no other process works there", label, error.strerror)
    yield
  finally:
    os.close(descriptor)


def is_locked(directory: str) -> bool:
  """Whether a process has locked a local directory with `lock`; several may ask at the same time."""
  try:
    with open(os.path.join(files.absolute(directory), files.LOCK), "rb") as file:
      return not files.lock(file.fileno(), shared=True)
  except OSError:
    return False


def is_ours(name: str) -> bool:
  """Whether a file in a directory is of prepared shards."""
  return _OURS.fullmatch(name) is not None


def open_complete(directories: Sequence[str], recipe: dict[str, Any], label: str) -> dict[str, Any] | None:
  """Returns the manifest of the first directory that is complete, and removes those before it; or None.

  Raises UserError if a directory is prepared from another recipe; or if it has no manifest that can be read and holds
  other files, and there is no unfinished work. Hidden files, as those of a repository, may always be there.
  """
  begun = any(files.is_folder(os.path.join(one, UNFINISHED)) for one in directories)
  return next(filter(None, (_open_complete(one, recipe, label, begun) for one in directories)), None)


def _open_complete(directory: str, recipe: dict[str, Any], label: str, begun: bool) -> dict[str, Any] | None:
  """Returns the manifest of a complete directory; otherwise removes it and returns None."""
  manifest = problem = None
  try:
    manifest = shards.read_manifest(directory, label)
    if manifest is not None and manifest["recipe"] == recipe:
      _check_files(directory, manifest, label)
  except UserError as error:
    cause: BaseException | None = error
    while cause is not None:
      if files.is_refused(cause):
        raise
      cause = cause.__cause__
    problem = error  # of another version, or damaged
  if manifest is not None:
    _check_same(recipe, manifest["recipe"], label)
  else:
    names = sorted(files.list_sizes(directory))
    foreign = [name for name in names if not (is_ours(name) or name.startswith("."))]
    if foreign and not begun:
      raise UserError(
        f"{label}: holds {foreign[0]}, which is no part of prepared shards; name an empty or a new directory"
      )
    if problem is None:
      return None
  if problem is not None:
    logging.warning("%s; preparing it again", problem)
    files.remove(os.path.join(directory, shards.MANIFEST))
  remove_unfinished(directory)
  return manifest if problem is None else None


def _check_same(ours: dict[str, Any], theirs: dict[str, Any], label: str) -> None:
  """Raises UserError, naming the keys, where two recipes differ."""
  changed, differences = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)], []
  for key in changed:
    name = key.removesuffix("_fingerprint")
    if name == key:
      there, here = (repr(recipe.get(key))[:40] for recipe in (theirs, ours))
      differences.append(f"{key if key == 'libraries' else f'data.{key}'} is {there} there and {here} here")
    elif name not in changed:
      differences.append(f"the files of data.{name}={ours.get(name)} have changed since")
  if differences:
    raise UserError(
      f"{label}: is prepared from something else: {'; '.join(differences)}; name another directory, or remove it"
    )


def _check_files(directory: str, manifest: dict[str, Any], label: str) -> None:
  """Reads every byte of the files that a manifest names; raises UserError if one is damaged."""
  shards.open_directory(directory, manifest, label)
  for shard in (shard for split in manifest["splits"].values() for shard in split["shards"]):
    path = os.path.join(directory, shard["file"])
    if files.sha256(path) != shard["sha256"]:
      raise UserError(f"{label}: {path} is damaged (its SHA-256 is not that of {shards.MANIFEST})")


def claim(directory: str, work: Any, label: str) -> str:
  """Returns the folder for unfinished work, which holds only what earlier runs of the same work finished."""
  unfinished = os.path.join(directory, UNFINISHED)
  folder = os.path.join(unfinished, files.hash_json(work))
  if os.path.exists(unfinished) and os.listdir(unfinished) != [os.path.basename(folder)]:
    logging.warning("%s: its unfinished work is of another recipe, version or other files; starting anew", label)
    remove_unfinished(directory)
  os.makedirs(folder, exist_ok=True)
  return folder


def finish(directory: str, unfinished: str, manifest: dict[str, Any]) -> None:
  """Completes the directory. The manifest comes last."""
  template = {tokenizers.CHAT_TEMPLATE} if "chat_template" in manifest["tokenizer"] else set()
  names = {manifest["tokenizer"]["file"], *template}
  for name in names:
    os.replace(os.path.join(unfinished, name), os.path.join(directory, name))
  ours = {*names, UNFINISHED, *(shard["file"] for split in manifest["splits"].values() for shard in split["shards"])}
  for other in set(os.listdir(directory)) - ours:
    if is_ours(other):  # of an earlier state of the files, or of a process that was killed while it wrote
      files.remove(os.path.join(directory, other))
  files.write_json(os.path.join(directory, shards.MANIFEST), manifest)
  remove_unfinished(directory)


def remove_unfinished(directory: str) -> None:
  """Removes the unfinished work in a directory."""
  for folder in glob.glob(os.path.join(glob.escape(directory), UNFINISHED, "*")):
    os.rename(folder, f"{folder}.removed")  # so that half of it is never taken for work
  shutil.rmtree(os.path.join(directory, UNFINISHED), ignore_errors=True)
