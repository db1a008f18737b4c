"""The third pass: a shard takes its documents from all runs."""

from collections.abc import Callable
import dataclasses
import glob
import os

import numpy as np

from diffeq_nnx.data import shards
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import read_json, replacing, write_json


@dataclasses.dataclass(frozen=True)
class GatherTask:
  """One shard to be made: see `workers.Task`; of one split, from the runs in a folder, written to a directory."""

  done: str
  size: int
  runs: str
  split: str
  low: int  # the shard's keys run from here
  high: int  # to before here
  dtype: str
  directory: str
  file: str

  def is_whole(self) -> bool:
    """Whether the shard is in its place, with the size that it was written with."""
    try:
      return os.path.getsize(os.path.join(self.directory, self.file)) == read_json(self.done)["shard"]["size"]
    except (OSError, ValueError):
      return False


def gather(task: GatherTask, progress: Callable[[int], None]) -> None:
  """Makes one shard of the documents in its range of keys."""
  dtype = np.dtype(task.dtype)
  found = []  # of each run that has some: index, first and last document
  for path in sorted(glob.glob(os.path.join(glob.escape(task.runs), f"*-{task.split}-*.npy"))):
    index = np.load(path, mmap_mode="r")
    first, last = np.searchsorted(index[0], np.array([task.low, task.high], np.uint64)).tolist()
    last = min(last, index.shape[1] - 1)
    if last > first:
      found.append((path.removesuffix(".npy") + ".tokens", np.array(index[:, first : last + 1])))
  keys = np.concatenate([index[0, :-1] for _, index in found] or [np.zeros(0, np.uint64)])
  sizes = np.concatenate([np.diff(index[1]) for _, index in found] or [keys])
  order = np.argsort(keys, kind="stable")
  starts = np.zeros(len(keys), np.int64)
  starts[order] = np.cumsum(sizes[order]) - sizes[order]
  tokens, number = np.empty(int(sizes.sum()), dtype), 0
  for path, index in found:
    begin, end = int(index[1, 0]), int(index[1, -1])
    piece = np.fromfile(path, dtype, end - begin, offset=begin * dtype.itemsize)
    if len(piece) != end - begin:
      raise UserError(f"{path}: was cut short; remove {os.path.dirname(os.path.dirname(path))} and start again")
    for first, last in zip((index[1, :-1] - index[1, 0]).tolist(), (index[1, 1:] - index[1, 0]).tolist()):
      tokens[starts[number] : starts[number] + last - first] = piece[first:last]
      number += 1
    progress(int(index[2, :-1].sum()))
  with replacing(os.path.join(task.directory, task.file), at=task.done) as part:
    shard = shards.write_shard(part, tokens, task.file)
  num_bytes = sum(int(index[2, :-1].sum()) for _, index in found)
  write_json(task.done, {
    "tokens": len(tokens), "bytes": num_bytes, "documents": len(keys), "shard": dataclasses.asdict(shard)
  })  # fmt: skip
