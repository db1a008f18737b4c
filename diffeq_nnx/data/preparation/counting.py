"""The first pass: what a source holds, and how the work on it is cut."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json

import numpy as np

from diffeq_nnx.data import holdout
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.data.sources import Counts, Part, Source
from diffeq_nnx.files import replacing

_CUTS = 16  # of one part: each cut reads the part from its start, which costs little beside tokenising
_PROGRESS_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 30  # that a tokenizer is trained on, about


@dataclasses.dataclass(frozen=True)
class Counted:
  """What the first pass found in a source.

  Attributes:
    present: [num_records] bool: whether a record has text.
    records: [num_parts] int64: records in each part.
    bytes: [num_parts] int64: UTF-8 bytes of text in each part.
    counts: What became of the records.
  """

  present: np.ndarray
  records: np.ndarray
  bytes: np.ndarray
  counts: Counts

  @property
  def num_bytes(self) -> int:
    """UTF-8 bytes of text in the whole source."""
    return int(self.bytes.sum())

  @classmethod
  def load(cls, paths: list[str]) -> "Counted":
    """All groups of parts, in order."""
    counts, found = Counts(), []
    for path in paths:
      with np.load(path) as file:
        found.append([file[name] for name in ("present", "records", "bytes")])
        counts.add(Counts(**json.loads(str(file["counts"]))))
    return cls(*(np.concatenate(arrays) for arrays in zip(*found)), counts)


@dataclasses.dataclass(frozen=True)
class CountTask:
  """Some parts to be counted: see `workers.Task`."""

  done: str
  read: Callable[..., Iterator[str]]
  parts: list[Part]
  size: int = 0


def count(task: CountTask, progress: Callable[[int], None]) -> None:
  """Reads a group of parts."""
  present, records, sizes, counts = bytearray(), [], [], Counts()
  for part in task.parts:
    before, size, told = len(present), 0, 0
    for text in task.read(part, counts=counts):
      present.append(bool(text))
      size += utf8_size(text)
      if size - told >= _PROGRESS_BYTES:
        progress(size - told)
        told = size
    progress(size - told)
    records.append(len(present) - before)
    sizes.append(size)
  with replacing(task.done) as path, open(path, "wb") as file:
    np.savez(
      file, present=np.frombuffer(bytes(present), np.bool_), records=np.array(records, np.int64),
      bytes=np.array(sizes, np.int64), counts=json.dumps(dataclasses.asdict(counts)),
    )  # fmt: skip


def utf8_size(text: str) -> int:
  """Bytes of a text in UTF-8."""
  return len(text) if text.isascii() else len(text.encode())


def sample(source: Source, counted: Counted, sides: np.ndarray) -> Iterator[str]:
  """Training documents to train a tokenizer on; of a large source those of some parts, evenly spread."""
  every = max(1, counted.num_bytes // _SAMPLE_BYTES)
  starts = np.cumsum(counted.records) - counted.records
  with workers.bar("training the tokenizer", int(counted.bytes[::every].sum())) as bar:
    for part, start in zip(source.parts[::every], starts[::every].tolist()):
      with contextlib.closing(source.read(part, counts=Counts())) as texts:
        for index, text in enumerate(texts, start):
          bar.update(utf8_size(text))
          if sides[index] == holdout.SIDES["train"]:
            yield text


@dataclasses.dataclass(frozen=True)
class Stretch:
  """Records `start` to `stop - 1` of a source.

  Attributes:
    parts: They hold the records, and perhaps more.
    first: The first record of the parts.
    start: The first record of the stretch.
    stop: One more than its last.
    size: Bytes of its text, about.
  """

  parts: list[Part]
  first: int
  start: int
  stop: int
  size: int


def stretches(parts: list[Part], counted: Counted, size: int) -> Iterator[Stretch]:
  """Cuts a source in stretches of about so many bytes of text: small parts together, large ones in several."""
  together: list[Part] = []
  first, start, held = 0, 0, 0  # of the parts held together; and their bytes
  for part, records, num_bytes in zip(parts, counted.records.tolist(), counted.bytes.tolist()):
    cuts = min(num_bytes // size, _CUTS, records)
    if together and (cuts > 1 or held + num_bytes > size):
      yield Stretch(together, first, first, start, held)
      together, first, held = [], start, 0
    if cuts > 1:
      places = [start + records * cut // cuts for cut in range(cuts + 1)]
      yield from (Stretch([part], start, *ends, num_bytes // cuts) for ends in zip(places, places[1:]))
      first = start + records
    else:
      together.append(part)
      held += num_bytes
    start += records
  if together:
    yield Stretch(together, first, first, start, held)
