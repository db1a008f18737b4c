"""From weights that are functions of time to stored ones: an ordinary transformer of any depth."""

from collections.abc import Sequence
import dataclasses
import functools

import jax

from diffeq_nnx.config import LoraConfig, ModelConfig, TimeConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.parameters import Params, build, params_of


def discretized_config(
  model: ModelConfig, num_steps: int | None = None, step_sizes: Sequence[float] | None = None
) -> ModelConfig:
  """The config of what `discretize` makes of a model.

  Raises:
    UserError: step sizes that are not above 0 or don't add up to the model's horizon, both arguments, or weights that
      are stored already, for other steps.
  """
  if step_sizes is None:
    num_steps = model.num_steps if num_steps is None else num_steps
    if num_steps < 1:
      raise UserError(f"num_steps={num_steps}: must be 1 or above")
    sizes = model.step_sizes if num_steps == model.num_steps else ()
  elif num_steps is not None:
    raise UserError("num_steps and step_sizes: give one of them")
  else:
    sizes, total = tuple(map(float, step_sizes)), model.total_time
    if not sizes or not all(size > 0 for size in sizes) or abs(sum(sizes) - total) > 1e-6 * total:
      raise UserError(f"step_sizes={sizes}: must be above 0 and add up to the model's horizon, {total:g}")
    num_steps = len(sizes)
  if model.weights == "stored" and (num_steps, sizes) != (model.num_steps, model.step_sizes):
    asked = f"step_sizes={sizes}" if sizes else f"num_steps={num_steps}"
    raise UserError(
      f"{asked}: the weights of this model are stored, for its own {model.num_steps} steps: it can't be "
      "discretized again; start from the model with generated weights"
    )
  return dataclasses.replace(
    model,
    weights="stored",
    num_steps=num_steps,
    horizon=None if sizes else model.total_time,
    step_sizes=sizes,
    time=TimeConfig(weights_at=model.time.weights_at),
    lora=LoraConfig(),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def discretized_params(model: ModelConfig, stored: ModelConfig, params: Params) -> Params:
  """The parameters of `model` as those of `stored`, a config from `discretized_config`."""
  if model.weights == "stored" and not model.lora.rank:
    return params
  # the mean over a step takes its points from the generator's frequencies, which the stored model has not
  grid = dataclasses.replace(grids.make_grid(stored), radians=grids.make_grid(model).radians)
  weights = build(model, params).block_weights(grid).sets
  wide = parameter_dtype(model.dtype)  # of weights already rounded to the compute dtype, so that nothing changes
  return {**params, "weight_source": {"stored": jax.tree.map(lambda leaf: leaf.astype(wide), weights)}}


def discretize(model: Model, num_steps: int | None = None, *, step_sizes: Sequence[float] | None = None) -> Model:
  """The same model with stored weights, W at the times of a pass over one grid: an ordinary transformer's.

  It gives exactly the logits that `model` gives at that number of steps. Adapters become part of the weights.

  Args:
    model: any model; one with stored weights at its own number of steps only.
    num_steps: steps of one size over the model's horizon; None: as many as the model's own.
    step_sizes: dt of each step instead, in the units of the horizon, whose sum it must be.

  Returns:
    A model whose config has weights "stored" and that number of steps.

  Raises:
    UserError: no such grid, or the weights are stored for another number of steps.
  """
  stored = discretized_config(model.config, num_steps, step_sizes)
  params = discretized_params(model.config, stored, params_of(model))
  return build(stored, params)
