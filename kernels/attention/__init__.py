"""Fused attention: `attention` uses the TPU kernel, cuDNN or the reference, by the backend."""

from diffeq_nnx.kernels.attention.dispatch import IMPLEMENTATIONS, attention, choose

__all__ = ["IMPLEMENTATIONS", "attention", "choose"]
