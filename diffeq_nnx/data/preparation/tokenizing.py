"""The work of one task, which turns the documents of some parts of a source into shards."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
import os
from typing import Any

import numpy as np

from diffeq_nnx.data import holdout, shards, tokenizers
from diffeq_nnx.data.sources import Counts, Part
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import replacing

_BATCH = 16  # documents that are encoded at a time

_load = functools.lru_cache(1)(tokenizers.load)


def choose_dtype(tokenizer: tokenizers.Tokenizer) -> np.dtype:
  """Returns the type of a token on disk."""
  return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


@dataclasses.dataclass
class _Writer:
  """Writes the shards that a task makes of one split. The name of an unfinished shard begins with `temporary`."""

  path: str
  temporary: str
  shard_bytes: int
  dtype: np.dtype
  shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  totals: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("tokens", "bytes", "documents"), 0))
  waiting: bytearray = dataclasses.field(default_factory=bytearray)

  def add(self, tokens: bytes, num_bytes: int) -> None:
    """Adds a document, whose text has so many bytes."""
    self.waiting += tokens
    for key, more in (("tokens", len(tokens) // self.dtype.itemsize), ("bytes", num_bytes), ("documents", 1)):
      self.totals[key] += more
    if len(self.waiting) >= self.shard_bytes:
      self.flush()

  def flush(self) -> None:
    """Writes the documents that are not in a shard yet, if there are any."""
    if self.waiting:
      path = f"{self.path}-{len(self.shards):03}.tokens"
      with replacing(path, self.temporary) as written:
        shard = shards.write_shard(written, np.frombuffer(self.waiting, self.dtype), os.path.basename(path))
      self.shards.append(dataclasses.asdict(shard))
      self.waiting = bytearray()


def tokenize(
  read: Callable[..., Iterator[str]],
  parts: list[Part],
  *,
  tokenizer_file: str,
  begin_mark: bool,
  seed: int,
  limit: int,
  label: str,
  directory: str,
  path: str,
  shard_bytes: int,
) -> dict[str, Any]:
  """Writes the documents of some parts, in their order, as shards of each split.

  `read` yields the records of a part (see `sources.Source.read`). A document is held out if its score, which depends
  on `seed`, is below `limit` (see `holdout`). `label` begins errors about documents. The shards in `directory` are
  named SPLIT-NAME-NUMBER.tokens, where `path` ends with NAME; `path` begins the name of a shard while it is written. A
  shard is written as soon as it has `shard_bytes` of tokens.

  Returns:
    "counts", which says what became of the records, and "splits", what the manifest says about these shards by split.

  Raises:
    UserError: For a document that the tokenizer can't encode, and what `read` raises.
  """
  tokenizer = _load(tokenizer_file, begin_mark=begin_mark, lossless=True)
  dtype, marks = choose_dtype(tokenizer), (tokenizer.bos_id, tokenizer.eos_id)
  begin, end = (b"" if mark is None else np.array(mark, dtype).tobytes() for mark in marks)
  names = {split: os.path.join(directory, f"{split}-{os.path.basename(path)}") for split in shards.SPLITS}
  writers = {split: _Writer(name, path, shard_bytes, dtype) for split, name in names.items()}
  counts = Counts()
  records = ((part, *record) for part in parts for record in enumerate(read(part, counts=counts), 1))
  documents = (record for record in records if record[2])
  while batch := list(itertools.islice(documents, _BATCH)):
    try:
      ids = tokenizer.encode_batch([text for _, _, text in batch])
    except tokenizers.UnknownByte as error:
      part, number, _ = batch[error.index]
      way_out = "set data.unknown_bytes=unknown to replace such bytes by the unknown token, or change the document"
      raise UserError(f"{label}: {part.name}, record {number}: {error}; {way_out}") from error
    for (_, _, text), one in zip(batch, ids):
      document = text.encode()
      split = "validation" if holdout.compute_score(document, seed) < limit else "train"
      writers[split].add(begin + one.astype(dtype).tobytes() + end, len(document))
  for writer in writers.values():
    writer.flush()
  splits = {split: {**writer.totals, "shards": writer.shards} for split, writer in writers.items()}
  return {"counts": dataclasses.asdict(counts), "splits": splits}
