"""Fitting the steps that stay when others are left out: by least squares, without training.

B batch, L positions, D embed_dim, F mlp_dim.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids, vector_fields
from diffeq_nnx.model.attention_context import pack
from diffeq_nnx.model.parameters import Params, build
from diffeq_nnx.model.solvers import SOLVERS, add_increment
from diffeq_nnx.parallel.console import say

RIDGE = 0.1  # weight of the kernel's change, in mean squares of its inputs
LINEAR = ("sequential", "euler")  # solvers whose step is linear in the kernel that is fitted


class Moments(NamedTuple):
  """Sums over tokens, each weighted by 1 / |target|^2."""

  inputs_FxF: jax.Array  # of the products of the kernel's inputs
  errors_FxD: jax.Array  # of the products of these with the error of the state
  error: jax.Array  # of the squared error
  tokens: jax.Array


def check_fits(model: ModelConfig, num_steps: int) -> None:
  """Checks that a model can be fitted with so many of its steps.

  Raises:
    UserError: no step is left out, or the model has another solver or vector field than those that can be fitted.
  """
  if not model.depth_order or num_steps >= model.num_steps:
    raise UserError(
      f"fit_tokens: none of the {model.num_steps} steps is left out; rank them (--job=rank_steps) and name fewer with "
      "--num_steps, or leave it out"
    )
  if model.solver not in LINEAR or not vector_fields.only_multiplies(model):
    raise UserError(
      f"fit_tokens: model.solver={model.solver}, model.field={model.field}: only the solvers {' and '.join(LINEAR)} "
      "with a field of this package can be fitted; leave it out"
    )


def fit_kept_steps(
  model: ModelConfig, stored: ModelConfig, params: Params, made: Params, batches: Sequence[dict[str, jax.Array]]
) -> Params:
  """Changes what the steps that stay add to the state, so that it comes close to that of the whole model.

  In the order of time, the last kernel of each step's feed-forward branch becomes that of the least squared error of
  the state before the next step that stays, relative to the norm of the whole model's state there, plus a little of the
  squared change of the kernel. The state before the step is that of the fitted steps, so later steps correct what
  earlier ones miss. Steps before the first that is left out stay as they are. ReplaceMe (Shopkhoev et al. 2025, arXiv
  2505.02819) puts one linear map, fitted in this way, in the place of neighboring layers.

  Args:
    model: with a depth_order, one that `check_fits` lets pass.
    stored: of fewer steps, as `discretization.discretized_config` gives.
    params: of `model`.
    made: of `stored`, as `discretization.discretized_params` gives.
    batches: of one shape, as for a train step.

  Returns:
    `made` with other kernels.
  """
  whole, grid = grids.make_grid(model), grids.make_grid(model, stored.num_steps)
  sets = jax.jit(lambda params: build(model, params).block_weights(whole).sets)(params)
  states = [_embed(model, params, batch) for batch in batches]
  targets, fitted = states, made["weight_source"]["stored"]
  ends = [*grid.kept_S[1:], len(whole.sizes)]
  done, moved = 0, False
  for place, (step, end) in enumerate(zip(grid.kept_S, ends)):
    moved = moved or step != done or end != step + 1
    for number in range(done, end):
      targets = [
        _wait(_advance(model, x, batch, sets, number, whole.sizes[number])) for x, batch in zip(targets, batches)
      ]
    done, dt = end, whole.sizes[step]
    if moved:
      total = None
      for x, target, batch in zip(states, targets, batches):
        found = _wait(_measure(stored, x, target, batch, fitted, place, dt))
        total = found if total is None else jax.tree.map(jnp.add, total, found)
      change_FxD, before, after = _solve(total)
      fitted = _add(fitted, place, change_FxD)
      say(f"step {step}: fitted; the state's error relative to its norm {before:.3f} -> {after:.3f}")
    states = [_wait(_advance(stored, x, batch, fitted, place, dt)) for x, batch in zip(states, batches)]
  return {**made, "weight_source": {**made["weight_source"], "stored": fitted}}


# One program at a time: several with collectives that run at once may wait for each other's threads on CPUs.
_wait = jax.block_until_ready


def _context(batch: dict[str, jax.Array]):
  return pack(batch["inputs"], batch.get("segment_ids"), batch.get("positions"))


@functools.partial(jax.jit, static_argnums=0)
def _embed(config: ModelConfig, params: Params, batch: dict[str, jax.Array]) -> jax.Array:
  """The state before the first step, [B, L, D]."""
  tokens_BxL, context = _context(batch)
  return build(config, params).embed(tokens_BxL, context.positions_BxL)


@functools.partial(jax.jit, static_argnums=0)
def _advance(config: ModelConfig, x_BxLxD, batch, sets, place, dt) -> jax.Array:
  """The state after a step of size `dt` with the weights at `place`, [B, L, D]."""
  return _step(config, x_BxLxD, batch, _at(config, sets, place), dt)


def _at(config: ModelConfig, sets, place):
  """The weights at `place` in the compute dtype."""
  return jax.tree.map(lambda leaf: leaf[place].astype(config.dtype), sets)


def _step(config, x_BxLxD, batch, weights, dt):
  return SOLVERS[config.solver].step(_bind(config, batch), x_BxLxD, [weights], dt, jax.random.key(0))


def _bind(config, batch) -> vector_fields.BoundField:
  return vector_fields.BoundField(vector_fields.make_field(config), _context(batch)[1])


@functools.partial(jax.jit, static_argnums=0)
def _measure(config: ModelConfig, x_BxLxD, target_BxLxD, batch, sets, place, dt) -> Moments:
  """The sums that decide on the kernel at `place`, where `x_BxLxD` is the state before the step."""
  weights, key, wide = _at(config, sets, place), jax.random.key(0), jnp.promote_types(x_BxLxD.dtype, jnp.float32)
  field, start_BxLxD = _bind(config, batch), x_BxLxD
  if config.solver == "sequential":
    start_BxLxD = add_increment(start_BxLxD, dt, (1.0,), (field.attention(x_BxLxD, weights, key),))
  # with the identity in the kernel's place, the branch gives what the kernel multiplies
  F, dtype = len(weights["down"]["kernel"]), x_BxLxD.dtype
  identity = {name: jnp.eye(F, dtype=dtype) if name == "kernel" else jnp.zeros(F, dtype) for name in weights["down"]}
  h_BxLxF = dt * field.feedforward(start_BxLxD, {**weights, "down": identity}, key).astype(wide)
  target_BxLxD = target_BxLxD.astype(wide)
  error_BxLxD = target_BxLxD - _step(config, x_BxLxD, batch, weights, dt)
  mask_BxL = pack(batch.get("mask", jnp.ones(batch["inputs"].shape, wide)), None, None)[0]  # in the order of the states
  share_BxLx1 = (mask_BxL / jnp.square(target_BxLxD).sum(-1))[..., None]
  product = functools.partial(jnp.einsum, "bli,blj->ij", precision=jax.lax.Precision.HIGHEST)
  return Moments(
    product(share_BxLx1 * h_BxLxF, h_BxLxF),
    product(share_BxLx1 * h_BxLxF, error_BxLxD),
    (share_BxLx1 * jnp.square(error_BxLxD)).sum(),
    mask_BxL.sum(),
  )


@jax.jit
def _solve(total: Moments) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The change of the kernel, [F, D], and the relative error of the state before and after it."""
  A_FxF, B_FxD = total.inputs_FxF, total.errors_FxD
  ridge = RIDGE * jnp.trace(A_FxF) / len(A_FxF)
  with jax.default_matmul_precision("highest"):
    change_FxD = jax.scipy.linalg.solve(A_FxF + ridge * jnp.eye(len(A_FxF)), B_FxD, assume_a="pos")
    less = 2 * (B_FxD * change_FxD).sum() - (change_FxD * (A_FxF @ change_FxD)).sum()
  return change_FxD, jnp.sqrt(total.error / total.tokens), jnp.sqrt((total.error - less) / total.tokens)


@jax.jit
def _add(sets, place, change_FxD):
  """The weights with another kernel at `place`."""
  kernel = sets["down"]["kernel"]
  return {**sets, "down": {**sets["down"], "kernel": kernel.at[place].add(change_FxD.astype(kernel.dtype))}}
