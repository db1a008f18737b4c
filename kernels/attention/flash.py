"""What the fused kernels share: the rule for differentiating them.

B batch, S query positions, H query heads, D head width.
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp


class Kernel(Protocol):
  """A fused kernel, specialised for one problem; hashable."""

  def forward(self, q, k, v, q_segments, kv_segments) -> tuple[jax.Array, jax.Array]:
    """out [B, S, H, D] in the dtype of q, and the log-sum-exp [B, H, S], float32, -inf where a row sees nothing."""

  def backward(self, q, k, v, q_segments, kv_segments, lse_BxHxS, delta_BxHxS, dout) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v. With p the softmax's weights, a score's gradient is p (dout v^T - delta)."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(q, k, v, q_segments, kv_segments, kernel: Kernel) -> tuple[jax.Array, jax.Array]:
  """What `kernel.forward` returns; differentiable once in reverse mode with respect to q, k and v.

  Nothing of size [S, T] is kept: the backward pass makes the softmax's weights again from the log-sum-exp
  (FlashAttention, Dao et al. 2022, section 3.1).
  """
  return kernel.forward(q, k, v, q_segments, kv_segments)


def _forward(q, k, v, q_segments, kv_segments, kernel):
  out, lse = kernel.forward(q, k, v, q_segments, kv_segments)
  return (out, lse), (q, k, v, q_segments, kv_segments, out, lse)


def _backward(kernel, residuals, gradients):
  q, k, v, q_segments, kv_segments, out, lse_BxHxS = residuals
  dout, dlse_BxHxS = gradients
  along = jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32))
  return *kernel.backward(q, k, v, q_segments, kv_segments, lse_BxHxS, along - dlse_BxHxS, dout), None, None


flash_attention.defvjp(_forward, _backward)
