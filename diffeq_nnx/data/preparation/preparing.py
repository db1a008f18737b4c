"""What a preparation depends on, and its passes one after the other."""

from collections.abc import Iterator
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import sqlite3
from typing import Any

import numpy as np
import sentencepiece
import tokenizers as huggingface

from diffeq_nnx import files
from diffeq_nnx.data import holdout, shards, sources, tokenizers
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.data.preparation.directory import claim, complete, finish, locked
from diffeq_nnx.data.preparation.passes import KEY_BITS, count, dtype_of, gather, record_name, texts_of, tokenize
from diffeq_nnx.data.sources import Counts, Source
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError

TASK_BYTES = 32 << 20  # of text that is tokenized as one task, which is what a kill loses
SHARD_BYTES = 64 << 20  # of text in a shard, each document counted as `_DOCUMENT_BYTES` more
MOST_SHARDS = 512  # of a split; beyond, they grow
_COUNT_TASKS = 1024  # of a source, at most
_CUTS = 16  # of one part: each cut reads the part from its start, which costs little beside tokenizing
_DOCUMENT_BYTES = 100  # a document costs memory beside its text, about as much as this many bytes of text
_SAMPLE_BYTES = 1 << 30  # that a tokenizer is trained on, about


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Everything that decides what is in the shards.

  Attributes:
    config: An object with the attributes that `corpus.load` names.
    vocab_size: The model's number of ids; a tokenizer trained here uses all of them.
    seed: Chooses the documents held out, unless `config.validation_seed` does.
    tokenizer: The tokenizer that the config names; None: one is trained.
  """

  config: Any
  vocab_size: int
  seed: int
  tokenizer: Tokenizer | None

  @property
  def split_seed(self) -> int:
    """Chooses the documents held out."""
    return self.seed if self.config.validation_seed is None else self.config.validation_seed

  @functools.cached_property
  def opened(self) -> dict[str, Source]:
    """The sources as they are when they are first used, by their configuration keys."""
    config = self.config
    options = sources.Options(config.text_key, config.bad_records, config.tfds_dir, config.download)
    named = {"data.source": config.source, "data.validation": config.validation}
    return {key: sources.open_source(name, key, options) for key, name in named.items() if name is not None}

  @functools.cached_property
  def record(self) -> dict[str, Any]:
    """The recipe as JSON, with fingerprints of the files."""
    config, prints = self.config, {key: source.fingerprint() for key, source in self.opened.items()}
    record = {
      "source": config.source,
      "source_fingerprint": prints["data.source"],
      "text_key": config.text_key,
      "bad_records": config.bad_records,
      "shuffle_seed": config.shuffle_seed,
      "tokenizer": self.tokenizer.hash if self.tokenizer else f"train {self.vocab_size}",
      "libraries": {"sentencepiece": sentencepiece.__version__, "tokenizers": huggingface.__version__},
    }
    if config.validation is not None:
      return record | {"validation": config.validation, "validation_fingerprint": prints["data.validation"]}
    return record | {
      "validation_fraction": config.validation_fraction,
      "validation_split": config.validation_split,
      "validation_seed": self.split_seed,
    }


def recipe(config: Any, vocab_size: int, seed: int) -> Recipe:
  """The recipe of a config.

  Raises:
    UserError: For a tokenizer that can't be used, and a vocabulary larger than the model's.
  """
  if config.tokenizer != "train":
    tokenizer = tokenizers.of_config(config)
    check_vocabulary(tokenizer, vocab_size, f"data.tokenizer={config.tokenizer}")
    return Recipe(config, vocab_size, seed, tokenizer)
  if config.begin_mark or config.begin_token or config.end_token:
    raise UserError(
      f"data.begin_mark={config.begin_mark}, data.begin_token={config.begin_token}, data.end_token="
      f"{config.end_token}: data.tokenizer=train makes a tokenizer with an end mark alone; set them to None"
    )
  return Recipe(config, vocab_size, seed, None)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
  """Raises UserError if the tokenizer has ids that the model lacks."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"model.vocab_size={vocab_size}: smaller than the {tokenizer.vocab_size} ids of {name}; set it to "
      f"{tokenizer.vocab_size} or more"
    )


