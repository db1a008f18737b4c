"""Generation: the logits of the uncached forward, rows that don't touch each other, draws, ends."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.inference import batching, decoding
from diffeq_nnx.inference.sampling import GenerationOptions, Sampler
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.cpu_kernels import OutputFirst
from diffeq_nnx.model.model import Model
from tests.conftest import PRESETS, moved_instance, on_eight_devices, small_model, told

PROMPTS = [[3, 14], [15, 9, 2, 6, 5, 30], [8]]


def make(config) -> Model:
  """A model whose likeliest tokens differ."""
  return moved_instance(config, scale=0.3)


@pytest.fixture(scope="module")
def decoder():
  """Of a llama: its positions don't end."""
  return diffeq_nnx.Decoder(make(small_model(field="llama", num_steps=1)))


def uncached(model: Model, rows: list[list[int]], num_steps: int | None = None) -> list[np.ndarray]:
  """Logits [n, V] of each row, by the forward pass of all its tokens, alone but for padding behind it."""
  tokens_BxL = np.zeros((len(rows), 12), np.int32)
  for padded, row in zip(tokens_BxL, rows):
    padded[: len(row)] = row
  logits = nnx.jit(lambda model, tokens: model(tokens, num_steps))(model, jnp.asarray(tokens_BxL))
  return [np.asarray(one[: len(row)]) for one, row in zip(logits, rows)]


def begin_state(next_B: list[int]) -> decoding.DecodeState:
  """The state before anything is read."""
  sampler = GenerationOptions().make_sampler(range(len(next_B)))
  return decoding.DecodeState([], jnp.int32(0), jnp.asarray(next_B, jnp.int32), sampler)


# generated and shared weights, and each kind of solver; tests/test_harness_adapter.py has stored ones
@pytest.mark.parametrize(
  "preset,field,num_steps,first",
  [("shared_sequential", "gpt", None, 7), ("leapfrog", "llama", 3, 7), ("heun", "gpt", None, 1)],
)
def test_logits_in_a_batch_are_those_of_each_row_alone_to_1e_10(preset, field, num_steps, first, x64):
  """Rows of different lengths, read whole or in chunks and then token by token, against the forward pass of each."""
  model = make(small_model(field=field, dtype="float64", num_steps=2, **PRESETS[preset]))
  decoder, lengths = diffeq_nnx.Decoder(model, num_steps), (2, 7, 4)
  rows = np.random.default_rng(0).integers(31, size=(3, 11)).astype(np.int32)
  tokens_BxL = np.zeros((3, 7), np.int32)
  for padded, row, length in zip(tokens_BxL, rows, lengths):
    padded[7 - length :] = row[:length]
  state = begin_state([length - 7 for length in lengths])
  read, go_on = jax.jit(decoding.next_logits, static_argnums=3), jax.jit(decoding.next_logits)
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
  model, calls, make_ready = make(small_model(num_steps=2)), [], decoding.make_ready
  monkeypatch.setattr(decoding, "make_ready", lambda *args, **named: calls.append(1) or make_ready(*args, **named))
  diffeq_nnx.generate(model, PROMPTS, max_tokens=6, temperature=0)
  assert len(calls) == 1
  decoder = diffeq_nnx.Decoder(model)
  assert "weight_source" not in decoder.ready.rest
  tokens = jnp.zeros((1, 8), jnp.int32)
  state, _ = jax.eval_shape(lambda: decoding.next_logits(decoder.ready, begin_state([0]), tokens, 64))
  program = jax.jit(decoding.next_logits).trace(decoder.ready, state, tokens[:, :1]).lower().as_text()
  # per solver step four products with kernels and two of attention's, then the head; and no loop
  assert program.count("stablehlo.dot_general") == 2 * (4 + 2) + 1 and "while" not in program
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
def test_greedy_tokens_are_the_likeliest_and_kernels_of_plain_products_are_output_first(field, stored_so, monkeypatch):
  monkeypatch.setitem(vector_fields.FIELDS, "gpt", field)
  model = make(small_model(num_steps=1))
  decoder = diffeq_nnx.Decoder(model)
  kernels = [leaf["kernel"] for one in decoder.ready.weights.sets for leaf in one.values() if "kernel" in leaf]
  assert kernels and all(isinstance(kernel, OutputFirst) == stored_so for kernel in kernels)
  made = diffeq_nnx.generate(decoder, PROMPTS, max_tokens=6, temperature=0)
  rows = [prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, made)]
  for prompt, tokens, logits in zip(PROMPTS, made, uncached(model, rows)):
    assert tokens == logits.argmax(-1)[len(prompt) - 1 :].tolist() and len(tokens) == 6


