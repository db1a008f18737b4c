"""Generation: the tokens of the uncached forward, rows that don't touch each other, draws, ends, streaming."""

import itertools
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.data.tokenizers import SentencePieceTokenizer
from diffeq_nnx.inference import batching, decoding, generation
from diffeq_nnx.inference.sampling import GenerationOptions, Sampler
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.jobs.prompt_files import Answers
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.output_first import OutputFirst
from tests.conftest import PRESETS, SOLVER_PRESETS, moved_instance, on_eight_devices, small_model, told
from tests.test_tokenizer import sentencepiece_model, spec_of, trained_pairs

PROMPTS = [[3, 14], [15, 9, 2, 6, 5, 30], [8]]


def make(config) -> Model:
  """A model whose likeliest tokens differ."""
  return moved_instance(config, scale=0.3)


@pytest.fixture(scope="module")
def decoder():
  """Of a llama: its positions don't end."""
  return diffeq_nnx.Decoder(make(small_model(field="llama", num_steps=2)))


def uncached(model: Model, rows: list[list[int]], num_steps: int | None = None) -> list[np.ndarray]:
  """Logits [n, V] of each row, by the forward pass of all its tokens, alone but for padding behind it."""
  tokens_BxL = np.zeros((len(rows), 12), np.int32)
  for padded, row in zip(tokens_BxL, rows):
    padded[: len(row)] = row
  logits = nnx.jit(lambda model, tokens: model(tokens, num_steps))(model, jnp.asarray(tokens_BxL))
  return [np.asarray(one[: len(row)]) for one, row in zip(logits, rows)]


def check_greedy(model: Model, decoder) -> None:
  """The greedy tokens of all prompts are the likeliest of the uncached forward pass."""
  made = diffeq_nnx.generate(decoder, PROMPTS, max_tokens=6, temperature=0)
  whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, made)]
  for prompt, tokens, logits in zip(PROMPTS, made, uncached(model, [one[:-1] for one in whole])):
    assert tokens == logits.argmax(-1)[len(prompt) - 1 :].tolist() and len(tokens) == 6


def begin_state(next_B: list[int]) -> decoding.DecodeState:
  """The state before anything is read."""
  sampler = GenerationOptions().make_sampler(range(len(next_B)))
  return decoding.DecodeState([], jnp.int32(0), jnp.asarray(next_B, jnp.int32), sampler)


# each kind of weights and of solver
@pytest.mark.parametrize(
  "preset,field",
  [*zip(["diffeq", "baseline", "shared_sequential", "leapfrog", "rk4"], itertools.cycle(["gpt", "llama"]))],
)
def test_greedy_tokens_are_those_of_the_uncached_forward(preset, field):
  model = make(small_model(field=field, num_steps=2, **(PRESETS | SOLVER_PRESETS)[preset]))
  check_greedy(model, model)


@pytest.mark.parametrize("field,solver,num_steps,first", [("gpt", "euler", None, 7), ("llama", "sequential", 2, 1)])
def test_logits_in_a_batch_are_those_of_each_row_alone_to_1e_10(field, solver, num_steps, first, x64):
  """Rows of different lengths, read whole or in chunks and then token by token, against the forward pass of each."""
  model = make(small_model(field=field, solver=solver, dtype="float64"))
  decoder, lengths = diffeq_nnx.Decoder(model, num_steps), (2, 7, 4)
  rows = np.random.default_rng(0).integers(31, size=(3, 11)).astype(np.int32)
  tokens_BxL = np.zeros((3, 7), np.int32)
  for padded, row, length in zip(tokens_BxL, rows, lengths):
    padded[7 - length :] = row[:length]
  state = begin_state([length - 7 for length in lengths])
  read, go_on = jax.jit(decoding.first_logits, static_argnums=3), jax.jit(decoding.more_logits)
  state, logits_BxV = read(decoder.ready, state, tokens_BxL[:, :first], 16)
  found = [logits_BxV]
  for start in range(first, 7, 2):  # the rest of the prompts, two tokens at a time
    state, logits_BxV = go_on(decoder.ready, state, tokens_BxL[:, start : start + 2])
    found = [logits_BxV]
  for place in range(4):
    newest_Bx1 = jnp.asarray([[row[length + place]] for row, length in zip(rows, lengths)])
    state, logits_BxV = go_on(decoder.ready, state, newest_Bx1)
    found.append(logits_BxV)
  expected = uncached(model, rows.tolist(), num_steps)
  for row, length in enumerate(lengths):
    here = [logits[row] for logits in found]
    np.testing.assert_allclose(here, expected[row][length - 1 : length + 4], rtol=0, atol=1e-10)


