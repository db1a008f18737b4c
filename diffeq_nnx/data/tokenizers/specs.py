"""A `tokenizer.json` as nested dicts: what holds for every kind of it."""

from collections.abc import Iterator
import contextlib
import functools
import json
import re
from typing import Any

import numpy as np
import tokenizers as huggingface

from diffeq_nnx.data.tokenizers.base import Marks, Tokenizer
from diffeq_nnx.data.tokenizers.marks import Stated
from diffeq_nnx.errors import UserError, first_line

Spec = dict[str, Any]  # in the form of tokenizer.json
OURS = "diffeq_nnx"  # the key of "model" that holds what a tokenizer.json has no place for; the library skips it


class LibraryTokenizer(Tokenizer):
  """A tokenizer that is saved as one `tokenizer.json`, and whose `_encoder` encodes by Hugging Face's library."""

  file_name = "tokenizer.json"
  _encoder: huggingface.Tokenizer

  def __init__(self, spec: Spec, marks: Marks):
    """Keeps the file, which has the marks; a subclass adds `_encoder`."""
    self.eos_id, self.bos_id, self.more_end_ids = marks.eos_id, marks.bos_id, marks.more_end_ids
    self.vocab_size = len(map_ids(spec))
    self.added_ids = frozenset(token["id"] for token in spec["added_tokens"])
    self.model_bytes = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()

  @functools.cached_property
  def _rendered_encoder(self) -> huggingface.Tokenizer:
    """Finds the names of all special tokens; made at its first use, which few jobs have."""
    spec = json.loads(self.model_bytes)
    return load(spec | {"post_processor": None, "model": self._make_rendered_model(spec)})

  def _make_rendered_model(self, spec: Spec) -> dict[str, Any]:
    return spec["model"]

  def _encode_blocks(self, blocks: list[str]) -> Iterator[np.ndarray]:
    with _refusing():
      encoded = self._encoder.encode_batch_fast(blocks, add_special_tokens=False)
    return (np.array(encoding.ids, np.int32) for encoding in encoded)

  def name_token(self, number: int) -> str:
    """See `Tokenizer.name_token`."""
    return {one: name for name, one in map_ids(json.loads(self.model_bytes)).items()}[number]

  def encode_spans(self, text: str, rendered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """See `Tokenizer.encode_spans`."""
    text.encode()
    with _refusing():
      encoding = (self._rendered_encoder if rendered else self._encoder).encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
  """Raises UserError where the library gives up on a text, which it does by an exception that is no `Exception`."""
  try:
    yield
  except BaseException as error:
    if type(error).__name__ != "PanicException":
      raise
    problem = f"the tokenizers library can't divide a text ({first_line(error, 200)})"
    raise UserError(f"{problem}; shorten its runs of white space") from error


def load(spec: Spec) -> huggingface.Tokenizer:
  """Makes the library's tokenizer, which checks types, merges and patterns; raises UserError with what it says."""
  try:
    return huggingface.Tokenizer.from_str(json.dumps(spec))
  except Exception as error:  # the library raises nothing narrower
    reason = re.sub(r" at line \d+ column \d+", "", first_line(error))
    raise UserError(f"the tokenizers library can't use it ({reason}); restore the file") from error


def read_ours(model: dict[str, Any]) -> dict[str, Any]:
  """Returns what this program wrote into "model" (see `add_marks`), or {} for a file that it did not write."""
  ours = model.get(OURS, {})
  known = isinstance(ours, dict) and ours.keys() <= {"end_ids", "unknown_bytes"}
  if not known or not isinstance(ours.get("end_ids", []), list):
    raise UserError(f"the model's {OURS} is {ours!r}, which this program didn't write; restore the file")
  return ours


def split_merges(merges: list[Any]) -> list[Any]:
  """Returns merges as pairs, which a file may give as strings."""
  return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def normalize_tokens(added: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns added tokens with the keys that the library knows, in the order of their ids."""
  keys = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
  return sorted(({key: token[key] for key in keys} for token in added), key=lambda token: token["id"])


def map_ids(spec: Spec) -> dict[str, int]:
  """Returns ids by token, pieces and added tokens together."""
  vocab = spec["model"]["vocab"]
  if isinstance(vocab, list):  # of a unigram model: pairs of piece and score
    vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
  return vocab | {token["content"]: token["id"] for token in spec["added_tokens"]}


def check_ids(ids: dict[str, int]) -> None:
  """Raises UserError unless ids are 0 to N - 1, each once."""
  for place, (token, number) in enumerate(sorted(ids.items(), key=lambda item: item[1])):
    if number != place:
      rule = f"must be 0 to {len(ids) - 1}, each once"
      raise UserError(f"ids {rule}, but {token!r} has {number} where {place} is due; restore the file")


def read_marks(library: huggingface.Tokenizer, spec: Spec) -> Stated:
  """Returns which marks the post-processor puts around a text, and what this program noted about marks."""
  encoding, ids = library.encode("a"), map_ids(spec)
  marks, is_mark = list(zip(encoding.tokens, encoding.ids)), encoding.special_tokens_mask
  before, after = marks[: [*is_mark, 0].index(0)], marks[len(marks) - [*is_mark[::-1], 0].index(0) :]
  known = all(ids.get(token) == number for token, number in before + after)
  if not known or len(before) > 1 or len(after) > 1 or len(before + after) != sum(is_mark):
    rule = "must put at most one token of the vocabulary before a text and one after it"
    raise UserError(f"the post-processor {rule}, not {before} and {after}; use a TemplateProcessing that does")
  eos, bos = ({"the post-processor": side[0][1]} if side else {} for side in (after, before))
  said = {"the post-processor": bool(bos)}
  ours = read_ours(spec["model"])
  ends = {"its end_ids": ours["end_ids"]} if "end_ids" in ours else {}
  return {"eos": eos, "bos": bos, "ends": ends, "begins": said if eos or bos else {}, "otherwise_begins": said}


def make_post_processor(begin: dict[str, int], end: dict[str, int]) -> dict[str, Any]:
  """Returns the post-processor that puts tokens, given as name and id, around a text, and none around a pair."""
  text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
  before, after = ([{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (begin, end))
  tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (end | begin).items()}
  single, pair = [*before, text, *after], [text, second]
  return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def add_marks(spec: Spec, marks: Marks, ours: dict[str, Any]) -> Spec:
  """Returns a vocabulary with its marks as special tokens, and a post-processor that puts them around a text.

  `ours` is noted beside several end marks; what a file noted before is left out.
  """
  names = {number: token for token, number in map_ids(spec).items()}
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
  added = [token for token in spec["added_tokens"] if token["id"] not in marks.ids]
  added += [{"id": number, "content": names[number]} | flags for number in marks.ids]
  begin, end = ({} if one is None else {names[one]: one} for one in (marks.bos_id, marks.eos_id))
  model = {key: value for key, value in spec["model"].items() if key != OURS}
  if marks.more_end_ids:
    ours = ours | {"end_ids": [marks.eos_id, *marks.more_end_ids]}
  return spec | {
    "added_tokens": sorted(added, key=lambda token: token["id"]),
    "post_processor": make_post_processor(begin, end),
    "model": model | ({OURS: ours} if ours else {}),
  }
