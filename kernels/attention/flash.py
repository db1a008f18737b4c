"""The shared part of the fused kernels: the form of the scores, and the rule for differentiating them.

B batch, S query positions, H query heads, D head width. Scores are in units of log2 e, so that the exponential is
a power of two.
"""

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
MASKED = -1e30  # the score of a masked key: finite, so that MASKED - MASKED is 0 and not NaN
EMPTY_ROW_LSE = 1e30  # in place of -inf in the backward pass: 2^(score - EMPTY_ROW_LSE) is 0 for any score


class Kernel(Protocol):
  """A fused kernel, specialized for one problem; hashable."""

  def forward(self, q, k, v, q_segments, kv_segments) -> tuple[jax.Array, jax.Array]:
    """out in the shape and dtype of q, and the log-sum-exp [B, H, S], float32, -inf for a row without keys."""

  def backward(self, q, k, v, q_segments, kv_segments, out, lse_BxHxS, dout, dlse_BxHxS) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v. With p the softmax's weights, a score's gradient is p (dout v^T - delta).

    delta is dout's product with out, summed over a head's width, minus `dlse`. `lse` is in units of log2 e, and
    EMPTY_ROW_LSE for a row without keys.
    """


def scores(products, problem: Any):
  """Scores from q k^T: multiplied by `problem.scale`, limited by its `soft_cap`, in units of log2 e."""
  if problem.soft_cap is None:
    return products * (problem.scale * LOG2_E)
  return jnp.tanh(products * (problem.scale / problem.soft_cap)) * (problem.soft_cap * LOG2_E)


def undo_soft_cap(dscores, products, problem: Any):
  """Gradients of the scores before the soft cap, from those after it."""
  if problem.soft_cap is None:
    return dscores
  bent = jnp.tanh(products * (problem.scale / problem.soft_cap))
  return dscores * (1.0 - bent * bent)


def pad(x, axis: int, multiple: int, value=0):
  """Pads the end of an axis with `value`, up to a multiple."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, widths, constant_values=value) if widths[axis][1] else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(q, k, v, q_segments, kv_segments, kernel: Kernel) -> tuple[jax.Array, jax.Array]:
  """The result of `kernel.forward`, differentiable once in reverse mode with respect to q, k and v.

  Nothing of size [S, L] is stored: the backward pass recomputes the softmax's weights from the log-sum-exp
  (FlashAttention, Dao et al. 2022, section 3.1).
  """
  return kernel.forward(q, k, v, q_segments, kv_segments)


def _forward(q, k, v, q_segments, kv_segments, kernel):
  out, lse = kernel.forward(q, k, v, q_segments, kv_segments)
  return (out, lse), (q, k, v, q_segments, kv_segments, out, lse)


def _backward(kernel, residuals, gradients):
  q, k, v, q_segments, kv_segments, out, lse_BxHxS = residuals
  dout, dlse_BxHxS = gradients
  lse_BxHxS = jnp.where(jnp.isneginf(lse_BxHxS), EMPTY_ROW_LSE, lse_BxHxS * LOG2_E)
  return *kernel.backward(q, k, v, q_segments, kv_segments, out, lse_BxHxS, dout, dlse_BxHxS), None, None


flash_attention.defvjp(_forward, _backward)
