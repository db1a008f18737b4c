"""Whose a directory with shards is, whether it is whole, and what in it is not finished yet."""

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from typing import Any

from absl import logging

from diffeq_nnx.data import shards
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import write_json

UNFINISHED = ".unfinished"
_REMOVED = ".removed"  # what `UNFINISHED` is called while it is deleted, so that half of it is never taken for work
_RECIPE = "recipe.json"
_OURS = re.compile(r"manifest\.json|tokenizer\.(model|json)|(train|validation)-\d+-of-\d+\.array_record|\..*")


@contextlib.contextmanager
def locked(directory: str, label: str) -> Iterator[None]:
  """Keeps a second process out of a directory.

  Raises:
    UserError: If there is one.
  """
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        raise UserError(f"{label}: another process is preparing it; wait for it, or stop it") from error
      logging.warning("%s: can't be locked (%s); see that no other process prepares it", label, error.strerror)
    yield
  finally:
    os.close(descriptor)


def whole(directory: str, recipe: dict[str, Any], label: str) -> dict[str, Any] | None:
  """The manifest of a directory that is whole; None, and no manifest, if it isn't.

  Raises:
    UserError: If it is prepared from another recipe, or holds other files.
  """
  path, problem = os.path.join(directory, shards.MANIFEST), None
  try:
    manifest = shards.read_manifest(directory, label)
    if manifest is not None:
      _check_same(recipe, manifest["recipe"], label)
  except _Another:
    raise
  except UserError as error:  # of another version, or damaged
    manifest, problem = None, error
  if manifest is not None:
    problem = _damage(directory, manifest, label)
    if problem is None:
      _remove_unfinished(directory)
      return manifest
  if problem is not None:
    logging.warning("%s; it is made again", problem)
    os.remove(path)
    _remove_unfinished(directory)
  elif foreign := [name for name in sorted(os.listdir(directory)) if not _OURS.fullmatch(name)]:
    raise UserError(
      f"{label}: holds {foreign[0]}, which is no part of prepared shards; name an empty or a new directory"
    )
  return None


def _damage(directory: str, manifest: dict[str, Any], label: str) -> UserError | None:
  """What is wrong with the files that a manifest names, every byte read."""
  try:
    shards.open_directory(directory, manifest, label)
  except UserError as error:
    return error
  for split in manifest["splits"].values():
    for shard in split["shards"]:
      path = os.path.join(directory, shard["file"])
      if shards.sha256(path) != shard["sha256"]:
        return UserError(f"{label}: {path} is damaged (its SHA-256 is not that of {shards.MANIFEST})")
  return None


class _Another(UserError):
  """A directory is prepared from another recipe."""


def _check_same(ours: dict[str, Any], theirs: dict[str, Any], label: str) -> None:
  """Raises _Another, naming the keys, where two recipes differ."""
  told = []
  for key in {**theirs, **ours}:
    if ours.get(key) == theirs.get(key):
      continue
    if key.endswith("_fingerprint"):
      name = key.removesuffix("_fingerprint")
      if ours.get(name) == theirs.get(name):  # else it is told anyway
        told.append(f"the files of data.{name}={ours.get(name)} have changed since")
    else:
      there, here = (repr(recipe.get(key))[:40] for recipe in (theirs, ours))
      told.append(f"{key if key == 'libraries' else f'data.{key}'} is {there} there and {here} here")
  if told:
    raise _Another(f"{label}: is prepared from something else: {'; '.join(told)}; name another directory, or remove it")


def claim(directory: str, ours: dict[str, Any], label: str) -> str:
  """The folder for unfinished work, with what an earlier run of the same recipe left there, and nothing else."""
  unfinished = os.path.join(directory, UNFINISHED)
  path = os.path.join(unfinished, _RECIPE)
  try:
    with open(path, encoding="utf-8") as file:
      same = json.load(file) == ours
  except (FileNotFoundError, ValueError):
    same = False
  if not same:
    if os.path.exists(unfinished):
      logging.warning("%s: what is unfinished there is of another recipe or other files; starting anew", label)
    _remove_unfinished(directory)
    os.makedirs(unfinished)
    write_json(path, ours)
  for folder, _, names in os.walk(unfinished):
    for name in names:
      if re.fullmatch(r".*\.\d+", name):  # left by a process that was killed
        os.remove(os.path.join(folder, name))
  return unfinished


def finish(directory: str, manifest: dict[str, Any]) -> None:
  """Makes the directory whole: last of all comes the manifest."""
  unfinished, name = os.path.join(directory, UNFINISHED), manifest["tokenizer"]["file"]
  os.replace(os.path.join(unfinished, name), os.path.join(directory, name))
  ours = {name, UNFINISHED, *(shard["file"] for split in manifest["splits"].values() for shard in split["shards"])}
  for other in set(os.listdir(directory)) - ours:
    if _OURS.fullmatch(other):  # of an earlier state of the files
      path = os.path.join(directory, other)
      shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
  at = os.path.join(unfinished, shards.MANIFEST)
  write_json(os.path.join(directory, shards.MANIFEST), manifest, at)
  _remove_unfinished(directory)


def _remove_unfinished(directory: str) -> None:
  removed = os.path.join(directory, _REMOVED)
  shutil.rmtree(removed, ignore_errors=True)
  with contextlib.suppress(FileNotFoundError):
    os.rename(os.path.join(directory, UNFINISHED), removed)
  shutil.rmtree(removed, ignore_errors=True)
