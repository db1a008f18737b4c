"""Where the rows of a split are: windows of its tokens in order, or a document each."""

import functools

from absl import logging
import numpy as np

from diffeq_nnx.data.documents import FIRST, NOT_COUNTED
from diffeq_nnx.data.shards import Split
from diffeq_nnx.errors import UserError

_CHUNK = 1 << 20  # tokens that are read at a time


class Rows:
  """The rows of a split as slices of its tokens, each of at most `seq_len + 1` tokens.

  The last window is the only one that may be shorter; it holds a target at least.
  """

  def __init__(self, split: Split, seq_len: int):
    """Reads all tokens once if rows are documents; raises UserError if none can be used."""
    self._size, self._seq_len = len(split.tokens), seq_len
    self._examples_Nx2 = None if split.padding is None else _find_examples(split, seq_len)

  def __len__(self) -> int:
    return -(-(self._size - 1) // self._seq_len) if self._examples_Nx2 is None else len(self._examples_Nx2)

  def __getitem__(self, number: int) -> slice:
    """The slice of a row, which is empty beyond the last one."""
    if number >= len(self):
      return slice(self._size, self._size)
    if self._examples_Nx2 is None:
      return slice(number * self._seq_len, (number + 1) * self._seq_len + 1)
    return slice(*self._examples_Nx2[number].tolist())

  def count_whole(self) -> int:
    """Counts the rows without a last window that is shorter."""
    return (self._size - 1) // self._seq_len if self._examples_Nx2 is None else len(self)


@functools.lru_cache(8)
def _find_examples(split: Split, seq_len: int) -> np.ndarray:
  """Returns the first token of each document that makes a row, and its last one plus 1, int64 [num_rows, 2].

  A document is cut, or left out, if it has more than `seq_len + 1` tokens, and left out if no token of its row counts.
  A warning says how many there are. Raises UserError if no document is left.
  """
  starts, counted = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
  size, padding = len(split.tokens), split.padding
  assert padding is not None
  before = padding.end_mark  # the token before those that are read
  for at in range(0, size, _CHUNK):
    tokens = split.tokens[at : at + _CHUNK]
    if split.masked:
      is_first, is_counted = (tokens & FIRST) != 0, (tokens & NOT_COUNTED) == 0
    else:
      is_first, before = np.append(before, tokens[:-1]) == padding.end_mark, tokens[-1]
      is_counted = ~is_first
    places = np.flatnonzero(is_counted)
    starts.append(at + np.flatnonzero(is_first))
    counted.append(at + places[np.diff(np.cumsum(is_first)[places], prepend=-1) != 0])  # the first of each document
  starts_N, counted_N = np.concatenate(starts), np.append(np.concatenate(counted), size)
  stops_N = np.append(starts_N[1:], size)
  firsts_N = counted_N[np.searchsorted(counted_N, starts_N)]
  ends_N = np.minimum(stops_N, starts_N + seq_len + 1)
  is_long_N = stops_N > ends_N
  is_dropped_N = is_long_N & (padding.too_long == "drop")
  is_void_N = ~is_dropped_N & (firsts_N >= ends_N)
  chosen_N = ~is_dropped_N & ~is_void_N
  fate = "dropped" if padding.too_long == "drop" else "cut"
  line = (
    f"{is_long_N.sum()} of {len(starts_N)} documents have more than model.seq_len + 1 = {seq_len + 1} tokens, {fate}"
  )
  if is_void_N.any():
    line += f"; {is_void_N.sum()} are left out, since no token of their rows counts"
  if not chosen_N.any():
    raise UserError(f"data.rows=padded: no document is left ({line}); raise model.seq_len, or give other text")
  if is_long_N.any() or is_void_N.any():
    logging.warning("data.rows=padded: %s", line)
  return np.stack([starts_N, ends_N], axis=1)[chosen_N]
