"""Eigenvalues of the products of weights that update the state, over depth.

S times of weights, D embed_dim, H query heads, K key/value heads, C head_dim, F mlp_dim.

A head compares tokens by x W_q W_k^T y^T and writes x W_v W_o; the feed-forward branch has the pair W_up W_down (Tong
et al. 2025, section 4). Each is a matrix [D, D] of low rank, A B with A [D, n], and its nonzero eigenvalues are those
of B A [n, n]: so the smaller product is decomposed, in float64, and the D - n zeros are left out. Norms, biases, rotary
positions (so: tokens at equal positions), 1 / sqrt(C), the gate of SwiGLU and dt are not in these products.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, Progress
from diffeq_nnx.model import vector_fields

PAIRS = ("qk", "ov", "ff")


@dataclasses.dataclass(frozen=True)
class Spectra:
  """Complex eigenvalues, unordered."""

  times: np.ndarray  # depth t of the weights, [S]
  qk: np.ndarray  # of W_q W_k^T, [S, H, n], n the smaller of C and D
  ov: np.ndarray  # of W_v W_o, [S, H, n]
  ff: np.ndarray | None  # of W_up W_down, [S, 1, n], n the smaller of F and D; None if not requested

  def of(self, pair: str) -> Any:
    """The eigenvalues of the pair qk, ov or ff."""
    return getattr(self, pair)


def eigenvalues(left_xDxN: np.ndarray | jax.Array, right_xNxD: np.ndarray | jax.Array) -> np.ndarray:
  """Eigenvalues of left @ right, [..., min(D, N)], complex128, without the zeros that follow from its rank."""
  left, right = np.asarray(left_xDxN, np.float64), np.asarray(right_xNxD, np.float64)
  small = right @ left if left.shape[-1] < left.shape[-2] else left @ right
  return np.linalg.eigvals(small).astype(np.complex128)


def spectra(
  model: AnalyzedModel,
  times_S: Sequence[float] | np.ndarray | None = None,
  *,
  feedforward: bool = True,
  progress: Progress = lambda done: None,
) -> Spectra:
  """The spectra of a model at times from 0 to 1; None: at those of its own weights.

  The eigenvalues of the feed-forward pair, which take the longest, are computed if `feedforward`. `progress` is called
  with the number of times done since the last call. Raises UserError for times outside 0 to 1, and for any times if
  weights are stored.
  """
  field, U = vector_fields.make_field(model.config), len(model.times.times_U)
  own = times_S is None
  times_S = np.asarray(model.times.times_U if times_S is None else model.check_times(times_S), np.float64)
  qk, ov, ff = [], [], []
  for part_S in np.split(times_S, range(U, len(times_S), U)):  # at most as many weights at a time as the model has
    kernels = field.head_kernels(jax.device_get(model.ready.weights.sets if own else model.weights_at(part_S.tolist())))
    for s in range(len(part_S)):
      one = jax.tree.map(lambda kernel, s=s: kernel[s], kernels)
      groups = one.query.shape[1] // one.key.shape[1]
      heads = lambda kernel_DxKxC, n=groups: np.repeat(kernel_DxKxC, n, axis=1).swapaxes(0, 1)  # [H, D, C]
      qk.append(eigenvalues(heads(one.query, 1), heads(one.key).swapaxes(1, 2)))
      ov.append(eigenvalues(heads(one.value), one.out))
      if feedforward:
        ff.append(eigenvalues(one.up, one.down)[None])
      progress(1)
  return Spectra(times_S, np.stack(qk), np.stack(ov), np.stack(ff) if feedforward else None)


def positive_share(values: np.ndarray) -> np.ndarray:
  """The share of eigenvalues with a positive real part: [..., n] -> [...]."""
  return (values.real > 0).mean(-1)


def copying_score(values: np.ndarray) -> np.ndarray:
  """sum lambda / sum |lambda|, from -1 to 1: [..., n] -> [...] (Elhage et al. 2021, on copying heads).

  1 if all eigenvalues are positive reals. A head whose two pairs both score high attends to tokens like its own and
  copies them, which Tong et al. interpret as a sign of induction. Elhage et al. include embedding and unembedding in
  the scores, and take pairs of heads; `attention.prefix_matching` measures a head's behavior.
  """
  return values.sum(-1).real / np.maximum(np.abs(values).sum(-1), np.finfo(np.float64).tiny)
