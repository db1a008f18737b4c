"""The interface of every tokenizer."""

import abc
from collections.abc import Iterable, Sequence
import dataclasses
import hashlib
import itertools

import numpy as np

from diffeq_nnx.errors import UserError

END_OF_TEXT = "<|endoftext|>"  # the end mark of tokenizers trained here, and GPT-2's
GROUP_CHARS = 1 << 20  # encoded at once, which bounds the memory of Python's lists of integers


@dataclasses.dataclass(frozen=True)
class Marks:
  """The ids of marks."""

  eos_id: int  # the end mark, which follows each document
  bos_id: int | None = None  # the begin mark, which precedes each document; None if documents begin without one
  more_end_ids: tuple[int, ...] = ()  # other tokens at which a generated text ends, as that of a chat's turn

  @property
  def ids(self) -> set[int]:
    """The marks around a document, whose names in a text are ordinary text."""
    return {number for number in (self.eos_id, self.bos_id) if number is not None}


class UnknownByte(UserError):
  """A text, at the place `index` among those encoded together, holds a byte for which a vocabulary has no piece."""

  def __init__(self, byte: int, text: str, index: int):
    at, char = text.encode().index(byte), next(char for char in text if byte in char.encode())
    place = f"byte {at} of the text, in the character {char!a}"
    super().__init__(f"the tokenizer has no piece for the byte 0x{byte:02X} ({place})")
    self.index = index


class OrdinaryMark(UserError):
  """A mark, or another special token, is a piece that text can give."""

  def __init__(self, name: str):
    problem = f"the mark {name!r} is also an ordinary piece, which text can give"
    super().__init__(f"{problem}; name another token, or give the vocabulary that the mark belongs to")


class Tokenizer(abc.ABC):
  """Text to ids and back: `decode(encode(text)) == text` for every valid Unicode text if the tokenizer is lossless.

  Its text normalization (Unicode forms, merged spaces, a leading space) is then switched off. Other tokenizers read
  text as they were trained to. The name of a begin or end mark in a text ("<|endoftext|>", "<s>") is ordinary text:
  encoding never gives a mark's id. A document is stored as `bos_id` (if there is one), its text's ids and `eos_id`.
  """

  eos_id: int  # as in `Marks`, as are the next two
  bos_id: int | None
  more_end_ids: tuple[int, ...] = ()
  added_ids: frozenset[int] = frozenset()  # of tokens that were added to the vocabulary
  vocab_size: int  # number of ids, which run from 0 to vocab_size - 1
  file_name: str  # the tokenizer's file in a run directory
  model_bytes: bytes  # the content of that file, which `load` reads
  lossless: bool = True
  chat_template: str | None = None  # a Jinja template (see `chat`), which holds the names of the marks that it uses
  leading: str = ""  # what decoding drops at the beginning of a text: the space that encoding put there

  @property
  def end_ids(self) -> tuple[int, ...]:
    """The tokens at which a generated text ends; the first is the end mark of documents."""
    return (self.eos_id, *self.more_end_ids)

  @property
  def hash(self) -> str:
    """The SHA-256, in hex, of everything that decides ids, marks included."""
    return hashlib.sha256(self.model_bytes).hexdigest()

  @abc.abstractmethod
  def name_token(self, number: int) -> str:
    """Returns the name of a token, as vocabularies have it."""

  def hash_chat_template(self) -> str | None:
    """The SHA-256 of the chat template, in hex, or None if there is none."""
    return None if self.chat_template is None else hashlib.sha256(self.chat_template.encode()).hexdigest()

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids: marks to nothing, other numbers to a replacement character, bytes that aren't UTF-8 to U+FFFD."""
    return self._decode(ids, within=False)

  def decode_within(self, ids: Iterable[int]) -> str:
    """Decodes ids that follow others in a text. Unlike `decode` it keeps a space at the beginning."""
    return self._decode(ids, within=True)

  @abc.abstractmethod
  def _decode(self, ids: Iterable[int], within: bool) -> str:
    """Decodes ids, with the space at the beginning if they are `within` a text."""

  def _divide(self, text: str) -> Iterable[str]:
    """Divides a text into blocks whose ids, joined, are the text's."""
    return [text]

  @abc.abstractmethod
  def _encode_blocks(self, blocks: list[str]) -> Iterable[np.ndarray]:
    """Encodes blocks, each to int32 ids, shape [num_tokens]."""

  @abc.abstractmethod
  def encode_spans(self, text: str, rendered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a text, and tells which characters each token stands for.

    If the text is `rendered`, a chat template made it: then the names of all special tokens in it, also those of marks,
    are these tokens. Raises as `encode_batch`.

    Returns:
      The ids, int32 [num_tokens], and the first character of each token and its last plus 1, int64 [num_tokens, 2].
    """

  def encode_rendered(self, text: str) -> np.ndarray:
    """Encodes a text that a chat template made, in which names of special tokens are these tokens; see `encode`."""
    return self.encode_spans(text, rendered=True)[0]

  def encode(self, text: str) -> np.ndarray:
    """Encodes one text as `encode_batch` does."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts, each to its int32 ids, [num_tokens], without any mark.

    It uses several threads, on which the result doesn't depend.

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
      UnknownByte: If a text holds a byte without a piece, and no unknown token stands for it.
    """
    for text in texts:
      text.encode()  # the libraries' own complaints about a lone surrogate say nothing
    ids: list[list[np.ndarray]] = [[] for _ in texts]
    blocks = [(index, block) for index, text in enumerate(texts) for block in self._divide(text)]
    starts = itertools.accumulate((len(block) for _, block in blocks), initial=0)
    for _, group in itertools.groupby(zip(starts, blocks), key=lambda item: item[0] // GROUP_CHARS):
      indices, group_blocks = zip(*(item for _, item in group))
      for index, block_ids in zip(indices, self._encode_blocks(list(group_blocks))):
        ids[index].append(block_ids)
    return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in ids]
