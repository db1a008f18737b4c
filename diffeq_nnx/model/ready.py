"""A model ready for use at one number of solver steps: its weights are generated, its generator is left behind.

U weight sets: the distinct times of a pass.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx.config import MeshConfig, ModelConfig
from diffeq_nnx.model.grids import Grid
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import TABLES, Params, params_of, partial_model
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.parallel import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReadyModel:
  """What generation, scoring, analysis and distillation compute with, as an argument of compiled programs.

  Attributes:
    config: of the model.
    weights: at the times of its grid and the solver, perhaps unrolled.
    rest: the other parameters, tables in the dtype of the computation.
    mesh: the devices that hold them.
  """

  config: ModelConfig = dataclasses.field(metadata={"static": True})
  weights: GridWeights
  rest: Params
  mesh: Mesh = dataclasses.field(metadata={"static": True})

  def make_model(self) -> Model:
    """The model, without its generator."""
    return partial_model(self.config, self.rest)


def make_ready(
  model: Model,
  num_steps: int | None = None,
  *,
  config: ModelConfig | None = None,
  mesh: Mesh | None = None,
  unrolled: bool = False,
) -> ReadyModel:
  """Generates all weights of a model once.

  Args:
    model: its parameters may be split over several devices; the weights are generated there.
    num_steps: number of solver steps; None: the model's own.
    config: the model's, with another dtype, attention or dropout; None: unchanged.
    mesh: the devices of the model, over which everything stays split; None: everything is moved to one of them.
    unrolled: whether the weights are a list with an entry for each time.

  Raises:
    UserError: a number of steps that the model has no weights for.
  """
  config, grid, params = config or model.config, model.grid(num_steps), params_of(model)
  place = jnp.asarray(model.embedding[...]).sharding
  own: Any = place.mesh if isinstance(place, jax.sharding.NamedSharding) else one_device_mesh(model)
  with jax.set_mesh(mesh or own):  # and not in one of the caller's
    weights, rest = generate_weights(config, grid, unrolled, params)
  if mesh is None:
    mesh = one_device_mesh(model)
    weights, rest = jax.device_put((weights, rest), sharding.replicated(mesh))
  return ReadyModel(config, weights, rest, mesh)


def one_device_mesh(model: Model) -> Mesh:
  """A mesh of the first of the devices that hold a model."""
  device = min(jnp.asarray(model.embedding[...]).devices(), key=lambda device: device.id)
  return sharding.make_mesh(MeshConfig(), [device])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate_weights(config: ModelConfig, grid: Grid, unrolled: bool, params: Params) -> tuple[GridWeights, Params]:
  """The weights at all times of a pass, and the other parameters."""
  weights = partial_model(config, params).block_weights(grid)
  if unrolled:
    count = len(jax.tree.leaves(weights)[0])
    sets = [jax.tree.map(operator.itemgetter(i), weights.sets) for i in range(count)]
    weights = GridWeights(sets, grid)
  rest = {
    name: leaf.astype(config.dtype) if name in TABLES and leaf is not None else leaf
    for name, leaf in params.items()
    if name != "weight_source"
  }
  return weights, rest
