"""Growth of small changes along a chain of steps: singular values of products of Jacobians, without forming them.

N size of the state, p tangent vectors, S steps, r exponents, K maps processed together, m vectors of a basis.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

Sweep = Callable[[np.ndarray], np.ndarray]


def orthonormal(vectors_pxN: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(Q [p, N] with orthonormal rows, R [p, p]), vectors = R^T Q: a QR decomposition of row vectors."""
  q_Nxp, r_pxp = jnp.linalg.qr(vectors_pxN.T)
  return q_Nxp.T, r_pxp


def propagate(step: Callable[[Any, jax.Array], jax.Array], chain: Any, vectors_pxN: jax.Array,
              reverse: bool = False) -> tuple[jax.Array, jax.Array]:
  """Tangent vectors after a chain of linear steps, orthonormalized after each (Benettin et al. 1980).

  Otherwise all would align with the fastest growing direction, and float32 would lose the others.

  Args:
    step: (one link of the chain, vectors [p, N]) -> vectors [p, N]; linear in the vectors.
    chain: a pytree whose leaves have a leading axis S.
    vectors_pxN: initial vectors.
    reverse: go from the last link to the first, as cotangents do.

  Returns:
    Q [p, N] and R [S + 1, p, p] in the order of the steps taken: the vectors are (R_S ... R_0)^T Q.
  """
  start_pxN, r_pxp = orthonormal(vectors_pxN)
  move = lambda q_pxN, link: orthonormal(step(link, q_pxN))
  end_pxN, r_Sxpxp = jax.lax.scan(move, start_pxN, chain, reverse=reverse)
  r_Sxpxp = r_Sxpxp[::-1] if reverse else r_Sxpxp
  return end_pxN, jnp.concatenate([r_pxp[None], r_Sxpxp])


def multiplied_out(end_KxpxN: np.ndarray, r_KxSxpxp: np.ndarray) -> np.ndarray:
  """The vectors [K, p, N] from the factors that `propagate` returns, multiplied in float64."""
  product_Kxpxp = np.eye(end_KxpxN.shape[1])[None]
  for step in range(r_KxSxpxp.shape[1]):
    product_Kxpxp = np.asarray(r_KxSxpxp[:, step], np.float64) @ product_Kxpxp
  return product_Kxpxp.swapaxes(1, 2) @ np.asarray(end_KxpxN, np.float64)


def leading_singular_values(forward: Sweep, backward: Sweep, num_maps: int, size: int, num: int, *, block: int = 8,
                            tolerance: float = 1e-3, seed: int = 0) -> tuple[np.ndarray, float]:
  """The largest singular values of K linear maps M [N, N], by a block Krylov iteration (Golub, Luk & Overton 1981).

  Each round multiplies a block of orthonormal vectors by M and its transpose, and adds the new directions to a basis.
  The singular values of M on that basis never exceed those of M and grow towards them, quickly even where M is near the
  identity, for which power iteration is slow.

  Args:
    forward: orthonormal rows [K, p, N] -> M v of each row.
    backward: the same with the transposes.
    num_maps: K.
    size: N.
    num: number of singular values, r.
    block: vectors of a round, p; with at least N one round is exact.
    tolerance: the rounds end when none of the r logarithms changed by more in one, or the basis is complete.
    seed: of the first vectors.

  Returns:
    The singular values [K, r], largest first, and the last change of a logarithm; 0 if the basis became complete.
  """
  rng = np.random.default_rng(seed)
  block = min(block, size)
  new_KxpxN = np.broadcast_to(np.eye(size) if block == size else
                              _orthonormal(rng.normal(size=(1, block, size))), (num_maps, block, size))
  basis_KxmxN, image_KxmxN = (np.empty((num_maps, 0, size)) for _ in range(2))
  before_Kxr = None
  while True:
    moved_KxpxN = forward(new_KxpxN)
    basis_KxmxN, image_KxmxN = (np.concatenate(pair, axis=1) for pair in (
        (basis_KxmxN, new_KxpxN), (image_KxmxN, moved_KxpxN)))
    if basis_KxmxN.shape[1] == size:
      return np.linalg.svd(image_KxmxN, compute_uv=False)[:, :num], 0.0
    values_Kxm = _values(image_KxmxN, num)
    now_Kxr = np.log(np.maximum(values_Kxm[:, :num], np.finfo(np.float64).tiny))
    if before_Kxr is not None and before_Kxr.shape == now_Kxr.shape:
      change = float(np.abs(now_Kxr - before_Kxr).max())
      if change <= tolerance and now_Kxr.shape[1] == num:
        return values_Kxm[:, :num], change
    before_Kxr = now_Kxr
    back_KxpxN = backward(_orthonormal(moved_KxpxN))
    left = size - basis_KxmxN.shape[1]
    new_KxpxN = _beyond(basis_KxmxN, back_KxpxN, rng)[:, :left]


def _values(image_KxmxN: np.ndarray, num: int) -> np.ndarray:
  """Singular values [K, m], of which the first `num` are exact."""
  squares_Kxm = np.linalg.eigvalsh(image_KxmxN @ image_KxmxN.swapaxes(1, 2))[:, ::-1]
  if (squares_Kxm[:, :num] > 1e-10 * squares_Kxm[:, :1]).all():  # otherwise squaring has lost the small ones
    return np.sqrt(np.maximum(squares_Kxm, 0))
  return np.linalg.svd(image_KxmxN, compute_uv=False)


def _orthonormal(vectors_KxpxN: np.ndarray) -> np.ndarray:
  return np.linalg.qr(vectors_KxpxN.swapaxes(1, 2))[0].swapaxes(1, 2)


def _beyond(basis_KxmxN: np.ndarray, vectors_KxpxN: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Orthonormal rows that span the part of the vectors outside the basis; random directions where there is none."""
  for noise in (1e-10, 0.0):  # two passes make them orthogonal to working precision
    vectors_KxpxN = vectors_KxpxN + noise * rng.normal(size=vectors_KxpxN.shape)
    vectors_KxpxN = vectors_KxpxN - (vectors_KxpxN @ basis_KxmxN.swapaxes(1, 2)) @ basis_KxmxN
    vectors_KxpxN = _orthonormal(vectors_KxpxN)
  return vectors_KxpxN
