"""Integration over a grid: a loop of a solver's steps, and how its backward pass gets the states again.

B batch, L positions, D embed_dim, S solver steps, N nodes of the solver, U weight sets (distinct times).
"""

from collections.abc import Callable
import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.grids import Grid
from diffeq_nnx.model.solvers import SOLVERS, Carry, Solver, VectorField
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.parallel import sharding

# what is not computed again, by `train.remat`
POLICIES = {"dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, "full": None}

Gather = Callable[[dict], dict]  # the weights at one time, as stored on the devices -> as used


@dataclasses.dataclass(frozen=True)
class Checkpointed:
  """The backward pass reads stored states, one `every` steps, and recomputes the rest as `remat` says."""

  remat: str = "none"  # none, dots or full, as `train.remat`
  every: int = 1  # divides the number of steps


@dataclasses.dataclass(frozen=True)
class Reversible:
  """The backward pass undoes the steps, so that the memory of states does not grow with their number."""


Adjoint = Checkpointed | Reversible


def make_adjoint(config: Config) -> Adjoint:
  """The adjoint that `train.adjoint` names.

  Raises:
    UserError: the solver's steps can't be undone, or train.remat is still to be measured.
  """
  if config.train.adjoint == "checkpointed":
    if config.train.remat == "auto":
      raise UserError("train.remat=auto: is measured by --job=train; set it to full, dots or none")
    return Checkpointed(config.train.remat, config.train.remat_every)
  if SOLVERS[config.model.solver].undo is None:
    able = ", ".join(name for name, solver in SOLVERS.items() if solver.undo is not None)
    raise UserError(
      f"train.adjoint=reversible: the steps of model.solver={config.model.solver} can't be undone; those of {able} "
      "can; or set train.adjoint=checkpointed"
    )
  return Reversible()


def solve(
  solver: Solver,
  field: VectorField,
  x_BxLxD: jax.Array,
  weights: GridWeights,
  *,
  key: jax.Array,
  adjoint: Adjoint = Checkpointed(),
  gather: Gather = lambda weights: weights,
) -> jax.Array:
  """The state at the end of the weights' grid, [B, L, D].

  Args:
    solver: the method.
    field: the vector field; a pytree where `adjoint` is `Reversible`.
    x_BxLxD: the state at time 0.
    weights: at `grid.times(solver.nodes)`, with their grid; if they are unrolled, so is the loop over steps, which then
      uses neither `adjoint` nor `gather`.
    key: from which each step's key is split.
    adjoint: how the backward pass gets the states; `Reversible` needs a solver with `undo`.
    gather: applied to the weights of a step before it, and again where the step is recomputed.

  Raises:
    UserError: `every` doesn't divide the number of steps.
    ValueError: as `links_of`.
  """
  if isinstance(weights.sets, list):
    return _solve_unrolled(solver, field, x_BxLxD, weights, key)
  grid = weights.grid
  advance, links = advance_of(solver, grid, gather), links_of(solver, weights, x_BxLxD.dtype, key)
  carry = solver.init(x_BxLxD)
  if isinstance(adjoint, Reversible):
    undo = advance_of(solver, grid, gather, backwards=True)
    return solver.read(_solve_reversible(advance, undo, field, carry, links))
  every = 1 if adjoint.remat == "none" else adjoint.every
  if grid.num_steps % every:
    raise UserError(f"train.remat_every={every}: must divide the number of steps, {grid.num_steps}")

  def run(carry, stretch):
    for i in range(every):
      carry = advance(field, carry, jax.tree.map(operator.itemgetter(i), stretch))
    return carry

  if adjoint.remat != "none":
    run = jax.checkpoint(run, policy=POLICIES[adjoint.remat], prevent_cse=False)
  stretches = jax.tree.map(lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:]), links)
  carry, _ = jax.lax.scan(lambda carry, stretch: (run(carry, stretch), None), carry, stretches)
  return solver.read(carry)


Links = tuple[tuple[dict, ...], jax.Array, jax.Array]  # weights, dt and key of steps; leading axes S
Advance = Callable[[VectorField, Carry, Links], Carry]  # of the links at one step, without S


