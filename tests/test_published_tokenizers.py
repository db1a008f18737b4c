"""Tokenizers as they were published: the ids of the library that they were made for, kept by a run's one file."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers as huggingface

from diffeq_nnx import data
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.tokenizers import ByteFallbackTokenizer, SentencePieceTokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import ALPHABET, BYTE_LEVEL
from diffeq_nnx.training.loop import train
from tests.conftest import run_config, told
from tests.test_data import config_of, prose, write_jsonl
from tests.test_tokenizer import (
  BEGIN,
  END,
  added_token,
  pair_of_files,
  random_texts,
  reloaded,
  sentencepiece_model,
  spec_of,
  template,
  write,
)

TEXTS = ["", "Hello world", " lead", "  two  spaces ", "a\nb\n\n  c\r\n", "\n", "the cat and a dog sat on mat " * 60]
TEXTS += ["tab\tand\u00a0no-break \ufb01 e\u0301", "\u00e9t\u00e9 \u5b57 \U0001f642 \u2581"]


# vocabularies without pieces for some bytes

LACKING = (0x04, 0x21, 0xC0, 0xF1, 0xFF)


def lacking(**changes):
  """A byte-level tokenizer.json without pieces for these bytes, nor merges."""
  spec = spec_of(**changes)
  chars = {char for char, byte in ALPHABET.items() if byte in LACKING}
  kept = sorted(set(spec["model"]["vocab"]) - chars - {END, BEGIN})
  kept = [piece for piece in kept if len(piece) == 1]
  vocab = {piece: number for number, piece in enumerate([END, BEGIN, "<unk>", *kept])}
  spec["model"] |= {"vocab": vocab, "merges": []}
  spec["added_tokens"] = [added_token(number, name, special=True) for name, number in list(vocab.items())[:3]]
  return spec


def test_a_byte_without_a_piece_is_named_when_a_text_holds_it(tmp_path):
  tokenizer = data.load_tokenizer(str(write(tmp_path / "given", tokenizer__json=lacking())))
  assert tokenizer.lossless
  for one in (tokenizer, reloaded(tokenizer, tmp_path)):
    with pytest.raises(data.UnknownByte, match="no piece for the byte 0x21 .byte 0 of the text") as found:
      one.encode_batch(["", "", "!2"])
    assert found.value.index == 2
  assert tokenizer.decode(tokenizer.encode("caf\u00e9 \u5b57 no mark")) == "caf\u00e9 \u5b57 no mark"
  message = told(lambda: tokenizer.encode("\u5b57 \U00041234"))
  assert "the byte 0xF1 (byte 4 of the text, in the character '\\U00041234')" in message


def test_such_bytes_become_the_unknown_token_where_the_config_says_so(tmp_path):
  """Several in a row are one, as this vocabulary says."""
  files = {"tokenizer__json": lacking(model__fuse_unk=True), "tokenizer_config__json": {"unk_token": "<unk>"}}
  tokenizer = data.load_tokenizer(str(write(tmp_path / "given", **files)), DataConfig(unknown_bytes="unknown"))
  bare = huggingface.Tokenizer.from_str(json.dumps(lacking(model__fuse_unk=True, model__unk_token="<unk>")))
  bare.encode_special_tokens = True
  assert not tokenizer.lossless
  for one in (tokenizer, reloaded(tokenizer, tmp_path)):
    for text in [*TEXTS, "no! <unk>!!", "\U00041234!! \x04", *random_texts(100)]:
      assert one.encode(text).tolist() == bare.encode(text, add_special_tokens=False).ids
    assert one.decode(one.encode("no!")) == "no\ufffd" and one.decode([one.eos_id]) == ""
  plain = data.load_tokenizer(str(tmp_path / "given"))
  assert plain.hash != tokenizer.hash
  assert plain.hash == data.load_tokenizer(str(tmp_path / "given"), DataConfig(unknown_bytes="error")).hash


def test_an_unknown_token_must_exist_and_be_no_mark(tmp_path):
  said = functools.partial(write, tmp_path / "given", tokenizer__json=lacking())
  load = functools.partial(data.load_tokenizer, str(tmp_path / "given"), DataConfig(unknown_bytes="unknown"))
  said()
  assert "no file names an unk_token; set data.unknown_bytes=error" in told(load)
  said(tokenizer_config__json={"unk_token": END})
  assert f"the unknown token '{END}' is also a mark" in told(load)
  said(tokenizer_config__json={"unk_token": {"content": "<unk>"}})
  assert load().encode("!").tolist() == [2]


def test_preparation_names_the_document_and_the_byte_and_training_refuses_a_tokenizer_that_changes_text(tmp_path):
  folder = write(tmp_path / "given", tokenizer__json=lacking(model__unk_token="<unk>"))
  write_jsonl(tmp_path / "a.jsonl", prose(3))
  write_jsonl(tmp_path / "b.jsonl", [*prose(20), "what? that!", "more"])
  source = f"jsonl:{tmp_path}/*.jsonl"
  config = config_of(tmp_path, source=source, validation=source, tokenizer=str(folder))
  message = told(lambda: data.load(config, 500, seed=0))
  assert f"={source}: {tmp_path}/b.jsonl, record 21: the tokenizer has no piece for the byte 0x21 (byte 10 " in message
  assert "set data.unknown_bytes=unknown" in message
  config = dataclasses.replace(config, unknown_bytes="unknown")
  assert data.load(config, 500, seed=0).validation.tokens[:].tolist().count(2) == 1
  config = dataclasses.replace(run_config(tmp_path, steps=1), data=config)
  message = told(lambda: train(config, str(tmp_path / "run")))
  assert "which training from scratch requires" in message and not (tmp_path / "run" / "run.json").exists()


# marks


@pytest.mark.parametrize("begins", [None, 1])
def test_where_no_file_says_so_the_post_processor_decides_about_the_begin_mark(begins, tmp_path):
  processor = {"type": "Sequence", "processors": [BYTE_LEVEL, template([BEGIN], [])]} if begins else BYTE_LEVEL
  said = {"bos_token": BEGIN, "eos_token": END, "unk_token": END}
  folder = str(write(tmp_path, tokenizer__json=spec_of(post_processor=processor), tokenizer_config__json=said))
  assert data.load_tokenizer(folder).bos_id == begins
  assert data.load_tokenizer(folder, DataConfig(begin_mark=True)).bos_id == 1
  if begins is None:
    write(tmp_path, tokenizer_config__json=said | {"add_bos_token": True})
    assert data.load_tokenizer(folder).bos_id == 1


@pytest.mark.parametrize(
  "said,expected,kind",  # a sentencepiece model's own end mark is the first, here 0
  [
    ({"generation_config": [7, 0, 1, 7]}, (0, 7, 1), "byte pairs"),
    ({"tokenizer_config": BEGIN, "generation_config": [0, 1]}, (1, 0), "pair of files"),
    ({"config": [0, 1], "generation_config": 1}, (1,), "pair of files"),
    ({"config": [1, 0], "generation_config": [0, 5]}, (0, 5), "sentencepiece"),
    ({"tokenizer_config": END, "config": 1}, (0,), "pair of files"),  # published ids may be of another tokenizer
  ],
)
def test_several_end_marks(said, expected, kind, tmp_path):
  files = {"byte pairs": {"tokenizer__json": spec_of()}, "pair of files": pair_of_files()}.get(kind)
  if files is None:
    files = {"tokenizer__model": model(unk_id=2, eos_id=0, bos_id=1, eos_piece=END, bos_piece=BEGIN)}
  names = {"tokenizer_config": "eos_token"}
  content = {f"{file}__json": {names.get(file, "eos_token_id"): value} for file, value in said.items()}
  folder = str(write(tmp_path / "given", **files, **content))
  tokenizer = data.load_tokenizer(folder)
  assert tokenizer.end_ids == expected and reloaded(tokenizer, tmp_path).end_ids == expected
  assert data.load_tokenizer(folder, DataConfig(end_token=BEGIN)).end_ids[0] == 1
  assert tokenizer.decode(tokenizer.encode("two words\n")) == "two words\n"


# sentencepiece models as they were trained


@functools.cache
def model(**changes):
  options = dict(vocab_size=320, hard_vocab_limit=False, model_type="bpe")
  options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
  texts = iter([*prose(50), "two  spaces   and\ttabs"])
  return sentencepiece_model(**{"sentence_iterator": texts, **options, **changes})


MODELS = {
  "no prefix": {"add_dummy_prefix": False},
  "normalized": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
  "unigram": {"model_type": "unigram", "vocab_size": 300},
  "user defined": {"user_defined_symbols": '<|x|>,"\n\n"', "control_symbols": "<c>"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_gives_the_ids_of_the_sentencepiece_library(name, tmp_path, monkeypatch):
  trained = model(**MODELS[name])
  theirs = sentencepiece.SentencePieceProcessor(model_proto=trained)
  tokenizer = data.load_tokenizer(str(write(tmp_path / "given", tokenizer__model=trained)))
  monkeypatch.setattr("diffeq_nnx.data.tokenizers.base.GROUP_CHARS", 100)  # no text is cut
  again = reloaded(tokenizer, tmp_path)
  for text in [*TEXTS, "<|x|>a <|x|> b\n\n\nc <c> </s>", *prose(5), *random_texts(100)]:
    ids, found = theirs.encode(text), tokenizer.encode(text)
    assert found.tolist() == again.encode(text).tolist() == ids and found.dtype == np.int32
    assert tokenizer.decode(ids) == theirs.decode(ids)
  assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.lossless) == (2, 1, False)
  assert tokenizer.leading == ("" if name == "no prefix" else " ")
  ids = theirs.encode("two words")
  assert tokenizer.decode_within(ids) == ("" if name == "no prefix" else " ") + "two words"


def test_a_run_from_scratch_keeps_the_use_without_loss_as_does_a_model_that_was_trained_here(tmp_path):
  given, own = str(write(tmp_path / "given", tokenizer__model=model())), data.train(prose(50), 300)
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(20)), tokenizer=given)
  tokenizer = data.load(config, 500, seed=0).tokenizer
  assert tokenizer.lossless and tokenizer.model_bytes == model()  # as in runs of earlier versions
  assert reloaded(tokenizer, tmp_path / "run").hash == SentencePieceTokenizer(model()).hash
  assert data.load_tokenizer(given).hash != tokenizer.hash
  tokenizer = data.load_tokenizer(str(write(tmp_path / "own", tokenizer__model=own)))
  assert tokenizer.lossless and tokenizer.model_bytes == own


# tokens that were added beside a sentencepiece model

START, STOP = "<|im_start|>", "<|im_end|>"


def test_added_tokens_are_found_in_a_text_and_marks_are_not(tmp_path):
  """Also without loss; tests/test_export.py compares such a tokenizer as it was trained with transformers'."""
  trained = model()
  N = sentencepiece.SentencePieceProcessor(model_proto=trained).vocab_size()
  decoder = {"1": {"content": "<s>"}, str(N + 1): {"content": STOP}, str(N): {"content": START, "special": True}}
  said = {"eos_token": STOP, "bos_token": "<s>", "add_bos_token": True, "added_tokens_decoder": decoder}
  given = write(tmp_path / "given", tokenizer__model=trained, tokenizer_config__json=said)
  tokenizer = data.load_tokenizer(str(given), lossless=True)
  assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (N + 1, 1, N + 2)
  rest = lambda part: tokenizer.encode(part).tolist()
  for one in (tokenizer, reloaded(tokenizer, tmp_path)):
    assert one.encode(START).tolist() == [N] and N + 1 not in one.encode(STOP)
    text = f"the cat{START}a dog\n{START} on{STOP}"
    before, middle, after = map(rest, text.split(START))
    assert one.encode(text).tolist() == [*before, N, *middle, N, *after]
    assert one.decode(one.encode(text)) == text and one.decode([N, N + 1]) == START


