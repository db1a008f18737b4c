"""Byte-level byte-pair vocabularies, read from `tokenizer.json` or `vocab.json` and `merges.txt`.

Text becomes UTF-8 bytes, each byte a printable character of GPT-2's alphabet, and merges join characters to
pieces. Only such a vocabulary gives every text back as it was.
"""

import dataclasses
import os
import re
from typing import Any

from diffeq_nnx.data.tokenizers.files import parse_json, read_bytes, read_json
from diffeq_nnx.data.tokenizers.marks import Said, Statement
from diffeq_nnx.errors import UserError

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIVIDING = ("ByteLevel", "Split", "Digits", "Punctuation")  # steps that divide text and drop nothing
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others follow from 256 on.
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
  chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
IN_ALPHABET = re.compile(f"[{re.escape(''.join(ALPHABET))}]*")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """A checked vocabulary.

  Attributes:
    pieces: Ids of the pieces, in GPT-2's alphabet.
    merges: Pairs of pieces that join, the first to join first.
    added: Tokens matched in the text itself, as in `tokenizer.json`; special ones are never matched.
    pre_tokenizer: How text is divided before merging, as in `tokenizer.json`.
    ignore_merges: Whether a piece of text that is in the vocabulary whole is taken whole.
    ids: Ids by token, `pieces` and `added` together: 0 to `size - 1`, each once.
    said: What the files themselves say about the marks.
  """

  pieces: dict[str, int]
  merges: list[tuple[str, str]]
  added: list[dict[str, Any]]
  pre_tokenizer: dict[str, Any]
  ignore_merges: bool
  ids: dict[str, int]
  said: Said

  @property
  def size(self) -> int:
    """Number of ids."""
    return len(self.ids)


def from_pair_of_files(vocab_path: str, merges_path: str, label: str) -> Vocabulary:
  """Reads `vocab.json` and `merges.txt`, with GPT-2's division of text into words.

  Raises:
    UserError: For files that can't be read or used, or don't fit each other.
  """
  pieces = read_json(vocab_path, label)
  name = os.path.basename(vocab_path)
  try:
    lines = read_bytes(merges_path, label).decode("utf-8-sig").split("\n")
  except UnicodeDecodeError as error:
    raise UserError(f"{label}: {os.path.basename(merges_path)} is not UTF-8; restore the file") from error
  merges = [line.rstrip("\r") for line in lines[1 if lines[0].startswith("#version") else 0 :]]
  ids = _table(pieces, [], label, name)
  pairs = _merges([merge for merge in merges if merge], pieces, label, os.path.basename(merges_path))
  _check_bytes(pieces, label, name)
  return Vocabulary(pieces, pairs, [], BYTE_LEVEL, False, ids, Said())


def from_tokenizer_json(content: bytes, path: str, label: str) -> Vocabulary:
  """Reads a `tokenizer.json` of Hugging Face's `tokenizers`.

  Its normaliser, truncation, padding and space before the text are left out: they would lose text.

  Raises:
    UserError: For one that isn't JSON, isn't a byte-level byte-pair vocabulary, contradicts itself, or would
      lose text.
  """
  spec = parse_json(content, path, label)
  model = spec.get("model") if isinstance(spec, dict) else None
  name = os.path.basename(path)
  if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
    kind = model.get("type") if isinstance(model, dict) else None
    raise UserError(
      f"{label}: {name} holds no byte-pair model{f' but {kind}' if kind else ''}; give a "
      "tokenizer.json like GPT-2's, a directory with vocab.json and merges.txt, or a sentencepiece model"
    )
  for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
    if model.get(key):
      raise UserError(
        f"{label}: {name} sets {key}={model[key]!r}, with which text doesn't come back; remove it"
      )
  pre_tokenizer = _pre_tokenizer(spec.get("pre_tokenizer"), label, name)
  added = _added(spec.get("added_tokens") or [], label, name)
  pieces = model.get("vocab")
  ids = _table(pieces, added, label, name)
  merges = _merges(model["merges"], pieces, label, name)
  _check_bytes(pieces, label, name)
  _check_added(added, pieces, label, name)
  said = _processor_says(spec.get("post_processor"), label, name)
  return Vocabulary(pieces, merges, added, pre_tokenizer, bool(model.get("ignore_merges")), ids, said)


