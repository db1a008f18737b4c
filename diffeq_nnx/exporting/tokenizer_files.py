"""Writes the tokenizer of an exported model for transformers' AutoTokenizer.

A byte-pair tokenizer is saved as tokenizer.json already. A sentencepiece model is converted to one, since transformers
would switch its text normalization on; its tokenizer.model is written beside it.
"""

import json
import os
from typing import Any

from diffeq_nnx.data.tokenizers import SentencePieceTokenizer, Tokenizer
from diffeq_nnx.exporting import folders

_SPACE = "\u2581"
_BPE = 2  # TrainerSpec.ModelType in sentencepiece
_PROBES = (
  "a b  c\n\n d\u00e9 \u5b57\U0001f642\tx\r\n",
  "\n",
  " ",
  "The quick brown fox: 12,345.67 (a)!",
  "  two\n three ",
)


def mark_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
  """The marks for config.json and generation_config.json; None also where documents have no begin mark."""
  return {
    "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
    "eos_token_id": None if tokenizer is None else tokenizer.eos_id,
  }


def write(tokenizer: Tokenizer, folder: str, max_length: int) -> list[str]:
  """Writes tokenizer_config.json, tokenizer.json and, of a sentencepiece model, tokenizer.model.

  AutoTokenizer then writes the begin mark before a text, where there is one, and no end mark: texts are prompts.

  Returns:
    Sentences that say where AutoTokenizer gives other ids than ours.
  """
  notes = []
  if isinstance(tokenizer, SentencePieceTokenizer):
    with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
      file.write(tokenizer.model_bytes)
    spec, names = _from_sentencepiece(tokenizer)
    if spec is None:
      notes.append(
        "tokenizer: a sentencepiece model that tokenizer.json can't represent (unigram, or with "
        "user-defined pieces); the folder has tokenizer.model only, and AutoTokenizer may give other ids"
      )
    else:
      notes.append("tokenizer: AutoTokenizer gives our ids but for texts with U+2581 and lines above 1024 characters")
  else:
    spec = json.loads(tokenizer.model_bytes)
    names = {token["id"]: token["content"] for token in spec["added_tokens"]}
  marks = {"eos_token": names[tokenizer.eos_id]}
  if tokenizer.bos_id is not None:
    marks["bos_token"] = names[tokenizer.bos_id]
  if spec is not None:
    folders.write_json(
      folder, "tokenizer.json", {**spec, "post_processor": _begin_mark(tokenizer, marks.get("bos_token"))}
    )
  folders.write_json(
    folder,
    "tokenizer_config.json",
    {
      "tokenizer_class": "PreTrainedTokenizerFast" if spec is not None else "LlamaTokenizer",
      **marks,
      "add_bos_token": tokenizer.bos_id is not None,
      "add_eos_token": False,
      "clean_up_tokenization_spaces": False,
      "model_max_length": max_length,
    },
  )
  return notes + ["tokenizer: AutoTokenizer reads the names of marks in a text as marks, our tokenizer as text"]


def _begin_mark(tokenizer: Tokenizer, name: str | None) -> dict[str, Any]:
  """The post-processor that writes the begin mark alone."""
  text, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
  begin = [] if name is None else [{"SpecialToken": {"id": name, "type_id": 0}}]
  special = {} if name is None else {name: {"id": name, "ids": [tokenizer.bos_id], "tokens": [name]}}
  return {
    "type": "TemplateProcessing",
    "single": [*begin, text],
    "pair": [*begin, text, second],
    "special_tokens": special,
  }


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[dict[str, Any] | None, dict[int, str]]:
  """A sentencepiece model as tokenizer.json, None where that can't be, and the names of its special pieces by id."""
  from sentencepiece import sentencepiece_model_pb2  # which needs protobuf

  proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model_bytes)
  kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
  special = {
    number: piece.piece for number, piece in enumerate(proto.pieces) if piece.type in (kinds.UNKNOWN, kinds.CONTROL)
  }
  odd = any(piece.type in (kinds.USER_DEFINED, kinds.UNUSED) for piece in proto.pieces)
  if proto.trainer_spec.model_type != _BPE or odd:
    return None, special
  vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
  normal = {
    piece.piece: (-piece.score, number) for number, piece in enumerate(proto.pieces) if piece.type == kinds.NORMAL
  }
  merges = []
  for piece, rank in normal.items():  # sentencepiece joins any two pieces that make the piece of the highest score
    halves = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in normal and piece[at:] in normal]
    merges += [(rank, normal[left][1], normal[right][1], left, right) for left, right in halves]
  merges = [[left, right] for *_, left, right in sorted(merges)]
  unknown = proto.pieces[proto.trainer_spec.unk_id].piece
  plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
  spec = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": number, "content": name, **plain, "special": True} for number, name in special.items()],
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    "pre_tokenizer": {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
    "decoder": {
      "type": "Sequence",
      "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
      ],
    },
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": unknown,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": True,
      "byte_fallback": True,
      "ignore_merges": False,
      "vocab": vocab,
      "merges": merges,
    },
  }
  return (spec if _agrees(spec, tokenizer) else None), special


def _agrees(spec: dict[str, Any], tokenizer: SentencePieceTokenizer) -> bool:
  """Whether the library gives our ids for a few texts."""
  import tokenizers

  encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
  return all(encoder.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).tolist() for text in _PROBES)
