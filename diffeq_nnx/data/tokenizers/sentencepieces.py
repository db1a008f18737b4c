"""Byte-fallback sentencepiece tokenizers, as Llama's, used without loss, and their training."""

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import io
from itertools import chain
import re

import numpy as np
import sentencepiece

from diffeq_nnx.data.tokenizers import base
from diffeq_nnx.data.tokenizers.base import END_OF_TEXT
from diffeq_nnx.data.tokenizers.marks import Said, Statement, resolve
from diffeq_nnx.errors import UserError

_SPACE = "\u2581"  # stands for a space inside sentencepiece, so a literal one has to go round it
_SEPARATORS = re.compile(f"([\n{_SPACE}])")
_LINE_CHARS = 1024  # at most 4096 bytes, below sentencepiece's limit for a training sentence
# A ModelProto's normalizer_spec in wire format: name "identity", no character map, no dummy prefix, extra
# spaces kept, spaces escaped. Appended to a model it overrides the model's own, by the rules of protobuf.
_LOSSLESS = b"\x1a\x12\x0a\x08identity\x12\x00\x18\x00\x20\x00\x28\x01"
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\x00\U0001f642 <unk> "


def train(
  documents: Iterable[str], vocab_size: int, *, max_bytes: int = 10_000_000, key: str = "model.vocab_size"
) -> bytes:
  """Trains a byte-pair tokenizer in memory; the same text always gives the same bytes.

  Args:
    documents: The texts, gone through once.
    vocab_size: Number of ids: the unknown mark (0), the end-of-text mark (1), 256 bytes, then the pieces.
    max_bytes: Of a larger corpus, an evenly spread sample of lines of about this size (UTF-8 bytes) is used.
    key: The configuration key that errors name.

  Returns:
    The serialised sentencepiece model.

  Raises:
    UserError: If the text can't fill so large a vocabulary, or needs a larger one, or there is no text.
  """
  lines = _sample(documents, max_bytes)
  if not lines:
    raise UserError(f"{key}={vocab_size}: there is no text to train a tokenizer on; give a source with text")
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, model_type="bpe",
      byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
      add_dummy_prefix=False, unk_id=0, eos_id=1, eos_piece=END_OF_TEXT, bos_id=-1, pad_id=-1,
      num_threads=4,  # written into the model, hence fixed
      minloglevel=2,
    )  # fmt: skip
  except (RuntimeError, OSError, TypeError, ValueError) as error:
    raise UserError(f"{key}={vocab_size}: {_training_problem(str(error))}") from error
  return model.getvalue()


def _training_problem(message: str) -> str:
  """Says in our words what sentencepiece's error means for the vocabulary."""
  if found := re.search(r"<= (\d+)\.", message):
    return f"too large for the training text, which yields at most {found[1]} entries; use at most {found[1]}"
  if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
    return f"too small for the characters of the training text; use at least {found[1]}"
  return f"no tokenizer can be trained ({' '.join(message.split())}); use a size from 512 to 65536"


def _sample(documents: Iterable[str], max_bytes: int) -> list[str]:
  """The lines of the documents, thinned evenly once they pass `max_bytes`."""
  kept: list[tuple[int, str, int]] = []
  total, limit, index = 0, 1 << 64, -1
  for line in chain.from_iterable(map(_lines, documents)):
    index += 1
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


def _lines(text: str) -> Iterator[str]:
  for part in re.split(_SEPARATORS, text)[::2]:
    yield from filter(None, _cut(part, _LINE_CHARS))


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
  """A sentencepiece model; its own text normalisation is switched off."""

  file_name = "tokenizer.model"

  def __init__(
    self,
    model_bytes: bytes,
    *,
    begin_mark: bool | None = None,
    beside: Said = Said(),
    label: str = "data.tokenizer",
  ):
    """Wraps a serialised sentencepiece model.

    Args:
      model_bytes: The model, with byte fallback and an end-of-text (or end-of-sentence) id.
      begin_mark: Whether documents begin with the model's begin mark; None: if it has one, and nothing beside
        it says otherwise.
      beside: What files beside the model say about marks.
      label: What errors begin with.

    Raises:
      UserError: If the bytes are no such model, or what is said about the marks disagrees.
    """
    way_out = "give a sentencepiece model trained with byte_fallback and an eos id, or 'train'"
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes + _LOSSLESS)
    except (RuntimeError, OSError, ValueError) as error:
      raise UserError(f"{label}: not a sentencepiece model; {way_out}") from error
    self.model_bytes = bytes(model_bytes)
    byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    if not all(map(self._model.is_byte, byte_ids)):
      raise UserError(f"{label}: has no byte fallback, so it would lose text; {way_out}")
    if self._model.eos_id() < 0:
      raise UserError(f"{label}: has no end-of-text id; {way_out}")
    self.eos_id, self.bos_id = resolve(
      _own_marks(self._model, beside), self._id_of, self.vocab_size, begin_mark, label
    )
    self._separator_ids = {mark: [byte_ids[byte] for byte in mark.encode()] for mark in ("\n", _SPACE)}
    if self.decode(self.encode(_PROBE)) != _PROBE:
      raise UserError(f"{label}: doesn't give text back as it was; {way_out}")

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return self._model.vocab_size()

  @property
  def hash(self) -> str:
    """The hex SHA-256 of the model's bytes, and of the begin mark where documents begin with it."""
    begin = b"" if self.bos_id is None else f"begin mark {self.bos_id}".encode()
    return hashlib.sha256(self.model_bytes + begin).hexdigest()

  def _id_of(self, token: str) -> int | None:
    number = self._model.piece_to_id(token)
    return number if self._model.id_to_piece(number) == token else None

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts, line by line.

    Returns:
      For each text its int32 ids, shape [num_tokens].

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
    """
    return base.encode_in_groups(texts, lambda text: _cut(text, base.GROUP_CHARS), self._encode_group)

  def _encode_group(self, blocks: list[str]) -> list[np.ndarray]:
    split, lines = [], []
    for block in blocks:
      block.encode()  # sentencepiece's own complaint about a lone surrogate says nothing
      parts = []
      for part in re.split(_SEPARATORS, block):
        parts.extend(_cut(part, _LINE_CHARS) if len(part) > _LINE_CHARS else (part,) if part else ())
      split.append(parts)
      lines.extend(part for part in parts if part not in self._separator_ids)
    encoded = iter(self._model.encode(lines, out_type=int, num_threads=base.num_threads()) if lines else ())
    result = []
    for parts in split:
      ids: list[int] = []
      for part in parts:
        ids += self._separator_ids[part] if part in self._separator_ids else next(encoded)
      result.append(np.array(ids, np.int32))
    return result

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text.

    Args:
      ids: Token ids; marks decode to nothing, an id at or above `vocab_size` and the unknown mark to " ⁇ ",
        and bytes that aren't UTF-8 to U+FFFD.
    """
    known, unknown = self.vocab_size, self._model.unk_id()
    return self._model.decode([i if 0 <= i < known else unknown for i in map(int, ids)])


def _own_marks(model: sentencepiece.SentencePieceProcessor, beside: Said) -> Said:
  """What the model says about its marks, with what is said beside it."""
  statements = [Statement("the model's eos_id", "eos", ids=(model.eos_id(),))]
  if model.bos_id() >= 0:
    statements.append(Statement("the model's bos_id", "bos", ids=(model.bos_id(),)))
  begins = beside.begins or (("the model's bos_id", model.bos_id() >= 0),)
  # Tokens that transformers would add to the model don't come out of the model itself.
  return Said((*statements, *(said for said in beside.statements if said.mark)), begins)
