"""The tokenizer without a vocabulary: an id is a byte of the UTF-8 text, 256 the end of a document."""

from collections.abc import Iterable, Sequence

import numpy as np

from diffeq_nnx.data.tokenizers import base, vocabularies
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer
from diffeq_nnx.data.tokenizers.marks import Said


class ByteTokenizer(base.Tokenizer):
  """257 ids: the 256 bytes and the end mark. Kept as the `tokenizer.json` of a vocabulary without merges."""

  vocab_size, eos_id, bos_id, file_name = 257, 256, None, "tokenizer.json"

  def __init__(self):
    """Makes the tokenizer."""
    pieces = {char: byte for char, byte in sorted(vocabularies.ALPHABET.items(), key=lambda item: item[1])}
    pieces[base.END_OF_TEXT] = self.eos_id
    vocabulary = vocabularies.Vocabulary(pieces, [], [], vocabularies.BYTE_LEVEL, False, pieces, Said())
    self.model_bytes = BytePairTokenizer(vocabulary, self.eos_id, self.bos_id).model_bytes

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The UTF-8 bytes of many texts.

    Returns:
      For each text its int32 ids, shape [num_bytes].

    Raises:
      UnicodeEncodeError: If a text holds a lone surrogate.
    """
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text.

    Args:
      ids: Token ids; the end mark decodes to nothing, numbers that are no id and bytes that aren't UTF-8 to
        U+FFFD.
    """
    known = (
      i if 0 <= i < 256 else 255 for i in map(int, ids) if i != self.eos_id
    )  # no UTF-8 has the byte 255
    return bytes(known).decode(errors="replace")