def test_the_weights_are_made_once_and_a_token_needs_no_generator(monkeypatch):
  model, calls, make_ready = make(small_model()), [], decoding.make_ready
  monkeypatch.setattr(decoding, "make_ready", lambda *args, **named: calls.append(1) or make_ready(*args, **named))
  diffeq_nnx.generate(model, PROMPTS, max_tokens=6, temperature=0)
  assert len(calls) == 1
  decoder = diffeq_nnx.Decoder(model)
  assert "weight_source" not in decoder.ready.rest
  tokens = jnp.zeros((1, 8), jnp.int32)
  state, _ = jax.eval_shape(lambda: decoding.first_logits(decoder.ready, begin_state([0]), tokens, 64))
  program = jax.jit(decoding.more_logits).trace(decoder.ready, state, tokens[:, :1]).lower().as_text()
  # per solver step four products with kernels and two of attention's, then the head; and no loop
  assert program.count("stablehlo.dot_general") == 3 * (4 + 2) + 1 and "while" not in program
  for one in (decoder, decoder):  # a decoder's own weights serve many calls
    diffeq_nnx.generate(one, PROMPTS, max_tokens=6, temperature=0)
  assert len(calls) == 2
  ready = diffeq_nnx.Decoder(moved_instance(small_model(field="llama", dtype="bfloat16"))).ready
  kept = [ready.rest["embedding"], ready.rest["head"], ready.weights.sets[0]["up"]["kernel"]]
  assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.bfloat16.dtype}  # that of the computation


class SummedField(vector_fields.GPTField):
  """A GPT's block, with a product written in another way."""

  def feedforward(self, x_BxLxD, w):
    down = {**w["down"], "kernel": jnp.einsum("fd->fd", w["down"]["kernel"])}
    return super().feedforward(x_BxLxD, {**w, "down": down})


@pytest.mark.parametrize("field,stored_so", [(vector_fields.GPTField, True), (SummedField, False)])
def test_on_a_cpu_kernels_are_output_first_in_blocks_that_only_multiply_by_them(field, stored_so, monkeypatch):
  monkeypatch.setitem(vector_fields.FIELDS, "gpt", field)
  decoder = diffeq_nnx.Decoder(make(small_model()))
  kernels = [leaf["kernel"] for one in decoder.ready.weights.sets for leaf in one.values() if "kernel" in leaf]
  assert kernels and all(isinstance(kernel, OutputFirst) == stored_so for kernel in kernels)
  check_greedy(make(small_model()), decoder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_product_with_an_output_first_kernel_is_that_with_the_kernel(dtype, x64):
  rng = np.random.default_rng(0)
  x_BxLxI, kernel_OxI = (jnp.asarray(rng.normal(size=size), dtype) for size in ((2, 3, 8), (5, 8)))
  found = jax.jit(lambda x, kernel: x @ kernel)(x_BxLxI, OutputFirst(kernel_OxI))
  expected = jax.jit(lambda x, kernel: x @ kernel.T)(x_BxLxI, kernel_OxI)
  assert found.dtype == expected.dtype
  eps = float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (found, expected)), rtol=4 * eps, atol=8 * eps)


