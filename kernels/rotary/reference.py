"""Rotary position embedding in plain JAX, and its tables.

B batch, L positions, H heads, C head width, R = C / 2 frequencies.
"""

import jax
import jax.numpy as jnp

BASE = 10000.0


def tables(positions: jax.Array, C: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of each position's angle in each channel, [..., C]; the sine is negative in the first half."""
  frequencies_R = BASE ** (-jnp.arange(C // 2, dtype=dtype) * 2 / C)
  angles = positions.astype(dtype)[..., None] * jnp.expand_dims(frequencies_R, range(positions.ndim))
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate_reference(x_BxLxHxC: jax.Array, positions: jax.Array) -> jax.Array:
  """Each channel i of the first half turns with channel i + C/2; positions are [B, L], or [L] for all sequences."""
  wide = jnp.promote_types(x_BxLxHxC.dtype, jnp.float32)
  C = x_BxLxHxC.shape[-1]
  cos, sin = (table[:, :, None] if table.ndim == 3 else table[None, :, None] for table in tables(positions, C, wide))
  wide_BxLxHxC = x_BxLxHxC.astype(wide)
  swapped_BxLxHxC = jnp.concatenate([wide_BxLxHxC[..., C // 2 :], wide_BxLxHxC[..., : C // 2]], -1)
  return (wide_BxLxHxC * cos + swapped_BxLxHxC * sin).astype(x_BxLxHxC.dtype)
