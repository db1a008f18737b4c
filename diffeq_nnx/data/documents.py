"""A document: a text whose tokens all count as targets, or pieces of a text of which some count."""

from collections.abc import Iterable
import dataclasses
import itertools

import numpy as np

from diffeq_nnx.data.tokenizers import Tokenizer

NOT_COUNTED, FIRST = np.uint32(1 << 31), np.uint32(1 << 30)  # bits of a token on disk, beside its id
_ID = np.uint32((1 << 30) - 1)


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of a document's text, and whether its tokens count as targets."""

  text: str
  counts: bool


Document = str | tuple[Piece, ...]

# Keys of a record that are arguments for a chat template, beside its messages.
TEMPLATE_ARGUMENTS = ("tools", "functions", "chat_template_kwargs")


def text_of(document: Document) -> str:
  """Returns the whole text."""
  return document if isinstance(document, str) else "".join(piece.text for piece in document)


def count_bytes(document: Document) -> int:
  """Counts the UTF-8 bytes of the text that counts."""
  pieces = [document] if isinstance(document, str) else [piece.text for piece in document if piece.counts]
  return sum(len(text.encode()) for text in pieces)


def divide(text: str, spans: Iterable[tuple[int, int]]) -> tuple[Piece, ...]:
  """Divides a text into pieces, of which those count that are given by their first character and their last plus 1."""
  pieces, at = [], 0
  for start, stop in spans:
    pieces += [Piece(text[at:start], False), Piece(text[start:stop], True)]
    at = stop
  return (*pieces, Piece(text[at:], False))


def encode(document: Document, tokenizer: Tokenizer, rendered: bool) -> np.ndarray:
  """Encodes the whole text, and notes which tokens count.

  A token counts if it overlaps a piece that counts, as in transformers. The first token of a document never counts. If
  the text is `rendered`, a chat template made it: then the names of special tokens are these tokens, and no marks are
  added. Else the document gets the tokenizer's marks, and the end mark counts.

  Returns:
    [num_tokens] uint32: ids, with the bits `NOT_COUNTED` and `FIRST`.

  Raises:
    UnknownByte: As `Tokenizer.encode`.
  """
  pieces = [Piece(document, True)] if isinstance(document, str) else document
  ids, spans_Nx2 = tokenizer.encode_spans(text_of(document), rendered)
  counts = np.zeros(len(ids), bool)
  ends = list(itertools.accumulate(len(piece.text) for piece in pieces))
  for piece, end in zip(pieces, ends):
    if piece.counts:
      counts |= (spans_Nx2[:, 1] > end - len(piece.text)) & (spans_Nx2[:, 0] < end)
  tokens = ids.astype(np.uint32) | np.where(counts, np.uint32(0), NOT_COUNTED)
  if not rendered:
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = np.concatenate([np.array(begin, np.uint32), tokens, np.array([tokenizer.eos_id], np.uint32)])
  tokens[:1] |= NOT_COUNTED | FIRST
  return tokens


def read_ids(tokens: np.ndarray) -> np.ndarray:
  """Returns the ids of tokens as `encode` gives them, int32."""
  return (tokens & _ID).astype(np.int32)
