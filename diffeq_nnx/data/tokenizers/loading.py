"""From what `data.tokenizer` says to a tokenizer: `bytes`, or the path of a file or a directory."""

import os

from diffeq_nnx.data.tokenizers import marks, vocabularies
from diffeq_nnx.data.tokenizers.base import END_OF_TEXT, Tokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer
from diffeq_nnx.data.tokenizers.byte_values import ByteTokenizer
from diffeq_nnx.data.tokenizers.files import read_bytes
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer
from diffeq_nnx.data.tokenizers.vocabularies import Vocabulary
from diffeq_nnx.errors import UserError

_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # the second as OpenAI named GPT-2's


def load(name: str, *, begin_mark: bool | None = None, key: str = "data.tokenizer") -> Tokenizer:
  """Makes the tokenizer that a name or path stands for.

  The marks are those that the files name: a sentencepiece model itself, the post-processor of a
  `tokenizer.json`, and beside either `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and
  `generation_config.json`. All of them must agree. Where none names an end mark, `<|endoftext|>` is it.

  Args:
    name: `bytes`, or a path (`~` expands): a sentencepiece model; a `tokenizer.json`; or a directory with
      `tokenizer.json`, with `vocab.json` and `merges.txt` (or `encoder.json` and `vocab.bpe`), or with
      `tokenizer.model`.
    begin_mark: Whether documents begin with the begin mark; None: as the files say.
    key: The configuration key that errors name.

  Returns:
    A tokenizer that gives every text back as it was.

  Raises:
    UserError: For files that can't be read or used, that disagree or lose text, and for marks that no file
      names.
  """
  label, path = f"{key}={name}", os.path.expanduser(name)
  if name == "bytes":
    if begin_mark:
      raise UserError("data.begin_mark=True: data.tokenizer=bytes has no begin mark; set it to None or False")
    return ByteTokenizer()
  found = _in_directory(path, label) if os.path.isdir(path) else (path,)
  beside = marks.beside(os.path.dirname(found[0]), label)
  if len(found) == 2:
    return _byte_pairs(vocabularies.from_pair_of_files(*found, label), beside, begin_mark, label)
  content = read_bytes(found[0], label)
  if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
    vocabulary = vocabularies.from_tokenizer_json(content, found[0], label)
    _check_pair_beside(vocabulary, os.path.dirname(found[0]), label)
    return _byte_pairs(vocabulary, beside, begin_mark, label)
  return SentencePieceTokenizer(content, begin_mark=begin_mark, beside=beside, label=label)


def _byte_pairs(vocabulary: Vocabulary, beside: marks.Said, begin_mark: bool | None, label: str) -> Tokenizer:
  eos_id, bos_id = marks.resolve(
    vocabulary.said + beside, vocabulary.ids.get, vocabulary.size, begin_mark, label, END_OF_TEXT
  )
  tokenizer = BytePairTokenizer(vocabulary, eos_id, bos_id, label=label)
  if tokenizer.vocab_size == ByteTokenizer.vocab_size and tokenizer.hash == ByteTokenizer().hash:
    return ByteTokenizer()  # its own file, which needs no merging
  return tokenizer


def _in_directory(directory: str, label: str) -> tuple[str, ...]:
  """The files in a directory that make its tokenizer: one, or a vocabulary and its merges."""
  try:
    names = set(os.listdir(directory))
  except OSError as error:
    raise UserError(f"{label}: can't be read ({error.strerror}); make the directory readable") from error
  if {"tokenizer.json", "tokenizer.model"} <= names:
    raise UserError(
      f"{label}: holds tokenizer.json and tokenizer.model; name the one to use, for example "
      f"{os.path.join(directory, 'tokenizer.model')}"
    )
  for name in ("tokenizer.json", "tokenizer.model"):
    if name in names:
      return (os.path.join(directory, name),)
  pair = _pair_in(names, label)
  if not pair:
    raise UserError(
      f"{label}: the directory holds no tokenizer; it must hold tokenizer.json, vocab.json and merges.txt, "
      "or tokenizer.model"
    )
  if "added_tokens.json" in names:
    raise UserError(
      f"{label}: holds added_tokens.json, which vocab.json lacks; give the model's tokenizer.json"
    )
  return tuple(os.path.join(directory, name) for name in pair)


def _pair_in(names: set[str], label: str) -> tuple[str, str] | None:
  """Those of a vocabulary and its merges among the names in a directory, if it holds them."""
  pairs = [pair for pair in _PAIRS if names & set(pair)]
  for pair in pairs:
    for name, other in (pair, pair[::-1]):
      if name not in names:
        raise UserError(f"{label}: holds {other} and no {name}; give both, as they were published together")
  if len(pairs) == 2:
    raise UserError(
      f"{label}: holds vocab.json and encoder.json, two vocabularies; remove one with its merges"
    )
  return pairs[0] if pairs else None


def _check_pair_beside(vocabulary: Vocabulary, directory: str, label: str) -> None:
  """Sees that a vocabulary and merges beside a `tokenizer.json` are the same as in it."""
  pair = next(
    (pair for pair in _PAIRS if all(os.path.exists(os.path.join(directory, name)) for name in pair)), None
  )
  if pair is None:
    return
  other = vocabularies.from_pair_of_files(*(os.path.join(directory, name) for name in pair), label)
  same = all(vocabulary.ids.get(piece) == number for piece, number in other.pieces.items())
  if not same or other.merges != vocabulary.merges:
    what = pair[1] if same else pair[0]
    raise UserError(
      f"{label}: tokenizer.json and {what} beside it disagree; remove those that are not the model's"
    )
