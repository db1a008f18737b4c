"""Clustering of tokens over depth.

L tokens, D dimensions, S steps.
"""

from collections.abc import Sequence

import jax
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.weight_sources import GridWeights

NEAR = 0.1  # directions nearer than this, as unit vectors, count as one


def clustered_share(states: np.ndarray) -> np.ndarray:
  """The share of pairs of tokens with the same direction, within `NEAR` as unit vectors: [..., L, D] -> [...].

  From 0, no two tokens, to 1, all. Directions, since RMSNorm removes the size of a state; LayerNorm also removes the
  mean over D.
  """
  L = states.shape[-2]
  together = _squared_distances(states) < NEAR**2
  return (together.sum((-1, -2)) - L) / (L * (L - 1))


def spread(states: np.ndarray) -> np.ndarray:
  """The mean distance of two tokens' directions, from 0 to 2: [..., L, D] -> [...]; random directions: sqrt(2)."""
  L = states.shape[-2]
  distances = np.sqrt(np.maximum(_squared_distances(states), 0))
  return distances.sum((-1, -2)) / (L * (L - 1))


def _squared_distances(states: np.ndarray) -> np.ndarray:
  """Of the directions of each pair of tokens, [..., L, L]; that of a state of 0 is 0."""
  states = np.asarray(states, np.float64)
  directions = states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
  squares = (directions**2).sum(-1)
  return squares[..., :, None] + squares[..., None, :] - 2 * directions @ directions.swapaxes(-1, -2)


def constant_weights(model: AnalyzedModel, step: int) -> GridWeights:
  """The weights of one step, at its first node, at every time."""
  with model.use_device():
    return jax.tree.map(lambda leaf: leaf[np.full(len(leaf), model.times.index_SxN[step, 0])], model.ready.weights)


def depth_spread(
  model: AnalyzedModel, tokens_L: Sequence[int] | np.ndarray, held: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """(spread, clustered share) of a text's states over depth, [S + 1] each, with the model's weights or constant ones.

  The weights of the step `held`, from 0, are used at every step; None: each step has its own. Raises UserError as
  `AnalyzedModel.check_tokens`, and for a single token.
  """
  if len(tokens_L) == 1:
    raise UserError("tokens: there is one, which is at no distance from another; give two or more")
  weights = None if held is None else constant_weights(model, held)
  states_SxLxD = np.array(model.observe(tokens_L, weights).states[:, 0], np.float64)
  if issubclass(vector_fields.FIELDS[model.config.field], vector_fields.GPTField):  # as LayerNorm does
    states_SxLxD -= states_SxLxD.mean(-1, keepdims=True)
  return spread(states_SxLxD), clustered_share(states_SxLxD)
