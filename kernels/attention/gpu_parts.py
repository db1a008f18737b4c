"""What the kernels for NVIDIA Hopper GPUs share: the problem, tiles, the ring of buffers, products and masks.

B batch, S query positions, L key positions, H query heads, K key/value heads, G = H / K, D head width. A block
of threads has two warpgroups that compute, on 64 rows each, and one that fetches: the side that is iterated over is
copied to a ring of shared-memory buffers (FlashAttention-3, Shah et al. 2024, section 3.1).
"""

import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.flash import MASKED, pad
from diffeq_nnx.kernels.attention.mask import Mask

# Axes of the grid, and of the warpgroups: a name that the mesh of devices also has would mean that one.
GRID, WARPGROUP = ("attention.batch", "attention.tiles", "attention.heads"), "attention.warpgroup"
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
#        backward two arrays of 128 rows = 64 KiB; ring 2 x 2 x 64 rows = 64 KiB: 128 KiB; in one pass also the scores'
#                 gradient twice, 32 KiB, and dQ's part in float32, 32 KiB: 192 KiB
#   256  forward  64 KiB; 2 x 2 x 64 rows = 128 KiB: 192 KiB
#        backward 128 KiB; 2 x 1 x 64 rows = 64 KiB: 192 KiB
# 32-bit registers of a thread, with 128 threads for the 64 rows:
#   128  forward  scores 64, out 64, the former block's weights in bfloat16 32: 160
#        backward dK and dV 2 x 64, scores and their gradient 2 x 32, both again in bfloat16 2 x 16: 224; dQ's part
#                 comes after, 32
#    64  backward 160, and in one pass the tile's keys and values, 2 x 16
#   256  forward  32 + 128 + 16: 176; backward, dK and dV in two passes, 128 + 2 x 32 + 2 x 16: 224
RINGS = {128: (Ring(128, 2), Ring(64, 2)), 256: (Ring(64, 2), Ring(64, 1))}
COMPUTE_REGISTERS, FETCH_REGISTERS = 240, 24  # (2 x 240 + 24) x 128 threads = 64,512 of 65,536

ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a [64, n] array in registers
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a column


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is known when a kernel is compiled."""

  mask: Mask
  scale: float
  soft_cap: float | None
  L: int
  D: int
  interpret: Any

  @property
  def rings(self) -> tuple[Ring, Ring]:
    """Forward and backward."""
    return RINGS[128 if self.D <= 128 else 256]


def along_rows(row_values, shape):
  """[rows] -> [rows, columns]."""
  return jax.lax.broadcast_in_dim(row_values, shape, [0])


def along_columns(column_values, shape):
  """[columns] -> [rows, columns]."""
  return jax.lax.broadcast_in_dim(column_values, shape, [1])


def product(a, b_transposed, shape):
  """a b^T in fresh registers; operands in shared memory."""

  def compute(acc_ref):
    plgpu.wgmma(acc_ref, a, b_transposed.transpose((1, 0)))
    return acc_ref[...]

  return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def two_products(a, b_transposed, c, d_transposed, shape, between):
  """(between(a b^T), c d^T), with `between` computed while the second product runs; operands in shared memory."""

  def compute(first_ref, second_ref):
    plgpu.wgmma(first_ref, a, b_transposed.transpose((1, 0)))
    plgpu.wgmma(second_ref, c, d_transposed.transpose((1, 0)))
    result = jax.lax.optimization_barrier(between(plgpu.wgmma_accumulator_load(first_ref, wait_n=1)))
    return result, second_ref[...]

  return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def start_product(acc_ref, a, b, interpret, total=None):
  """Starts total + a b in an accumulator; b in shared memory, a in registers, or without a total there too.

  Returns a function that gives the result once at most `wait_n` products run that were started later.
  """
  if interpret and isinstance(a, jax.Array):
    # the interpreter has no wgmma from registers, and no accumulator that starts from a value
    here = b[...]
    plgpu.commit_smem()  # unlike wgmma, such a read is not seen by the copies that overwrite it
    sums = jax.lax.dot(a, here, preferred_element_type=jnp.float32)
    return lambda wait_n=0: sums if total is None else total + sums
  if total is not None:
    acc_ref[...] = total
  plgpu.wgmma(acc_ref, a, b)
  return lambda wait_n=0: plgpu.wgmma_accumulator_load(acc_ref, wait_n=wait_n)


def add_product(total, a, b, interpret):
  """total + a b; a in registers, b in shared memory."""
  compute = lambda acc_ref: start_product(acc_ref, a, b, interpret, total)()
  return pl.run_scoped(compute, plgpu.ACC(total.shape, jnp.float32))


def zeros(shape):
  """Zeros in registers, as products are added to them."""
  return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA)


def fill_rows(value):
  """One value for each row of a warpgroup."""
  return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)


def load(ref, index, layout):
  """Loads a part of a vector from the GPU's memory to registers."""
  return plgpu.load(ref.at[index], layout=layout, optimized=False)


