"""Attention contexts: which tokens each token attends to, where it stands, and which keys and values are kept.

B batch, L positions, D embed_dim, H query heads, K key/value heads, C head_dim, P slots of a cache.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffeq_nnx.config import RopeConfig
from diffeq_nnx.kernels.attention import attention, decode_attention, ring_attention
from diffeq_nnx.kernels.attention.ring import merged
from diffeq_nnx.kernels.rotary import frequencies, rotate
from diffeq_nnx.parallel import context as context_lib
from diffeq_nnx.parallel import sharding


class AttentionContext(Protocol):
  """Which tokens each token of a batch attends to, and their positions.

  Attributes:
    positions_BxL: each token's place in its document; None: 0 to L-1.
  """

  @property
  def positions_BxL(self) -> jax.Array | None:
    """Each token's place in its document; None: 0 to L-1."""

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the batch's tokens, [B, L, H, C]."""
    ...


class Packing(NamedTuple):
  """Causal attention in rows that may hold several documents.

  Attributes:
    segment_ids_BxL: the document of each token, to which its attention is limited; None: one document per row.
    positions_BxL: each token's place in its document; None: 0 to L-1.
  """

  segment_ids_BxL: jax.Array | None = None
  positions_BxL: jax.Array | None = None

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]."""
    return sharded_attention(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, self.segment_ids_BxL, implementation)


def sharded_attention(
  q_BxLxHxC: jax.Array,
  k_BxLxKxC: jax.Array,
  v_BxLxKxC: jax.Array,
  segment_ids_BxL: jax.Array | None,
  implementation: str,
) -> jax.Array:
  """Causal attention, each device with its own sequences and heads."""

  def run(q, k, v, segment_ids=None):
    return attention(q, k, v, segment_ids=segment_ids, implementation=implementation)

  return per_device(run, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC), segment_ids_BxL)


class SplitPacking(NamedTuple):
  """A packing of rows whose positions are split over devices, in the order of `parallel.context.zigzag`.

  Attributes:
    segment_ids_BxL: as `Packing`'s, in that order.
    positions_BxL: each token's place in its document, in that order.
  """

  segment_ids_BxL: jax.Array | None
  positions_BxL: jax.Array

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]; keys and values go around the devices."""

    def run(q, k, v, segment_ids=None):
      return ring_attention(q, k, v, segment_ids, axis_name="context", implementation=implementation)

    return per_device(run, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC), self.segment_ids_BxL, "context")


def pack(
  tokens_BxL: jax.Array, segment_ids_BxL: jax.Array | None, positions_BxL: jax.Array | None
) -> tuple[jax.Array, Packing | SplitPacking]:
  """Tokens and their packing; both in zigzag order where the surrounding mesh splits such sequences."""
  if context_lib.num_parts(tokens_BxL.shape[1]) == 1:
    return tokens_BxL, Packing(segment_ids_BxL, positions_BxL)
  if positions_BxL is None:
    positions_BxL = jnp.broadcast_to(jnp.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
  segment_ids_BxL = None if segment_ids_BxL is None else context_lib.zigzag(segment_ids_BxL)
  return context_lib.zigzag(tokens_BxL), SplitPacking(segment_ids_BxL, context_lib.zigzag(positions_BxL))


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


KeysValues = tuple[jax.Array, jax.Array]  # [B, K, P, C] each
FEW = 16  # new tokens that attend to all slots at once; more have the kernels of long sequences
ROWS_UNROLLED = 8  # that are written without a loop, whose turns take a TPU longer than what they write


@dataclasses.dataclass
class PrefillCache:
  """A packing that stores the keys and values of its tokens, for decoding; for an unrolled pass.

  Attributes:
    packing: the attention context.
    stored: keys and values of each evaluation of attention, in order, [B, K, L, C] each; `attend` appends to it.
  """

  packing: Packing
  stored: list[KeysValues] = dataclasses.field(default_factory=list)

  @property
  def positions_BxL(self) -> jax.Array | None:
    """As the packing's."""
    return self.packing.positions_BxL

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """As the packing's."""
    self.stored.append((k_BxLxKxC.swapaxes(1, 2), v_BxLxKxC.swapaxes(1, 2)))
    return self.packing.attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, implementation)


