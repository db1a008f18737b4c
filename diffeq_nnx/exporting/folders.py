"""The folders that exports write."""

from collections.abc import Iterator
import contextlib
import errno
import json
import os
import shutil
from typing import Any

import numpy as np
import safetensors.numpy

from diffeq_nnx import files
from diffeq_nnx.errors import UserError


def check_new(folder: str) -> None:
  """Raises UserError if the folder exists and is not empty."""
  if not folder:
    raise UserError("out=: is empty; name a new folder")
  # a mounted folder may hold what a killed process left
  if files.exists(folder) and (not files.is_folder(folder) or {*files.list_sizes(folder)} - {".unfinished"}):
    raise UserError(f"out={folder}: holds something already; name a new folder, or remove this one")


@contextlib.contextmanager
def new_folder(folder: str, last: str) -> Iterator[str]:
  """A temporary folder, which becomes `folder` once everything is written; `last` as for `files.replacing_folder`.

  Raises UserError if the folder is not empty, and what `files.writing` raises if it can't be written.
  """
  check_new(folder)
  with files.writing(f"out={folder}", "name another folder"), files.replacing_folder(folder, last) as place:
    yield place


def write_tensors(folder: str, name: str, tensors: dict[str, np.ndarray]) -> str:
  """Writes a safetensors file of a folder, with the permissions of other files; returns its path, or raises OSError."""
  path = os.path.join(folder, name)
  with open(path, "wb"):
    mode = os.stat(path).st_mode
  try:
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  except safetensors.SafetensorError as error:  # a full disk too
    raise OSError(errno.EIO, str(error), path) from error
  os.chmod(path, mode)  # the library lets the owner alone read it
  return path


def write_json(folder: str, name: str, content: dict[str, Any]) -> None:
  """Writes a JSON file of a folder."""
  with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
    json.dump(content, file, indent=2, ensure_ascii=False)
    file.write("\n")


def copy_template(name: str, folder: str) -> None:
  """Copies a file of `templates/`."""
  shutil.copyfile(os.path.join(os.path.dirname(__file__), "templates", name), os.path.join(folder, name))
