"""From the value of `data.tokenizer`, and what is said about marks, to a tokenizer."""

import itertools
import os
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.data.tokenizers import byte_fallback, byte_pairs, marks, sentencepieces, specs
from diffeq_nnx.data.tokenizers.base import Tokenizer
from diffeq_nnx.data.tokenizers.byte_fallback import ByteFallbackTokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer, ByteTokenizer
from diffeq_nnx.data.tokenizers.files import (
  CHAT_TEMPLATE,
  check_added_tokens,
  name_marks,
  read_added_tokens,
  read_bytes,
  read_chat_template,
  read_statements,
)
from diffeq_nnx.data.tokenizers.marks import Stated
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer
from diffeq_nnx.data.tokenizers.specs import Spec
from diffeq_nnx.errors import UserError, first_line

_KINDS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def load(
  name: str,
  *,
  begin_mark: bool | None = None,
  begin_token: str | None = None,
  end_token: str | None = None,
  unknown_bytes: str | None = None,
  lossless: bool = False,
  chat_template: str | None = None,
  key: str = "data.tokenizer",
) -> Tokenizer:
  """Loads the tokenizer with a name or path.

  A file that this program wrote says all of this itself; arguments other than None come before it.

  Args:
    name: `bytes`, or the path of a sentencepiece model, a `tokenizer.json`, or a directory with `tokenizer.json`,
      `tokenizer.model`, `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`. Of a directory with the first
      two, `tokenizer.json` is taken, as by transformers.
    begin_mark: Whether documents begin with the begin mark; None: yes with a `begin_token`, else as the files say, else
      as the tokenizer's own post-processor does.
    begin_token: The begin mark's token; None: as the files say.
    end_token: The end mark's token; None: as the files say, else `<|endoftext|>`.
    unknown_bytes: For a byte-level vocabulary without pieces for some bytes, whether such a byte in a text is an
      `error` or becomes the `unknown` token; None: an error.
    lossless: Whether a sentencepiece model is used with its text normalization off; else it is used as it was trained,
      unless it is one that `train` made.
    chat_template: The path of the chat template; None: as the files say.
    key: The configuration key that errors name.

  Raises:
    UserError: For files that can't be read or used, that disagree or lose text, and for missing marks.
  """
  label, path = f"{key}={name}", os.path.expanduser(name)
  directory = path if files.is_folder(path) else os.path.dirname(path)
  configured: Stated = {
    "eos": {"data.end_token": end_token} if end_token else {},
    "bos": {"data.begin_token": begin_token} if begin_token else {},
    "begins": {"data.begin_mark": begin_mark is not False} if begin_token or begin_mark is not None else {},
  }
  tokenizer = _load(name, configured, unknown_bytes, lossless, label)
  template, names = (None, {}) if name == "bytes" else read_chat_template(directory, label)
  if chat_template is not None:
    template = read_template_file(chat_template)
    own = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = {key: tokenizer.name_token(number) for key, number in own.items() if number is not None} | names
  given = {"bos_token": begin_token, "eos_token": end_token}
  names |= {variable: token for variable, token in given.items() if token}
  tokenizer.chat_template = None if template is None else name_marks(template, names)
  return tokenizer


def save(tokenizer: Tokenizer, folder: str) -> None:
  """Writes a tokenizer's file and its chat template into a folder; raises OSError if that fails."""
  files.write(os.path.join(folder, tokenizer.file_name), tokenizer.model_bytes)
  if tokenizer.chat_template is None:
    files.remove(os.path.join(folder, CHAT_TEMPLATE))
  else:
    files.write(os.path.join(folder, CHAT_TEMPLATE), tokenizer.chat_template.encode())


