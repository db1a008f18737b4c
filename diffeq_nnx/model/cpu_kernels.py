"""Kernels of a block in two forms that a CPU multiplies by faster; all that they can do is `x @ kernel`.

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
  """A kernel [I, O] that is stored transposed, which a CPU multiplies by few tokens without copying it.

  XLA's library for CPUs copies the right factor of a product into another order, each time; the left factor it reads as
  it lies, if its last axis is the one that is summed over. So `x @ kernel` becomes (kernel^T x^T)^T, with kernel^T in
  memory. docs/evidence/generation.md has what that gains.
  """

  stored_OxI: jax.Array

  def __rmatmul__(self, x_BxLxI: jax.Array) -> jax.Array:
    """x @ kernel, [B, L, O]."""
    return multiply_output_first(x_BxLxI, self.stored_OxI)


def multiply_output_first(x_BxLxI: jax.Array, stored_OxI: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x stored^T, [B, L, O], with the matrix on the left; the result is of `dtype`, None: as that of `x @ kernel`."""
  over = ((1,), (2,)), ((), ())
  made_OxBxL = jax.lax.dot_general(stored_OxI, x_BxLxI, over, preferred_element_type=dtype)
  return jnp.moveaxis(jax.lax.optimization_barrier(made_OxBxL), 0, -1)  # without the barrier XLA swaps the factors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallerFirst:
  """A kernel [I, O] whose gradient a CPU computes from the smaller factor. It can't be differentiated forward.

  The gradient of `x @ kernel` is x^T g, and JAX computes it as (g^T x)^T. XLA's library for CPUs first copies a left
  factor that is summed over its first axis into another order, slowly and together with the element-wise work that made
  it. With the smaller of x and g on the left this copy is small, and several kernels that read the same x share it. On
  other platforms the product is JAX's. docs/evidence/training_cost.md has what that gains.
  """

  kernel_IxO: jax.Array

  def __rmatmul__(self, x_BxLxI: jax.Array) -> jax.Array:
    """x @ kernel, [B, L, O]."""
    return _multiply(x_BxLxI, self.kernel_IxO)


@jax.custom_vjp
def _multiply(x_BxLxI: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
  return x_BxLxI @ kernel_IxO


def _forward(x_BxLxI: jax.Array, kernel_IxO: jax.Array):
  return x_BxLxI @ kernel_IxO, (x_BxLxI, kernel_IxO)


def _backward(saved: tuple[jax.Array, jax.Array], g_BxLxO: jax.Array) -> tuple[jax.Array, jax.Array]:
  x_BxLxI, kernel_IxO = saved
  over = ((0, 1), (0, 1)), ((), ())
  x_left = lambda x_BxLxI, g_BxLxO: jax.lax.dot_general(x_BxLxI, g_BxLxO, over)
  g_left = lambda x_BxLxI, g_BxLxO: jax.lax.dot_general(g_BxLxO, x_BxLxI, over).T
  on_cpu = x_left if x_BxLxI.shape[-1] <= g_BxLxO.shape[-1] else g_left
  kernel_gradient = jax.lax.platform_dependent(x_BxLxI, g_BxLxO, cpu=on_cpu, default=g_left)
  return jnp.einsum("blo,io->bli", g_BxLxO, kernel_IxO), kernel_gradient


_multiply.defvjp(_forward, _backward)


def store_output_first(weights: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with every kernel as `OutputFirst`. Jit it."""
  return _map_kernels(lambda _, kernel: OutputFirst(kernel.T), weights)


def put_smaller_first(weights: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with every kernel as `SmallerFirst`, but that of `qkv`, which its block also slices."""
  return _map_kernels(lambda group, kernel: kernel if group == "qkv" else SmallerFirst(kernel), weights)


def _map_kernels(
  function: Callable[[str, jax.Array], Any], weights: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with `function` of a group's name and its kernel [I, O] in place of each kernel."""
  change = lambda group, name, leaf: function(group, leaf) if name == "kernel" and leaf.ndim == 2 else leaf
  return {
    group: {name: change(group, name, leaf) for name, leaf in leaves.items()} for group, leaves in weights.items()
  }
