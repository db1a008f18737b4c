"""Attention contexts of decoding, which keep keys and values.

B rows, L positions, Q new tokens of a row, H query heads, K key/value heads, C head_dim, P slots of a cache.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import attention, decode_attention
from diffeq_nnx.kernels.attention.ring import merge_attention
from diffeq_nnx.model.attention_context import Packing, per_device
from diffeq_nnx.parallel import sharding

KeysValues = tuple[jax.Array, jax.Array]  # [B, K, P, C] each

# So many new tokens attend to all slots at once. The kernels of long sequences are faster for more.
MAX_DECODE_QUERIES = 16
# So many rows are written without a loop, since a turn of the loop takes a TPU longer than what it writes.
ROWS_UNROLLED = 8


@dataclasses.dataclass
class PrefillCache:
  """As `Packing`, and it stores the keys and values of the tokens, for decoding; for an unrolled pass.

  `stored` has those of each evaluation of attention, in order, [B, K, L, C] each; `attend` appends to it.
  """

  segment_ids_BxL: jax.Array
  positions_BxL: jax.Array
  stored: list[KeysValues] = dataclasses.field(default_factory=list)

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """As that of `Packing`."""
    self.stored.append((k_BxLxKxC.swapaxes(1, 2), v_BxLxKxC.swapaxes(1, 2)))
    return Packing(self.segment_ids_BxL).attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, implementation)


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
    self.stored.append((self._add_new(keys, k_BxQxKxC), self._add_new(values, v_BxQxKxC)))
    if q_BxQxHxC.shape[1] > MAX_DECODE_QUERIES:
      return self._attend_in_two(q_BxQxHxC, k_BxQxKxC, v_BxQxKxC, keys, values, implementation)
    run = functools.partial(decode_attention, implementation=implementation)
    arrays = q_BxQxHxC.swapaxes(1, 2), *self.stored[-1], self.slot, self.next_B
    return sharding.per_device(run, ("batch", "whole_heads", None, None), *arrays).swapaxes(1, 2)

  def _add_new(self, cached_BxKxPxC: jax.Array, new_BxQxKxC: jax.Array) -> jax.Array:
    """Keys or values with the new tokens'."""
    arrays = cached_BxKxPxC, new_BxQxKxC.swapaxes(1, 2), self.slot
    if not self.slot.ndim:
      return jax.lax.dynamic_update_slice_in_dim(*arrays, axis=2)

    def by_row(cached, new, slot_B):
      place = lambda b: [jnp.int32(n) for n in (b, 0, slot_B[b], 0)]
      put = lambda b, cached: jax.lax.dynamic_update_slice(cached, new[b][None], place(b))
      return jax.lax.fori_loop(0, len(slot_B), put, cached, unroll=min(ROWS_UNROLLED, len(slot_B)))

    return sharding.per_device(by_row, ("batch", "whole_heads", None, None), *arrays)

  def _attend_in_two(self, q, k, v, keys, values, implementation: str) -> jax.Array:
    """Attention to the tokens before and among the new ones, merged."""
    Q, P = q.shape[1], keys.shape[2]
    # cuDNN gives no log-sum-exp, without which the two can't be merged.
    implementation = "reference" if implementation == "cudnn" else implementation

    def run(q, k, v, keys, values, by_token_BxN):
      here, held = by_token_BxN[:, :Q], by_token_BxN[:, Q:]
      attend = functools.partial(attention, return_lse=True, implementation=implementation)
      among, lse = attend(q, k, v, segment_ids=here)
      before = attend(q, keys, values, causal=False, segment_ids=(jnp.ones_like(here), held))
      return merge_attention((among.astype(lse.dtype), lse), *before)[0].astype(q.dtype)

    real_BxQ = self.next_B[:, None] + jnp.arange(Q, dtype=jnp.int32)[None] >= 0
    # how many tokens before the new ones each slot's is, if it holds one
    ages_BxP = (self.slot.reshape(-1, 1) - 1 - jnp.arange(P, dtype=jnp.int32)[None]) % P
    by_token_BxN = jnp.concatenate([real_BxQ, self.next_B[:, None] > ages_BxP], 1).astype(jnp.int32)
    return per_device(run, (q, k, v, keys.swapaxes(1, 2), values.swapaxes(1, 2)), by_token_BxN)
