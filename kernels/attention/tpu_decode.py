"""`decode_attention` for TPUs, in Pallas: keys and values are read once, and blocks of slots that hold nothing are not.

B rows, Q new tokens, H query heads, K key/value heads, R = H Q, P slots in N blocks of S, D head width. For each key
head the matrix unit is given all R queries, and the R / K of its own heads are kept: a product of few rows takes as
long as one of 16, and nothing is moved between sublanes.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.flash import MASKED
from diffeq_nnx.kernels.attention.tpu_parts import LANES, NN, NT, dot

BLOCK_BYTES = 2 * 2**20  # of keys, and of values; two of each are in VMEM
SUBLANES = 16  # of a tile of bfloat16


def block_of(i, slot, position, S: int, N: int):
  """The i-th block that a row visits, from the newest token's backward, and how many blocks it visits.

  From that number on it is the last one again, which is not read again.
  """
  newest, within = jax.lax.div(slot, S), jax.lax.rem(slot, S)
  count = jnp.clip(jax.lax.div(position + (S - 1 - within), S) + 1, 1, N)
  block = newest - jnp.minimum(i, count - 1)
  return jnp.where(block < 0, block + N, block), count


def _kernel(
  slot_ref, next_ref, q_ref, keys_ref, values_ref, out_ref, most_ref, sum_ref, mixed_ref, *, S: int, N: int, Q: int
):
  """Refs: slot and next of the newest token; q, mixed and out [R, D], a head's queries one after the other; keys and
  values [K, S, D]; most and sum [R, LANES], of equal columns."""
  b, i = pl.program_id(0), pl.program_id(1)
  K, (R, D) = keys_ref.shape[0], q_ref.shape
  slot, position = slot_ref[b], next_ref[b]
  block, count = block_of(i, slot, position, S, N)

  def by_head(product, width: int):
    """[R, width] whose rows are those of the product with their key head."""
    row = jax.lax.broadcasted_iota(jnp.int32, (R, width), 0)
    result = product(0)
    for k in range(1, K):
      result = jnp.where(row >= k * (R // K), product(k), result)
    return result

  @pl.when(i == 0)
  def _():
    most_ref[...] = jnp.full_like(most_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)

  @pl.when(i < count)
  def _():
    q = q_ref[...]
    scores_RxS = by_head(lambda k: dot(q, keys_ref[k], NT), S) * D**-0.5
    ages = slot - (block * S + jax.lax.broadcasted_iota(jnp.int32, (R, S), 1))
    ages = jnp.where(ages < 0, ages + N * S, ages)
    visible = ages <= position
    if Q > 1:
      visible &= ages >= Q - 1 - jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (R, S), 0), Q)
    scores_RxS = jnp.where(visible, scores_RxS, MASKED)  # a block may hold nothing for the earlier of the queries
    most = jnp.maximum(most_ref[:, :1], scores_RxS.max(axis=1, keepdims=True))
    shares_RxS = jnp.exp(scores_RxS - most)
    before = jnp.exp(most_ref[:, :1] - most)
    sum_ref[...] = jnp.broadcast_to(sum_ref[:, :1] * before + shares_RxS.sum(axis=1, keepdims=True), sum_ref.shape)
    rounded = shares_RxS.astype(values_ref.dtype)
    mixed_ref[...] = mixed_ref[...] * before + by_head(lambda k: dot(rounded, values_ref[k], NN), D)
    most_ref[...] = jnp.broadcast_to(most, most_ref.shape)

  @pl.when(i == N - 1)
  def _():
    out_ref[...] = (mixed_ref[...] / sum_ref[:, :1]).astype(out_ref.dtype)


def decode_tpu(
  q_BxHxQxD: jax.Array,
  keys_BxKxPxD: jax.Array,
  values_BxKxPxD: jax.Array,
  slot: jax.Array,
  next_B: jax.Array,
  block: int | None = None,
  interpret: Any = False,
) -> jax.Array:
  """As `decode_reference`, for D a multiple of 128 and P of 16.

  Args:
    block: S, which divides P; None: the largest whose keys take at most BLOCK_BYTES.
    interpret: True, or a `pltpu.InterpretParams`: run in one of Pallas's interpreters, on any backend.
  """
  B, H, Q, D = q_BxHxQxD.shape
  K, P = keys_BxKxPxD.shape[1:3]
  fits = BLOCK_BYTES // (K * D * keys_BxKxPxD.dtype.itemsize)
  S = block or max(n for n in range(SUBLANES, P + 1, SUBLANES) if P % n == 0 and n <= max(fits, SUBLANES))
  N = P // S
  newest = [jnp.broadcast_to(x, (B,)).astype(jnp.int32) + (Q - 1) for x in (slot, next_B)]
  of_row = pl.BlockSpec((None, H * Q, D), lambda b, i, *_: (b, 0, 0))
  cached = pl.BlockSpec(
    (None, K, S, D), lambda b, i, slot_ref, next_ref: (b, 0, block_of(i, slot_ref[b], next_ref[b], S, N)[0], 0)
  )
  called = pl.pallas_call(
    functools.partial(_kernel, S=S, N=N, Q=Q),
    out_shape=jax.ShapeDtypeStruct((B, H * Q, D), q_BxHxQxD.dtype),
    name="attention_decode",
    interpret=interpret,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, N),
      in_specs=[of_row, cached, cached],
      out_specs=of_row,
      scratch_shapes=[pltpu.VMEM((H * Q, width), jnp.float32) for width in (LANES, LANES, D)],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
  )
  with jax.enable_x64(False):  # indices are 32 bits wide
    out_BxRxD = called(newest[0] % P, newest[1], q_BxHxQxD.reshape(B, H * Q, D), keys_BxKxPxD, values_BxKxPxD)
  return out_BxRxD.reshape(q_BxHxQxD.shape)
