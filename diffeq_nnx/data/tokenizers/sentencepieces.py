"""Sentencepiece tokenizers with byte fallback, as Llama's, used without loss or as they were trained."""

from collections.abc import Iterable, Iterator, Sequence
import functools
import hashlib
import io
from itertools import chain, count, groupby
import json
import os
import re
from typing import Any

import numpy as np
import sentencepiece

from diffeq_nnx.data.tokenizers import base
from diffeq_nnx.data.tokenizers.byte_fallback import BYTE_PIECES, SPACE
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import parse_json

_SEPARATORS = re.compile(f"([\n{SPACE}])")  # a literal U+2581 is encoded as bytes, since SPACE stands for a space
_TRAINING_BYTES = 10_000_000  # of UTF-8 that a tokenizer is trained on
_LINE_CHARS = 1024  # at most 4096 bytes, below sentencepiece's limit for a training sentence
# A ModelProto's normalizer_spec in wire format: name "identity", no character map, no dummy prefix, extra spaces kept,
# spaces escaped. Appended to a model it overrides the model's own, by the rules of protobuf.
_LOSSLESS = b"\x1a\x12\x0a\x08identity\x12\x00\x18\x00\x20\x00\x28\x01"
_NO_PREFIX = b"\x1a\x02\x18\x00"  # the same, overriding add_dummy_prefix alone
# Field 20090 of a ModelProto, one of those left to others: JSON with how the model is used, and its marks.
_FACTS_KEY = b"\xd2\xe7\x09"
_FACTS = re.compile(_FACTS_KEY + rb'[\x80-\xff]*[\x00-\x7f](\{"as_trained": .*\})', re.DOTALL)
_WAY_OUT = "give a sentencepiece model trained with byte_fallback and an eos id, or 'train'"
_SKIPPED = "\u2585"  # of which sentencepiece leaves out the whole line
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\x00\U0001f642 <unk> "
_IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
_MARKS = {"unk_id": 0, "eos_id": 1, "eos_piece": base.END_OF_TEXT, "bos_id": -1, "pad_id": -1}
_KIND = {"model_type": "bpe", "byte_fallback": True, "num_threads": 4}  # the threads too are written into the model


def train(documents: Iterable[str], vocab_size: int) -> bytes:
  """Trains a byte-pair tokenizer in memory, and returns the serialized model. The same text gives the same bytes.

  Args:
    documents: The texts, read once. A larger corpus is reduced to an evenly spread sample of lines of about 10 MB.
    vocab_size: Number of ids: the unknown mark (0), the end-of-text mark (1), 256 bytes, then the pieces.

  Raises:
    UserError: If the text can't fill so large a vocabulary, or needs a larger one, or there is no text.
  """
  lines, model = _sample(documents), io.BytesIO()
  if not lines:
    raise UserError(f"model.vocab_size={vocab_size}: there is no text to train a tokenizer on; give a source with text")
  try:
    options: dict[str, Any] = {"vocab_size": vocab_size, "minloglevel": 2} | _KIND | _IDENTITY | _MARKS
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
  except (RuntimeError, OSError, TypeError, ValueError) as error:
    problem = f"no tokenizer can be trained ({' '.join(str(error).split())}); use a size from 512 to 65536"
    if found := re.search(r"<= (\d+)\.", str(error)):
      problem = f"too large for the training text, which yields at most {found[1]} entries; use at most {found[1]}"
    elif found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
      problem = f"too small for the characters of the training text; use at least {found[1]}"
    raise UserError(f"model.vocab_size={vocab_size}: {problem}") from error
  return model.getvalue()


def _sample(documents: Iterable[str]) -> list[str]:
  """Returns the lines of the documents, thinned evenly once they pass `_TRAINING_BYTES`."""
  kept: list[tuple[int, str, int]] = []
  total, limit = 0, 1 << 64
  texts = (text.replace(_SKIPPED, "") for text in documents)
  parts = (part for text in texts for part in re.split(_SEPARATORS, text)[::2] if part)
  for index, line in enumerate(line for part in parts for line in _cut(part, _LINE_CHARS)):
    # Multiples of the golden ratio, modulo 1: those below any limit are spread evenly over the corpus.
    rank = index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    if rank >= limit:
      continue
    size = len(line.encode())
    kept.append((rank, line, size))
    total += size
    while total > _TRAINING_BYTES and len(kept) > 1:
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


def make_processor(model_bytes: bytes) -> sentencepiece.SentencePieceProcessor:
  """Makes the library's processor of a serialized model; raises UserError if it is none, or lacks byte fallback."""
  try:
    model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    has_bytes = all(model.is_byte(model.piece_to_id(piece)) for piece in BYTE_PIECES)
  except (RuntimeError, OSError, ValueError, IndexError) as error:
    raise UserError(f"not a sentencepiece model; {_WAY_OUT}") from error
  if not has_bytes:
    raise UserError(f"has no byte fallback, so it would lose text; {_WAY_OUT}")
  return model