def check_unreachable(vocabulary: Vocabulary, tokens: list[str], label: str) -> None:
  """Sees that no text can give a special token's id.

  Raises:
    UserError: For a special token that is a byte's piece, or part or result of a merge.
  """
  special = set(tokens)
  made = special & ALPHABET.keys()
  for left, right in vocabulary.merges:
    made |= special & {left, right, left + right}
  if made:
    raise UserError(
      f"{label}: the special token {min(made)!r} is also an ordinary piece, which text can give; "
      "name another token, or give the vocabulary that the mark belongs to"
    )


def _table(pieces: Any, added: list[dict[str, Any]], label: str, name: str) -> dict[str, int]:
  """Ids by token; they must be 0 to N - 1, each once."""
  if not isinstance(pieces, dict) or not pieces or not all(type(number) is int for number in pieces.values()):
    raise UserError(f"{label}: {name} must give each piece its id, a whole number; restore the file")
  try:
    "".join([*pieces, *(token["content"] for token in added)]).encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f"{label}: {name} has a piece with a lone surrogate, which no text holds; restore the file"
    ) from error
  ids = dict(pieces)
  for token in added:
    known = ids.setdefault(token["content"], token["id"])
    if known != token["id"]:
      raise UserError(
        f"{label}: {name} gives {token['content']!r} the ids {known} and {token['id']}; restore the file"
      )
  owners: dict[int, str] = {}
  for token, number in ids.items():
    if owners.setdefault(number, token) != token:
      raise UserError(
        f"{label}: {name} gives {owners[number]!r} and {token!r} the same id {number}; restore the file"
      )
  for number in (min(owners), max(owners)):
    if not 0 <= number < len(ids):
      raise UserError(
        f"{label}: {name} gives {owners[number]!r} the id {number}, beyond the table of its {len(ids)} "
        f"entries; ids must be 0 to {len(ids) - 1}, each once"
      )
  return ids


def _merges(merges: list[Any], pieces: dict[str, int], label: str, name: str) -> list[tuple[str, str]]:
  """The merges as pairs of pieces; both and what they make must be in the vocabulary."""
  pairs = []
  for number, merge in enumerate(merges, start=1):
    pair = merge.split(" ") if type(merge) is str else merge if type(merge) is list else ()
    if len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str or "" in pair:
      raise UserError(f"{label}: merge {number} in {name} is {merge!r}, not two pieces; restore the file")
    left, right = pair
    if not (left in pieces and right in pieces and left + right in pieces):
      missing = next(piece for piece in (left, right, left + right) if piece not in pieces)
      raise UserError(
        f"{label}: merge {number} in {name} ({' '.join(pair)!r}) needs the piece {missing!r}, "
        "which the vocabulary lacks; give merges and vocabulary that go together"
      )
    pairs.append((left, right))
  return pairs


def _check_bytes(pieces: dict[str, int], label: str, name: str) -> None:
  missing = [byte for char, byte in ALPHABET.items() if char not in pieces]
  if missing:
    raise UserError(
      f"{label}: {name} has no piece for {len(missing)} of the 256 bytes (first 0x{min(missing):02X}), "
      "so it would lose text; give a byte-level vocabulary with all of them, or 'bytes'"
    )


