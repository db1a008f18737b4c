"""Causal attention. So far one implementation, the reference in plain JAX."""

from diffeq_nnx.kernels.attention.reference import attention_reference as attention
