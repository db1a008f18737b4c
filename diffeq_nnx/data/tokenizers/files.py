"""Reads a tokenizer's files, its vocabulary and what Hugging Face's files beside it say, and writes them.

They say which tokens are marks, which token is the unknown one, and which tokens were added to the vocabulary.
"""

from collections.abc import Iterator, Mapping
import itertools
import json
import os
import re
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.data.tokenizers.base import Tokenizer
from diffeq_nnx.data.tokenizers.marks import KINDS, Stated, read_name
from diffeq_nnx.errors import UserError, first_line

Folder = Mapping[str, bytes]  # files by name, of those that a tokenizer can consist of

CHAT_TEMPLATE = "chat_template.jinja"
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_KINDS = (("tokenizer.json",), ("tokenizer.model",), *PAIRS)
# the line that `name_marks` writes
_NAMED_MARKS = re.compile(r'(\{% set \w+ = "([^"\\]|\\.)*" %\})+\n')
_MARKS = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
_BESIDE = (*_MARKS, "added_tokens.json", CHAT_TEMPLATE)
_KEYS = {
  "eos": ("eos_token", "eos_token_id"),
  "bos": ("bos_token", "bos_token_id"),
  "begins": ("add_bos_token",),
  "unknown": ("unk_token",),
}
_CHANGES = ("lstrip", "rstrip", "single_word")  # flags by which the text around an added token is dropped, or decides


def read_folder(path: str) -> tuple[Folder, tuple[str, ...]]:
  """Reads the files that a tokenizer can consist of, in a directory, or beside one file that is read too.

  Returns:
    Their contents by name, and the names of those that make the tokenizer: one, or a vocabulary and its merges.

  Raises:
    UserError: If one can't be read, or the directory holds no tokenizer or several.
  """
  path = os.path.expanduser(path)
  directory, file = (path, None) if files.is_folder(path) else os.path.split(path)
  paths = {name: os.path.join(directory, name) for name in (*itertools.chain(*_KINDS), *_BESIDE)}
  folder = {name: _read(one) for name, one in paths.items() if name != file and files.exists(one)}
  if file is not None:
    return folder | {file: _read(path)}, (file,)
  names = [name for name in itertools.chain(*_KINDS) if name in folder]
  chosen = tuple(name for name in names if name.startswith("tokenizer."))[:1] or tuple(names)  # tokenizer.json first
  if chosen not in _KINDS:
    rule = f"the directory must hold one of {', '.join(map(' and '.join, _KINDS))}"
    raise UserError(f"{rule}, not {' and '.join(chosen) or 'none'}; give both of a pair, or name one file")
  if len(chosen) == 2 and "added_tokens.json" in folder:
    raise UserError("holds added_tokens.json, which vocab.json lacks; give the model's tokenizer.json")
  return folder, chosen


def _read(path: str) -> bytes:
  try:
    return files.read(path)
  except OSError as error:
    problem = f"{os.path.basename(path)} can't be read ({error.strerror})"
    raise UserError(f"{problem}; give a tokenizer's file or directory, 'bytes' or 'train'") from error


