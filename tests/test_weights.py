"""The weight sources: the spread they start with, their times, and the generator's gradient."""

import dataclasses

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.config import ModelConfig, TimeConfig
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import params_of
from diffeq_nnx.model.time_embedding import frequencies, sinusoidal_features
from tests.conftest import perturb, small_instance, small_model

WIDE = dict(num_steps=6, embed_dim=64, num_heads=4, vocab_size=256, seq_len=128, dtype="float32")
TIME = TimeConfig(sinusoidal_dim=32, time_embed_dim=16)


def test_a_plain_model_starts_as_gpt_2_and_generated_weights_with_its_spread():
  start = lambda **changes: Model(ModelConfig(**{**WIDE, **changes}), rngs=nnx.Rngs(0))
  tables_of = lambda model: (model.embedding[...], (model.positions if model.head is None else model.head)[...])
  for field in ("llama", "gpt"):
    for table in jax.jit(lambda: tables_of(start(field=field, weights="stored")))():
      assert np.asarray(table).std() == pytest.approx(0.02, rel=0.05), field
  time = dataclasses.replace(TIME, embedding="shared_mlp")
  sets_of = lambda **changes: jax.device_get(jax.jit(lambda: start(**changes).block_weights().sets)())
  plain, made = sets_of(weights="stored"), sets_of(time=time)
  for group, leaves in plain.items():
    for name, leaf in leaves.items():
      found = made[group][name]
      if name == "kernel":
        assert found.std() == pytest.approx(leaf.std(), rel=0.05), group
      else:
        np.testing.assert_array_equal(found, float(name == "scale"))
        np.testing.assert_array_equal(leaf, float(name == "scale"))


@pytest.mark.parametrize(
  "field,tables", [("gpt", {"embedding": 0.02, "positions": 0.01}), ("llama", {"embedding": 1.0, "head": 0.02})]
)
def test_every_parameter_starts_with_the_spread_of_the_published_code(field, tables):
  changes = {"field": field, "initialization": "published", "embed_dim": 32, "time": TIME}
  model = small_instance(ModelConfig(**WIDE | changes))
  params = traverse_util.flatten_dict(params_of(model))
  constants = {("final_norm", "scale"): 1.0, ("final_norm", "shift"): 0.0}
  T = model.config.time.time_embed_dim
  for path, leaf in params.items():
    leaf, name = np.asarray(leaf), path[-1]
    if len(path) == 1:
      expected = tables.pop(name)
    elif path in constants or path[1] == "time_mlp" and "bias" in name or name in ("scale", "shift"):
      np.testing.assert_array_equal(leaf, constants.get(path, 0.0))
      continue
    elif name == "bias":
      expected = 1e-4
    else:
      expected = 0.02
      if path[1] == "generator":
        np.testing.assert_array_equal(leaf[T], 0.0)  # F_0
        leaf = leaf[:T]
    assert leaf.std() == pytest.approx(expected, rel=0.1) and abs(leaf.mean()) < expected / 10, path
  assert not tables


def test_features_are_float32_whatever_the_model_computes_in():
  """In bfloat16 neighboring times would share features: 1000 t is distinguished by 4 radians at best."""
  times = (np.arange(24) + 1) / 24
  features = jax.jit(sinusoidal_features)(times, frequencies(TimeConfig(sinusoidal_dim=128)), 1000.0)
  exact = np.sin(1000.0 * times[:, None] * 10000.0 ** (-np.arange(128) / 128)[None])
  assert features.dtype == jnp.float32 and features.shape == (24, 257)
  np.testing.assert_allclose(features[:, 1:129], exact, atol=2e-4)
  made = lambda: Model(small_model(dtype="bfloat16"), rngs=nnx.Rngs(0)).weight_source.time_vectors(times)
  assert jax.eval_shape(made).dtype == jnp.float32


def test_learned_frequencies_start_at_the_fixed_ones_and_the_generators_gradient_agrees_with_finite_differences(x64):
  time = TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="learned", scale=10.0)
  graph, state = nnx.split(small_instance(small_model(dtype="float64", time=time)))
  np.testing.assert_array_equal(state["weight_source"]["frequencies_M"][...], frequencies(time, jnp.float64))
  params = perturb(nnx.to_pure_dict(state))
  shapes = jax.eval_shape(lambda p: nnx.merge(graph, p).block_weights(), params)
  cotangents = perturb(jax.tree.map(lambda a: np.zeros(a.shape), shapes), seed=7, scale=1.0)

  def pairing(params):
    made = nnx.merge(graph, params).block_weights().sets
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(cotangents)))

  gradient = jax.jit(jax.grad(pairing))(params)
  paired = jax.jit(pairing)
  for seed in range(3):
    direction = perturb(jax.tree.map(np.zeros_like, params), seed=seed, scale=1.0)
    moved = lambda h: paired(jax.tree.map(lambda p, d: p + h * d, params, direction))
    numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5
    exact = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    np.testing.assert_allclose(exact, numeric, rtol=1e-6)
