"""Requests to rows: token sequences with a common beginning share a row, which holds the beginning once.

B rows, L slots of a row, M scored tokens of a row.

The sequences of a row form a tree in depth-first order. A slot holds a token; the slots below it in the tree are those
that follow it, up to its end. So slot i sees slot j where j <= i < end[j], and a token's position is its depth.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

MIN_SHARED_FRACTION = 0.25  # of a sequence, which joins the row of the previous one if they share so much
MIN_SLOTS = 16  # slots of a row
MIN_SCORED = 8  # scored tokens of a row


class Request(NamedTuple):
  """A continuation to score."""

  context: tuple[int, ...]  # token ids, one or more
  continuation: tuple[int, ...]  # token ids, one or more; the last is predicted, and not read

  @property
  def read(self) -> tuple[int, ...]:
    """The tokens that the model reads."""
    return self.context + self.continuation[:-1]


@dataclasses.dataclass
class Row:
  """Sequences that share a row."""

  tokens: list[int] = dataclasses.field(default_factory=list)  # of each slot
  positions: list[int] = dataclasses.field(default_factory=list)  # the depth of each slot in the tree
  scored: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # slots, and the tokens that follow them
  # for each request its number, its first index in `scored`, and its number of scored tokens
  parts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  _path: list[int] = dataclasses.field(default_factory=list)  # slots of the newest sequence

  def add(self, number: int, request: Request, shared: int) -> None:
    """Appends a request that has its first `shared` tokens in common with the previous one."""
    slots, read = len(self.tokens), request.read
    self._path[shared:] = range(slots, slots + len(read) - shared)
    self.tokens += read[shared:]
    self.positions += range(shared, len(read))
    self.parts.append((number, len(self.scored), len(request.continuation)))
    self.scored += zip(self._path[len(request.context) - 1 :], request.continuation)

  @property
  def branches(self) -> bool:
    """Whether it holds more than one path."""
    return self.positions[-1] + 1 < len(self.tokens)

  @property
  def ends(self) -> list[int]:
    """For each slot, where the slots below it end, which is at the next slot that is not deeper."""
    ends = [len(self.tokens)] * len(self.tokens)
    path: list[int] = []
    for slot, depth in enumerate(self.positions):
      for left in path[depth:]:
        ends[left] = slot
      path[depth:] = [slot]
    return ends


class Batch(NamedTuple):
  """Rows as arrays, padded with 0. No slot sees a padding slot."""

  arrays: dict[str, np.ndarray]  # tokens, positions, ends [B, L]; slots, targets [B, M]
  branches: bool  # whether one of its rows holds more than one path
  parts: list[list[tuple[int, int, int]]]  # `Row.parts` of each row


def round_up(count: int, fewest: int = MIN_SLOTS) -> int:
  """Rounds a count up to one of four sizes between a power of two and the next, which are multiples of `fewest`."""
  step = max(fewest, 1 << max((count - 1).bit_length() - 3, 0))
  return -(-count // step) * step


def make_rows(requests: Sequence[Request], most_slots: int, share: bool = True) -> list[Row]:
  """Puts requests in rows, whatever the order of the requests.

  A row with several sequences has at most `most_slots` slots, and as many scored tokens. Unless `share` is set, each
  request has a row of its own.
  """
  read = [np.asarray(request.read, ">i4") for request in requests]  # big-endian: bytes sort as the numbers do
  order = sorted(range(len(requests)), key=lambda i: (read[i].tobytes(), requests[i]))
  rows: list[Row] = []
  previous = np.zeros(0, np.int32)
  for number in order:
    shared = _count_shared(previous, read[number])
    joins = share and rows and shared >= MIN_SHARED_FRACTION * len(read[number])
    if joins:
      slots = len(rows[-1].tokens) + len(read[number]) - shared
      joins = max(slots, len(rows[-1].scored) + len(requests[number].continuation)) <= most_slots
    if not joins:
      rows.append(Row())
    rows[-1].add(number, requests[number], shared if joins else 0)
    previous = read[number]
  return rows


def _count_shared(a: np.ndarray, b: np.ndarray) -> int:
  """Counts the tokens that two sequences have in common at their beginning."""
  length = min(len(a), len(b))
  differs = np.flatnonzero(a[:length] != b[:length])
  return int(differs[0]) if len(differs) else length


def make_batches(rows: Sequence[Row], tokens: int, multiple: int) -> Iterator[Batch]:
  """Yields all rows, the longest first, in batches of few shapes.

  The number of rows of a batch is a multiple of `multiple`. A batch with more rows has at most `tokens` slots.
  """
  rows = sorted(rows, key=lambda row: (round_up(len(row.tokens)), len(row.scored)), reverse=True)
  while rows:
    L = round_up(len(rows[0].tokens))
    B = max(tokens // L // multiple, 1) * multiple
    if len(rows) < B:  # the last batch
      B = min(B, multiple * round_up(-(-len(rows) // multiple), fewest=1))
    yield _make_batch(rows[:B], B, L)
    rows = rows[B:]


def _make_batch(rows: Sequence[Row], B: int, L: int) -> Batch:
  most = max(len(row.scored) for row in rows)
  M = max(MIN_SCORED, 1 << (most - 1).bit_length())
  arrays = {name: np.zeros((B, L), np.int32) for name in ("tokens", "positions", "ends")}
  arrays |= {name: np.zeros((B, M), np.int32) for name in ("slots", "targets")}
  for i, row in enumerate(rows):
    for name in ("tokens", "positions", "ends"):
      arrays[name][i, : len(row.tokens)] = getattr(row, name)
    arrays["slots"][i, : len(row.scored)], arrays["targets"][i, : len(row.scored)] = np.asarray(row.scored).T
  return Batch(arrays, any(row.branches for row in rows), [row.parts for row in rows])