def _pre_tokenizer(given: Any, label: str, name: str) -> dict[str, Any]:
  """The steps that divide text, if they drop nothing and one of them maps bytes to GPT-2's alphabet."""
  steps = _steps(given, label, name)
  for step in steps:
    kind = step.get("type")
    if kind not in _DIVIDING or step.get("behavior") == "Removed":
      raise UserError(
        f"{label}: the pre-tokenizer {kind} in {name} may drop text; only {', '.join(_DIVIDING)} "
        "that remove nothing can be used"
      )
  if [step["type"] for step in steps].count("ByteLevel") != 1:
    raise UserError(
      f"{label}: {name} is no byte-level vocabulary (it needs one ByteLevel pre-tokenizer); give one like "
      "GPT-2's, or for a sentencepiece vocabulary its tokenizer.model"
    )
  steps = [
    BYTE_LEVEL | {"use_regex": step.get("use_regex", True)} if step["type"] == "ByteLevel" else step
    for step in steps
  ]
  return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def _steps(given: Any, label: str, name: str) -> list[dict[str, Any]]:
  """The steps of a pre-tokenizer or post-processor, those of a Sequence one by one."""
  if given is None:
    return []
  inner = [given]
  if isinstance(given, dict) and given.get("type") == "Sequence":
    inner = given.get("pretokenizers", given.get("processors"))
  if not isinstance(inner, list) or not all(isinstance(step, dict) for step in inner):
    raise UserError(
      f"{label}: {name} has the step {given!r}, which is none of the library's; restore the file"
    )
  return inner if inner == [given] else [step for one in inner for step in _steps(one, label, name)]


def _added(given: Any, label: str, name: str) -> list[dict[str, Any]]:
  """The added tokens, by id, with every field."""
  added = []
  for token in given if isinstance(given, list) else [given]:
    if not (
      isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
    ):
      raise UserError(f"{label}: {name} has the added token {token!r}; each must have a content and an id")
    fields = {
      key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    added.append({"id": token["id"], "content": token["content"], **fields})
  return sorted(added, key=lambda token: token["id"])


def _check_added(added: list[dict[str, Any]], pieces: dict[str, int], label: str, name: str) -> None:
  """Sees that the added tokens which are text give it back as it was."""
  for token in added:
    content = token["content"]
    if token["special"]:
      continue
    if token["lstrip"] or token["rstrip"] or not content:
      raise UserError(
        f"{label}: the added token {content!r} in {name} swallows the spaces around it (lstrip, rstrip), "
        "so text would be lost; set both to false"
      )
    if content in pieces and not content.isascii() and IN_ALPHABET.fullmatch(content):
      raise UserError(
        f"{label}: the added token {content!r} in {name} has the id of a piece of other text, "
        "so text would be lost; give it an id of its own"
      )


def _processor_says(processor: Any, label: str, name: str) -> Said:
  """What the post-processor puts around a text: at most one mark before it and one after it."""
  steps = [step for step in _steps(processor, label, name) if step.get("type") != "ByteLevel"]
  if not steps:
    return Said()
  step = steps[0]
  try:
    if len(steps) > 1:
      raise ValueError("more than one step")
    if step["type"] == "TemplateProcessing":
      sides = _template(step)
    elif step["type"] in ("BertProcessing", "RobertaProcessing"):
      sides = [(step["cls"][0], (step["cls"][1],))], [(step["sep"][0], (step["sep"][1],))]
    else:
      raise KeyError(step["type"])
    marks = [(*ids, token) for side in sides for token, ids in side]
    if max(map(len, sides)) > 1 or any([type(part) for part in mark] != [int, str] for mark in marks):
      raise ValueError("more than one mark")
  except (KeyError, IndexError, TypeError, ValueError) as error:
    raise UserError(
      f"{label}: the post-processor {step.get('type')} in {name} must put at most one mark before a text "
      "and one after it; use a TemplateProcessing that does"
    ) from error
  where = f"the post-processor in {name}"
  statements = [
    Statement(where, mark, token, ids) for mark, side in zip(("bos", "eos"), sides) for token, ids in side
  ]
  return Said(tuple(statements), ((where, bool(sides[0])),))


def _template(
  step: dict[str, Any],
) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]:
  """The tokens before and after the text in a TemplateProcessing, with their ids."""
  names = [None if "Sequence" in item else item["SpecialToken"]["id"] for item in step["single"]]
  place = names.index(None)

  def tokens(part: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    entries = [step["special_tokens"][name] for name in part]
    return [
      (token, (number,))
      for entry in entries
      for token, number in zip(entry["tokens"], entry["ids"], strict=True)
    ]

  return tokens(names[:place]), tokens(names[place + 1 :])
