"""The second pass: stretches of records become runs of tokens, sorted by the documents' keys."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools

import numpy as np

from diffeq_nnx.data import holdout, tokenizers
from diffeq_nnx.data.preparation.counting import Stretch, utf8_size
from diffeq_nnx.data.sources import Counts
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import replacing, save, write

KEY_BITS = 63
_BATCH_CHARS = 1 << 20  # tokenised at a time
_DOCUMENT_TOKENS = 200  # what a document costs in memory beside its tokens, about, as so many of them


@dataclasses.dataclass(frozen=True)
class Written:
  """How documents are written: by which tokenizer, as what type, in which order."""

  tokenizer_file: str
  tokenizer_hash: str
  begin_mark: bool
  dtype: str
  shuffle_seed: int


@functools.lru_cache(1)
def _tokenizer_of(written: Written) -> Tokenizer:
  """A process's tokenizer, loaded once."""
  tokenizer = tokenizers.load(written.tokenizer_file, begin_mark=written.begin_mark)
  if tokenizer.hash != written.tokenizer_hash:
    raise UserError(f"{written.tokenizer_file}: changed while it was used; start again")
  return tokenizer


@dataclasses.dataclass(frozen=True)
class TokeniseTask:
  """A stretch to be tokenised: see `workers.Task`."""

  done: str
  size: int
  read: Callable[..., Iterator[str]]
  stretch: Stretch
  sides: str  # a .npy file: the split of each record of the source
  name: str  # how the paths of its runs begin
  written: Written
  run: int  # tokens


def tokenise(task: TokeniseTask, progress: Callable[[int], None]) -> None:
  """Turns a stretch of records into runs."""
  sides = np.load(task.sides, mmap_mode="r")[task.stretch.start : task.stretch.stop].copy()
  runs = {side: _Run(task, split) for split, side in holdout.SIDES.items()}
  tokenizer = _tokenizer_of(task.written)
  batch: list[tuple[int, str]] = []

  def flush() -> None:
    size = 0
    for (index, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch])):
      num_bytes = utf8_size(text)
      runs[int(sides[index - task.stretch.start])].add(index, ids, num_bytes)
      size += num_bytes
    batch.clear()
    progress(size)

  chars = 0
  for index, text in _records(task.read, task.stretch):
    if sides[index - task.stretch.start]:
      batch.append((index, text))
      chars += len(text)
    if chars >= _BATCH_CHARS:
      flush()
      chars = 0
  flush()
  for run in runs.values():
    run.write()
  write(task.done, b"")


def _records(read: Callable[..., Iterator[str]], stretch: Stretch) -> Iterator[tuple[int, str]]:
  """The stretch's records with their places in the source."""
  index = stretch.first
  for part in stretch.parts:
    with contextlib.closing(read(part, counts=Counts())) as texts:
      for text in texts:
        if index >= stretch.stop:
          return
        if index >= stretch.start:
          yield index, text
        index += 1


class _Run:
  """Documents of one split that are held until there are enough of them to be sorted and written.

  A run is two files: the tokens, and an index [3, num_documents + 1] of keys, places of the first tokens, and bytes
  of the text, closed by a column with the end.
  """

  def __init__(self, task: TokeniseTask, split: str):
    self._task, self._split, self._number = task, split, 0
    tokenizer = _tokenizer_of(task.written)
    self._dtype = np.dtype(task.written.dtype)
    self._begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], self._dtype)
    self._end = np.array([tokenizer.eos_id], self._dtype)
    self._clear()

  def _clear(self) -> None:
    self._documents: list[np.ndarray] = []
    self._places: list[tuple[int, int]] = []  # record, bytes
    self._held = 0

  def add(self, index: int, ids: np.ndarray, num_bytes: int) -> None:
    """Takes one document in."""
    self._documents.append(ids.astype(self._dtype))
    self._places.append((index, num_bytes))
    self._held += len(ids) + _DOCUMENT_TOKENS
    if self._held >= self._task.run:
      self.write()

  def write(self) -> None:
    """Writes what is held, if anything."""
    if not self._documents:
      return
    places = np.array(self._places, np.uint64)
    keys = shuffled(places[:, 0], self._task.written.shuffle_seed) if self._split == "train" else places[:, 0]
    order = np.argsort(keys, kind="stable")
    sizes = np.array([len(ids) for ids in self._documents], np.uint64) + np.uint64(len(self._begin) + 1)
    index = np.zeros((3, len(keys) + 1), np.uint64)
    index[0, :-1], index[1, 1:], index[2, :-1] = keys[order], np.cumsum(sizes[order]), places[order, 1]
    index[0, -1] = 1 << KEY_BITS
    name = f"{self._task.name}-{self._split}-{self._number:04}"
    with replacing(f"{name}.tokens") as path, open(path, "wb") as file:
      for place in order.tolist():
        file.write(self._begin.tobytes() + self._documents[place].tobytes() + self._end.tobytes())
    save(f"{name}.npy", index)
    self._number += 1
    self._clear()


def shuffled(places: np.ndarray, seed: int) -> np.ndarray:
  """Keys of training documents: a hash (SplitMix64, Steele et al. 2014) of seed and place, [n] uint64 below 2^63."""
  start = int.from_bytes(np.random.SeedSequence(seed).generate_state(2).tobytes(), "little")
  with np.errstate(over="ignore"):
    z = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return (z ^ (z >> np.uint64(31))) >> np.uint64(64 - KEY_BITS)
