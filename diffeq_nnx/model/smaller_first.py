"""Products whose gradient with respect to the kernel a CPU computes from the smaller factor.

The gradient of `x @ kernel` is x^T g, and JAX computes it as (g^T x)^T. XLA's library for CPUs first copies a left
factor that is summed over its first axis into another order, slowly and together with the element-wise work that made
it. With the smaller of x and g on the left this copy is small, and several kernels that read the same x share it. On
other platforms the product is JAX's. docs/evidence/training_cost.md has what that gains.

B rows, L positions, I in, O out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from diffeq_nnx.model.output_first import map_kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallerFirst:
  """A kernel [I, O] with such a gradient; all that it can do is `x @ kernel`. It can't be differentiated forward."""

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


def wrap_kernels(weights: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """BlockWeights at one time with every kernel wrapped so, but for that of `qkv`, which its block also slices."""
  return map_kernels(lambda group, kernel: kernel if group == "qkv" else SmallerFirst(kernel), weights)