def prepare(directory: str, recipe: Recipe, num_processes: int = 1, wait: bool = False) -> dict[str, Any]:
  """Fills a directory with shards and their manifest, or continues an interrupted call.

  In a complete directory the files are compared with their SHA-256, and damaged ones are prepared again. Memory stays
  flat: each process holds a batch of documents or a shard. The disk holds the tokens twice for a time.

  Args:
    directory: A directory of its own; created if it doesn't exist; `~` expands. Shards for a bucket are made in a
      folder of `data.cache_dir` and then copied.
    recipe: What is to be in it.
    num_processes: How many processes work at the same time; with 1, this one alone.
    wait: Whether to wait while another process prepares the directory.

  Returns:
    The manifest.

  Raises:
    UserError: For text that can't be used, files that change meanwhile, and a directory in other use.
    RunError: If a process dies.
    OSError: If the directory can't be written.
  """
  label, directory = f"workdir={directory}", files.absolute(directory)
  work = [shards.VERSION, recipe.record, TASK_BYTES, SHARD_BYTES]
  place = files.place_to_build(directory, recipe.config.cache_dir)
  with locked(place, label, wait):
    manifest = complete(directory, recipe.record, label) or complete(place, recipe.record, label)
    if manifest is None:
      unfinished = claim(place, work, label)
      try:
        manifest = _Preparation(place, unfinished, recipe, num_processes).run()
      except sqlite3.OperationalError as error:  # such as a full disk
        raise OSError(str(error)) from error
      if dataclasses.replace(recipe).record != recipe.record:
        raise UserError(f"data.source={recipe.config.source}: files changed while they were read; start again")
      finish(place, unfinished, manifest)
    files.publish(place, directory, shards.MANIFEST)
  return manifest


@dataclasses.dataclass
class _Counted:
  """A source after the first pass."""

  source: Source
  present: np.ndarray  # [num_records] bool: whether a record has text
  records: np.ndarray  # [num_parts] int64: records in each part
  bytes: np.ndarray  # [num_parts] int64: bytes of text in each part
  counts: Counts
  sides: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int8)
  )  # [num_records] int8: the split of each record (see `holdout.SIDES`)


