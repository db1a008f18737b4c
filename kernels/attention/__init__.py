"""Fused attention: `attention` picks the TPU kernel, cuDNN or the reference by the backend it runs on."""

from diffeq_nnx.kernels.attention.dispatch import IMPLEMENTATIONS, attention, choose
