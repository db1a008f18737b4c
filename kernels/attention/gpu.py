"""Attention for NVIDIA Hopper GPUs, in Pallas (Mosaic GPU): a forward kernel and two backward kernels.

B batch, S query positions, T key positions, H query heads, K key/value heads, G = H / K, D head width. A block
of threads has two warpgroups that compute, on 64 rows each, and one that fetches: the side that is iterated over is
copied to a ring of shared-memory buffers (FlashAttention-3, Shah et al. 2024, section 3.1).
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention.flash import EMPTY_ROW_LSE, LOG2_E, MASKED, pad
from diffeq_nnx.kernels.attention.mask import Mask, block_ranges

ROWS = 64  # of one computing warpgroup: the height of one wgmma
TILE = 2 * ROWS  # rows of a block of threads


@dataclasses.dataclass(frozen=True)
class Ring:
  """Buffers for the side that is iterated over."""

  rows: int  # of a block, at least 64: wgmma sums over them
  stages: int  # blocks in flight


# (forward, backward) by the largest head width. Shared memory, of the 227 KiB of a Hopper block; a row of bfloat16
# takes 256 or 512 bytes, and a ring holds two arrays:
#   128  forward  q 128 rows = 32 KiB; ring 2 x 2 x 128 rows = 128 KiB: together 160 KiB
#        backward two arrays of 128 rows = 64 KiB; ring 2 x 2 x 64 rows = 64 KiB: 128 KiB
#   256  forward  64 KiB; 2 x 2 x 64 rows = 128 KiB: 192 KiB
#        backward 128 KiB; 2 x 1 x 64 rows = 64 KiB: 192 KiB
# 32-bit registers of a thread, with 128 threads for the 64 rows:
#   128  forward  scores 64, out 64, weights in bfloat16 32: 160
#        backward dK and dV 2 x 64, scores and their gradient 2 x 32, both again in bfloat16 2 x 16: 224
#   256  forward  32 + 128 + 16: 176; backward, dK and dV in two passes, 128 + 2 x 32 + 2 x 16: 224
RINGS = {128: (Ring(128, 2), Ring(64, 2)), 256: (Ring(64, 2), Ring(64, 1))}
COMPUTE_REGISTERS, FETCH_REGISTERS = 232, 40  # (2 x 232 + 40) x 128 threads = 64,512 of 65,536

_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a [64, n] array in registers
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a column


@dataclasses.dataclass(frozen=True)
class GPUKernel:
  """The kernels for one problem; see `flash.Kernel`."""

  mask: Mask
  scale: float
  soft_cap: float | None
  T: int
  D: int
  interpret: Any

  @property
  def rings(self) -> tuple[Ring, Ring]:
    """Forward and backward."""
    return RINGS[128 if self.D <= 128 else 256]

  def forward(self, q, k, v, q_segments, kv_segments):
    """Output [B, S, H, D] and log-sum-exp [B, H, S]; q is [B, S, H, D], k and v are [B, T, K, D]."""
    return _forward(q, k, v, q_segments, kv_segments, self)

  def backward(self, q, k, v, q_segments, kv_segments, out, lse, dout, dlse):
    """Gradients of q, k and v."""
    delta = flash.delta(out, dout, dlse)
    return _backward(q, k, v, q_segments, kv_segments, lse, delta, dout, self)


def _along_rows(row_values, shape):
  return jax.lax.broadcast_in_dim(row_values, shape, [0])


def _along_columns(column_values, shape):
  return jax.lax.broadcast_in_dim(column_values, shape, [1])


def _product(a, b_transposed, shape):
  """a b^T in fresh registers; operands in shared memory."""

  def compute(acc_ref):
    plgpu.wgmma(acc_ref, a, b_transposed.transpose((1, 0)))
    return acc_ref[...]

  return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def _add_product(total, a, b, interpret):
  """total + a b; a in registers, b in shared memory."""
  if interpret:  # the interpreter has no wgmma from registers, and no accumulator that starts from a value
    return total + jax.lax.dot(a, b[...], preferred_element_type=jnp.float32)

  def compute(acc_ref):
    plgpu.wgmma(acc_ref, a, b)

  return pl.run_state(compute)(plgpu.ACC.init(total))


def _zeros(shape):
  return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA)


def _filled(value):
  return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _ROW)


def _load(ref, index, layout):
  """Loads a part of a vector from the GPU's memory to registers."""
  return plgpu.load(ref.at[index], layout=layout, optimized=False)


