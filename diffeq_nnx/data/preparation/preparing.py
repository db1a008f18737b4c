"""Prepares text: what the shards depend on, and the tasks that write them."""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import random
import shutil
from typing import Any

from absl import logging
import sentencepiece
import tokenizers as huggingface

from diffeq_nnx import files
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data import shards, sources, tokenizers
from diffeq_nnx.data.documents import Document, text_of
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.data.preparation.directory import claim, finish, is_ours, lock, open_complete, remove_unfinished
from diffeq_nnx.data.preparation.tokenizing import choose_dtype, compute_score, tokenize
from diffeq_nnx.data.sources import Counts, Part, Source
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.data.tokenizers.base import END_OF_TEXT
from diffeq_nnx.errors import UserError

TASK_BYTES = 32 << 20  # stored bytes of a task, which is what a kill loses; parts that are larger are a task each
SHARD_BYTES = 64 << 20  # of tokens in a shard, which a process holds in memory for each split
MAX_TASKS = 1024  # of a source; beyond, tasks grow
_ABOVE_SCORES = 1 << 64  # the limit that holds out every document, as 0 holds out none
_SAMPLE_BYTES = 1 << 30  # that are read to train a tokenizer, about


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Everything that decides what is in the shards."""

  config: DataConfig
  vocab_size: int  # the model's number of ids, all of which a tokenizer trained here uses
  seed: int  # chooses the documents held out
  tokenizer: Tokenizer | None  # the one that the config names; None: one is trained

  @functools.cached_property
  def chat_template(self) -> str | None:
    """The chat template of conversations, with the names of the marks that it uses."""
    if self.tokenizer is not None:
      return self.tokenizer.chat_template
    if self.config.chat_template is None:
      return None
    template = tokenizers.read_template_file(self.config.chat_template)
    return tokenizers.name_marks(template, {"eos_token": END_OF_TEXT})

  @functools.cached_property
  def opened(self) -> dict[str, Source]:
    """The sources by their configuration keys, opened at the first use."""
    config = self.config
    options = dataclasses.replace(config, chat_template=self.chat_template)
    named = {"data.source": config.source, "data.validation": config.validation}
    return {key: sources.open_source(name, key, options) for key, name in named.items() if name is not None}

  def has_changed(self) -> bool:
    """Whether a source is another one now than when it was opened."""
    return any(source.has_changed() for source in self.opened.values())

  @functools.cached_property
  def record(self) -> dict[str, Any]:
    """The recipe in JSON's types, with fingerprints of the files."""
    config, prints = self.config, {key: source.fingerprint() for key, source in self.opened.items()}
    record = {
      "source": config.source,
      "source_fingerprint": prints["data.source"],
      "text_key": config.text_key,
      "bad_records": config.bad_records,
      "tokenizer": self.tokenizer.hash if self.tokenizer else f"train {self.vocab_size}",
      "libraries": {"sentencepiece": sentencepiece.__version__, "tokenizers": huggingface.__version__},
    }
    if config.records != "text":
      record |= {"records": config.records, **sources.name_columns(config)}
    if config.records == "chat":
      record["chat_template"] = hashlib.sha256((self.chat_template or "").encode()).hexdigest()
    if config.validation is not None:
      return record | {"validation": config.validation, "validation_fingerprint": prints["data.validation"]}
    return record | {"validation_fraction": config.validation_fraction, "validation_seed": self.seed}


def choose_seed(config: DataConfig, seed: int) -> int:
  """Returns the seed that chooses the held-out documents of a run with this seed."""
  return seed if config.validation_seed is None else config.validation_seed


