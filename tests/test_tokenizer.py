"""Properties of tokenizers: no text is lost, no text gives a mark, ids are the libraries', each mark occurs once."""

import functools
import io
import json
import random

import numpy as np
import pytest
import sentencepiece
import tokenizers as huggingface

from diffeq_nnx import data
from diffeq_nnx.config import Config, DataConfig
from diffeq_nnx.data.tokenizers import SentencePieceTokenizer, base, byte_pairs
from diffeq_nnx.runs import workdir as workdir_lib
from tests.test_data import config_of, prose, told, write_jsonl

END, BEGIN = "<|endoftext|>", "<|begin|>"  # ids 0 and 1 of the vocabulary trained here
GPT4_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
  r"\s+(?!\S)|\s+"
)


def random_texts(count):
  rng = random.Random(0)
  common = "\u2581 \n\r\tabc.\u00e9e\u0301\U0001f642\0\u5b57\ufb01\u00a0<|>\u2028\ufeff\u2047\u0120\ufffd"
  for _ in range(count):
    rare = [chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(6)]
    yield "".join(rng.choice(common if rng.random() < 0.8 else rare) for _ in range(rng.randrange(40)))


SPECIAL_TEXTS = [END, "<s>", "</s>", "<unk>", "<0x0A>", f"a{END}b <s> {END}\n", BEGIN * 2, "\0<s>"]
EDGE_TEXTS = ["", "\n", "\u2581", " ", "  two  spaces ", "\r\n\r\n", "\t", "\0", "a\u2581b\n", *SPECIAL_TEXTS]
EDGE_TEXTS += ["x" * 5000, "long line of words " * 400, "no newline \u5b57" * 300, "\n" * 3000]


@functools.cache
def sentencepiece_model(**changes):
  """As a package trains it, unless the options say otherwise."""
  model, options = io.BytesIO(), dict(sentence_iterator=iter(prose(50)), vocab_size=290, byte_fallback=True)
  sentencepiece.SentencePieceTrainer.train(model_writer=model, **options | changes, minloglevel=2)
  return model.getvalue()


def train_pairs(texts, vocab_size, marks):
  """A byte-level byte-pair tokenizer of the library: the marks, 256 bytes, merges."""
  trained = huggingface.Tokenizer(huggingface.models.BPE())
  trained.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trained.decoder = huggingface.decoders.ByteLevel()
  options = dict(initial_alphabet=huggingface.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
  trainer = huggingface.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=marks, **options)
  trained.train_from_iterator(texts, trainer)
  return trained.to_str()


@functools.cache
def trained_pairs():
  """A tokenizer.json with the two marks and 42 merges."""
  return train_pairs(prose(200), 300, [END, BEGIN])


def spec_of(**changes):
  """The same as nested dicts, changed: `__` stands for a level."""
  spec = json.loads(trained_pairs())
  for key, value in changes.items():
    *parents, name = key.split("__")
    section = spec
    for parent in parents:
      section = section[parent]
    section[name] = value
  return spec


def write(directory, **files):
  """Writes files named like `tokenizer__json`; dicts and lists as JSON."""
  directory.mkdir(exist_ok=True, parents=True)
  for name, content in files.items():
    content = json.dumps(content) if isinstance(content, (dict, list)) else content
    content = content.encode() if isinstance(content, str) else content
    (directory / name.replace("__", ".")).write_bytes(content)
  return directory


def pair_of_files(**changes):
  """The trained vocabulary as vocab.json and merges.txt, with changes; None leaves a file out."""
  model = spec_of()["model"]
  lines = "".join(f"{left} {right}\n" for left, right in model["merges"])
  files = {"vocab__json": model["vocab"], "merges__txt": f"#version: 0.2\n{lines}"}
  return {name: content for name, content in (files | changes).items() if content is not None}


def added_token(number, content, **flags):
  """An added token of a tokenizer.json, ordinary text unless the flags say otherwise."""
  plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
  return {"id": number, "content": content} | plain | flags


