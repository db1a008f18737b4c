"""Discretized models: exactly the logits of the continuous one, at any number of steps and on uneven grids."""

import dataclasses
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.config import TimeConfig
from diffeq_nnx.depth.discretization import discretized_config
from diffeq_nnx.model import grids
from diffeq_nnx.model.parameters import build, params_of
from tests.conftest import moved_instance, small_config, small_model, told

TOKENS_2x12 = np.random.default_rng(0).integers(31, size=(2, 12))
# of waves faster than the default, which a stored model's config has
MEAN = TimeConfig(sinusoidal_dim=6, time_embed_dim=5, weights_at="mean", scale=3000.0)


@nnx.jit(static_argnums=(1,))
def logits(model, num_steps=None):
  return model(jnp.asarray(TOKENS_2x12), num_steps)


# both kinds of weights, both blocks and both dtypes; None: the model's own 3 steps
@pytest.mark.parametrize(
  "changes,num_steps,num_sets",
  [
    pytest.param({"dtype": "bfloat16", "solver": "heun"}, None, 4, id="generated"),
    pytest.param({"time": MEAN, "horizon": 2.0}, 5, 5, id="mean"),
    pytest.param({"weights": "shared", "field": "llama", "norm_shift": True, "horizon": 2.5}, 2, 2, id="shared"),
  ],
)
def test_at_any_number_of_steps_it_is_the_model_there(changes, num_steps, num_sets):
  model = moved_instance(small_model(**changes))
  stored = diffeq_nnx.discretize(model, num_steps)
  own, config = model.config, stored.config
  assert (config.weights, config.num_steps, config.total_time) == ("stored", num_steps or 3, own.total_time)
  assert (config.initialization, config.norm_shift) == (own.initialization, own.norm_shift)
  whole = small_config(config)
  assert config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(whole)))) == whole
  weights = params_of(stored)["weight_source"]
  assert {*weights} == {"stored"} and {len(leaf) for leaf in jax.tree.leaves(weights)} == {num_sets}
  assert ("shift" in weights["stored"]["mlp_norm"]) == own.block_shift
  np.testing.assert_allclose(logits(stored), logits(model, num_steps), rtol=0, atol=2e-6)


def test_every_number_of_steps_is_exactly_that_many():
  """The published code takes int(1 / dt) steps, which loses one at 93, 99, 105 and 117."""
  for num_steps in (1, 2, 3, 93, 98, 99, 105, 117):
    grid, uneven = grids.uniform_grid(num_steps, 1.0), grids.uneven_grid((1 / num_steps,) * num_steps)
    assert grid.num_steps == uneven.num_steps == num_steps and grid.edges[-1] == uneven.edges[-1] == 1
    np.testing.assert_allclose(uneven.edges, grid.edges, rtol=1e-12)
    assert abs(sum(grid.dts) - 1) < 1e-12


@pytest.mark.parametrize("changes", [{"solver": "heun"}, {"time": MEAN}], ids=["nodes", "mean"])
def test_on_an_uneven_grid_it_is_the_solver_on_that_grid(changes, x64):
  model = moved_instance(small_model(dtype="float64", horizon=2.0, **changes))
  sizes = (0.5, 0.1, 1.0, 0.4)
  stored = diffeq_nnx.discretize(model, step_sizes=sizes)
  grid = dataclasses.replace(grids.Grid((0.0, 0.25, 0.3, 0.8, 1.0), sizes), weights_at=model.config.time.weights_at)
  assert stored.grid() == grid
  config = dataclasses.replace(model.config, step_sizes=sizes, num_steps=4, horizon=None)
  generated = build(config, params_of(model))
  assert generated.grid() == dataclasses.replace(grid, radians=model.grid().radians)
  np.testing.assert_allclose(logits(stored), logits(generated), rtol=0, atol=1e-12)
  again = diffeq_nnx.discretize(stored)
  assert again.config == stored.config
  jax.tree.map(np.testing.assert_array_equal, params_of(again), params_of(stored))


def test_mistakes_are_told():
  generated, stored = small_model(), small_model(weights="stored")
  for arguments, part in (
    ({"num_steps": 0}, "num_steps=0: must be 1 or above"),
    ({"num_steps": 2, "step_sizes": (1, 2)}, "give one of them"),
    ({"step_sizes": (1, 1)}, "add up to the model's horizon, 3"),
    ({"step_sizes": ()}, "above 0"),
    ({"model": stored, "num_steps": 5}, "num_steps=5: the weights of this model are stored, for its own 3 steps"),
  ):
    assert part in told(lambda: discretized_config(**{"model": generated, **arguments})), part
  line = told(lambda: dataclasses.replace(generated, step_sizes=(1.0, 2.0), horizon=3.0))
  assert "leave model.horizon at None" in line
