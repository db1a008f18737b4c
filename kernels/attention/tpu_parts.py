"""Parts of the TPU kernels: the problem's description, masks, lanes of heads, and the order of blocks.

W lanes of a block, which hold `heads` whole heads side by side.
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
from diffeq_nnx.kernels.attention.flash import LOG2_E, pad
from diffeq_nnx.kernels.attention.mask import Mask

LANES = 128

NT = (((1,), (1,)), ((), ()))  # a b^T
NN = (((1,), (0,)), ((), ()))  # a b


@dataclasses.dataclass(frozen=True)
class TPUProblem:
  """What the kernels are specialized for."""

  mask: Mask
  scale: float
  soft_cap: float | None
  L: int
  heads: int
  W: int
  segments: bool
  blocks: TPUBlocks
  interpret: Any


def dot(a, b, dimensions):
  """A product of matrices, summed in float32; float32 factors are not rounded."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def scale_queries(q, static: TPUProblem):
  """q as `scores_of` expects it: without a soft cap times the scale and log2 e, rounded to its dtype."""
  return q if static.soft_cap is not None else (q.astype(jnp.float32) * (static.scale * LOG2_E)).astype(q.dtype)


def scores_of(products, static: TPUProblem):
  """Like `flash.scores`, from products of scaled q and k."""
  return products if static.soft_cap is None else flash.scores(products, static)


def visible_in(static: TPUProblem, first_query, first_key, shape, query_axis: int, segments):
  """The mask of one block; `segments` are the ids of queries and keys, broadcast to the block, or None."""
  query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (query_axis, 1 - query_axis))
  if static.mask == Mask(causal=True, window=None):
    visible = query - key >= first_key - first_query  # one comparison in place of two
  else:
    visible = static.mask.visible(first_query + query, first_key + key)
  if static.L % (shape[1 - query_axis]):
    visible &= first_key + key < static.L
  return visible if segments is None else visible & (segments[0] == segments[1])


def of_head(n: int, x, static: TPUProblem):
  """x [rows, W] with zeros in the lanes of other heads than the n-th."""
  return x if static.heads == 1 else jnp.where(lanes_of_head(n, x.shape, static), x, jnp.zeros_like(x))


def lanes_of_head(n, shape, static: TPUProblem):
  """Whether each lane of an array of this shape is the n-th head's; n is a number, or one for each element."""
  width = static.W // static.heads
  lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  return (lanes >= n * width) & (lanes < (n + 1) * width)


def by_lane(each: list, static: TPUProblem):
  """[rows, W] whose lanes of head n are those of each[n]."""
  joined = each[0]
  for n in range(1, static.heads):
    joined = jnp.where(lanes_of_head(n, joined.shape, static), each[n], joined)
  return joined


def widen(columns_x128, width):
  """[rows, 128] of equal columns as [rows, width]."""
  return jnp.concatenate([columns_x128] * -(-width // LANES), axis=1)[:, :width]


def columns(row, width):
  """A row [1, n] as equal columns, [n, width]."""
  return widen(jnp.broadcast_to(row, (LANES, row.shape[1])).T, width)


def visit_all(visit, ranges_ref, row, low, high):
  """Calls `visit(j, masked)` for the blocks in low..high that a block must visit, masked only where needed.

  `ranges_ref` is `block_ranges` as one axis, and `row` the block's number among those of all batch rows.
  """
  edges = [jnp.clip(ranges_ref[n * (ranges_ref.shape[0] // 4) + row], low, high) for n in range(4)]
  for start, end, masked in zip(edges, edges[1:], (True, False, True)):
    jax.lax.fori_loop(start, end, lambda j, _, masked=masked: visit(j, masked), None)


def segment_rows(segments_BxS, multiple):
  """Segment ids [B, S] as rows [B, 1, padded S], or None."""
  if segments_BxS is None:
    return None
  return pad(segments_BxS.astype(jnp.int32)[:, None], 2, multiple)


def call(kernel, static: TPUProblem, *, grid, in_specs, out_specs, out_shape, scratch_shapes, name):
  """`pl.pallas_call` on a grid of batch, heads and two axes of blocks; its first argument is `block_ranges`."""
  called = pl.pallas_call(
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

  def flat(ranges, *arrays):
    with jax.enable_x64(False):  # indices are 32 bits wide
      return called(ranges.reshape(-1), *arrays)  # in SMEM the last of several axes takes multiples of 128

  return flat
