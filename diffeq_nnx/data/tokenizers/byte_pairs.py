"""Byte-level byte-pair tokenizers, as GPT-2's and Llama 3's, encoded by Hugging Face's `tokenizers`, and plain bytes.

Text becomes UTF-8 bytes, each byte a printable character of GPT-2's alphabet, and merges join characters to pieces.
Only such a vocabulary gives every text back as it was. It is kept as a dict in the form of `tokenizer.json`.
"""

from collections.abc import Iterable, Iterator
import json
import re
from typing import Any

import numpy as np
import tokenizers as huggingface

from diffeq_nnx.data.tokenizers import base
from diffeq_nnx.data.tokenizers.base import Stated
from diffeq_nnx.data.tokenizers.files import parse_json, read_bytes
from diffeq_nnx.errors import UserError, first_line

Spec = dict[str, Any]  # in the form of tokenizer.json
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIVIDING = ("ByteLevel", "Split", "Digits", "Punctuation")  # steps that divide text and drop nothing
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others follow from 256 on.
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
  chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
BYTES = {"model": {"vocab": ALPHABET | {base.END_OF_TEXT: 256}, "merges": []}, "pre_tokenizer": BYTE_LEVEL}
# An empty tokenizer.json. The hash of a tokenizer depends on these keys, hence they aren't left to the library.
_EMPTY = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
"pre_tokenizer": null, "post_processor": null,
"decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
"model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
"end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false}}"""
_BLOCK_CHARS = 1 << 16  # of a long text, encoded at once: several threads share it
_WORD_END = re.compile(r"[^\W_](?=[ \n])")
_WORDS = "two words 12 \u5b57\nnext\u00e9  x\n\ny_ z's \U0001f642 a"
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\n\x00\U0001f642 <unk> <|endoftext|>"


def from_pair_of_files(vocab_path: str, merges_path: str, label: str) -> tuple[Spec, Stated]:
  """Reads `vocab.json` and `merges.txt`; raises UserError as `from_tokenizer_json`."""
  lines = read_bytes(merges_path, label).decode("utf-8-sig", errors="replace").replace("\r\n", "\n").split("\n")
  merges = [line for line in lines[lines[0].startswith("#version") :] if line]
  vocab = parse_json(read_bytes(vocab_path, label), vocab_path, label)
  return from_tokenizer_json({"model": {"vocab": vocab, "merges": merges}, "pre_tokenizer": BYTE_LEVEL}, label)


def from_tokenizer_json(given: Any, label: str) -> tuple[Spec, Stated]:
  """Returns a parsed `tokenizer.json` in canonical form, without marks, and what it says about marks.

  Its normalizer, truncation, padding and the space that it puts before a text are left out: they would lose text.

  Raises:
    UserError: If it isn't a byte-level byte-pair vocabulary, contradicts itself, or would lose text.
  """
  model = given.get("model") if isinstance(given, dict) else None
  if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
    raise UserError(f"{label}: no byte-pair model; give a tokenizer.json like GPT-2's, or a sentencepiece model")
  for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
    if model.get(key):
      raise UserError(f"{label}: the model sets {key}={model[key]!r}, with which text doesn't come back; remove it")
  added = given.get("added_tokens") or []
  used = {"added_tokens": added, "model": model | {"type": "BPE"}}
  used |= {key: given.get(key) for key in ("pre_tokenizer", "post_processor")}
  try:
    library = huggingface.Tokenizer.from_str(json.dumps(used))  # which checks types, merges and patterns
  except Exception as error:  # the library raises nothing narrower
    reason = re.sub(r" at line \d+ column \d+", "", first_line(error))
    raise UserError(f"{label}: the tokenizers library can't use it ({reason}); restore the file") from error
  spec = json.loads(_EMPTY)
  spec["pre_tokenizer"] = _pre_tokenizer(given.get("pre_tokenizer"), label)
  keys = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
  spec["added_tokens"] = sorted(({key: token[key] for key in keys} for token in added), key=lambda token: token["id"])
  spec["model"]["ignore_merges"] = bool(model.get("ignore_merges"))
  spec["model"]["vocab"] = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
  spec["model"]["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
  ids = ids_of(spec)
  for place, (token, number) in enumerate(sorted(ids.items(), key=lambda item: item[1])):
    if number != place:
      rule = f"must be 0 to {len(ids) - 1}, each once"
      raise UserError(f"{label}: ids {rule}, but {token!r} has {number} where {place} is due; restore the file")
  if missing := [byte for char, byte in ALPHABET.items() if char not in model["vocab"]]:
    raise UserError(f"{label}: no piece for {len(missing)} of the 256 bytes: text would be lost; use one with all")
  return spec, _marks(library, ids, label)


def ids_of(spec: Spec) -> dict[str, int]:
  """Ids by token, pieces and added tokens together."""
  return spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}


