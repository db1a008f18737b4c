"""From weights that are functions of time to stored ones: an ordinary transformer of any depth."""

from collections.abc import Sequence
import dataclasses
import functools

import jax

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import LoraConfig, ModelConfig, TimeConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.parameters import Params, build, params_of
from diffeq_nnx.model.solvers import weight_times


def discretized_config(
  model: ModelConfig, num_steps: int | None = None, step_sizes: Sequence[float] | None = None
) -> ModelConfig:
  """The config of what `discretize` makes of a model.

  Raises:
    UserError: step sizes that are not above 0 or don't add up to the model's horizon, both arguments, or weights that
      are stored already, for other steps.
  """
  if step_sizes is None:
    config_lib.check_num_steps(model, "num_steps", num_steps)
    num_steps = model.num_steps if num_steps is None else num_steps
    if model.depth_order and num_steps < model.num_steps:
      return _nested_config(model, num_steps)
    sizes = model.step_sizes if num_steps == model.num_steps else ()
  else:
    if num_steps is not None:
      raise UserError("num_steps and step_sizes: give one of them")
    sizes, total = tuple(map(float, step_sizes)), model.total_time
    if not sizes or not all(size > 0 for size in sizes) or abs(sum(sizes) - total) > 1e-6 * total:
      raise UserError(f"step_sizes={sizes}: must be above 0 and add up to the model's horizon, {total:g}")
    if model.weights == "stored" and sizes != model.step_sizes:
      raise UserError(
        f"step_sizes={sizes}: the weights of this model are stored, for its own {model.num_steps} steps: it can't be "
        "discretized again; start from the model with generated weights"
      )
    num_steps = len(sizes)
  order = model.depth_order if num_steps == model.num_steps and sizes == model.step_sizes else ()
  return _stored_config(model, num_steps, None if sizes else model.total_time, sizes, order)


def _stored_config(
  model: ModelConfig, num_steps: int, horizon: float | None, sizes: tuple[float, ...], order: tuple[int, ...]
) -> ModelConfig:
  """The model with stored weights, without adapters, on this grid."""
  return dataclasses.replace(
    model,
    weights="stored",
    num_steps=num_steps,
    horizon=horizon,
    step_sizes=sizes,
    depth_order=order,
    time=TimeConfig(weights_at=model.time.weights_at),
    lora=LoraConfig(),
  )


def _nested_config(model: ModelConfig, num_steps: int) -> ModelConfig:
  """`discretized_config` where steps are left out. Each of the others keeps its size, and their order stays."""
  grid = grids.make_grid(model, num_steps)
  sizes, places = grid.dts, {step: place for place, step in enumerate(grid.kept_S)}
  even = {num_steps * sizes[0] / num_steps} == set(sizes)
  order = tuple(places[step] for step in model.depth_order[:num_steps])
  nested = _stored_config(model, num_steps, num_steps * sizes[0] if even else None, () if even else sizes, order)
  if len(weight_times(nested).points_UxQ) != len(weight_times(model, grid).points_UxQ):
    raise UserError(
      f"num_steps={num_steps}: in model.solver={model.solver} neighboring steps share weights, which stored weights of "
      "fewer steps can't hold after others were left out between them; train with model.time.weights_at=middle"
    )
  return nested


def leaves_out_steps(model: ModelConfig, stored: ModelConfig) -> bool:
  """Whether `stored`, a config from `discretized_config`, has the steps of `model` but some that are left out."""
  return bool(stored.depth_order) and stored.num_steps < model.num_steps


@functools.partial(jax.jit, static_argnums=(0, 1))
def discretized_params(model: ModelConfig, stored: ModelConfig, params: Params) -> Params:
  """The parameters of `model` as those of `stored`, a config from `discretized_config`."""
  nested = leaves_out_steps(model, stored)
  if model.weights == "stored" and not model.lora.rank and not nested:
    return params
  # the mean over a step takes its points from the generator's frequencies, which the stored model has not
  own = dataclasses.replace(grids.make_grid(stored), radians=grids.make_grid(model).radians)
  grid = grids.make_grid(model, stored.num_steps) if nested else own
  weights = build(model, params).block_weights(grid).sets
  wide = parameter_dtype(model.dtype)  # of weights already rounded to the compute dtype, so that nothing changes
  return {**params, "weight_source": {"stored": jax.tree.map(lambda leaf: leaf.astype(wide), weights)}}


def discretize(model: Model, num_steps: int | None = None, *, step_sizes: Sequence[float] | None = None) -> Model:
  """The same model with stored weights, W at the times of a pass over one grid: an ordinary transformer's.

  It gives exactly the logits that `model` gives at that number of steps. Adapters become part of the weights.

  Args:
    model: any model; one with stored weights at its own number of steps only, or at fewer if it has a depth_order.
    num_steps: of the grid that `Model.grid` gives; None: as many as the model's own.
    step_sizes: dt of each step instead, in the units of the horizon, whose sum it must be.

  Returns:
    A model whose config has weights "stored" and that number of steps.

  Raises:
    UserError: no such grid, or the weights are stored for another number of steps.
  """
  stored = discretized_config(model.config, num_steps, step_sizes)
  params = discretized_params(model.config, stored, params_of(model))
  return build(stored, params)
