"""The forward kernel for NVIDIA Hopper GPUs. Letters and tiles: gpu_parts.py.

Softmaxes run while the tensor cores are at work (FlashAttention-3, Shah et al. 2024, sections 3.1 and 3.2). The
computing warpgroups take turns at starting products: while those of one run, the other is at its softmax. In a turn a
warpgroup starts two products, q k^T of a block and the weights times v of the block before, with no wait in between.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention import flash
from diffeq_nnx.kernels.attention import gpu_parts as parts
from diffeq_nnx.kernels.attention.flash import LOG2_E, MASKED
from diffeq_nnx.kernels.attention.gpu_parts import FETCH_REGISTERS, ROW, ROWS, TILE, Problem, Ring
from diffeq_nnx.kernels.attention.mask import block_ranges


def _fetch(count, place, ring: Ring, arrays, buffers, b, head, arrived, consumed):
  """The fetching warpgroup: `count` blocks of keys, one ahead of values, as buffers become free."""
  plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

  def copy(which, n):
    slot = jax.lax.rem(n, ring.stages)

    @pl.when(n >= ring.stages)
    def _wait():
      plgpu.barrier_wait(consumed[which].at[slot])

    source = (b, pl.ds(place(n)[1] * ring.rows, ring.rows), head)
    plgpu.copy_gmem_to_smem(arrays[which].at[source], buffers[which].at[slot], arrived[which].at[slot])

  copy(0, 0)

  @pl.loop(1, count)
  def _next(n):
    copy(0, n)
    copy(1, n - 1)

  copy(1, count - 1)

  @pl.loop(jnp.maximum(0, count - ring.stages), count)
  def _drain(n):  # wait until the last buffers have been read
    for barrier in consumed:
      plgpu.barrier_wait(barrier.at[jax.lax.rem(n, ring.stages)])


def _two_products(q, k, weights, v, acc, start, end, between, interpret):
  """(between(q k^T), acc + weights v), with `between` computed while the second product runs.

  All operands but `weights` and `acc` are in shared memory. `start()` is called before the products, `end()` once both
  have started.
  """
  shape = (ROWS, k.shape[0])
  start()
  if interpret:  # the interpreter has no wgmma from registers, and no accumulator that starts from a value
    scores = parts.product(q, k, shape)
    end()
    return between(scores), parts.add_product(acc, weights, v, interpret)

  def compute(scores_ref, acc_ref):
    acc_ref[...] = acc
    plgpu.wgmma(scores_ref, q, k.transpose((1, 0)))
    plgpu.wgmma(acc_ref, weights, v)
    end()
    result = jax.lax.optimization_barrier(between(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)))
    return jax.lax.optimization_barrier((result, acc_ref[...]))

  return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def _kernel(
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
  k_arrived,
  v_arrived,
  k_consumed,
  v_consumed,
  turns,
  *,
  static: Problem,
  G: int,
):
  """128 queries of one head against all keys that they attend to."""
  h, b, wg, first_row, blocks = parts.locate(ranges_ref, longest_last=static.mask.causal)
  num_masked, count, place = parts.order(blocks)
  count = jnp.maximum(count, 1)  # at least one: without visible keys, it gives zeros
  D, ring = q_ref.shape[-1], static.rings[0]
  slot_of = lambda n: jax.lax.rem(n, ring.stages)

  @pl.when(wg < 2)
  def _compute():
    plgpu.set_max_registers(parts.COMPUTE_REGISTERS, action="increase")
    rows = pl.ds(first_row, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_smem.at[wg], q_arrived.at[wg])
    q_ids = None if q_segments_ref is None else parts.load(q_segments_ref, (b, rows), ROW)
    take_turn = lambda: plgpu.barrier_wait(turns.at[wg])
    give_turn = lambda: plgpu.barrier_arrive(turns.at[1 - wg])

    def softmax(products, n, masked, top):
      """The weights of the n-th block, the new maximum, and what sums so far are to be multiplied by."""
      if masked or static.soft_cap is not None:  # scaled first, since scaling what is masked would give infinities
        scores = flash.scores(products, static)
        if masked:
          first_key = place(n)[1] * ring.rows
          scores = parts.mask_scores(scores, static, first_row, first_key, False, q_ids, kv_segments_ref, b)
        new_top = jnp.maximum(top, scores.max(axis=1))
      else:  # scaled after the maximum is found, by the instruction that subtracts it
        scores = products * (static.scale * LOG2_E)
        new_top = jnp.maximum(top, products.max(axis=1) * (static.scale * LOG2_E))
      weights = jnp.exp2(scores - parts.along_rows(new_top, scores.shape))
      return weights, new_top, jnp.exp2(top - new_top)

    def step(masked):
      def body(n, carry):
        acc, weights, top, total = carry
        slot, before = slot_of(n), slot_of(n - 1)
        plgpu.barrier_wait(k_arrived.at[slot])
        plgpu.barrier_wait(v_arrived.at[before])

        def between(products):
          plgpu.barrier_arrive(k_consumed.at[slot])
          weights, new_top, correction = softmax(products, n, masked, top)
          return weights, new_top, correction, total * correction + weights.sum(axis=1)

        (weights, top, correction, total), acc = _two_products(
          q_smem.at[wg + parts.zero_in_loop(n)],
          k_smem.at[slot],
          weights,
          v_smem.at[before],
          acc,
          take_turn,
          give_turn,
          between,
          static.interpret,
        )
        plgpu.barrier_arrive(v_consumed.at[before])
        # the weights are rounded only now, since the product above read the former ones from the same registers
        return acc * parts.along_rows(correction, acc.shape), weights.astype(q_ref.dtype), top, total

      return body

    pl.when(wg == 1)(give_turn)  # the first turn is that of warpgroup 0
    plgpu.barrier_wait(q_arrived.at[wg])
    plgpu.barrier_wait(k_arrived.at[0])
    take_turn()
    products = parts.product(q_smem.at[wg], k_smem.at[0], (ROWS, ring.rows))
    give_turn()
    plgpu.barrier_arrive(k_consumed.at[0])
    weights, top, _ = softmax(products, 0, True, parts.fill_rows(MASKED))
    start = (parts.zeros((ROWS, D)), weights.astype(q_ref.dtype), top, weights.sum(axis=1))
    carry = jax.lax.fori_loop(1, num_masked, step(True), start)
    acc, weights, top, total = jax.lax.fori_loop(jnp.maximum(num_masked, 1), count, step(False), carry)
    slot = slot_of(count - 1)
    plgpu.barrier_wait(v_arrived.at[slot])
    acc = parts.add_product(acc, weights, v_smem.at[slot], static.interpret)
    plgpu.barrier_arrive(v_consumed.at[slot])
    pl.when(wg == 0)(take_turn)  # the one that was given too many

    empty = top <= MASKED / 2
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    q_smem.at[wg][...] = (acc * parts.along_rows(inverse, acc.shape)).astype(out_ref.dtype)
    lse = top / LOG2_E + jnp.log(jnp.where(empty, 1.0, total))
    lse_smem.at[wg][...] = jnp.where(empty, -jnp.inf, lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[wg], out_ref.at[b, rows, h], commit_group=False)
    plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[b, h, rows])  # one group with the above
    plgpu.wait_smem_to_gmem(0)

  @pl.when(wg == 2)
  def _copy():
    _fetch(
      count,
      place,
      ring,
      (k_ref, v_ref),
      (k_smem, v_smem),
      b,
      jax.lax.div(h, G),
      (k_arrived, v_arrived),
      (k_consumed, v_consumed),
    )


@functools.partial(jax.jit, static_argnames="static")  # so that layers share one program
def forward(q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, q_segments, kv_segments, static: Problem):
  """Output [B, S, H, D] and log-sum-exp [B, H, S]."""
  B, S, H, D = q_BxSxHxD.shape
  G = H // k_BxLxKxD.shape[2]
  ring = static.rings[0]
  ranges = block_ranges(static.mask, S, static.L, TILE, ring.rows, q_segments, kv_segments)
  q, k, v = map(parts.pad_to_tiles, (q_BxSxHxD, k_BxLxKxD, v_BxLxKxD))
  width, dtype = q.shape[3], q.dtype
  arrived, consumed = (plgpu.Barrier(num_arrivals=n, num_barriers=ring.stages) for n in (1, 2))
  one_each = plgpu.Barrier(num_arrivals=1, num_barriers=2)
  out, lse = parts.call(
    _kernel,
    [jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, H, q.shape[1]), jnp.float32)],
    (
      parts.shared(2, ROWS, width, dtype),
      *parts.ring_buffers(ring, width, dtype),
      plgpu.SMEM((2, ROWS), jnp.float32),
      one_each,
      arrived,
      arrived,
      consumed,
      consumed,
      one_each,
    ),
    q.shape[1] // TILE,
    B,
    H,
    static,
    G,
    (ranges, q, k, v, parts.pad_ids(q_segments), parts.pad_ids(kv_segments)),
  )
  return out[:, :S, :, :D], lse[:, :, :S]
