"""Attention contexts: which tokens each token attends to, and where it stands.

B batch, L positions, D embed_dim, H query heads, K key/value heads, C head_dim.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffeq_nnx.config import RopeConfig
from diffeq_nnx.kernels.attention import attention, ring_attention
from diffeq_nnx.kernels.rotary import frequencies, rotate
from diffeq_nnx.parallel import context as context_lib
from diffeq_nnx.parallel import sharding


class AttentionContext(Protocol):
  """Which tokens each token of a batch attends to, and their positions."""

  @property
  def positions_BxL(self) -> jax.Array | None:
    """Each token's place in its document; None: 0 to L-1."""

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the batch's tokens, [B, L, H, C]."""


class Packing(NamedTuple):
  """Causal attention in rows that may hold several documents."""

  segment_ids_BxL: jax.Array | None = None  # the document of each token, which it attends to; None: one in each row
  positions_BxL: jax.Array | None = None  # each token's place in its document; None: 0 to L-1

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]."""
    run = lambda q, k, v, segment_ids=None: attention(q, k, v, segment_ids=segment_ids, implementation=implementation)
    return per_device(run, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC), self.segment_ids_BxL)


class SplitPacking(NamedTuple):
  """A `Packing` of rows whose positions are split over devices, both in the order of `parallel.context.zigzag`."""

  segment_ids_BxL: jax.Array | None
  positions_BxL: jax.Array

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Causal attention among the tokens of each row, [B, L, H, C]; keys and values go around the devices."""
    run = lambda q, k, v, segment_ids=None: ring_attention(
      q, k, v, segment_ids, axis_name="context", implementation=implementation
    )
    return per_device(run, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC), self.segment_ids_BxL, "context")


def pack(
  tokens_BxL: jax.Array, segment_ids_BxL: jax.Array | None, positions_BxL: jax.Array | None
) -> tuple[jax.Array, Packing | SplitPacking]:
  """Tokens and their packing; both in zigzag order where the surrounding mesh splits such sequences."""
  if context_lib.num_parts(tokens_BxL.shape[1]) == 1:
    return tokens_BxL, Packing(segment_ids_BxL, positions_BxL)
  if positions_BxL is None:
    positions_BxL = jnp.broadcast_to(jnp.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
  segment_ids_BxL = None if segment_ids_BxL is None else context_lib.zigzag(segment_ids_BxL)
  return context_lib.zigzag(tokens_BxL), SplitPacking(segment_ids_BxL, context_lib.zigzag(positions_BxL))


def unpack(x_BxLxD: jax.Array, context: AttentionContext) -> jax.Array:
  """States of tokens that `pack` gave, in the order of the text."""
  return context_lib.restore_order(x_BxLxD) if isinstance(context, SplitPacking) else x_BxLxD


def rotate_heads(
  x_BxLxHxC: jax.Array, positions_BxL: jax.Array | None, rope: RopeConfig, implementation: str
) -> jax.Array:
  """Rotary position embedding, each device with its own sequences and heads; positions None: 0 to L-1."""
  frequencies_R = frequencies(x_BxLxHxC.shape[-1], **dataclasses.asdict(rope))

  def run(x, positions=None):
    known = jnp.arange(x.shape[1]) if positions is None else positions
    return rotate(x, known, frequencies_R, implementation=implementation)

  return per_device(run, (x_BxLxHxC,), positions_BxL, None if positions_BxL is None else "context")


def per_device(
  function: Callable, by_head: tuple[jax.Array, ...], by_token: jax.Array | None, length: str | None = None
) -> jax.Array:
  """function(*by_head, by_token) on each device for its sequences and heads: the compiler can't partition a kernel.

  `length` is "context" where each device has its own part of the positions, too.

  Arrays [B, L, H, C] cross the boundary as [B, L, H C]. Otherwise the TPU compiler folds the reshape into the product
  before it, and copies the result into the layout that the kernel reads.
  """
  C, count = by_head[0].shape[-1], len(by_head)

  def run(*arrays):
    split = [x.reshape(*x.shape[:2], -1, C) for x in arrays[:count]]
    return function(*split, *arrays[count:]).reshape(arrays[0].shape)

  merged = [x.reshape(*x.shape[:2], -1) for x in by_head]
  tokens = () if by_token is None else (by_token,)
  return sharding.per_device(run, ("batch", length, "whole_heads"), *merged, *tokens).reshape(by_head[0].shape)
