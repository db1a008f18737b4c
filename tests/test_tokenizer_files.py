"""Every kind of bad tokenizer file is reported in one line that begins with the key and the path."""

import dataclasses
import functools
import json
import random

import pytest

from diffeq_nnx import data
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.tokenizers.byte_pairs import BYTE_LEVEL
from diffeq_nnx.errors import UserError
from tests.test_data import config_of, prose, told, write_jsonl
from tests.test_tokenizer import BEGIN, END, added_token, pair_of_files, sentencepiece_model, spec_of, template, write


def vocab_of(**changes):
  """The trained vocabulary with changed ids; None takes a piece out."""
  vocab = spec_of()["model"]["vocab"] | changes
  return {piece: number for piece, number in vocab.items() if number is not None}


def pair(**changes):
  """vocab.json and merges.txt, the vocabulary changed."""
  return pair_of_files(vocab__json=vocab_of(**changes))


def merges(content):
  return pair_of_files(merges__txt=content)


def beside(name="tokenizer_config", **said):
  """vocab.json and merges.txt with a file of this content."""
  return pair_of_files(**{f"{name}__json": said})


def one(said=None, **changes):
  """A tokenizer.json, changed, with a config beside it."""
  return {"tokenizer__json": spec_of(**changes), "tokenizer_config__json": said or {}}


def added(content="new", number=300, **flags):
  """A tokenizer.json with one more added token, which is text."""
  return one(added_tokens=[added_token(number, content, **flags)])


def trained(added=None, said=None, **options):
  """How to make a sentencepiece model with these options, with tokens added and a config beside it."""
  beside = {"added_tokens__json": added or {}, "tokenizer_config__json": said or {}}
  return lambda: {"tokenizer__model": sentencepiece_model(**options), **beside}


def listed(number, **entry):
  """The part of a tokenizer_config.json that has one added token."""
  return {"added_tokens_decoder": {number: {"content": START, **entry}}}


def split(behavior="Isolated", **pattern):
  step = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
  return one(pre_tokenizer={"type": "Sequence", "pretokenizers": [step, BYTE_LEVEL]})


