"""A corpus as two runs of tokens, tokenised once and kept on disk."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import sentencepiece
import tokenizers as huggingface
import tqdm

from diffeq_nnx.data import holdout, sources, tokenizers
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError

FORMAT_VERSION = 2  # part of the cache's key: raise it when the files or the tokenisation change
_BATCH_CHARS = 1 << 21  # text tokenised and written at a time


@dataclasses.dataclass(frozen=True)
class Split:
  """One side of a corpus.

  Attributes:
    tokens: [num_tokens] uint16 or uint32, memory-mapped: the documents, each with the end-of-text id after it
      and, where the tokenizer has one (`bos_id`), the begin mark before it.
    num_bytes: UTF-8 bytes of the text, marks excluded.
    num_documents: Number of documents.
  """

  tokens: np.ndarray
  num_bytes: int
  num_documents: int


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A tokenizer and what it made of the training and the validation documents."""

  tokenizer: Tokenizer
  train: Split
  validation: Split


def load(config: Any, vocab_size: int, seed: int) -> Corpus:
  """Tokenises a corpus, or opens it where an earlier call left it under `config.cache_dir`.

  The cache is complete or absent: a killed run or several at once leave no half-made one, and one whose files
  have the wrong size is made anew. Neither the text nor the tokens are held in memory.

  Args:
    config: An object with the attributes
      `source`: the documents to train on (see `sources.open_source`);
      `text_key`, `bad_records`, `tfds_dir`, `download`: how sources are read (see `sources.Options`);
      `validation`: a source of its own, or None to hold out documents of `source`;
      `validation_fraction`: the share of documents held out when `validation` is None;
      `validation_split`: which ones, "hash" or "permutation" (see `holdout.sides`);
      `validation_seed`: chooses them; None for `seed`;
      `tokenizer`: "train" for a sentencepiece model trained on the training documents, or what
        `tokenizers.load` takes;
      `begin_mark`: whether documents begin with the tokenizer's begin mark; None: as its files say;
      `cache_dir`: a directory; `~` expands.
    vocab_size: The model's number of ids, all of which a tokenizer trained here uses.
    seed: Chooses the documents held out, unless `config.validation_seed` does.

  Returns:
    The tokenizer and both splits.

  Raises:
    UserError: For a source, a tokenizer, a vocabulary size or a directory that can't be used.
  """
  tokenizer = _given_tokenizer(config, vocab_size)
  cache_dir = os.path.abspath(os.path.expanduser(config.cache_dir))
  inputs = _cache_inputs(config, vocab_size, seed, tokenizer)
  key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
  final = os.path.join(cache_dir, key)
  corpus = _open(final, tokenizer)
  if corpus is not None:
    return corpus
  part = os.path.join(cache_dir, f".{key}.{uuid.uuid4().hex}")
  try:
    try:
      os.makedirs(part)
      _remove_abandoned(cache_dir, key)
      _build(part, config, vocab_size, seed, tokenizer)
      if _cache_inputs(config, vocab_size, seed, tokenizer) != inputs:
        raise UserError(f"data.source={config.source}: files changed while they were read; start again")
      return _publish(part, final, tokenizer)
    finally:
      shutil.rmtree(part, ignore_errors=True)
  except OSError as error:  # the sources' own are told as UserError by then
    reason = error.strerror or str(error)
    raise UserError(
      f"data.cache_dir={config.cache_dir}: can't be written ({reason}); give a writable directory with space"
    ) from error


def _given_tokenizer(config: Any, vocab_size: int) -> Tokenizer | None:
  """The tokenizer that the config names, or None for one to be trained."""
  if config.tokenizer == "train":
    if config.begin_mark:
      raise UserError(
        "data.begin_mark=True: data.tokenizer=train makes one without a begin mark; set it to None or False"
      )
    return None
  tokenizer = tokenizers.load(config.tokenizer, begin_mark=config.begin_mark)
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"model.vocab_size={vocab_size}: smaller than the {tokenizer.vocab_size} ids of "
      f"data.tokenizer={config.tokenizer}; set it to {tokenizer.vocab_size} or more"
    )
  return tokenizer


def _options(config: Any) -> sources.Options:
  """How the config says that sources are read."""
  return sources.Options(config.text_key, config.bad_records, config.tfds_dir, config.download)


def _split_seed(config: Any, seed: int) -> int:
  return seed if config.validation_seed is None else config.validation_seed


