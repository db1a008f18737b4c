"""The interface of every tokenizer."""

import abc
from collections.abc import Iterable, Sequence
import hashlib
import itertools
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"  # the end mark of tokenizers trained here, and GPT-2's
Stated = dict[str, dict[str, Any]]  # on marks, "eos" and "bos" (token, id or ids) and "begins" (bool): value by place
GROUP_CHARS = 1 << 20  # encoded at once: bounds the memory of Python's lists of integers


class Tokenizer(abc.ABC):
  """Text to ids and back without loss: `decode(encode(text)) == text` for every valid Unicode text.

  A tokenizer's own text normalization (Unicode forms, merged spaces, a leading space) is switched off. The name of a
  mark in a text ("<|endoftext|>", "<s>") is ordinary text: encoding never gives a mark's id. A document is stored as
  `bos_id` (if there is one), its text's ids and `eos_id`.
  """

  eos_id: int  # of the end mark, which follows each document
  bos_id: int | None  # of the begin mark, which precedes each document; None: documents begin without one
  vocab_size: int  # number of ids, which run from 0 to vocab_size - 1
  file_name: str  # the tokenizer's file in a run directory
  model_bytes: bytes  # the content of that file, which `load` reads

  @property
  def hash(self) -> str:
    """A hex SHA-256 of everything that decides ids, the marks included."""
    return hashlib.sha256(self.model_bytes).hexdigest()

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids; marks to nothing, other numbers to a replacement character, bytes that aren't UTF-8 to U+FFFD."""

  @abc.abstractmethod
  def _cut(self, text: str) -> Iterable[str]:
    """Divides a text into blocks whose ids, joined, are the text's."""

  @abc.abstractmethod
  def _encode_blocks(self, blocks: list[str]) -> Iterable[np.ndarray]:
    """Encodes blocks, each to int32 ids, shape [num_tokens]."""

  def encode(self, text: str) -> np.ndarray:
    """Encodes one text, as `encode_batch`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts, without any mark, on several threads; the result doesn't depend on the threads.

    Returns:
      For each text its int32 ids, shape [num_tokens].

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
    """
    for text in texts:
      text.encode()  # the libraries' own complaints about a lone surrogate say nothing
    ids: list[list[np.ndarray]] = [[] for _ in texts]
    blocks = [(index, block) for index, text in enumerate(texts) for block in self._cut(text)]
    starts = itertools.accumulate((len(block) for _, block in blocks), initial=0)
    for _, group in itertools.groupby(zip(starts, blocks), key=lambda item: item[0] // GROUP_CHARS):
      indices, group_blocks = zip(*(item for _, item in group))
      for index, block_ids in zip(indices, self._encode_blocks(list(group_blocks))):
        ids[index].append(block_ids)
    return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in ids]
