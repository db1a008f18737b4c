"""The choice of the documents that are held out for validation."""

import hashlib
import math

import numpy as np

from diffeq_nnx.config import DataConfig
from diffeq_nnx.errors import UserError

SIDES = {"train": 1, "validation": 2}  # the values that `sides` returns


def sides(present: np.ndarray, config: DataConfig, seed: int) -> np.ndarray:
  """Assigns the records of a source to training or validation.

  With `config.validation_split` "hash", a document is held out where a hash of the seed and its index among
  the documents, as a number from 0 to 1, is below the fraction, with at least one document in each split. "permutation"
  is the rule of `Dataset.train_test_split` in Hugging Face's datasets, which holds out the same records: of n records,
  empty ones included, the first ceil(fraction n) entries of `numpy.random.default_rng(seed).permutation(n)`. Both take
  up to 8 bytes a record in passing, and 2 in the end.

  Args:
    present: [num_records] bool: whether a record has text (empty and bad ones do not).
    config: Says by which rule and which fraction.
    seed: Chooses the records.

  Returns:
    [num_records] int8: a value of `SIDES`, or 0 for a record that is empty or bad.

  Raises:
    UserError: If a split would have no document.
  """
  held_out = np.zeros(len(present), np.bool_)
  num_documents = int(present.sum())
  if config.validation_split == "permutation":
    held_out[permuted(len(present), config.validation_fraction, seed)] = True
  elif num_documents >= 2:
    scores = np.fromiter((_score(seed, index) for index in range(num_documents)), np.float64)
    chosen = scores < config.validation_fraction
    chosen[np.argmin(scores)], chosen[np.argmax(scores)] = True, False
    held_out[present] = chosen
  assigned = np.where(held_out, np.int8(SIDES["validation"]), np.int8(SIDES["train"])) * present
  if not all((assigned == side).any() for side in SIDES.values()):
    raise UserError(
      f"data.source={config.source}: {num_documents} documents can't be divided between training and "
      f"validation by data.validation_split={config.validation_split} and "
      f"data.validation_fraction={config.validation_fraction}; give at least 2 documents, another fraction, "
      "or data.validation"
    )
  return assigned


def permuted(num_records: int, fraction: float, seed: int) -> np.ndarray:
  """The indices that "permutation" holds out, in the order drawn: [ceil(fraction n)] int64."""
  return np.random.default_rng(seed).permutation(num_records)[: math.ceil(fraction * num_records)]


def _score(seed: int, index: int) -> float:
  """A number from 0 to 1 that depends on the seed and the index alone."""
  digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
  return int.from_bytes(digest, "little") / 2**64
