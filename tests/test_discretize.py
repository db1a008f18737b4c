"""Discretized models: exactly the logits of the continuous one, at any number of steps and on uneven grids."""

import dataclasses
import itertools
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.depth.discretization import discretized_config
from diffeq_nnx.model import grids
from tests.conftest import PRESETS, moved_instance, small_config, small_model, told

TOKENS_2x12 = np.random.default_rng(0).integers(31, size=(2, 12))


@nnx.jit(static_argnums=(1,))
def logits(model, num_steps=None):
  return model(jnp.asarray(TOKENS_2x12), num_steps)


# each kind of weights, and embeddings of the time
@pytest.mark.parametrize(
  "preset,dtype",
  [*zip(["diffeq", "shared", "constant", "learned", "uniform"], itertools.cycle(["float32", "bfloat16"]))],
)
def test_at_its_own_number_of_steps_nothing_changes(preset, dtype):
  model = moved_instance(small_model(dtype=dtype, **PRESETS[preset]))
  stored = diffeq_nnx.discretize(model)
  assert stored.config.weights == "stored" and stored.config.num_steps == 3
  np.testing.assert_allclose(logits(stored), logits(model), rtol=0, atol=2e-6)


@pytest.mark.parametrize("changes", [{"norm_shift": True}, {"initialization": "published", "norm_shift": False}])
def test_the_shift_of_a_llamas_norms_is_stored_too(changes):
  model = moved_instance(small_model(field="llama", horizon=1.0, **changes))
  stored = diffeq_nnx.discretize(model, 5)
  kept = [(config.initialization, config.norm_shift) for config in (model.config, stored.config)]
  assert kept[0] == kept[1]
  assert ("shift" in stored.weight_source.stored["mlp_norm"]) == model.config.block_shift
  np.testing.assert_allclose(logits(stored), logits(model, 5), rtol=0, atol=2e-6)


# every field, solver and number of steps
@pytest.mark.parametrize(
  "field,solver,num_steps", [("gpt", "euler", 7), ("llama", "euler", 2), ("gpt", "sequential", 1)]
)
def test_at_any_number_of_steps_it_is_the_model_there(field, solver, num_steps):
  model = moved_instance(small_model(field=field, solver=solver, horizon=2.5))
  stored = diffeq_nnx.discretize(model, num_steps)
  assert stored.config.num_steps == num_steps and stored.config.total_time == 2.5
  assert {len(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(stored))["weight_source"])} == {num_steps}
  np.testing.assert_allclose(logits(stored), logits(model, num_steps), rtol=0, atol=2e-6)


def test_every_number_of_steps_is_exactly_that_many():
  """The published code takes int(1 / dt) steps, which loses one for some numbers."""
  assert [n for n in range(1, 400) if int(1 / (1 / n)) != n][:4] == [93, 99, 105, 117]
  for num_steps in range(1, 400):
    grid, uneven = grids.uniform_grid(num_steps, 1.0), grids.uneven_grid((1 / num_steps,) * num_steps)
    assert grid.num_steps == uneven.num_steps == num_steps and grid.edges[-1] == uneven.edges[-1] == 1
    np.testing.assert_allclose(uneven.edges, grid.edges, rtol=1e-12)
    assert abs(sum(grid.dts) - 1) < 1e-12


def test_an_uneven_grid_is_the_solver_on_that_grid(x64):
  model = moved_instance(small_model(dtype="float64", horizon=2.0))
  sizes = (0.5, 0.1, 1.0, 0.4)
  stored = diffeq_nnx.discretize(model, step_sizes=sizes)
  grid = grids.Grid((0.0, 0.25, 0.3, 0.8, 1.0), sizes)
  assert stored.grid() == grid

  @jax.jit
  def expected():
    hidden = model.hidden(jnp.asarray(TOKENS_2x12), model.block_weights(grid))
    return jnp.einsum("bld,vd->blv", hidden, model.unembedding())

  np.testing.assert_allclose(logits(stored), expected(), rtol=0, atol=1e-12)
  again = diffeq_nnx.discretize(stored)
  assert again.config == stored.config
  np.testing.assert_array_equal(logits(again), logits(stored))
  even = diffeq_nnx.discretize(model, step_sizes=(0.5,) * 4)
  np.testing.assert_allclose(logits(even), logits(diffeq_nnx.discretize(model, 4)), rtol=0, atol=1e-12)


def test_mistakes_are_value_errors():
  model = moved_instance(small_model())
  for arguments, part in (
    ({"num_steps": 0}, "num_steps=0: must be 1 or above"),
    ({"num_steps": 2, "step_sizes": (1, 2)}, "give one of them"),
    ({"step_sizes": (1, 1)}, "add up to the model's horizon, 3"),
    ({"step_sizes": (4, -1)}, "above 0"),
    ({"step_sizes": ()}, "above 0"),
  ):
    with pytest.raises(ValueError, match=part):
      diffeq_nnx.discretize(model, **arguments)
  with pytest.raises(ValueError, match="stored, for its own 3 steps"):
    diffeq_nnx.discretize(moved_instance(small_model(weights="stored")), 5)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_config_of_a_discretized_model_is_a_valid_one(preset):
  for arguments in ({}, {"num_steps": 9}, {"step_sizes": (1.0, 0.5, 1.5)}):
    source = small_model(**{**PRESETS[preset], "horizon": 3.0})
    if source.weights == "stored" and arguments:
      continue
    config = small_config(discretized_config(source, **arguments))
    assert config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(config)))) == config
    assert config.model.total_time == 3
  for changes, part in (({"horizon": 3.0}, "leave model.horizon at None"), ({}, "must be model.num_steps=3 numbers")):
    assert part in told(lambda: dataclasses.replace(small_model(), step_sizes=(1.0, 2.0), **changes))
