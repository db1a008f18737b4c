"""From the value of `data.tokenizer`, and what is said about marks, to a tokenizer."""

import copy
import functools
import itertools

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.tokenizers import byte_fallback, byte_pairs, files, marks, sentencepieces, specs
from diffeq_nnx.data.tokenizers.base import Tokenizer
from diffeq_nnx.data.tokenizers.byte_fallback import ByteFallbackTokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer, ByteTokenizer
from diffeq_nnx.data.tokenizers.files import Folder
from diffeq_nnx.data.tokenizers.marks import Stated
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer
from diffeq_nnx.data.tokenizers.specs import Spec
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import parse_json


def load(
  name: str, config: DataConfig = DataConfig(), *, lossless: bool = False, key: str = "data.tokenizer"
) -> Tokenizer:
  """Loads the tokenizer with a name or path.

  Args:
    name: `bytes`, or the path of a sentencepiece model, a `tokenizer.json`, or a directory with `tokenizer.json`,
      `tokenizer.model`, `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`. Of a directory with the first
      two, `tokenizer.json` is taken, as by transformers.
    config: Of its begin_mark, begin_token, end_token, unknown_bytes and chat_template, which is a path here, those that
      aren't None come before what the files say, also a file that this program wrote. A `begin_token` implies
      `begin_mark`. If neither is given and no file says it, the tokenizer's own post-processor decides whether
      documents begin with the mark.
    lossless: Whether a sentencepiece model is used with its text normalization off; else it is used as it was trained,
      unless it is one that `train` made.
    key: The configuration key that errors name.

  Raises:
    UserError: For files that can't be read or used, that disagree or lose text, and for missing marks.
  """
  asked = (config.begin_mark, config.begin_token, config.end_token, config.unknown_bytes)
  try:
    folder, chosen = ({}, ()) if name == "bytes" else files.read_folder(name)
    made = _make(tuple(folder.items()), chosen, asked, lossless)
    template, names = files.read_chat_template(folder)
  except UserError as error:
    raise UserError(f"{key}={name}: {error}") from error
  tokenizer = copy.copy(made)  # what is set below is the caller's
  if config.chat_template is not None:
    template = files.read_template_file(config.chat_template)
  own = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
  names = {key: tokenizer.name_token(number) for key, number in own.items() if number is not None} | names
  given = {"bos_token": config.begin_token, "eos_token": config.end_token}
  names |= {variable: token for variable, token in given.items() if token}
  tokenizer.chat_template = None if template is None else files.name_marks(template, names)
  return tokenizer


@functools.lru_cache(2)  # a run, its text and its cache have one tokenizer, which takes a second to make if it is large
def _make(
  files_of_folder: tuple[tuple[str, bytes], ...],
  chosen: tuple[str, ...],
  asked: tuple[bool | None, str | None, str | None, str | None],
  lossless: bool,
) -> Tokenizer:
  """Makes the tokenizer in the chosen files, without its chat template; see `load`. No files: that of bytes."""
  folder = dict(files_of_folder)
  said = files.read_statements(folder)
  begin_mark, begin_token, end_token, unknown_bytes = asked
  configured: Stated = {
    "eos": {"data.end_token": end_token} if end_token else {},
    "bos": {"data.begin_token": begin_token} if begin_token else {},
    "begins": {"data.begin_mark": begin_mark is not False} if begin_token or begin_mark is not None else {},
  }
  falls_back = False
  if not chosen:
    spec, own = byte_pairs.from_tokenizer_json(byte_pairs.BYTES)
  elif len(chosen) == 2:
    spec, own = byte_pairs.from_pair_of_files(folder, *chosen)
  else:
    content = folder[chosen[0]]
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
      return _make_sentencepieces(content, configured, said, folder, lossless)
    given, model = parse_json(content, chosen[0]), folder.get(SentencePieceTokenizer.file_name)
    falls_back = byte_fallback.is_kind(given)
    if falls_back and given.items() >= byte_fallback.EXPORTED.items() and model is not None:
      # --job=export made it of the model
      return _make_sentencepieces(model, configured, said, folder, lossless=True)
    spec, own = (byte_fallback if falls_back else byte_pairs).from_tokenizer_json(given)
    if not falls_back:
      _check_pair_beside(spec, folder)
  ids, stated = specs.map_ids(spec), marks.merge(own, said)
  if added := files.read_added_tokens(folder, ids):
    problem = f"the files beside the vocabulary add {added[0]!r} ({len(added)} such), which it lacks"
    raise UserError(f"{problem}; correct the files, or remove the wrong ones")
  found, unknown = marks.resolve(configured, stated, ids), None
  if falls_back:
    return ByteFallbackTokenizer(spec, found)
  noted = spec["model"].get(specs.OURS, {}).get("unknown_bytes")
  if byte_pairs.find_missing_bytes(spec) and (unknown_bytes or noted) == "unknown":
    unknown = marks.find_unknown_token(stated["unknown"], found, ids)
  tokenizer, plain = BytePairTokenizer(spec, found, unknown), ByteTokenizer()
  return plain if tokenizer.hash == plain.hash else tokenizer  # bytes need no merging


def _make_sentencepieces(content: bytes, configured: Stated, said: Stated, folder: Folder, lossless: bool) -> Tokenizer:
  model_bytes, facts = sentencepieces.split_facts(content)
  model = sentencepieces.make_processor(model_bytes)
  ids, own_bos = sentencepieces.map_ids(model), {"the model's bos_id": model.bos_id()} if model.bos_id() >= 0 else {}
  if facts is None:
    added = files.read_added_tokens(folder, ids)
    own = {"eos": {"the model's eos_id": model.eos_id()} if model.eos_id() >= 0 else {}, "bos": own_bos}
    own["otherwise_begins"] = {"the model's bos_id": bool(own_bos)}
    for what, tokens in own.items():  # an added token takes the place of the model's own mark
      if what != "otherwise_begins" and any(marks.read_name(value) in added for value in said[what].values()):
        tokens.clear()
    as_trained = not lossless and not sentencepieces.is_trained_here(model)
    legacy = as_trained and files.is_legacy(folder)
  else:
    added, as_trained, legacy, said = facts["added"], facts["as_trained"], facts["legacy"], {}
    noted_bos = own_bos if facts["bos_id"] is None else {"its bos_id": facts["bos_id"]}
    own = {"eos": {"its end_ids": facts["end_ids"][0]}, "bos": noted_bos, "ends": {"its end_ids": facts["end_ids"]}}
    own["otherwise_begins"] = {"its bos_id": facts["bos_id"] is not None}
  found = marks.resolve(configured, marks.merge(own, said), ids | dict(zip(added, itertools.count(len(ids)))))
  return SentencePieceTokenizer(model_bytes, marks=found, as_trained=as_trained, added=added, legacy=legacy)


def _check_pair_beside(spec: Spec, folder: Folder) -> None:
  """Raises UserError if a vocabulary and merges beside a `tokenizer.json` are not the same as in it."""
  for pair in files.PAIRS:
    if folder.keys() >= {*pair}:
      other, _ = byte_pairs.from_pair_of_files(folder, *pair)
      same = other["model"]["vocab"].items() <= specs.map_ids(spec).items()
      if not same or other["model"]["merges"] != spec["model"]["merges"]:
        raise UserError(f"tokenizer.json disagrees with {' or '.join(pair)} beside it; remove the wrong ones")
