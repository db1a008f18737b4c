"""Reading a vocabulary's files, with errors in one line."""

import collections
import json
import os
from typing import Any

from diffeq_nnx.errors import UserError


def read_bytes(path: str, label: str) -> bytes:
  """A file's content.

  Raises:
    UserError: If it can't be read.
  """
  try:
    with open(path, "rb") as file:
      return file.read()
  except OSError as error:
    raise UserError(
      f"{label}: {_named(path, label)}can't be read ({error.strerror}); give a sentencepiece model, "
      "a tokenizer.json, a directory with vocab.json and merges.txt, 'bytes' or 'train'"
    ) from error


def read_json(path: str, label: str) -> Any:
  """A file's JSON.

  Raises:
    UserError: If it can't be read, isn't JSON, or gives a key twice.
  """
  return parse_json(read_bytes(path, label), path, label)


def parse_json(content: bytes, path: str, label: str) -> Any:
  """As `read_json`, of a content read before."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
      raise _Twice(collections.Counter(name for name, _ in pairs).most_common(1)[0][0])
    return made

  try:
    return json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
  except _Twice as error:
    raise UserError(
      f"{label}: {_named(path, label)}gives {error.name!r} twice; remove one, or restore the file"
    ) from error
  except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
    raise UserError(f"{label}: {_named(path, label)}is not JSON ({error}); restore the file") from error


class _Twice(Exception):
  """A JSON object gives a key twice."""

  def __init__(self, name: str):
    super().__init__(name)
    self.name = name


def _named(path: str, label: str) -> str:
  """The file's name, unless the label says it already."""
  return "" if label.endswith(path) else f"{os.path.basename(path)} "
