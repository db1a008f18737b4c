"""All that decides what is in the shards."""

import dataclasses
import functools
from typing import Any

import sentencepiece
import tokenizers as huggingface

from diffeq_nnx.data import sources, tokenizers
from diffeq_nnx.data.sources import Source
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError


@dataclasses.dataclass(frozen=True)
class Recipe:
  """All that decides what is in the shards.

  Attributes:
    config: An object with the attributes that `corpus.load` names.
    vocab_size: The model's number of ids, all of which a tokenizer trained here uses.
    seed: Chooses the documents held out, unless `config.validation_seed` does.
    tokenizer: The one that the config names; None: one is trained.
  """

  config: Any
  vocab_size: int
  seed: int
  tokenizer: Tokenizer | None

  @property
  def split_seed(self) -> int:
    """Chooses the documents held out."""
    return self.seed if self.config.validation_seed is None else self.config.validation_seed

  @functools.cached_property
  def options(self) -> sources.Options:
    """How sources are read."""
    config = self.config
    return sources.Options(config.text_key, config.bad_records, config.tfds_dir, config.download)

  @functools.cached_property
  def opened(self) -> dict[str, Source]:
    """The sources as they are found at first, by the key that names them."""
    named = {"data.source": self.config.source, "data.validation": self.config.validation}
    return {key: sources.open_source(name, key, self.options) for key, name in named.items() if name is not None}

  @functools.cached_property
  def record(self) -> dict[str, Any]:
    """The recipe as JSON; of files that have changed it is another one."""
    config, prints = self.config, {key: source.fingerprint() for key, source in self.opened.items()}
    record = {
      "source": config.source,
      "source_fingerprint": prints["data.source"],
      "text_key": config.text_key,
      "bad_records": config.bad_records,
      "shuffle_seed": config.shuffle_seed,
      "tokenizer": self.tokenizer.hash if self.tokenizer else f"train {self.vocab_size}",
      "libraries": {"sentencepiece": sentencepiece.__version__, "tokenizers": huggingface.__version__},
    }
    if config.validation is not None:
      return record | {"validation": config.validation, "validation_fingerprint": prints["data.validation"]}
    return record | {
      "validation_fraction": config.validation_fraction,
      "validation_split": config.validation_split,
      "validation_seed": self.split_seed,
    }


  def holds(self) -> bool:
    """Whether the files are still as they were found."""
    return dataclasses.replace(self).record == self.record


def recipe(config: Any, vocab_size: int, seed: int) -> Recipe:
  """The recipe of a config.

  Raises:
    UserError: For a tokenizer or a fraction that can't be used, and a vocabulary larger than the model's.
  """
  if config.validation is None and not 0 < config.validation_fraction < 1:
    raise UserError(
      f"data.validation_fraction={config.validation_fraction}: must lie between 0 and 1, both excluded; "
      "use for example 0.05, or give data.validation"
    )
  return Recipe(config, vocab_size, seed, _given_tokenizer(config, vocab_size))


def _given_tokenizer(config: Any, vocab_size: int) -> Tokenizer | None:
  """The tokenizer that the config names, or None for one to be trained."""
  if config.tokenizer == "train":
    if config.begin_mark or config.begin_token or config.end_token:
      raise UserError(
        f"data.begin_mark={config.begin_mark}, data.begin_token={config.begin_token}, data.end_token="
        f"{config.end_token}: data.tokenizer=train makes a tokenizer with an end mark alone; set them to None"
      )
    return None
  tokenizer = tokenizers.load(
    config.tokenizer, begin_mark=config.begin_mark, begin_token=config.begin_token, end_token=config.end_token
  )
  check_vocabulary(tokenizer, vocab_size, f"data.tokenizer={config.tokenizer}")
  return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
  """Raises UserError if the tokenizer has ids that the model lacks."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"model.vocab_size={vocab_size}: smaller than the {tokenizer.vocab_size} ids of {name}; set it to "
      f"{tokenizer.vocab_size} or more"
    )