def _masked(scores, static: GPUKernel, first_row, first_column, by_key: bool, row_ids, ids_ref, b):
  """`scores` [rows, columns] with MASKED for pairs that don't attend; rows are queries, or keys if `by_key`.

  `row_ids` are the segment ids of the rows, or None; those of the columns are in `ids_ref`.
  """
  shape = scores.shape
  rows = first_row + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
  columns = first_column + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
  queries, keys = (columns, rows) if by_key else (rows, columns)
  visible = keys < static.T
  if static.mask.causal:
    visible = visible & (queries >= keys)
  if static.mask.window is not None:
    visible = visible & (keys > queries - static.mask.window)
  if row_ids is not None:
    column_ids = _load(ids_ref, (b, pl.ds(first_column, shape[1])), _COLUMN)
    visible = visible & (_along_rows(row_ids, shape) == _along_columns(column_ids, shape))
  return jnp.where(visible, scores, MASKED)


def _feed(blocks, ring: Ring, arrays, buffers, b, head, arrived, consumed):
  """The fetching warpgroup: copies the range of blocks of both arrays as buffers become free."""
  plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
  first, last = blocks[0], blocks[3]

  @pl.loop(first, last)
  def _next(j):
    turn = j - first
    slot = jax.lax.rem(turn, ring.stages)

    @pl.when(turn >= ring.stages)
    def _wait():
      plgpu.barrier_wait(consumed.at[slot])

    for array, buffer in zip(arrays, buffers):
      source = (b, pl.ds(j * ring.rows, ring.rows), head)
      plgpu.copy_gmem_to_smem(array.at[source], buffer.at[slot], arrived.at[slot])

  @pl.loop(jnp.maximum(first, last - ring.stages), last)
  def _drain(j):  # wait until the last buffers have been read
    plgpu.barrier_wait(consumed.at[jax.lax.rem(j - first, ring.stages)])


def _walk(blocks, stages, carry, visit, arrived, consumed):
  """A computing warpgroup: carry = visit(j, slot, masked, carry) for each block of the range."""
  first, full_first, full_last, last = blocks

  def step(masked):
    def body(j, carry):
      slot = jax.lax.rem(j - first, stages)
      plgpu.barrier_wait(arrived.at[slot])
      carry = visit(j, slot, masked, carry)
      plgpu.barrier_arrive(consumed.at[slot])
      return carry

    return body

  carry = jax.lax.fori_loop(first, full_first, step(True), carry)
  carry = jax.lax.fori_loop(full_first, full_last, step(False), carry)
  return jax.lax.fori_loop(full_last, last, step(True), carry)


def _here(ranges_ref):
  """(head, batch, warpgroup, first row of a computing warpgroup, range of blocks that its tile visits)."""
  h, i, b, wg = (jax.lax.axis_index(name) for name in ("heads", "tiles", "batch", "wg"))
  of_batch = b if ranges_ref.shape[1] > 1 else 0
  return h, b, wg, i * TILE + wg * ROWS, tuple(ranges_ref[n, of_batch, i] for n in range(4))


