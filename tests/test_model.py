"""The forward pass: against an independent float64 reference, causality, and identities between models."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.config import Config
from diffeq_nnx.config_fields import list_fields
from diffeq_nnx.model import grids, integration, vector_fields
from diffeq_nnx.model.cpu_kernels import SmallerFirst
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, params_of, partial_model
from tests import reference
from tests.conftest import PRESETS, equal, moved_instance, small_model, told, weights_of

TOKENS_2x12 = np.arange(24).reshape(2, 12)


@nnx.jit
def logits_of(model: Model, tokens, **packing) -> jax.Array:
  """The forward pass, compiled as one program."""
  return model(jnp.asarray(tokens), **packing)


def reference_weights(model: Model, params: dict) -> dict:
  """BlockWeights by the reference, from the parameters of the model's weight source."""
  config, times = model.config, model.times().times_U
  if config.weights == "stored":
    return params["stored"]
  if config.weights == "shared":
    return jax.tree.map(lambda a: np.stack([a] * len(times)), params["stored"])
  times = np.zeros(len(times)) if config.time.constant else np.asarray(times)
  M, uniform = config.time.sinusoidal_dim, config.time.embedding == "uniform"
  frequencies = params.get("frequencies_M", np.arange(1, M + 1) / M if uniform else reference.fixed_frequencies(M))
  features_SxP = reference.sinusoidal(times, frequencies, np.pi * M if uniform else config.time.scale)
  e_NxSxT = reference.time_vectors(features_SxP, params["time_mlp"])
  made = {}
  for n, (group, leaves) in enumerate(model.field.specs(config).items()):
    e_SxT, made[group] = e_NxSxT[n % len(e_NxSxT)], {}
    for name, leaf in leaves.items():
      basis = params["generator"][group][name]
      constant = basis[-1] if name == "kernel" else np.full(leaf.shape, leaf.start)
      made[group][name] = reference.generate(e_SxT, basis[: config.time.time_embed_dim], constant)
  return made


def heads_apart(weights: dict, config) -> dict:
  """BlockWeights with an axis for the heads, as the reference has them."""
  K, G, C = config.kv_heads, config.num_heads // config.kv_heads, config.head_size
  slots = {"qkv": (K, G + 2, C), "query": (K * G, C), "key": (K, C), "value": (K, C)}
  apart = {
    group: {name: leaf.reshape(*leaf.shape[:-1], *slots[group]) for name, leaf in weights[group].items()}
    for group in slots
    if group in weights
  }
  out = weights["out"]["kernel"]
  return {**weights, **apart, "out": {**weights["out"], "kernel": out.reshape(len(out), K * G, C, -1)}}


# each kind of weights, each embedding of the time, both orders of the branches, and what a block may have
@pytest.mark.parametrize(
  "field,changes",
  [
    pytest.param("gpt", {"solver": "sequential", "weights": "shared"}, id="gpt, shared weights"),
    pytest.param("gpt", {**PRESETS["published"], "norm_shift": True}, id="gpt as published"),
    pytest.param("gpt", {**PRESETS["shared_mlp"], "tied_head": False, "head_dim": 10}, id="gpt, a head of its own"),
    pytest.param("llama", {"initialization": "published", "solver": "sequential"}, id="llama as published"),
    pytest.param("llama", {**PRESETS["constant"], "initialization": "published", "norm_shift": False}, id="no shift"),
    pytest.param("llama", {**PRESETS["learned"], "norm_shift": True}, id="llama, shift"),
    pytest.param("llama", {**PRESETS["baseline"], "qkv_bias": True, "tied_head": True}, id="qwen2"),
    pytest.param("llama", {**PRESETS["uniform"], "qk_norm": True, "head_dim": 10}, id="qwen3"),
  ],
)
def test_logits_agree_with_the_numpy_reference_to_1e_10_and_norms_have_a_shift_where_they_should(field, changes, x64):
  model = moved_instance(small_model(field=field, dtype="float64", **changes), seed=1)
  config, grid = model.config, model.grid()
  params = jax.tree.map(np.asarray, params_of(model))
  weights = reference_weights(model, params["weight_source"])
  shifted = field == "gpt" or changes.get("norm_shift", config.initialization == "published")
  assert [("shift" in weights[norm]) for norm in ("attention_norm", "mlp_norm")] == [shifted] * 2
  assert config.block_shift == shifted and ("shift" in params["final_norm"]) == (field == "gpt")
  tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, config.seq_len))
  weights, sequential = heads_apart(weights, config), config.solver == "sequential"
  expected = reference.logits(tokens, params, weights, field, grid.dts, sequential)
  np.testing.assert_allclose(logits_of(model, tokens), expected, rtol=0, atol=1e-10)