@dataclasses.dataclass(frozen=True)
class _Preparation:
  """One call of `prepare`: its passes, and where each leaves what it has finished."""

  directory: str
  unfinished: str
  recipe: Recipe
  num_processes: int

  def _path(self, name: str) -> str:
    return os.path.join(self.unfinished, name)

  def run(self) -> dict[str, Any]:
    """All passes; returns the manifest."""
    counted = {key: self._count(key, source) for key, source in self.recipe.opened.items()}
    train, validation = counted["data.source"], counted.get("data.validation")
    if validation is None:
      train.sides = holdout.sides(train.present, self.recipe.config, self.recipe.split_seed)
    else:
      for split, one in (("train", train), ("validation", validation)):
        one.sides = one.present * np.int8(holdout.SIDES[split])
    tokenizer = self._tokenizer(train)
    dtype = dtype_of(tokenizer).name
    databases = self._tokenize(counted, tokenizer)
    splits = {"train": train, "validation": validation or train}
    splits = {split: self._gather(split, one, databases, dtype) for split, one in splits.items()}
    found = sum(split["documents"] for split in splits.values())
    expected = sum(one.counts.documents for one in counted.values())
    if found != expected:  # files under `_unfinished` were changed or lost
      raise UserError(f"{self.unfinished}: gives {found} documents where {expected} belong; remove it and start again")
    return {
      "version": shards.VERSION,
      "program": f"diffeq-nnx {importlib.metadata.version('diffeq-nnx')}",
      "recipe": self.recipe.record,
      "tokenizer": {"hash": tokenizer.hash, "file": tokenizer.file_name}
      | {name: getattr(tokenizer, name) for name in ("vocab_size", "eos_id", "bos_id")},
      "dtype": dtype,
      # the only place that says what became of the records that are in neither split
      "records": {key: dataclasses.asdict(one.counts) for key, one in counted.items()},
      "splits": splits,
    }

  def _count(self, key: str, source: Source) -> _Counted:
    """The first pass over one source."""
    size = -(-len(source.parts) // _COUNT_TASKS)
    groups = [source.parts[start : start + size] for start in range(0, len(source.parts), size)]
    tasks = {
      self._path(f"counted-{key}-{number:04}.json"): functools.partial(count, source.read, parts)
      for number, parts in enumerate(groups)
    }
    present, records, sizes, counts = [], [], [], Counts()
    for found in workers.run(f"counting ({key})", tasks, self.num_processes):
      bits = np.frombuffer(bytes.fromhex(found["present"]), np.uint8)
      present.append(np.unpackbits(bits, count=sum(found["records"])).astype(bool))
      records += found["records"]
      sizes += found["bytes"]
      counts.add(Counts(**found["counts"]))
    source.check(counts)
    return _Counted(source, np.concatenate(present), np.array(records), np.array(sizes), counts)

  def _tokenizer(self, train: _Counted) -> Tokenizer:
    """The tokenizer, given or trained, its file in place."""
    tokenizer = self.recipe.tokenizer
    if tokenizer is not None:
      files.write(self._path(tokenizer.file_name), tokenizer.model_bytes)
      return tokenizer
    path = self._path(tokenizers.SentencePieceTokenizer.file_name)
    if not os.path.exists(path):
      files.write(path, tokenizers.train(_sample(train), self.recipe.vocab_size))
    return tokenizers.load(path, lossless=True)

  def _tokenize(self, counted: dict[str, _Counted], tokenizer: Tokenizer) -> list[str]:
    """The second pass, over all sources; returns the paths of the databases."""
    path, begin_mark = self._path(tokenizer.file_name), tokenizer.bos_id is not None
    function = functools.partial(tokenize, path, begin_mark, self.recipe.config.shuffle_seed)
    tasks: dict[str, workers.Task] = {}
    for key, one in counted.items():
      records, num_bytes = np.cumsum([0, *one.records]), np.cumsum([0, *one.bytes])  # before each part
      size = max(TASK_BYTES, int(one.bytes.max()) // _CUTS)
      cuts = np.interp(np.arange(0, num_bytes[-1], size), num_bytes, records).astype(int).tolist()
      for start, stop in itertools.pairwise([0, *cuts[1:], int(records[-1])]):
        first, last = np.searchsorted(records[1:], [start, stop - 1], "right").tolist()
        skip = start - int(records[first])
        parts = one.source.parts[first : last + 1]
        texts = functools.partial(texts_of, one.source.read, parts, skip)
        name_of = functools.partial(
          record_name, f"{key}={one.source.source}", parts, records[first : last + 1].tolist()
        )
        database = self._path(f"{key}-{len(tasks):06}.sqlite")
        tasks[f"{database}.json"] = functools.partial(function, database, texts, start, one.sides[start:stop], name_of)
    workers.run("tokenizing", tasks, self.num_processes, sum(int(one.bytes.sum()) for one in counted.values()))
    return [path.removesuffix(".json") for path in tasks]

  def _gather(self, split: str, source: _Counted, databases: list[str], dtype: str) -> dict[str, Any]:
    """The third pass for one split; returns what the manifest says about it."""
    side = holdout.SIDES[split]
    documents = int((source.sides == side).sum())
    size = int(source.bytes.sum()) * documents // int(source.present.sum()) + _DOCUMENT_BYTES * documents  # about
    number = max(1, min(-(-size // SHARD_BYTES), MOST_SHARDS))
    keys = 1 << KEY_BITS if split == "train" else len(source.sides)
    tasks: dict[str, workers.Task] = {}
    for place in range(number):
      done = self._path(f"{split}-{place:05}.json")
      path = os.path.join(self.directory, f"{split}-{place:05}-of-{number:05}.tokens")
      size_now = os.path.getsize(path) if os.path.exists(path) else None
      if os.path.exists(done) and size_now != files.read_json(done)["shard"]["size"]:  # it was lost or cut short
        os.remove(done)
      low, high = keys * place // number, keys * (place + 1) // number
      tasks[done] = functools.partial(gather, databases, side, low, high, dtype, path, done)
    made = workers.run(f"gathering ({split})", tasks, self.num_processes, size)
    totals = {name: sum(one[name] for one in made) for name in ("tokens", "bytes", "documents")}
    return {**totals, "shards": [one["shard"] for one in made]}


def _sample(train: _Counted) -> Iterator[str]:
  """Training documents to train a tokenizer on; of a large source those of some parts, evenly spread."""
  every = max(1, int(train.bytes.sum()) // _SAMPLE_BYTES)
  starts = np.cumsum(train.records) - train.records
  with workers.bar("training the tokenizer", int(train.bytes[::every].sum())) as shown:
    for part, start in zip(train.source.parts[::every], starts[::every].tolist()):
      for index, text in enumerate(train.source.read(part, counts=Counts()), start):
        shown.update(len(text.encode()))
        if train.sides[index] == holdout.SIDES["train"]:
          yield text