def template(before, after):
  """A post-processor that puts these tokens around a text."""
  ids = {END: 0, BEGIN: 1}
  special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (*before, *after)}
  marks = [[{"SpecialToken": {"id": name, "type_id": 0}} for name in side] for side in (before, after)]
  single = [*marks[0], {"Sequence": {"id": "A", "type_id": 0}}, *marks[1]]
  return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def reloaded(tokenizer, folder):
  """The tokenizer that a run gives back which was started with this one."""
  workdir_lib.claim(str(folder), Config(), tokenizer, None)
  (folder / "config.json").write_text("{}")  # a file beside it changes nothing
  again = workdir_lib.tokenizer_of(str(folder), Config())
  for name in ("hash", "model_bytes", "vocab_size", "end_ids", "bos_id", "lossless", "leading"):
    assert getattr(again, name) == getattr(tokenizer, name)
  assert type(again) is type(tokenizer)
  return again


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
  """Every kind of tokenizer, by name."""
  folder = tmp_path_factory.mktemp("kinds")
  llama, folded = sentencepiece_model(model_type="bpe"), sentencepiece_model(normalization_rule_name="nfkc_cf")
  spaces = added_token(300, "  ", normalized=True)
  split = {"type": "Split", "pattern": {"Regex": GPT4_PATTERN}, "behavior": "Isolated", "invert": False}
  divided = {"type": "Sequence", "pretokenizers": [split, byte_pairs.BYTE_LEVEL | {"add_prefix_space": True}]}
  llama3 = spec_of(
    pre_tokenizer=divided,
    post_processor=template([BEGIN], []),
    model__ignore_merges=True,
    added_tokens=[*spec_of()["added_tokens"], spaces],
    normalizer={"type": "NFC"},
    truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
  )
  return {
    "trained": SentencePieceTokenizer(data.train(prose(50), 380)),
    "folded": SentencePieceTokenizer(folded),
    "llama": data.load_tokenizer(str(write(folder / "llama", tokenizer__model=llama)), lossless=True),
    "gpt2": data.load_tokenizer(str(write(folder / "gpt2", **pair_of_files()))),
    "json": data.load_tokenizer(str(write(folder / "json", tokenizer__json=trained_pairs()))),
    "llama3": data.load_tokenizer(str(write(folder / "llama3", tokenizer__json=llama3))),
    "bytes": data.load_tokenizer("bytes"),
  }


KINDS = {  # size, end mark, begin mark
  "trained": (380, 1, None),
  "folded": (290, 2, 1),
  "llama": (290, 2, 1),
  "gpt2": (300, 0, None),
  "json": (300, 0, None),
  "llama3": (301, 0, 1),
  "bytes": (257, 256, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_no_text_gives_a_mark_and_a_run_keeps_the_tokenizer_byte_for_byte(kinds, kind, tmp_path):
  """Odd ids decode to something; a lone surrogate is refused."""
  tokenizer = kinds[kind]
  assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == KINDS[kind]
  again = reloaded(tokenizer, tmp_path)
  assert (tmp_path / tokenizer.file_name).read_bytes() == tokenizer.model_bytes
  texts = [*EDGE_TEXTS, *random_texts(300)]
  special = {"folded": {0, 1, 2}, "llama": {0, 1, 2}, "gpt2": {0}, "bytes": {256}}.get(kind, {0, 1})
  for number, (text, ids) in enumerate(zip(texts, tokenizer.encode_batch(texts))):
    assert ids.dtype == np.int32 and ids.ndim == 1 and not special & set(ids.tolist())
    assert ids.max(initial=0) < tokenizer.vocab_size and tokenizer.decode(ids) == text
    if number < 100:
      np.testing.assert_array_equal(tokenizer.encode(text), ids)
      np.testing.assert_array_equal(again.encode(text), ids)
  odd = tokenizer.decode([tokenizer.vocab_size, -1])
  assert odd and not odd.strip("\ufffd\u2047 ") and tokenizer.decode([tokenizer.eos_id]) == ""
  with pytest.raises(UnicodeEncodeError):
    tokenizer.encode_batch(["fine", "\ud800"])


def test_ids_are_the_bare_librarys(kinds):
  """tests/test_chat.py compares those of GPT-2's kind with transformers'."""
  split = huggingface.pre_tokenizers.Split(huggingface.Regex(GPT4_PATTERN), "isolated")
  byte_level = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  bare = huggingface.Tokenizer.from_str(json.dumps(spec_of(model__ignore_merges=True)))
  bare.pre_tokenizer = huggingface.pre_tokenizers.Sequence([split, byte_level])
  bare.add_tokens(["  "])
  bare.encode_special_tokens = True
  tokenizer, texts = kinds["llama3"], [*EDGE_TEXTS, *random_texts(200), *prose(50)]
  for text, ids in zip(texts, tokenizer.encode_batch(texts)):
    assert ids.tolist() == bare.encode(text, add_special_tokens=False).ids
  saved = huggingface.Tokenizer.from_str(tokenizer.model_bytes.decode())  # others can read what is kept
  marked = saved.encode("the cat").ids
  assert marked == [tokenizer.bos_id, *tokenizer.encode("the cat").tolist(), tokenizer.eos_id]
  assert saved.decode(marked) == "the cat"


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "trained"])
def test_long_texts_have_the_ids_of_the_whole(kinds, kind, monkeypatch):
  """Those of sentencepiece, which may differ where it is cut, lose nothing, and are those of lines where it ends."""
  tokenizer, rng = kinds[kind], random.Random(1)
  text = "".join(rng.choice([" ", "\n", "  ", "\r\n", "ab", "7", "don't", "!", "\u5b57", "_"]) for _ in range(4000))
  whole = tokenizer.encode(text)
  monkeypatch.setattr(byte_pairs, "_BLOCK_CHARS", 30)
  monkeypatch.setattr(base, "GROUP_CHARS", 700)
  if kind == "trained":
    assert tokenizer.decode(tokenizer.encode(text)) == text
    lines = tokenizer.encode("a short line\n" * 500)
    np.testing.assert_array_equal(lines, np.tile(tokenizer.encode("a short line\n"), 500))
  else:
    np.testing.assert_array_equal(tokenizer.encode(text), whole)
    assert len(list(tokenizer._divide(text))) > 50


