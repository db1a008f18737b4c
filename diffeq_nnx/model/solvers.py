"""Solvers: how a step advances the hidden state, from evaluations of the vector field at its nodes.

B batch, L positions, D embed_dim.

A solver is a `Solver`; `SOLVERS` names them, `register` adds one. Runge-Kutta methods are tables of numbers. What
integrates a whole grid is in `integration`.
"""

import abc
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.grids import Grid, Times, make_grid

Carry = Any  # what a solver carries from step to step: a tree of arrays [B, L, D]


class VectorField(Protocol):
  """What a solver evaluates, with the attention context and dropout of a batch bound to it.

  `weights` are BlockWeights at one time. Dropout is drawn from `key`: the same key gives the same masks.
  """

  def attention(self, x_BxLxD: jax.Array, weights: dict, key: jax.Array) -> jax.Array:
    """The attention branch with its norm: [B, L, D] -> [B, L, D]."""

  def feedforward(self, x_BxLxD: jax.Array, weights: dict, key: jax.Array) -> jax.Array:
    """The feed-forward branch with its norm: [B, L, D] -> [B, L, D]."""

  def __call__(self, x_BxLxD: jax.Array, weights: dict, key: jax.Array) -> jax.Array:
    """dx/dt, the sum of both branches: [B, L, D] -> [B, L, D]."""


class Evaluations(NamedTuple):
  """How often a step evaluates each branch."""

  attention: int
  feedforward: int


class Solver(abc.ABC):
  """A method of integration. Subclasses define `step`, and what differs from Euler's method.

  Attributes:
    nodes: where in a step it uses weights, from 0 (the start) to 1 (the end).
    evaluations: of each branch, per step.
    undo: (field, carry, weights, dt, key) -> the carry before the step; None: the method can't be undone.
  """

  undo: Any = None

  @property
  def nodes(self) -> tuple[float, ...]:
    """Where in a step it uses weights; by default at its end."""
    return (1.0,)

  @property
  def evaluations(self) -> Evaluations:
    """Of each branch, per step; by default one."""
    return Evaluations(1, 1)

  def init(self, x_BxLxD: jax.Array) -> Carry:
    """The carry at the start of the grid."""
    return x_BxLxD

  @abc.abstractmethod
  def step(
    self, field: VectorField, carry: Carry, weights: Sequence[dict], dt: jax.typing.ArrayLike, key: jax.Array
  ) -> Carry:
    """The carry after a step.

    Args:
      field: the vector field.
      carry: before the step.
      weights: BlockWeights at each of the nodes.
      dt: the size of the step, a number or a scalar in float32 or wider.
      key: to pass to the field; one for each step, so that a step integrates one field.
    """

  def read(self, carry: Carry) -> jax.Array:
    """The state that a carry stands for, [B, L, D]."""
    return carry


@dataclasses.dataclass(frozen=True)
class RungeKutta(Solver):
  """An explicit Runge-Kutta method as its Butcher tableau: k_i = f(x + dt sum_j a_ij k_j, W_i), W_i at c_i."""

  a: tuple[tuple[float, ...], ...]  # rows of the matrix, [i][j] for j < i
  b: tuple[float, ...]  # x + dt sum_i b_i k_i is the state after the step
  c: tuple[float, ...]  # the node of each stage, from 0 (the start of the step) to 1 (its end)

  def __post_init__(self):
    for name, row in (("b", self.b), ("c", self.c)):
      object.__setattr__(self, name, tuple(map(float, row)))
    object.__setattr__(self, "a", tuple(tuple(map(float, row)) for row in self.a))
    if [len(row) for row in self.a] != list(range(len(self.b))) or len(self.c) != len(self.b):
      raise ValueError(f"a={self.a}, b={self.b}, c={self.c}: row i of a must have i numbers, b and c one for each row")
    if not math.isclose(sum(self.b), 1, abs_tol=1e-6) or not all(0 <= node <= 1 for node in self.c):
      raise ValueError(f"b={self.b}, c={self.c}: b must add up to 1, and each c be from 0 to 1")

  @property
  def nodes(self) -> tuple[float, ...]:
    """The distinct c."""
    return tuple(sorted(set(self.c)))

  @property
  def evaluations(self) -> Evaluations:
    """One for each stage."""
    return Evaluations(len(self.b), len(self.b))

  def step(self, field, carry, weights, dt, key):
    """See `Solver.step`."""
    slopes = []
    for row, node in zip(self.a, self.c, strict=True):
      slopes.append(field(add_increment(carry, dt, row, slopes), weights[self.nodes.index(node)], key))
    return add_increment(carry, dt, self.b, slopes)


