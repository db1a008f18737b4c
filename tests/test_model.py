"""The forward pass: against an independent float64 reference, causality, and identities between models."""

import dataclasses
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx.model import grids, integration, vector_fields
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, partial_model
from diffeq_nnx.model.smaller_first import SmallerFirst
from tests import reference
from tests.conftest import PRESETS, moved_instance, small_instance, small_model, told, weights_of


def make(model_config, moved=True) -> Model:
  """A model, its parameters moved off their initial values."""
  return moved_instance(model_config, seed=1) if moved else small_instance(model_config)


@nnx.jit(static_argnames="num_steps")
def logits_of(model: Model, tokens, num_steps: int | None = None, **packing) -> jax.Array:
  """The forward pass, compiled as one program."""
  return model(jnp.asarray(tokens), num_steps, **packing)


def numpy_of(module) -> dict:
  """Parameters as nested NumPy arrays."""
  return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))


def solved(model: Model, x_BxLxD, weights, **bound) -> jax.Array:
  """The state at the end of the model's own grid."""
  field = vector_fields.BoundField(model.field, **bound)
  return integration.solve(model.solver, field, x_BxLxD, weights, key=jax.random.key(0))


def reference_weights(model: Model, times) -> dict:
  """BlockWeights by the reference, from the model's parameters."""
  params, config = numpy_of(model.weight_source), model.config
  if config.weights == "stored":
    return params["stored"]
  if config.weights == "shared":
    return jax.tree.map(lambda a: np.stack([a] * len(times)), params["stored"])
  times = np.zeros(len(times)) if config.time.constant else np.asarray(times)
  M, uniform = config.time.sinusoidal_dim, config.time.embedding == "uniform"
  frequencies = params.get("frequencies_M", np.arange(1, M + 1) / M if uniform else reference.fixed_frequencies(M))
  e_NxSxT = reference.time_vectors(
    reference.sinusoidal(times, frequencies, np.pi * M if uniform else config.time.scale), params["time_mlp"]
  )
  made = {}
  for n, (group, leaves) in enumerate(model.field.specs(config).items()):
    e_SxT = e_NxSxT[n % len(e_NxSxT)]
    made[group] = {}
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


VARIANTS = {
  "qwen2": {"qkv_bias": True, "tied_head": True},
  "qwen3": {"qk_norm": True, "head_dim": 10},
  "untied": {"tied_head": False, "head_dim": 10},
}
PUBLISHED_LLAMAS = {  # not presets: the field decides, too
  "published, sequential": {"initialization": "published", "solver": "sequential"},
  "published, stored": {"initialization": "published", "weights": "stored"},
  "published, no shift": {"initialization": "published", "norm_shift": False},
  "plain, shift": {"norm_shift": True},
}


# every preset once, and each kind of weights (generated, stored, shared), each solver and `published` with both fields
@pytest.mark.parametrize(
  "preset,field",
  [
    *zip(PRESETS, itertools.cycle(["gpt", "llama"])),
    ("diffeq", "llama"),
    ("published", "gpt"),
    *((preset, "llama") for preset in PUBLISHED_LLAMAS | VARIANTS),
    ("untied", "gpt"),
  ],
)
def test_logits_agree_with_the_numpy_reference_to_1e_10(preset, field, x64):
  config = small_model(field=field, dtype="float64", **(PRESETS | PUBLISHED_LLAMAS | VARIANTS)[preset])
  model = make(config)
  tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, config.seq_len))
  params, grid = numpy_of(model), model.grid()
  expected = reference.logits(
    tokens,
    params["embedding"],
    params.get("positions"),
    heads_apart(reference_weights(model, model.times().times_U), config),
    field,
    grid.dts,
    config.solver == "sequential",
    params["final_norm"],
    params.get("head", params["embedding"]),
  )
  np.testing.assert_allclose(logits_of(model, tokens), expected, rtol=0, atol=1e-10)


def test_the_published_llamas_block_norms_have_a_shift_and_its_final_norm_has_none():
  for changes, shifted in (
    ({}, False),
    ({"initialization": "published"}, True),
    ({"initialization": "published", "norm_shift": False}, False),
    ({"norm_shift": True}, True),
    ({"field": "gpt"}, True),
    ({"field": "gpt", "norm_shift": True}, True),
  ):
    model = moved_instance(small_model(**{"field": "llama", **changes}))
    sets = jax.eval_shape(lambda model: model.block_weights().sets, model)
    for norm in ("attention_norm", "mlp_norm"):
      assert ("shift" in sets[norm]) == shifted == model.config.block_shift
    assert ("shift" in model.final_norm) == (model.config.field == "gpt")


LENGTHS = (5, 4, 3)  # of three documents that share a row
PACKING = {
  "segment_ids_BxL": np.repeat(np.arange(3), LENGTHS)[None],
  "positions_BxL": np.concatenate([np.arange(length) for length in LENGTHS])[None],
}