OTHER_ID = template([BEGIN], [])
OTHER_ID["special_tokens"][BEGIN]["ids"] = [2]
SPACE, START = "\u0120", "<|im_start|>"  # the former in GPT-2's alphabet
BAD_FILES = {  # name: files, what the line says
  # what a directory must hold
  "nothing": ({"note__txt": "x"}, "the directory must hold one of tokenizer.json, tokenizer.model, vocab.json and"),
  "no merges": ({"vocab__json": {}}, "not vocab.json; give both of a pair"),
  "added file": (pair_of_files(added_tokens__json={"x": 300}), "added_tokens.json, which vocab.json lacks"),
  "added in config": (
    beside(eos_token=END, **listed("300")),
    f"the files beside the vocabulary add '{START}' (1 such)",
  ),
  "other vocab": (pair(zz=300) | one(), "tokenizer.json disagrees with vocab.json or merges.txt beside it"),
  "fewer merges": (merges("") | one(), "tokenizer.json disagrees with vocab.json or merges.txt beside it"),
  # vocabularies and merges
  "not JSON": (pair_of_files(vocab__json="{"), "vocab.json is not JSON"),
  "twice": (pair_of_files(vocab__json='{"a": 1, "a": 2}'), "vocab.json is not JSON (it gives 'a' twice)"),
  "same id": (pair(zz=5), "ids must be 0 to 300, each once, but 'zz' has 5 where 6 is due"),
  "surrogate": (pair_of_files(vocab__json='{"\\ud800": 0}'), "can't use it"),
  "latin": (merges(b"x \xff"), "can't use it (Token `\ufffd` out of vocabulary)"),
  # marks
  "no end": (pair(**{END: None, "<|e|>": 0}), "no file names an eos_token, and there is no <|endoftext|>; set data."),
  "unknown eos": (beside(eos_token="</s>"), "tokenizer_config.json is '</s>': not one token of the vocabulary (ids 0"),
  "eos of no name": (beside(eos_token=3.5), "tokenizer_config.json is 3.5: not one token"),
  "no object": (pair_of_files(config__json=[]), "config.json must be a JSON object"),
  "two eos": (beside(eos_token=END) | beside("special_tokens_map", eos_token=BEGIN), "differ; set data.end_token"),
  "several": (beside("config", eos_token_id=[0, 300]), "config.json is [0, 300]: not one token"),
  "several others": (beside(eos_token=END) | beside("generation_config", eos_token_id=[1, 5]), "[1, 5]: these differ;"),
  "none of several": (beside("config", eos_token_id=[]), "config.json is []: not one token"),
  "byte as eos": (beside(eos_token="!"), "'!' is also an ordinary piece"),
  "bos unsaid": (beside(bos_token=BEGIN), "(id 1), but it is unclear whether documents begin with the begin mark; set"),
  "bos of a type": (beside(add_bos_token="yes"), "is 'yes': unclear whether documents begin with the begin mark"),
  "bos unnamed": (beside(add_bos_token=True), "has no begin mark; set data.begin_token to a token"),
  # tokenizer.json
  "unigram": ({"tokenizer__json": {"model": {"type": "Unigram"}}}, "no byte-pair model; give"),
  "dropout": (one(model__dropout=0.1), "sets dropout=0.1"),
  "suffix": (one(model__end_of_word_suffix="</w>"), "sets end_of_word_suffix='</w>'"),
  "whitespace": (one(pre_tokenizer={"type": "Whitespace"}), "steps that drop no text (Split, Digits, Punctuation)"),
  "no bytes": (one(pre_tokenizer=None), "the pre-tokenizer must be one ByteLevel"),
  "removed": (split("Removed", String=" "), "steps that drop no text"),
  "added strip": (added(lstrip=True), "doesn't give 'a new b' back as it was"),
  "added piece": (added(SPACE, vocab_of()[SPACE]), f"doesn't give 'a {SPACE} b' back as it was"),
  "two marks": (one(post_processor=template([END, BEGIN], [])), "must put at most one token of the vocabulary before"),
  "two steps": (
    one(post_processor={"type": "Sequence", "processors": [template([BEGIN], []), template([], [END])]}),
    "must put at most one token of the vocabulary before",
  ),
  "other mark": (one(post_processor=OTHER_ID), "must put at most one token of the vocabulary before"),
  "other eos": (
    one({"eos_token": BEGIN}, post_processor=template([], [END])),
    "the post-processor is 0, eos_token in ",
  ),
  "bos and not": (one({"add_bos_token": False}, post_processor=template([BEGIN], [])), "differ; set data.begin_mark"),
  # sentencepiece models, trained when they are needed, and what stands beside them
  "no model": ({"tokenizer__model": b"not a model" * 50}, "not a sentencepiece model"),
  "empty model": ({"tokenizer__model": b""}, "not a sentencepiece model; give"),
  "broken": ({"tokenizer__model": b"{broken"}, "tokenizer.model is not JSON"),
  "no fallback": (trained(byte_fallback=False, vocab_size=30), "no byte fallback"),
  "no eos": (trained(eos_id=-1), "there is no <|endoftext|>; set data.end_token"),
  "model's eos": (trained(said={"eos_token": "<s>"}), "the model's eos_id is 2, eos_token in "),
  "model's bos": (trained(said={"bos_token": "</s>"}), "the model's bos_id is 1, bos_token in "),
  "gap": (trained({START: 900}), "added tokens must follow the vocabulary's 290 ids one by one, but "),
  "other id": (trained({"</s>": 7}), "added_tokens.json gives '</s>' the id 7, but it is 2"),
  "list": (trained(said={"added_tokens_decoder": [START]}), "added_tokens_decoder must be an object"),
  "rstrip": (trained(said=listed("290", rstrip=True)), "sets rstrip of the added token"),
  "two ids": (trained({START: 290}, listed("291")), f"gives '{START}' the id 291, but it is 290"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, name):
  files, part = BAD_FILES[name]
  folder = write(tmp_path / "model", **(files() if callable(files) else files))
  message = told(lambda: data.load_tokenizer(str(folder)))
  assert message.startswith(f"data.tokenizer={folder}: ") and part in message


def test_the_configuration_names_marks_whatever_the_files_say(tmp_path):
  files = {"tokenizer_config__json": {"eos_token": END, "bos_token": END}}
  files["generation_config__json"] = {"eos_token_id": 1}
  pair = str(write(tmp_path / "pair", **pair_of_files(), **files))
  assert "data.end_token" in told(lambda: data.load_tokenizer(pair))
  tokenizer = data.load_tokenizer(pair, DataConfig(begin_token=END, end_token=BEGIN))
  assert (tokenizer.eos_id, tokenizer.bos_id) == (1, 0)
  assert data.load_tokenizer(pair, DataConfig(begin_token=END, end_token=BEGIN, begin_mark=False)).bos_id is None
  saved = data.load_tokenizer(str(write(tmp_path / "run", tokenizer__json=tokenizer.model_bytes)))
  assert saved.hash == tokenizer.hash and (saved.eos_id, saved.bos_id) == (1, 0)
  marked = DataConfig(end_token=END)  # above the file's post-processor
  assert data.load_tokenizer(str(tmp_path / "run"), marked).eos_id == 0
  assert not {0, 1} & set(tokenizer.encode(f"{END}{BEGIN}").tolist())

  llama = str(write(tmp_path / "llama", tokenizer__model=sentencepiece_model(model_type="bpe")))
  own = DataConfig(begin_token="<s>", end_token="</s>")
  assert data.load_tokenizer(llama, own).hash == data.load_tokenizer(llama).hash
  other = data.load_tokenizer(llama, DataConfig(end_token="<s>", begin_mark=False))
  assert (other.eos_id, other.bos_id) == (1, None)
  assert data.load_tokenizer("bytes", DataConfig(end_token=END)).hash == data.load_tokenizer("bytes").hash
  for name, marks, part in (
    (pair, {"end_token": "</s>"}, "data.end_token is '</s>': not one token of the vocabulary (ids 0 to 299)"),
    (pair, {"end_token": END, "begin_token": "<s>"}, "data.begin_token is '<s>': not one token"),
    (pair, {"end_token": "!", "begin_mark": False}, "'!' is also an ordinary piece"),
    (llama, {"end_token": "<0x0A>"}, "the mark '<0x0A>' is also an ordinary piece"),
  ):
    assert part in told(functools.partial(data.load_tokenizer, name, DataConfig(**marks)))
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(20)), tokenizer=pair)
  config = dataclasses.replace(config, begin_token=END, end_token=BEGIN)
  tokens = data.load(config, 500, seed=0).validation.tokens[:]
  assert (tokens[0], tokens[-1]) == (0, 1)
  config = dataclasses.replace(config, tokenizer="train")
  assert "data.end_token=<|begin|>: data.tokenizer=train" in told(lambda: data.load(config, 500, seed=0))


