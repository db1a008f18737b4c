"""Sequences split over devices, along the mesh axis `context`, in the order that balances causal attention.

B batch, L positions, n devices. A sequence is cut into 2n chunks; device i holds chunks i and 2n - 1 - i (zigzag
order), so that early positions, which attend to few, share a device with late ones.
"""

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.parallel import sharding


def num_parts(length: int) -> int:
  """Returns over how many devices the surrounding mesh splits sequences of this length, 1 if 2n doesn't divide it."""
  n = sharding.num_shards("context")
  return 1 if length % (2 * n) else n


def zigzag(x_BxL: jax.Array) -> jax.Array:
  """Splits x, which devices along `context` hold whole, in zigzag order: each device keeps its own two chunks."""
  (B, L), n = x_BxL.shape, num_parts(x_BxL.shape[1])
  order_2n = np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], 1).reshape(-1)
  return sharding.constrain(x_BxL.reshape(B, 2 * n, -1)[:, order_2n].reshape(B, L), "batch", "context")


def restore_order(x_BxLxD: jax.Array) -> jax.Array:
  """Moves zigzag order to the order of positions, [B, L, D], over the same devices: each sends two chunks."""
  n = num_parts(x_BxLxD.shape[1])
  number = lambda i, odd: i if i % 2 == odd else 2 * n - 1 - i  # of the even or odd chunk that device i holds

  def move(x_bx2cxD):
    low, high = jnp.split(x_bx2cxD, 2, axis=1)
    is_odd = jax.lax.axis_index("context") % 2 == 1
    held = jnp.where(is_odd, high, low), jnp.where(is_odd, low, high)
    sent = [jax.lax.ppermute(x, "context", [(i, number(i, odd) // 2) for i in range(n)]) for odd, x in enumerate(held)]
    return jnp.concatenate(sent, 1)

  return sharding.per_device(move, ("batch", "context", None), x_BxLxD)
