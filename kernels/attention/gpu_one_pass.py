"""The backward kernel for NVIDIA Hopper GPUs in one pass, with five products. Letters and tiles: gpu_parts.py.

A block of threads takes 128 keys of a key/value head. Its part of dQ is added to an array in the GPU's memory by the
copy engine, in no fixed order, so that dQ's last bits differ from run to run.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention import gpu_parts as parts
from diffeq_nnx.kernels.attention.flash import EMPTY_ROW_LSE, pad
from diffeq_nnx.kernels.attention.gpu_parts import COLUMN, ROW, ROWS, TILE, Problem
from diffeq_nnx.kernels.attention.mask import block_ranges

WIDEST_HEAD = 128  # dK and dV of wider ones don't fit in registers
CANNOT_BE_HALVED = 48, 112  # padded widths; the second half's first column is no multiple of the copied columns
# of heads whose keys, and whose values, stay in registers, which relieves shared memory
WIDEST_KEPT = 64, 96


def takes(D: int) -> bool:
  """Whether gradients of heads of this width can be computed in one pass."""
  return D <= WIDEST_HEAD and -(-D // 16) * 16 not in CANNOT_BE_HALVED


def columns_of_dq(D: int) -> int:
  """Columns that each warpgroup computes, a multiple of 16."""
  return (D + 31) // 32 * 16


def _five_products(k, v, q, dout, dk, dv, both_dscores, k_part, weigh, exchange, add_to_dq, interpret):
  """(dK, dV) with those of a block of queries added; scores are [keys, queries].

  The softmax runs under the product of v and dO, the scores' gradient under that of dV, and the copy of dQ under that
  of dK.

  Args:
    both_dscores: where `exchange` leaves the scores' gradient of both warpgroups.
    k_part: the columns of all keys from which this warpgroup computes its columns of dQ.
    weigh: the weights of the scores k q^T, as an operand, and their slopes.
    exchange: the scores' gradient, from slopes and the weights' gradient, which both warpgroups then have.
    add_to_dq: takes these columns.
  """
  shape = (k.shape[0], q.shape[0])

  def compute(scores_ref, dweights_ref, dv_ref, dk_ref):
    products_of = parts.start_product(scores_ref, k, q.transpose((1, 0)), interpret)
    dweights_of = parts.start_product(dweights_ref, v, dout.transpose((1, 0)), interpret)
    weights, slopes = weigh(products_of(wait_n=1))
    dv_of = parts.start_product(dv_ref, weights, dout, interpret, dv)
    dscores = exchange(slopes, dweights_of(wait_n=1))

    def finish(dq_ref):
      dq_of = parts.start_product(dq_ref, both_dscores.transpose((1, 0)), k_part, interpret)
      dk_of = parts.start_product(dk_ref, dscores, q, interpret, dk)
      add_to_dq(dq_of(wait_n=1))
      return dk_of(), dv_of()

    return pl.run_scoped(finish, plgpu.ACC((shape[1], k_part.shape[1]), jnp.float32))

  return pl.run_scoped(compute, *(plgpu.ACC(s, jnp.float32) for s in (shape, shape, dv.shape, dk.shape)))


def _kernel(
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
  dk_ref,
  dv_ref,
  k_smem,
  v_smem,
  q_smem,
  dout_smem,
  ds_smem,
  dq_smem,
  lse_smem,
  delta_smem,
  own_arrived,
  arrived,
  consumed,
  met,
  *,
  static: Problem,
  G: int,
):
  """The gradients of 128 keys and values of one head, and their part of dQ; scores are [keys, queries]."""
  h, b, wg, first_row, blocks = parts.locate(ranges_ref, longest_last=False)
  D, ring = q_ref.shape[-1], static.rings[1]
  width, half = ring.rows, columns_of_dq(D)

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
    rows, own = pl.ds(first_row, ROWS), pl.ds(wg * ROWS, ROWS)
    columns = pl.ds(pl.multiple_of(wg * (D - half), 16), half)  # of dQ
    for source, buffer in ((k_ref, k_smem), (v_ref, v_smem)):
      plgpu.copy_gmem_to_smem(source.at[b, rows, h], buffer.at[0, own], own_arrived.at[wg])
    for n in range(2):
      plgpu.barrier_wait(own_arrived.at[n])
    kv_ids = None if kv_segments_ref is None else parts.load(kv_segments_ref, (b, rows), ROW)

    kept = tuple(buffer[0, own] if D <= widest else None for buffer, widest in zip((k_smem, v_smem), WIDEST_KEPT))

    def meet():
      plgpu.barrier_arrive(met)
      plgpu.barrier_wait(met)

    def visit(n, g, j, slot, masked, carry):
      turn = jax.lax.rem(n, 2)
      zero = parts.zero_in_loop(n)

      def weigh(products):
        scores = flash.scores(products, static)
        if masked:
          scores = parts.mask_scores(scores, static, first_row, j * width, True, kv_ids, q_segments_ref, b)
        lse = plgpu.load(lse_smem.at[slot], layout=COLUMN)
        weights = jnp.exp2(scores - parts.along_columns(lse, scores.shape))
        return jax.lax.optimization_barrier(weights.astype(q_ref.dtype)), flash.undo_soft_cap(weights, products, static)

      def exchange(slopes, dweights):
        delta = parts.along_columns(plgpu.load(delta_smem.at[slot], layout=COLUMN), slopes.shape)
        dscores = jax.lax.optimization_barrier((slopes * (dweights - delta)).astype(q_ref.dtype))
        ds_smem.at[turn, own][...] = dscores
        plgpu.commit_smem()
        meet()
        return dscores

      def add_to_dq(part):
        if overlap := 2 * half - D:  # columns that the other warpgroup has, too
          which = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=plgpu.Layout.WGMMA)
          part = jnp.where(which >= wg * overlap, part, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_smem.at[wg][...] = part
        plgpu.commit_smem()
        # the interpreter has no sums in memory: there, each warpgroup of each tile has an array of its own
        place = b + q_ref.shape[0] * jax.lax.div(first_row, ROWS) if static.interpret else b
        plgpu.copy_smem_to_gmem(
          dq_smem.at[wg],
          dq_ref.at[place, pl.ds(j * width, width), h * G + g, columns],
          reduction_op=None if static.interpret else "add",
        )

      return _five_products(
        *(buffer.at[zero, own] if array is None else array for buffer, array in zip((k_smem, v_smem), kept)),
        q_smem.at[slot],
        dout_smem.at[slot],
        *carry,
        ds_smem.at[turn],
        k_smem.at[zero, :, columns],
        weigh,
        exchange,
        add_to_dq,
        static.interpret,
      )

    start = (parts.zeros((ROWS, D)), parts.zeros((ROWS, D)))
    dk, dv = parts.walk(blocks, ring.stages, start, visit, arrived, consumed, G)
    meet()  # the other warpgroup has read these keys, which dK takes the place of
    for value, out_ref, smem in ((dk * static.scale, dk_ref, k_smem), (dv, dv_ref, v_smem)):
      smem.at[0, own][...] = value.astype(out_ref.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(smem.at[0, own], out_ref.at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _fetch():
    copies = parts.queries_of(
      b, h * G, ((q_ref, q_smem), (dout_ref, dout_smem)), ((lse_ref, lse_smem), (delta_ref, delta_smem))
    )
    parts.feed(blocks, ring, copies, arrived, consumed, G)


@functools.partial(jax.jit, static_argnames="static")  # so that layers share one program
def backward(
  q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, q_segments, kv_segments, lse_BxHxS, delta_BxHxS, dout_BxSxHxD, static: Problem
):
  """Gradients of q, k and v; see `flash.Kernel`."""
  B, S, H, D = q_BxSxHxD.shape
  L, K = k_BxLxKxD.shape[1:3]
  q, k, v, dout = map(parts.pad_to_tiles, (q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, dout_BxSxHxD))
  width, dtype = q.shape[3], q.dtype
  half = columns_of_dq(width)
  part = math.gcd(width, half)  # of which columns are taken by themselves
  lse, delta = pad(lse_BxHxS, 2, TILE, EMPTY_ROW_LSE), pad(delta_BxHxS, 2, TILE)
  ring = static.rings[1]
  ranges = block_ranges(static.mask, S, L, ring.rows, TILE, q_segments, kv_segments, by_key=True)
  per_row = plgpu.SMEM((ring.stages, ring.rows), jnp.float32)
  parts_of_dq = k.shape[1] // ROWS if static.interpret else 1
  dq_ref = jax.new_ref(jnp.zeros((parts_of_dq * B, *q.shape[1:]), jnp.float32))
  dk, dv = parts.call(
    _kernel,
    [jax.ShapeDtypeStruct(k.shape, dtype)] * 2,
    (
      parts.shared(1, TILE, width, dtype, part),
      parts.shared(1, TILE, width, dtype, part),
      parts.shared(ring.stages, ring.rows, width, dtype, part),
      parts.shared(ring.stages, ring.rows, width, dtype, part),
      parts.shared(2, TILE, ring.rows, dtype, part),
      parts.shared(2, ring.rows, half, jnp.float32),
      per_row,
      per_row,
      *parts.barriers(2, ring, copies=4),
      plgpu.Barrier(num_arrivals=2),
    ),
    k.shape[1] // TILE,
    B,
    K,
    static,
    H // K,
    (ranges, q, k, v, parts.pad_ids(q_segments), parts.pad_ids(kv_segments), lse, delta, dout, dq_ref),
  )
  dq = (dq_ref[...].reshape(parts_of_dq, *q.shape).sum(0) * static.scale).astype(dtype)
  return dq[:, :S, :, :D], dk[:, :L, :, :D], dv[:, :L, :, :D]
