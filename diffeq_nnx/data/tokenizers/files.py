"""Reading a tokenizer's files, with errors in one line."""

import collections
import json
import os
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.errors import UserError


def read_bytes(path: str, label: str) -> bytes:
  """A file's content; raises UserError if it can't be read."""
  try:
    return files.read(path)
  except OSError as error:
    problem = f"{os.path.basename(path)} can't be read ({error.strerror})"
    raise UserError(f"{label}: {problem}; give a tokenizer's file or directory, 'bytes' or 'train'") from error


def parse_json(content: bytes, path: str, label: str) -> Any:
  """The JSON value that a file holds; raises UserError if it isn't JSON, or an object has a key twice."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
      twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
      raise ValueError(f"it gives {twice!r} twice")
    return made

  try:
    return json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
  except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
    raise UserError(f"{label}: {os.path.basename(path)} is not JSON ({error}); restore the file") from error
