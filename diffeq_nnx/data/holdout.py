"""The choice of the documents that are held out for validation.

A document is held out where its score, a hash of a seed and its bytes, is below a limit. Equal documents are therefore
on the same side, and neither the order of documents nor the number of processes matters.
"""

from collections.abc import Iterable
import hashlib

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.documents import Document, text_of
from diffeq_nnx.errors import UserError

NO_DOCUMENT, EVERY_DOCUMENT = 0, 1 << 64  # limits that hold out none and all


def compute_score(document: bytes, seed: int) -> int:
  """Returns a number of 64 bits that depends on the seed and the bytes of a document alone."""
  return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest(), "little")


def choose_limit(documents: Iterable[Document], config: DataConfig, seed: int) -> int:
  """Chooses the score below which a document is held out.

  It is the fraction that the config asks for, unless all documents would be on one side. Then the document with the
  lowest score is held out, or that with the highest one is trained on. Reading ends when each side has a document.
  Raises UserError if all documents are equal.
  """
  limit = round(config.validation_fraction * EVERY_DOCUMENT)
  lowest, highest, count = EVERY_DOCUMENT, -1, 0
  for document in documents:
    one = compute_score(text_of(document).encode(), seed)
    lowest, highest, count = min(lowest, one), max(highest, one), count + 1
    if lowest < limit <= highest:
      return limit
  if lowest >= highest:
    raise UserError(
      f"data.source={config.source}: {count} documents can't be divided between training and validation; give at least "
      "2 documents that differ, or data.validation"
    )
  return lowest + 1 if lowest >= limit else highest
