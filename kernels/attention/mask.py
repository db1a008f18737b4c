"""Which query attends to which key, by position and by block.

S query positions, L key positions, Q = ceil(S / block_q) and N = ceil(L / block_kv) blocks.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Mask:
  """Query i attends to key j if j <= i (causal), and if j > i - window (sliding window, of any sign if not causal)."""

  causal: bool
  window: int | None

  def visible(self, queries: Any, keys: Any) -> Any:
    """Whether each query position attends to each key position; shapes broadcast."""
    visible = (queries >= keys) if self.causal else (queries >= 0) & (keys >= 0)
    return visible if self.window is None else visible & (keys > queries - self.window)

  def every_row_attends(self, S: int, L: int) -> bool:
    """Whether each of S queries attends to some of L keys."""
    return self.window is None or S - self.window < L

  def blocks(self, S: int, L: int, block_q: int, block_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks visible at least in part, and fully visible ones: two boolean [Q, N]; rows beyond S don't count."""
    first_row = np.arange(0, S, block_q)[:, None]
    last_row = np.minimum(first_row + block_q, S) - 1
    first_key = np.arange(0, L, block_kv)[None]
    last_key = first_key + block_kv - 1
    some = np.ones((math.ceil(S / block_q), math.ceil(L / block_kv)), bool)
    every = some & (last_key < L)
    if self.causal:
      some, every = some & (first_key <= last_row), every & (last_key <= first_row)
    if self.window is not None:
      some = some & (np.minimum(last_key, L - 1) > first_row - self.window)
      every = every & (first_key > last_row - self.window)
    return some, every


def _extremes(segments_BxS: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
  """Smallest and largest segment id of each block, [B, Q] each."""
  B, S = segments_BxS.shape
  padded = jnp.pad(segments_BxS, ((0, 0), (0, -S % block)), mode="edge").reshape(B, -1, block)
  return padded.min(-1), padded.max(-1)


def block_ranges(
  mask: Mask,
  S: int,
  L: int,
  block_q: int,
  block_kv: int,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxL: jax.Array | None,
  *,
  by_key: bool = False,
) -> jax.Array:
  """For each block of queries, the range of key blocks that it must visit, int32 [4, B, Q] (B = 1 if no segments).

  The four rows are first, full_first, full_last, last: blocks first..last hold all visible keys; those in
  full_first..full_last need no mask (upper ends excluded). For packed documents, whose segment ids never decrease
  along the sequence, the range holds no block of unrelated documents; with ids in another order it may hold
  fully masked blocks.

  Args:
    by_key: for each block of keys the range of query blocks instead: [4, B, N].
  """
  some, every = (a[None] for a in mask.blocks(S, L, block_q, block_kv))
  xp: Any = np
  if q_segments_BxS is not None and kv_segments_BxL is not None:
    xp = jnp
    q_low, q_high = (a[:, :, None] for a in _extremes(q_segments_BxS, block_q))
    kv_low, kv_high = (a[:, None, :] for a in _extremes(kv_segments_BxL, block_kv))
    some = some & (q_low <= kv_high) & (kv_low <= q_high)
    every = every & (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
  if by_key:
    some, every = xp.swapaxes(some, 1, 2), xp.swapaxes(every, 1, 2)
  count = some.shape[-1]
  first = xp.argmax(some, -1)
  last = xp.where(some.any(-1), count - xp.argmax(some[..., ::-1], -1), first)
  full_first = xp.where(every.any(-1), xp.argmax(every, -1), last)
  ends = xp.concatenate([~every, xp.ones_like(every[..., :1])], -1) & (
    np.arange(count + 1)[None, None] >= full_first[..., None]
  )
  full_last = xp.argmax(ends, -1)
  return jnp.stack([jnp.asarray(a, jnp.int32) for a in (first, full_first, full_last, last)])