def advance_of(
  solver: Solver, grid: Grid, gather: Gather = lambda weights: weights, backwards: bool = False
) -> Advance:
  """Makes the function of a step of a solver on a grid, or if `backwards` of what undoes it.

  It maps a field, a carry, and what the step reads as `links_of` gives it, to the next carry.
  """
  columns = _columns(solver, grid)
  distinct = list(dict.fromkeys(columns))  # nodes may share weights
  method = solver.undo if backwards else solver.step

  def advance(field, carry, link):
    weights, dt, key = link
    gathered = [gather(each) for each in weights]
    carry = method(field, carry, [gathered[distinct.index(column)] for column in columns], dt, key)
    return jax.tree.map(lambda leaf: sharding.constrain(leaf, "batch", "context", None), carry)

  return advance


def links_of(solver: Solver, weights: GridWeights, dtype: jnp.dtype, key: jax.Array) -> Links:
  """What each step reads, with leading axes S; dt in float32, or wider for a wider `dtype`.

  Raises:
    ValueError: the weights are those of a solver with other nodes.
  """
  grid = weights.grid
  _check_sets(solver, grid, {len(leaf) for leaf in jax.tree.leaves(weights.sets)})
  distinct = dict.fromkeys(_columns(solver, grid))
  sets = tuple(jax.tree.map(functools.partial(_sets, index_S=index_S), weights.sets) for index_S in distinct)
  dts_S = jnp.asarray(np.asarray(grid.dts), jnp.promote_types(dtype, jnp.float32))
  return sets, dts_S, jax.random.split(key, grid.num_steps)


def _check_sets(solver: Solver, grid: Grid, found: set[int]) -> None:
  wanted = len(grid.times(solver.nodes).points_UxQ)
  if found != {wanted}:
    raise ValueError(
      f"weights at {', '.join(map(str, sorted(found)))} times: {grid.num_steps} steps of this solver need those at "
      f"{wanted}; take `block_weights` of a model with this solver"
    )


def _columns(solver: Solver, grid: Grid) -> list[tuple[int, ...]]:
  """For each node, the weight sets that the steps use, [S]."""
  return [tuple(index_S.tolist()) for index_S in grid.times(solver.nodes).index_SxN.T]


def _sets(leaf: jax.Array, index_S: tuple[int, ...]) -> jax.Array:
  """The sets of `leaf` [U, ...] that the steps use, [S, ...]; a slice where they lie in a row, which is no gather."""
  first, last, S = index_S[0], index_S[-1], len(index_S)
  stride = (last - first) // (S - 1) if S > 1 else 1
  if stride > 0 and index_S == tuple(range(first, last + 1, stride)):
    return leaf if S == len(leaf) else leaf[first : last + 1 : stride]
  return leaf[np.asarray(index_S)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve_reversible(advance: Advance, undo: Advance, field: VectorField, carry: Carry, links: Links) -> Carry:
  """The carry after all steps; the backward pass stores it alone, and undoes the steps."""
  return jax.lax.scan(lambda carry, link: (advance(field, carry, link), None), carry, links)[0]


def _solve_reversible_forward(advance, undo, field, carry, links):
  last = _solve_reversible(advance, undo, field, carry, links)
  return last, (field, last, links)


def _solve_reversible_backward(advance, undo, residuals, gradient):
  field, last, links = residuals

  def back(state, link):
    (after, gradient), (weights, dt, key) = state, link
    before = undo(field, after, link)
    _, pull = jax.vjp(lambda carry, weights: advance(field, carry, (weights, dt, key)), before, weights)
    gradient, weights_gradient = pull(gradient)
    return (before, gradient), weights_gradient

  (_, gradient), weights_gradients = jax.lax.scan(back, (last, gradient), links, reverse=True)
  return None, gradient, (weights_gradients, None, None)


_solve_reversible.defvjp(_solve_reversible_forward, _solve_reversible_backward)


def _solve_unrolled(
  solver: Solver, field: VectorField, x_BxLxD: jax.Array, weights: GridWeights, key: jax.Array
) -> jax.Array:
  """`solve` with unrolled weights, without rematerialization.

  For decoding, where a context counts the calls of its `attend`, one for each evaluation of attention. A loop also
  slices each step's weights out of a stack, and where XLA copies the slice, as on CPUs, a token takes many times as
  long.
  """
  grid, weights_U = weights.grid, weights.sets
  _check_sets(solver, grid, {len(weights_U)})
  wide = jnp.promote_types(x_BxLxD.dtype, jnp.float32)
  carry = solver.init(x_BxLxD)
  steps = zip(grid.times(solver.nodes).index_SxN, grid.dts, jax.random.split(key, grid.num_steps), strict=True)
  for index_N, dt, step_key in steps:
    carry = solver.step(field, carry, [weights_U[u] for u in index_N], jnp.asarray(dt, wide), step_key)
  return solver.read(carry)