@pytest.mark.parametrize("field,solver,weights", [("gpt", "sequential", "stored"), ("llama", "euler", "generated")])
def test_a_document_in_a_packed_row_has_the_logits_that_it_has_alone(field, solver, weights, x64):
  model = make(small_model(field=field, solver=solver, weights=weights, dtype="float64"))
  tokens_1x12 = np.random.default_rng(0).integers(31, size=(1, 12))
  alone_3x12 = np.zeros((3, 12), int)  # with padding behind each, which none of its tokens sees
  for row, part in zip(alone_3x12, np.split(tokens_1x12[0], np.cumsum(LENGTHS)[:-1])):
    row[: len(part)] = part
  alone = [row[:length] for row, length in zip(logits_of(model, alone_3x12), LENGTHS)]
  packed = logits_of(model, tokens_1x12, **PACKING)
  np.testing.assert_allclose(packed[0], np.concatenate(alone), rtol=0, atol=1e-10)


@pytest.mark.parametrize("field,solver,packing", [("gpt", "sequential", {}), ("llama", "euler", PACKING)])
def test_a_token_changes_what_follows_in_its_document_and_nothing_else(field, solver, packing, x64):
  """Where documents are not apart, all that follows in the row."""
  model = make(small_model(field=field, solver=solver, dtype="float64"))
  tokens_1x12 = np.random.default_rng(1).integers(30, size=(1, 12))
  tokens_13x12 = np.concatenate([tokens_1x12, tokens_1x12 + np.eye(12, dtype=int)])  # then each token changed in turn
  logits_13x12xV = np.asarray(
    logits_of(model, tokens_13x12, **{key: np.repeat(ids, 13, axis=0) for key, ids in packing.items()})
  )
  moved_LxL = np.abs(logits_13x12xV[1:] - logits_13x12xV[:1]).max(-1)
  ids_1xL = packing.get("segment_ids_BxL", np.zeros((1, 12)))
  expected_LxL = np.triu(ids_1xL.T == ids_1xL)
  assert (moved_LxL[expected_LxL] > 1e-6).all() and (moved_LxL[~expected_LxL] < 1e-12).all()


def test_rematerialization_changes_neither_value_nor_gradient():
  """One step and several steps at a time; "none" ignores the number."""
  model = make(small_model(num_steps=4))
  tokens = jnp.arange(24).reshape(2, 12)

  def norm(weights, adjoint):
    return jnp.square(model.hidden(tokens, weights, dropout_key=jax.random.key(0), adjoint=adjoint)).mean()

  value_and_gradient = jax.jit(jax.value_and_grad(norm), static_argnums=1)
  weights = weights_of(model)
  plain = value_and_gradient(weights, integration.Checkpointed())
  text = lambda *how: value_and_gradient.lower(weights, integration.Checkpointed(*how)).as_text()
  assert text() == text("none", 2)
  for kind, every in (("dots", 1), ("full", 2)):
    again = value_and_gradient(weights, integration.Checkpointed(kind, every))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)


def test_dropout_differs_by_step_and_is_off_without_a_key():
  config = small_model(dropout=0.5, num_steps=2)
  seen = []

  class Seen(vector_fields.Dropout):
    def __call__(self, key, x_BxLxD):
      jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
      return x_BxLxD

  model = make(config)
  tokens, weights = np.arange(24).reshape(2, 12), weights_of(model)
  jax.jit(lambda x: solved(model, x, weights, dropout=Seen()))(np.ones((1, 12, 24), "float32"))
  jax.effects_barrier()
  assert len(set(seen)) == 4  # 2 steps, 2 branches
  plain = jax.jit(lambda: model.hidden(tokens, weights))
  assert (np.asarray(plain()) == plain()).all()
  hidden = jax.jit(lambda number: model.hidden(tokens, weights, dropout_key=jax.random.key(number)))
  dropped = [np.asarray(hidden(number)) for number in (0, 0, 1)]
  assert (dropped[0] == dropped[1]).all() and (dropped[0] != dropped[2]).any()


def test_weights_are_integrated_over_their_own_grid():
  """At a number of steps that is not the model's own, and at steps of other sizes."""
  model = make(small_model(solver="heun"))
  tokens = np.arange(24).reshape(2, 12)
  own = np.asarray(logits_of(model, tokens))
  for grid, expected in (
    (model.grid(12), lambda: logits_of(model, tokens, 12)),
    (
      grids.uneven_grid((2.0, 0.5, 0.5)),
      lambda: logits_of(diffeq_nnx.discretize(model, step_sizes=(2.0, 0.5, 0.5)), tokens),
    ),
  ):
    weights = weights_of(model, grid)
    found = jax.jit(lambda weights: model.logits(model.hidden(tokens, weights)))(weights)
    np.testing.assert_allclose(found, expected(), rtol=0, atol=1e-5)
    assert np.abs(found - own).max() > 1e-3
    with pytest.raises(TypeError):
      model.hidden(tokens, weights, model.grid())


