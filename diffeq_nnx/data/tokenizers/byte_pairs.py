"""Byte-level byte-pair tokenizers, as GPT-2's and Llama 3's, encoded by Hugging Face's `tokenizers`."""

from collections.abc import Iterable, Iterator, Sequence
import json
import re
from typing import Any

import numpy as np
import tokenizers as huggingface

from diffeq_nnx.data.tokenizers import base, vocabularies
from diffeq_nnx.data.tokenizers.vocabularies import ALPHABET, IN_ALPHABET, Vocabulary
from diffeq_nnx.errors import UserError

_BLOCK_CHARS = 1 << 16  # of a long text, encoded at once: several threads share it
_WORD_END = re.compile(r"[^\W_](?=[ \n])")
_WORDS = "two words 12 \u5b57\nnext\u00e9  x\n\ny_ z's \U0001f642 a"
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\n\x00\U0001f642 <unk> <|endoftext|>"


class BytePairTokenizer(base.Tokenizer):
  """A vocabulary with its marks; kept as one `tokenizer.json`, whose post-processor writes the marks."""

  file_name = "tokenizer.json"

  def __init__(
    self, vocabulary: Vocabulary, eos_id: int, bos_id: int | None, *, label: str = "data.tokenizer"
  ):
    """Makes the tokenizer.

    Args:
      vocabulary: The checked vocabulary.
      eos_id: The id of the mark after a document.
      bos_id: The id of the mark before a document, or None.
      label: What errors begin with.

    Raises:
      UserError: If text can give a special token's id, or the library can't use the vocabulary.
    """
    self.eos_id, self.bos_id = eos_id, bos_id
    spec = saved_form(vocabulary, eos_id, bos_id)
    special = [token["content"] for token in spec["added_tokens"] if token["special"]]
    vocabularies.check_unreachable(vocabulary, special, label)
    self._pieces = _decoded(vocabulary, special)
    try:
      self.model_bytes = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
      self._encoder = huggingface.Tokenizer.from_str(json.dumps(_encoding_form(spec)))
    except Exception as error:  # the library raises nothing narrower
      reason = " ".join(str(error).split())
      raise UserError(f"{label}: the tokenizers library can't use it ({reason}); restore the file") from error
    self._divides = _divides_at_word_ends(self._encoder, spec)
    if self.decode(self.encode(_PROBE)) != _PROBE:
      raise UserError(
        f"{label}: doesn't give text back as it was; give a vocabulary like GPT-2's, or 'bytes'"
      )

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return len(self._pieces)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts; those longer than 65,536 characters in blocks, where words divide them anyway.

    Returns:
      For each text its int32 ids, shape [num_tokens].

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
    """
    return base.encode_in_groups(texts, self._cut, self._encode_blocks)

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    try:
      encoded = self._encoder.encode_batch_fast(blocks, add_special_tokens=False)
    except TypeError:
      for block in blocks:
        block.encode()  # the library's own complaint about a lone surrogate says nothing
      raise
    return (np.array(encoding.ids, np.int32) for encoding in encoded)

  def _cut(self, text: str) -> Iterator[str]:
    start = 0
    while self._divides and len(text) - start > _BLOCK_CHARS:
      found = _WORD_END.search(text, start + _BLOCK_CHARS)
      if found is None:
        break
      yield text[start : found.end()]
      start = found.end()
    yield text[start:]

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text.

    Args:
      ids: Token ids; marks decode to nothing, numbers that are no id and bytes that aren't UTF-8 to U+FFFD.
    """
    pieces, known = self._pieces, self.vocab_size
    return b"".join(pieces[i] if 0 <= i < known else b"\xff" for i in map(int, ids)).decode(errors="replace")


def saved_form(vocabulary: Vocabulary, eos_id: int, bos_id: int | None) -> dict[str, Any]:
  """A vocabulary and its marks as one `tokenizer.json`, the same whatever files they came from."""
  names = {number: token for token, number in vocabulary.ids.items()}
  added = {token["id"]: token for token in vocabulary.added}
  for mark in {eos_id, bos_id} - {None}:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added[mark] = {"id": mark, "content": names[mark], **plain, "special": True}
  text, marks = {"Sequence": {"id": "A", "type_id": 0}}, {eos_id: names[eos_id]}
  single = [text, {"SpecialToken": {"id": names[eos_id], "type_id": 0}}]
  if bos_id is not None:
    single.insert(0, {"SpecialToken": {"id": names[bos_id], "type_id": 0}})
    marks[bos_id] = names[bos_id]
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [added[number] for number in sorted(added)],
    "normalizer": None,
    "pre_tokenizer": vocabulary.pre_tokenizer,
    "post_processor": {
      "type": "TemplateProcessing",
      "single": single,
      "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
      "special_tokens": {
        name: {"id": name, "ids": [number], "tokens": [name]} for number, name in marks.items()
      },
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": vocabulary.ignore_merges,
      "vocab": dict(sorted(vocabulary.pieces.items(), key=lambda item: item[1])),
      "merges": [list(pair) for pair in vocabulary.merges],
    },
  }


def _encoding_form(spec: dict[str, Any]) -> dict[str, Any]:
  """The same for encoding alone: what marks and other special tokens are called is text like any other."""
  vocab = dict(spec["model"]["vocab"])
  for token in spec["added_tokens"]:
    if token["special"]:
      vocab.pop(token["content"], None)
      vocab[f"\0{token['content']}"] = token["id"]  # no text becomes \0: it isn't in the alphabet
    else:
      vocab.setdefault(token["content"], token["id"])  # else the library numbers it anew
  matched = [token for token in spec["added_tokens"] if not token["special"]]
  return spec | {"added_tokens": matched, "post_processor": None, "model": spec["model"] | {"vocab": vocab}}


def _decoded(vocabulary: Vocabulary, special: list[str]) -> list[bytes]:
  """What each id stands for, in UTF-8."""
  pieces = [b""] * vocabulary.size
  bytes_of = str.maketrans({char: chr(byte) for char, byte in ALPHABET.items()})  # Latin-1's
  for token, number in vocabulary.ids.items():
    is_mapped = IN_ALPHABET.fullmatch(token) is not None
    pieces[number] = token.translate(bytes_of).encode("latin-1") if is_mapped else token.encode()
  for token in vocabulary.added:
    if token["content"] not in vocabulary.pieces:
      pieces[token["id"]] = token["content"].encode()
  for token in special:
    pieces[vocabulary.ids[token]] = b""
  return pieces


def _divides_at_word_ends(encoder: huggingface.Tokenizer, spec: dict[str, Any]) -> bool:
  """Whether text may be cut between a letter or digit and white space without changing its ids."""
  if any(_WORD_END.search(token["content"]) for token in spec["added_tokens"] if not token["special"]):
    return False

  def pieces(text: str) -> list[str]:
    return [piece for piece, _ in encoder.pre_tokenizer.pre_tokenize_str(text)]

  ends = [found.end() for found in _WORD_END.finditer(_WORDS)]
  return all(pieces(_WORDS) == pieces(_WORDS[:end]) + pieces(_WORDS[end:]) for end in ends)