def _pre_tokenizer(given: dict[str, Any] | None, label: str) -> dict[str, Any]:
  """The steps that divide text, if they drop nothing and one of them maps bytes to GPT-2's alphabet."""
  steps = _steps(given) if given else []
  drops = [step for step in steps if step.get("type") not in _DIVIDING or step.get("behavior") == "Removed"]
  if drops or sum(step["type"] == "ByteLevel" for step in steps) != 1:
    rule = f"must be one ByteLevel and steps that drop no text ({', '.join(_DIVIDING[1:])})"
    raise UserError(f"{label}: the pre-tokenizer {rule}, not {given}; give one like GPT-2's, or a sentencepiece model")
  regex = {"use_regex": next(step for step in steps if step["type"] == "ByteLevel").get("use_regex", True)}
  steps = [BYTE_LEVEL | regex if step["type"] == "ByteLevel" else step for step in steps]
  return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def _steps(step: dict[str, Any]) -> list[dict[str, Any]]:
  """The steps of a pre-tokenizer, those of a Sequence one by one."""
  return [one for part in step["pretokenizers"] for one in _steps(part)] if "pretokenizers" in step else [step]


def _marks(library: huggingface.Tokenizer, ids: dict[str, int], label: str) -> Stated:
  """What the post-processor says about marks: those that it puts around a text."""
  encoding = library.encode("a")
  marks, is_mark = list(zip(encoding.tokens, encoding.ids)), encoding.special_tokens_mask
  before, after = marks[: [*is_mark, 0].index(0)], marks[len(marks) - [*is_mark[::-1], 0].index(0) :]
  known = all(ids.get(token) == number for token, number in before + after)
  if not known or len(before) > 1 or len(after) > 1 or len(before + after) != sum(is_mark):
    rule = "must put at most one token of the vocabulary before a text and one after it"
    raise UserError(f"{label}: the post-processor {rule}, not {before} and {after}; use a TemplateProcessing that does")
  eos, bos = ({"the post-processor": side[0][1]} if side else {} for side in (after, before))
  return {"eos": eos, "bos": bos, "begins": {"the post-processor": bool(bos)} if eos or bos else {}}


