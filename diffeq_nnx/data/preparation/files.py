"""Files that are there whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
  """A name to write to, which then becomes `path` in one step."""
  part = f"{path}.{os.getpid()}"
  yield part
  os.replace(part, path)


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


def write_json(path: str, content: Any) -> None:
  """Writes a JSON file, and sees that it is on the disk."""
  with replacing(path) as part, open(part, "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())