def test_a_vocabulary_whose_words_may_hold_spaces_is_never_cut(tmp_path, monkeypatch):
  """The first divides text at digits alone; the second has a token of two words."""
  undivided = spec_of(pre_tokenizer=byte_pairs.BYTE_LEVEL | {"use_regex": False})
  phrases = spec_of(added_tokens=[*spec_of()["added_tokens"], added_token(300, "a dog")])
  monkeypatch.setattr(byte_pairs, "_BLOCK_CHARS", 3)
  for name, spec in (("undivided", undivided), ("phrases", phrases)):
    tokenizer = data.load_tokenizer(str(write(tmp_path / name, tokenizer__json=spec)))
    assert list(tokenizer._divide("a dog and a cat")) == ["a dog and a cat"]
  assert 300 in tokenizer.encode("oh a dog ran") and tokenizer.decode([300]) == "a dog"


def test_training_is_deterministic_and_errors_name_key_value_and_a_bound_that_works(kinds):
  tokenizer = kinds["trained"]
  assert data.train(prose(50), 380) == tokenizer.model_bytes
  assert len(tokenizer.encode("the cat and a dog")) < 8  # of 17 characters
  assert "no text" in told(lambda: data.train([], 300))
  assert data.train([f"\u2585{text}" for text in prose(50)], 380) == tokenizer.model_bytes  # which sentencepiece skips
  for vocab_size, part in ((100_000, "at most"), (100, "at least"), (0, "from 512")):
    message = told(lambda: data.train(prose(20), vocab_size))
    assert message.startswith(f"model.vocab_size={vocab_size}:") and part in message
    if vocab_size:
      bound = int(message.rsplit(" ", 1)[1])
      assert SentencePieceTokenizer(data.train(prose(20), bound)).vocab_size == bound, part


def test_the_same_vocabulary_in_other_files_is_the_same(kinds, tmp_path):
  """OpenAI's names, and merges as strings; <|begin|> is no mark in them."""
  pairs = pair_of_files()
  openai = write(tmp_path / "openai", encoder__json=pairs["vocab__json"], vocab__bpe=pairs["merges__txt"])
  assert data.load_tokenizer(str(openai)).hash == kinds["gpt2"].hash
  joined = [" ".join(merge) for merge in spec_of()["model"]["merges"]]
  strings = write(tmp_path / "strings", tokenizer__json=spec_of(model__merges=joined), **pairs)
  assert data.load_tokenizer(str(strings)).hash == kinds["json"].hash