def test_added_tokens_beside_a_tokenizer_json_must_be_in_it(tmp_path):
  spec = spec_of(added_tokens=[*spec_of()["added_tokens"], added_token(300, START)])
  said = {"added_tokens_decoder": {"300": {"content": START, "rstrip": True}}}
  given = {"tokenizer_config__json": said, "added_tokens__json": {START: 300}}
  folder = write(tmp_path, tokenizer__json=spec, **given)
  assert data.load_tokenizer(str(folder)).encode(START).tolist() == [300]
  write(tmp_path, tokenizer__json=spec_of(), tokenizer_config__json={})
  assert f"the files beside the vocabulary add '{START}'" in told(lambda: data.load_tokenizer(str(folder)))


# tokenizer.json with byte fallback


def fallback(**changes):
  """A tokenizer.json as Llama 2's, of the same vocabulary as a sentencepiece model's."""
  from diffeq_nnx.exporting import tokenizer_files

  spec = tokenizer_files._from_sentencepiece(SentencePieceTokenizer(model(), as_trained=True))
  prepend = [{"type": "Prepend", "prepend": "\u2581"}, spec["normalizer"]]
  spec |= {"normalizer": {"type": "Sequence", "normalizers": prepend}, "pre_tokenizer": None}
  spec["added_tokens"].append(added_token(len(spec["model"]["vocab"]), START, special=True))
  return spec | changes