def make_recipe(config: DataConfig, vocab_size: int, seed: int) -> Recipe:
  """Makes the recipe of a config's section `data`; the arguments are described at `Recipe`.

  `config.validation_seed` comes before `seed`.

  Raises UserError for a tokenizer or a chat template that can't be used, and a vocabulary larger than the model's.
  """
  tokenizer = None
  if config.tokenizer != "train":
    tokenizer = tokenizers.load(config.tokenizer, config, lossless=True)
    check_vocabulary(tokenizer, vocab_size, f"data.tokenizer={config.tokenizer}")
  elif config.begin_mark or config.begin_token or config.end_token:
    raise UserError(
      f"data.begin_mark={config.begin_mark}, data.begin_token={config.begin_token}, data.end_token="
      f"{config.end_token}: data.tokenizer=train makes a tokenizer with an end mark alone; set them to None"
    )
  recipe = Recipe(config, vocab_size, choose_seed(config, seed), tokenizer)
  if config.records == "chat":
    if recipe.chat_template is None:
      problem = f"data.tokenizer={config.tokenizer} has no chat template"
      raise UserError(f"data.records=chat: {problem}; set data.chat_template to the path of one")
    from diffeq_nnx.data import chat  # Jinja, which training on plain text doesn't need

    if not chat.compile_template(recipe.chat_template).teaches_end:
      logging.warning(
        "data.records=chat: the chat template writes nothing that is learned after an answer, so the model won't learn "
        "to end there; write a mark after it, for example {{ eos_token }}, within its generation block if it has one"
      )
  return recipe


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
  """Raises UserError if the tokenizer has ids that the model lacks."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"model.vocab_size={vocab_size}: smaller than the {tokenizer.vocab_size} ids of {name}; set it to "
      f"{tokenizer.vocab_size} or more"
    )


def prepare(directory: str, recipe: Recipe, wait: bool = False) -> dict[str, Any]:
  """Fills a directory with shards and their manifest, or continues an interrupted call; returns the manifest.

  In a complete directory the files are compared with their SHA-256, and damaged ones are prepared again. Memory stays
  flat: each process holds a batch of documents and a shard of each split.

  Args:
    directory: A directory of its own, created if it doesn't exist; `~` expands. Shards for a bucket are made in a
      folder of `data.cache_dir` and then copied.
    recipe: What is to be in it.
    wait: Whether to wait while another process prepares the directory.

  Raises:
    UserError: For text that can't be used, files that change meanwhile, and a directory in other use.
    RunError: If a process dies.
    OSError: If the directory can't be written.
  """
  label, directory = f"workdir={directory}", files.absolute(directory)
  work = [shards.VERSION, recipe.record, TASK_BYTES, SHARD_BYTES]
  locked = files.make_place_to_build(directory, recipe.config.cache_dir)
  in_bucket = locked != directory
  # what another recipe left for the same bucket must not be published
  place = os.path.join(locked, files.hash_json(work)[:16]) if in_bucket else directory
  with lock(locked, label, wait):
    files.make_folder(place)
    manifest = open_complete([directory, place] if in_bucket else [directory], recipe.record, label)
    if manifest is None:
      unfinished = claim(place, work, label)
      manifest = _write_shards(place, unfinished, recipe)
      if recipe.has_changed():
        remove_unfinished(place)  # which is of neither state of the files
        raise UserError(f"data.source={recipe.config.source}: files changed while they were read; start again")
      finish(place, unfinished, manifest)
    if in_bucket:
      if os.path.exists(os.path.join(place, shards.MANIFEST)):  # else the bucket has it, and what is here is removed
        files.publish(place, directory, shards.MANIFEST, is_ours)
      for name in {*os.listdir(locked)} - {files.LOCK}:
        files.remove(os.path.join(locked, name))
  if in_bucket:
    shutil.rmtree(locked, ignore_errors=True)  # NFS keeps it while another process waits for its lock
  return manifest


def _write_shards(directory: str, unfinished: str, recipe: Recipe) -> dict[str, Any]:
  """Writes all shards and returns the manifest. Tasks leave their results in the folder `unfinished`."""
  opened = recipe.opened
  limits = {"data.source": 0, "data.validation": _ABOVE_SCORES}
  if "data.validation" not in opened:
    documents = opened["data.source"].documents()
    limits["data.source"] = choose_limit(documents, recipe.config, recipe.seed)
  tokenizer = _write_tokenizer(unfinished, recipe, limits["data.source"])
  write = functools.partial(
    tokenize,
    tokenizer_file=os.path.join(unfinished, tokenizer.file_name),
    begin_mark=tokenizer.bos_id is not None,
    records=recipe.config.records,
    seed=recipe.seed,
    directory=directory,
    shard_bytes=SHARD_BYTES,
  )
  tasks: dict[str, workers.Task] = {}
  keys, sizes = [], files.list_sizes(directory)  # the keys are those of each task
  for key, source in opened.items():
    label, limit = f"{key}={source.source}", limits[key]
    for parts in _group(source.parts):
      name = f"{len(tasks):05}"
      result = os.path.join(unfinished, f"{name}.json")
      _remove_unusable_result(result, sizes)
      tasks[result] = functools.partial(write, source.read, parts, label=label, limit=limit, name=name)
      keys.append(key)
  made = workers.run("tokenizing", tasks, recipe.config.num_processes or workers.num_cores())
  counts = {key: Counts() for key in opened}
  for key, one in zip(keys, made):
    counts[key].add(Counts(**one["counts"]))
  for key, source in opened.items():
    source.check(counts[key])
  masked = recipe.config.records != "text"
  return {
    "version": shards.VERSION,
    "program": f"diffeq-nnx {_find_version()}",
    "recipe": recipe.record,
    "tokenizer": {"hash": tokenizer.hash, "file": tokenizer.file_name}
    | {name: getattr(tokenizer, name) for name in ("vocab_size", "eos_id", "bos_id")}
    | ({} if tokenizer.chat_template is None else {"chat_template": tokenizer.hash_chat_template()}),
    "dtype": choose_dtype(tokenizer, masked).name,
    **({"masked": True} if masked else {}),
    # the only place that says what became of the records that are in neither split
    "records": {key: dataclasses.asdict(one) for key, one in counts.items()},
    "splits": {split: _merge([one["splits"][split] for one in made]) for split in shards.SPLITS},
  }


def choose_limit(documents: Iterable[Document], config: DataConfig, seed: int) -> int:
  """Chooses the score below which a document is held out.

  It is the fraction that the config asks for, unless all documents would be on one side. Then the document with the
  lowest score is held out, or that with the highest one is trained on. Reading ends when each side has a document.
  Raises UserError if all documents are equal.
  """
  limit = round(config.validation_fraction * _ABOVE_SCORES)
  lowest, highest, count = _ABOVE_SCORES, -1, 0
  for document in documents:
    one = compute_score(text_of(document).encode(), seed)
    lowest, highest, count = min(lowest, one), max(highest, one), count + 1
    if lowest < limit <= highest:
      return limit
  if lowest >= highest:
    raise UserError(
      f"data.source={config.source}: {count} documents can't be divided between training and validation; give at least "
      "2 documents that differ, or data.validation"
    )
  return lowest + 1 if lowest >= limit else highest


def _find_version() -> str:
  try:
    return importlib.metadata.version("diffeq-nnx")
  except importlib.metadata.PackageNotFoundError:  # a clone that isn't installed
    return "(not installed)"


def _remove_unusable_result(path: str, sizes: dict[str, int]) -> None:
  """Removes the result of a task if a shard of it was lost or cut short, by the `sizes` of the files that are there."""
  if os.path.exists(path):
    made = [shard for split in files.read_json(path)["splits"].values() for shard in split["shards"]]
    if any(sizes.get(shard["file"]) != shard["size"] for shard in made):
      os.remove(path)


def _write_tokenizer(unfinished: str, recipe: Recipe, limit: int) -> Tokenizer:
  """Writes the tokenizer's file and returns the tokenizer, given or trained on documents that are not held out."""
  if recipe.tokenizer is not None:
    tokenizers.save(recipe.tokenizer, unfinished)
    return recipe.tokenizer
  path = os.path.join(unfinished, tokenizers.SentencePieceTokenizer.file_name)
  if not os.path.exists(path):
    sample = _sample(recipe.opened["data.source"], recipe.seed, limit)
    files.write(path, tokenizers.train(sample, recipe.vocab_size))
  tokenizer = tokenizers.load(path, lossless=True)
  tokenizer.chat_template = recipe.chat_template
  tokenizers.save(tokenizer, unfinished)
  return tokenizer


def _group(parts: Sequence[Part]) -> Iterator[list[Part]]:
  """Divides parts, in their order, into tasks of at least `TASK_BYTES` but for the last."""
  wanted, group, size = max(TASK_BYTES, sum(part.size for part in parts) // MAX_TASKS), [], 0
  for part in parts:
    group.append(part)
    size += part.size
    if size >= wanted:
      yield group
      group, size = [], 0
  if group:
    yield group


def _merge(splits: list[dict[str, Any]]) -> dict[str, Any]:
  """Joins what the tasks say about a split to what the manifest says about it."""
  totals = {name: sum(one[name] for one in splits) for name in splits[0] if name != "shards"}
  return {**totals, "shards": [shard for one in splits for shard in one["shards"]]}


def _sample(source: Source, seed: int, limit: int) -> Iterator[str]:
  """Yields training documents to train a tokenizer on, from parts in a random order until there is enough text."""
  parts, size = list(source.parts), 0
  random.Random(0).shuffle(parts)
  for part in parts:
    for document in source.read(part, counts=Counts()):
      text = text_of(document)
      content = text.encode()
      if text and compute_score(content, seed) >= limit:
        yield text
        size += len(content)
        if size >= _SAMPLE_BYTES:
          return
