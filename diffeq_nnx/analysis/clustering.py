"""Clustering of tokens: in a simulation of attention alone, and in a model.

L tokens, D dimensions, S steps, N samples of the simulation, k order of a polynomial.

The simulation follows Tong et al. 2025, appendix C.8: with constant weights tokens cluster, as theory predicts for
weights shared over depth (Geshkovski et al. 2023); in the paper they cluster less with weights that grow over depth.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.weight_sources import GridWeights

NEAR = 0.1  # directions nearer than this, as unit vectors, count as one

SCALES = ("same_end", "same_mean", "plain")


@dataclasses.dataclass(frozen=True)
class Simulation:
  """Tokens moved by attention alone, in N independent samples.

  Attributes:
    states: [S + 1, N, L, D].
    times: [S + 1], from 0.
    order: k.
    clustering: `clustered_share` of the states, [S + 1, N].
  """

  states: np.ndarray
  times: np.ndarray
  order: int
  clustering: np.ndarray


def simulate(
  order: int,
  *,
  seeds: Sequence[int] = (0,),
  num_tokens: int = 40,
  dim: int = 3,
  step: float = 0.1,
  time: float = 20.0,
  scale: str = "same_end",
) -> Simulation:
  """x <- x + step Attention(standardized x), with random weights scaled by a polynomial of t.

  W_qk = A A^T p(t)^2 and W_v = V p(t), where A and V [D, D] are normal and constant; x starts uniform in
  [-2, 2]; every token attends to all tokens; softmax has no scale.

  Args:
    order: k of the polynomial; 0: constant weights.
    seeds: of A, V and x, one for each of the N samples, the same for every order.
    num_tokens: L.
    dim: D.
    step: of the Euler method.
    time: T; the defaults are 200 steps.
    scale: of the polynomial: same_end, (t / T)^k, ends at 1 for every order; same_mean, (k + 1)(t / T)^k, has mean 1
      over time for every order; plain, t^k.

  Raises:
    UserError: a value out of range.
  """
  if scale not in SCALES:
    raise UserError(f"scale={scale!r}: must be one of {', '.join(SCALES)}")
  for name, value, least in (("order", order, 0), ("num_tokens", num_tokens, 2), ("dim", dim, 1)):
    if value < least:
      raise UserError(f"{name}={value}: must be {least} or above")
  if not len(seeds) or not 0 < step <= time < math.inf:
    raise UserError(f"seeds={seeds}, step={step}, time={time}: must be one or more seeds, and 0 < step <= time")
  generators = [np.random.default_rng(seed) for seed in seeds]
  a_NxDxD, v_NxDxD = np.stack([rng.normal(size=(2, dim, dim)) for rng in generators], axis=1)
  x_NxLxD = np.stack([rng.uniform(-2, 2, (num_tokens, dim)) for rng in generators])
  times = step * np.arange(round(time / step) + 1)
  factor = {"same_end": 1.0, "same_mean": order + 1.0, "plain": time**order}[scale]
  states = [x_NxLxD]
  for t in times[:-1]:
    size = factor * (t / time) ** order
    normed_NxLxD = _standardized(x_NxLxD)
    compared_NxLxD = normed_NxLxD @ a_NxDxD * size
    scores_NxLxL = compared_NxLxD @ compared_NxLxD.swapaxes(1, 2)
    shares_NxLxL = np.exp(scores_NxLxL - scores_NxLxL.max(-1, keepdims=True))
    shares_NxLxL /= shares_NxLxL.sum(-1, keepdims=True)
    x_NxLxD = x_NxLxD + step * shares_NxLxL @ normed_NxLxD @ v_NxDxD * size
    states.append(x_NxLxD)
  states = np.stack(states)
  return Simulation(states, times, order, clustered_share(states))


def _standardized(x_NxLxD: np.ndarray) -> np.ndarray:
  return (x_NxLxD - x_NxLxD.mean(-1, keepdims=True)) / np.sqrt(x_NxLxD.var(-1, keepdims=True) + 1e-5)


def clustered_share(states: np.ndarray, near: float = NEAR) -> np.ndarray:
  """The share of pairs of tokens with the same direction, within `near` as unit vectors: [..., L, D] -> [...].

  From 0, no two tokens, to 1, all. Directions, since RMSNorm removes the size of a state; LayerNorm also removes the
  mean over D.
  """
  L = states.shape[-2]
  together = _squared_distances(_directions(states)) < near**2
  return (together.sum((-1, -2)) - L) / (L * (L - 1))


def spread(states: np.ndarray) -> np.ndarray:
  """The mean distance of two tokens' directions, from 0 to 2: [..., L, D] -> [...]; random directions: sqrt(2)."""
  L = states.shape[-2]
  distances = np.sqrt(np.maximum(_squared_distances(_directions(states)), 0))
  return distances.sum((-1, -2)) / (L * (L - 1))


def _directions(states: np.ndarray) -> np.ndarray:
  states = np.asarray(states, np.float64)
  return states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def _squared_distances(directions: np.ndarray) -> np.ndarray:
  return 2 - 2 * directions @ directions.swapaxes(-1, -2)


def constant_weights(model: AnalyzedModel, step: int) -> GridWeights:
  """The weights of one step, at its first node, at every time; raises as `AnalyzedModel.check_step`."""
  step = model.check_step("step", step)
  with model.computing():
    return jax.tree.map(lambda leaf: leaf[np.full(len(leaf), model.times.index_SxN[step, 0])], model.weights)


def depth_spread(
  model: AnalyzedModel, tokens_L: Sequence[int] | np.ndarray, held: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """(spread, clustered share) of a text's states over depth, [S + 1] each, with the model's weights or constant ones.

  Args:
    model: the model.
    tokens_L: at least two.
    held: a step, from 0, whose weights are used at every step; None: each step has its own.

  Raises:
    UserError: as `AnalyzedModel.check_tokens`, a single token, or a step out of range.
  """
  if len(tokens_L) == 1:
    raise UserError("tokens: there is one, which is at no distance from another; give two or more")
  weights = None if held is None else constant_weights(model, held)
  states_SxLxD = np.asarray(model.observe(tokens_L, weights).states[:, 0], np.float64)
  if issubclass(vector_fields.FIELDS[model.config.field], vector_fields.GPTField):  # as LayerNorm does
    states_SxLxD -= states_SxLxD.mean(-1, keepdims=True)
  return spread(states_SxLxD), clustered_share(states_SxLxD)
