"""Writes the tokenizer of an exported model for transformers' AutoTokenizer.

Byte-pair tokenizers are saved as tokenizer.json already. A sentencepiece model is converted to one, since transformers'
own conversion may give other ids; its tokenizer.model is written beside it.
"""

import json
import os
from typing import Any

from diffeq_nnx import files
from diffeq_nnx.data.chat import template_of
from diffeq_nnx.data.tokenizers import CHAT_TEMPLATE, BytePairTokenizer, SentencePieceTokenizer, Tokenizer, specs
from diffeq_nnx.data.tokenizers.byte_fallback import EXPORTED, SPACE, WITHIN
from diffeq_nnx.exporting import folders
from diffeq_nnx.inference.generation import find_stop_ids

_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_PROBES = (
  "a b  c\n\n d\u00e9 \u5b57\U0001f642\tx\r\n",
  "\n",
  " ",
  "The quick brown fox: 12,345.67 (a)!",
  "  two\n three ",
  " one",
  "",
)


def mark_ids(tokenizer: Tokenizer | None) -> dict[str, int | list[int] | None]:
  """The marks for config.json and generation_config.json; None also where documents have no begin mark.

  Several end marks are a list, as transformers reads it.
  """
  if tokenizer is None:
    return {"bos_token_id": None, "eos_token_id": None}
  ends = tokenizer.end_ids
  return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}


def list_ends(tokenizer: Tokenizer | None) -> dict[str, list[int]]:
  """The end marks for generation_config.json where the token that ends an answer of a chat is one more."""
  if tokenizer is None or tokenizer.chat_template is None:
    return {}
  ends = find_stop_ids(tokenizer, template_of(tokenizer).end_of_turn).difference(tokenizer.end_ids)
  return {"eos_token_id": [*tokenizer.end_ids, *ends]} if ends else {}


def write(tokenizer: Tokenizer, folder: str, max_length: int) -> list[str]:
  """Writes tokenizer_config.json, tokenizer.json, the chat template, and tokenizer.model of a sentencepiece model.

  AutoTokenizer then writes the begin mark before a text, where there is one, and no end mark: texts are prompts.

  Returns:
    Sentences that say where AutoTokenizer gives other ids than ours.
  """
  notes: list[str] = []
  settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
  if isinstance(tokenizer, SentencePieceTokenizer):
    with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
      file.write(tokenizer.published_bytes)
    spec = _from_sentencepiece(tokenizer)
    if tokenizer.added:
      settings["added_tokens_decoder"] = {str(n): _describe(tokenizer, n) for n in tokenizer.added.values()}
    if spec is None:
      settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": tokenizer.legacy}
      notes.append(
        "tokenizer: a sentencepiece model that tokenizer.json can't represent (unigram, with user-defined pieces, or "
        "with a normalization of text); the folder has tokenizer.model only, and AutoTokenizer may give other ids"
      )
    elif tokenizer.lossless:
      notes.append("tokenizer: AutoTokenizer gives our ids but for texts with U+2581 and lines above 1024 characters")
  else:
    spec = json.loads(tokenizer.model_bytes)
    noted = spec["model"].pop(specs.OURS, {})  # generation_config.json has the end marks
    if isinstance(tokenizer, BytePairTokenizer) and tokenizer.missing and "unknown_bytes" not in noted:
      notes.append("tokenizer: bytes that the vocabulary lacks are an error here, and left out by AutoTokenizer")
  if tokenizer.chat_template is not None:
    files.write(os.path.join(folder, CHAT_TEMPLATE), tokenizer.chat_template.encode())
  if not isinstance(tokenizer, BytePairTokenizer):
    settings["add_prefix_space"] = bool(tokenizer.leading)  # which llama.cpp otherwise takes for true
  marks, begin = {"eos_token": tokenizer.name_token(tokenizer.eos_id)}, {}
  if tokenizer.bos_id is not None:
    marks["bos_token"] = tokenizer.name_token(tokenizer.bos_id)
    begin = {marks["bos_token"]: tokenizer.bos_id}
  if spec is not None:
    processor = specs.make_post_processor(begin, {})
    processor["pair"] = [*processor["single"], processor["pair"][1]]
    folders.write_json(folder, "tokenizer.json", {**spec, "post_processor": processor})
  folders.write_json(
    folder,
    "tokenizer_config.json",
    {
      **settings,
      **marks,
      "add_bos_token": tokenizer.bos_id is not None,
      "add_eos_token": False,
      "clean_up_tokenization_spaces": False,
      "model_max_length": max_length,
      "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids otherwise
    },
  )
  return notes + ["tokenizer: AutoTokenizer reads the names of marks in a text as marks, our tokenizer as text"]


