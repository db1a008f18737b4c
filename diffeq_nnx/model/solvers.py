"""Solvers: the times at which the block is evaluated, and how its two branches advance the hidden state.

B batch, L positions, D embed_dim, S solver steps.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
import operator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel import sharding


@dataclasses.dataclass(frozen=True)
class Grid:
  """The steps of one integration: the times of their weights `times_S` [S], and their sizes `dts_S` [S].

  Times run from 0 to 1; the steps add up to the horizon. Hashable, so that it can be a static argument.
  """

  times_S: tuple[float, ...]
  dts_S: tuple[float, ...]

  def __post_init__(self):
    if not self.times_S or len(self.times_S) != len(self.dts_S):
      raise ValueError(
        f"a grid needs as many steps as times and at least one; got {len(self.times_S)} times "
        f"and {len(self.dts_S)} steps"
      )

  @property
  def num_steps(self) -> int:
    """S."""
    return len(self.times_S)


def uniform_grid(num_steps: int, horizon: float) -> Grid:
  """t_i = (i + 1)/n and dt = horizon/n for i = 0..n-1: every count gives exactly that many steps."""
  if num_steps < 1:
    raise ValueError(f"num_steps={num_steps}: must be 1 or above")
  return Grid(tuple((i + 1) / num_steps for i in range(num_steps)), (horizon / num_steps,) * num_steps)


def uneven_grid(step_sizes: Sequence[float]) -> Grid:
  """Steps of these sizes; the time of a step is that of its end, as a fraction of the total, so that the last is 1."""
  total = math.fsum(step_sizes)
  ends = [math.fsum(step_sizes[: i + 1]) / total for i in range(len(step_sizes))]
  return Grid(tuple(ends), tuple(map(float, step_sizes)))


def make_grid(model: ModelConfig, num_steps: int | None = None) -> Grid:
  """The grid of a model: its own, or a uniform one of another number of steps over the same horizon."""
  if model.step_sizes and num_steps in (None, model.num_steps):
    return uneven_grid(model.step_sizes)
  return uniform_grid(num_steps or model.num_steps, model.total_time)


class VectorField(Protocol):
  """What a solver calls: the two branches of the block at one time, each with its own norm inside."""

  def attention(self, x_BxLxD: jax.Array, weights: dict) -> jax.Array:
    """[B, L, D] -> [B, L, D]."""

  def feedforward(self, x_BxLxD: jax.Array, weights: dict) -> jax.Array:
    """[B, L, D] -> [B, L, D]."""


Dropout = Callable[[jax.Array, jax.Array], jax.Array]  # (key, x) -> x
Gather = Callable[[dict], dict]  # the weights at one time, as stored on the devices -> as used


def no_dropout(key: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
  """x as it is."""
  del key
  return x_BxLxD


def euler_step(field: VectorField, x_BxLxD, weights, dt, dropout: Dropout, key) -> jax.Array:
  """x + dt (Attention(x) + FeedForward(x)): both branches read the same x."""
  attention_key, feedforward_key = jax.random.split(key)
  attention = dropout(attention_key, field.attention(x_BxLxD, weights))
  feedforward = dropout(feedforward_key, field.feedforward(x_BxLxD, weights))
  return x_BxLxD + dt * (attention + feedforward)


def sequential_step(field: VectorField, x_BxLxD, weights, dt, dropout: Dropout, key) -> jax.Array:
  """x + dt Attention(x), then the same with FeedForward: an ordinary transformer's layer at dt = 1."""
  attention_key, feedforward_key = jax.random.split(key)
  x_BxLxD = x_BxLxD + dt * dropout(attention_key, field.attention(x_BxLxD, weights))
  return x_BxLxD + dt * dropout(feedforward_key, field.feedforward(x_BxLxD, weights))


SOLVERS = {"euler": euler_step, "sequential": sequential_step}


def register(name: str, step: Callable) -> None:
  """Adds a solver, a function of one step with the signature of `euler_step`, as a choice of `model.solver`.

  Raises:
    UserError: another solver has this name; compiled programs are cached by it.
  """
  if SOLVERS.setdefault(name, step) is not step:
    raise UserError(f"{name}: is the name of a solver already; register it under another name")
  config_lib.add_choice("model.solver", name)


@dataclasses.dataclass(frozen=True)
class Remat:
  """What the backward pass recomputes: `kind` is none, dots or full; a state is kept `every` steps."""

  kind: str = "none"
  every: int = 1

  def wrap(self, function: Callable) -> Callable:
    """`function`, recomputed in the backward pass as chosen."""
    if self.kind == "none":
      return function
    policy = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims if self.kind == "dots" else None
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def solve(
  solver: str,
  field: VectorField,
  x_BxLxD: jax.Array,
  weights: dict,
  grid: Grid,
  *,
  dropout: Dropout,
  key: jax.Array,
  remat: Remat = Remat(),
  gather: Gather = lambda weights: weights,
) -> jax.Array:
  """The state at the end of the grid, [B, L, D].

  Args:
    solver: a name in `SOLVERS`.
    field: the vector field.
    x_BxLxD: the state at time 0.
    weights: BlockWeights for the grid's times; every leaf has a leading axis S.
    grid: times and step sizes.
    dropout: applied to each branch, with a key of its own for each step and branch.
    key: from which those keys are split.
    remat: what to recompute; `remat.every` must divide S.
    gather: applied to the weights of a step before it, and again where the step is recomputed.
  """
  step = functools.partial(SOLVERS[solver], field)
  dts_S = jnp.asarray(np.asarray(grid.dts_S), x_BxLxD.dtype)
  keys_S = jax.random.split(key, grid.num_steps)
  every = 1 if remat.kind == "none" else remat.every
  if grid.num_steps % every:
    raise ValueError(f"remat.every={every}: must divide the number of steps, {grid.num_steps}")

  def run(x_BxLxD, stretch):
    for i in range(every):
      weights_i, dt, step_key = jax.tree.map(operator.itemgetter(i), stretch)
      x_BxLxD = sharding.constrain(step(x_BxLxD, gather(weights_i), dt, dropout, step_key), "batch", None, None)
    return x_BxLxD

  run = remat.wrap(run)
  stretches = jax.tree.map(lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:]), (weights, dts_S, keys_S))
  x_BxLxD, _ = jax.lax.scan(lambda x, stretch: (run(x, stretch), None), x_BxLxD, stretches)
  return x_BxLxD


def solve_unrolled(
  solver: str, fields_S: Sequence[VectorField], x_BxLxD: jax.Array, weights_S: Sequence[dict], grid: Grid
) -> jax.Array:
  """The same state as `solve`, each step with its own field and weights; no dropout, no rematerialization.

  For decoding: a loop slices each step's weights out of a stack, and where XLA copies the slice, as on CPUs, a token
  takes many times as long.
  """
  key = jax.random.key(0)  # unused, since there is no dropout
  for field, weights, dt in zip(fields_S, weights_S, grid.dts_S, strict=True):
    x_BxLxD = SOLVERS[solver](field, x_BxLxD, weights, jnp.asarray(dt, x_BxLxD.dtype), no_dropout, key)
  return x_BxLxD
