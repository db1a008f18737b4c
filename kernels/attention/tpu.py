"""Attention for TPUs, in Pallas (Mosaic TPU): forward and backward without the [S, L] scores in memory.

B batch, S query positions, L key positions, H query heads, K key/value heads, D head width; W lanes of a block. The
method is FlashAttention's (Dao et al. 2022, 2023): an online softmax in the forward pass; the backward pass recomputes
probabilities from the log-sum-exp.
"""

from typing import Any

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash, tpu_backward, tpu_forward
from diffeq_nnx.kernels.attention.blocks import TPUBlocks
from diffeq_nnx.kernels.attention.flash import pad
from diffeq_nnx.kernels.attention.mask import Mask
from diffeq_nnx.kernels.attention.tpu_parts import LANES, TPUProblem


class TPUKernel(TPUProblem):
  """The kernels for one problem; see `flash.Kernel`. Arrays have their heads side by side, [B, S, H D].

  So a projection's result is read as it is, and nothing is transposed: a block is some positions by W lanes.
  """

  forward = tpu_forward.forward
  backward = tpu_backward.backward


def attention_tpu(
  q_BxSxHxD: jax.Array,
  k_BxLxKxD: jax.Array,
  v_BxLxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxL: jax.Array | None,
  *,
  mask: Mask,
  scale: float,
  logits_soft_cap: float | None,
  blocks: TPUBlocks | None = None,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention's output [B, S, H, D] and log-sum-exp [B, S, H] (float32), like `attention_reference`.

  Heads 32 or 64 wide lie two or four to a block, so that they fill its 128 lanes; products with the lanes of one are
  taken with zeros in the others'. Key heads that several query heads read are copied beside themselves for that. Other
  widths are padded to a multiple of 128.

  Args:
    blocks: sizes; None: the tuned ones.
    interpret: True, or a `pltpu.InterpretParams`: run in one of Pallas's interpreters, on any backend.
  """
  B, S, H, D = q_BxSxHxD.shape
  L, K = k_BxLxKxD.shape[1:3]
  heads = LANES // D if D in (32, 64) else 1
  if H % heads or (H != K and H // K % heads):
    heads = 1
  W = heads * D if heads > 1 else D + -D % LANES
  blocks = blocks or TPUBlocks.tuned(S, L, W, q_BxSxHxD.dtype.itemsize)
  kernel = TPUKernel(mask, scale, logits_soft_cap, L, heads, W, q_segments_BxS is not None, blocks, interpret)

  def join_heads(x, copies: int = 1):
    x = pad(x, 3, W // heads)
    return (jnp.repeat(x, copies, axis=2) if copies > 1 else x).reshape(B, x.shape[1], -1)

  copies = heads if H != K else 1
  q, k, v = join_heads(q_BxSxHxD), join_heads(k_BxLxKxD, copies), join_heads(v_BxLxKxD, copies)
  out_BxSxM, lse_BxHxS = flash.flash_attention(q, k, v, q_segments_BxS, kv_segments_BxL, kernel)
  return out_BxSxM.reshape(B, S, H, -1)[..., :D], jnp.swapaxes(lse_BxHxS, 1, 2)