def _forward_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  out_ref,
  lse_ref,
  q_smem,
  k_smem,
  v_smem,
  lse_smem,
  q_arrived,
  arrived,
  consumed,
  *,
  static: GPUKernel,
  G: int,
):
  """128 queries of one head against all keys that they attend to."""
  h, b, wg, first_row, blocks = _here(ranges_ref)
  D, ring = q_ref.shape[-1], static.rings[0]
  walk = ring.rows

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_smem.at[wg], q_arrived.at[wg])
    plgpu.barrier_wait(q_arrived.at[wg])
    q_ids = None if q_segments_ref is None else _load(q_segments_ref, (b, rows), _ROW)

    def visit(j, slot, masked, carry):
      acc, top, total = carry
      scores = flash.scores(_product(q_smem.at[wg], k_smem.at[slot], (ROWS, walk)), static)
      if masked:
        scores = _masked(scores, static, first_row, j * walk, False, q_ids, kv_segments_ref, b)
      new_top = jnp.maximum(top, scores.max(axis=1))
      weights = jnp.exp2(scores - _along_rows(new_top, scores.shape))
      correction = jnp.exp2(top - new_top)
      total = total * correction + weights.sum(axis=1)
      acc = acc * _along_rows(correction, acc.shape)
      return _add_product(acc, weights.astype(q_ref.dtype), v_smem.at[slot], static.interpret), new_top, total

    start = (_zeros((ROWS, D)), _filled(MASKED), _filled(0.0))
    acc, top, total = _walk(blocks, ring.stages, start, visit, arrived, consumed)
    empty = top <= MASKED / 2
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    q_smem.at[wg][...] = (acc * _along_rows(inverse, acc.shape)).astype(out_ref.dtype)
    lse = top / LOG2_E + jnp.log(jnp.where(empty, 1.0, total))
    lse_smem.at[wg][...] = jnp.where(empty, -jnp.inf, lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[wg], out_ref.at[b, rows, h])
    plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _fetch():
    _feed(blocks, ring, (k_ref, v_ref), (k_smem, v_smem), b, jax.lax.div(h, G), arrived, consumed)


