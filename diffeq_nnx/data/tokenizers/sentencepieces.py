"""Byte-fallback sentencepiece tokenizers, as Llama's, used without loss, and their training."""

from collections.abc import Iterable, Iterator
import hashlib
import io
from itertools import chain
import os
import re

import numpy as np
import sentencepiece

from diffeq_nnx.data.tokenizers import base
from diffeq_nnx.errors import UserError

_SPACE = "\u2581"  # stands for a space inside sentencepiece, so a literal one is encoded as bytes
_SEPARATORS = re.compile(f"([\n{_SPACE}])")
_LINE_CHARS = 1024  # at most 4096 bytes, below sentencepiece's limit for a training sentence
# A ModelProto's normalizer_spec in wire format: name "identity", no character map, no dummy prefix, extra spaces kept,
# spaces escaped. Appended to a model it overrides the model's own, by the rules of protobuf.
_LOSSLESS = b"\x1a\x12\x0a\x08identity\x12\x00\x18\x00\x20\x00\x28\x01"
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\x00\U0001f642 <unk> "
_IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
_MARKS = {"unk_id": 0, "eos_id": 1, "eos_piece": base.END_OF_TEXT, "bos_id": -1, "pad_id": -1}
_KIND = {"model_type": "bpe", "byte_fallback": True, "num_threads": 4}  # the threads too are written into the model


def train(
  documents: Iterable[str], vocab_size: int, *, max_bytes: int = 10_000_000, key: str = "model.vocab_size"
) -> bytes:
  """Trains a byte-pair tokenizer in memory; the same text always gives the same bytes.

  Args:
    documents: The texts, read once.
    vocab_size: Number of ids: the unknown mark (0), the end-of-text mark (1), 256 bytes, then the pieces.
    max_bytes: A larger corpus is reduced to an evenly spread sample of lines of about this size in UTF-8 bytes.
    key: The configuration key that errors name.

  Returns:
    The serialized sentencepiece model.

  Raises:
    UserError: If the text can't fill so large a vocabulary, or needs a larger one, or there is no text.
  """
  lines, model = _sample(documents, max_bytes), io.BytesIO()
  if not lines:
    raise UserError(f"{key}={vocab_size}: there is no text to train a tokenizer on; give a source with text")
  try:
    options = {"vocab_size": vocab_size, "minloglevel": 2} | _KIND | _IDENTITY | _MARKS
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
  except (RuntimeError, OSError, TypeError, ValueError) as error:
    problem = f"no tokenizer can be trained ({' '.join(str(error).split())}); use a size from 512 to 65536"
    if found := re.search(r"<= (\d+)\.", str(error)):
      problem = f"too large for the training text, which yields at most {found[1]} entries; use at most {found[1]}"
    elif found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
      problem = f"too small for the characters of the training text; use at least {found[1]}"
    raise UserError(f"{key}={vocab_size}: {problem}") from error
  return model.getvalue()


def _sample(documents: Iterable[str], max_bytes: int) -> list[str]:
  """The lines of the documents, thinned evenly once they pass `max_bytes`."""
  kept: list[tuple[int, str, int]] = []
  total, limit = 0, 1 << 64
  parts = (part for text in documents for part in re.split(_SEPARATORS, text)[::2] if part)
  for index, line in enumerate(line for part in parts for line in _cut(part, _LINE_CHARS)):
    # Multiples of the golden ratio, modulo 1: those below any limit are spread evenly over the corpus.
    rank = index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    if rank >= limit:
      continue
    size = len(line.encode())
    kept.append((rank, line, size))
    total += size
    while total > max_bytes and len(kept) > 1:
      limit = limit * 7 // 8
      kept = [item for item in kept if item[0] < limit]
      total = sum(item[2] for item in kept)
  return [line for _, line, _ in kept]


def _cut(text: str, limit: int) -> Iterator[str]:
  """Cuts a text into pieces of at most `limit` characters: after a newline, else before a space if it can."""
  start = 0
  while len(text) - start > limit:
    end = text.rfind("\n", start, start + limit) + 1 or text.rfind(" ", start + 1, start + limit)
    end = end if end > start else start + limit
    yield text[start:end]
    start = end
  yield text[start:]


class SentencePieceTokenizer(base.Tokenizer):
  """A sentencepiece model; its own text normalization is switched off."""

  file_name = "tokenizer.model"

  def __init__(self, model_bytes: bytes, label: str = "data.tokenizer"):
    """Wraps a serialized model; raises UserError if it is none, or lacks byte fallback or an end mark."""
    way_out = "give a sentencepiece model trained with byte_fallback and an eos id, or 'train'"
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes + _LOSSLESS)
    except (RuntimeError, OSError, ValueError) as error:
      raise UserError(f"{label}: not a sentencepiece model; {way_out}") from error
    self.model_bytes, self.vocab_size = bytes(model_bytes), self._model.vocab_size()
    byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    if not all(map(self._model.is_byte, byte_ids)):
      raise UserError(f"{label}: has no byte fallback, so it would lose text; {way_out}")
    if self._model.eos_id() < 0:
      raise UserError(f"{label}: has no end-of-text id; {way_out}")
    self.eos_id, self.bos_id = self._model.eos_id(), self._model.bos_id() if self._model.bos_id() >= 0 else None
    self._separator_ids = {mark: [byte_ids[byte] for byte in mark.encode()] for mark in ("\n", _SPACE)}
    if self.decode(self.encode(_PROBE)) != _PROBE:
      raise UserError(f"{label}: doesn't give text back as it was; {way_out}")

  def id_of(self, token: str) -> int | None:
    """The id of a piece, None for one that the model lacks."""
    number = self._model.piece_to_id(token)
    return number if self._model.id_to_piece(number) == token else None

  @property
  def hash(self) -> str:
    """The hex SHA-256 of the model's bytes, and of the begin mark where documents begin with it."""
    begin = b"" if self.bos_id is None else f"begin mark {self.bos_id}".encode()
    return hashlib.sha256(self.model_bytes + begin).hexdigest()

  def _cut(self, text: str) -> Iterator[str]:
    return _cut(text, base.GROUP_CHARS)

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    """Encodes line by line; newlines and literal U+2581 become their bytes."""
    split = [
      [piece for part in re.split(_SEPARATORS, block) if part for piece in _cut(part, _LINE_CHARS)] for block in blocks
    ]
    lines = [part for parts in split for part in parts if part not in self._separator_ids]
    threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else min(os.cpu_count() or 1, 16)
    encoded = iter(self._model.encode(lines, out_type=int, num_threads=threads) if lines else ())
    for parts in split:
      ids = (self._separator_ids[part] if part in self._separator_ids else next(encoded) for part in parts)
      yield np.fromiter(chain.from_iterable(ids), np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text; marks to nothing, the unknown mark and numbers that are no id to a double question mark."""
    unknown = self._model.unk_id()
    return self._model.decode([i if 0 <= i < self.vocab_size else unknown for i in map(int, ids)])