def check_drawn(tokens_N: np.ndarray, shares_V: np.ndarray) -> None:
  """That tokens were drawn with these probabilities: chi square with at most 5 degrees of freedom, p < 2e-4."""
  drawn_V, expected_V = np.bincount(tokens_N, minlength=len(shares_V)), len(tokens_N) * shares_V
  assert (drawn_V[shares_V == 0] == 0).all()
  assert ((drawn_V - expected_V)[shares_V > 0] ** 2 / expected_V[shares_V > 0]).sum() < 25


def expected_shares(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
  """Probabilities of all tokens, in NumPy."""
  shares = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  order = np.argsort(-shares)
  shares[order[top_k:] if top_k else []] = 0
  shares /= shares.sum()
  before = np.cumsum(shares[order]) - shares[order]
  shares[order[before >= top_p]] = 0
  return shares / shares.sum()


@pytest.mark.parametrize(
  "temperature,top_k,top_p",
  [(0.5, None, 1.0), (0.5, 3, 1.0), (1.5, None, 0.6), (0.5, 4, 0.7), (1.5, 100, 1.0), (1.5, None, 1e-6)],
)
def test_draws_have_the_probabilities_that_the_filters_leave(temperature, top_k, top_p):
  count, logits = 20_000, np.array([0.3, 2.0, -1.0, 1.2, 0.0, 1.9])
  sampler = GenerationOptions(temperature=temperature, top_k=top_k, top_p=top_p).make_sampler(range(count))
  logits_BxV = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
  tokens = jax.jit(Sampler.draw)(sampler, logits_BxV, jnp.full(count, 7, jnp.int32))
  check_drawn(np.asarray(tokens), expected_shares(logits, temperature, top_k, top_p))


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 1e-300}])
def test_tiny_temperatures_draw_the_likeliest_token(filters):
  """The limit of draws for temperatures that fall to 0, whatever the size and sign of the logits."""
  logits = np.random.default_rng(0).normal(size=(4, 1, 11)).astype(np.float32)
  logits_BxV = np.concatenate(logits * np.float32([1e-3, 1, 1e3, 1e30])[:, None, None] - np.float32([[[0]], [[9]]] * 2))
  likeliest, positions_B = logits_BxV.argmax(-1), jnp.arange(4, dtype=jnp.int32)
  for temperature in (5e-324, 1e-40, 1.2e-38, 1e-20):
    sampler = GenerationOptions(temperature=temperature, **filters).make_sampler(range(4))
    assert jax.jit(Sampler.draw)(sampler, logits_BxV, positions_B).tolist() == likeliest.tolist(), temperature
    left = jax.jit(Sampler.compute_shares)(sampler, logits_BxV)
    np.testing.assert_array_equal(left, np.eye(11)[likeliest], f"temperature {temperature}")


def test_seeds_decide_and_rows_end_at_their_stop_marks_and_where_learned_positions_do(decoder):
  free, again, other = (diffeq_nnx.generate(decoder, PROMPTS, max_tokens=8, seed=seed) for seed in (3, 3, 4))
  assert free == again != other
  mark = free[1][4]
  ended = diffeq_nnx.generate(decoder, PROMPTS, max_tokens=8, seed=3, stop_ids=[mark])
  assert ended == [row[: row.index(mark)] if mark in row else row for row in free] and len(ended[1]) <= 4
  gpt = make(small_model(num_steps=1))
  made = diffeq_nnx.generate(gpt, [[1] * 10, [2] * 12, [3]], max_tokens=8, temperature=0)
  assert [len(row) for row in made] == [3, 1, 8]


