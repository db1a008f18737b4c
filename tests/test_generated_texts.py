"""Generated texts: streams of pieces, stop strings, marks, and prompts from a file."""

import functools

import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.data.tokenizers import SentencePieceTokenizer
from diffeq_nnx.inference import generation
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.jobs.prompt_files import Answers
from tests.conftest import small_model, told
from tests.test_generation import make
from tests.test_tokenizer import sentencepiece_model, spec_of, write


@pytest.fixture(scope="module")
def decoder():
  """Of a model that has more embeddings than any tokenizer here has tokens."""
  return diffeq_nnx.Decoder(make(small_model(field="llama", vocab_size=500, num_steps=1)))


def test_a_file_of_prompts_has_a_line_for_each_line_feed(decoder, tmp_path):
  """A carriage return is JSON's white space, and other characters that end lines elsewhere are text."""
  lines = [b'{"prompt":\r"x"}', b'{"prompt": "a\xe2\x80\xa8b"}\r', b"\r", b'{"prompt": "y"}']
  lines.append(b'{"prompt": "z", "max_tokens": 3}')
  (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(lines))
  answers = Answers(str(tmp_path / "prompts.jsonl"), str(tmp_path / "out.jsonl"))
  texts, _, numbers = answers.open(data.load_tokenizer("bytes"), decoder, {})
  with Answers(str(tmp_path / "prompts.jsonl"), str(tmp_path / "out.jsonl")) as second:
    assert "another process writes it" in told(lambda: second.open(data.load_tokenizer("bytes"), decoder, {}))
  assert (texts, numbers) == (["x", "a\u2028b", "y"], [1, 2, 4])
  for number in numbers:
    answers.add(number, {"tokens": 1})
  *answered, last = answers.finish()
  assert [answer["line"] for answer in answered] == [1, 2, 4]
  assert last == {"line": 5, "error": "prompt: the line sets max_tokens, which is the same for all; give --max_tokens"}


TOKENIZERS = {
  "bytes": lambda folder: data.load_tokenizer("bytes"),
  "sentencepiece": lambda folder: SentencePieceTokenizer(sentencepiece_model()),
  "byte_pairs": lambda folder: data.load_tokenizer(str(write(folder, tokenizer__json=spec_of()))),
}


def streamed(ids: list[int], *arguments) -> tuple[list[str], str]:
  """The pieces of a stream of these tokens, which add up to its text, and the text."""
  stream = TextStream(*arguments)
  pieces = [*map(stream.add, ids), stream.finish()]
  assert "".join(pieces) == stream.text
  return pieces, stream.text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_of_a_stream_add_up_to_the_text_and_split_no_character(kind, tmp_path):
  tokenizer = TOKENIZERS[kind](tmp_path)
  text = "Two  words,\n a\u00f1o \U0001f642\U0001f642 \u5b57\ufffd e\u0301\n"
  pieces, found = streamed(tokenizer.encode(text).tolist(), tokenizer.decode)
  assert found == text and "\ufffd" not in "".join(pieces[:-1]).replace("\u5b57\ufffd", "")
  rng = np.random.default_rng(0)
  streamed([0xFF] * 300 + [*"\u5b57\u00e9".encode()] + [0x80] * 90, lambda ids: bytes(ids).decode(errors="replace"))
  for _ in range(30):  # ids in any order: bytes that are no text
    ids = rng.integers(tokenizer.vocab_size, size=40).tolist()
    assert streamed(ids, tokenizer.decode)[1] == tokenizer.decode(ids)


def test_a_space_that_a_tokenizer_puts_first_stays_within_a_text_and_is_dropped_at_its_beginning(tmp_path):
  model = sentencepiece_model(normalization_rule_name="identity", remove_extra_whitespaces=False)
  tokenizer = data.load_tokenizer(str(write(tmp_path, tokenizer__model=model)))
  text = "the cat and  a dog\n on caf\u00e9"
  for leading, expected in (("", f" {text}"), (tokenizer.leading, text)):
    assert streamed(tokenizer.encode(text).tolist(), tokenizer.decode_within, ("zebra",), leading)[1] == expected


