"""Every kind of bad tokenizer file is told in one line that begins with the key and the path."""

import json
import random

import pytest

from diffeq_nnx import data
from diffeq_nnx.errors import UserError
from tests.test_data import told
from tests.test_tokenizer import BEGIN, END, pair_of_files, sentencepiece_model, spec_of, template, write


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


def one(**changes):
  """A tokenizer.json, changed."""
  return {"tokenizer__json": spec_of(**changes)}


def added(**fields):
  """A tokenizer.json with one more added token, which is text."""
  return one(added_tokens=[{"id": 300, "content": "new", "special": False} | fields])


def renamed(old, new):
  """A tokenizer.json with a token called otherwise everywhere."""
  return {"tokenizer__json": json.dumps(spec_of()).replace(json.dumps(old), json.dumps(new))}


def split(behavior="Isolated", **pattern):
  step = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
  return one(pre_tokenizer={"type": "Sequence", "pretokenizers": [step, {"type": "ByteLevel"}]})


SPACE = "\u0120"  # in GPT-2's alphabet
BAD_FILES = {  # name: files, what the line says
  # what a directory must hold
  "nothing": ({"note__txt": "x"}, "the directory holds no tokenizer"),
  "no merges": ({"vocab__json": {}}, "holds vocab.json and no merges.txt; give both"),
  "no vocabulary": ({"vocab__bpe": ""}, "holds vocab.bpe and no encoder.json; give both"),
  "two kinds": (one() | {"tokenizer__model": b""}, "holds tokenizer.json and tokenizer.model; name the one"),
  "two pairs": (pair_of_files(encoder__json={}, vocab__bpe=""), "two vocabularies"),
  "added file": (pair_of_files(added_tokens__json={"x": 300}), "added_tokens.json, which vocab.json lacks"),
  "other vocab": (pair() | renamed(BEGIN, "<|a|>"), "tokenizer.json and vocab.json beside it disagree"),
  "fewer merges": (merges("") | one(), "tokenizer.json and merges.txt beside it disagree"),
  # vocabularies and merges
  "not JSON": (pair_of_files(vocab__json="{"), "vocab.json is not JSON"),
  "list": (pair_of_files(vocab__json=[1]), "vocab.json must give each piece its id"),
  "twice": (pair_of_files(vocab__json='{"a": 1, "a": 2}'), "vocab.json gives 'a' twice"),
  "float": (pair(zz=1.5), "a whole number"),
  "same id": (pair(zz=5), "the same id 5"),
  "beyond": (pair(zz=700), "'zz' the id 700, beyond the table of its 301 entries"),
  "negative": (pair(zz=-1), "'zz' the id -1, beyond"),
  "surrogate": (pair_of_files(vocab__json='{"\\ud800": 0}'), "lone surrogate"),
  "byte": (merges("") | {"vocab__json": vocab_of(**{"!": None, "zz": 2})}, "no piece for 1 of the 256 bytes"),
  "other merges": (merges("#version: 0.2\nx y\n"), "merge 1 in merges.txt ('x y') needs the piece 'xy'"),
  "three": (merges("a t\na b c\n"), "merge 2 in merges.txt is 'a b c', not two pieces"),
  "latin": (merges(b"\xff"), "merges.txt is not UTF-8"),
  # marks
  "no end": (pair(**{END: None, "<|e|>": 0}), "no file names an eos_token, and there is no <|endoftext|>"),
  "no end in one": (renamed(END, "<|e|>"), "no file names an eos_token, and there is no <|endoftext|>"),
  "unknown eos": (beside(eos_token="</s>"), "names '</s>', which the vocabulary lacks"),
  "unknown bos": (beside("special_tokens_map", bos_token="<s>"), "names '<s>', which the vocabulary lacks"),
  "eos number": (beside("config", eos_token_id=300), "names the id 300, but ids run from 0 to 299"),
  "eos of a type": (beside("config", eos_token_id="0"), "eos_token_id in config.json is '0'; give an id"),
  "eos of no name": (beside(eos_token=3), "eos_token in tokenizer_config.json is 3; give the name"),
  "no object": (pair_of_files(config__json=[]), "config.json must be a JSON object"),
  "two eos": (
    beside(eos_token=END) | beside("special_tokens_map", eos_token=BEGIN),
    "is '<|endoftext|>' (id 0), but eos_token in special_tokens_map.json is '<|begin|>' (id 1); correct one",
  ),
  "eos and number": (
    beside(eos_token=END) | beside("generation_config", eos_token_id=1),
    "is '<|endoftext|>' (id 0), but eos_token_id in generation_config.json is 1; correct one",
  ),
  "several": (beside("config", eos_token_id=[0, 1]), "is 0 or 1; name the one to use"),
  "decoder": (beside(added_tokens_decoder={"9": {"content": END}}), "the id 9, but the vocabulary 0"),
  "ordinary eos": (beside(eos_token=f"{SPACE}t"), f"'{SPACE}t' is also an ordinary piece"),
  "byte as eos": (beside(eos_token="!"), "'!' is also an ordinary piece"),
  "bos unsaid": (beside(bos_token=BEGIN), "(id 1), but no file says whether text begins with it; set"),
  "bos of a type": (beside(add_bos_token="yes"), "add_bos_token in tokenizer_config.json is 'yes'; it"),
  "bos unnamed": (beside(add_bos_token=True), "no file names a bos_token"),
  # tokenizer.json
  "no model": ({"tokenizer__json": {"version": "1.0"}}, "holds no byte-pair model; give"),
  "unigram": ({"tokenizer__json": {"model": {"type": "Unigram"}}}, "holds no byte-pair model but Unigram"),
  "dropout": (one(model__dropout=0.1), "sets dropout=0.1"),
  "suffix": (one(model__end_of_word_suffix="</w>"), "sets end_of_word_suffix='</w>'"),
  "whitespace": (one(pre_tokenizer={"type": "Whitespace"}), "Whitespace in tokenizer.json may drop text"),
  "no bytes": (one(pre_tokenizer=None), "no byte-level vocabulary"),
  "removed": (split("Removed", String=" "), "Split in tokenizer.json may drop text"),
  "pattern": (split(Regex="("), "the tokenizers library can't use it"),
  "added id": (added(id=5), "the same id 5"),
  "added gap": (added(id=500), "'new' the id 500, beyond the table of its 301 entries"),
  "added again": (added(content=END), "gives '<|endoftext|>' the ids 0 and 300"),
  "added strip": (added(lstrip=True), "swallows the spaces around it"),
  "added piece": (added(content=SPACE, id=vocab_of()[SPACE]), "the id of a piece of other text"),
  "added form": (one(added_tokens=[3]), "must have a content and an id"),
  "two marks": (one(post_processor=template([END, BEGIN], [])), "must put at most one mark before a text"),
  "two steps": (
    one(post_processor={"type": "Sequence", "processors": [template([BEGIN], []), template([], [END])]}),
    "must put at most one mark before a text",
  ),
  "no step": (one(post_processor="x"), "has the step 'x', which is none of the library's"),
  "post-processor": (one(post_processor={"type": "Other"}), "the post-processor Other in tokenizer.json"),
  "other eos": (
    one(post_processor=template([], [END])) | {"tokenizer_config__json": {"eos_token": BEGIN}},
    "the post-processor in tokenizer.json is '<|endoftext|>' (id 0), but eos_token in tokenizer_config.json",
  ),
  "bos and not": (
    one(post_processor=template([BEGIN], [])) | {"tokenizer_config__json": {"add_bos_token": False}},
    "by the post-processor in tokenizer.json and not by add_bos_token in tokenizer_config.json; set data",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_byte_pair_files(tmp_path, name):
  files, part = BAD_FILES[name]
  folder = write(tmp_path / "model", **files)
  message = told(lambda: data.load_tokenizer(str(folder)))
  assert message.startswith(f"data.tokenizer={folder}: ") and part in message


BAD_MODELS = {
  "can't be read": lambda: None,
  "not a sentencepiece model": lambda: b"not a model" * 50,
  "not a sentencepiece model; give": lambda: b"",
  "no byte fallback": lambda: sentencepiece_model(byte_fallback=False, vocab_size=30),
  "no end-of-text id": lambda: sentencepiece_model(eos_id=-1),
  "is not JSON": lambda: b"{broken",
}


@pytest.mark.parametrize("part", BAD_MODELS)
def test_bad_single_files(tmp_path, part):
  path = tmp_path / "bad.model"
  if (content := BAD_MODELS[part]()) is not None:
    path.write_bytes(content)
  message = told(lambda: data.load_tokenizer(str(path)))
  assert message.startswith(f"data.tokenizer={path}:") and part in message


@pytest.mark.parametrize(
  ("said", "part"),
  [
    ({"eos_token": "<s>"}, "the model's eos_id is 2, but eos_token in tokenizer_config.json is '<s>' (id 1)"),
    ({"eos_token": "<|im_end|>"}, "names '<|im_end|>', which the vocabulary lacks"),
    (
      {"bos_token": "</s>"},
      "the model's bos_id is 1, but bos_token in tokenizer_config.json is '</s>' (id 2)",
    ),
  ],
)
def test_a_sentencepiece_model_and_its_config_must_agree(tmp_path, said, part):
  folder = write(tmp_path / "model", tokenizer__model=sentencepiece_model(), tokenizer_config__json=said)
  message = told(lambda: data.load_tokenizer(str(folder)))
  assert message.startswith(f"data.tokenizer={folder}: ") and part in message


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
  for _ in range(600):
    write(tmp_path, tokenizer__json=json.dumps(damaged(whole, rng)))
    try:
      tokenizer = data.load_tokenizer(str(tmp_path))
    except UserError as error:
      assert "\n" not in str(error)
    else:
      assert tokenizer.decode(tokenizer.encode("a\u00e9 \n")) == "a\u00e9 \n"