def test_a_row_that_has_ended_goes_to_the_next_prompt_and_no_text_changes(decoder):
  """Twelve prompts in three rows: the ring of 64 slots turns more than once; texts end at a mark or at their length."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(31, size=size).tolist() for size in (3, 30, 1, 9, 40, 2, 5, 17, 1, 33, 4, 8)]
  options = dict(max_tokens=20, seed=4)

  def ended_texts(numbers, **more):
    """(number, why it ended, ids) of the texts of these prompts, as they end."""
    ids = [[] for _ in numbers]
    take = lambda n, token: "mark" if token == 1 else ids[n].append(token)
    asked, how = [prompts[n] for n in numbers], GenerationOptions(**more, **options)
    found = batching.continue_prompts(decoder, asked, how, take, row_numbers=numbers)
    return [(numbers[n], reason, ids[n]) for n, reason in found]

  alone = [ended_texts([n])[0] for n in range(12)]  # each with the random numbers that it has among the others
  lengths = [len(ids) for _, _, ids in alone]
  assert len({*lengths}) > 3 and sum(lengths) > 3 * 40
  together = ended_texts(list(range(12)), rows=3)
  assert sorted(together) == alone != together
  assert {(reason, len(ids) == 20) for _, reason, ids in together} == {("length", True), ("mark", False)}


def test_long_prompts_that_are_read_in_chunks_are_continued_as_those_read_at_once(decoder, monkeypatch):
  rng = np.random.default_rng(1)
  prompts = [rng.integers(31, size=size).tolist() for size in (5, 70, 130, 135)]
  expected = diffeq_nnx.generate(decoder, prompts, max_tokens=9, temperature=0)
  monkeypatch.setattr(decoding, "CHUNK", 64)
  assert diffeq_nnx.generate(decoder, prompts, max_tokens=9, temperature=0, rows=2) == expected


def test_bad_input_is_one_line(decoder):
  for prompts, how, part in (
    ([], {}, "prompts: none given"),
    ([[1], []], {}, "prompts[1]: has no tokens"),
    ([[31]], {}, "prompts[0]: holds the id 31; the model's ids are 0 to 30"),
    ([[-1]], {}, "holds the id -1"),
    ([1, 2], {}, "prompts[0]: must be a list of token ids, not 1"),
    (np.array([[1.7, 2.9]]), {}, "prompts[0]: must be a list of token ids"),
    ([[1]], {"max_tokens": 2.0}, "max_tokens=2.0: must be an integer"),
    ([[1]], {"max_tokens": 0}, "max_tokens=0: must be 1 or above"),
    ([[1]], {"temperature": -0.5}, "temperature=-0.5: must be 0"),
    ([[1]], {"top_k": 0}, "top_k=0: must be 1 or above"),
    ([[1]], {"top_p": 0.0}, "top_p=0.0: must lie between 0 (excluded) and 1"),
    ([[1]], {"num_steps": 5}, "num_steps=5: this Decoder was made for 1"),
  ):
    assert part in told(lambda: diffeq_nnx.generate(decoder, prompts, **how))
  gpt = moved_instance(small_model())
  assert "13 tokens; the model has 12 positions" in told(lambda: diffeq_nnx.generate(gpt, [[1] * 13]))
  stored = moved_instance(small_model(weights="stored"))
  assert "stored, for its own 3 steps" in told(lambda: diffeq_nnx.generate(stored, [[1]], num_steps=4))
  make = lambda *texts, **how: diffeq_nnx.generate_texts(decoder, data.load_tokenizer("bytes"), texts, **how)
  assert "prompts[1]='': gives no tokens" in told(lambda: make("a", ""))
  assert "stop: holds an empty string" in told(lambda: make("a", stop=[""]))


def test_a_mesh_of_the_caller_s_changes_nothing():
  """Not even one whose axes are explicit, as those of `jax.make_mesh` are."""
  generate = lambda: diffeq_nnx.generate(make(small_model(num_steps=1)), [[1, 2]], max_tokens=3, temperature=0)
  alone = generate()
  with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    assert generate() == alone


def test_calls_of_like_lengths_compile_nothing_anew(decoder):
  def compiled():
    return decoding.read_tokens._cache_size()

  diffeq_nnx.generate(decoder, [[1]], max_tokens=3, top_p=0.5)
  before = compiled()
  diffeq_nnx.generate(decoder, [[1] * 40], max_tokens=20, top_p=0.9, temperature=0.7, seed=5)
  assert compiled() == before


SPLIT = """
import jax
from flax import nnx
import numpy as np
import diffeq_nnx
from diffeq_nnx.parallel import sharding
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.analysis.clustering import depth_spread
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.harness.scoring import Scorer
from diffeq_nnx.inference import speculation
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.training.step import all_params, state_shardings
from tests.conftest import moved_instance, small_config, small_model
from tests.harness_cases import by_number, trees
config = small_config(small_model(num_steps=1, embed_dim=32, num_kv_heads=4, mlp_dim=64))
model = moved_instance(config.model)
prompts, requests = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11], [2]], trees(10, longest=12, V=31)
texts = diffeq_nnx.generate(model, prompts, max_tokens=5, seed=1)
logprobs, greedy = by_number(Scorer(model), requests)

