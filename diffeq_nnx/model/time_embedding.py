"""From a time to the features that every weight is made from.

S solver steps, M frequencies, P = 2 M + 1 features.
"""

import jax
import jax.numpy as jnp

from diffeq_nnx.config import TimeConfig


def frequencies(time: TimeConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """The frequencies w_k [M], in units of the fastest.

  10000^(-k/M), from 1 downwards, as in sinusoidal position embeddings (Tong et al. 2025); or, if `time.embedding` is
  uniform, k/M for k = 1..M, so that the slowest wave makes half a turn from t = 0 to t = 1.
  """
  k_M = jnp.arange(time.sinusoidal_dim, dtype=dtype)
  if time.embedding == "uniform":
    return (k_M + 1) / time.sinusoidal_dim
  return jnp.asarray(10000.0, dtype) ** (-k_M / time.sinusoidal_dim)


def sinusoidal_features(times_S: jax.Array, frequencies_M: jax.Array, scale: float) -> jax.Array:
  """s(t) = [t, sin(scale t w), cos(scale t w)] (Tong et al. 2025, section 3.1), shape [S, 2 M + 1].

  Times are between 0 and 1, and `scale` is the angle of the fastest wave at t = 1 in radians. It is computed in the
  dtype of `frequencies_M`, which is float32 or wider whatever the model computes in: the angle reaches 1000 radians,
  where neighboring bfloat16 numbers are 4 radians apart.
  """
  times_S = times_S.astype(frequencies_M.dtype)
  angles_SxM = scale * times_S[:, None] * frequencies_M[None, :]
  return jnp.concatenate([times_S[:, None], jnp.sin(angles_SxM), jnp.cos(angles_SxM)], axis=1)
