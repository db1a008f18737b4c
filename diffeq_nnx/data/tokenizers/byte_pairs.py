"""Byte-level byte-pair tokenizers, as GPT-2's and Llama 3's, encoded by Hugging Face's `tokenizers`, and plain bytes.

Text becomes UTF-8 bytes, each byte a printable character of GPT-2's alphabet, and merges join characters to pieces.
Such a vocabulary gives every text back as it was. It is kept as a dict in the form of `tokenizer.json`. A published one
may lack pieces for bytes that its training text never held.
"""

from collections.abc import Iterable, Iterator, Sequence
import json
import re
from typing import Any

from absl import logging
import numpy as np

from diffeq_nnx.data.tokenizers import base, specs
from diffeq_nnx.data.tokenizers.files import Folder
from diffeq_nnx.data.tokenizers.marks import Stated
from diffeq_nnx.data.tokenizers.specs import Spec
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import parse_json

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
_IN_NO_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 never has; DeepSeek's vocabularies lack them
_BLOCK_CHARS = 1 << 16  # of a long text, encoded at once: several threads share it
_WORD_END = re.compile(r"[^\W_](?=[ \n])")
_WORDS = "two words 12 \u5b57\nnext\u00e9  x\n\ny_ z's \U0001f642 a"
_PROBE = "  A\u00a0\ufb01 \t e\u0301  \r\n\x00\U0001f642 <unk> <|endoftext|>"


def from_pair_of_files(folder: Folder, vocab: str, merges: str) -> tuple[Spec, Stated]:
  """Reads a vocabulary and its merges by the names of these files; raises UserError as `from_tokenizer_json`."""
  lines = folder[merges].decode("utf-8-sig", errors="replace").replace("\r\n", "\n").split("\n")
  model = {
    "vocab": parse_json(folder[vocab], vocab),
    "merges": [line for line in lines[lines[0].startswith("#version") :] if line],
  }
  spec, stated = from_tokenizer_json({"model": model, "pre_tokenizer": BYTE_LEVEL})
  return spec, stated | {"otherwise_begins": {}}  # these files have no post-processor


def from_tokenizer_json(given: Any) -> tuple[Spec, Stated]:
  """Returns a parsed `tokenizer.json` in canonical form, without marks, and what it says about marks.

  Its normalizer, truncation, padding and the space that it puts before a text are left out: they would lose text. The
  unknown token is left out where every byte has a piece. Raises UserError if it isn't a byte-level byte-pair
  vocabulary, contradicts itself, or would lose text.
  """
  model = given.get("model") if isinstance(given, dict) else None
  if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
    raise UserError("no byte-pair model; give a tokenizer.json like GPT-2's, or a sentencepiece model")
  for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
    if model.get(key):
      raise UserError(f"the model sets {key}={model[key]!r}, with which text doesn't come back; remove it")
  added = given.get("added_tokens") or []
  used: Spec = {"added_tokens": added, "model": model | {"type": "BPE", "unk_token": None}}
  used |= {key: given.get(key) for key in ("pre_tokenizer", "post_processor")}
  library = specs.load(used)
  spec = json.loads(_EMPTY)
  spec["pre_tokenizer"] = _convert_pre_tokenizer(given.get("pre_tokenizer"))
  spec["added_tokens"] = specs.normalize_tokens(added)
  spec["model"]["ignore_merges"] = bool(model.get("ignore_merges"))
  spec["model"]["vocab"] = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
  spec["model"]["merges"] = specs.split_merges(model["merges"])
  ids = specs.map_ids(spec)
  specs.check_ids(ids)
  unknown = {}
  if missing := find_missing_bytes(spec):
    stand_ins = {char: len(ids) + byte for char, byte in missing.items()}
    library = specs.load(used | {"model": used["model"] | {"vocab": model["vocab"] | stand_ins}})
    spec["model"]["fuse_unk"] = bool(model.get("fuse_unk"))
    unknown = {"the model's unk_token": model["unk_token"]} if model.get("unk_token") is not None else {}
  if ours := specs.read_ours(model):
    spec["model"][specs.OURS] = ours
  return spec, specs.read_marks(library, spec) | {"unknown": unknown}


def find_missing_bytes(spec: Spec) -> dict[str, int]:
  """Returns the bytes that texts can have, and for which a vocabulary has no piece, by their characters."""
  vocab = spec["model"]["vocab"]
  return {char: byte for char, byte in ALPHABET.items() if char not in vocab and byte not in _IN_NO_TEXT}