def test_a_tokenizer_json_beside_a_sentencepiece_model_decides(tmp_path):
  spec = fallback(post_processor=json.loads(json.dumps(template([BEGIN], [])).replace(BEGIN, "<s>")))
  files = {"tokenizer__json": spec, "tokenizer__model": model(), "generation_config__json": {"eos_token_id": [2, 7]}}
  said = {"eos_token": "</s>", "bos_token": "<s>"}
  tokenizer = data.load_tokenizer(str(write(tmp_path / "given", **files, tokenizer_config__json=said)))
  assert isinstance(tokenizer, ByteFallbackTokenizer) and not tokenizer.lossless and tokenizer.leading == " "
  assert (tokenizer.end_ids, tokenizer.bos_id) == ((2, 7), 1)
  bare = huggingface.Tokenizer.from_str(json.dumps(spec))
  again = reloaded(tokenizer, tmp_path)
  for text in [*TEXTS, f"{START}a {START} b", *random_texts(100)]:
    ids = bare.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == again.encode(text).tolist() == ids
    assert tokenizer.decode(ids) == bare.decode(ids, skip_special_tokens=False)
  assert not {1, 2} & set(tokenizer.encode("<s> and </s>").tolist())
  assert tokenizer.decode([1, 2]) == "" and "\ufffd" in tokenizer.decode([10**6, -1])
  with pytest.raises(UnicodeEncodeError):
    tokenizer.encode("\ud800")


def test_a_fallback_vocabulary_needs_all_bytes_and_marks_that_no_text_gives(tmp_path):
  spec = fallback()
  vocab = {("\u0413" if piece == "<0x41>" else piece): number for piece, number in spec["model"]["vocab"].items()}
  load = lambda **files: data.load_tokenizer(str(write(tmp_path, **files)))
  assert "no piece <0x41>" in told(lambda: load(tokenizer__json=spec | {"model": spec["model"] | {"vocab": vocab}}))
  said = {"tokenizer_config__json": {"eos_token": "t"}}
  assert "the mark 't' is also an ordinary piece" in told(lambda: load(tokenizer__json=spec, **said))
