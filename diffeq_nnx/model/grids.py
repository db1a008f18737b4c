"""Grids: the steps of an integration over depth, and the times whose weights they use.

S solver steps, N nodes of a solver, U weight sets (distinct times), W those of the whole grid where steps are left out,
Q points of a mean.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import ModelConfig

MEAN_POINTS = 8  # of each part of a step in a mean, and 2 for each radian that the fastest wave of e(t) turns in it
PART_RADIANS = 16.0  # that it turns in a part at most


class Times(NamedTuple):
  """The weight sets of one pass: set u is W averaged over `points_UxQ[u]` with `shares_UxQ[u]`, which sum to 1."""

  points_UxQ: np.ndarray  # times between 0 and 1; Q = 1 where a set is W at one time
  shares_UxQ: np.ndarray  # the share of each point
  index_SxN: np.ndarray  # the set that a step uses at each node of its solver
  kept_W: np.ndarray | None = None  # where steps are left out: which of the whole grid's sets these are; None: all

  @property
  def times_U(self) -> np.ndarray:
    """The time of each set; of a mean, its center."""
    return (self.points_UxQ * self.shares_UxQ).sum(1)


def at_times(times_U: Sequence[float] | np.ndarray | jax.Array) -> Times:
  """W at these times, a step for each; the times may be traced."""
  points_UxQ: Any = (times_U if isinstance(times_U, jax.Array) else np.asarray(times_U, np.float64))[:, None]
  return Times(points_UxQ, np.ones((len(points_UxQ), 1)), np.arange(len(points_UxQ))[:, None])


@dataclasses.dataclass(frozen=True)
class Grid:
  """The steps of one integration. Hashable, so that it can be a static argument."""

  edges: tuple[float, ...]  # t where steps start and end, one more than `sizes`, rising from 0 to 1
  # the size of each step in the units of the horizon; a step of size 0 is left out: it is not computed, and its weights
  # are not made
  sizes: tuple[float, ...]
  weights_at: str = "nodes"  # which weights a step uses, as `model.time.weights_at`
  radians: float = 0.0  # the angle that the fastest wave of e(t) turns from t = 0 to 1; sets the points of a mean

  def __post_init__(self):
    if not any(self.sizes) or len(self.edges) != len(self.sizes) + 1:
      raise ValueError(
        f"a grid needs at least one step of a size above 0, and one edge more than sizes; got {len(self.edges)} edges "
        f"and sizes={self.sizes}"
      )
    rising = all(before < after for before, after in zip(self.edges, self.edges[1:]))  # false for NaN
    if (self.edges[0], self.edges[-1]) != (0, 1) or not rising:
      raise ValueError(f"edges={self.edges}: must rise from 0 to 1")
    if not all(0 <= size < math.inf for size in self.sizes):
      raise ValueError(f"sizes={self.sizes}: must be 0 or above, and finite")
    known = config_lib.choices("model.time.weights_at")
    if self.weights_at not in known:
      raise ValueError(f"weights_at={self.weights_at!r}: must be one of {', '.join(known)}")

  @property
  def kept_S(self) -> tuple[int, ...]:
    """Which steps are not left out, in the order of time."""
    return tuple(number for number, size in enumerate(self.sizes) if size)

  def keep(self, steps: Sequence[int]) -> "Grid":
    """This grid with all other steps left out."""
    kept = set(steps)
    return dataclasses.replace(self, sizes=tuple(size if n in kept else 0.0 for n, size in enumerate(self.sizes)))

  @property
  def dts(self) -> tuple[float, ...]:
    """The sizes of the steps that are not left out, [S]."""
    return tuple(filter(None, self.sizes))

  @property
  def num_steps(self) -> int:
    """S."""
    return len(self.dts)

  def times(self, nodes: Sequence[float]) -> Times:
    """The distinct times that a solver with these nodes needs weights of, and which of them each step uses.

    Args:
      nodes: places in a step, from 0 (its start) to 1 (its end), [N].
    """
    whole = self._whole_times(nodes)
    if self.num_steps == len(self.sizes):
      return whole
    index_SxN = whole.index_SxN[np.asarray(self.kept_S)]
    kept_W = np.isin(np.arange(len(whole.points_UxQ)), index_SxN)
    places_W = np.cumsum(kept_W) - 1  # of the kept sets among themselves
    return Times(whole.points_UxQ[kept_W], whole.shares_UxQ[kept_W], places_W[index_SxN], kept_W)

  def _whole_times(self, nodes: Sequence[float]) -> Times:
    """`times` of the grid with no step left out."""
    edges, S, N = np.asarray(self.edges), len(self.sizes), len(nodes)
    starts_S, ends_S = edges[:-1], edges[1:]
    if self.weights_at == "mean":
      roots_Q, shares_Q = _mean_rule(self.radians * float((ends_S - starts_S).max()))
      points_SxQ = starts_S[:, None] + (ends_S - starts_S)[:, None] * roots_Q
      return Times(points_SxQ, np.tile(shares_Q, (S, 1)), np.tile(np.arange(S)[:, None], N))
    places = {"nodes": tuple(nodes), "end": (1.0,), "middle": (0.5,)}[self.weights_at]
    # not by the formula at an end, so that the end of a step and the start of the next are the same number
    times_SxN = np.stack([ends_S if c == 1 else starts_S + c * (ends_S - starts_S) for c in places], axis=1)
    times_U, inverse = np.unique(times_SxN, return_inverse=True)
    index_SxN = inverse.reshape(times_SxN.shape)
    return at_times(times_U)._replace(index_SxN=index_SxN if self.weights_at == "nodes" else np.tile(index_SxN, N))


@functools.lru_cache(maxsize=64)
def _mean_rule(radians: float) -> tuple[np.ndarray, np.ndarray]:
  """Points in [0, 1] and their shares, [Q]: the Gauss-Legendre rule in equal parts of at most `PART_RADIANS`."""
  parts = max(1, math.ceil(radians / PART_RADIANS))
  roots, shares = np.polynomial.legendre.leggauss(MEAN_POINTS + math.ceil(2 * radians / parts))
  points_PxR = (np.arange(parts)[:, None] + (1 + roots) / 2) / parts
  return points_PxR.reshape(-1), np.tile(shares / (2 * parts), parts)


def uniform_grid(num_steps: int, horizon: float) -> Grid:
  """Edges at i/n for i = 0..n, and dt = horizon/n: every count gives exactly that many steps."""
  return Grid(tuple(i / num_steps for i in range(num_steps + 1)), (horizon / num_steps,) * num_steps)


def uneven_grid(step_sizes: Sequence[float]) -> Grid:
  """Steps of these sizes, above 0; edges are fractions of the total."""
  total = math.fsum(step_sizes)
  edges = [math.fsum(step_sizes[:i]) / total for i in range(len(step_sizes) + 1)]
  return Grid(tuple(edges), tuple(map(float, step_sizes)))


def make_grid(model: ModelConfig, num_steps: int | None = None) -> Grid:
  """The grid of a model: its own, or one of another number of steps.

  Fewer steps than its own are those that come first in `model.depth_order`, each of its own size. Where there is no
  such order, and for more steps, they are of one size over the same horizon.
  """
  num_steps = model.num_steps if num_steps is None else num_steps
  nested = model.depth_order and num_steps < model.num_steps
  own = nested or num_steps == model.num_steps
  if own and model.step_sizes:
    grid = uneven_grid(model.step_sizes)
  else:
    grid = uniform_grid(model.num_steps if own else num_steps, model.total_time)
  if nested:
    grid = grid.keep(model.depth_order[:num_steps])
  varies = model.weights == "generated" and not model.time.constant
  radians = model.time.radians if varies and model.time.weights_at == "mean" else 0.0
  return dataclasses.replace(grid, weights_at=model.time.weights_at, radians=radians)