def expected_shares(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
  """Probabilities of all tokens, in NumPy."""
  shares = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  order = np.argsort(-shares)
  shares[order[top_k:] if top_k else []] = 0
  shares /= shares.sum()
  before = np.cumsum(shares[order]) - shares[order]
  shares[order[before >= top_p]] = 0
  return shares / shares.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize(
  "top_k,top_p", [(None, 1.0), (1, 1.0), (3, 1.0), (None, 0.6), (4, 0.7), (100, 1.0), (None, 1e-6)]
)
def test_draws_have_the_probabilities_that_the_filters_leave(temperature, top_k, top_p):
  count, logits = 20_000, np.array([0.3, 2.0, -1.0, 1.2, 0.0, 1.9])
  sampler = GenerationOptions(temperature=temperature, top_k=top_k, top_p=top_p).make_sampler(range(count))
  logits_BxV = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
  tokens = jax.jit(Sampler.draw)(sampler, logits_BxV, jnp.full(count, 7, jnp.int32))
  drawn = np.bincount(np.asarray(tokens), minlength=6)
  shares = expected_shares(logits, temperature, top_k, top_p)
  assert (drawn[shares == 0] == 0).all()
  expected = count * shares[shares > 0]
  assert ((drawn[shares > 0] - expected) ** 2 / expected).sum() < 25  # chi square with at most 5 degrees: p < 2e-4


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1.2e-38, 1e-20])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 1e-300}])
def test_tiny_temperatures_draw_the_likeliest_token(temperature, filters):
  """The limit of draws for temperatures that fall to 0, whatever the size and sign of the logits."""
  logits = np.random.default_rng(0).normal(size=(4, 1, 11)).astype(np.float32)
  logits_BxV = np.concatenate(logits * np.float32([1e-3, 1, 1e3, 1e30])[:, None, None] - np.float32([[[0]], [[9]]] * 2))
  likeliest, positions_B = logits_BxV.argmax(-1), jnp.arange(4, dtype=jnp.int32)
  sampler = GenerationOptions(temperature=temperature, **filters).make_sampler(range(4))
  assert jax.jit(Sampler.draw)(sampler, logits_BxV, positions_B).tolist() == likeliest.tolist()
  left = jax.jit(Sampler.compute_shares)(sampler, logits_BxV)
  np.testing.assert_array_equal(left, np.eye(11)[likeliest])


def test_seeds_decide_and_rows_end_at_their_stop_marks_and_where_learned_positions_do(decoder):
  free, again, other = (diffeq_nnx.generate(decoder, PROMPTS, max_tokens=8, seed=seed) for seed in (3, 3, 4))
  assert free == again != other
  mark = free[1][4]
  ended = diffeq_nnx.generate(decoder, PROMPTS, max_tokens=8, seed=3, stop_ids=[mark])
  assert ended == [row[: row.index(mark)] if mark in row else row for row in free] and len(ended[1]) <= 4
  gpt, prompts = make(small_model()), [[1] * 10, [2] * 12, [3]]
  made = diffeq_nnx.generate(gpt, prompts, max_tokens=8, temperature=0)
  assert [len(row) for row in made] == [3, 1, 8]
  assert made[2:] == diffeq_nnx.generate(gpt, prompts[2:], max_tokens=8, temperature=0)
  assert [len(row) for row in diffeq_nnx.generate(decoder, [[1] * 13, [2]], max_tokens=70)] == [70, 70]  # rotary


