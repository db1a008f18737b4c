"""Files that are written atomically and durably."""

from collections.abc import Iterator
import contextlib
import json
import os
import shutil
from typing import Any

import numpy as np


@contextlib.contextmanager
def replacing(path: str, at: str | None = None) -> Iterator[str]:
  """A temporary name, derived from `at` or `path`, that is renamed to `path` atomically after the block."""
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
  """A new folder beside `path`, which replaces `path` after the block."""
  path = os.path.abspath(path)
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


def write(path: str, content: bytes) -> None:
  """Writes a file atomically."""
  with replacing(path) as part, open(part, "wb") as file:
    file.write(content)


def save(path: str, array: np.ndarray) -> None:
  """Writes a .npy file atomically."""
  with replacing(path) as part, open(part, "wb") as file:
    np.save(file, array)


def read_json(path: str) -> Any:
  """The content of a JSON file."""
  with open(path, encoding="utf-8") as file:
    return json.load(file)


def write_json(path: str, content: Any, at: str | None = None) -> None:
  """Writes a JSON file atomically; `at` as for `replacing`."""
  with replacing(path, at) as part, open(part, "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)
    file.write("\n")