def _dq_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  lse_ref,
  delta_ref,
  dout_ref,
  dq_ref,
  q_smem,
  dout_smem,
  k_smem,
  v_smem,
  own_arrived,
  arrived,
  consumed,
  *,
  static: GPUKernel,
  G: int,
):
  """The gradient of 128 queries of one head."""
  h, b, wg, first_row, blocks = _here(ranges_ref)
  D, ring = q_ref.shape[-1], static.rings[1]
  walk = ring.rows

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_smem.at[wg], own_arrived.at[wg])
    plgpu.copy_gmem_to_smem(dout_ref.at[b, rows, h], dout_smem.at[wg], own_arrived.at[wg])
    plgpu.barrier_wait(own_arrived.at[wg])
    lse, delta = (_load(ref, (b, h, rows), _ROW) for ref in (lse_ref, delta_ref))
    q_ids = None if q_segments_ref is None else _load(q_segments_ref, (b, rows), _ROW)

    def visit(j, slot, masked, dq):
      products = _product(q_smem.at[wg], k_smem.at[slot], (ROWS, walk))
      scores = flash.scores(products, static)
      if masked:
        scores = _masked(scores, static, first_row, j * walk, False, q_ids, kv_segments_ref, b)
      weights = jnp.exp2(scores - _along_rows(lse, scores.shape))
      dweights = _product(dout_smem.at[wg], v_smem.at[slot], (ROWS, walk))
      dscores = flash.uncapped(weights * (dweights - _along_rows(delta, scores.shape)), products, static)
      return _add_product(dq, dscores.astype(q_ref.dtype), k_smem.at[slot], static.interpret)

    dq = _walk(blocks, ring.stages, _zeros((ROWS, D)), visit, arrived, consumed)
    q_smem.at[wg][...] = (dq * static.scale).astype(dq_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _fetch():
    _feed(blocks, ring, (k_ref, v_ref), (k_smem, v_smem), b, jax.lax.div(h, G), arrived, consumed)


def _dkv_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  q_segments_ref,
  kv_segments_ref,
  lse_ref,
  delta_ref,
  dout_ref,
  *refs,
  wanted: tuple[bool, bool],
  static: GPUKernel,
  G: int,
):
  """One query head's part of the gradients of 128 keys and values; scores are transposed, [keys, queries].

  `wanted` says which of dK and dV to compute; `refs` are those, then the scratch.
  """
  out_refs, (k_smem, v_smem, q_smem, dout_smem, own_arrived, arrived, consumed) = (
    refs[: sum(wanted)],
    refs[sum(wanted) :],
  )
  h, b, wg, first_row, blocks = _here(ranges_ref)
  D, ring = q_ref.shape[-1], static.rings[1]
  walk = ring.rows

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    source = (b, rows, jax.lax.div(h, G))
    plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[wg], own_arrived.at[wg])
    plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[wg], own_arrived.at[wg])
    plgpu.barrier_wait(own_arrived.at[wg])
    kv_ids = None if kv_segments_ref is None else _load(kv_segments_ref, (b, rows), _ROW)

    def visit(j, slot, masked, carry):
      dk, dv = carry
      columns = pl.ds(j * walk, walk)
      products = _product(k_smem.at[wg], q_smem.at[slot], (ROWS, walk))
      scores = flash.scores(products, static)
      if masked:
        scores = _masked(scores, static, first_row, j * walk, True, kv_ids, q_segments_ref, b)
      weights = jnp.exp2(scores - _along_columns(_load(lse_ref, (b, h, columns), _COLUMN), scores.shape))
      if wanted[1]:
        dv = _add_product(dv, weights.astype(q_ref.dtype), dout_smem.at[slot], static.interpret)
      if wanted[0]:
        dweights = _product(v_smem.at[wg], dout_smem.at[slot], (ROWS, walk))
        delta = _along_columns(_load(delta_ref, (b, h, columns), _COLUMN), scores.shape)
        dscores = flash.uncapped(weights * (dweights - delta), products, static)
        dk = _add_product(dk, dscores.astype(q_ref.dtype), q_smem.at[slot], static.interpret)
      return dk, dv

    start = tuple(_zeros((ROWS, D)) if want else None for want in wanted)
    dk, dv = _walk(blocks, ring.stages, start, visit, arrived, consumed)
    sums = [value for value in (dk if dk is None else dk * static.scale, dv) if value is not None]
    for value, out_ref, smem in zip(sums, out_refs, (k_smem, v_smem)):
      smem.at[wg][...] = value.astype(out_ref.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(smem.at[wg], out_ref.at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _fetch():
    _feed(blocks, ring, (q_ref, dout_ref), (q_smem, dout_smem), b, h, arrived, consumed)


def _call(kernel, out_type, scratch, tiles, B, H, static: GPUKernel, G: int, arguments):
  """Runs a kernel over heads, tiles and batch; an argument may be None."""
  given = [a is not None for a in arguments]

  def body(*refs):
    inputs = iter(refs[: sum(given)])
    spread = [next(inputs) if there else None for there in given]
    kernel(*spread, *refs[sum(given) :], static=static, G=G)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(H, tiles, B),
    grid_names=("heads", "tiles", "batch"),
    num_threads=3,
    thread_name="wg",
    interpret=static.interpret,
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )(*(a for a in arguments if a is not None))


def _shared(count: int, rows: int, D: int, dtype) -> plgpu.SMEM:
  """`count` buffers of [rows, D], tiled and swizzled as wgmma reads them."""
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
  return plgpu.SMEM((count, rows, D), dtype, transforms=transforms)


def _ring_buffers(ring: Ring, D: int, dtype) -> tuple[plgpu.SMEM, plgpu.SMEM]:
  """The two arrays that are iterated over."""
  return _shared(ring.stages, ring.rows, D, dtype), _shared(ring.stages, ring.rows, D, dtype)


def _barriers(own: int, ring: Ring) -> tuple[plgpu.Barrier, ...]:
  """Arrival of a tile's own arrays (`own` copies), arrival of the ring's two arrays, and the ring's release."""
  return (
    plgpu.Barrier(num_arrivals=own, num_barriers=2),
    plgpu.Barrier(num_arrivals=2, num_barriers=ring.stages),
    plgpu.Barrier(num_arrivals=2, num_barriers=ring.stages),
  )


def _padded(x):
  """[B, S, H, D] padded to multiples of the tile in S, and of the 64 columns of a swizzle in D."""
  return pad(pad(x, 1, TILE), 3, 64)


def _ids(segments):
  return None if segments is None else pad(segments.astype(jnp.int32), 1, TILE)


def _forward(q_BxSxHxD, k_BxTxKxD, v_BxTxKxD, q_segments, kv_segments, static: GPUKernel):
  B, S, H, D = q_BxSxHxD.shape
  G = H // k_BxTxKxD.shape[2]
  ranges = block_ranges(static.mask, S, static.T, TILE, static.rings[0].rows, q_segments, kv_segments)
  q, k, v = map(_padded, (q_BxSxHxD, k_BxTxKxD, v_BxTxKxD))
  width, dtype = q.shape[3], q.dtype
  out, lse = _call(
    _forward_kernel,
    [jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, H, q.shape[1]), jnp.float32)],
    (
      _shared(2, ROWS, width, dtype),
      *_ring_buffers(static.rings[0], width, dtype),
      plgpu.SMEM((2, ROWS), jnp.float32),
      *_barriers(1, static.rings[0]),
    ),
    q.shape[1] // TILE,
    B,
    H,
    static,
    G,
    (ranges, q, k, v, _ids(q_segments), _ids(kv_segments)),
  )
  return out[:, :S, :, :D], lse[:, :, :S]