def read_template_file(path: str) -> str:
  """Returns the template that `data.chat_template` names; raises UserError if it can't be read."""
  label = f"data.chat_template={path}"
  try:
    return files.read(os.path.expanduser(path)).decode("utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"{label}: can't be read ({first_line(error, 200)}); give a Jinja file in UTF-8") from error


def _load(name: str, configured: Stated, unknown_bytes: str | None, lossless: bool, label: str) -> Tokenizer:
  """Loads the tokenizer without its chat template; see `load`."""
  path = os.path.expanduser(name)
  if name == "bytes":
    return _make_byte_pairs(byte_pairs.from_tokenizer_json(byte_pairs.BYTES, label), configured, {}, None, label)
  found = _choose_files(path, label) if files.is_folder(path) else [path]
  directory, content = os.path.dirname(found[0]), read_bytes(found[0], label)
  said = read_statements(directory, label)
  if len(found) == 2:
    read = byte_pairs.from_pair_of_files(found[0], found[1], label)
    return _make_byte_pairs(read, configured, said, unknown_bytes, label)
  if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
    return _make_sentencepieces(content, configured, said, directory, lossless, label)
  given = files.parse_json(content, found[0], label)
  if byte_fallback.is_kind(given):
    model = os.path.join(directory, SentencePieceTokenizer.file_name)
    if byte_fallback.divides_as_exported(given) and files.exists(model):
      return _make_sentencepieces(read_bytes(model, label), configured, said, directory, True, label)
    spec, own = byte_fallback.from_tokenizer_json(given, label)
    ids = specs.map_ids(spec)
    check_added_tokens(directory, ids, label)
    return ByteFallbackTokenizer(spec, marks.resolve(configured, marks.merge(own, said), ids, label), label)
  read = byte_pairs.from_tokenizer_json(given, label)
  _check_pair_beside(read[0], directory, label)
  check_added_tokens(directory, specs.map_ids(read[0]), label)
  return _make_byte_pairs(read, configured, said, unknown_bytes, label)


def load_from_config(
  config: Any, name: str | None = None, *, lossless: bool = True, key: str = "data.tokenizer"
) -> Tokenizer:
  """Loads the tokenizer that a config's section `data` names, or another with its keys; raises UserError as `load`."""
  return load(
    config.tokenizer if name is None else name,
    begin_mark=config.begin_mark,
    begin_token=config.begin_token,
    end_token=config.end_token,
    unknown_bytes=config.unknown_bytes,
    lossless=lossless,
    chat_template=config.chat_template,
    key=key,
  )


def _make_byte_pairs(
  read: tuple[Spec, Stated], configured: Stated, said: Stated, unknown_bytes: str | None, label: str
) -> Tokenizer:
  (spec, own), ids = read, specs.map_ids(read[0])
  found = marks.resolve(configured, marks.merge(own, said), ids, label)
  unknown = None
  noted = spec["model"].get(specs.OURS, {}).get("unknown_bytes")
  if byte_pairs.find_missing_bytes(spec) and (unknown_bytes or noted) == "unknown":
    unknown = marks.find_unknown_token(marks.merge(own, said)["unknown"], found, ids, label)
  tokenizer = BytePairTokenizer(spec, found, label, unknown)
  plain = ByteTokenizer()
  return plain if tokenizer.hash == plain.hash else tokenizer  # bytes need no merging


def _make_sentencepieces(
  content: bytes, configured: Stated, said: Stated, directory: str, lossless: bool, label: str
) -> Tokenizer:
  model_bytes, facts = sentencepieces.split_facts(content, label)
  model = sentencepieces.make_processor(model_bytes, label)
  ids, own_bos = sentencepieces.map_ids(model), {"the model's bos_id": model.bos_id()} if model.bos_id() >= 0 else {}
  if facts is None:
    added = read_added_tokens(directory, ids, label)
    own = {"eos": {"the model's eos_id": model.eos_id()} if model.eos_id() >= 0 else {}, "bos": own_bos}
    own["otherwise_begins"] = {"the model's bos_id": bool(own_bos)}
    for what, tokens in own.items():  # an added token takes the place of the model's own mark
      if what != "otherwise_begins" and any(marks.read_name(value) in added for value in said[what].values()):
        tokens.clear()
    as_trained = not lossless and not sentencepieces.is_trained_here(model)
  else:
    added, as_trained, said = facts["added"], facts["as_trained"], {}
    noted_bos = own_bos if facts["bos_id"] is None else {"its bos_id": facts["bos_id"]}
    own = {"eos": {"its end_ids": facts["end_ids"][0]}, "bos": noted_bos, "ends": {"its end_ids": facts["end_ids"]}}
    own["otherwise_begins"] = {"its bos_id": facts["bos_id"] is not None}
  found = marks.resolve(configured, marks.merge(own, said), ids | dict(zip(added, itertools.count(len(ids)))), label)
  return SentencePieceTokenizer(model_bytes, label, marks=found, as_trained=as_trained, added=added)


def _choose_files(directory: str, label: str) -> list[str]:
  """Returns the files in a directory that make its tokenizer: one, or a vocabulary and its merges."""
  names = [name for kind in _KINDS for name in kind if files.exists(os.path.join(directory, name))]
  chosen = [name for name in names if name.startswith("tokenizer.")][:1] or names  # tokenizer.json comes before all
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
      other, _ = byte_pairs.from_pair_of_files(paths[0], paths[1], label)
      same = other["model"]["vocab"].items() <= specs.map_ids(spec).items()
      if not same or other["model"]["merges"] != spec["model"]["merges"]:
        raise UserError(f"{label}: tokenizer.json disagrees with {' or '.join(pair)} beside it; remove the wrong ones")
