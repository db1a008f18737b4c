"""From the value of `data.tokenizer`, and what is said about marks, to a tokenizer."""

from collections.abc import Callable
import os
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.data.tokenizers import byte_pairs
from diffeq_nnx.data.tokenizers.base import END_OF_TEXT, Stated, Tokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer, ByteTokenizer, Spec
from diffeq_nnx.data.tokenizers.files import parse_json, read_bytes
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer
from diffeq_nnx.errors import UserError

_KINDS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
_KEYS = {"eos": ("eos_token", "eos_token_id"), "bos": ("bos_token", "bos_token_id"), "begins": ("add_bos_token",)}


def load(
  name: str,
  *,
  begin_mark: bool | None = None,
  begin_token: str | None = None,
  end_token: str | None = None,
  key: str = "data.tokenizer",
) -> Tokenizer:
  """Loads the tokenizer with a name or path.

  Args:
    name: `bytes`, or the path of a sentencepiece model, a `tokenizer.json`, or a directory with `tokenizer.json`,
      `tokenizer.model`, `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`.
    begin_mark: Whether documents begin with the begin mark; None: yes with a `begin_token`, else as the files say.
    begin_token: The begin mark's token; None: as the files say. A sentencepiece model's own can't be replaced.
    end_token: The end mark's token; None: as the files say, else `<|endoftext|>`.
    key: The configuration key that errors name.

  Raises:
    UserError: For files that can't be read or used, that disagree or lose text, and for missing marks.
  """
  label, path = f"{key}={name}", os.path.expanduser(name)
  configured = {
    "eos": {"data.end_token": end_token} if end_token else {},
    "bos": {"data.begin_token": begin_token} if begin_token else {},
    "begins": {"data.begin_mark": begin_mark is not False} if begin_token or begin_mark is not None else {},
  }
  if name == "bytes":
    return _byte_pairs(byte_pairs.from_tokenizer_json(byte_pairs.BYTES, label), configured, {}, label)
  found = _in_directory(path, label) if files.is_folder(path) else [path]
  directory, content = os.path.dirname(found[0]), read_bytes(found[0], label)
  beside = _beside(directory, label)
  if len(found) == 2:
    return _byte_pairs(byte_pairs.from_pair_of_files(*found, label), configured, beside, label)
  if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
    read = byte_pairs.from_tokenizer_json(parse_json(content, found[0], label), label)
    _check_pair_beside(read[0], directory, label)
    return _byte_pairs(read, configured, beside, label)
  tokenizer = SentencePieceTokenizer(content, label)
  own = {"the model's bos_id": tokenizer.bos_id} if tokenizer.bos_id is not None else {}
  stated = {
    "eos": {"the model's eos_id": tokenizer.eos_id} | (configured["eos"] or beside["eos"]),
    "bos": own | (configured["bos"] or beside["bos"]),
    "begins": configured["begins"] or beside["begins"] or {"the model's bos_id": bool(own)},
  }
  _, tokenizer.bos_id = _resolve(stated, tokenizer.id_of, tokenizer.vocab_size, label)
  return tokenizer


def _byte_pairs(read: tuple[Spec, Stated], configured: Stated, beside: Stated, label: str) -> Tokenizer:
  (spec, own), ids = read, byte_pairs.ids_of(read[0])
  stated = {what: value or own[what] | beside.get(what, {}) for what, value in configured.items()}
  tokenizer = BytePairTokenizer(spec, *_resolve(stated, ids.get, len(ids), label), label)
  plain = ByteTokenizer()
  return plain if tokenizer.hash == plain.hash else tokenizer  # bytes need no merging


def _in_directory(directory: str, label: str) -> list[str]:
  """The files in a directory that make its tokenizer: one, or a vocabulary and its merges."""
  names = [name for kind in _KINDS for name in kind if files.exists(os.path.join(directory, name))]
  chosen = [name for name in names if name.startswith("tokenizer.")] or names  # a tokenizer.json includes the others
  if tuple(chosen) not in _KINDS:
    rule = f"the directory must hold one of {', '.join(map(' and '.join, _KINDS))}"
    raise UserError(f"{label}: {rule}, not {' and '.join(chosen) or 'none'}; give both of a pair, or name one file")
  if len(chosen) == 2 and files.exists(os.path.join(directory, "added_tokens.json")):
    raise UserError(f"{label}: holds added_tokens.json, which vocab.json lacks; give the model's tokenizer.json")
  return [os.path.join(directory, name) for name in chosen]


def _check_pair_beside(spec: Spec, directory: str, label: str) -> None:
  """Raises UserError if a vocabulary and merges beside a `tokenizer.json` are not the same as in it."""
  for pair in _KINDS[2:]:
    paths = [os.path.join(directory, name) for name in pair]
    if all(map(files.exists, paths)):
      other, _ = byte_pairs.from_pair_of_files(*paths, label)
      same = other["model"]["vocab"].items() <= byte_pairs.ids_of(spec).items()
      if not same or other["model"]["merges"] != spec["model"]["merges"]:
        raise UserError(f"{label}: tokenizer.json disagrees with {' or '.join(pair)} beside it; remove the wrong ones")


def _beside(directory: str, label: str) -> Stated:
  """What Hugging Face's files in a directory say about marks; raises UserError for one that can't be read."""
  stated: Stated = {what: {} for what in _KEYS}
  for path in filter(files.exists, (os.path.join(directory, name) for name in _FILES)):
    content = parse_json(read_bytes(path, label), path, label)
    if not isinstance(content, dict):
      raise UserError(f"{label}: {os.path.basename(path)} must be a JSON object; restore the file, or remove it")
    for what, keys in _KEYS.items():
      stated[what] |= {f"{key} in {path}": content[key] for key in keys if content.get(key) is not None}
  return stated


def _resolve(stated: Stated, id_of: Callable[[str], int | None], vocab_size: int, label: str) -> tuple[int, int | None]:
  """Ids of the end mark and the begin mark (None: documents begin without one); raises UserError where unclear."""

  def ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value.get("content") if isinstance(value, dict) else value]
    numbers = [id_of(one) if isinstance(one, str) else one for one in values]
    return set(numbers) if all(type(one) is int and 0 <= one < vocab_size for one in numbers) else set()

  def agreed(what: str, options: Callable[[Any], set[Any]], rule: str) -> Any:
    common = set.intersection(*map(options, stated[what].values())) if stated[what] else {None}
    if len(common) != 1:
      values = ", ".join(f"{place} is {value!r}" for place, value in stated[what].items())
      raise UserError(f"{label}: {values}: {rule}, or correct the files")
    return common.pop()

  rule = f"not one token of the vocabulary (ids 0 to {vocab_size - 1}); set"
  eos_id = agreed("eos", ids, f"{rule} data.end_token")
  if eos_id is None and (eos_id := id_of(END_OF_TEXT)) is None:
    raise UserError(f"{label}: no file names an eos_token, and there is no {END_OF_TEXT}; set data.end_token")
  unclear = "unclear whether documents begin with the begin mark; set data.begin_mark to True or False"
  begins = agreed("begins", lambda value: {value} if isinstance(value, bool) else set(), unclear)
  bos_id = None if begins is False else agreed("bos", ids, f"{rule} data.begin_token")
  if begins and bos_id is None:
    raise UserError(f"{label}: has no begin mark; set data.begin_token to a token, or data.begin_mark to False")
  if begins is None and bos_id not in (None, eos_id):  # GPT-2 names one mark twice: the end mark divides documents
    raise UserError(f"{label}: names a begin mark (id {bos_id}), but it is {unclear}")
  return eos_id, bos_id if begins else None
