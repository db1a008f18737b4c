"""The work of one task, which turns the documents of some parts of a source into shards."""

import collections
from collections.abc import Callable, Iterator
import dataclasses
import hashlib
import itertools
import os
from typing import Any

import numpy as np

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data import shards, tokenizers
from diffeq_nnx.data.documents import NOT_COUNTED, Document, count_bytes, encode, text_of
from diffeq_nnx.data.sources import Counts, Part
from diffeq_nnx.errors import UserError

_BATCH = 16  # documents that are encoded at a time


def compute_score(document: bytes, seed: int) -> int:
  """Returns a number of 64 bits that depends on the seed and the bytes of a document alone.

  A document is held out where it is below a limit. Equal documents are therefore on the same side, and neither their
  order nor the number of processes matters.
  """
  return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest(), "little")


def choose_dtype(tokenizer: tokenizers.Tokenizer, masked: bool) -> np.dtype:
  """Returns the type of a token on disk, which has room for the bits of `documents.encode` if they are `masked`."""
  return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 and not masked else np.uint32)


@dataclasses.dataclass
class _Writer:
  """Writes the shards that a task makes of one split. Their names begin with `path`."""

  path: str
  shard_bytes: int
  dtype: np.dtype
  totals: collections.Counter[str]
  shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  waiting: bytearray = dataclasses.field(default_factory=bytearray)

  def add(self, tokens: bytes, num_bytes: int, **more: int) -> None:
    """Adds a document, whose text that counts has so many bytes; `more` are other numbers to be summed."""
    self.waiting += tokens
    self.totals.update(tokens=len(tokens) // self.dtype.itemsize, bytes=num_bytes, documents=1, **more)
    if len(self.waiting) >= self.shard_bytes:
      self.flush()

  def flush(self) -> None:
    """Writes the documents that are not in a shard yet, if there are any."""
    if self.waiting:
      path = f"{self.path}-{len(self.shards):03}.tokens"
      self.shards.append(shards.write_shard(path, np.frombuffer(self.waiting, self.dtype)))
      self.waiting = bytearray()


def tokenize(
  read: Callable[..., Iterator[Document]],
  parts: list[Part],
  *,
  tokenizer_file: str,
  begin_mark: bool,
  records: str,
  seed: int,
  limit: int,
  label: str,
  directory: str,
  name: str,
  shard_bytes: int,
) -> dict[str, Any]:
  """Writes the documents of some parts, in their order, as shards of each split.

  `read` yields the records of a part (see `sources.Source.read`), and `records` says of which kind they are
  (`data.records`). A document is held out if its score, which depends on `seed`, is below `limit`.
  `label` begins errors about documents. The shards in `directory` are named SPLIT-NAME-NUMBER.tokens. A shard is
  written as soon as it has `shard_bytes` of tokens.

  Returns:
    "counts", which says what became of the records, and "splits", what the manifest says about these shards by split.

  Raises:
    UserError: For a document that the tokenizer can't encode, and what `read` raises.
  """
  tokenizer = tokenizers.load(tokenizer_file, DataConfig(begin_mark=begin_mark), lossless=True)
  masked = records != "text"
  dtype, marks = choose_dtype(tokenizer, masked), (tokenizer.bos_id, tokenizer.eos_id)
  begin, end = (b"" if mark is None else np.array(mark, dtype).tobytes() for mark in marks)
  totals = dict.fromkeys(("tokens", "bytes", "documents", *(["counted"] if masked else [])), 0)
  writers = {
    split: _Writer(os.path.join(directory, f"{split}-{name}"), shard_bytes, dtype, collections.Counter(totals))
    for split in shards.SPLITS
  }
  counts = Counts()
  found = ((part, *record) for part in parts for record in enumerate(read(part, counts=counts), 1))
  documents = (record for record in found if record[2])
  while batch := list(itertools.islice(documents, 1 if masked else _BATCH)):
    try:
      if masked:
        ids = [encode(batch[0][2], tokenizer, records == "chat")]
      else:
        ids = tokenizer.encode_batch([text_of(document) for _, _, document in batch])
    except tokenizers.UnknownByte as error:
      part, number, _ = batch[error.index]
      way_out = (
        "change the document, or set data.unknown_bytes=unknown, which replaces such bytes by the unknown token, with "
        "the published tokenizer (for a run at --job=import)"
      )
      raise UserError(f"{label}: {part.name}, record {number}: {error}; {way_out}") from error
    except UserError as error:
      part, number, _ = batch[0]
      raise UserError(f"{label}: {part.name}, one of {len(batch)} records from {number} on: {error}") from error
    for (_, _, document), one in zip(batch, ids):
      content = text_of(document).encode()
      split = "validation" if compute_score(content, seed) < limit else "train"
      if masked:
        writers[split].add(one.tobytes(), count_bytes(document), counted=int(np.sum(one & NOT_COUNTED == 0)))
      else:
        writers[split].add(begin + one.astype(dtype).tobytes() + end, len(content))
  for writer in writers.values():
    writer.flush()
  splits = {split: {**writer.totals, "shards": writer.shards} for split, writer in writers.items()}
  return {"counts": dataclasses.asdict(counts), "splits": splits}