def test_a_row_that_has_ended_goes_to_the_next_prompt_and_no_text_changes(decoder):
  """Twelve prompts in three rows: the ring of 64 slots turns more than once; texts end at a mark or at their length."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(31, size=size).tolist() for size in (3, 30, 1, 9, 40, 2, 5, 17, 1, 33, 4, 8)]
  options = dict(max_tokens=20, seed=4)

  def ended_texts(numbers, **more):
    """(number, why it ended, ids) of the texts of these prompts, as they end."""
    ids = [[] for _ in numbers]
    take = lambda n, token: "mark" if token == 1 else ids[n].append(token)
    found = batching.continue_prompts(
      decoder, [prompts[n] for n in numbers], GenerationOptions(**more, **options), take, row_numbers=numbers
    )
    return [(numbers[n], reason, ids[n]) for n, reason in found]

  alone = [ended_texts([n])[0] for n in range(12)]  # each with the random numbers that it has among the others
  expected = [ids for _, _, ids in alone]
  assert len({len(ids) for ids in expected}) > 3 and sum(map(len, expected)) > 3 * 40
  together = ended_texts(list(range(12)), rows=3)
  assert sorted(together) == alone != together
  assert {(reason, len(ids) == 20) for _, reason, ids in together} == {("length", True), ("mark", False)}
  assert diffeq_nnx.generate(decoder, prompts, rows=5, stop_ids=[1], **options) == expected


def test_long_prompts_are_read_in_chunks_between_the_tokens_of_others(decoder, monkeypatch):
  rng = np.random.default_rng(1)
  prompts = [rng.integers(31, size=size).tolist() for size in (5, 70, 200, 130, 64, 3)]
  expected = diffeq_nnx.generate(decoder, prompts, max_tokens=9, temperature=0)
  monkeypatch.setattr(decoding, "CHUNK", 64)
  reads, read_more = [], decoding.read_more
  monkeypatch.setattr(decoding, "read_more", lambda *args: reads.append(args[-1].shape) or read_more(*args))
  assert diffeq_nnx.generate(decoder, prompts, max_tokens=9, temperature=0, rows=2) == expected
  long = [n for n, shape in enumerate(reads) if shape == (1, 64)]
  assert len(long) == 3 + 2  # after the first of 200 and of 130 tokens
  assert reads[long[3] + 1 : long[4]] == [(2,)]  # a token of the first between the chunks of the second


def test_bad_input_is_one_line(decoder):
  for prompts, how, part in (
    ([], {}, "prompts: none given"),
    ([[1], []], {}, "prompts[1]: has no tokens"),
    ([[31]], {}, "prompts[0]: holds the id 31; the model's ids are 0 to 30"),
    ([[-1]], {}, "holds the id -1"),
    ([[1]], {"max_tokens": 0}, "max_tokens=0: must be 1 or above"),
    ([[1]], {"temperature": -0.5}, "temperature=-0.5: must be 0"),
    ([[1]], {"temperature": float("nan")}, "temperature=nan: must be 0"),
    ([[1]], {"top_k": 0}, "top_k=0: must be 1 or above"),
    ([[1]], {"top_p": 0.0}, "top_p=0.0: must lie between 0 (excluded) and 1"),
    ([[1]], {"top_p": 1.5}, "top_p=1.5: must lie"),
    ([[1]], {"seed": -1}, "seed=-1: must lie"),
    ([[1]], {"rows": 0}, "rows=0: must be 1 or above"),
    ([[1]], {"draft_tokens": 0}, "draft_tokens=0: must be 1 or above"),
    ([[1]], {"num_steps": 5}, "num_steps=5: this Decoder was made for 2"),
  ):
    assert part in told(lambda: diffeq_nnx.generate(decoder, prompts, **how))
  assert "13 tokens; the model has 12 positions" in told(
    lambda: diffeq_nnx.generate(moved_instance(small_model()), [[1] * 13])
  )
  assert "stored, for its own 3 steps" in told(
    lambda: diffeq_nnx.generate(moved_instance(small_model(weights="stored")), [[1]], num_steps=4)
  )
  assert "num_steps=0: must be 1" in told(lambda: diffeq_nnx.Decoder(moved_instance(small_model()), 0))
  tokenizer = data.load_tokenizer("bytes")
  for texts, how, part in (
    (["a", ""], {}, "prompts[1]='': gives no tokens"),
    ([], {}, "prompts: none given"),
    (["\udc80"], {}, "not Unicode text"),
    (["a"], {"stop": [""]}, "stop: holds an empty string"),
  ):
    assert part in told(lambda: diffeq_nnx.generate_texts(decoder, tokenizer, texts, **how))


def test_a_file_of_prompts_has_a_line_for_each_line_feed(tmp_path):
  """A carriage return is JSON's white space, and other characters that end lines elsewhere are text."""
  lines = [b'{"prompt":\r"x"}', b'{"prompt": "a\xe2\x80\xa8b"}\r', b"\r", b'{"prompt": "y"}']
  (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(lines))
  answers = Answers(str(tmp_path / "prompts.jsonl"), str(tmp_path / "out.jsonl"))
  decoder = diffeq_nnx.Decoder(make(small_model(vocab_size=257)))
  texts, _, numbers = answers.open(data.load_tokenizer("bytes"), decoder, {})
  assert (texts, numbers) == (["x", "a\u2028b", "y"], [1, 2, 4])
  for number in numbers:
    answers.add(number, {"tokens": 1})
  assert [answer["line"] for answer in answers.close()] == [1, 2, 4]


