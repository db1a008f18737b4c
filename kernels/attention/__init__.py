"""Fused attention: `attention` uses the kernel of a TPU or a Hopper GPU, cuDNN or the reference, by the device."""

from diffeq_nnx.kernels.attention.decode import decode_attention
from diffeq_nnx.kernels.attention.dispatch import IMPLEMENTATIONS, attention, choose
from diffeq_nnx.kernels.attention.ring import ring_attention

__all__ = ["IMPLEMENTATIONS", "attention", "choose", "decode_attention", "ring_attention"]
