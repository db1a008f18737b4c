"""The forward pass of attention on TPUs.

B batch, S query positions, L key positions, H query heads; M lanes of queries, N of keys, W of a block; G blocks of
queries read one of keys.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import tpu_parts as parts
from diffeq_nnx.kernels.attention.flash import LOG2_E, MASKED, pad
from diffeq_nnx.kernels.attention.mask import block_ranges
from diffeq_nnx.kernels.attention.tpu_parts import TPUProblem


def _forward_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  out_ref,
  lse_ref,
  max_ref,
  sum_ref,
  acc_ref,
  scaled_ref,
  *,
  static: TPUProblem,
):
  """One block of queries against one chunk of keys; q, k, v refs are [rows, W], those of sums [heads, rows, 128]."""
  b, i, chunk = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q, static.blocks.block_kv
  chunk_blocks = k_ref.shape[0] // block_kv

  @pl.when(chunk == 0)
  def _start():
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    scaled_ref[...] = parts.scale_queries(q_ref[...], static)

  def visit(j, masked: bool):
    local = pl.multiple_of((j - chunk * chunk_blocks) * block_kv, block_kv)
    k, v = k_ref[pl.ds(local, block_kv), :], v_ref[pl.ds(local, block_kv), :]
    corrections, products = [], []
    for n in range(static.heads):
      scores = parts.scores_of(parts.dot(parts.of_head(n, scaled_ref[...], static), k, parts.NT), static)
      if masked:
        segments = None
        if static.segments:
          segments = parts.columns(q_segments_ref[...], block_kv), kv_segments_ref[0:1, pl.ds(local, block_kv)]
        visible = parts.visible_in(static, i * block_q, j * block_kv, scores.shape, 0, segments)
        scores = jnp.where(visible, scores, MASKED)
      old_max = max_ref[n]
      new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
      weights = jnp.exp2(scores - parts.widen(new_max, block_kv))
      correction = jnp.exp2(old_max - new_max)
      # each lane sums its own columns; the sum over lanes is taken once, at the end
      partial = sum(weights[:, m : m + parts.LANES] for m in range(0, block_kv, parts.LANES))
      sum_ref[n] = sum_ref[n] * correction + partial
      max_ref[n] = new_max
      corrections.append(parts.widen(correction, static.W))
      products.append(parts.dot(weights.astype(v.dtype), v, parts.NN))
    acc_ref[...] = acc_ref[...] * parts.by_lane(corrections, static) + parts.by_lane(products, static)

  row = (b if static.segments else 0) * pl.num_programs(2) + i
  parts.visit_all(visit, ranges_ref, row, chunk * chunk_blocks, (chunk + 1) * chunk_blocks)

  @pl.when(chunk == pl.num_programs(3) - 1)
  def _finish():
    inverses = []
    for n in range(static.heads):  # rows [1, block_q]
      total = sum_ref[n].T.sum(axis=0, keepdims=True)
      largest = max_ref[n].T[0:1, :]
      empty = largest <= MASKED / 2
      inverses.append(parts.columns(jnp.where(empty, 0.0, 1.0 / total), static.W))
      lse_ref[n : n + 1, :] = jnp.where(empty, -jnp.inf, (largest + jnp.log2(total)) / LOG2_E)
    out_ref[...] = (acc_ref[...] * parts.by_lane(inverses, static)).astype(out_ref.dtype)


def forward(static: TPUProblem, q_BxSxM, k_BxLxN, v_BxLxN, q_segments_BxS, kv_segments_BxL):
  """Output [B, S, M] and log-sum-exp [B, H, S]; M and N are lanes, multiples of W."""
  B, S, M = q_BxSxM.shape
  blocks, W, G = static.blocks, static.W, M // k_BxLxN.shape[2]
  ranges = block_ranges(static.mask, S, static.L, blocks.block_q, blocks.block_kv, q_segments_BxS, kv_segments_BxL)
  q = pad(q_BxSxM, 1, blocks.block_q)
  chunk = blocks.forward_chunk(static.L, W, q.dtype.itemsize)
  k, v = (pad(x, 1, chunk) for x in (k_BxLxN, v_BxLxN))
  grid = (B, M // W, q.shape[1] // blocks.block_q, k.shape[1] // chunk)
  q_spec = pl.BlockSpec((None, blocks.block_q, W), lambda b, h, i, c, *_: (b, i, h))
  kv_spec = pl.BlockSpec((None, chunk, W), lambda b, h, i, c, *_: (b, c, jax.lax.div(h, G)))
  row_spec = pl.BlockSpec((None, None, static.heads, blocks.block_q), lambda b, h, i, c, *_: (b, h, 0, i))
  segments = parts.segment_rows(q_segments_BxS, blocks.block_q), parts.segment_rows(kv_segments_BxL, chunk)
  q_segment_spec = pl.BlockSpec((None, 1, blocks.block_q), lambda b, h, i, c, *_: (b, 0, i))
  kv_segment_spec = pl.BlockSpec((None, 1, chunk), lambda b, h, i, c, *_: (b, 0, c))
  segment_specs = (q_segment_spec, kv_segment_spec) if static.segments else (None, None)
  sums = pltpu.VMEM((static.heads, blocks.block_q, parts.LANES), jnp.float32)
  out, lse = parts.call(
    _forward_kernel,
    static,
    grid=grid,
    in_specs=[q_spec, kv_spec, kv_spec, *segment_specs],
    out_specs=[q_spec, row_spec],
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((B, M // W, static.heads, q.shape[1]), jnp.float32),
    ],
    scratch_shapes=[sums, sums, pltpu.VMEM((blocks.block_q, W), jnp.float32), pltpu.VMEM((blocks.block_q, W), q.dtype)],
    name="attention_forward",
  )(ranges, q, k, v, *segments)
  return out[:, :S], lse.reshape(B, -1, q.shape[1])[:, :, :S]