def place(mesh):
  places = all_params(state_shardings(config, mesh))
  return nnx.merge(nnx.graphdef(model), jax.device_put(nnx.to_pure_dict(nnx.state(model)), places))

mesh = sharding.make_mesh(MeshConfig(context=2, fsdp=2, tensor=2))
for where, devices, parts, batches in ((None, 1, 1, [None]), (mesh, 8, 2, [4, 1])):
  decoder = diffeq_nnx.Decoder(place(mesh), mesh=where)
  stored_OxI = decoder.ready.weights.sets[0]["up"]["kernel"].stored_OxI
  assert {len(leaf.devices()) for leaf in jax.tree.leaves(decoder.ready)} == {devices}
  assert stored_OxI.sharding.shard_shape(stored_OxI.shape)[0] == 64 // parts
  for rows in batches:
    assert diffeq_nnx.generate(decoder, prompts, max_tokens=5, seed=1, rows=rows) == texts, (devices, rows)

# analysis moves the model to one of the devices
with jax.set_mesh(mesh):
  analyzed = [AnalyzedModel(place(mesh))]
analyzed.append(AnalyzedModel(model))
for one, other in zip(*((*depth_spread(each, prompts[3]), each.weights_at([0.3])) for each in analyzed)):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one, other)

# all rounds of drafting begin with arrays in the same places, so that one program serves them
run_round, rounds = speculation.run_round, []
def spy(*arguments):
  rounds.append([leaf.sharding for leaf in jax.tree.leaves(arguments[2:5])])
  return run_round(*arguments)
speculation.run_round = spy
options = GenerationOptions(max_tokens=5, draft_tokens=1)
assert len(list(speculation.speculate(decoder, decoder, prompts, options, lambda n, token: None))) == len(prompts)
assert len(rounds) > 1 and all(one == rounds[0] for one in rounds), rounds

mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2))
scorer = Scorer(place(mesh), mesh=mesh)
assert not jax.tree.leaves(scorer.ready.weights)[-1].sharding.is_fully_replicated
found = by_number(scorer, requests)
np.testing.assert_allclose(found[0], logprobs, rtol=0, atol=2e-5)
assert found[1] == greedy
"""


@pytest.mark.slow(reason="a process with eight devices")
def test_a_model_split_over_devices_generates_scores_and_is_analyzed_as_it_is_on_one():
  on_eight_devices(SPLIT)