def test_hashes_follow_every_mark(kinds, tmp_path):
  loaded, begin = [], {"bos_token": BEGIN}
  for said in ({"eos_token": BEGIN}, begin | {"add_bos_token": True}, begin | {"add_bos_token": False}):
    folder = write(tmp_path / "said", tokenizer__json=trained_pairs(), tokenizer_config__json=said)
    loaded.append(data.load_tokenizer(str(folder)))
  assert [(one.eos_id, one.bos_id) for one in loaded] == [(1, None), (0, 1), (0, None)]
  assert loaded[-1].hash == kinds["json"].hash
  assert len({one.hash for one in (*loaded, *kinds.values())}) == 2 + len(kinds)
  llama = str(write(tmp_path / "llama", tokenizer__model=kinds["llama"].model_bytes))
  assert data.load_tokenizer(llama, DataConfig(begin_mark=False), lossless=True).hash != kinds["llama"].hash


def test_what_is_set_on_a_tokenizer_is_not_set_on_the_next_of_the_same_files(tmp_path):
  path = str(write(tmp_path, tokenizer__json=trained_pairs()))
  first = data.load_tokenizer(path)
  first.more_end_ids, first.chat_template = (5,), "changed"
  again = data.load_tokenizer(path)
  assert (again.more_end_ids, again.chat_template) == ((), None)


def test_begin_mark_overrides_the_files(kinds, tmp_path):
  one_mark = {"bos_token": {"content": END}, "eos_token": END}  # for both, which divides documents
  padded = {"290": {"content": "<pad>"}}
  said = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "added_tokens_decoder": padded}
  model = {"tokenizer__model": kinds["llama"].model_bytes}
  for name, files, config, begins in (("gpt2", pair_of_files(), one_mark, 0), ("llama", model, said, 1)):
    folder = str(write(tmp_path / name, tokenizer_config__json=config, **files))
    assert data.load_tokenizer(folder).bos_id is None
    assert data.load_tokenizer(folder, DataConfig(begin_mark=True)).bos_id == begins
  assert "has no begin mark" in told(lambda: data.load_tokenizer("bytes", DataConfig(begin_mark=True)))


@pytest.mark.parametrize("kind,begin_mark", [("llama", None), ("llama3", False)])
def test_each_document_has_its_marks_exactly_once(kinds, kind, begin_mark, tmp_path):
  texts = [*prose(20), "<s> and </s>\n", f"{END}<|begin|>"]
  file = {kinds[kind].file_name.replace(".", "__"): kinds[kind].model_bytes}
  name = str(write(tmp_path / kind, **file))
  source = write_jsonl(tmp_path / "a.jsonl", texts)
  config = config_of(tmp_path, source=source, validation=source, tokenizer=name, begin_mark=begin_mark)
  expected = None if begin_mark is False else kinds[kind].bos_id
  for _ in range(2):  # made, and read from the cache
    corpus = data.load(config, 500, seed=0)
    assert corpus.tokenizer.bos_id == expected
    begin, end = [] if expected is None else [expected], corpus.tokenizer.eos_id
    documents = [[*begin, *ids.tolist(), end] for ids in corpus.tokenizer.encode_batch(texts)]
    for split in (corpus.validation, corpus.train.splits[0]):
      assert split.tokens[:].tolist() == sum(documents, [])
      assert split.num_bytes == sum(len(text.encode()) for text in texts)


def test_a_corpus_of_another_tokenizer_is_not_reused(tmp_path):
  source = write_jsonl(tmp_path / "a.jsonl", prose(20))
  model = write(tmp_path / "model", **pair_of_files())
  config = config_of(tmp_path, source=source, tokenizer=str(model))
  first = data.load(config, 500, seed=0)
  write(model, tokenizer_config__json={"eos_token": BEGIN})
  second = data.load(config, 500, seed=0)
  assert [one.validation.tokens[:][-1] for one in (first, second)] == [0, 1]
  assert len(list((tmp_path / "cache").iterdir())) == 2
