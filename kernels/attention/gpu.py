"""Attention for NVIDIA Hopper GPUs, in Pallas (Mosaic GPU): the function, and its kernels behind `flash`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash, gpu_forward, gpu_one_pass, gpu_two_pass
from diffeq_nnx.kernels.attention.gpu_parts import Problem
from diffeq_nnx.kernels.attention.mask import Mask


@dataclasses.dataclass(frozen=True)
class GPUKernel(Problem):
  """The kernels for one problem; see `flash.Kernel`."""

  deterministic: bool = False

  def forward(self, q, k, v, q_segments, kv_segments):
    """Output [B, S, H, D] and log-sum-exp [B, H, S]; q is [B, S, H, D], k and v are [B, L, K, D]."""
    return gpu_forward.forward(q, k, v, q_segments, kv_segments, self)

  def backward(self, q, k, v, q_segments, kv_segments, out, lse, dout, dlse):
    """Gradients of q, k and v."""
    kernels = gpu_two_pass if self.deterministic or not gpu_one_pass.takes(self.D) else gpu_one_pass
    delta = jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32)) - dlse
    return kernels.backward(q, k, v, q_segments, kv_segments, lse, delta, dout, self)


def attention_gpu(
  q_BxSxHxD: jax.Array,
  k_BxLxKxD: jax.Array,
  v_BxLxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxL: jax.Array | None,
  *,
  mask: Mask,
  scale: float,
  logits_soft_cap: float | None,
  deterministic: bool = False,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention's output [B, S, H, D] and log-sum-exp [B, S, H] (float32), like `attention_reference`.

  Takes bfloat16 and D up to 256; needs jax 0.11.2.

  Args:
    deterministic: gradients in two passes, which add in a fixed order; one pass, the default, adds the parts of dQ as
      they come. Heads wider than 128, or 48 or 112 wide once padded to a multiple of 16, take two passes always.
    interpret: a `plgpu.InterpretGPUParams` runs it in Pallas's interpreter, on a CPU. Set the environment variable
      NPROC=8 on machines of fewer cores: the interpreter blocks one of XLA's threads for each warpgroup that waits.
  """
  kernel = GPUKernel(mask, scale, logits_soft_cap, k_BxLxKxD.shape[1], q_BxSxHxD.shape[3], interpret, deterministic)
  out_BxSxHxD, lse_BxHxS = flash.flash_attention(
    q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, q_segments_BxS, kv_segments_BxL, kernel
  )
  return out_BxSxHxD, jnp.swapaxes(lse_BxHxS, 1, 2)