TOKENIZERS = {
  "bytes": lambda folder: data.load_tokenizer("bytes"),
  "sentencepiece": lambda folder: SentencePieceTokenizer(sentencepiece_model()),
  "byte_pairs": lambda folder: _saved(folder, trained_pairs()),
}


def _saved(folder, content: str) -> data.Tokenizer:
  (folder / "tokenizer.json").write_text(content)
  return data.load_tokenizer(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_of_a_stream_add_up_to_the_text_and_split_no_character(kind, tmp_path):
  tokenizer = TOKENIZERS[kind](tmp_path)
  text = "Two  words,\n a\u00f1o \U0001f642\U0001f642 \u5b57\ufffd e\u0301\n"
  stream = TextStream(tokenizer.decode)
  pieces = [stream.add(token) for token in tokenizer.encode(text).tolist()]
  assert "\ufffd" not in "".join(pieces).replace("\u5b57\ufffd", "")
  assert "".join(pieces) + stream.finish() == stream.text == text
  rng = np.random.default_rng(0)
  for _ in range(30):  # ids in any order: bytes that are no text
    ids = rng.integers(tokenizer.vocab_size, size=40).tolist()
    stream = TextStream(tokenizer.decode)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.finish() == stream.text == tokenizer.decode(ids)


def test_a_space_that_a_tokenizer_puts_first_stays_within_a_text_and_is_dropped_at_its_beginning(tmp_path):
  model = sentencepiece_model(normalization_rule_name="identity", remove_extra_whitespaces=False)
  (tmp_path / "tokenizer.model").write_bytes(model)
  tokenizer = data.load_tokenizer(str(tmp_path))
  text = "the cat and  a dog\n on caf\u00e9"
  for leading, expected in (("", f" {text}"), (tokenizer.leading, text)):
    stream = TextStream(tokenizer.decode_within, ("zebra",), leading)
    pieces = [stream.add(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(pieces) + stream.finish() == stream.text == expected


def test_a_stop_string_ends_the_text_and_none_of_it_is_given_out():
  for text, stop, expected in (
    ("one. two. three", (". t",), "one"),
    ("one. two. three", ("zero", "three", "two"), "one. "),
    ("aaab", ("aab",), "a"),
    ("ends with al", ("also",), "ends with al"),
    ("never", ("x",), "never"),
  ):
    stream, given = TextStream(data.load_tokenizer("bytes").decode, stop), ""
    for byte in text.encode():
      given += stream.add(byte)
      assert expected.startswith(given)
    assert given + stream.finish() == stream.text == expected
    assert stream.stopped == (expected != text)


def test_texts_come_in_pieces_and_end_at_marks_strings_or_the_length():
  model = diffeq_nnx.Decoder(make(small_model(field="llama", vocab_size=257, num_steps=1)))
  tokenizer, prompts = data.load_tokenizer("bytes"), ["one", "two words"]
  pieces = {0: [], 1: []}
  made = diffeq_nnx.generate_texts(
    model, tokenizer, prompts, max_tokens=20, on_text=lambda row, piece: pieces[row].append(piece)
  )
  encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
  ids = diffeq_nnx.generate(model, encoded, max_tokens=20, stop_ids=[256])
  for row, one in enumerate(made):
    assert one.prompt == prompts[row] and one.stopped == "length" and one.ids == ids[row] and len(one.ids) == 20
    assert "".join(pieces[row]) == one.text == tokenizer.decode(one.ids)
  at = next(place for place, token in enumerate(ids[0]) if 32 < token < 127)
  stop = chr(ids[0][at])
  first, _ = diffeq_nnx.generate_texts(model, tokenizer, prompts, max_tokens=20, stop=[stop])
  assert first.stopped == "stop" and first.text == made[0].text.partition(stop)[0] and len(first.ids) == at + 1
  tokenizer.more_end_ids = (ids[1][5], ids[0][7])  # each ends a text, not the first alone
  draft = {"draft": model}  # that a draft stands before doesn't let one through
  for more in ({}, draft):
    ended = diffeq_nnx.generate_texts(model, tokenizer, prompts, max_tokens=20, **more)
    for one, row in zip(ended, ids):
      at = next(place for place, token in enumerate(row) if token in tokenizer.more_end_ids)
      assert one.stopped == "eos" and one.ids == row[:at]


def test_a_stop_string_that_begins_with_a_special_token_ends_the_text_there(tmp_path):
  """As a chat's turn ends in a model whose end mark is another: the token's name is in no decoded text."""
  spec, names = spec_of(), [f"<|{number}|>" for number in range(200)]
  spec["added_tokens"] += [spec["added_tokens"][0] | {"id": 300 + n, "content": name} for n, name in enumerate(names)]
  tokenizer = _saved(tmp_path, json.dumps(spec))
  decoder = diffeq_nnx.Decoder(make(small_model(field="llama", vocab_size=500, num_steps=1)))
  make_text = lambda **more: diffeq_nnx.generate_texts(decoder, tokenizer, ["one"], max_tokens=20, **more)[0]
  whole = make_text()
  at = next(place for place, token in enumerate(whole.ids) if token >= 300)
  cut = make_text(stop=["\ud800", f"{names[whole.ids[at] - 300]}\n"])
  assert at and cut.stopped == "stop" and cut.ids == whole.ids[: at + 1] != whole.ids
  assert cut.text == tokenizer.decode(whole.ids[:at])
  assert not generation.find_stop_ids(tokenizer, ["\n", "one", "<|no token|>", "\ud800"])


def test_documents_begin_with_the_begin_mark_and_an_end_mark_inside_a_prompt_ends_nothing(tmp_path):
  """The end mark's name is ordinary text; its id, which a program may give, is read as any other."""
  begins, tokenizer = TOKENIZERS["sentencepiece"](tmp_path), TOKENIZERS["bytes"](tmp_path)
  assert generation.encode_prompts(begins, [""]) == [[begins.bos_id]]
  assert generation.encode_prompts(tokenizer, ["a"]) == [[97]]
  (ids,) = generation.encode_prompts(tokenizer, ["a<|endoftext|>b"])
  assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"
  model = make(small_model(field="llama", vocab_size=257, num_steps=1))
  with_mark = diffeq_nnx.generate(model, [[97, 256, 98]], max_tokens=4, stop_ids=tokenizer.end_ids, temperature=0)
  without = diffeq_nnx.generate(model, [[97, 256, 98]], max_tokens=4, temperature=0)
  assert with_mark == without and len(without[0]) == 4


def test_calls_of_like_lengths_compile_nothing_anew(decoder):
  def compiled():
    return decoding.read_first._cache_size(), decoding.read_more._cache_size()

  diffeq_nnx.generate(decoder, [[1]], max_tokens=3, top_p=0.5)
  before = compiled()
  diffeq_nnx.generate(decoder, [[1] * 40], max_tokens=20, top_p=0.9, temperature=0.7, seed=5)
  assert compiled() == before


SPLIT = """
import jax
from flax import nnx
import diffeq_nnx
from diffeq_nnx.parallel import sharding
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.model.parameters import graph
from diffeq_nnx.training.step import init_state, state_shardings
from tests.conftest import small_config, small_model
config = small_config(small_model(num_steps=2, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=64))
prompts, found = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11], [2]], []
for sizes in (MeshConfig(), MeshConfig(context=2, fsdp=2, tensor=2)):
  mesh = sharding.make_mesh(sizes)
  with jax.set_mesh(mesh):
    params = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)["params"]
  for place, batches in ((None, [None]), (mesh, [None, 4, 1])) if mesh.shape["tensor"] > 1 else ((mesh, [None]),):
    decoder = diffeq_nnx.Decoder(nnx.merge(graph(config.model), params), mesh=place)
    stored_OxI = decoder.ready.weights.sets[0]["up"]["kernel"].stored_OxI
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(decoder.ready)} == {1 if place is None else mesh.size}
    assert stored_OxI.sharding.shard_shape(stored_OxI.shape)[0] == 64 // (1 if place is None else mesh.shape["tensor"])
    for rows in batches:
      found.append(diffeq_nnx.generate(decoder, prompts, max_tokens=5, seed=1, rows=rows))
assert all(one == found[0] for one in found), found
"""


def test_a_model_split_over_devices_generates_what_it_does_on_one():
  on_eight_devices(SPLIT)
