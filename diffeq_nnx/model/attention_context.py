"""Attention contexts: which tokens each token attends to, and where it stands.

B batch, L positions, D embed_dim, H query heads, K key/value heads, C head_dim, n devices along the axis `context`.

Sequences are split over these devices in the order that balances causal attention. A sequence is cut into 2n chunks,
and device i holds chunks i and 2n - 1 - i (zigzag order), so that early positions, which attend to few, share a device
with late ones.
"""

from collections.abc import Callable
import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import RopeConfig
from diffeq_nnx.kernels.attention import attention, ring_attention
from diffeq_nnx.kernels.rotary import frequencies, rotate
from diffeq_nnx.parallel import sharding


class AttentionContext(Protocol):
  """Which tokens each token of a batch attends to, and their positions."""

  @property
  def positions_BxL(self) -> jax.Array | None:
    """Each token's place in its document; None: 0 to L-1."""

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the batch's tokens, [B, L, H, C]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
  """Causal attention in rows that may hold several documents."""

  segment_ids_BxL: jax.Array | None = None  # the document of each token, which it attends to; None: one in each row
  positions_BxL: jax.Array | None = None  # each token's place in its document; None: 0 to L-1
  # whether positions are split over devices, and all arrays in the order of `zigzag`
  split: bool = dataclasses.field(default=False, metadata={"static": True})

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]; split keys and values go around the devices."""

    def run(q, k, v, segment_ids=None):
      if self.split:
        return ring_attention(q, k, v, segment_ids, axis_name="context", implementation=implementation)
      return attention(q, k, v, segment_ids=segment_ids, implementation=implementation)

    return per_device(run, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC), self.segment_ids_BxL, "context" if self.split else None)


def pack(
  tokens_BxL: jax.Array, segment_ids_BxL: jax.Array | None, positions_BxL: jax.Array | None
) -> tuple[jax.Array, Packing]:
  """Tokens and their packing; both in zigzag order where the surrounding mesh splits such sequences."""
  if num_parts(tokens_BxL.shape[1]) == 1:
    return tokens_BxL, Packing(segment_ids_BxL, positions_BxL)
  if positions_BxL is None:
    positions_BxL = jnp.broadcast_to(jnp.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
  segment_ids_BxL = None if segment_ids_BxL is None else zigzag(segment_ids_BxL)
  return zigzag(tokens_BxL), Packing(segment_ids_BxL, zigzag(positions_BxL), split=True)


def unpack(x_BxLxD: jax.Array, context: AttentionContext) -> jax.Array:
  """States of tokens that `pack` gave, in the order of the text."""
  return restore_order(x_BxLxD) if isinstance(context, Packing) and context.split else x_BxLxD


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


def rotate_heads(
  x_BxLxHxC: jax.Array, positions_BxL: jax.Array | None, rope: RopeConfig, implementation: str
) -> jax.Array:
  """Rotary position embedding, each device with its own sequences and heads; positions None: 0 to L-1."""
  frequencies_R = frequencies(x_BxLxHxC.shape[-1], **dataclasses.asdict(rope))

  def run(x, positions=None):
    known = jnp.arange(x.shape[1]) if positions is None else positions
    return rotate(x, known, frequencies_R, implementation=implementation)

  return per_device(run, (x_BxLxHxC,), positions_BxL, None if positions_BxL is None else "context")


def per_device(
  function: Callable, by_head: tuple[jax.Array, ...], by_token: jax.Array | None, length: str | None = None
) -> jax.Array:
  """function(*by_head, by_token) on each device for its sequences and heads: the compiler can't partition a kernel.

  `length` is "context" where each device has its own part of the positions, too.

  Arrays [B, L, H, C] cross the boundary as [B, L, H C]. Otherwise the TPU compiler folds the reshape into the product
  before it, and copies the result into the layout that the kernel reads.
  """
  C, count = by_head[0].shape[-1], len(by_head)

  def run(*arrays):
    split = [x.reshape(*x.shape[:2], -1, C) for x in arrays[:count]]
    return function(*split, *arrays[count:]).reshape(arrays[0].shape)

  merged = [x.reshape(*x.shape[:2], -1) for x in by_head]
  tokens = () if by_token is None else (by_token,)
  return sharding.per_device(run, ("batch", length, "whole_heads"), *merged, *tokens).reshape(by_head[0].shape)
