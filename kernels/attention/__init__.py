"""Fused attention: `attention` uses the TPU kernel, cuDNN or the reference, by the backend."""

from diffeq_nnx.kernels.attention.decode import decode_attention
from diffeq_nnx.kernels.attention.dispatch import IMPLEMENTATIONS, attention, choose
from diffeq_nnx.kernels.attention.ring import ring_attention

__all__ = ["IMPLEMENTATIONS", "attention", "choose", "decode_attention", "ring_attention"]