def test_a_step_that_removes_what_a_pattern_leaves_divides_as_one_that_removes_nothing(tmp_path):
  """As in files that were made from tiktoken's."""
  steps = {"type": "Split", "pattern": {"Regex": " ?[a-z]+|[^a-z]"}}, BYTE_LEVEL | {"use_regex": False}
  loaded = []
  for flags in ({"behavior": "Removed", "invert": True}, {"behavior": "Isolated", "invert": False}):
    sequence = {"type": "Sequence", "pretokenizers": [steps[0] | flags, steps[1]]}
    loaded.append(data.load_tokenizer(str(write(tmp_path / flags["behavior"], **one(pre_tokenizer=sequence)))))
  for text in prose(20):
    assert loaded[0].encode(text).tolist() == loaded[1].encode(text).tolist()
  assert loaded[0].hash == loaded[1].hash


def test_a_vocabulary_may_lack_the_bytes_that_utf_8_never_has_and_add_the_letters_that_stand_for_them(tmp_path):
  """As those of DeepSeek."""
  spec = spec_of()
  for byte in (0xC0, 0xC1, *range(0xF5, 0x100)):
    number = spec["model"]["vocab"].pop(chr(byte))
    spec["added_tokens"].append(added_token(number, chr(byte)))
  tokenizer = data.load_tokenizer(str(write(tmp_path, tokenizer__json=spec)))
  text = "\u00f8 \u00dcn\u00efcode \u00fcber \u00ff\u00c0 \u5b57\U0001f642"
  assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode_rendered(text)) == text
  assert tokenizer.encode("\u00f8").tolist() == [spec_of()["model"]["vocab"]["\u00f8"]]


def damaged(node, rng):
  """A copy of nested JSON with one node, chosen at random, replaced by something else."""
  if isinstance(node, (dict, list)) and node and rng.random() < 0.8:
    key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    copy = node.copy()
    copy[key] = damaged(node[key], rng)
    return copy
  return rng.choice([None, 3, -1, "x", "", [], [None], {}, {"type": "Sequence"}, {"type": 3}, True, [["a"]]])


def test_no_damage_to_a_tokenizer_json_gives_more_than_a_line(tmp_path):
  rng = random.Random(0)
  whole = spec_of(post_processor={"type": "Sequence", "processors": [template([BEGIN], [END])]})
  whole["model"]["vocab"] |= {"zz": 300}
  write(tmp_path, tokenizer__json=whole)
  assert data.load_tokenizer(str(tmp_path)).bos_id == 1
  for _ in range(100):
    write(tmp_path, tokenizer__json=json.dumps(damaged(whole, rng)))
    try:
      tokenizer = data.load_tokenizer(str(tmp_path))
    except UserError as error:
      assert "\n" not in str(error)
    else:
      assert tokenizer.decode(tokenizer.encode("a\u00e9 \n")) == "a\u00e9 \n"