def _convert_pre_tokenizer(given: dict[str, Any] | None) -> dict[str, Any]:
  """Returns the steps that divide text; raises UserError if they drop text, or none maps bytes to GPT-2's alphabet."""
  steps = list_steps(given) if given else []
  # A step that removes what its pattern does not match keeps all text in files made from tiktoken's, whose patterns
  # match everything. As one that removes nothing it divides that text in the same way.
  keeps = {"behavior": "Isolated", "invert": False}
  steps = [step | keeps if (step.get("behavior"), step.get("invert")) == ("Removed", True) else step for step in steps]
  drops = [step for step in steps if step.get("type") not in _DIVIDING or step.get("behavior") == "Removed"]
  if drops or sum(step["type"] == "ByteLevel" for step in steps) != 1:
    rule = f"must be one ByteLevel and steps that drop no text ({', '.join(_DIVIDING[1:])})"
    raise UserError(f"the pre-tokenizer {rule}, not {given}; give one like GPT-2's, or a sentencepiece model")
  regex = {"use_regex": next(step for step in steps if step["type"] == "ByteLevel").get("use_regex", True)}
  if any(step.get("add_prefix_space") for step in steps):
    logging.warning("the tokenizer's space before a text is left out; the first word of a text may have other ids so")
  steps = [BYTE_LEVEL | regex if step["type"] == "ByteLevel" else step for step in steps]
  return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def list_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the steps of a pre-tokenizer, those of a Sequence one by one."""
  return [one for part in step["pretokenizers"] for one in list_steps(part)] if "pretokenizers" in step else [step]


class BytePairTokenizer(specs.LibraryTokenizer):
  """A vocabulary with its marks, saved as one `tokenizer.json` whose post-processor writes the marks."""

  def __init__(self, vocabulary: Spec, marks: base.Marks, unknown: str | None = None):
    """Adds its marks to a vocabulary from `from_tokenizer_json`.

    `unknown` is the token that stands for a byte without a piece; if it is None, such a byte is an error. Raises
    UserError if text can give a mark or doesn't come back.
    """
    self.lossless = unknown is None
    model = vocabulary["model"] | {"unk_token": unknown} | ({"fuse_unk": False} if self.lossless else {})
    noted = {} if self.lossless else {"unknown_bytes": "unknown"}
    spec = specs.add_marks(vocabulary | {"model": model}, marks, noted)
    super().__init__(spec, marks)
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    merged = {piece for left, right in spec["model"]["merges"] for piece in (left, right, left + right)}
    if reached := special & (ALPHABET.keys() | merged):
      raise base.OrdinaryMark(min(reached))
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
    missing, self._stand_ins = find_missing_bytes(spec), {}
    if unknown is not None:
      self._pieces[specs.map_ids(spec)[unknown]] = b"\xff"
      model["unk_token"] = f"\0{unknown}" if unknown in special else unknown
    else:  # ids beyond the last then tell which byte has no piece; the library would leave it out
      self._stand_ins = {char: self.vocab_size + byte for char, byte in missing.items()}
    self.missing, model["vocab"] = {*missing.values()}, vocab | self._stand_ins
    self._encoder = specs.load(spec | {"added_tokens": added, "post_processor": None, "model": model})
    self._divides = not any(_WORD_END.search(token["content"]) for token in added) and self._divides_at_word_ends()
    for text in (_PROBE, *(f"a {token['content']} b" for token in added)):
      known = "".join(char for char in text if not self.missing & set(char.encode()))
      if self.decode(self.encode(known)) != known:
        raise UserError(f"doesn't give {known!r} back as it was; give a vocabulary like GPT-2's, or 'bytes'")

  def _make_rendered_model(self, spec: Spec) -> dict[str, Any]:
    return spec["model"] | {"vocab": specs.map_ids(spec) | self._stand_ins}

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """See `Tokenizer.encode_batch`."""
    encoded = super().encode_batch(texts)
    for index, (text, ids) in enumerate(zip(texts, encoded) if self.missing else ()):
      self._check_known(ids, text, index)
    return encoded

  def encode_spans(self, text: str, rendered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """See `Tokenizer.encode_spans`."""
    ids, spans_Nx2 = super().encode_spans(text, rendered)
    self._check_known(ids, text, 0)
    return ids, spans_Nx2

  def _check_known(self, ids: np.ndarray, text: str, index: int) -> None:
    if (beyond := ids[ids >= self.vocab_size]).size:
      raise base.UnknownByte(int(beyond[0]) - self.vocab_size, text, index)

  def _divides_at_word_ends(self) -> bool:
    """Whether text may be cut between a letter or digit and white space without changing its ids."""
    split, ends = self._encoder.pre_tokenizer.pre_tokenize_str, [found.end() for found in _WORD_END.finditer(_WORDS)]
    cuts = [(_WORDS,), *((_WORDS[:end], _WORDS[end:]) for end in ends)]
    pieces = [[piece for part in parts for piece, _ in split(part)] for parts in cuts]
    return all(one == pieces[0] for one in pieces)

  def _divide(self, text: str) -> Iterator[str]:
    start = 0
    while self._divides and (found := _WORD_END.search(text, start + _BLOCK_CHARS)):
      yield text[start : found.end()]
      start = found.end()
    yield text[start:]

  def _decode(self, ids: Iterable[int], within: bool) -> str:
    return b"".join(self._pieces.get(int(number), b"\xff") for number in ids).decode(errors="replace")


class ByteTokenizer(BytePairTokenizer):
  """The 256 bytes of UTF-8 and the end mark, saved as the `tokenizer.json` of a vocabulary without merges."""

  def __init__(self):
    super().__init__(from_tokenizer_json(BYTES)[0], base.Marks(256))

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    return (np.frombuffer(block.encode(), np.uint8).astype(np.int32) for block in blocks)
