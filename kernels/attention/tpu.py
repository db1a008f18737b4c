"""Attention for TPUs, in Pallas (Mosaic TPU): forward and backward without the [S, T] scores in memory.

B batch, S query positions, T key positions, H query heads, K key/value heads, D head width; M lanes of queries, N of
keys, W of a block; G blocks of queries read one of keys. The method is FlashAttention's (Dao et al. 2022, 2023): an
online softmax in the forward pass; the backward pass recomputes probabilities from the log-sum-exp.
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
  """The kernels for one problem; see `flash.Kernel`. Arrays have their heads side by side, [B, S, H D].

  So a projection's result is read as it is, and nothing is transposed: a block is some positions by W lanes, which
  hold `heads` whole heads.
  """

  mask: Mask
  scale: float
  soft_cap: float | None
  T: int
  heads: int
  W: int
  segments: bool
  blocks: TPUBlocks
  interpret: Any

  def forward(self, q, k, v, q_segments, kv_segments):
    """Output [B, S, H D] and log-sum-exp [B, H, S]."""
    return _forward(q, k, v, q_segments, kv_segments, self)

  def backward(self, q, k, v, q_segments, kv_segments, out, lse, dout, dlse):
    """Gradients of q, k and v."""
    return _backward(q, k, v, q_segments, kv_segments, out, lse, dout, dlse, self)


def _dot(a, b, dimensions):
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def _visible(static: TPUKernel, first_query, first_key, shape, query_axis: int, segments):
  """The mask of one block; `segments` are the ids of queries and keys, broadcast to the block, or None."""
  query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (query_axis, 1 - query_axis))
  if static.mask == Mask(causal=True, window=None):
    visible = query - key >= first_key - first_query  # one comparison in place of two
  else:
    visible = static.mask.visible(first_query + query, first_key + key)
  if static.T % (shape[1 - query_axis]):
    visible &= first_key + key < static.T
  return visible if segments is None else visible & (segments[0] == segments[1])


def _of_head(n: int, x, static: TPUKernel):
  """x [rows, W] with zeros in the lanes of other heads than the n-th."""
  return x if static.heads == 1 else jnp.where(_lanes_of_head(n, x.shape, static), x, jnp.zeros_like(x))


def _lanes_of_head(n: int, shape, static: TPUKernel):
  width = static.W // static.heads
  lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  return (lanes >= n * width) & (lanes < (n + 1) * width)


def _by_lane(each: list, static: TPUKernel):
  """[rows, W] whose lanes of head n are those of each[n]."""
  joined = each[0]
  for n in range(1, static.heads):
    joined = jnp.where(_lanes_of_head(n, joined.shape, static), each[n], joined)
  return joined


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
  """One block of queries against one chunk of keys; q, k, v refs are [rows, W], those of sums [heads, rows, 128]."""
  b, i, chunk = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q, static.blocks.block_kv
  chunk_blocks = k_ref.shape[0] // block_kv

  @pl.when(chunk == 0)
  def _start():
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  def visit(j, masked: bool):
    local = pl.multiple_of((j - chunk * chunk_blocks) * block_kv, block_kv)
    k, v = k_ref[pl.ds(local, block_kv), :], v_ref[pl.ds(local, block_kv), :]
    corrections, products = [], []
    for n in range(static.heads):
      scores = flash.scores(_dot(_of_head(n, q_ref[...], static), k, NT), static)
      if masked:
        segments = (
          None
          if not static.segments
          else (_columns(q_segments_ref, block_kv), kv_segments_ref[0:1, pl.ds(local, block_kv)])
        )
        visible = _visible(static, i * block_q, j * block_kv, scores.shape, 0, segments)
        scores = jnp.where(visible, scores, MASKED)
      old_max = max_ref[n]
      new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
      weights = jnp.exp2(scores - _widen(new_max, block_kv))
      correction = jnp.exp2(old_max - new_max)
      # each lane sums its own columns; the sum over lanes is taken once, at the end
      partial = sum(weights[:, m : m + LANES] for m in range(0, block_kv, LANES))
      sum_ref[n] = sum_ref[n] * correction + partial
      max_ref[n] = new_max
      corrections.append(_widen(correction, static.W))
      products.append(_dot(weights.astype(v.dtype), v, NN))
    acc_ref[...] = acc_ref[...] * _by_lane(corrections, static) + _by_lane(products, static)

  _visit_all(visit, ranges_ref, b if static.segments else 0, i, chunk * chunk_blocks, (chunk + 1) * chunk_blocks)

  @pl.when(chunk == pl.num_programs(3) - 1)
  def _finish():
    inverses = []
    for n in range(static.heads):
      total = sum_ref[n].sum(axis=1, keepdims=True)
      empty = max_ref[n] <= MASKED / 2
      inverses.append(_widen(jnp.where(empty, 0.0, 1.0 / total), static.W))
      lse = jnp.where(empty, -jnp.inf, (max_ref[n] + jnp.log2(total)) / LOG2_E)
      lse_ref[n : n + 1, :] = lse.T[0:1, :]
    out_ref[...] = (acc_ref[...] * _by_lane(inverses, static)).astype(out_ref.dtype)


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
  *,
  static: TPUKernel,
):
  """One block of keys against one chunk of queries; scores are transposed, [keys, queries]."""
  b, chunk, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  block_q, block_kv = static.blocks.block_q_back, static.blocks.block_kv_back
  chunk_blocks = q_ref.shape[0] // block_q

  def deltas(i, _):
    """The sums of dO O over the lanes of each head as rows [heads, block_q]: products with rows of ones."""
    rows = pl.ds(pl.multiple_of(i * block_q, block_q), block_q)
    products = do_ref[rows, :].astype(jnp.float32) * out_ref[rows, :].astype(jnp.float32)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (8, static.W), axis) for axis in (0, 1))
    width = static.W // static.heads
    own = (lane >= row * width) & (lane < (row + 1) * width)
    delta_ref[:, rows] = _dot(own.astype(jnp.float32), products, NT)

  @pl.when(j == 0)
  def _start():
    dq_acc[...] = jnp.zeros_like(dq_acc)
    jax.lax.fori_loop(0, chunk_blocks, deltas, None)

  dk_acc[...] = jnp.zeros_like(dk_acc)
  dv_acc[...] = jnp.zeros_like(dv_acc)

  def visit(i, masked: bool):
    local = pl.multiple_of((i - chunk * chunk_blocks) * block_q, block_q)
    rows = pl.ds(local, block_q)
    q, do = q_ref[rows, :], do_ref[rows, :]
    dks, dvs = [], []
    for n in range(static.heads):
      k, v = _of_head(n, k_ref[...], static), _of_head(n, v_ref[...], static)
      products = _dot(k, q, NT)
      scores = flash.scores(products, static)
      if masked:
        segments = None if not static.segments else (q_segments_ref[0:1, rows], _columns(kv_segments_ref, block_q))
        visible = _visible(static, i * block_q, j * block_kv, scores.shape, 1, segments)
        scores = jnp.where(visible, scores, MASKED)
      weights = jnp.exp2(scores - lse_ref[n : n + 1, rows])
      dvs.append(_dot(weights.astype(do.dtype), do, NN))
      delta_1xQ = delta_ref[n : n + 1, rows] - dlse_ref[n : n + 1, rows]
      dscores = flash.uncapped(weights * (_dot(v, do, NT) - delta_1xQ), products, static).astype(q.dtype)
      dks.append(_dot(dscores, q, NN))
      dq_acc[rows, :] += _dot(dscores.T, k, NN)
    dk_acc[...] += _by_lane(dks, static)
    dv_acc[...] += _by_lane(dvs, static)

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


def _forward(q_BxSxM, k_BxTxN, v_BxTxN, q_segments_BxS, kv_segments_BxT, static: TPUKernel):
  """Returns out [B, S, M] and the log-sum-exp [B, H, S]; M and N are lanes, multiples of W."""
  B, S, M = q_BxSxM.shape
  blocks, W, G = static.blocks, static.W, M // k_BxTxN.shape[2]
  ranges = block_ranges(static.mask, S, static.T, blocks.block_q, blocks.block_kv, q_segments_BxS, kv_segments_BxT)
  q = pad(q_BxSxM, 1, blocks.block_q)
  k, v = (pad(x, 1, blocks.block_kv) for x in (k_BxTxN, v_BxTxN))
  chunk = blocks.chunk(k.shape[1], blocks.block_kv, blocks.forward_bytes_per_key(W, q.dtype.itemsize))
  k, v = (pad(x, 1, chunk) for x in (k, v))
  grid = (B, M // W, q.shape[1] // blocks.block_q, k.shape[1] // chunk)
  q_spec = pl.BlockSpec((None, blocks.block_q, W), lambda b, h, i, c, *_: (b, i, h))
  kv_spec = pl.BlockSpec((None, chunk, W), lambda b, h, i, c, *_: (b, c, jax.lax.div(h, G)))
  row_spec = pl.BlockSpec((None, None, static.heads, blocks.block_q), lambda b, h, i, c, *_: (b, h, 0, i))
  segments = _rows(q_segments_BxS, blocks.block_q), _rows(kv_segments_BxT, chunk)
  segment_specs = (
    (None, None)
    if segments[0] is None
    else (
      pl.BlockSpec((None, 1, blocks.block_q), lambda b, h, i, c, *_: (b, 0, i)),
      pl.BlockSpec((None, 1, chunk), lambda b, h, i, c, *_: (b, 0, c)),
    )
  )
  sums = pltpu.VMEM((static.heads, blocks.block_q, LANES), jnp.float32)
  out, lse = _call(
    _forward_kernel,
    static,
    grid=grid,
    in_specs=[q_spec, kv_spec, kv_spec, *segment_specs],
    out_specs=[q_spec, row_spec],
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((B, M // W, static.heads, q.shape[1]), jnp.float32),
    ],
    scratch_shapes=[sums, sums, pltpu.VMEM((blocks.block_q, W), jnp.float32)],
    name="attention_forward",
  )(ranges, q, k, v, *segments)
  return out[:, :S], lse.reshape(B, -1, q.shape[1])[:, :, :S]


def _backward(
  q_BxSxM,
  k_BxTxN,
  v_BxTxN,
  q_segments_BxS,
  kv_segments_BxT,
  out_BxSxM,
  lse_BxHxS,
  do_BxSxM,
  dlse_BxHxS,
  static: TPUKernel,
):
  """Gradients of q, k and v."""
  B, S, M = q_BxSxM.shape
  T, N = k_BxTxN.shape[1:]
  blocks, W, G = static.blocks, static.W, M // N
  block_q, block_kv = blocks.block_q_back, blocks.block_kv_back
  ranges = block_ranges(static.mask, S, T, block_q, block_kv, q_segments_BxS, kv_segments_BxT, by_key=True)
  itemsize = q_BxSxM.dtype.itemsize
  chunk = blocks.chunk(S + -S % block_q, block_q, blocks.backward_bytes_per_query(W, itemsize))
  q, out, do = (pad(x, 1, chunk) for x in (q_BxSxM, out_BxSxM, do_BxSxM))
  k, v = (pad(x, 1, block_kv) for x in (k_BxTxN, v_BxTxN))
  by_block = lambda x_BxHxS: x_BxHxS.reshape(B, M // W, static.heads, -1)
  lse, dlse = by_block(pad(lse_BxHxS, 2, chunk, EMPTY_ROW_LSE)), by_block(pad(dlse_BxHxS, 2, chunk))
  chunks = q.shape[1] // chunk
  grid = (B, M // W, chunks, k.shape[1] // block_kv)
  q_spec = pl.BlockSpec((None, chunk, W), lambda b, h, c, j, *_: (b, c, h))
  kv_spec = pl.BlockSpec((None, block_kv, W), lambda b, h, c, j, *_: (b, j, jax.lax.div(h, G)))
  row_spec = pl.BlockSpec((None, None, static.heads, chunk), lambda b, h, c, j, *_: (b, h, 0, c))
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
  part_spec = pl.BlockSpec((None, None, block_kv, W), lambda b, h, c, j, *_: (c, b, j, h))
  part_shape = jax.ShapeDtypeStruct((chunks, B, k.shape[1], M), jnp.float32 if parts > 1 else k.dtype)
  dq, dk, dv = _call(
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
    ],
    name="attention_backward",
  )(ranges, q, k, v, *segments, out, lse, do, dlse)

  def total(x):
    if parts > 1:
      x = x.reshape(chunks, B, -1, N // W, G, W).sum((0, 4))
    return x.reshape(B, -1, N)[:, :T].astype(k.dtype)

  return dq[:, :S], total(dk), total(dv)


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

  Heads 32 or 64 wide lie two or four to a block, so that they fill its 128 lanes; products with the lanes of one are
  taken with zeros in the others'. Key heads that several query heads read are copied beside themselves for that. Other
  widths are padded to a multiple of 128.

  Args:
    blocks: sizes; None: the tuned ones.
    interpret: True, or a `pltpu.InterpretParams`: run in one of Pallas's interpreters, on any backend.
  """
  B, S, H, D = q_BxSxHxD.shape
  T, K = k_BxTxKxD.shape[1:3]
  heads = LANES // D if D in (32, 64) else 1
  if H % heads or (H != K and H // K % heads):
    heads = 1
  W = heads * D if heads > 1 else D + -D % LANES
  blocks = blocks or TPUBlocks.tuned(S, T, W, q_BxSxHxD.dtype.itemsize)
  kernel = TPUKernel(mask, scale, logits_soft_cap, T, heads, W, q_segments_BxS is not None, blocks, interpret)

  def merged(x, copies: int = 1):
    x = pad(x, 3, W // heads)
    return (jnp.repeat(x, copies, axis=2) if copies > 1 else x).reshape(B, x.shape[1], -1)

  copies = heads if H != K else 1
  out_BxSxM, lse_BxHxS = flash.flash_attention(
    merged(q_BxSxHxD), merged(k_BxTxKxD, copies), merged(v_BxTxKxD, copies), q_segments_BxS, kv_segments_BxT, kernel
  )
  return out_BxSxM.reshape(B, S, H, -1)[..., :D], jnp.swapaxes(lse_BxHxS, 1, 2)
