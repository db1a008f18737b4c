"""One preparation: its passes one after the other."""

import contextlib
import dataclasses
import importlib.metadata
import os
from typing import Any

import numpy as np

from diffeq_nnx.data import holdout, shards, tokenizers
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.data.preparation.counting import Counted, CountTask, count, sample, stretches
from diffeq_nnx.data.preparation.directory import claim, finish, locked, whole
from diffeq_nnx.data.preparation.gathering import GatherTask, gather
from diffeq_nnx.data.preparation.recipe import Recipe
from diffeq_nnx.data.preparation.tokenising import KEY_BITS, TokeniseTask, Written, tokenise
from diffeq_nnx.data.sources import Source
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import read_json, save, write

_COUNTED_PARTS = 1024  # the tasks of the first pass, at most
_DOCUMENT_BYTES = 100  # what a document costs in memory beside its text, about, as so many of them


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How the work is cut: what is held in memory, and how much is lost to a kill.

  Attributes:
    stretch: Bytes of text that are tokenised as one task.
    run: Tokens that are held before they are sorted and written.
    shard: Bytes of text in a shard, each document counted as 100 more.
    most_shards: Of a split; beyond, they grow.
  """

  stretch: int = 32 << 20
  run: int = 16 << 20
  shard: int = 64 << 20
  most_shards: int = 512


def prepare(directory: str, recipe: Recipe, num_processes: int = 1, sizes: Sizes = Sizes()) -> dict[str, Any]:
  """Fills a directory with shards and their manifest, or goes on with that.

  Where it is whole already its files are read and compared with their SHA-256, and what is damaged is made again.
  Memory stays flat: for each process a batch of text, a run, or a shard. On disk the tokens lie twice for a time.

  Args:
    directory: A directory of its own; made if it isn't there; `~` expands.
    recipe: What is to be in it.
    num_processes: How many work at the same time; with 1 it is this one alone.
    sizes: How the work is cut.

  Returns:
    The manifest.

  Raises:
    UserError: For text that can't be used, files that change meanwhile, and a directory that holds something else
      or is being filled by another process.
    RunError: If a process dies.
    OSError: If the directory can't be written.
  """
  record, label = recipe.record, f"workdir={directory}"
  directory = os.path.abspath(os.path.expanduser(directory))
  os.makedirs(directory, exist_ok=True)
  with locked(directory, label):
    manifest = whole(directory, record, label)
    if manifest is None:
      work = {"version": shards.VERSION, "recipe": record, "sizes": dataclasses.asdict(sizes)}
      unfinished = claim(directory, work, label)
      manifest = _Preparation(directory, unfinished, recipe, num_processes, sizes).run()
      if not recipe.holds():
        raise UserError(f"data.source={recipe.config.source}: files changed while they were read; start again")
      finish(directory, manifest)
    return manifest


class _Preparation:
  """One call of `prepare`: its passes, and where each leaves what it has finished."""

  def __init__(self, directory: str, unfinished: str, recipe: Recipe, num_processes: int, sizes: Sizes):
    self._directory, self._unfinished, self._recipe, self._sizes = directory, unfinished, recipe, sizes
    self._num_processes = num_processes
    for name in ("counted", "runs", "shards"):
      os.makedirs(os.path.join(self._unfinished, name), exist_ok=True)

  def _path(self, *names: str) -> str:
    return os.path.join(self._unfinished, *names)

  def run(self) -> dict[str, Any]:
    """All passes; returns the manifest."""
    config, opened = self._recipe.config, self._recipe.opened
    with workers.Workers(self._num_processes) as pool:
      counted = {key: self._count(pool, key, source) for key, source in opened.items()}
      sides = {key: self._sides(key, counted) for key in counted}
      tokenizer = self._tokenizer(opened["data.source"], counted["data.source"], sides["data.source"])
      dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
      written = Written(
        self._path(tokenizer.file_name), tokenizer.hash, tokenizer.bos_id is not None, dtype.name,
        config.shuffle_seed,
      )  # fmt: skip
      self._tokenise(pool, opened, counted, written)
      splits = self._gather(pool, counted, sides, written)
    found, expected = (sum(split["documents"] for split in splits.values()),
                       sum(one.counts.documents for one in counted.values()))  # fmt: skip
    if found != expected:  # files under `_unfinished` were changed or lost
      raise UserError(f"{self._unfinished}: gives {found} documents where {expected} belong; remove it and start again")
    return {
      "version": shards.VERSION,
      "program": f"diffeq-nnx {importlib.metadata.version('diffeq-nnx')}",
      "recipe": self._recipe.record,
      "tokenizer": {
        "hash": tokenizer.hash, "file": tokenizer.file_name, "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id, "bos_id": tokenizer.bos_id,
      },
      "dtype": dtype.name,
      # Only here can it be read later what became of the records that are in neither split.
      "records": {key: dataclasses.asdict(one.counts) for key, one in counted.items()},
      "splits": splits,
    }  # fmt: skip

  def _count(self, pool: workers.Workers, key: str, source: Source) -> Counted:
    """The first pass over one source."""
    at_once = -(-len(source.parts) // _COUNTED_PARTS)
    tasks = [
      CountTask(self._path("counted", f"{key}-{start:09}.npz"), source.read, source.parts[start : start + at_once])
      for start in range(0, len(source.parts), at_once)
    ]
    pool.run(count, tasks, f"counting ({key})")
    counted = Counted.load([task.done for task in tasks])
    source.check(counted.counts)
    return counted

  def _sides(self, key: str, counted: dict[str, Counted]) -> np.ndarray:
    """[num_records] int8: the split of each record (see `holdout.SIDES`), or 0."""
    present = counted[key].present
    if key == "data.validation":
      sides = present * np.int8(holdout.SIDES["validation"])
    elif "data.validation" in counted:
      sides = present * np.int8(holdout.SIDES["train"])
    else:
      sides = holdout.sides(present, self._recipe.config, self._recipe.split_seed)
    save(self._path(f"{key}.npy"), sides)
    return sides

  def _tokenizer(self, source: Source, counted: Counted, sides: np.ndarray) -> Tokenizer:
    """The tokenizer, given or trained, its file in place."""
    tokenizer = self._recipe.tokenizer
    if tokenizer is None:
      path = self._path(tokenizers.SentencePieceTokenizer.file_name)
      if not os.path.exists(path):
        write(path, tokenizers.train(sample(source, counted, sides), self._recipe.vocab_size))
      return tokenizers.load(path)
    write(self._path(tokenizer.file_name), tokenizer.model_bytes)
    return tokenizer

  def _tokenise(
    self, pool: workers.Workers, opened: dict[str, Source], counted: dict[str, Counted], written: Written
  ) -> None:
    """The second pass, over all sources."""
    tasks = []
    for key, source in opened.items():
      for stretch in stretches(source.parts, counted[key], self._sizes.stretch):
        name = self._path("runs", f"{key}-{len(tasks):06}")
        sides = self._path(f"{key}.npy")
        tasks.append(
          TokeniseTask(f"{name}.done", stretch.size, source.read, stretch, sides, name, written, self._sizes.run)
        )
    pool.run(tokenise, tasks, "tokenising")

  def _gather(
    self, pool: workers.Workers, counted: dict[str, Counted], sides: dict[str, np.ndarray], written: Written
  ) -> dict[str, Any]:
    """The third pass; what the manifest says of each split."""
    tasks: dict[str, list[GatherTask]] = {}
    for split, side in holdout.SIDES.items():
      key = "data.validation" if split == "validation" and "data.validation" in counted else "data.source"
      documents, present = int((sides[key] == side).sum()), int(counted[key].present.sum())
      size = counted[key].num_bytes * documents // present + _DOCUMENT_BYTES * documents  # about
      number = max(1, min(-(-size // self._sizes.shard), self._sizes.most_shards))
      keys = 1 << KEY_BITS if split == "train" else len(sides[key])
      bounds = [keys * place // number for place in range(number + 1)]
      tasks[split] = [
        GatherTask(
          self._path("shards", f"{split}-{place:05}.json"), size // number, self._path("runs"), split,
          bounds[place], bounds[place + 1], written.dtype, self._directory,
          f"{split}-{place:05}-of-{number:05}.array_record",
        )
        for place in range(number)
      ]  # fmt: skip
    for task in (*tasks["train"], *tasks["validation"]):
      if not task.is_whole():
        with contextlib.suppress(FileNotFoundError):
          os.remove(task.done)
    pool.run(gather, [*tasks["train"], *tasks["validation"]], "gathering")
    splits = {}
    for split, its in tasks.items():
      made = [read_json(task.done) for task in its]
      splits[split] = {
        **{name: sum(one[name] for one in made) for name in ("tokens", "bytes", "documents")},
        "shards": [one["shard"] for one in made],
      }
    return splits
