"""Fitting the steps that stay when others are left out: by least squares, without training.

B batch, L positions, D embed_dim, F mlp_dim.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids, integration, vector_fields
from diffeq_nnx.model.attention_context import pack
from diffeq_nnx.model.parameters import Params, build
from diffeq_nnx.model.solvers import SOLVERS, add_increment
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.parallel.console import say

RIDGE = 0.1  # weight of the kernel's change, in mean squares of its inputs
LINEAR = ("sequential", "euler")  # solvers whose step is linear in the kernel that is fitted


class Moments(NamedTuple):
  """Sums over tokens, each weighted by 1 / |target|^2."""

  inputs_FxF: jax.Array  # of the products of the kernel's inputs
  errors_FxD: jax.Array  # of the products of these with the error of the state
  error: jax.Array  # of the squared error
  tokens: jax.Array


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
    model: with a depth_order, a solver of `LINEAR` and a field that only multiplies by its kernels.
    stored: of fewer steps, as `discretization.discretized_config` gives.
    params: of `model`.
    made: of `stored`, as `discretization.discretized_params` gives.
    batches: of one shape, as for a train step.

  Returns:
    `made` with other kernels.
  """
  sets = jax.jit(lambda params: build(model, params).block_weights().sets)(params)
  kept = grids.make_grid(model, stored.num_steps).kept_S
  targets = states = [_embed(model, params, batch) for batch in batches]
  fitted, done = made["weight_source"]["stored"], 0
  for place, (step, end) in enumerate(zip(kept, (*kept[1:], model.num_steps))):
    for number in range(done, end):
      targets = [_wait(_advance(model, x, batch, sets, number)) for x, batch in zip(targets, batches)]
    done = end
    if end == place + 1:  # no step before the next one is left out, so both states are the same
      states = targets
      continue
    measured = (_wait(_measure(stored, *these, fitted, place)) for these in zip(states, targets, batches))
    total = functools.reduce(optax.tree.add, measured)
    if not total.tokens:
      raise UserError("fit_tokens: none of those that are read counts as a target; raise it, or name another text")
    change_FxD, before, after = _solve(total)
    fitted = _add(fitted, place, change_FxD)
    say(f"step {step}: fitted; the state's error relative to its norm {before:.3f} -> {after:.3f}")
    states = [_wait(_advance(stored, x, batch, fitted, place)) for x, batch in zip(states, batches)]
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
def _advance(config: ModelConfig, x_BxLxD, batch, sets, place) -> jax.Array:
  """The state after the step at `place` of the model's own grid, [B, L, D]."""
  advance, field, link = _bind(config, batch, sets, place)
  return advance(field, x_BxLxD, link)


def _bind(config: ModelConfig, batch, sets, place):
  """A step on the model's own grid, its field, and what the step at `place` reads, in the compute dtype."""
  solver, grid = SOLVERS[config.solver], grids.make_grid(config)
  field = vector_fields.BoundField(vector_fields.make_field(config), _context(batch)[1])
  links = integration.links_of(solver, GridWeights(sets, grid), jnp.dtype(config.dtype), jax.random.key(0))
  weights, dt, key = jax.tree.map(lambda leaf: leaf[place], links)
  weights = jax.tree.map(lambda leaf: leaf.astype(config.dtype), weights)
  return integration.advance_of(solver, grid), field, (weights, dt, key)


@functools.partial(jax.jit, static_argnums=0)
def _measure(config: ModelConfig, x_BxLxD, target_BxLxD, batch, sets, place) -> Moments:
  """The sums that decide on the kernel at `place`, where `x_BxLxD` is the state before the step."""
  advance, field, link = _bind(config, batch, sets, place)
  (weights,), dt, key = link
  start_BxLxD, wide = x_BxLxD, jnp.promote_types(x_BxLxD.dtype, jnp.float32)
  if config.solver == "sequential":
    start_BxLxD = add_increment(start_BxLxD, dt, (1.0,), (field.attention(x_BxLxD, weights, key),))
  # with the identity in the kernel's place, the branch gives what the kernel multiplies
  F, dtype = len(weights["down"]["kernel"]), x_BxLxD.dtype
  identity = {name: jnp.eye(F, dtype=dtype) if name == "kernel" else jnp.zeros(F, dtype) for name in weights["down"]}
  h_BxLxF = dt * field.feedforward(start_BxLxD, {**weights, "down": identity}, key).astype(wide)
  target_BxLxD = target_BxLxD.astype(wide)
  error_BxLxD = target_BxLxD - advance(field, x_BxLxD, link)
  mask_BxL = pack(batch.get("mask", jnp.ones(batch["inputs"].shape, wide)), None, None)[0]  # in the order of the states
  sizes_BxL = jnp.maximum(jnp.square(target_BxLxD).sum(-1), jnp.finfo(target_BxLxD.dtype).tiny)  # of padding perhaps 0
  share_BxLx1 = (mask_BxL / sizes_BxL)[..., None]
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
  scale = jnp.trace(A_FxF) / len(A_FxF)
  ridge = jnp.where(scale > 0, RIDGE * scale, 1.0)  # inputs that are all 0 leave the kernel as it is
  with jax.default_matmul_precision("highest"):
    change_FxD = jax.scipy.linalg.solve(A_FxF + ridge * jnp.eye(len(A_FxF)), B_FxD, assume_a="pos")
    less = 2 * (B_FxD * change_FxD).sum() - (change_FxD * (A_FxF @ change_FxD)).sum()
  return change_FxD, jnp.sqrt(total.error / total.tokens), jnp.sqrt((total.error - less) / total.tokens)


@jax.jit
def _add(sets, place, change_FxD):
  """The weights with another kernel at `place`."""
  kernel = sets["down"]["kernel"]
  return {**sets, "down": {**sets["down"], "kernel": kernel.at[place].add(change_FxD.astype(kernel.dtype))}}
