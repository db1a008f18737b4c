"""The backward kernels for NVIDIA Hopper GPUs in two passes, with seven products. Letters and tiles: gpu_parts.py.

One kernel computes dQ, one dK and dV, so that all sums have a fixed order.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention import gpu_parts as parts
from diffeq_nnx.kernels.attention.flash import EMPTY_ROW_LSE, pad
from diffeq_nnx.kernels.attention.gpu_parts import COLUMN, ROW, ROWS, TILE, Problem
from diffeq_nnx.kernels.attention.mask import block_ranges


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
  static: Problem,
  G: int,
):
  """The gradient of 128 queries of one head."""
  h, b, wg, first_row, blocks = parts.locate(ranges_ref, longest_last=static.mask.causal)
  D, ring = q_ref.shape[-1], static.rings[1]
  width = ring.rows

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_smem.at[wg], own_arrived.at[wg])
    plgpu.copy_gmem_to_smem(dout_ref.at[b, rows, h], dout_smem.at[wg], own_arrived.at[wg])
    plgpu.barrier_wait(own_arrived.at[wg])
    lse, delta = (parts.load(ref, (b, h, rows), ROW) for ref in (lse_ref, delta_ref))
    q_ids = None if q_segments_ref is None else parts.load(q_segments_ref, (b, rows), ROW)

    def visit(n, _g, j, slot, masked, dq):
      own = wg + parts.zero_in_loop(n)

      def softmax(products):
        scores = flash.scores(products, static)
        if masked:
          scores = parts.mask_scores(scores, static, first_row, j * width, False, q_ids, kv_segments_ref, b)
        weights = jnp.exp2(scores - parts.along_rows(lse, scores.shape))
        return flash.undo_soft_cap(weights, products, static)

      slopes, dweights = parts.two_products(
        q_smem.at[own], k_smem.at[slot], dout_smem.at[own], v_smem.at[slot], (ROWS, width), softmax
      )
      dscores = slopes * (dweights - parts.along_rows(delta, dweights.shape))
      return parts.add_product(dq, dscores.astype(q_ref.dtype), k_smem.at[slot], static.interpret)

    dq = parts.walk(blocks, ring.stages, parts.zeros((ROWS, D)), visit, arrived, consumed)
    q_smem.at[wg][...] = (dq * static.scale).astype(dq_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _fetch():
    copies = [(lambda _, at, x=x: x.at[b, at, jax.lax.div(h, G)], s) for x, s in ((k_ref, k_smem), (v_ref, v_smem))]
    parts.feed(blocks, ring, copies, arrived, consumed)


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
  static: Problem,
  G: int,
):
  """The gradients of 128 keys and values of one head, summed over its G query heads; scores are [keys, queries].

  `wanted` says which of dK and dV to compute; `refs` are those, then the scratch.
  """
  out_refs = refs[: sum(wanted)]
  k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, own_arrived, arrived, consumed = refs[sum(wanted) :]
  h, b, wg, first_row, blocks = parts.locate(ranges_ref, longest_last=False)
  D, ring = q_ref.shape[-1], static.rings[1]
  width = ring.rows

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    source = (b, rows, h)
    plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[wg], own_arrived.at[wg])
    plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[wg], own_arrived.at[wg])
    plgpu.barrier_wait(own_arrived.at[wg])
    kv_ids = None if kv_segments_ref is None else parts.load(kv_segments_ref, (b, rows), ROW)

    def visit(n, _g, j, slot, masked, carry):
      dk, dv = carry
      own = wg + parts.zero_in_loop(n)
      shape = (ROWS, width)

      def softmax(products):
        scores = flash.scores(products, static)
        if masked:
          scores = parts.mask_scores(scores, static, first_row, j * width, True, kv_ids, q_segments_ref, b)
        lse = plgpu.load(lse_smem.at[slot], layout=COLUMN)
        weights = jnp.exp2(scores - parts.along_columns(lse, shape))
        return weights if wanted[1] else None, flash.undo_soft_cap(weights, products, static) if wanted[0] else None

      if wanted[0]:
        (weights, slopes), dweights = parts.two_products(
          k_smem.at[own], q_smem.at[slot], v_smem.at[own], dout_smem.at[slot], shape, softmax
        )
      else:
        weights, _ = softmax(parts.product(k_smem.at[own], q_smem.at[slot], shape))
      if wanted[1]:
        dv = parts.add_product(dv, weights.astype(q_ref.dtype), dout_smem.at[slot], static.interpret)
      if wanted[0]:
        delta = parts.along_columns(plgpu.load(delta_smem.at[slot], layout=COLUMN), shape)
        dk = parts.add_product(dk, (slopes * (dweights - delta)).astype(q_ref.dtype), q_smem.at[slot], static.interpret)
      return dk, dv

    start = tuple(parts.zeros((ROWS, D)) if want else None for want in wanted)
    dk, dv = parts.walk(blocks, ring.stages, start, visit, arrived, consumed, G)
    sums = [value for value in (dk if dk is None else dk * static.scale, dv) if value is not None]
    for value, out_ref, smem in zip(sums, out_refs, (k_smem, v_smem)):
      smem.at[wg][...] = value.astype(out_ref.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(smem.at[wg], out_ref.at[b, rows, h])
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
  G = H // K
  q, k, v, dout = map(parts.pad_to_tiles, (q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, dout_BxSxHxD))
  width, dtype = q.shape[3], q.dtype
  lse, delta = pad(lse_BxHxS, 2, TILE, EMPTY_ROW_LSE), pad(delta_BxHxS, 2, TILE)
  rest = (q, k, v, parts.pad_ids(q_segments), parts.pad_ids(kv_segments), lse, delta, dout)
  ring = static.rings[1]
  buffers = (
    parts.shared(2, ROWS, width, dtype),
    parts.shared(2, ROWS, width, dtype),
    *parts.ring_buffers(ring, width, dtype),
  )
  per_row = plgpu.SMEM((ring.stages, ring.rows), jnp.float32)
  ranges = functools.partial(block_ranges, static.mask, S, L, q_segments_BxS=q_segments, kv_segments_BxL=kv_segments)
  (dq,) = parts.call(
    _dq_kernel,
    [jax.ShapeDtypeStruct(q.shape, dtype)],
    (*buffers, *parts.barriers(2, ring, copies=2)),
    q.shape[1] // TILE,
    B,
    H,
    static,
    G,
    (ranges(block_q=TILE, block_kv=ring.rows), *rest),
  )
  by_key = (ranges(block_q=ring.rows, block_kv=TILE, by_key=True), *rest)
  dkv = lambda *wanted: parts.call(
    functools.partial(_dkv_kernel, wanted=wanted),
    [jax.ShapeDtypeStruct(k.shape, dtype)] * sum(wanted),
    (*buffers, per_row, per_row, *parts.barriers(2, ring, copies=4)),
    k.shape[1] // TILE,
    B,
    K,
    static,
    G,
    by_key,
  )
  dk, dv = dkv(True, True) if width <= 128 else (*dkv(True, False), *dkv(False, True))
  return dq[:, :S, :, :D], dk[:, :L, :, :D], dv[:, :L, :, :D]