def map_ids(model: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
  """Returns ids by piece."""
  return {model.id_to_piece(number): number for number in range(model.vocab_size())}


def is_trained_here(model: sentencepiece.SentencePieceProcessor) -> bool:
  """Whether a model is like those of `train`: it has their marks, and its own normalization changes nothing."""
  marks = {"unk_id": model.unk_id(), "eos_id": model.eos_id(), "bos_id": model.bos_id(), "pad_id": model.pad_id()}
  same = _MARKS == marks | {"eos_piece": model.id_to_piece(model.eos_id()) if model.eos_id() >= 0 else ""}
  return same and model.decode(model.encode(_PROBE)) == _PROBE


def split_facts(content: bytes) -> tuple[bytes, dict[str, Any] | None]:
  """Splits a file into a model and what `SentencePieceTokenizer` noted at its end, or None if it noted nothing."""
  at = content.rfind(_FACTS_KEY)
  found = _FACTS.fullmatch(content, at) if at >= 0 else None
  if found is None:
    return content, None
  facts = parse_json(found[1], "the end of the model")
  facts.setdefault("legacy", False)
  types: dict[str, Any] = {"as_trained": bool, "legacy": bool, "added": list, "end_ids": list}
  types["bos_id"] = int, type(None)
  known = facts.keys() == types.keys() and all(isinstance(facts[key], kind) for key, kind in types.items())
  if not known or not facts["end_ids"] or not all(isinstance(name, str) for name in facts["added"]):
    raise UserError(f"its end holds {facts}, which this program didn't write; restore the file")
  return content[:at], facts


def _find_any(names: Iterable[str]) -> re.Pattern | None:
  """Returns a pattern that finds the longest of these names, or None if there are none."""
  longest_first = sorted(names, key=len, reverse=True)
  return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _append_facts(model_bytes: bytes, facts: dict[str, Any]) -> bytes:
  """Appends facts to a model, as a field that the sentencepiece library skips."""
  text = json.dumps(facts).encode()
  sizes, left = [], len(text)
  while left:  # a length in protobuf's form: seven bits a byte, the lowest first
    left, low = left >> 7, left & 127
    sizes.append(low | (128 if left else 0))
  return model_bytes + _FACTS_KEY + bytes(sizes) + text


class SentencePieceTokenizer(base.Tokenizer):
  """A sentencepiece model, without loss or as it was trained, with tokens that were added beside it.

  Without loss its text normalization is switched off, and newlines and literal U+2581 become bytes. As it was trained,
  a text has the ids that the sentencepiece library gives it. The names of added tokens in a text are these tokens,
  except for those of marks; only the beginning of the text, and not the text after such a token, then gets the model's
  space, unless `legacy` is set, as in older versions of transformers.
  """

  file_name = "tokenizer.model"

  def __init__(
    self,
    model_bytes: bytes,
    *,
    marks: base.Marks | None = None,
    as_trained: bool = False,
    added: Sequence[str] = (),
    legacy: bool = False,
  ):
    """Wraps a serialized model.

    `marks` are its own by default, of which it then must have an end mark; `as_trained` says whether text is normalized
    as when the model was trained; `added` are the names of tokens whose ids follow the model's pieces; `legacy` says
    whether text after such a token gets the model's space too. Raises UserError if it is no model, lacks byte fallback,
    or text can give a mark.
    """
    own = make_processor(model_bytes)
    own_bos = own.bos_id() if own.bos_id() >= 0 else None
    marks, self.added = marks or base.Marks(own.eos_id(), own_bos), dict(zip(added, count(own.vocab_size())))
    self.eos_id, self.bos_id, self.more_end_ids = marks.eos_id, marks.bos_id, marks.more_end_ids
    self.lossless, self.legacy, self.published_bytes = not as_trained, legacy, model_bytes
    self._num_pieces, self.added_ids = own.vocab_size(), frozenset(self.added.values())
    self.vocab_size = self._num_pieces + len(self.added)
    plain = make_processor(model_bytes + _LOSSLESS)
    self._plain, self._first, self._rest = plain, plain, plain
    if as_trained:
      self._first, self._rest = own, own if legacy else make_processor(model_bytes + _NO_PREFIX)
    pieces = [number for number in marks.ids if number < self._num_pieces]
    if reached := [number for number in pieces if not (own.is_control(number) or own.is_unknown(number))]:
      raise base.OrdinaryMark(own.id_to_piece(reached[0]))
    self._own = own
    self._names = {number: "" if number in marks.ids else name for name, number in self.added.items()}
    self._added_names = _find_any(filter(None, self._names.values()))
    byte_ids = [own.piece_to_id(piece) for piece in BYTE_PIECES]
    self._separator_ids = {mark: [byte_ids[byte] for byte in mark.encode()] for mark in ("\n", SPACE)}
    own_marks = (marks.eos_id, marks.more_end_ids) == (own.eos_id(), ()) and marks.bos_id in (None, own_bos)
    self._noted = as_trained or bool(self.added) or not own_marks
    facts = {"as_trained": as_trained, "added": [*self.added], "end_ids": [*self.end_ids], "bos_id": self.bos_id}
    facts |= {"legacy": True} if legacy else {}
    self.model_bytes = _append_facts(model_bytes, facts) if self._noted else self.published_bytes
    if as_trained:
      ids = self.encode("a")
      self.leading = self.decode_within(ids).removesuffix(self.decode(ids))
    elif self.decode(self.encode(_PROBE)) != _PROBE:
      raise UserError(f"doesn't give text back as it was; {_WAY_OUT}")

  @property
  def hash(self) -> str:
    """The SHA-256 of the file, and of the begin mark if documents begin with it and the file doesn't say so."""
    begin = b"" if self.bos_id is None or self._noted else f"begin mark {self.bos_id}".encode()
    return hashlib.sha256(self.model_bytes + begin).hexdigest()

  def _divide(self, text: str) -> Iterator[str]:
    if not self.lossless:  # the library's ids are those of the whole
      yield text
      return
    for part in self._added_names.split(text) if self._added_names else [text]:
      yield from _cut(part, base.GROUP_CHARS)

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    split = [list(self._split(block, self._added_names, self.added)) for block in blocks]
    threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else min(os.cpu_count() or 1, 16)
    encoded = {}
    for model in {self._first, self._rest}:
      texts = [text for parts in split for one, text, known in parts if one is model and known is None]
      encoded[id(model)] = iter(model.encode(texts, out_type=int, num_threads=threads) if texts else ())
    for parts in split:
      ids = (next(encoded[id(model)]) if known is None else known for model, _, known in parts)
      yield np.fromiter(chain.from_iterable(ids), np.int32)

  def name_token(self, number: int) -> str:
    """See `Tokenizer.name_token`."""
    return self._own.id_to_piece(number) if number < self._num_pieces else [*self.added][number - self._num_pieces]

  @functools.cached_property
  def _special_names(self) -> dict[str, int]:
    """The ids of special tokens by their names; looked for once, in all pieces."""
    return self.added | {self._own.id_to_piece(n): n for n in range(self._num_pieces) if self._own.is_control(n)}

  def encode_spans(self, text: str, rendered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """See `Tokenizer.encode_spans`."""
    text.encode()
    names = self._special_names if rendered else {name: number for number, name in self._names.items() if name}
    ids: list[int] = []
    spans, at = [], 0
    for model, piece, known in self._split(text, _find_any(names), names):
      if known is None:
        found = model.encode(piece, return_type="offset_mapping")
        known, places = found["ids"], found["offsets"]
      else:  # of a name, or the bytes of one character
        places = [(0, len(piece))] * len(known)
      ids += known
      # the library gives a character to the last of its bytes alone
      spans += [(at + begin, at + max(end, begin + 1)) for begin, end in places]
      at += len(piece)
    return np.array(ids, np.int32), np.array(spans, np.int64).reshape(-1, 2)

  def _split(
    self, text: str, pattern: re.Pattern | None, ids: dict[str, int]
  ) -> Iterator[tuple[sentencepiece.SentencePieceProcessor, str, list[int] | None]]:
    """Yields the pieces of a text, each with the processor that encodes it, or with its ids where these are known.

    They are known of the names that `pattern` finds, and without loss of newlines and literal U+2581.
    """
    for place, piece in enumerate(pattern.split(text) if pattern else [text]):
      if place % 2:
        yield self._plain, piece, [ids[piece]]
      elif self.lossless:
        for part in filter(None, re.split(_SEPARATORS, piece)):
          yield from ((self._plain, line, self._separator_ids.get(line)) for line in _cut(part, _LINE_CHARS))
      elif piece:
        yield self._rest if place else self._first, piece, None

  def _decode(self, ids: Iterable[int], within: bool) -> str:
    unknown, texts = self._plain.unk_id(), []
    model = self._plain if within else self._first  # decodes the ids up to the first added token
    known = (number if 0 <= number < self.vocab_size else unknown for number in map(int, ids))
    for is_added, group in groupby(known, lambda number: number >= self._num_pieces):
      run = list(group)
      texts += [self._names[number] for number in run] if is_added else [model.decode(run)]
      model = self._plain
    return "".join(texts)
