"""Causal attention in sequences that are split over devices: keys and values go around a ring (Liu et al. 2023).

B batch, H query heads, K key/value heads, D head width, n devices, c = L / 2n positions of a chunk.

A sequence of L positions is cut into 2n chunks, and device i holds chunks i and 2n - 1 - i: with causal attention all
devices then have the same work, at each turn of the ring the queries of two chunks with all keys of another.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.dispatch import attention

MOST_UNROLLED = 8  # turns of the ring that are compiled apart, so that sends overlap with products of others


def ring_attention(
  q_Bx2cxHxD: jax.Array,
  k_Bx2cxKxD: jax.Array,
  v_Bx2cxKxD: jax.Array,
  segments_Bx2c: jax.Array | None,
  *,
  axis_name: str,
  **settings: Any,
) -> jax.Array:
  """Causal attention, [B, 2c, H, D] in the dtype of q; for `jax.shard_map`, differentiable once in reverse mode.

  Args:
    q_Bx2cxHxD: queries of the device's two chunks, the earlier one first.
    k_Bx2cxKxD: keys of the same positions.
    v_Bx2cxKxD: values.
    segments_Bx2c: integers; a query attends to keys of its own segment only. None: to all.
    axis_name: of the mesh axis whose devices form the ring.
    **settings: scale, logits_soft_cap, deterministic and implementation, as for `attention`.

  Raises:
    ValueError: as `attention`.
  """
  n, i = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  attend: Callable[..., Any] = functools.partial(attention, return_lse=True, **settings)
  halves: Callable[[Any], Any] = lambda x: (None, None) if x is None else jnp.split(x, 2, axis=1)
  (q_low, q_high), (segments_low, segments_high) = halves(q_Bx2cxHxD), halves(segments_Bx2c)
  pair = lambda queries, keys: None if queries is None else (queries, keys)
  out, lse = attend(q_Bx2cxHxD, k_Bx2cxKxD, v_Bx2cxKxD, segment_ids=segments_Bx2c)  # the two chunks are in order
  first_low, first_high = zip(halves(out.astype(lse.dtype)), halves(lse), strict=True)
  around = [(j, (j + 1) % n) for j in range(n)]

  def turn(carry, number):
    held, low, high = carry
    held = jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, around), held)
    (k_low, k_high), (v_low, v_high), (kv_segments_low, kv_segments_high) = map(halves, held)
    # a high chunk sees the low chunks of all devices
    seen = attend(q_high, k_low, v_low, causal=False, segment_ids=pair(segments_high, kv_segments_low))
    high = merge_attention(high, *seen)
    # a low chunk sees those of the devices before; a high one the high chunks of those after
    before = i >= number
    pick = lambda one, other: None if one is None else jnp.where(before, one, other)
    segments = pair(pick(segments_low, segments_high), pick(kv_segments_low, kv_segments_high))
    picked = pick(q_low, q_high), pick(k_low, k_high), pick(v_low, v_high)
    out, lse = attend(*picked, causal=False, segment_ids=segments)
    low = merge_attention(low, out, jnp.where(before, lse, -jnp.inf))
    high = merge_attention(high, out, jnp.where(before, -jnp.inf, lse))
    return (held, low, high), None

  carry = (k_Bx2cxKxD, v_Bx2cxKxD, segments_Bx2c), first_low, first_high
  (_, low, high), _ = jax.lax.scan(turn, carry, jnp.arange(1, n), unroll=max(min(n - 1, MOST_UNROLLED), 1))
  return jnp.concatenate([low[0], high[0]], 1).astype(q_Bx2cxHxD.dtype)


def merge_attention(
  sums: tuple[jax.Array, jax.Array], out_BxcxHxD: jax.Array, lse_BxcxH: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Attention over two sets of keys from that over each: (out, log-sum-exp) in float32 or wider.

  The first log-sum-exp is finite: a query attends to itself.
  """
  total_BxcxH = jnp.logaddexp(sums[1], lse_BxcxH)
  weighed = [x * jnp.exp(lse - total_BxcxH)[..., None] for x, lse in (sums, (out_BxcxHxD, lse_BxcxH))]
  return sum(weighed[1:], weighed[0]), total_BxcxH