class BytePairTokenizer(base.Tokenizer):
  """A vocabulary with its marks; saved as one `tokenizer.json`, whose post-processor writes the marks."""

  file_name = "tokenizer.json"

  def __init__(self, vocabulary: Spec, eos_id: int, bos_id: int | None, label: str = "data.tokenizer"):
    """Adds its marks to a checked vocabulary; raises UserError if text can give a mark or doesn't come back."""
    spec = _with_marks(vocabulary, eos_id, bos_id)
    self.eos_id, self.bos_id, self.vocab_size = eos_id, bos_id, len(ids_of(spec))
    self.model_bytes = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    merged = {piece for left, right in spec["model"]["merges"] for piece in (left, right, left + right)}
    if reached := special & (ALPHABET.keys() | merged):
      problem = f"the special token {min(reached)!r} is also an ordinary piece, which text can give"
      raise UserError(f"{label}: {problem}; name another token, or give the vocabulary that the mark belongs to")
    vocab, added = dict(spec["model"]["vocab"]), [token for token in spec["added_tokens"] if not token["special"]]
    # What each id stands for. The library's decoder would map an added token such as "\u00e9" to another byte.
    self._pieces = {
      number: bytes(ALPHABET[char] for char in piece) if ALPHABET.keys() >= set(piece) else piece.encode()
      for piece, number in vocab.items()
    }
    self._pieces |= {token["id"]: token["content"].encode() for token in added if token["content"] not in vocab}
    vocab |= {token["content"]: token["id"] for token in added}  # else the library numbers them anew
    for token in spec["added_tokens"]:
      if token["special"]:  # its name is ordinary text
        self._pieces[token["id"]] = b""
        vocab.pop(token["content"], None)
        vocab[f"\0{token['content']}"] = token["id"]  # no text becomes \0: it isn't in the alphabet
    encoding = spec | {"added_tokens": added, "post_processor": None, "model": spec["model"] | {"vocab": vocab}}
    self._encoder = huggingface.Tokenizer.from_str(json.dumps(encoding))
    self._divides = not any(_WORD_END.search(token["content"]) for token in added) and self._divides_at_word_ends()
    for text in (_PROBE, *(f"a {token['content']} b" for token in added)):
      if self.decode(self.encode(text)) != text:
        raise UserError(f"{label}: doesn't give {text!r} back as it was; give a vocabulary like GPT-2's, or 'bytes'")

  def _divides_at_word_ends(self) -> bool:
    """Whether text may be cut between a letter or digit and white space without changing its ids."""
    split, ends = self._encoder.pre_tokenizer.pre_tokenize_str, [found.end() for found in _WORD_END.finditer(_WORDS)]
    cuts = [(_WORDS,), *((_WORDS[:end], _WORDS[end:]) for end in ends)]
    pieces = [[piece for part in parts for piece, _ in split(part)] for parts in cuts]
    return all(one == pieces[0] for one in pieces)

  def _cut(self, text: str) -> Iterator[str]:
    start = 0
    while self._divides and (found := _WORD_END.search(text, start + _BLOCK_CHARS)):
      yield text[start : found.end()]
      start = found.end()
    yield text[start:]

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    encoded = self._encoder.encode_batch_fast(blocks, add_special_tokens=False)
    return (np.array(encoding.ids, np.int32) for encoding in encoded)

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text; marks to nothing, numbers that are no id and bytes that aren't UTF-8 to U+FFFD."""
    return b"".join(self._pieces.get(int(number), b"\xff") for number in ids).decode(errors="replace")


class ByteTokenizer(BytePairTokenizer):
  """257 ids: the 256 bytes of UTF-8 and the end mark. Saved as the `tokenizer.json` of a vocabulary without merges."""

  def __init__(self):
    """Builds the tokenizer."""
    super().__init__(from_tokenizer_json(BYTES, "bytes")[0], 256, None)

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    return (np.frombuffer(block.encode(), np.uint8).astype(np.int32) for block in blocks)


def _with_marks(vocabulary: Spec, eos_id: int, bos_id: int | None) -> Spec:
  """A vocabulary with its marks as special tokens, and a post-processor that puts them around a text."""
  names = {number: token for token, number in ids_of(vocabulary).items()}
  marks = {number: names[number] for number in (eos_id, bos_id) if number is not None}
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
  added = [token for token in vocabulary["added_tokens"] if token["id"] not in marks]
  added += [{"id": number, "content": name} | flags for number, name in marks.items()]
  text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
  before, after = (
    [{"SpecialToken": {"id": names[one], "type_id": 0}}] if one in marks else [] for one in (bos_id, eos_id)
  )
  processor = {
    "type": "TemplateProcessing",
    "single": [*before, text, *after],
    "pair": [text, second],
    "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in marks.items()},
  }
  return vocabulary | {"added_tokens": sorted(added, key=lambda token: token["id"]), "post_processor": processor}
