"""The public function: chooses the implementation."""

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.kernels.backend import takes_tpu_kernel
from diffeq_nnx.kernels.rotary.reference import rotate_reference

MIN_POSITIONS = 128  # below which the kernel does not pay


def rotate(
  x_BxLxHxC: jax.Array,
  positions: jax.Array,
  frequencies_R: np.ndarray | jax.Array | None = None,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """Rotary position embedding (Su et al. 2021): channel i turns with channel i + C/2.

  Args:
    x_BxLxHxC: queries or keys.
    positions: of the tokens, [B, L], or [L] for all sequences.
    frequencies_R: radians that each of the R = C/2 pairs turns for each position; None: those of base 10000.
    implementation: of attention, as in `kernels.attention.attention`: where that is the TPU kernel, this is one too if
      heads are 32, 64, 128 or 256 wide and fill whole blocks of 128 lanes.

  Returns:
    [B, L, H, C] in the dtype of x, computed in float32 or wider.
  """
  # The kernel has no gradient of arrays of frequencies, nor of positions that aren't integers.
  has_gradients = not isinstance(frequencies_R, jax.Array) and jnp.issubdtype(positions.dtype, jnp.integer)
  on_tpu = takes_tpu_kernel(implementation) and has_gradients
  _, L, H, C = x_BxLxHxC.shape
  if on_tpu and L >= MIN_POSITIONS and C in (32, 64, 128, 256) and H * C % 128 == 0 and x_BxLxHxC.dtype != jnp.float64:
    from diffeq_nnx.kernels.rotary.tpu import rotate_tpu

    return rotate_tpu(x_BxLxHxC, positions, frequencies_R)
  return rotate_reference(x_BxLxHxC, positions, frequencies_R)
