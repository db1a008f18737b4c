"""Rotary position embedding: `rotate` uses the TPU kernel or plain JAX, by the backend."""

from diffeq_nnx.kernels.rotary.dispatch import rotate

__all__ = ["rotate"]
