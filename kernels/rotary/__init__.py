"""Rotary position embedding: `rotate` uses the TPU kernel or plain JAX, by the backend."""

from diffeq_nnx.kernels.rotary.dispatch import rotate
from diffeq_nnx.kernels.rotary.reference import frequencies

__all__ = ["frequencies", "rotate"]
