"""The batches of a run: windows of tokens, or documents, shuffled for training and in order for validation."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
import functools
import math
import sys
from typing import TYPE_CHECKING

from absl import logging
import numpy as np

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.corpus import SAME_MARKS, Corpus, Mixture
from diffeq_nnx.data.documents import FIRST, NOT_COUNTED, read_ids
from diffeq_nnx.data.shards import Split
from diffeq_nnx.errors import UserError

if TYPE_CHECKING:
  import grain  # it imports JAX, which the workers that prepare text don't need

# Grain's own shuffle takes four rounds of its cipher, after which millions of windows are visibly not in random order.
LARGE, ROUNDS = 1 << 20, 16
_CHUNK = 1 << 20  # tokens that are read at a time to find documents


class Rows:
  """The rows of a split as slices of its tokens, each of at most `seq_len + 1` tokens.

  The last window is the only one that may be shorter; it holds a target at least.
  """

  def __init__(self, split: Split, seq_len: int, part: str):
    """Reads all tokens once if rows are documents; raises UserError if none of the `part`, a name, can be used."""
    self._size, self._seq_len = len(split.tokens), seq_len
    self._examples_Nx2 = None if split.padding is None else _find_examples(split, seq_len, part)

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
def _find_examples(split: Split, seq_len: int, part: str) -> np.ndarray:
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
    f"{is_long_N.sum()} of {len(starts_N)} documents of the {part} part have more than model.seq_len + 1 = "
    f"{seq_len + 1} tokens, {fate}"
  )
  if is_void_N.any():
    line += f"; {is_void_N.sum()} are left out, since no token of their rows counts"
  if not chosen_N.any():
    raise UserError(
      f"data.rows=padded: no document is left ({line}); give other text, or a new model a larger model.seq_len"
    )
  if is_long_N.any() or is_void_N.any():
    logging.warning("data.rows=padded: %s", line)
  return np.stack([starts_N, ends_N], axis=1)[chosen_N]


def _make_batch(
  found: list[np.ndarray], split: Split, seq_len: int, eos_id: int | None, with_mask: bool
) -> dict[str, np.ndarray]:
  """Makes a batch of the tokens of rows, which are of splits with the masks and the padding of `split`."""
  tokens_BxL1 = np.zeros((len(found), seq_len + 1), np.uint32 if split.masked else np.int32)
  for place, tokens in enumerate(found):
    tokens_BxL1[place, : len(tokens)] = tokens
  ids_BxL1 = read_ids(tokens_BxL1) if split.masked else tokens_BxL1
  batch = {"inputs": ids_BxL1[:, :-1], "targets": ids_BxL1[:, 1:]}
  if with_mask:
    counts_B = np.array([len(tokens) - 1 for tokens in found])
    exists_BxL = np.arange(seq_len) < counts_B[:, None]
    counted_BxL = exists_BxL & (tokens_BxL1[:, 1:] & NOT_COUNTED == 0) if split.masked else exists_BxL
    batch |= {"inputs": np.where(exists_BxL, batch["inputs"], 0), "mask": counted_BxL.astype(np.float32)}
  if eos_id is None or split.padding is not None:
    return batch
  if split.masked:
    return batch | _number_documents(tokens_BxL1[:, 1:-1] & FIRST != 0)
  return batch | find_documents(batch["inputs"], eos_id)


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


def choose_document_end(config: DataConfig, corpus: Corpus) -> int | None:
  """Returns the end mark at which `find_documents` separates documents, or None if `attend_across_documents` is set.

  Raises UserError if documents begin and end with the same mark, and are plain text in packed rows: there marks alone
  tell them apart.
  """
  if config.attend_across_documents:
    return None
  tokenizer, splits = corpus.tokenizer, (*corpus.train.splits, corpus.validation)
  by_marks = any(not split.masked and split.padding is None for split in splits)
  if by_marks and tokenizer.bos_id == tokenizer.eos_id:
    raise UserError(f"data.attend_across_documents=False: {SAME_MARKS}, or data.attend_across_documents=True")
  return tokenizer.eos_id


def find_documents(inputs_BxL: np.ndarray, eos_id: int) -> dict[str, np.ndarray]:
  """Returns each token's document and its position there.

  A document ends with its end mark, and the first one of a row begins where the row does. The results are named
  "segment_ids" and "positions", both int32 [B, L] and counted from 0.
  """
  return _number_documents(inputs_BxL[:, :-1] == eos_id)


def _number_documents(begins_BxL: np.ndarray) -> dict[str, np.ndarray]:
  """Returns what `find_documents` does; `begins_BxL`, [B, L - 1], says whether the next token begins a document."""
  num_rows, L = begins_BxL.shape[0], begins_BxL.shape[1] + 1
  index_L = np.arange(L, dtype=np.int32)
  segment_ids_BxL, starts_BxL = np.zeros((2, num_rows, L), np.int32)
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
  several splits take turns (`take_turns`). Where documents are padded rows of their own (`Split.padding`), these take
  the place of windows.

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
    targets are the inputs one token later, and with `eos_id` what `find_documents` finds, unless rows are documents. If
    they are, or the splits are masked, also "mask", float32 [rows, L], which is 1 where the target counts.

  Raises:
    UserError: If the split is shorter than one window, or no document can be a row.
  """
  import grain

  for split in train.splits:
    if split.padding is None and len(split.tokens) < seq_len + 1:
      raise UserError(
        f"model.seq_len={seq_len}: needs {seq_len + 1} tokens, but the training part of a source has "
        f"{len(split.tokens)}; use at most {len(split.tokens) - 1}, or more text"
      )
  first = train.splits[0]
  places = [Rows(split, seq_len, "training") for split in train.splits]
  orders = [_make_order(its.count_whole(), (seed + number) % 2**32) for number, its in enumerate(places)]
  shares = make_integer_shares(train.weights)
  numbers = range(batch_size) if rows is None else rows.tolist()

  def read_batch(step: int) -> dict[str, np.ndarray]:
    """Reads tokens here, since as elements of Grain's own they would cost twice the time."""
    turns = [take_turns(start + step * batch_size + row, shares) for row in numbers]
    found = [np.zeros(0)] * len(turns)
    for number, split in enumerate(train.splits):  # the rows of one split at the same time
      its = [place for place, (source, _) in enumerate(turns) if source == number]
      parts = [places[number][orders[number](turns[place][1])] for place in its]
      for place, tokens in zip(its, split.tokens.read(parts)):
        found[place] = tokens
    return _make_batch(found, first, seq_len, eos_id, first.masked or first.padding is not None)

  return grain.MapDataset.range(sys.maxsize // batch_size).map(read_batch)


def _make_order(count: int, seed: int) -> Callable[[int], int]:
  """Which of `count` windows is at a place of their endless order: each once in an epoch, in another order in each."""
  import grain
  from grain import experimental

  if count <= LARGE:
    return grain.MapDataset.range(count).seed(seed).shuffle().repeat().__getitem__

  def choose(index: int) -> int:
    epoch, place = divmod(index, count)
    return experimental.index_shuffle(place, max_index=count - 1, seed=(seed + epoch) % 2**32, rounds=ROUNDS)

  return choose


def eval_batches(
  split: Split,
  *,
  seq_len: int,
  batch_size: int,
  max_batches: int | None = None,
  rows: np.ndarray | None = None,
  eos_id: int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
  """Yields the split in order; each token that counts, but the first of all, is a target exactly once.

  Arguments are those of `train_batches`, but rows from B on are padding. At most `max_batches` are yielded, the first
  or, of joined sources, evenly spaced ones; None: all.

  Yields:
    What `train_batches` gives, and always "mask", which is 0 also in the padding of the last window and in the rows
    that fill the last batch. The result of `find_documents` is meaningless in the padding. All batches have this shape.
  """
  rows = np.arange(batch_size) if rows is None else rows
  places = Rows(split, seq_len, "validation")
  total = -(-len(places) // batch_size)
  wanted = total if max_batches is None else min(total, max_batches)
  for number in ((2 * place + 1) * total // (2 * wanted) if split.joined else place for place in range(wanted)):
    numbers = [number * batch_size + int(row) if row < batch_size else len(places) for row in rows]
    yield _make_batch(split.tokens.read([places[one] for one in numbers]), split, seq_len, eos_id, True)
