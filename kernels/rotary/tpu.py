"""Rotary position embedding for TPUs, in Pallas: heads side by side in lanes, turned in place.

B batch, L positions, H heads, C head width, M = H C lanes, W lanes of a table. XLA instead moves each half of a head to
lanes of its own, which takes several times as long as reading and writing the array.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.kernels.rotary.reference import frequencies, tables

LANES = 128
ROWS, COLUMNS = 256, 2048  # positions and lanes of a block


def _kernel(x_ref, cos_ref, sin_ref, out_ref, *, C: int):
  """A block of positions; the refs of x and of the result are [rows, columns], the tables' [rows, W]."""
  cos, sin = cos_ref[...], sin_ref[...]
  W = cos.shape[1]
  first_half = jax.lax.broadcasted_iota(jnp.int32, cos.shape, 1) % C < C // 2
  for start in range(0, x_ref.shape[1], W):
    x = x_ref[:, start : start + W].astype(jnp.float32)
    swapped = pltpu.roll(x, C // 2, 1)
    if C < W:
      swapped = jnp.where(first_half, pltpu.roll(x, W - C // 2, 1), swapped)
    out_ref[:, start : start + W] = (x * cos + swapped * sin).astype(out_ref.dtype)


def _rotate_blocks(x_BxLxM, cos_GxLxW, sin_GxLxW, C: int, interpret: Any):
  """G is B, or 1 for all sequences alike."""
  B, L, M = x_BxLxM.shape
  W = cos_GxLxW.shape[-1]
  columns = max(n for n in range(W, min(M, COLUMNS) + 1, W) if M % n == 0)
  x_spec = pl.BlockSpec((None, ROWS, columns), lambda b, i, j: (b, i, j))
  table_spec = pl.BlockSpec((None, ROWS, W), lambda b, i, j: (b if len(cos_GxLxW) > 1 else 0, i, 0))
  called = pl.pallas_call(
    functools.partial(_kernel, C=C),
    grid=(B, pl.cdiv(L, ROWS), M // columns),
    in_specs=[x_spec, table_spec, table_spec],
    out_specs=x_spec,
    out_shape=jax.ShapeDtypeStruct(x_BxLxM.shape, x_BxLxM.dtype),
    name="rotary",
    interpret=interpret,
  )
  with jax.enable_x64(False):  # indices are 32 bits wide
    return called(x_BxLxM, cos_GxLxW, sin_GxLxW)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x_BxLxM, positions_GxL, frequencies_R, interpret: Any):
  return _forward(x_BxLxM, positions_GxL, frequencies_R, interpret)[0]


def _forward(x_BxLxM, positions_GxL, frequencies_R, interpret, sign: float = 1.0):
  C = 2 * len(frequencies_R)
  cos, sin = tables(positions_GxL, frequencies_R, jnp.float32)
  widen = lambda table: jnp.tile(table, (1, 1, math.ceil(LANES / C)))
  return _rotate_blocks(x_BxLxM, widen(cos), widen(sign * sin), C, interpret), (positions_GxL, frequencies_R)


def _backward(interpret, turned_by, gradient_BxLxM):
  """Turns back: a rotation's transpose."""
  return _forward(gradient_BxLxM, *turned_by, interpret, -1.0)[0], None, None


_rotate.defvjp(_forward, _backward)


def rotate_tpu(
  x_BxLxHxC: jax.Array,
  positions: jax.Array,
  frequencies_R: np.ndarray | jax.Array | None = None,
  interpret: Any = False,
) -> jax.Array:
  """As `rotate_reference`, for C of 32, 64, 128 or 256, H C a multiple of 128; differentiable in reverse mode."""
  B, L, H, C = x_BxLxHxC.shape
  positions_GxL = positions if positions.ndim == 2 else positions[None]
  turns_R = jnp.asarray(frequencies(C) if frequencies_R is None else frequencies_R, jnp.float32)
  return _rotate(x_BxLxHxC.reshape(B, L, H * C), positions_GxL, turns_R, interpret).reshape(B, L, H, C)