LENGTHS = (5, 4, 3)  # of three documents that share a row
PACKING = {
  "segment_ids_BxL": np.repeat(np.arange(3), LENGTHS)[None],
  "positions_BxL": np.concatenate([np.arange(length) for length in LENGTHS])[None],
}


@pytest.mark.parametrize("field,solver,weights", [("gpt", "sequential", "stored"), ("llama", "euler", "generated")])
def test_a_token_changes_what_follows_in_its_document_whose_logits_are_those_alone(field, solver, weights, x64):
  """Where documents are not apart, all that follows in the row."""
  model = moved_instance(small_model(field=field, solver=solver, weights=weights, dtype="float64"), seed=1)
  tokens_1x12 = np.random.default_rng(1).integers(30, size=(1, 12))
  tokens_13x12 = np.concatenate([tokens_1x12, tokens_1x12 + np.eye(12, dtype=int)])  # then each token changed in turn
  alone_3x12 = np.zeros((3, 12), int)  # with padding behind each, which none of its tokens sees
  for row, part in zip(alone_3x12, np.split(tokens_1x12[0], np.cumsum(LENGTHS)[:-1])):
    row[: len(part)] = part
  whole = np.asarray(logits_of(model, np.concatenate([tokens_13x12, alone_3x12])))
  packed = np.asarray(logits_of(model, tokens_13x12, **{key: np.repeat(ids, 13, 0) for key, ids in PACKING.items()}))
  alone = [row[:length] for row, length in zip(whole[13:], LENGTHS)]
  np.testing.assert_allclose(packed[0], np.concatenate(alone), rtol=0, atol=1e-10)
  for logits_13x12xV, ids_1xL in ((whole[:13], np.zeros((1, 12))), (packed, PACKING["segment_ids_BxL"])):
    moved_LxL = np.abs(logits_13x12xV[1:] - logits_13x12xV[:1]).max(-1)
    expected_LxL = np.triu(ids_1xL.T == ids_1xL)
    assert (moved_LxL[expected_LxL] > 1e-6).all() and (moved_LxL[~expected_LxL] < 1e-12).all()


def test_rematerialization_changes_neither_value_nor_gradient():
  """Of several steps at a time, which "none" ignores; remat "full": tests/test_solvers.py, against undone steps."""
  model = moved_instance(small_model(num_steps=4, weights="stored"))

  def norm(weights, adjoint):
    return jnp.square(model.hidden(TOKENS_2x12, weights, dropout_key=jax.random.key(0), adjoint=adjoint)).mean()

  value_and_gradient = jax.jit(jax.value_and_grad(norm), static_argnums=1)
  weights = weights_of(model)
  plain = value_and_gradient(weights, integration.Checkpointed())
  text = lambda *how: value_and_gradient.lower(weights, integration.Checkpointed(*how)).as_text()
  assert text() == text("none", 2)
  again = value_and_gradient(weights, integration.Checkpointed("dots", 2))
  equal(plain, again, 1e-6, 1e-4)


def test_dropout_differs_by_step_branch_and_key():
  seen = []

  class Seen(vector_fields.Dropout):
    def __call__(self, key, x_BxLxD):
      jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
      return x_BxLxD

  model = moved_instance(small_model(dropout=0.5, num_steps=2))
  tokens, weights, field = TOKENS_2x12, weights_of(model), vector_fields.BoundField(model.field, dropout=Seen())
  solve = lambda x_BxLxD: integration.solve(model.solver, field, x_BxLxD, weights, key=jax.random.key(0))
  jax.jit(solve)(np.ones((1, 12, 24), "float32"))
  jax.effects_barrier()
  assert len(set(seen)) == 4  # 2 steps, 2 branches
  hidden = jax.jit(lambda number: model.hidden(tokens, weights, dropout_key=jax.random.key(number)))
  assert (np.asarray(hidden(0)) != hidden(1)).any()


