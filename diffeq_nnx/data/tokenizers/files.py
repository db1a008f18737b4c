"""Reads a tokenizer's files: its vocabulary, and what Hugging Face's files beside it say.

They say which tokens are marks, which token is the unknown one, and which tokens were added to the vocabulary.
"""

from collections.abc import Iterator, Mapping
import json
import os
import re
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.data.tokenizers.marks import KINDS, Stated, read_name
from diffeq_nnx.errors import UserError

CHAT_TEMPLATE = "chat_template.jinja"
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
_KEYS = {
  "eos": ("eos_token", "eos_token_id"),
  "bos": ("bos_token", "bos_token_id"),
  "begins": ("add_bos_token",),
  "unknown": ("unk_token",),
}
_CHANGES = ("lstrip", "rstrip", "single_word")  # flags by which the text around an added token is dropped, or decides


def read_bytes(path: str, label: str) -> bytes:
  """Returns a file's content; raises UserError if it can't be read."""
  try:
    return files.read(path)
  except OSError as error:
    problem = f"{os.path.basename(path)} can't be read ({error.strerror})"
    raise UserError(f"{label}: {problem}; give a tokenizer's file or directory, 'bytes' or 'train'") from error


def _read_objects(directory: str, names: tuple[str, ...], label: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields path and content of the files that are there; raises UserError for one that can't be read."""
  for path in filter(files.exists, (os.path.join(directory, name) for name in names)):
    content = files.parse_json(read_bytes(path, label), path, label)
    if not isinstance(content, dict):
      raise UserError(f"{label}: {os.path.basename(path)} must be a JSON object; restore the file, or remove it")
    yield path, content


def read_statements(directory: str, label: str) -> Stated:
  """Returns what the files in a directory say about marks; raises UserError for a file that can't be read."""
  said: Stated = {what: {} for what in KINDS}
  for path, content in _read_objects(directory, _FILES, label):
    for what, keys in _KEYS.items():
      said[what] |= {f"{key} in {path}": content[key] for key in keys if content.get(key) is not None}
    place, ends = f"eos_token_id in {path}", content.get("eos_token_id")
    if isinstance(ends, list) and len(ends) != 1:
      said["ends"][place] = said["eos"].pop(place)
    elif ends is not None and path.endswith("generation_config.json"):  # which then says that there are no others
      said["ends"][place] = ends if isinstance(ends, list) else [ends]
  return said


def read_chat_template(directory: str, label: str) -> tuple[str | None, dict[str, str]]:
  """Returns a folder's chat template, or None, and the names of tokens by the variables that stand for them in it."""
  template: Any = None
  names: dict[str, str] = {}
  for _, content in _read_objects(directory, ("special_tokens_map.json", "tokenizer_config.json"), label):
    found = {key: read_name(value) for key, value in content.items() if key.endswith("_token")}
    names |= {key: value for key, value in found.items() if isinstance(value, str)}
    template = content.get("chat_template", template)
  if isinstance(template, list):  # several, by name
    listed = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
    template = listed.get("default")
  path = os.path.join(directory, CHAT_TEMPLATE)
  if files.exists(path):
    template = read_bytes(path, label).decode(errors="replace")
  return template if isinstance(template, str) else None, names


def name_marks(template: str, names: Mapping[str, str]) -> str:
  """Returns a chat template with the values of the variables for tokens that it uses, in a line before it."""
  used = [name for name in names if re.search(rf"\b{name}\b", template) and f"set {name} =" not in template]
  given = "".join(f"{{% set {name} = {json.dumps(names[name], ensure_ascii=False)} %}}" for name in used)
  return f"{given}\n{template}" if given else template  # Jinja drops this line end


def read_added_tokens(directory: str, ids: dict[str, int], label: str) -> list[str]:
  """Returns the tokens that files add to a vocabulary, in the order of their ids, which follow those of its pieces.

  Raises UserError for ids that don't follow the vocabulary's one by one, or contradict them or each other.
  """
  found: dict[str, int] = {}
  for path, content in _read_objects(directory, ("added_tokens.json", "tokenizer_config.json"), label):
    place = os.path.basename(path)
    listed = content.items() if place == "added_tokens.json" else _list_tokens(content, ids, label)
    for name, number in listed:
      piece_id = ids.get(name)
      known = found.setdefault(name, number) if piece_id is None else piece_id
      if type(number) is not int or known != number:
        raise UserError(f"{label}: {place} gives {name!r} the id {number!r}, but it is {known!r}; correct the files")
  found = {name: number for name, number in sorted(found.items(), key=lambda item: item[1]) if ids.get(name) is None}
  for place, (name, number) in enumerate(found.items(), len(ids)):
    if number != place:
      rule = f"added tokens must follow the vocabulary's {len(ids)} ids one by one"
      raise UserError(f"{label}: {rule}, but {name!r} has the id {number} where {place} is due; correct the files")
  return list(found)


def check_added_tokens(directory: str, ids: dict[str, int], label: str) -> None:
  """Raises UserError if files beside a `tokenizer.json` name tokens that it lacks, or give them other ids."""
  if added := read_added_tokens(directory, ids, label):
    problem = f"the files beside tokenizer.json add {added[0]!r} ({len(added)} such), which it lacks"
    raise UserError(f"{label}: {problem}; correct the files, or remove the wrong ones")


def _list_tokens(content: dict[str, Any], ids: dict[str, int], label: str) -> Iterator[tuple[str, Any]]:
  """Yields name and id of the tokens in tokenizer_config.json."""
  listed = content.get("added_tokens_decoder") or {}
  for number, token in listed.items() if isinstance(listed, dict) else [("", None)]:
    if not (isinstance(token, dict) and isinstance(token.get("content"), str) and number.isdecimal()):
      rule = "added_tokens_decoder must be an object with ids as names and tokens as values"
      raise UserError(f"{label}: tokenizer_config.json: {rule}; restore the file")
    changes = [key for key in _CHANGES if token.get(key)]
    if changes and ids.get(token["content"]) is None:
      problem = f"sets {changes[0]} of the added token {token['content']!r}"
      raise UserError(f"{label}: tokenizer_config.json {problem}; give the model's tokenizer.json, which can hold that")
    yield token["content"], int(number)