def _backward(
  q_BxSxHxD, k_BxTxKxD, v_BxTxKxD, q_segments, kv_segments, lse_BxHxS, delta_BxHxS, dout_BxSxHxD, static: GPUKernel
):
  B, S, H, D = q_BxSxHxD.shape
  T, K = k_BxTxKxD.shape[1:3]
  G = H // K
  q, k, v, dout = map(_padded, (q_BxSxHxD, k_BxTxKxD, v_BxTxKxD, dout_BxSxHxD))
  width, dtype = q.shape[3], q.dtype
  lse, delta = pad(lse_BxHxS, 2, TILE, EMPTY_ROW_LSE), pad(delta_BxHxS, 2, TILE)
  rest = (q, k, v, _ids(q_segments), _ids(kv_segments), lse, delta, dout)
  ring = static.rings[1]
  scratch = (
    _shared(2, ROWS, width, dtype),
    _shared(2, ROWS, width, dtype),
    *_ring_buffers(ring, width, dtype),
    *_barriers(2, ring),
  )
  ranges = functools.partial(block_ranges, static.mask, S, T, q_segments_BxS=q_segments, kv_segments_BxT=kv_segments)
  (dq,) = _call(
    _dq_kernel,
    [jax.ShapeDtypeStruct(q.shape, dtype)],
    scratch,
    q.shape[1] // TILE,
    B,
    H,
    static,
    G,
    (ranges(block_q=TILE, block_kv=ring.rows), *rest),
  )
  part = jax.ShapeDtypeStruct((B, k.shape[1], H, width), dtype)
  by_key = (ranges(block_q=ring.rows, block_kv=TILE, by_key=True), *rest)
  dkv = lambda *wanted: _call(
    functools.partial(_dkv_kernel, wanted=wanted),
    [part] * sum(wanted),
    scratch,
    k.shape[1] // TILE,
    B,
    H,
    static,
    G,
    by_key,
  )
  dk, dv = dkv(True, True) if width <= 128 else (*dkv(True, False), *dkv(False, True))
  total = lambda x: x.reshape(B, -1, K, G, width).astype(jnp.float32).sum(3)[:, :T, :, :D].astype(dtype)
  return dq[:, :S, :, :D], total(dk), total(dv)


def attention_gpu(
  q_BxSxHxD: jax.Array,
  k_BxTxKxD: jax.Array,
  v_BxTxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxT: jax.Array | None,
  *,
  mask: Mask,
  scale: float,
  logits_soft_cap: float | None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention's output [B, S, H, D] and log-sum-exp [B, S, H] (float32), like `attention_reference`.

  Takes bfloat16 and D up to 256; needs jax 0.11.2.

  Args:
    interpret: a `plgpu.InterpretGPUParams` runs it in Pallas's interpreter, on a CPU.
  """
  kernel = GPUKernel(mask, scale, logits_soft_cap, k_BxTxKxD.shape[1], q_BxSxHxD.shape[3], interpret)
  out_BxSxHxD, lse_BxHxS = flash.flash_attention(
    q_BxSxHxD, k_BxTxKxD, v_BxTxKxD, q_segments_BxS, kv_segments_BxT, kernel
  )
  return out_BxSxHxD, jnp.swapaxes(lse_BxHxS, 1, 2)