def add_increment(
  x_BxLxD: jax.Array, dt: jax.typing.ArrayLike, factors: Sequence[Any], slopes: Sequence[jax.Array]
) -> jax.Array:
  """x + dt sum_j factors_j slopes_j; dt and sums are in float32 or wider: 1/12 in bfloat16 would be 0.2 % off."""
  is_zero = lambda factor: isinstance(factor, float) and factor == 0  # an array may be traced
  terms = [(factor, slope) for factor, slope in zip(factors, slopes, strict=True) if not is_zero(factor)]
  if not terms:
    return x_BxLxD
  wide = jnp.promote_types(x_BxLxD.dtype, jnp.float32)
  change_BxLxD = jnp.asarray(dt, wide) * sum(factor * slope.astype(wide) for factor, slope in terms)
  if len(terms) == 1:  # rounded before the sum, as in a layer, so that at dt = 1 an ordinary transformer keeps its bits
    return x_BxLxD + change_BxLxD.astype(x_BxLxD.dtype)
  return (x_BxLxD.astype(wide) + change_BxLxD).astype(x_BxLxD.dtype)


@dataclasses.dataclass(frozen=True)
class Splitting(Solver):
  """One branch after the other, each by a step of Euler's method: x + share dt branch(x) for each part."""

  parts: tuple[tuple[str, float], ...]  # (name of the branch, its share of dt); the shares of a branch sum to 1
  node: float = 1.0  # where in the step all parts have their weights

  def __post_init__(self):
    totals = {branch: sum(share for name, share in self.parts if name == branch) for branch, _ in self.parts}
    if totals.keys() != {"attention", "feedforward"} or not all(math.isclose(total, 1) for total in totals.values()):
      raise ValueError(f"parts={self.parts}: the shares of attention and of feedforward must each add up to 1")

  @property
  def nodes(self) -> tuple[float, ...]:
    """The one node."""
    return (self.node,)

  @property
  def evaluations(self) -> Evaluations:
    """The parts of each branch."""
    branches = [branch for branch, _ in self.parts]
    return Evaluations(branches.count("attention"), branches.count("feedforward"))

  def step(self, field, carry, weights, dt, key):
    """See `Solver.step`."""
    for branch, share in self.parts:
      carry = add_increment(carry, dt, (share,), (getattr(field, branch)(carry, weights[0], key),))
    return carry


class Leapfrog(Solver):
  """The two-step midpoint rule, y_{i+1} = y_{i-1} + 2 dt f(y_i): second order with one evaluation a step.

  The carry is (y_{i-1}, y_i), where y_i stands for the state in the middle of step i, and (y_{i-1} + y_i) / 2 is the
  state at its start. Both begin as the initial state. It is the asynchronous leapfrog method (Zhuang et al. 2021,
  MALI) with an initial slope of 0 in place of one more evaluation.

  `undo` computes y_{i-1} = y_{i+1} - 2 dt f(y_i) from the same y_i, so that f is the same. To make the sum the same
  too, each y is a pair (high, low) of its value in the dtype of the computation and the rest in float32 or wider.

  On a grid whose steps change in size it is of second order if they change gradually.
  """

  nodes = (0.5,)

  def init(self, x_BxLxD):
    """The state twice."""
    low_BxLxD = jnp.zeros(x_BxLxD.shape, jnp.promote_types(x_BxLxD.dtype, jnp.float32))
    return (x_BxLxD, low_BxLxD), (x_BxLxD, low_BxLxD)

  def step(self, field, carry, weights, dt, key):
    """See `Solver.step`."""
    before, middle = carry
    wide = middle[1].dtype
    return middle, _plus(before, 2 * jnp.asarray(dt, wide) * field(middle[0], weights[0], key).astype(wide))

  def undo(self, field, carry, weights, dt, key):
    """A step backwards: see `Solver.undo`."""
    middle, before = self.step(field, carry[::-1], weights, -dt, key)
    return before, middle

  def read(self, carry):
    """The mean of both."""
    (before_BxLxD, before_low_BxLxD), (middle_BxLxD, middle_low_BxLxD) = carry
    wide = before_low_BxLxD.dtype
    low_BxLxD = jax.lax.stop_gradient(before_low_BxLxD + middle_low_BxLxD)
    return ((before_BxLxD.astype(wide) + middle_BxLxD.astype(wide) + low_BxLxD) / 2).astype(before_BxLxD.dtype)


