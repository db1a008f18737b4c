"""Attention for TPUs, in Pallas (Mosaic TPU): forward and backward without the [S, T] scores in memory.

B batch, S query positions, T key positions, H query heads, K key/value heads, G = H / K, D head width; Q and N
blocks of queries and keys. The method is FlashAttention's (Dao et al. 2022, 2023): an online softmax in the
forward pass; the backward pass recomputes probabilities from the log-sum-exp.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention.blocks import TPUBlocks
from diffeq_nnx.kernels.attention.flash import EMPTY_ROW_LSE, LOG2_E, MASKED, pad
from diffeq_nnx.kernels.attention.mask import Mask, block_ranges

LANES = 128

NT = (((1,), (1,)), ((), ()))  # a b^T
NN = (((1,), (0,)), ((), ()))  # a b


@dataclasses.dataclass(frozen=True)
class TPUKernel:
  """The kernels for one problem; see `flash.Kernel`."""

  mask: Mask
  scale: float
  soft_cap: float | None
  T: int
  G: int
  segments: bool
  blocks: TPUBlocks
  interpret: Any

  def forward(self, q, k, v, q_segments, kv_segments):
    """Output [B, S, H, D] and log-sum-exp [B, H, S]; q is [B, S, H, D], k and v are [B, T, K, D]."""
    out, lse = _forward(*map(_heads_first, (q, k, v)), q_segments, kv_segments, self)
    return _heads_first(out), lse

  def backward(self, q, k, v, q_segments, kv_segments, lse, delta, dout):
    """Gradients of q, k and v."""
    q, k, v, dout = map(_heads_first, (q, k, v, dout))
    return tuple(map(_heads_first, _backward(q, k, v, q_segments, kv_segments, lse, delta, dout, self)))


def _heads_first(x):
  """[B, S, H, D] to [B, H, S, D], and back."""
  return jnp.swapaxes(x, 1, 2)


def _dot(a, b, dimensions):
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def _visible(static: TPUKernel, first_query, first_key, shape, query_axis: int, segments):
  """The mask of one block; `segments` are the ids of queries and keys, broadcast to the block, or None."""
  queries = first_query + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
  keys = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
  visible = (keys < static.T) & static.mask.visible(queries, keys)
  return visible if segments is None else visible & (segments[0] == segments[1])


def _widen(columns_x128, width):
  """[rows, 128] of equal columns as [rows, width]."""
  return jnp.concatenate([columns_x128] * -(-width // LANES), axis=1)[:, :width]


def _columns(row_ref, width):
  """A row [1, n] as equal columns, [n, width]."""
  row = row_ref[0:1, :]
  return _widen(jnp.broadcast_to(row, (LANES, row.shape[1])).T, width)


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
  *,
  static: TPUKernel,
):
  """One block of queries against one chunk of keys; q, k, v refs are [rows, D]."""
  b, i, chunk = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q, static.blocks.block_kv
  chunk_blocks = k_ref.shape[0] // block_kv
  D = q_ref.shape[1]

  @pl.when(chunk == 0)
  def _start():
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  def visit(j, masked: bool):
    local = pl.multiple_of((j - chunk * chunk_blocks) * block_kv, block_kv)
    k, v = k_ref[pl.ds(local, block_kv), :], v_ref[pl.ds(local, block_kv), :]
    scores = flash.scores(_dot(q_ref[...], k, NT), static)
    if masked:
      segments = (
        None
        if not static.segments
        else (_columns(q_segments_ref, block_kv), kv_segments_ref[0:1, pl.ds(local, block_kv)])
      )
      visible = _visible(static, i * block_q, j * block_kv, scores.shape, 0, segments)
      scores = jnp.where(visible, scores, MASKED)
    old_max = max_ref[...]
    new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
    weights = jnp.exp2(scores - _widen(new_max, block_kv))
    correction = jnp.exp2(old_max - new_max)
    # each lane sums its own columns; the sum over lanes is taken once, at the end
    partial = sum(weights[:, n : n + LANES] for n in range(0, block_kv, LANES))
    sum_ref[...] = sum_ref[...] * correction + partial
    max_ref[...] = new_max
    acc_ref[...] = acc_ref[...] * _widen(correction, D) + _dot(weights.astype(v.dtype), v, NN)

  _visit_all(visit, ranges_ref, b if static.segments else 0, i, chunk * chunk_blocks, (chunk + 1) * chunk_blocks)

  @pl.when(chunk == pl.num_programs(3) - 1)
  def _finish():
    total = sum_ref[...].sum(axis=1, keepdims=True)
    empty = max_ref[...] <= MASKED / 2
    inverse = jnp.where(empty, 0.0, 1.0 / total)
    out_ref[...] = (acc_ref[...] * _widen(inverse, D)).astype(out_ref.dtype)
    lse = jnp.where(empty, -jnp.inf, (max_ref[...] + jnp.log2(total)) / LOG2_E)
    lse_ref[...] = lse.T[0:1, :]


def _visit_all(visit, ranges_ref, b, i, low, high):
  """Calls `visit(j, masked)` for the blocks in low..high that block i must visit, masked only where needed."""
  first, full_first, full_last, last = (jnp.clip(ranges_ref[n, b, i], low, high) for n in range(4))

  def masked(j, _):
    visit(j, True)

  def unmasked(j, _):
    visit(j, False)

  jax.lax.fori_loop(first, full_first, masked, None)
  jax.lax.fori_loop(full_first, full_last, unmasked, None)
  jax.lax.fori_loop(full_last, last, masked, None)


def _backward_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  lse_ref,
  delta_ref,
  do_ref,
  dq_ref,
  dk_ref,
  dv_ref,
  dq_acc,
  dk_acc,
  dv_acc,
  *,
  static: TPUKernel,
):
  """One block of keys against one chunk of queries; scores are transposed, [keys, queries]."""
  b, chunk, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q_back, static.blocks.block_kv_back
  chunk_blocks = q_ref.shape[0] // block_q

  @pl.when(j == 0)
  def _start():
    dq_acc[...] = jnp.zeros_like(dq_acc)

  dk_acc[...] = jnp.zeros_like(dk_acc)
  dv_acc[...] = jnp.zeros_like(dv_acc)

  def visit(i, masked: bool):
    local = pl.multiple_of((i - chunk * chunk_blocks) * block_q, block_q)
    rows = pl.ds(local, block_q)
    q, do = q_ref[rows, :], do_ref[rows, :]
    k, v = k_ref[...], v_ref[...]
    products = _dot(k, q, NT)
    scores = flash.scores(products, static)
    if masked:
      segments = None if not static.segments else (q_segments_ref[0:1, rows], _columns(kv_segments_ref, block_q))
      visible = _visible(static, i * block_q, j * block_kv, scores.shape, 1, segments)
      scores = jnp.where(visible, scores, MASKED)
    weights = jnp.exp2(scores - lse_ref[0:1, rows])
    dv_acc[...] += _dot(weights.astype(do.dtype), do, NN)
    dscores = flash.uncapped(weights * (_dot(v, do, NT) - delta_ref[0:1, rows]), products, static).astype(q.dtype)
    dk_acc[...] += _dot(dscores, q, NN)
    dq_acc[rows, :] += _dot(dscores.T, k, NN)

  _visit_all(visit, ranges_ref, b if static.segments else 0, j, chunk * chunk_blocks, (chunk + 1) * chunk_blocks)
  dk_ref[...] = (dk_acc[...] * static.scale).astype(dk_ref.dtype)
  dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)

  @pl.when(j == pl.num_programs(3) - 1)
  def _finish():
    dq_ref[...] = (dq_acc[...] * static.scale).astype(dq_ref.dtype)


def _rows(segments_BxS, multiple):
  """Segment ids [B, S] as rows [B, 1, padded S], or None."""
  if segments_BxS is None:
    return None
  return pad(segments_BxS.astype(jnp.int32)[:, None], 2, multiple)


def _call(kernel, static: TPUKernel, *, grid, in_specs, out_specs, out_shape, scratch_shapes, name):
  return pl.pallas_call(
    functools.partial(kernel, static=static),
    out_shape=out_shape,
    name=name,
    interpret=static.interpret,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=static.blocks.vmem_limit
    ),
  )


def _forward(q_BxHxSxD, k_BxKxTxD, v_BxKxTxD, q_segments_BxS, kv_segments_BxT, static: TPUKernel):
  """Heads before positions; returns out [B, H, S, D] and the log-sum-exp [B, H, S]."""
  B, H, S, D = q_BxHxSxD.shape
  blocks, G = static.blocks, static.G
  ranges = block_ranges(static.mask, S, static.T, blocks.block_q, blocks.block_kv, q_segments_BxS, kv_segments_BxT)
  q = pad(q_BxHxSxD, 2, blocks.block_q)
  k, v = (pad(x, 2, blocks.block_kv) for x in (k_BxKxTxD, v_BxKxTxD))
  chunk = blocks.chunk(k.shape[2], blocks.block_kv, blocks.forward_bytes_per_key(D, q.dtype.itemsize))
  k, v = (pad(x, 2, chunk) for x in (k, v))
  grid = (B, H, q.shape[2] // blocks.block_q, k.shape[2] // chunk)
  q_spec = pl.BlockSpec((None, None, blocks.block_q, D), lambda b, h, i, c, *_: (b, h, i, 0))
  kv_spec = pl.BlockSpec((None, None, chunk, D), lambda b, h, i, c, *_: (b, jax.lax.div(h, G), c, 0))
  segments = _rows(q_segments_BxS, blocks.block_q), _rows(kv_segments_BxT, chunk)
  segment_specs = (
    (None, None)
    if segments[0] is None
    else (
      pl.BlockSpec((None, 1, blocks.block_q), lambda b, h, i, c, *_: (b, 0, i)),
      pl.BlockSpec((None, 1, chunk), lambda b, h, i, c, *_: (b, 0, c)),
    )
  )
  out, lse = _call(
    _forward_kernel,
    static,
    grid=grid,
    in_specs=[q_spec, kv_spec, kv_spec, *segment_specs],
    out_specs=[q_spec, pl.BlockSpec((None, None, 1, blocks.block_q), lambda b, h, i, c, *_: (b, h, 0, i))],
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, 1, q.shape[2]), jnp.float32)],
    scratch_shapes=[pltpu.VMEM((blocks.block_q, width), jnp.float32) for width in (LANES, LANES, D)],
    name="attention_forward",
  )(ranges, q, k, v, *segments)
  return out[:, :, :S], lse[:, :, 0, :S]


def _backward(
  q_BxHxSxD,
  k_BxKxTxD,
  v_BxKxTxD,
  q_segments_BxS,
  kv_segments_BxT,
  lse_BxHxS,
  delta_BxHxS,
  do_BxHxSxD,
  static: TPUKernel,
):
  """Gradients of q, k and v, heads before positions."""
  B, H, S, D = q_BxHxSxD.shape
  K, T = k_BxKxTxD.shape[1:3]
  blocks, G = static.blocks, static.G
  block_q, block_kv = blocks.block_q_back, blocks.block_kv_back
  ranges = block_ranges(static.mask, S, T, block_q, block_kv, q_segments_BxS, kv_segments_BxT, by_key=True)
  itemsize = q_BxHxSxD.dtype.itemsize
  chunk = blocks.chunk(S + -S % block_q, block_q, blocks.backward_bytes_per_query(D, itemsize))
  q, do = (pad(x, 2, chunk) for x in (q_BxHxSxD, do_BxHxSxD))
  k, v = (pad(x, 2, block_kv) for x in (k_BxKxTxD, v_BxKxTxD))
  lse = pad(lse_BxHxS, 2, chunk, EMPTY_ROW_LSE)[:, :, None]
  delta = pad(delta_BxHxS, 2, chunk)[:, :, None]
  chunks = q.shape[2] // chunk
  grid = (B, H, chunks, k.shape[2] // block_kv)
  q_spec = pl.BlockSpec((None, None, chunk, D), lambda b, h, c, j, *_: (b, h, c, 0))
  kv_spec = pl.BlockSpec((None, None, block_kv, D), lambda b, h, c, j, *_: (b, jax.lax.div(h, G), j, 0))
  row_spec = pl.BlockSpec((None, None, 1, chunk), lambda b, h, c, j, *_: (b, h, 0, c))
  segments = _rows(q_segments_BxS, chunk), _rows(kv_segments_BxT, block_kv)
  segment_specs = (
    (None, None)
    if segments[0] is None
    else (
      pl.BlockSpec((None, 1, chunk), lambda b, h, c, j, *_: (b, 0, c)),
      pl.BlockSpec((None, 1, block_kv), lambda b, h, c, j, *_: (b, 0, j)),
    )
  )
  parts = chunks * G  # partial gradients of a key, which are summed after the kernel
  part_spec = pl.BlockSpec((None, None, None, block_kv, D), lambda b, h, c, j, *_: (c, b, h, j, 0))
  part_shape = jax.ShapeDtypeStruct((chunks, B, H, k.shape[2], D), jnp.float32 if parts > 1 else k.dtype)
  dq, dk, dv = _call(
    _backward_kernel,
    static,
    grid=grid,
    in_specs=[q_spec, kv_spec, kv_spec, *segment_specs, row_spec, row_spec, q_spec],
    out_specs=[q_spec, part_spec, part_spec],
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), part_shape, part_shape],
    scratch_shapes=[
      pltpu.VMEM((chunk, D), jnp.float32),
      pltpu.VMEM((block_kv, D), jnp.float32),
      pltpu.VMEM((block_kv, D), jnp.float32),
    ],
    name="attention_backward",
  )(ranges, q, k, v, *segments, lse, delta, do)
  total = lambda x: x.reshape(chunks, B, K, G, -1, D).sum((0, 3))[:, :, :T].astype(k.dtype)
  return dq[:, :, :S], total(dk), total(dv)


def attention_tpu(
  q_BxSxHxD: jax.Array,
  k_BxTxKxD: jax.Array,
  v_BxTxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxT: jax.Array | None,
  *,
  mask: Mask,
  scale: float,
  logits_soft_cap: float | None,
  blocks: TPUBlocks | None = None,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention's output [B, S, H, D] and log-sum-exp [B, S, H] (float32), like `attention_reference`.

  Args:
    blocks: sizes; None: the tuned ones.
    interpret: True, or a `pltpu.InterpretParams`: run in one of Pallas's interpreters, on any backend.
  """
  S, H, D = q_BxSxHxD.shape[1:]
  T, K = k_BxTxKxD.shape[1:3]
  blocks = blocks or TPUBlocks.tuned(S, T, D, q_BxSxHxD.dtype.itemsize)
  kernel = TPUKernel(mask, scale, logits_soft_cap, T, H // K, q_segments_BxS is not None, blocks, interpret)
  out_BxSxHxD, lse_BxHxS = flash.flash_attention(
    q_BxSxHxD, k_BxTxKxD, v_BxTxKxD, q_segments_BxS, kv_segments_BxT, kernel
  )
  return out_BxSxHxD, jnp.swapaxes(lse_BxHxS, 1, 2)
