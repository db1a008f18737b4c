"""Kernels with the output axis first, which a CPU multiplies by few tokens without copying them.

XLA's library for CPUs copies the right factor of a product into another order, each time; the left factor it reads as
it lies, if its last axis is the one that is summed over. So `x @ kernel` becomes (kernel^T x^T)^T, with kernel^T in
memory. docs/evidence/generation.md has what that gains.

B rows, L positions, I in, O out.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputFirst:
  """A kernel [I, O] that is stored transposed; all that it can do is `x @ kernel`."""

  stored_OxI: jax.Array

  def __rmatmul__(self, x_BxLxI: jax.Array) -> jax.Array:
    """x @ kernel, [B, L, O]."""
    return product(x_BxLxI, self.stored_OxI)


def product(x_BxLxI: jax.Array, stored_OxI: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x stored^T, [B, L, O], with the matrix on the left; the result is of `dtype`, None: as that of `x @ kernel`."""
  over = ((1,), (2,)), ((), ())
  made_OxBxL = jax.lax.dot_general(stored_OxI, x_BxLxI, over, preferred_element_type=dtype)
  return jnp.moveaxis(jax.lax.optimization_barrier(made_OxBxL), 0, -1)  # without the barrier XLA swaps the factors


def store_output_first(block_weights: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with every kernel stored so. Jit it."""
  return map_kernels(lambda _, kernel: OutputFirst(kernel.T), block_weights)


def map_kernels(
  function: Callable[[str, jax.Array], Any], block_weights: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with `function` of a group's name and its kernel [I, O] in place of each kernel."""
  change = lambda group, name, leaf: function(group, leaf) if name == "kernel" and leaf.ndim == 2 else leaf
  return {
    group: {name: change(group, name, leaf) for name, leaf in leaves.items()} for group, leaves in block_weights.items()
  }