def test_a_stop_string_ends_the_text_and_none_of_it_is_given_out():
  for text, stop, expected in (
    ("one. two. three", (". t",), "one"),
    ("one. two. three", ("zero", "three", "two"), "one. "),
    ("aaab", ("aab",), "a"),
    ("ends with al", ("also",), "ends with al"),
  ):
    stream, given = TextStream(data.load_tokenizer("bytes").decode, stop), ""
    for byte in text.encode():
      given += stream.add(byte)
      assert expected.startswith(given)
    assert given + stream.finish() == stream.text == expected
    assert stream.stopped == (expected != text)


def test_texts_come_in_pieces_and_end_at_marks_strings_or_the_length(decoder):
  tokenizer, prompts = data.load_tokenizer("bytes"), ["one", "two words"]
  pieces = {0: [], 1: []}
  make_texts = functools.partial(diffeq_nnx.generate_texts, decoder, tokenizer, prompts, max_tokens=20)
  made = make_texts(on_text=lambda row, piece: pieces[row].append(piece))
  encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
  ids = diffeq_nnx.generate(decoder, encoded, max_tokens=20, stop_ids=[256])
  for row, one in enumerate(made):
    assert one.prompt == prompts[row] and one.stopped == "length" and one.ids == ids[row] and len(one.ids) == 20
    assert "".join(pieces[row]) == one.text == tokenizer.decode(one.ids)
  at = next(place for place, token in enumerate(ids[0]) if 32 < token < 127)
  stop = chr(ids[0][at])
  first, _ = make_texts(stop=[stop])
  assert make_texts(stop=f"{stop}\ud800")[0].stopped == "length"  # one string, and not its characters
  assert [one.prompt for one in diffeq_nnx.generate_texts(decoder, tokenizer, "one", max_tokens=1)] == ["one"]
  assert first.stopped == "stop" and first.text == made[0].text.partition(stop)[0] and len(first.ids) == at + 1
  tokenizer.more_end_ids = (ids[1][5], ids[0][7])  # each ends a text, not the first alone
  draft = {"draft": decoder, "draft_tokens": 1}  # that a draft stands before doesn't let one through
  for more in ({}, draft):
    for one, row in zip(make_texts(**more), ids):
      at = next(place for place, token in enumerate(row) if token in tokenizer.more_end_ids)
      assert one.stopped == "eos" and one.ids == row[:at]


def test_a_stop_string_that_begins_with_a_special_token_ends_the_text_there(decoder, tmp_path):
  """As a chat's turn ends in a model whose end mark is another: the token's name is in no decoded text."""
  spec, names = spec_of(), [f"<|{number}|>" for number in range(200)]
  spec["added_tokens"] += [spec["added_tokens"][0] | {"id": 300 + n, "content": name} for n, name in enumerate(names)]
  tokenizer = data.load_tokenizer(str(write(tmp_path, tokenizer__json=spec)))
  prompts = ["one", "two words"]  # two as above, for which the model is compiled
  make_text = lambda **more: diffeq_nnx.generate_texts(decoder, tokenizer, prompts, max_tokens=20, **more)[0]
  whole = make_text()
  at = next(place for place, token in enumerate(whole.ids) if token >= 300)
  cut = make_text(stop=["\ud800", f"{names[whole.ids[at] - 300]}\n"])
  assert at and cut.stopped == "stop" and cut.ids == whole.ids[: at + 1] != whole.ids
  assert cut.text == tokenizer.decode(whole.ids[:at])
  assert not generation.find_stop_ids(tokenizer, ["\n", "one", "<|no token|>", "\ud800"])


def test_documents_begin_with_the_begin_mark_and_the_name_of_a_mark_is_text(tmp_path):
  begins, tokenizer = TOKENIZERS["sentencepiece"](tmp_path), TOKENIZERS["bytes"](tmp_path)
  assert generation.encode_prompts(begins, [""]) == [[begins.bos_id]]
  (ids,) = generation.encode_prompts(tokenizer, ["a<|endoftext|>b"])
  assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"