Pair = tuple[jax.Array, jax.Array]  # (high, low): their exact sum is meant


@jax.custom_jvp
def _plus(pair: Pair, change: jax.Array) -> Pair:
  """pair + change, with an error of the low part's rounding only."""
  high, low = pair
  wide_high = high.astype(low.dtype)
  total = wide_high + change
  shifted = total - wide_high
  error = (wide_high - (total - shifted)) + (change - shifted)  # total + error is exactly high + change (Knuth 1969)
  rest = error + low
  kept = jnp.finfo(high.dtype)
  # explicit, since compilers may leave out the rounding of a conversion there and back
  new_high = jax.lax.reduce_precision(total + rest, kept.nexp, kept.nmant)
  return new_high.astype(high.dtype), (total - new_high) + rest


@_plus.defjvp
def _plus_jvp(primals, tangents):
  (high_tangent, low_tangent), change_tangent = tangents
  return _plus(*primals), (high_tangent + change_tangent.astype(high_tangent.dtype), jnp.zeros_like(low_tangent))


SOLVERS: dict[str, Solver] = {
  "euler": RungeKutta(((),), (1.0,), (1.0,)),  # with the weights of the step's end (Tong et al. 2025)
  "sequential": Splitting((("attention", 1.0), ("feedforward", 1.0))),  # Lie's splitting; GPT-2 and Llama at dt = 1
  "strang": Splitting((("attention", 0.5), ("feedforward", 1.0), ("attention", 0.5)), 0.5),
  # at dt = 1 as Macaron Net (Lu et al. 2019)
  "strang_mirrored": Splitting((("feedforward", 0.5), ("attention", 1.0), ("feedforward", 0.5)), 0.5),
  # b of its first stage is 0, so that this stage may use the weights of the middle without loss of order
  "midpoint": RungeKutta(((), (0.5,)), (0.0, 1.0), (0.5, 0.5)),
  "heun": RungeKutta(((), (1.0,)), (0.5, 0.5), (0.0, 1.0)),
  "ralston": RungeKutta(((), (2 / 3,)), (0.25, 0.75), (0.0, 2 / 3)),
  "rk4": RungeKutta(((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6), (0.0, 0.5, 0.5, 1.0)),
  "leapfrog": Leapfrog(),
}


def weight_times(model: ModelConfig, grid: Grid | None = None) -> Times:
  """The times whose weights the model's solver uses on a grid, and which of them each step; None: its own grid."""
  return (grid or make_grid(model)).times(SOLVERS[model.solver].nodes)


def register(name: str, solver: Solver) -> None:
  """Adds a solver as a choice of `model.solver`; it must not change afterwards.

  Raises:
    UserError: another solver has this name, by which compiled programs are cached; or it is not a `Solver`.
  """
  if not isinstance(solver, Solver):
    raise UserError(f"{name}: {solver!r} is not a Solver; pass an instance of a subclass")
  if SOLVERS.setdefault(name, solver) != solver:
    raise UserError(f"{name}: is the name of a solver already; register it under another name")
  config_lib.add_choice("model.solver", name)
