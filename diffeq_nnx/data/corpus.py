"""Opens the corpus that a config names: prepared shards, a mixture of them, or text that is prepared in a cache."""

import contextlib
import dataclasses
import os
import re

from diffeq_nnx import files
from diffeq_nnx.config import NO_TEXT, DataConfig
from diffeq_nnx.data import preparation, shards, sources, tokenizers
from diffeq_nnx.data.shards import Split
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError

SAME_MARKS = (
  "the tokenizer's begin and end marks are the same, so the end of a document can't be found; set data.begin_mark=False"
)
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"({_NUMBER})\s*\*\s*(\w+):(.+)")
_NEXT_TERM = re.compile(rf"\s*\+\s*(?={_NUMBER}\s*\*)")


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Training data: one split, or several with their shares."""

  splits: tuple[Split, ...]
  weights: tuple[float, ...] = (1.0,)  # the share of each split in the training windows; they add up to 1

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes of text per target of the mixture, marks counted as tokens."""
    rows = [split.num_documents if split.padding else len(split.tokens) for split in self.splits]  # or as many each
    targets = [weight * (split.num_targets / count) for weight, split, count in zip(self.weights, self.splits, rows)]
    return sum(share * split.bytes_per_token for share, split in zip(targets, self.splits)) / sum(targets)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A tokenizer, and the training and validation documents as its tokens."""

  tokenizer: Tokenizer
  train: Mixture
  validation: Split  # for a mixture the validation splits of its sources in order
  fingerprint: str  # a hash of shards and weights in hex, independent of their location


def load(config: DataConfig, vocab_size: int, seed: int) -> Corpus:
  """Opens prepared shards, or text that it prepares at the first call and caches under `config.cache_dir`.

  An incomplete cache entry is not used: the next run completes the entry of a killed one, simultaneous runs wait for
  one of them, and an entry whose files have the wrong size is made again. Neither text nor tokens are held in memory.

  Args:
    vocab_size: The model's number of ids, all of which a tokenizer trained here uses.
    seed: Chooses the held-out documents, unless `config.validation_seed` does.

  Raises:
    UserError: For a source, a tokenizer, a vocabulary size or a directory that can't be used.
  """
  if config.source == NO_TEXT:
    raise UserError(f"data.source={NO_TEXT}: the run has no text yet; name it, e.g. --config.data.source=text:FILE.txt")
  terms = _parse_terms(config.source)
  if terms:
    return _load_shards(config, vocab_size, terms)
  if config.validation and config.validation.startswith("shards:"):
    raise UserError(
      f"data.validation={config.validation}: shards need a data.source of shards, and data.source={config.source} is "
      "text; prepare that, or give text here"
    )
  return _load_text(config, vocab_size, seed)


def _parse_terms(source: str) -> dict[str, float]:
  """Returns weights by directory, as given, if the source is shards or a mixture of them, and else an empty dict."""
  if source.startswith("shards:") and source.count("shards:") == 1:
    return {_parse_directory(source, "data.source"): 1.0}
  if "shards:" not in source and not _TERM.fullmatch(source.strip()):
    return {}
  terms: dict[str, float] = {}
  known = set()
  for term in _NEXT_TERM.split(source.strip()):
    found = _TERM.fullmatch(term)
    weight, kind, directory = (float(found[1]), found[2], found[3].strip()) if found else (0.0, "", "")
    path = os.path.realpath(files.absolute(directory))
    valid = kind == "shards" and directory and "shards:" not in directory
    if not (valid and 0 < weight < 1e100 and path not in known):
      raise UserError(
        f"data.source={source}: {term!r} must be a weight above 0, a *, and shards:DIR, each with another directory; "
        "write for example '0.7*shards:web + 0.3*shards:books'"
      )
    known.add(path)
    terms[directory] = weight
  return terms


def _parse_directory(source: str, key: str) -> str:
  directory = source.removeprefix("shards:")
  if not directory or "shards:" in directory:
    raise UserError(f"{key}={source}: must name one directory, as in shards:DIR")
  return directory


def _load_shards(config: DataConfig, vocab_size: int, terms: dict[str, float]) -> Corpus:
  opened = {directory: _open_directory(directory, "data.source") for directory in terms}
  validated = list(opened.values())
  if config.validation is not None and config.validation.startswith("shards:"):
    directory = _parse_directory(config.validation, "data.validation")
    opened[directory] = _open_directory(directory, "data.validation")
    validated = [opened[directory]]
  elif config.validation is not None:
    for directory, one in opened.items():
      if one.manifest["recipe"].get("validation") != config.validation:
        raise UserError(
          f"data.validation={config.validation}: shards:{directory} was prepared with "
          f"{one.manifest['recipe'].get('validation') or 'documents held out of its source'}; set it to shards:DIR, or "
          "to None for the validation split of the shards"
        )
  first = next(iter(opened))
  tokenizer = opened[first].tokenizer
  for directory, one in opened.items():
    if one.tokenizer.hash != tokenizer.hash:
      raise UserError(
        f"shards:{directory}: made with another tokenizer ({one.tokenizer.hash[:12]}) than shards:{first} "
        f"({tokenizer.hash[:12]}); prepare both with the same data.tokenizer"
      )
  _check_tokenizer(config, tokenizer, f"shards:{first}")
  preparation.check_vocabulary(tokenizer, vocab_size, f"shards:{first}")
  total = sum(terms.values())
  trained = [opened[name] for name in terms]
  if config.records != "text" and not trained[0].splits["train"].masked:
    raise UserError(
      f"data.records={config.records}: shards:{first} has no masks, so that every token would be learned; prepare its "
      "text with this key, or leave it out"
    )
  for those in (trained, validated):
    if len({one.splits["train"].masked for one in those}) > 1:
      plain = next(name for name, one in opened.items() if one in those and not one.splits["train"].masked)
      raise UserError(
        f"data.source={config.source}: shards:{plain} has no masks (data.records=text), and others do; mix one kind "
        "alone, or prepare that text as completions with empty prompts"
      )
  return _make_corpus(config, trained, [weight / total for weight in terms.values()], validated)


def _make_corpus(
  config: DataConfig, trained: list[shards.Directory], weights: list[float], validated: list[shards.Directory]
) -> Corpus:
  """Makes a corpus of the training splits of some directories, with weights, and the validation splits of others."""
  tokenizer = trained[0].tokenizer
  padding = shards.Padding(config.too_long, tokenizer.eos_id) if config.rows == "padded" else None
  splits = [one.splits["train"] for one in trained] + [shards.join([one.splits["validation"] for one in validated])]
  if padding is not None and tokenizer.bos_id == tokenizer.eos_id and not all(split.masked for split in splits):
    raise UserError(f"data.rows=padded: {SAME_MARKS}, or data.rows=packed")
  *train, validation = (dataclasses.replace(split, padding=padding) for split in splits)
  facts = [[one.hash_tokens("train") for one in trained], weights, [one.hash_tokens("validation") for one in validated]]
  return Corpus(tokenizer, Mixture(tuple(train), tuple(weights)), validation, files.hash_json(facts))


def _check_tokenizer(config: DataConfig, tokenizer: Tokenizer, name: str) -> None:
  """Raises UserError if the config names another tokenizer than that of the shards."""
  if config.tokenizer != "train":
    asked = tokenizers.load(config.tokenizer, config, lossless=True)
    if asked.hash != tokenizer.hash:
      raise UserError(
        f"data.tokenizer={config.tokenizer}: is another tokenizer ({asked.hash[:12]}) than that of {name} "
        f"({tokenizer.hash[:12]}); leave data.tokenizer and data.begin_mark at their defaults to use that"
      )
  elif config.begin_token or config.end_token:
    raise UserError(
      f"data.begin_token={config.begin_token}, data.end_token={config.end_token}: {name} keeps the marks that it was "
      "prepared with; set them to None, or name the tokenizer too"
    )
  elif config.begin_mark not in (None, tokenizer.bos_id is not None):
    raise UserError(
      f"data.begin_mark={config.begin_mark}: {name} was prepared {'without' if config.begin_mark else 'with'} begin "
      "marks; set it to None, or prepare the text again"
    )


def _open_directory(directory: str, key: str, cached: bool = False) -> shards.Directory:
  label, path = f"{key}=shards:{directory}", files.absolute(directory)
  manifest = shards.read_manifest(path, label)
  if manifest is None and files.is_folder(os.path.join(path, preparation.UNFINISHED)):
    raise UserError(f"{label}: is not finished; run the same --job=prepare again to complete it")
  if manifest is None:
    raise UserError(f"{label}: holds no {shards.MANIFEST}; make the shards with --job=prepare --workdir={directory}")
  return shards.open_directory(path, manifest, label, cached)


def _load_text(config: DataConfig, vocab_size: int, seed: int) -> Corpus:
  """Loads the corpus of text from the cache, or prepares it."""
  recipe = preparation.make_recipe(config, vocab_size, seed)
  key = files.hash_json(recipe.record)
  folder = os.path.join(files.absolute(config.cache_dir), key)

  def open_entry(prepared_before: bool) -> Corpus:
    found = [_open_directory(folder, "data.cache_dir", cached=True)]
    if prepared_before:  # says again what was said then
      for name, counts in found[0].manifest["records"].items():
        sources.Counts(**counts).warn_of_bad(f"{name}={getattr(config, name.removeprefix('data.'))}:")
    corpus = _make_corpus(config, found, [1.0], found)
    corpus.tokenizer.chat_template = recipe.chat_template  # which may have changed since
    return corpus

  with contextlib.suppress(UserError):  # it is missing or damaged
    return open_entry(prepared_before=True)
  try:
    preparation.prepare(folder, recipe, wait=True)
  except UserError:
    with contextlib.suppress(UserError):  # of a source that can't be read now, whose finished work stays
      if recipe.has_changed():  # the text changed, and the work is of no use
        files.remove(folder)
    raise
  except OSError:  # those of the sources are UserErrors by now
    with contextlib.suppress(UserError):  # another host may have finished it, where locks are not shared
      return open_entry(prepared_before=True)
    with files.writing(f"data.cache_dir={config.cache_dir}", "give a writable directory"):
      raise
  return open_entry(prepared_before=False)
