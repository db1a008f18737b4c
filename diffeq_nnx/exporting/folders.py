"""The folders that exports write."""

from collections.abc import Iterator
import contextlib
import json
import os
import shutil
from typing import Any

from diffeq_nnx.errors import UserError
from diffeq_nnx.files import replacing_folder


def check_new(folder: str) -> None:
  """Raises UserError if the folder exists and is not empty."""
  if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
    raise UserError(f"out={folder}: holds something already; name a new folder, or remove this one", everywhere=True)


@contextlib.contextmanager
def new_folder(folder: str) -> Iterator[str]:
  """A temporary folder, renamed to `folder` once everything is written.

  Raises:
    UserError: the folder is not empty, or can't be written.
  """
  check_new(folder)
  folder = os.path.abspath(folder)
  try:
    with replacing_folder(folder) as place:
      yield place
  except OSError as error:
    raise UserError(
      f"out={folder}: can't be written ({error.strerror or error}); make room, or name another folder", everywhere=True
    ) from error


def write_json(folder: str, name: str, content: dict[str, Any]) -> None:
  """Writes a JSON file."""
  with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
    json.dump(content, file, indent=2, ensure_ascii=False)
    file.write("\n")


def copy_template(name: str, folder: str) -> None:
  """Copies a file of `templates/`."""
  shutil.copyfile(os.path.join(os.path.dirname(__file__), "templates", name), os.path.join(folder, name))