@dataclasses.dataclass
class DecodeCache:
  """Q new tokens per row, with the keys and values of those before them, in a ring of P slots; for an unrolled pass.

  A slot holds the token of a row that is as many positions before the row's next one as the slot is before `slot`,
  going around; there is none if that position is below 0.

  Attributes:
    before: keys and values for each evaluation of attention, in order, [B, K, P, C] each.
    slot: the first new token's, [] in all rows, for which they are written in one piece, or [B]; slot + Q is at most P.
    next_B: the first new token's place in each row; below 0 at padding.
    positions_BxL: the new tokens' places as they are embedded, [B, Q].
    stored: those before with the new tokens'; each evaluation appends its own.
  """

  before: Sequence[KeysValues]
  slot: jax.Array
  next_B: jax.Array
  positions_BxL: jax.Array
  stored: list[KeysValues] = dataclasses.field(default_factory=list)

  def attend(self, q_BxQxHxC: jax.Array, k_BxQxKxC: jax.Array, v_BxQxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the new tokens to their rows, [B, Q, H, C]."""
    keys, values = self.before[len(self.stored)]
    self.stored.append((self._with(keys, k_BxQxKxC), self._with(values, v_BxQxKxC)))
    if q_BxQxHxC.shape[1] > FEW:
      return self._attend_in_two(q_BxQxHxC, k_BxQxKxC, v_BxQxKxC, keys, values, implementation)
    run = functools.partial(decode_attention, implementation=implementation)
    arrays = q_BxQxHxC.swapaxes(1, 2), *self.stored[-1], self.slot, self.next_B
    return sharding.per_device(run, ("batch", "whole_heads", None, None), *arrays).swapaxes(1, 2)

  def _with(self, cached_BxKxPxC: jax.Array, new_BxQxKxC: jax.Array) -> jax.Array:
    """Keys or values with the new tokens'."""
    arrays = cached_BxKxPxC, new_BxQxKxC.swapaxes(1, 2), self.slot
    if not self.slot.ndim:
      return jax.lax.dynamic_update_slice_in_dim(*arrays, axis=2)

    def by_row(cached, new, slot_B):
      place = lambda b: [jnp.int32(n) for n in (b, 0, slot_B[b], 0)]
      put = lambda b, cached: jax.lax.dynamic_update_slice(cached, new[b][None], place(b))
      return jax.lax.fori_loop(0, len(slot_B), put, cached, unroll=min(ROWS_UNROLLED, len(slot_B)))

    return sharding.per_device(by_row, ("batch", "whole_heads", None, None), *arrays)

  def _held_before(self, P: int) -> jax.Array:
    """Whether a slot holds a token of the row before the new ones, [B, P] of 0 and 1."""
    ages = (self.slot.reshape(-1, 1) - 1 - jnp.arange(P, dtype=jnp.int32)[None]) % P
    return (self.next_B[:, None] > ages).astype(jnp.int32)

  def _attend_in_two(self, q, k, v, keys, values, implementation: str) -> jax.Array:
    """Attention to the tokens before and among the new ones, merged."""
    Q, P = q.shape[1], keys.shape[2]
    implementation = "reference" if implementation == "cudnn" else implementation  # which gives no log-sum-exp

    def run(q, k, v, keys, values, by_token_BxN):
      here, held = by_token_BxN[:, :Q], by_token_BxN[:, Q:]
      attend = functools.partial(attention, return_lse=True, implementation=implementation)
      among, lse = attend(q, k, v, segment_ids=here)
      before = attend(q, keys, values, causal=False, segment_ids=(jnp.ones_like(here), held))
      return merged((among.astype(lse.dtype), lse), *before)[0].astype(q.dtype)

    real_BxQ = self.next_B[:, None] + jnp.arange(Q, dtype=jnp.int32)[None] >= 0
    by_token_BxN = jnp.concatenate([real_BxQ.astype(jnp.int32), self._held_before(P)], 1)
    return per_device(run, (q, k, v, keys.swapaxes(1, 2), values.swapaxes(1, 2)), by_token_BxN)
