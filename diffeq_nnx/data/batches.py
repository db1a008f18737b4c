"""The batches of a run: windows of tokens, shuffled for training and in order for validation."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.corpus import Mixture
from diffeq_nnx.data.shards import Split
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError

if TYPE_CHECKING:
  import grain  # it imports JAX, which the workers that prepare text don't need


class _Batches:
  """Random access to batches of windows, limited to the rows that this process reads.

  Windows of `seq_len + 1` tokens start every `seq_len` tokens of a split. Grain orders the window numbers; tokens are
  read here, since as elements of Grain's own they would cost twice the time.
  """

  def __init__(
    self, train: Mixture, seq_len: int, batch_size: int, seed: int, rows: np.ndarray, start: int, eos_id: int | None
  ):
    import grain

    self._tokens = [split.tokens for split in train.splits]
    self._orders = [
      grain.MapDataset.range((len(tokens) - 1) // seq_len).seed((seed + number) % 2**32).shuffle().repeat()
      for number, tokens in enumerate(self._tokens)
    ]
    self._shares = make_integer_shares(train.weights)
    self._seq_len, self._batch_size, self._rows = seq_len, batch_size, rows.tolist()
    self._start, self._eos_id = start, eos_id

  def __len__(self) -> int:
    return sys.maxsize // self._batch_size

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    start = self._start + int(index) * self._batch_size
    tokens_BxL1 = self._read_windows([start + row for row in self._rows])
    inputs_BxL, targets_BxL = tokens_BxL1[:, :-1], tokens_BxL1[:, 1:]
    return {"inputs": inputs_BxL, "targets": targets_BxL, **find_documents(inputs_BxL, self._eos_id)}

  def _read_windows(self, indices: list[int]) -> np.ndarray:
    """Reads windows, [len(indices), seq_len + 1] int32, those of one split at the same time."""
    turns = [take_turns(index, self._shares) for index in indices]
    windows = np.empty((len(indices), self._seq_len + 1), np.int32)
    for split, tokens in enumerate(self._tokens):
      places = [place for place, (its, _) in enumerate(turns) if its == split]
      starts = [self._orders[split][turns[place][1]] * self._seq_len for place in places]
      for place, window in zip(places, tokens.read([slice(start, start + self._seq_len + 1) for start in starts])):
        windows[place] = window
    return windows

  def __repr__(self) -> str:
    return f"Batches(splits={len(self._tokens)}, seq_len={self._seq_len}, batch_size={self._batch_size})"


def make_integer_shares(weights: Sequence[float]) -> list[int]:
  """Returns integers in exactly the proportion of the weights."""
  fractions = [Fraction(weight) for weight in weights]
  common = math.lcm(*(fraction.denominator for fraction in fractions))
  return [int(fraction * common) for fraction in fractions]


def take_turns(index: int, shares: Sequence[int]) -> tuple[int, int]:
  """Returns the source whose turn comes at an index, and the number of its turns before.

  Of the first n turns source k has n shares[k] / sum(shares), to within one for two sources, and to within the number
  of sources for more.
  """
  left = sum(shares)
  for source, share in enumerate(shares[:-1]):
    before = index * share // left
    if (index + 1) * share // left > before:
      return source, before
    index, left = index - before, left - share
  return len(shares) - 1, index


def choose_document_end(config: DataConfig, tokenizer: Tokenizer) -> int | None:
  """Returns the end mark at which `find_documents` separates documents, or None if `attend_across_documents` is set.

  Raises:
    UserError: If documents begin and end with the same mark.
  """
  if config.attend_across_documents:
    return None
  if tokenizer.bos_id == tokenizer.eos_id:
    raise UserError(
      "data.attend_across_documents=False: the tokenizer's begin and end marks are the same, so the end of a document "
      "can't be found; set data.begin_mark=False, or data.attend_across_documents=True"
    )
  return tokenizer.eos_id


def find_documents(inputs_BxL: np.ndarray, eos_id: int | None) -> dict[str, np.ndarray]:
  """Returns each token's document and its position there, or {} if `eos_id` is None.

  A document ends with its end mark, and the first one of a row begins where the row does. The results are named
  "segment_ids" and "positions", both int32 [B, L] and counted from 0.
  """
  if eos_id is None:
    return {}
  index_L = np.arange(inputs_BxL.shape[1], dtype=np.int32)
  segment_ids_BxL, starts_BxL = np.zeros((2, *inputs_BxL.shape), np.int32)
  begins_BxL = inputs_BxL[:, :-1] == eos_id  # whether the next token begins a document
  np.cumsum(begins_BxL, axis=1, out=segment_ids_BxL[:, 1:])
  np.maximum.accumulate(begins_BxL * index_L[1:], axis=1, out=starts_BxL[:, 1:])
  return {"segment_ids": segment_ids_BxL, "positions": index_L - starts_BxL}


def train_batches(
  train: Mixture,
  *,
  seq_len: int,
  batch_size: int,
  seed: int,
  rows: np.ndarray | None = None,
  start: int = 0,
  eos_id: int | None = None,
) -> "grain.MapDataset":
  """Makes endless training batches. The batch of a step depends on the seed and the step alone.

  Windows of `seq_len + 1` tokens, one every `seq_len` tokens, are shuffled anew for each epoch of their split. Every
  window appears once in an epoch, and a batch may span two epochs. An incomplete last window is dropped. Windows of
  several splits take turns (`take_turns`).

  Args:
    train: The tokens.
    seq_len: L, tokens in a row.
    batch_size: B, rows in a batch.
    seed: Of the shuffle; taken modulo 2**32.
    rows: The rows of each batch to read, in order; None for all B.
    start: Windows before the first batch.
    eos_id: The end mark, to keep attention within documents; None to attend across them.

  Returns:
    A dataset whose n-th element is the batch of step n: "inputs" and "targets", int32 [rows, L], where the
    targets are the inputs one token later, and with `eos_id` the result of `find_documents`.

  Raises:
    UserError: If the split is shorter than one window.
  """
  import grain

  for split in train.splits:
    if len(split.tokens) < seq_len + 1:
      raise UserError(
        f"model.seq_len={seq_len}: needs {seq_len + 1} tokens, but the training part of a source has "
        f"{len(split.tokens)}; use at most {len(split.tokens) - 1}, or more text"
      )
  rows = np.arange(batch_size) if rows is None else rows
  return grain.MapDataset.source(_Batches(train, seq_len, batch_size, seed, rows, start, eos_id))


def count_eval_batches(split: Split, seq_len: int, batch_size: int) -> int:
  """Counts the batches of `eval_batches` without `max_batches`."""
  num_windows = -(-(len(split.tokens) - 1) // seq_len)
  return -(-num_windows // batch_size)


def eval_batches(
  split: Split,
  *,
  seq_len: int,
  batch_size: int,
  max_batches: int | None = None,
  rows: np.ndarray | None = None,
  eos_id: int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
  """Yields the split in order; each token but the first is a target exactly once.

  Args:
    split: The tokens.
    seq_len, batch_size, eos_id: As for `train_batches`.
    max_batches: The largest number of batches; None for all.
    rows: The rows of each batch to read, in order; None for all B. Rows from B on are padding.

  Yields:
    "inputs" and "targets", int32 [rows, L], and "mask", float32 [rows, L], which is 1 where the target counts, and 0 in
    the padding of the last window and in the rows that fill the last batch. With `eos_id` also the result of
    `find_documents`, meaningless in the padding. All batches have this shape.
  """
  rows = np.arange(batch_size) if rows is None else rows
  total = count_eval_batches(split, seq_len, batch_size)
  for number in range(total if max_batches is None else min(total, max_batches)):
    inputs_BxL, targets_BxL, mask_BxL = np.zeros((3, len(rows), seq_len), np.int32)
    starts = [(number * batch_size + int(row)) * seq_len if row < batch_size else len(split.tokens) for row in rows]
    for place, tokens in enumerate(split.tokens.read([slice(start, start + seq_len + 1) for start in starts])):
      count = len(tokens) - 1
      if count > 0:
        inputs_BxL[place, :count], targets_BxL[place, :count], mask_BxL[place, :count] = tokens[:-1], tokens[1:], 1
    mask_BxL = mask_BxL.astype(np.float32)
    yield {"inputs": inputs_BxL, "targets": targets_BxL, "mask": mask_BxL, **find_documents(inputs_BxL, eos_id)}