def _read_objects(folder: Folder, *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields name and content of the files that are there; raises UserError for one that isn't a JSON object."""
  for name in names:
    if name in folder:
      content = files.parse_json(folder[name], name)
      if not isinstance(content, dict):
        raise UserError(f"{name} must be a JSON object; restore the file, or remove it")
      yield name, content


def read_statements(folder: Folder) -> Stated:
  """Returns what files say about marks."""
  said: Stated = {what: {} for what in KINDS}
  for name, content in _read_objects(folder, *_MARKS):
    for what, keys in _KEYS.items():
      said[what] |= {f"{key} in {name}": content[key] for key in keys if content.get(key) is not None}
    place, ends = f"eos_token_id in {name}", content.get("eos_token_id")
    if isinstance(ends, list) and len(ends) != 1:
      said["ends"][place] = said["eos"].pop(place)
    elif ends is not None and name == "generation_config.json":  # which then says that there are no others
      said["ends"][place] = ends if isinstance(ends, list) else [ends]
  return said


def is_legacy(folder: Folder) -> bool:
  """Whether files say that text after a special token gets the model's space, as older versions of transformers did."""
  return any(content.get("legacy") is True for _, content in _read_objects(folder, "tokenizer_config.json"))


def read_chat_template(folder: Folder) -> tuple[str | None, dict[str, str]]:
  """Returns a folder's chat template, or None, and the names of tokens by the variables that stand for them in it."""
  template: Any = None
  names: dict[str, str] = {}
  for _, content in _read_objects(folder, "special_tokens_map.json", "tokenizer_config.json"):
    extra = content.get("extra_special_tokens")
    found = {key: read_name(value) for key, value in content.items() if key.endswith("_token")}
    found |= {key: read_name(value) for key, value in extra.items()} if isinstance(extra, dict) else {}
    names |= {key: value for key, value in found.items() if isinstance(value, str) and key.isidentifier()}
    template = content.get("chat_template", template)
  if isinstance(template, list):  # several, by name
    template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
  if isinstance(template, dict):
    template = template.get("default")
  if CHAT_TEMPLATE in folder:
    template = folder[CHAT_TEMPLATE].decode(errors="replace")
  return template if isinstance(template, str) else None, names


def name_marks(template: str, names: Mapping[str, str]) -> str:
  """Returns a chat template with the values of the variables for tokens that it uses, in a line before it.

  A template that has such a line keeps it.
  """
  before = found[0] if (found := _NAMED_MARKS.match(template)) else ""
  used = [name for name in names if re.search(rf"\b{name}\b", template) and f"set {name} =" not in before]
  given = "".join(f"{{% set {name} = {json.dumps(names[name], ensure_ascii=False)} %}}" for name in used)
  return f"{given}\n{template}" if given else template  # Jinja drops this line end


def read_added_tokens(folder: Folder, ids: dict[str, int]) -> list[str]:
  """Returns the tokens that files add to a vocabulary, in the order of their ids, which follow those of its pieces.

  Raises UserError for ids that don't follow the vocabulary's one by one, or contradict them or each other.
  """
  found: dict[str, int] = {}
  for file, content in _read_objects(folder, "added_tokens.json", "tokenizer_config.json"):
    listed = content.items() if file == "added_tokens.json" else _list_tokens(content, ids)
    for name, number in listed:
      known = ids[name] if name in ids else found.setdefault(name, number)
      if type(number) is not int or known != number:
        raise UserError(f"{file} gives {name!r} the id {number!r}, but it is {known!r}; correct the files")
  added = sorted(found, key=lambda name: found[name])
  for place, name in enumerate(added, len(ids)):
    if found[name] != place:
      rule = f"added tokens must follow the vocabulary's {len(ids)} ids one by one"
      raise UserError(f"{rule}, but {name!r} has the id {found[name]} where {place} is due; correct the files")
  return added


def _list_tokens(content: dict[str, Any], ids: dict[str, int]) -> Iterator[tuple[str, Any]]:
  """Yields name and id of the tokens in tokenizer_config.json."""
  listed = content.get("added_tokens_decoder") or {}
  for number, token in listed.items() if isinstance(listed, dict) else [("", None)]:
    if not (isinstance(token, dict) and isinstance(token.get("content"), str) and number.isdecimal()):
      rule = "added_tokens_decoder must be an object with ids as names and tokens as values"
      raise UserError(f"tokenizer_config.json: {rule}; restore the file")
    name, changes = token["content"], [key for key in _CHANGES if token.get(key)]
    if changes and name not in ids:
      problem = f"sets {changes[0]} of the added token {name!r}"
      raise UserError(f"tokenizer_config.json {problem}; give the model's tokenizer.json, which can hold that")
    yield name, int(number)


def save(tokenizer: Tokenizer, folder: str) -> None:
  """Writes a tokenizer's file and its chat template into a folder; raises OSError if that fails."""
  for name, content in _list_contents(tokenizer).items():
    path = os.path.join(folder, name)
    files.remove(path) if content is None else files.write(path, content)


def find_other(tokenizer: Tokenizer, folder: str) -> str | None:
  """Returns the name of a file in a folder that `save` would replace by another, or None."""
  for name, content in _list_contents(tokenizer).items():
    path = os.path.join(folder, name)
    if files.exists(path) and (content is None or files.read(path) != content):
      return name
  return None


def _list_contents(tokenizer: Tokenizer) -> dict[str, bytes | None]:
  """Lists the files that say all of a tokenizer, by name; None: there must be none."""
  template = tokenizer.chat_template
  return {tokenizer.file_name: tokenizer.model_bytes, CHAT_TEMPLATE: None if template is None else template.encode()}


def read_template_file(path: str) -> str:
  """Returns the template that `data.chat_template` names; raises UserError if it can't be read."""
  try:
    return files.read(os.path.expanduser(path)).decode("utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    reason = first_line(error, 200)
    raise UserError(f"data.chat_template={path}: can't be read ({reason}); give a Jinja file in UTF-8") from error
