"""From what the config says to a corpus: prepared shards, a mixture of them, or text that is prepared in a cache."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
import shutil
import time
from typing import Any
import uuid

from diffeq_nnx.data import preparation, shards, tokenizers
from diffeq_nnx.data.shards import Split
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError

_NUMBER = r"\d[\d.]*(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"({_NUMBER})\s*\*\s*(\w+:.+)")
_NEXT_TERM = re.compile(rf"\s*\+\s*(?={_NUMBER}\s*\*)")


@dataclasses.dataclass(frozen=True)
class Mixture:
  """What is trained on: one split, or several with their shares.

  Attributes:
    splits: The splits.
    weights: For each of them its share of the training windows; they add up to 1.
  """

  splits: tuple[Split, ...]
  weights: tuple[float, ...] = (1.0,)

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes of text to a token of the mixture, marks counted as tokens."""
    return sum(weight * split.bytes_per_token for weight, split in zip(self.weights, self.splits))


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A tokenizer and what it made of the training and the validation documents.

  Attributes:
    tokenizer: The tokenizer.
    train: What is trained on.
    validation: What is validated on; that of all sources of a mixture, one after the other.
    fingerprint: Tells these tokens and weights from others, wherever they lie, in hex.
  """

  tokenizer: Tokenizer
  train: Mixture
  validation: Split
  fingerprint: str


def load(config: Any, vocab_size: int, seed: int) -> Corpus:
  """Opens prepared shards, or prepares text, or opens what an earlier call left of that under `config.cache_dir`.

  The cache is complete or absent: a killed run or several at once leave no half-made one, and one whose files
  have the wrong size is made anew. Neither the text nor the tokens are held in memory.

  Args:
    config: An object with the attributes
      `source`: `shards:DIR`; `WEIGHT*shards:DIR + WEIGHT*shards:DIR ...`; or documents (see `sources.open_source`);
      `text_key`, `bad_records`, `tfds_dir`, `download`: how text is read (see `sources.Options`);
      `validation`: a source of its own, or None to hold out documents of `source`; for shards, other shards;
      `validation_fraction`: the share of documents held out when `validation` is None;
      `validation_split`: which ones, "hash" or "permutation" (see `holdout.sides`);
      `validation_seed`: chooses them; None for `seed`;
      `shuffle_seed`: the order of the training documents;
      `tokenizer`: "train" for a sentencepiece model trained on the training documents, or what
        `tokenizers.load` takes; for shards "train" is the one that they were made with;
      `begin_mark`: whether documents begin with the tokenizer's begin mark; None: as its files say;
      `begin_token`, `end_token`: the marks' tokens; None: as its files say;
      `num_processes`: how many prepare text; None: one for each core;
      `cache_dir`: a directory; `~` expands.
    vocab_size: The model's number of ids, all of which a tokenizer trained here uses.
    seed: Chooses the documents held out, unless `config.validation_seed` does.

  Raises:
    UserError: For a source, a tokenizer, a vocabulary size or a directory that can't be used.
  """
  terms = _terms(config.source)
  if terms:
    return _prepared(config, vocab_size, terms)
  if config.validation and config.validation.startswith("shards:"):
    raise UserError(
      f"data.validation={config.validation}: shards go with shards, and data.source={config.source} is text; prepare "
      "that, or give text here"
    )
  return _cached(config, vocab_size, seed)


def _terms(source: str) -> dict[str, float]:
  """Weights by directory, as they are written, if the source is shards or a mixture of them; else empty."""
  if source.startswith("shards:") and source.count("shards:") == 1:
    return {_directory_of(source, "data.source"): 1.0}
  if "shards:" not in source and not _TERM.fullmatch(source.strip()):
    return {}
  terms: dict[str, float] = {}
  known = set()
  for term in _NEXT_TERM.split(source.strip()):
    found = _TERM.fullmatch(term)
    weight = float(found[1]) if found and found[1].count(".") < 2 else -1.0
    directory = found[2].removeprefix("shards:").strip() if found else ""
    place = os.path.realpath(os.path.expanduser(directory))
    good = found and found[2].startswith("shards:") and directory and "shards:" not in directory
    if not (good and 0 < weight < 1e100 and place not in known):
      raise UserError(
        f"data.source={source}: {term!r} must be a weight above 0, a *, and shards:DIR of a directory of its own; "
        "write for example '0.7*shards:web + 0.3*shards:books'"
      )
    known.add(place)
    terms[directory] = weight
  return terms


def _directory_of(source: str, key: str) -> str:
  directory = source.removeprefix("shards:")
  if not directory or "shards:" in directory:
    raise UserError(f"{key}={source}: must name one directory, as in shards:DIR")
  return directory


def _prepared(config: Any, vocab_size: int, terms: dict[str, float]) -> Corpus:
  """Prepared shards as a corpus."""
  opened = {directory: _directory(directory, "data.source") for directory in terms}
  validated = list(opened.values())
  if config.validation is not None and config.validation.startswith("shards:"):
    directory = _directory_of(config.validation, "data.validation")
    opened[directory] = _directory(directory, "data.validation")
    validated = [opened[directory]]
  elif config.validation is not None:
    for directory, one in opened.items():
      if one.manifest["recipe"].get("validation") != config.validation:
        raise UserError(
          f"data.validation={config.validation}: shards:{directory} was prepared with "
          f"{one.manifest['recipe'].get('validation') or 'documents held out of its source'}; set it to shards:DIR, or "
          "to None for what the shards hold"
        )
  first, tokenizer = next((directory, one.tokenizer) for directory, one in opened.items())
  for directory, one in opened.items():
    if one.tokenizer.hash != tokenizer.hash:
      raise UserError(
        f"shards:{directory}: made with another tokenizer ({one.tokenizer.hash[:12]}) than shards:{first} "
        f"({tokenizer.hash[:12]}); prepare both with the same data.tokenizer"
      )
  _check_tokenizer(config, tokenizer, f"shards:{first}")
  preparation.check_vocabulary(tokenizer, vocab_size, f"shards:{first}")
  total = sum(terms.values())
  return _corpus([opened[name] for name in terms], [weight / total for weight in terms.values()], validated)


def _corpus(trained: list[shards.Directory], weights: list[float], validated: list[shards.Directory]) -> Corpus:
  """A corpus of some directories' training parts, with their weights, and of some directories' validation parts."""
  facts = [[one.digest("train") for one in trained], weights, [one.digest("validation") for one in validated]]
  return Corpus(
    trained[0].tokenizer,
    Mixture(tuple(one.splits["train"] for one in trained), tuple(weights)),
    shards.join([one.splits["validation"] for one in validated]),
    hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
  )


def _check_tokenizer(config: Any, tokenizer: Tokenizer, name: str) -> None:
  """Sees that the config asks for no other tokenizer than that of the shards."""
  if config.tokenizer != "train":
    asked = tokenizers.load(
      config.tokenizer, begin_mark=config.begin_mark, begin_token=config.begin_token, end_token=config.end_token
    )
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


def _directory(directory: str, key: str) -> shards.Directory:
  """Opens a directory with shards."""
  label, path = f"{key}=shards:{directory}", os.path.expanduser(directory)
  manifest = shards.read_manifest(path, label)
  if manifest is None:
    unfinished = os.path.isdir(os.path.join(path, preparation.UNFINISHED))
    raise UserError(
      f"{label}: "
      + (
        "is not finished; run the same --job=prepare again, it goes on" if unfinished
        else f"holds no {shards.MANIFEST}; make the shards with --job=prepare --workdir={directory}"
      )
    )  # fmt: skip
  return shards.open_directory(path, manifest, label)


def _cached(config: Any, vocab_size: int, seed: int) -> Corpus:
  """Text as a corpus."""
  recipe = preparation.recipe(config, vocab_size, seed)
  cache_dir = os.path.abspath(os.path.expanduser(config.cache_dir))
  key = hashlib.sha256(json.dumps(recipe.record, sort_keys=True).encode()).hexdigest()
  final = os.path.join(cache_dir, key)
  corpus = _open(final)
  if corpus is not None:
    return corpus
  part = os.path.join(cache_dir, f".{key}.{uuid.uuid4().hex}")
  try:
    try:
      os.makedirs(part)
      _remove_abandoned(cache_dir, key)
      preparation.prepare(part, recipe, config.num_processes or preparation.num_cores())
      return _publish(part, final)
    finally:
      shutil.rmtree(part, ignore_errors=True)
  except OSError as error:  # the sources' own are told as UserError by then
    reason = error.strerror or str(error)
    raise UserError(
      f"data.cache_dir={config.cache_dir}: can't be written ({reason}); give a writable directory with space"
    ) from error


def _open(directory: str) -> Corpus | None:
  """The corpus in a cache directory, or None if it isn't there or isn't whole."""
  try:
    found = _directory(directory, "data.cache_dir")
  except UserError:
    return None
  return _corpus([found], [1.0], [found])


def _remove_abandoned(cache_dir: str, key: str) -> None:
  """Deletes what killed runs left of this cache: temporary directories untouched for a day."""
  for directory in glob.glob(os.path.join(glob.escape(cache_dir), f".{key}.*")):
    with contextlib.suppress(OSError):
      paths = glob.glob(f"{glob.escape(directory)}/**", recursive=True, include_hidden=True)
      if time.time() - max(os.path.getmtime(path) for path in paths) > 86400:
        shutil.rmtree(directory, ignore_errors=True)


def _publish(part: str, final: str) -> Corpus:
  """Moves a finished directory to its place, unless another run was first."""
  while True:
    try:
      os.rename(part, final)
    except OSError:
      if not os.path.lexists(final):
        raise
    corpus = _open(final)
    if corpus is not None:
      return corpus
    # Something damaged is in the way: renaming is the one step that can't be seen half-done.
    broken = f"{part}.broken"
    with contextlib.suppress(FileNotFoundError):
      os.rename(final, broken)
    if os.path.isdir(broken):
      shutil.rmtree(broken, ignore_errors=True)
    elif os.path.lexists(broken):
      os.remove(broken)
