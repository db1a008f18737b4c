"""A run's newest model on all devices, with whatever dtype it is to be computed in."""

import dataclasses
from typing import NamedTuple

import jax

from diffeq_nnx.config import Config, ModelConfig, choices
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.runs import opening
from diffeq_nnx.training.setup import say_attention


class Loaded(NamedTuple):
  """A model and what belongs to it.

  Attributes:
    model: on the devices of `mesh`.
    tokenizer: that it was trained with.
    mesh: None: of one device.
    num_steps: of the solver; None: the model's own.
    step: optimizer steps of the checkpoint; None: it is from none.
  """
  model: Model
  tokenizer: Tokenizer
  mesh: jax.sharding.Mesh | None
  num_steps: int | None
  step: int | None


def run(workdir: str, num_steps: int | None = None, config: Config | None = None, dtype: str = "model") -> Loaded:
  """The newest model of a run, split over all devices.

  Args:
    workdir: the run's directory.
    num_steps: of the solver; None: eval.num_steps.
    config: as for `runs.load`.
    dtype: of the computation, as for `computed`.

  Raises:
    UserError: no run, no checkpoint, an attention that this backend lacks, or no such dtype.
  """
  loaded = opening.load(str(workdir), config)
  say_attention(computed(loaded.config.model, dtype))
  num_steps = loaded.config.eval.num_steps if num_steps is None else num_steps
  return Loaded(loaded.model, loaded.tokenizer, loaded.mesh, num_steps, loaded.step)


def computed(config: ModelConfig, dtype: str) -> ModelConfig:
  """The config in another dtype of the computation, and without dropout.

  Raises:
    UserError: there is no such choice.
  """
  if dtype not in choices("harness.dtype"):
    raise UserError(f"dtype={dtype!r}: must be one of {', '.join(choices('harness.dtype'))}")
  return dataclasses.replace(config, dropout=0.0, dtype=config.dtype if dtype == "model" else dtype)