def test_weights_for_the_nodes_of_another_solver_are_an_error():
  model, other = make(small_model(solver="euler")), make(small_model(solver="rk4"))
  tokens = np.zeros((1, 12), np.int32)
  for weights, wanted in ((weights_of(other), 3), (dataclasses.replace(weights_of(model), grid=model.grid(12)), 12)):
    weights = jax.tree.map(np.asarray, weights)
    with pytest.raises(ValueError, match=f"steps of this solver need those at {wanted}"):
      model.hidden(tokens, weights)
    unrolled = dataclasses.replace(
      weights, sets=[jax.tree.map(lambda leaf: leaf[0], weights.sets)] * len(jax.tree.leaves(weights.sets)[0])
    )
    with pytest.raises(ValueError, match=f"steps of this solver need those at {wanted}"):
      model.hidden_unrolled(tokens, unrolled, Packing())


@pytest.mark.parametrize(
  "change,part",
  [
    (lambda p: p.pop("embedding"), "params: embedding is missing; pass"),
    (lambda p: p.update(head=p["embedding"]), "params: the model has no head; pass"),
    (lambda p: p.update(embedding=p["embedding"][:, :-1]), "embedding has the shape (31, 23), in the model (31, 24)"),
    (
      lambda p: p.update(embedding=p["embedding"].astype("bfloat16")),
      "embedding is in bfloat16, in the model in float32",
    ),
    (lambda p: p.update(embedding=3), "embedding is no array but of type int"),
    (lambda p: p["weight_source"]["stored"]["up"].pop("bias"), "weight_source.stored.up.bias is missing"),
    (lambda p: p.update(weight_source={"stored": {}}), ", and 9 more; pass"),
  ],
)
def test_parameters_of_another_model_are_told_by_name_shape_and_dtype(change, part):
  config = small_model(weights="stored")
  params = numpy_of(make(config))
  build(config, params)
  change(params)
  assert part in told(lambda: build(config, params))
  for one in (
    lambda: nnx.jit(lambda: build(config, params))(),
    lambda: build(config, nnx.State({})),
    lambda: partial_model(config, {"embedding": np.zeros((24, 31), np.float32)}),  # a part is checked too
    lambda: partial_model(config, {"final_norm": {}}),
  ):
    assert "params: " in told(one)
  partial_model(config, {"embedding": np.zeros((31, 24), "bfloat16")})  # as for generation


def test_arguments_that_cannot_be_are_told():
  model, tokens = make(small_model()), np.zeros((1, 12), np.int32)
  weights = weights_of(model)
  hidden = lambda adjoint: lambda: model.hidden(tokens, weights, adjoint=adjoint)
  for call, part in (
    (lambda: integration.Checkpointed("ful"), "remat='ful': must be one of none, dots, full; did you mean 'full'?"),
    (lambda: integration.Checkpointed("full", 0), "every=0: must be a whole number"),
    (hidden(integration.Reversible()), "the steps of this solver can't be undone; those of leapfrog can"),
    (hidden("full"), "adjoint='full': must be a Checkpointed or a Reversible"),
    (hidden(integration.Checkpointed("full", 2)), "train.remat_every=2: must divide the number of steps, 3"),
    (lambda: model(np.zeros((1, 13), np.int32)), "13 tokens: the model has 12 learned positions"),
    (lambda: make(small_model(weights="stored"))(tokens, 4), "num_steps=4: the weights of this model are stored, for"),
  ):
    with pytest.raises(ValueError) as error:
      call()
    assert part in str(error.value)


def test_a_grid_that_cannot_be_is_an_error():
  for make_grid, part in (
    (lambda: grids.Grid((0.0, 0.5, 0.2, 1.0), (1.0,) * 3), "must rise from 0 to 1"),
    (lambda: grids.Grid((0.0, 0.5), (1.0,)), "must rise from 0 to 1"),
    (lambda: grids.Grid((0.0, 1.0), (-1.0,)), "sizes=(-1.0,): must be 0 or above"),
    (lambda: grids.Grid((0.0, 1.0), (1.0,), weights_at="start"), "weights_at='start': must be one of nodes, end"),
    (lambda: grids.uneven_grid(()), "step_sizes=(): must be one or more numbers above 0"),
    (lambda: grids.uneven_grid((2.0, -1.0)), "step_sizes=(2.0, -1.0): must be"),
    (lambda: grids.make_grid(small_model(), 0), "num_steps=0: must be 1 or above"),
  ):
    with pytest.raises(ValueError) as error:
      make_grid()
    assert part in str(error.value)


def test_bfloat16_computes_near_float32():
  config = small_model()
  model = make(config, moved=False)
  low = build(dataclasses.replace(config, dtype="bfloat16"), nnx.to_pure_dict(nnx.state(model)))
  tokens = np.arange(24).reshape(2, 12)
  assert jax.eval_shape(lambda: low.block_weights().sets["up"]["kernel"]).dtype == jnp.bfloat16
  found, expected = logits_of(low, tokens), np.asarray(logits_of(model, tokens))
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
