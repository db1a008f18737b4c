"""The platform that computes."""

from typing import Any

import jax


def find_backend() -> str:
  """Finds the platform of `jax.default_device`, which `jax.default_backend` ignores, or else the default backend."""
  config: Any = jax.config  # whose types lack this name
  chosen = config.jax_default_device
  return jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)


def takes_tpu_kernel(implementation: str) -> bool:
  """Whether `attention` of this implementation is the TPU kernel, so that operations beside it are kernels too."""
  by_backend = implementation in ("auto", "pallas", "pallas_deterministic")
  return implementation == "pallas_tpu" or (by_backend and find_backend() == "tpu")
