"""The backward pass of attention on TPUs.

B batch, S query positions, L key positions, H query heads; M lanes of queries, N of keys, W of a block; G blocks of
queries read one of keys.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention import tpu_parts as parts
from diffeq_nnx.kernels.attention.flash import EMPTY_ROW_LSE, LOG2_E, MASKED, pad
from diffeq_nnx.kernels.attention.mask import block_ranges
from diffeq_nnx.kernels.attention.tpu_parts import TPUProblem


def _backward_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  out_ref,
  lse_ref,
  do_ref,
  dlse_ref,
  dq_ref,
  dk_ref,
  dv_ref,
  dq_acc,
  dk_acc,
  dv_acc,
  delta_ref,
  scaled_ref,
  *,
  static: TPUProblem,
):
  """One block of keys against one chunk of queries; scores are transposed, [keys, queries]."""
  b, chunk, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q_back, static.blocks.block_kv_back
  chunk_blocks = q_ref.shape[0] // block_q

  def prepare(i, _):
    """Scales q, and sums dO O over the lanes of each head as rows [heads, block_q]: products with rows of ones."""
    rows = pl.ds(pl.multiple_of(i * block_q, block_q), block_q)
    products = do_ref[rows, :].astype(jnp.float32) * out_ref[rows, :].astype(jnp.float32)
    own = parts.lanes_of_head(jax.lax.broadcasted_iota(jnp.int32, (8, static.W), 0), (8, static.W), static)
    delta_ref[:, rows] = parts.dot(own.astype(jnp.float32), products, parts.NT)
    # not k, whose rounding is not the forward pass's: where scores are large, gradients were up to 4 times as far off
    scaled_ref[rows, :] = parts.scale_queries(q_ref[rows, :], static)

  @pl.when(j == 0)
  def _start():
    dq_acc[...] = jnp.zeros_like(dq_acc)
    jax.lax.fori_loop(0, chunk_blocks, prepare, None)

  dk_acc[...] = jnp.zeros_like(dk_acc)
  dv_acc[...] = jnp.zeros_like(dv_acc)

  def visit(i, masked: bool):
    local = pl.multiple_of((i - chunk * chunk_blocks) * block_q, block_q)
    rows = pl.ds(local, block_q)
    q, do = scaled_ref[rows, :], do_ref[rows, :]
    dks, dvs = [], []
    for n in range(static.heads):
      k, v = parts.of_head(n, k_ref[...], static), parts.of_head(n, v_ref[...], static)
      products = parts.dot(k, q, parts.NT)
      scores = parts.scores_of(products, static)
      if masked:
        segments = None
        if static.segments:
          segments = q_segments_ref[0:1, rows], parts.columns(kv_segments_ref[...], block_q)
        visible = parts.visible_in(static, i * block_q, j * block_kv, scores.shape, 1, segments)
        scores = jnp.where(visible, scores, MASKED)
      weights = jnp.exp2(scores - lse_ref[n : n + 1, rows])
      dvs.append(parts.dot(weights.astype(do.dtype), do, parts.NN))
      delta_1xQ = delta_ref[n : n + 1, rows] - dlse_ref[n : n + 1, rows]
      dscores = weights * (parts.dot(v, do, parts.NT) - delta_1xQ)
      dscores = flash.undo_soft_cap(dscores, products, static).astype(q.dtype)
      dks.append(parts.dot(dscores, q, parts.NN))
      dq_acc[rows, :] += parts.dot(dscores.T, k, parts.NN)
    dk_acc[...] += parts.by_lane(dks, static)
    dv_acc[...] += parts.by_lane(dvs, static)

  row = (b if static.segments else 0) * pl.num_programs(3) + j
  parts.visit_all(visit, ranges_ref, row, chunk * chunk_blocks, (chunk + 1) * chunk_blocks)
  rest = 1 / LOG2_E if static.soft_cap is None else static.scale  # of the scale: the sum is of products with scaled q
  dk_ref[...] = (dk_acc[...] * rest).astype(dk_ref.dtype)
  dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)

  @pl.when(j == pl.num_programs(3) - 1)
  def _finish():
    dq_ref[...] = (dq_acc[...] * static.scale).astype(dq_ref.dtype)


def backward(
  static: TPUProblem,
  q_BxSxM,
  k_BxLxN,
  v_BxLxN,
  q_segments_BxS,
  kv_segments_BxL,
  out_BxSxM,
  lse_BxHxS,
  do_BxSxM,
  dlse_BxHxS,
):
  """Gradients of q, k and v."""
  B, S, M = q_BxSxM.shape
  L, N = k_BxLxN.shape[1:]
  blocks, W, G = static.blocks, static.W, M // N
  block_q, block_kv = blocks.block_q_back, blocks.block_kv_back
  ranges = block_ranges(static.mask, S, L, block_q, block_kv, q_segments_BxS, kv_segments_BxL, by_key=True)
  chunk = blocks.backward_chunk(S, W, q_BxSxM.dtype.itemsize)
  q, out, do = (pad(x, 1, chunk) for x in (q_BxSxM, out_BxSxM, do_BxSxM))
  k, v = (pad(x, 1, block_kv) for x in (k_BxLxN, v_BxLxN))
  by_block = lambda x_BxHxS: x_BxHxS.reshape(B, M // W, static.heads, -1)
  lse, dlse = by_block(pad(lse_BxHxS, 2, chunk, EMPTY_ROW_LSE)), by_block(pad(dlse_BxHxS, 2, chunk))
  chunks = q.shape[1] // chunk
  grid = (B, M // W, chunks, k.shape[1] // block_kv)
  q_spec = pl.BlockSpec((None, chunk, W), lambda b, h, c, j, *_: (b, c, h))
  kv_spec = pl.BlockSpec((None, block_kv, W), lambda b, h, c, j, *_: (b, j, jax.lax.div(h, G)))
  row_spec = pl.BlockSpec((None, None, static.heads, chunk), lambda b, h, c, j, *_: (b, h, 0, c))
  segments = parts.segment_rows(q_segments_BxS, chunk), parts.segment_rows(kv_segments_BxL, block_kv)
  q_segment_spec = pl.BlockSpec((None, 1, chunk), lambda b, h, c, j, *_: (b, 0, c))
  kv_segment_spec = pl.BlockSpec((None, 1, block_kv), lambda b, h, c, j, *_: (b, 0, j))
  segment_specs = (q_segment_spec, kv_segment_spec) if static.segments else (None, None)
  num_parts = chunks * G  # partial gradients of a key, which are summed after the kernel
  part_spec = pl.BlockSpec((None, None, block_kv, W), lambda b, h, c, j, *_: (c, b, j, h))
  part_shape = jax.ShapeDtypeStruct((chunks, B, k.shape[1], M), jnp.float32 if num_parts > 1 else k.dtype)
  dq, dk, dv = parts.call(
    _backward_kernel,
    static,
    grid=grid,
    in_specs=[q_spec, kv_spec, kv_spec, *segment_specs, q_spec, row_spec, q_spec, row_spec],
    out_specs=[q_spec, part_spec, part_spec],
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), part_shape, part_shape],
    scratch_shapes=[
      pltpu.VMEM((chunk, W), jnp.float32),
      pltpu.VMEM((block_kv, W), jnp.float32),
      pltpu.VMEM((block_kv, W), jnp.float32),
      pltpu.VMEM((8, chunk), jnp.float32),
      pltpu.VMEM((chunk, W), q.dtype),
    ],
    name="attention_backward",
  )(ranges, q, k, v, *segments, out, lse, do, dlse)

  def total(x):
    if num_parts > 1:
      x = x.reshape(chunks, B, -1, N // W, G, W).sum((0, 4))
    return x.reshape(B, -1, N)[:, :L].astype(k.dtype)

  return dq[:, :S], total(dk), total(dv)
