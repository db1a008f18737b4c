"""Rotary position embedding in plain JAX, and its tables.

B batch, L positions, H heads, C head width, R = C / 2 frequencies.
"""

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(
  C: int,
  *,
  base: float = 10000.0,
  factor: float = 1.0,
  low_freq_factor: float = 1.0,
  high_freq_factor: float = 4.0,
  original_len: int = 8192,
) -> np.ndarray:
  """Radians that each pair of channels turns for each position, [R] in float64: base^(-2 i / C) (Su et al. 2021).

  A factor above 1 is Llama 3's scaling for longer sequences (Dubey et al. 2024). A pair turns original_len / wavelength
  times in original_len positions; where that is below low_freq_factor, it turns `factor` times slower; above
  high_freq_factor it turns as without scaling; between, the frequency is interpolated linearly in this number.
  """
  plain_R = base ** (-np.arange(C // 2) * 2 / C)
  turns_R = original_len * plain_R / (2 * np.pi)
  kept_R = np.clip((turns_R - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
  return plain_R * (kept_R + (1 - kept_R) / factor)


def tables(
  positions: jax.Array, frequencies_R: np.ndarray | jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of each position's angle in each channel, [..., C]; the sine is negative in the first half."""
  angles = positions.astype(dtype)[..., None] * jnp.expand_dims(frequencies_R.astype(dtype), range(positions.ndim))
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate_reference(
  x_BxLxHxC: jax.Array, positions: jax.Array, frequencies_R: np.ndarray | jax.Array | None = None
) -> jax.Array:
  """Each channel i of the first half turns with channel i + C/2; positions are [B, L], or [L] for all sequences."""
  wide = jnp.promote_types(x_BxLxHxC.dtype, jnp.float32)
  C = x_BxLxHxC.shape[-1]
  made = tables(positions, frequencies(C) if frequencies_R is None else frequencies_R, wide)
  cos, sin = (table[:, :, None] if table.ndim == 3 else table[None, :, None] for table in made)
  wide_BxLxHxC = x_BxLxHxC.astype(wide)
  swapped_BxLxHxC = jnp.concatenate([wide_BxLxHxC[..., C // 2 :], wide_BxLxHxC[..., : C // 2]], -1)
  return (wide_BxLxHxC * cos + swapped_BxLxHxC * sin).astype(x_BxLxHxC.dtype)
