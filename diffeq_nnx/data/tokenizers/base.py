"""What every tokenizer is to the rest of the package."""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
import hashlib
import os

import numpy as np

END_OF_TEXT = "<|endoftext|>"  # the end mark of tokenizers made here, and GPT-2's
GROUP_CHARS = 1 << 20  # encoded at once: bounds the memory of Python's lists of integers


class Tokenizer(abc.ABC):
  """Text to ids and back with nothing lost: `decode(encode(text)) == text` for every valid Unicode text.

  The tokenizer's own text normalisation (Unicode forms, merged spaces, a leading space) is switched off, so
  that this also holds for those made elsewhere. The name of a mark in a text ("<|endoftext|>", "<s>") is text
  like any other: encoding never gives a mark's id. Whoever writes documents writes the marks: `bos_id` (if
  there is one), the text's ids, `eos_id`.

  Attributes:
    eos_id: The id of the mark that follows each document.
    bos_id: The id of the mark before each document; None: documents begin without one.
    file_name: What the file that `load` knows again is called.
    model_bytes: That file's content.
  """


  eos_id: int
  bos_id: int | None
  file_name: str
  model_bytes: bytes

  @property
  @abc.abstractmethod
  def vocab_size(self) -> int:
    """Number of ids: they run from 0 to `vocab_size - 1`."""

  @property
  def hash(self) -> str:
    """A hex SHA-256 of all that decides ids, the marks included."""
    return hashlib.sha256(self.model_bytes).hexdigest()

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts, without any mark, on several threads; the result doesn't depend on the threads.

    Returns:
      For each text its int32 ids, shape [num_tokens].

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
    """

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text.

    Args:
      ids: Token ids; marks decode to nothing, numbers that are no id to a replacement character, and bytes
        that aren't UTF-8 to U+FFFD.
    """

  def encode(self, text: str) -> np.ndarray:
    """Encodes one text, without any mark.

    Returns:
      int32 ids, shape [num_tokens].

    Raises:
      UnicodeEncodeError: If the text holds a lone surrogate.
    """
    return self.encode_batch([text])[0]


def num_threads() -> int:
  """How many threads encode: the machine's, and one where TOKENIZERS_PARALLELISM=false, as for Hugging Face's library."""
  return 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else min(os.cpu_count() or 1, 16)


def encode_in_groups(
  texts: Sequence[str],
  cut: Callable[[str], Iterable[str]],
  encode: Callable[[list[str]], Iterable[np.ndarray]],
) -> list[np.ndarray]:
  """Encodes blocks of the texts, about `GROUP_CHARS` characters at a time, and joins what belongs together.

  Args:
    texts: The texts.
    cut: Divides a text into one block or more where its ids divide too.
    encode: Encodes blocks, each to int32 [num_tokens].

  Returns:
    For each text its int32 ids, shape [num_tokens].
  """
  ids: list[list[np.ndarray]] = [[] for _ in texts]
  for group in _groups(texts, cut):
    for (index, _), block_ids in zip(group, encode([block for _, block in group])):
      ids[index].append(block_ids)
  return [blocks[0] if len(blocks) == 1 else np.concatenate(blocks) for blocks in ids]


def _groups(texts: Sequence[str], cut: Callable[[str], Iterable[str]]) -> Iterator[list[tuple[int, str]]]:
  """Blocks of the texts with the index of their text, about `GROUP_CHARS` characters at a time."""
  group, size = [], 0
  for index, text in enumerate(texts):
    for block in cut(text):
      group.append((index, block))
      size += len(block)
      if size >= GROUP_CHARS:
        yield group
        group, size = [], 0
  if group:
    yield group
