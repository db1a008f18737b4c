"""Files that are there whole or not at all, and on the disk once they are there."""

from collections.abc import Iterator
import contextlib
import json
import os
import shutil
from typing import Any

import numpy as np


@contextlib.contextmanager
def replacing(path: str, at: str | None = None) -> Iterator[str]:
  """A name to write to, `at` or beside `path`, which then becomes `path` in one step."""
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
def replacing_folder(path: str) -> Iterator[str]:
  """A new folder beside `path`, which takes its place, and that of an older one, once all is written."""
  path = os.path.abspath(path)
  place = path + ".unfinished"
  try:
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    yield place
    if os.path.isdir(path):
      shutil.rmtree(path)
    os.replace(place, path)
  finally:
    shutil.rmtree(place, ignore_errors=True)


def write(path: str, content: bytes) -> None:
  """Writes a file."""
  with replacing(path) as part, open(part, "wb") as file:
    file.write(content)


def save(path: str, array: np.ndarray) -> None:
  """Writes a .npy file."""
  with replacing(path) as part, open(part, "wb") as file:
    np.save(file, array)


def read_json(path: str) -> Any:
  """What a JSON file holds."""
  with open(path, encoding="utf-8") as file:
    return json.load(file)


def write_json(path: str, content: Any, at: str | None = None) -> None:
  """Writes a JSON file; `at` as for `replacing`."""
  with replacing(path, at) as part, open(part, "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)
    file.write("\n")
