"""The work of each pass: records are counted, tokenized into databases of documents, and gathered into shards."""

import bisect
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sqlite3
from typing import Any

import numpy as np

from diffeq_nnx.data import holdout, shards, tokenizers
from diffeq_nnx.data.preparation.workers import Progress
from diffeq_nnx.data.sources import Counts, Part
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import replacing

KEY_BITS = 63
_BATCH = 16  # documents that are processed at a time

Read = Callable[..., Iterator[str]]  # see `sources.Source.read`
Texts = Callable[[], Iterator[str]]


def count(read: Read, parts: list[Part], progress: Progress) -> dict[str, Any]:
  """Counts each part's records and bytes of text, and what became of the records.

  `present` says which records have text, as bits in hex.
  """
  present, records, sizes, counts = bytearray(), [], [], Counts()
  for part in parts:
    records.append(0)
    sizes.append(0)
    texts = read(part, counts=counts)
    while batch := [len(text.encode()) for text in itertools.islice(texts, _BATCH)]:
      present += bytes(map(bool, batch))
      records[-1] += len(batch)
      sizes[-1] += sum(batch)
      progress(sum(batch))
  bits = np.packbits(np.frombuffer(bytes(present), np.uint8)).tobytes().hex()
  return {"present": bits, "records": records, "bytes": sizes, "counts": dataclasses.asdict(counts)}


_load = functools.lru_cache(1)(tokenizers.load)


def dtype_of(tokenizer: tokenizers.Tokenizer) -> np.dtype:
  """The type of a token on disk."""
  return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def texts_of(read: Read, parts: list[Part], skip: int) -> Iterator[str]:
  """The texts of the records in some parts, but for the first `skip`."""
  return itertools.islice(itertools.chain.from_iterable(read(part, counts=Counts()) for part in parts), skip, None)


def record_name(source: str, parts: list[Part], before: list[int], place: int) -> str:
  """Where the record at a place in a source stands: its part and its number there, from 1.

  `parts` are some of the source's parts, and `before` the numbers of records before each.
  """
  index = bisect.bisect_right(before, place) - 1
  return f"{source}: {parts[index].name}, record {place - before[index] + 1}"


def tokenize(
  tokenizer_file: str,
  begin_mark: bool,
  seed: int,
  path: str,
  texts: Texts,
  start: int,
  sides: Any,
  name_of: Callable[[int], str],
  progress: Progress,
) -> None:
  """Writes the documents among consecutive records, as tokens with keys, to a database.

  There are `start` records before them in the source. `sides` is the split of each, [num_records] int8 (see
  `holdout.SIDES`), `seed` decides the order of training documents, and `name_of` names the record at a place in the
  source. Raises UserError, with this name, for a document that the tokenizer can't encode.
  """
  tokenizer = _load(tokenizer_file, begin_mark=begin_mark, lossless=True)
  dtype, marks = dtype_of(tokenizer), (tokenizer.bos_id, tokenizer.eos_id)
  begin, end = (b"" if mark is None else np.array(mark, dtype).tobytes() for mark in marks)
  documents = (record for record in zip(sides.tobytes(), itertools.count(start), texts()) if record[0])
  with replacing(path) as part, _opened(part) as database, database:  # which commits
    database.executescript("PRAGMA synchronous = OFF; CREATE TABLE documents (side, key, bytes, tokens)")
    while batch := list(itertools.islice(documents, _BATCH)):
      split, numbers, documents_texts = (list(column) for column in zip(*batch))
      places = np.array(numbers, np.uint64)
      keys = np.where(np.array(split) == holdout.SIDES["train"], shuffled(places, seed), places).tolist()
      try:
        encoded = tokenizer.encode_batch(documents_texts)
      except tokenizers.UnknownByte as error:
        way_out = "set data.unknown_bytes=unknown to replace such bytes by the unknown token, or change the document"
        raise UserError(f"{name_of(numbers[error.index])}: {error}; {way_out}") from error
      tokens = (begin + ids.astype(dtype).tobytes() + end for ids in encoded)
      sizes = [len(text.encode()) for text in documents_texts]
      database.executemany("INSERT INTO documents VALUES (?, ?, ?, ?)", zip(split, keys, sizes, tokens))
      progress(sum(sizes))
    database.execute("CREATE INDEX keys ON documents (side, key)")


def _opened(path: str) -> contextlib.closing[sqlite3.Connection]:
  url = f"{pathlib.Path(path).as_uri()}?vfs=unix-none"  # without locks, which not every file system has
  return contextlib.closing(sqlite3.connect(url, uri=True))


def shuffled(places: np.ndarray, seed: int) -> np.ndarray:
  """Keys of training documents: a hash (SplitMix64, Steele et al. 2014) of seed and place, [n] uint64 below 2^63."""
  start = int.from_bytes(np.random.SeedSequence(seed).generate_state(2).tobytes(), "little")
  z = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return (z ^ (z >> np.uint64(31))) >> np.uint64(64 - KEY_BITS)


def gather(
  databases: list[str], side: int, low: int, high: int, dtype: str, path: str, part: str, progress: Progress
) -> dict[str, Any]:
  """Writes a shard of a split's documents with keys from `low` to `high` - 1, in their order, to `part`, then `path`.

  Returns what the manifest says about the shard, and its tokens, bytes of text and documents.
  """
  query = "SELECT key, bytes, tokens FROM documents WHERE side = ? AND key BETWEEN ? AND ? ORDER BY key, rowid"
  documents: list[tuple[int, int, bytes]] = []
  for name in databases:
    try:
      with _opened(name) as database:
        found = database.execute(query, (side, low, high - 1)).fetchall()
    except sqlite3.DatabaseError as error:
      raise UserError(f"{name}: is damaged ({error}); remove {os.path.dirname(name)} and start again") from error
    documents += found
    progress(sum(size for _, size, _ in found))
  documents.sort(key=lambda document: document[0])
  tokens = np.frombuffer(b"".join(document for _, _, document in documents), dtype)
  with replacing(path, part) as written:
    shard = dataclasses.asdict(shards.write_shard(written, tokens, os.path.basename(path)))
  return {"tokens": len(tokens), "bytes": sum(one[1] for one in documents), "documents": len(documents), "shard": shard}