def _cache_inputs(config: Any, vocab_size: int, seed: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """All that the cached files depend on."""
  if config.validation is None:
    if not 0 < config.validation_fraction < 1:
      raise UserError(
        f"data.validation_fraction={config.validation_fraction}: must lie between 0 and 1, both excluded; "
        "use for example 0.05, or give data.validation"
      )
    validation = {"fraction": config.validation_fraction, "seed": _split_seed(config, seed),
                  "split": config.validation_split}  # fmt: skip
  else:
    validation = sources.fingerprint(config.validation, "data.validation", _options(config))
  return {
    "format": FORMAT_VERSION,
    "sentencepiece": sentencepiece.__version__,
    "tokenizers": huggingface.__version__,
    "source": sources.fingerprint(config.source, options=_options(config)),
    "validation": validation,
    "tokenizer": tokenizer.hash if tokenizer else "train",
    "vocab_size": vocab_size,
  }


def _open(directory: str, tokenizer: Tokenizer | None) -> Corpus | None:
  """The corpus in a cache directory, or None if it isn't there, isn't whole or is another tokenizer's.

  Args:
    directory: The directory.
    tokenizer: The tokenizer that the config names; None: the one trained when the corpus was made.
  """
  try:
    with open(os.path.join(directory, "meta.json"), encoding="utf-8") as file:
      meta = json.load(file)
    if tokenizer is None:
      tokenizer = tokenizers.load(os.path.join(directory, meta["tokenizer_file"]))
    if tokenizer.hash != meta["tokenizer"]:
      return None
    splits = {}
    for name in holdout.SIDES:
      path, dtype, info = os.path.join(directory, f"{name}.bin"), np.dtype(meta["dtype"]), meta[name]
      if os.path.getsize(path) != info["num_tokens"] * dtype.itemsize:
        return None
      splits[name] = Split(np.memmap(path, dtype, mode="r"), info["num_bytes"], info["num_documents"])
  except (OSError, ValueError, KeyError, TypeError):  # UserError is a ValueError
    return None
  return Corpus(tokenizer, **splits)


def _remove_abandoned(cache_dir: str, key: str) -> None:
  """Deletes what killed runs left of this cache: temporary directories untouched for a day."""
  for directory in glob.glob(os.path.join(glob.escape(cache_dir), f".{key}.*")):
    with contextlib.suppress(OSError):
      newest = max(os.path.getmtime(path) for path in [directory, *glob.glob(f"{glob.escape(directory)}/*")])
      if time.time() - newest > 86400:
        shutil.rmtree(directory, ignore_errors=True)


def _publish(part: str, final: str, tokenizer: Tokenizer | None) -> Corpus:
  """Moves a finished directory to its place, unless another run was first."""
  while True:
    try:
      os.rename(part, final)
    except OSError:
      if not os.path.lexists(final):
        raise
    corpus = _open(final, tokenizer)
    if corpus is not None:
      return corpus
    # Something damaged is in the way: renaming is the one step that can't be seen half-done.
    broken = f"{part}.broken"
    with contextlib.suppress(FileNotFoundError):
      os.rename(final, broken)
    if os.path.isdir(broken):
      shutil.rmtree(broken, ignore_errors=True)
    elif os.path.lexists(broken):
      os.remove(broken)


def _build(directory: str, config: Any, vocab_size: int, seed: int, tokenizer: Tokenizer | None) -> None:
  """Writes the tokenizer's file, train.bin, validation.bin and meta.json."""
  opened = {"data.source": sources.open_source(config.source, options=_options(config))}
  if config.validation is None:
    source = opened["data.source"]
    bar = _progress(source.records(), "counting documents")
    sides = holdout.sides(bar, config, _split_seed(config, seed))
    passes: dict[str, Callable[[], Iterator[str]]] = {
      name: lambda side=side: (text for text, its in zip(source.records(), sides) if its == side)
      for name, side in holdout.SIDES.items()
    }
    totals = {name: int((sides == side).sum()) for name, side in holdout.SIDES.items()}
  else:
    validation = sources.open_source(config.validation, "data.validation", _options(config))
    opened["data.validation"] = validation
    passes, totals = {"train": opened["data.source"].documents, "validation": validation.documents}, {}
  if tokenizer is None:
    bar = _progress(passes["train"](), "training the tokenizer", totals.get("train"))
    tokenizer = tokenizers.SentencePieceTokenizer(tokenizers.train(bar, vocab_size))
  dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
  meta: dict[str, Any] = {
    "tokenizer": tokenizer.hash, "tokenizer_file": tokenizer.file_name, "dtype": dtype.name
  }  # fmt: skip
  for name in holdout.SIDES:
    bar = _progress(passes[name](), f"tokenising ({name})", totals.get(name))
    with open(os.path.join(directory, f"{name}.bin"), "wb") as file:
      meta[name] = _write_tokens(file, bar, tokenizer, dtype)
  # Only here can it be read later what became of the records that are in neither split.
  meta["records"] = {key: dataclasses.asdict(source.counts) for key, source in opened.items()}
  with open(os.path.join(directory, tokenizer.file_name), "wb") as file:
    file.write(tokenizer.model_bytes)
  with open(os.path.join(directory, "meta.json"), "w", encoding="utf-8") as file:
    json.dump(meta, file, indent=2)


def _progress(documents: Iterator[str], description: str, total: int | None = None) -> Iterable[str]:
  hidden = not sys.stderr.isatty()
  return tqdm.tqdm(
    documents, desc=description, total=total, unit=" documents", delay=2, leave=False, disable=hidden
  )


def _write_tokens(
  file: BinaryIO, documents: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype
) -> dict[str, int]:
  """Streams documents to a file as tokens between their marks; returns the counts."""
  begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
  end = np.array([tokenizer.eos_id], dtype)
  counts = {"num_tokens": 0, "num_bytes": 0, "num_documents": 0}

  def write(batch: list[str]) -> None:
    for text, ids in zip(batch, tokenizer.encode_batch(batch)):
      file.write(begin.tobytes() + ids.astype(dtype).tobytes() + end.tobytes())
      counts["num_tokens"] += len(begin) + len(ids) + 1
      counts["num_bytes"] += len(text.encode())
      counts["num_documents"] += 1

  batch, size = [], 0
  for text in documents:
    batch.append(text)
    size += len(text)
    if size >= _BATCH_CHARS:
      write(batch)
      batch, size = [], 0
  write(batch)
  return counts