def _describe(tokenizer: SentencePieceTokenizer, number: int, special: bool = False) -> dict[str, Any]:
  """A token as tokenizer_config.json has it: special if it is a mark, or this says so."""
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
  special = special or number in (tokenizer.eos_id, tokenizer.bos_id)
  return {"content": tokenizer.name_token(number), **flags, "special": special}


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any] | None:
  """A sentencepiece model as tokenizer.json, or None where that can't be."""
  from sentencepiece import sentencepiece_model_pb2  # which needs protobuf

  messages: Any = sentencepiece_model_pb2  # whose classes are made when it is imported
  proto = messages.ModelProto.FromString(tokenizer.model_bytes)
  kinds = messages.ModelProto.SentencePiece
  special = [number for number, piece in enumerate(proto.pieces) if piece.type in (kinds.UNKNOWN, kinds.CONTROL)]
  normal = proto.normalizer_spec
  odd = any(piece.type in (kinds.USER_DEFINED, kinds.UNUSED) for piece in proto.pieces)
  odd |= not tokenizer.lossless and bool(normal.precompiled_charsmap or normal.remove_extra_whitespaces)
  if proto.trainer_spec.model_type != messages.TrainerSpec.BPE or odd:
    return None
  vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
  known = {
    piece.piece: (-piece.score, number) for number, piece in enumerate(proto.pieces) if piece.type == kinds.NORMAL
  }
  merges = []
  for piece, rank in known.items():  # sentencepiece joins any two pieces that make the piece of the highest score
    halves = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in known and piece[at:] in known]
    merges += [(rank, known[left][1], known[right][1], left, right) for left, right in halves]
  merges = [[left, right] for *_, left, right in sorted(merges)]
  unknown = proto.pieces[proto.trainer_spec.unk_id].piece
  steps = EXPORTED if tokenizer.lossless else _make_steps(normal.add_dummy_prefix, tokenizer.legacy)
  spec = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": number} | _describe(tokenizer, number, number in special)
      for number in (*special, *tokenizer.added.values())
    ],
    **steps,
    "decoder": WITHIN | {"decoders": WITHIN["decoders"] + ([_STRIP] if tokenizer.leading else [])},
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
  return spec if _agrees(spec, tokenizer) else None


def _make_steps(prefix: bool, legacy: bool) -> dict[str, Any]:
  """The steps of tokenizer.json for a sentencepiece model that changes text at most by a leading space.

  With `legacy` text after a special token gets that space too.
  """
  # Metaspace leaves the space out before a text that begins with one. The first of two therefore puts another character
  # there, at the text's beginning alone, which the second makes a space.
  replaced = ((" ", "never" if not prefix else "always" if legacy else "first"), (SPACE, "never"))
  steps = [
    {"type": "Metaspace", "replacement": char, "prepend_scheme": when, "split": False} for char, when in replaced
  ]
  return {"normalizer": EXPORTED["normalizer"], "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _agrees(spec: dict[str, Any], tokenizer: SentencePieceTokenizer) -> bool:
  """Whether the library gives our ids for a few texts."""
  encoder = specs.load(spec)
  names = [name for name, number in tokenizer.added.items() if number not in (tokenizer.eos_id, tokenizer.bos_id)]
  probes = [*_PROBES, *(text.format(name) for name in names for text in ("{}a", "a{} b", "a {0} {0}"))]
  return all(encoder.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).tolist() for text in probes)
