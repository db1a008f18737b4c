"""A `tokenizer.json` whose pieces are characters, and bytes for characters without a piece, as Llama 2's.

Hugging Face's `tokenizers` runs it as it stands: its normalizer, and the space that it puts before a text, stay on, so
that a model reads text as it was trained to. Text may come back changed.
"""

from collections.abc import Iterable
import itertools
from typing import Any

from diffeq_nnx.data.tokenizers import base, specs
from diffeq_nnx.data.tokenizers.byte_pairs import list_steps
from diffeq_nnx.data.tokenizers.marks import Stated
from diffeq_nnx.data.tokenizers.specs import Spec
from diffeq_nnx.errors import UserError

SPACE = "\u2581"  # stands for a space in pieces
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
EXPORTED = {  # the steps of a sentencepiece model that is used without loss
  "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
  "pre_tokenizer": {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
}
WITHIN: dict[str, Any] = {  # a decoder that drops nothing
  "type": "Sequence",
  "decoders": [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
  ],
}


def is_kind(given: Any) -> bool:
  """Whether a parsed `tokenizer.json` is of this kind."""
  model = given.get("model") if isinstance(given, dict) else None
  if not isinstance(model, dict) or model.get("byte_fallback") is not True:
    return False
  pre_tokenizer = given.get("pre_tokenizer")
  try:
    steps = list_steps(pre_tokenizer) if pre_tokenizer else []
    return all(step.get("type") != "ByteLevel" for step in steps)
  except (TypeError, AttributeError):  # no pre-tokenizer, which the library says in its words
    return True


def from_tokenizer_json(given: dict[str, Any]) -> tuple[Spec, Stated]:
  """Returns a parsed `tokenizer.json` without marks, and what it says about marks; raises UserError if it can't be."""
  model, added = given["model"], given.get("added_tokens") or []
  if model.get("dropout"):
    raise UserError(f"the model sets dropout={model['dropout']!r}, which changes ids at random; remove it")
  spec = {**given, "truncation": None, "padding": None, "added_tokens": added}
  library = specs.load(spec)
  spec["added_tokens"] = specs.normalize_tokens(added)
  if isinstance(model.get("merges"), list):
    spec["model"] = model | {"merges": specs.split_merges(model["merges"])}
  ids = specs.map_ids(spec)
  specs.check_ids(ids)
  if missing := [piece for piece in BYTE_PIECES if piece not in ids]:
    problem = f"no piece {missing[0]} ({len(missing)} of 256 are missing), so it would lose text"
    raise UserError(f"{problem}; give a vocabulary with all bytes")
  return spec, specs.read_marks(library, spec)


class ByteFallbackTokenizer(specs.LibraryTokenizer):
  """Such a vocabulary with its marks, saved as one `tokenizer.json` whose post-processor writes the marks.

  The names of marks and of the unknown token are ordinary text. All other added tokens are found in a text, also those
  that are declared special.
  """

  lossless = False

  def __init__(self, vocabulary: Spec, marks: base.Marks):
    """Adds its marks to a checked vocabulary; raises UserError if text can give a mark."""
    spec = specs.add_marks(vocabulary, marks, {})
    super().__init__(spec, marks)
    names = {name for name, number in specs.map_ids(spec).items() if number in marks.ids}
    ordinary = names | {spec["model"].get("unk_token")}
    added = [token | {"special": token["content"] in ordinary} for token in spec["added_tokens"]]
    encoding = spec | {"added_tokens": added, "post_processor": None}
    self._encoder, self._within = (specs.load(encoding | one) for one in ({}, {"decoder": WITHIN}))
    self._encoder.encode_special_tokens = True  # as ordinary text
    listed = {token["content"] for token in vocabulary["added_tokens"]}
    for name in sorted(names - listed):
      if _is_ordinary(name, spec["model"]):
        raise base.OrdinaryMark(name)
    ids = self.encode("a")
    self.leading = self.decode_within(ids).removesuffix(self.decode(ids))

  def _decode(self, ids: Iterable[int], within: bool) -> str:
    first = self._within if within else self._encoder  # decodes the ids up to the first number that is no id
    groups = itertools.groupby(map(int, ids), lambda number: 0 <= number < self.vocab_size)
    parts = zip(groups, itertools.chain([first], itertools.repeat(self._within)))
    return "".join(
      decoder.decode(list(run), skip_special_tokens=True) if known else "\ufffd" * len(list(run))
      for (known, run), decoder in parts
    )


def _is_ordinary(piece: str, model: dict[str, Any]) -> bool:
  """Whether text can give a piece of the vocabulary."""
  if "merges" not in model:
    return True
  return len(piece) == 1 or piece in BYTE_PIECES or any(left + right == piece for left, right in model["merges"])