def test_parameters_of_another_model_are_told_by_name_shape_and_dtype():
  config = small_model(weights="stored")
  params = jax.tree.map(np.asarray, params_of(moved_instance(config)))
  build(config, params)
  table = params["embedding"]
  without_embedding = {name: leaf for name, leaf in params.items() if name != "embedding"}
  for given, part in (
    (without_embedding, "params: embedding is missing; pass"),
    ({**params, "embedding": table[:, :-1]}, "embedding has the shape (31, 23), in the model (31, 24)"),
    ({**params, "embedding": table.astype("bfloat16")}, "embedding is in bfloat16, in the model in float32"),
    ({**params, "weight_source": {"stored": {}}}, ", and 9 more; pass"),
    (nnx.State({}), "params: State; must be a nested dict"),
  ):
    assert part in told(lambda: build(config, given))
  for one in (
    lambda: nnx.jit(lambda: build(config, without_embedding))(),
    lambda: partial_model(config, {"embedding": np.zeros((24, 31), np.float32)}),  # a part is checked too
  ):
    assert "params: " in told(one)
  partial_model(config, {"embedding": np.zeros((31, 24), "bfloat16")})  # as for generation


def test_arguments_and_grids_that_cannot_be_are_told():
  model, other = moved_instance(small_model()), moved_instance(small_model(solver="rk4"))
  weights, of_other = (jax.eval_shape(one.block_weights) for one in (model, other))
  for call, part in (
    (lambda: model.hidden(TOKENS_2x12, of_other), "3 steps of this solver need those at 3"),
    (lambda: model.hidden(np.zeros((1, 13), int), weights), "13 tokens: the model has 12 learned positions"),
    (lambda: model(TOKENS_2x12[0]), "int32 of the shape (12,); must be integers [batch, length]"),
    (lambda: model(TOKENS_2x12, 3.0), "num_steps=3.0: must be an integer"),
    (lambda: Model(Config(), rngs=nnx.Rngs(0)), "config: a Config; pass a ModelConfig"),
    (lambda: grids.Grid((0.0, 0.5, 0.2, 1.0), (1.0,) * 3), "must rise from 0 to 1"),
    (lambda: grids.Grid((0.0, 1.0), (-1.0,)), "sizes=(-1.0,): must be 0 or above"),
  ):
    assert part in told(call, ValueError)


def test_a_registered_block_has_the_rules_and_defaults_of_the_one_it_inherits():
  choices = list_fields(Config)["model.field"].metadata["choices"]
  try:
    assert "lacks attention" in told(lambda: vector_fields.register("mine", lambda: None))
    vector_fields.register("mine", type("Mine", (vector_fields.LlamaField,), {}))
    assert small_model(field="mine").block_eps == small_model(field="llama").block_eps != small_model().block_eps
    line = told(lambda: small_model(field="mine", embed_dim=36, num_heads=4, num_kv_heads=4))
    assert "must have an even width to be rotated" in line
  finally:
    choices.remove("mine")


def test_bfloat16_computes_near_float32():
  model = moved_instance(small_model(), scale=0.02)
  low = build(dataclasses.replace(model.config, dtype="bfloat16"), params_of(model))
  assert jax.eval_shape(lambda: low.block_weights().sets["up"]["kernel"]).dtype == jnp.bfloat16
  found, expected = logits_of(low, TOKENS_2x12), np.asarray(logits_of(model, TOKENS_2x12))
  assert found.dtype == jnp.float32
  assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-2


@pytest.mark.parametrize("size", [3, 9])  # of the product, beside 5 of its factor
def test_a_kernel_with_the_smaller_factor_first_has_the_same_product_and_gradients(size, x64):
  rng = np.random.default_rng(0)
  x_BxLxI, kernel_IxO, g_BxLxO = (rng.normal(size=shape) for shape in ((2, 4, 5), (5, size), (2, 4, size)))
  made, pull = jax.vjp(lambda x, kernel: x @ SmallerFirst(kernel), x_BxLxI, kernel_IxO)
  expected, pull_expected = jax.vjp(lambda x, kernel: x @ kernel, x_BxLxI, kernel_IxO)
  for one, other in zip((made, *pull(g_BxLxO)), (expected, *pull_expected(g_BxLxO))):
    np.testing.assert_allclose(one, other, rtol=1e-12)
