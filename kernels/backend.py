"""The platform that computes."""

from typing import Any

import jax


def find_backend() -> str:
  """Finds the platform of `jax.default_device`, which `jax.default_backend` ignores, or else the default backend."""
  config: Any = jax.config  # whose types lack this name
  chosen = config.jax_default_device
  return jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)
