"""Attention contexts: which tokens each token attends to, where it stands, and which keys and values are kept.

B batch, L positions, D embed_dim, H query heads, K key/value heads, C head_dim, P slots of a cache.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import attention
from diffeq_nnx.parallel import sharding


class AttentionContext(Protocol):
  """What the tokens of a batch see, and their positions.

  Attributes:
    positions_BxL: each token's place in its document; None: 0 to L-1.
  """
  positions_BxL: jax.Array | None

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the batch's tokens, [B, L, H, C]."""


class Packing(NamedTuple):
  """Where several documents share a row: which one each token belongs to, and the token's place in it.

  Attributes:
    segment_ids_BxL: integers; a token sees those of its own number only. None: all before it.
    positions_BxL: integers; None: 0 to L-1.
  """
  segment_ids_BxL: jax.Array | None = None
  positions_BxL: jax.Array | None = None

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]."""
    return sharded_attention(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, self.segment_ids_BxL, implementation)


def sharded_attention(q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array,
                      segment_ids_BxL: jax.Array | None, implementation: str) -> jax.Array:
  """Causal attention, each device with its own sequences and heads: a fused kernel can't be split by the compiler."""
  def run(q, k, v, segment_ids=None):
    return attention(q, k, v, segment_ids=segment_ids, implementation=implementation)

  segments = () if segment_ids_BxL is None else (segment_ids_BxL,)
  return sharding.per_device(run, ("batch", None, "heads", None), q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, *segments)


@dataclasses.dataclass
class PrefillCache:
  """A packing at one solver step that notes the keys and values of its tokens, for tokens to come.

  Attributes:
    packing: what the tokens see.
    kept: what it noted, keys and values, [B, K, L, C] each.
  """
  packing: Packing
  kept: tuple[jax.Array, jax.Array] | None = None

  @property
  def positions_BxL(self) -> jax.Array | None:
    """As the packing's."""
    return self.packing.positions_BxL

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """As the packing's."""
    self.kept = k_BxLxKxC.swapaxes(1, 2), v_BxLxKxC.swapaxes(1, 2)
    return self.packing.attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, implementation)


@dataclasses.dataclass
class DecodeCache:
  """One token a row at one solver step, and the keys and values of those before it; P slots a row.

  Rows begin at different slots, so that the new token has the same slot in all of them.

  Attributes:
    kept: keys and values, [B, K, P, C] each; after `attend` with the new token's.
    slot: the new token's, [].
    first_B: the slot of each row's first token.
    positions_BxL: the new token's place in its row, [B, 1].
  """
  kept: tuple[jax.Array, jax.Array]
  slot: jax.Array
  first_B: jax.Array
  positions_BxL: jax.Array

  def attend(self, q_Bx1xHxC: jax.Array, k_Bx1xKxC: jax.Array, v_Bx1xKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the new token to its row, [B, 1, H, C]; plain, since kernels are made for many queries."""
    del implementation
    self.kept = tuple(jax.lax.dynamic_update_slice_in_dim(kept, new.swapaxes(1, 2), self.slot, axis=2)
                      for kept, new in zip(self.kept, (k_Bx1xKxC, v_Bx1xKxC)))
    slots_1xP = jnp.arange(self.kept[0].shape[2], dtype=jnp.int32)[None]
    seen_BxP = (slots_1xP >= self.first_B[:, None]) & (slots_1xP <= self.slot)
    segments = jnp.ones((len(seen_BxP), 1), jnp.int32), seen_BxP.astype(jnp.int32)
    return attention(q_Bx1xHxC, *(kept.swapaxes(1, 2) for kept in self.kept), causal=False, segment_ids=segments,
                     implementation="reference")