def mask_scores(scores, static: Problem, first_row, first_column, by_key: bool, row_ids, ids_ref, b):
  """`scores` [rows, columns] with MASKED for pairs that don't attend; rows are queries, or keys if `by_key`.

  A row attends from one column to another, so that each score takes one comparison, with a window two. `row_ids` are
  the segment ids of the rows, or None; those of the columns are in `ids_ref`.
  """
  shape, mask = scores.shape, static.mask
  rows = first_row + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=ROW)
  columns = first_column + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
  from_column = below_column = None
  # Without a causal mask the bound lies beyond all columns, but depends on the row: the compiler finds no layout for an
  # array of equal values.
  shift = 0 if mask.causal else static.L
  if by_key:
    from_column = jnp.where(rows < static.L, rows - shift, jnp.iinfo(jnp.int32).max // 2)
    below_column = None if mask.window is None else rows + mask.window
  else:
    below_column = jnp.minimum(rows + 1 + shift, static.L)
    from_column = None if mask.window is None else rows - (mask.window - 1)
  visible: Any = True
  if from_column is not None:
    visible = columns >= along_rows(from_column, shape)
  if below_column is not None:
    below = columns < along_rows(below_column, shape)
    visible = below if visible is True else visible & below
  if row_ids is not None:
    column_ids = load(ids_ref, (b, pl.ds(first_column, shape[1])), COLUMN)
    visible = visible & (along_rows(row_ids, shape) == along_columns(column_ids, shape))
  return jnp.where(visible, scores, MASKED)


def order(blocks, G: int = 1):
  """(number of blocks with a mask, number of all, the n-th block that a tile visits): those with a mask come first.

  The range is visited for each of G heads, which is the other thing that the function of n returns: (head, block).
  """
  first, full_first, full_last, last = blocks
  after, masked, unmasked = last - full_last, last - full_last + full_first - first, full_last - full_first

  def place(n):
    has_mask = n < G * masked
    if G > 1:
      among, size = jnp.where(has_mask, n, n - G * masked), jnp.maximum(jnp.where(has_mask, masked, unmasked), 1)
      head, n = jax.lax.div(among, size), jax.lax.rem(among, size)
    else:
      head, n = 0, jnp.where(has_mask, n, n - masked)
    with_mask = jnp.where(n < after, last - 1 - n, full_first - 1 - (n - after))
    return head, jnp.maximum(jnp.where(has_mask, with_mask, full_last - 1 - n), 0)  # block 0 of no blocks

  return G * masked, G * (last - first), place


def feed(blocks, ring: Ring, copies, arrived, consumed, G: int = 1):
  """The fetching warpgroup: copies the range of blocks as buffers become free.

  Args:
    copies: pairs of source(head, rows) and the ring's buffers for it.
  """
  plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
  _, count, place = order(blocks, G)

  @pl.loop(0, count)
  def _next(n):
    slot = jax.lax.rem(n, ring.stages)
    head, block = place(n)

    @pl.when(n >= ring.stages)
    def _wait():
      plgpu.barrier_wait(consumed.at[slot])

    for source, buffer in copies:
      plgpu.copy_gmem_to_smem(source(head, pl.ds(block * ring.rows, ring.rows)), buffer.at[slot], arrived.at[slot])

  @pl.loop(jnp.maximum(0, count - ring.stages), count)
  def _drain(n):  # wait until the last buffers have been read
    plgpu.barrier_wait(consumed.at[jax.lax.rem(n, ring.stages)])


def zero_in_loop(n):
  """0 for the n-th block, which the compiler doesn't know.

  Added to the index of a tile's own array, it makes the compiler compute addresses for wgmma in each iteration. Before
  the loop, it would compute one for each 16 columns, and keep all of them in registers.
  """
  return jax.lax.shift_right_logical(n, 30)


def queries_of(b, first_head, by_position, by_head):
  """What `feed` copies for blocks of queries, from pairs of an array and its buffers.

  Args:
    by_position: arrays [B, S, H, D].
    by_head: arrays [B, H, S].
  """
  whole = [(lambda g, rows, x=x: x.at[b, rows, first_head + g], buffer) for x, buffer in by_position]
  return whole + [(lambda g, rows, x=x: x.at[b, first_head + g, rows], buffer) for x, buffer in by_head]


def walk(blocks, stages, carry, visit, arrived, consumed, G: int = 1):
  """A computing warpgroup: carry = visit(n, head, block, slot, masked, carry) for each block of the range, G heads."""
  num_masked, count, place = order(blocks, G)

  def step(masked):
    def body(n, carry):
      slot = jax.lax.rem(n, stages) if stages > 1 else zero_in_loop(n)
      plgpu.barrier_wait(arrived.at[slot])
      carry = visit(n, *place(n), slot, masked, carry)
      plgpu.barrier_arrive(consumed.at[slot])
      return carry

    return body

  carry = jax.lax.fori_loop(0, num_masked, step(True), carry)
  return jax.lax.fori_loop(num_masked, count, step(False), carry)


def locate(ranges_ref, longest_last: bool):
  """(head, batch, warpgroup, first row of a computing warpgroup, range of blocks that its tile visits).

  `longest_last`: later tiles have more to do, so they are started first, for multiprocessors that end together.
  """
  b, i, h, wg = (jax.lax.axis_index(name) for name in (*GRID, WARPGROUP))
  if longest_last:
    i = ranges_ref.shape[2] - 1 - i
  of_batch = b if ranges_ref.shape[1] > 1 else 0
  return h, b, wg, i * TILE + wg * ROWS, tuple(ranges_ref[n, of_batch, i] for n in range(4))


def call(kernel, out_type, scratch, tiles, B, H, static: Problem, G: int, arguments):
  """Runs a kernel over heads, tiles and batch; an argument may be None, or a `jax.Ref` that the kernel writes to."""
  given = [a is not None for a in arguments]

  def body(*refs):
    inputs = iter(refs[: sum(given)])
    spread = [next(inputs) if there else None for there in given]
    kernel(*spread, *refs[sum(given) :], static=static, G=G)

  with jax.enable_x64(False):  # counts are 32 bits wide
    return plgpu.kernel(
      body,
      out_type=out_type,
      scratch_types=scratch,
      grid=(B, tiles, H),  # in this order: heads first, so that balance doesn't depend on how many there are
      grid_names=GRID,
      num_threads=3,
      thread_name=WARPGROUP,
      interpret=static.interpret,
      compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*(a for a in arguments if a is not None))


def shared(count: int, rows: int, D: int, dtype, part: int = 0) -> pl.MemoryRef:
  """`count` buffers of [rows, D], tiled and swizzled as wgmma reads them: the widest swizzle that divides D.

  Args:
    part: a number of columns that it divides, too.
  """
  size = jnp.dtype(dtype).itemsize
  columns = math.gcd(D, part, 128 // size)
  # Newer versions of JAX leave a method of these classes abstract for type checkers alone.
  transforms = (
    plgpu.TilingTransform((8, columns)),  # type: ignore[abstract]
    plgpu.SwizzleTransform(size * columns),  # type: ignore[abstract]
  )
  return plgpu.SMEM((count, rows, D), dtype, transforms=transforms)


def ring_buffers(ring: Ring, D: int, dtype) -> tuple[pl.MemoryRef, pl.MemoryRef]:
  """The two arrays that are iterated over."""
  return shared(ring.stages, ring.rows, D, dtype), shared(ring.stages, ring.rows, D, dtype)


def barriers(own: int, ring: Ring, copies: int) -> tuple[plgpu.Barrier, ...]:
  """Arrival of a tile's own arrays (`own` copies), arrival of the ring's arrays, and the ring's release."""
  return (
    plgpu.Barrier(num_arrivals=own, num_barriers=2),
    plgpu.Barrier(num_arrivals=copies, num_barriers=ring.stages),
    plgpu.Barrier(num_arrivals=2, num_barriers=ring.stages),
  )


def pad_to_tiles(x):
  """[B, S, H, D] padded to multiples of the tile in S, and of the 16 columns of the narrowest swizzle in D."""
  return pad(pad(x, 1, TILE), 3, 16)


def pad_ids(segments):
  """Segment ids as the kernels read them; None stays None."""
  return None if segments is None else pad(segments.astype(jnp.int32), 1, TILE)
