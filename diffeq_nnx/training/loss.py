"""Cross-entropy that never holds the logits of all positions at one time.

B batch, L positions, N chunks, C positions a chunk, D embed_dim, V vocab_size. The batch is taken as R = P X
parts, one to a device: P parts of b sequences, each in X stretches where positions are split over devices. Each part
adds up its own loss and gradient of the head over the chunks, and they are added across devices once, at the end.
"""

import functools

import jax
import jax.numpy as jnp

from diffeq_nnx.parallel import sharding

LOGITS_BYTES = 2**30  # of a chunk in float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_cross_entropy(
  hidden_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  mask_BxL: jax.Array,
  num_chunks: int | None = None,
) -> jax.Array:
  """Sum over positions of mask * -log softmax(hidden head^T)[target], a scalar in float32 or wider, nats.

  Works on 1 / num_chunks of the positions that each device holds at a time, so that a batch sharded over devices stays
  so. Logits are accumulated in float32 or wider. Where a gradient is wanted, the forward pass makes it
  chunk by chunk while the logits are at hand: three matrix products a chunk, no second look. Memory beyond
  the gradients themselves is a few arrays of [R, b, C, V].

  Args:
    hidden_BxLxD: the model's last hidden state.
    head_VxD: the output head.
    targets_BxL: token ids.
    mask_BxL: weight of each position, usually 0 or 1; not differentiated.
    num_chunks: must divide L, or a device's stretch of it; None: the fewest whose logits take at most `LOGITS_BYTES`
      on a device, since each chunk reads and writes the whole gradient of the head.

  Raises:
    ValueError: num_chunks does not divide it.
  """
  chunks = _chunks((hidden_BxLxD, targets_BxL, mask_BxL), num_chunks, len(head_VxD))

  def chunk(total_R, args):
    loss_R, _, _ = _chunk_loss(head_VxD, *args)
    return total_R + loss_R, None

  total_R, _ = jax.lax.scan(chunk, _zeros(chunks[0], ()), chunks)
  return total_R.sum()


def _zeros(hidden_NxRxbxCxD: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[R, ...], each part on its own device."""
  wide = jnp.promote_types(hidden_NxRxbxCxD.dtype, jnp.float32)
  zeros = jnp.zeros((hidden_NxRxbxCxD.shape[1], *shape), wide)
  return sharding.constrain(zeros, "parts", *(("vocab", None) if shape else ()))


def _chunks(arrays, num_chunks: int | None, V: int):
  """[B, L, ...] -> [N, R, b, C, ...] for each array."""
  P, X = _parts(arrays[0])
  b, length = arrays[0].shape[0] // P, arrays[0].shape[1] // X
  if num_chunks is None:
    most = LOGITS_BYTES // (b * V * 4)  # positions
    num_chunks = next(n for n in range(1, length + 1) if length % n == 0 and (length // n <= most or n == length))
  if length % num_chunks:
    raise ValueError(f"num_chunks={num_chunks}: must divide the {length} positions of a sequence that a device holds")

  def split(a):
    a = jnp.moveaxis(a.reshape(P, b, X, num_chunks, -1, *a.shape[2:]), (3, 2), (0, 2))
    a = a.reshape(num_chunks, P * X, *a.shape[3:])
    return sharding.constrain(a, None, "parts", *[None] * (a.ndim - 2))

  return tuple(map(split, arrays))


def _parts(a_BxL: jax.Array) -> tuple[int, int]:
  """How a batch is split over devices: the number of parts of its sequences, and of their positions."""
  P, X = sharding.num_shards("batch"), sharding.num_shards("context")
  B, L = a_BxL.shape[:2]
  return P if B % P == 0 else 1, X if L % X == 0 else 1


def _chunk_loss(head_VxD, hidden_RxbxCxD, targets_RxbxC, mask_RxbxC):
  wide = jnp.promote_types(hidden_RxbxCxD.dtype, jnp.float32)
  logits_RxbxCxV = jnp.einsum("rbcd,vd->rbcv", hidden_RxbxCxD, head_VxD, preferred_element_type=wide)
  normalizer_RxbxC = jax.nn.logsumexp(logits_RxbxCxV, axis=-1)
  picked_RxbxC = jnp.take_along_axis(logits_RxbxCxV, targets_RxbxC[..., None], axis=-1)[..., 0]
  loss_R = jnp.sum(mask_RxbxC * (normalizer_RxbxC - picked_RxbxC), axis=(1, 2))
  return loss_R, logits_RxbxCxV, normalizer_RxbxC


def _forward(hidden_BxLxD, head_VxD, targets_BxL, mask_BxL, num_chunks):
  wide = jnp.promote_types(hidden_BxLxD.dtype, jnp.float32)
  chunks = _chunks((hidden_BxLxD, targets_BxL, mask_BxL), num_chunks, len(head_VxD))

  def chunk(carry, args):
    total_R, head_gradient_RxVxD = carry
    hidden_RxbxCxD, targets_RxbxC, mask_RxbxC = args
    loss_R, logits_RxbxCxV, normalizer_RxbxC = _chunk_loss(head_VxD, *args)
    hits_RxbxCxV = targets_RxbxC[..., None] == jnp.arange(head_VxD.shape[0])[None, None, None]
    delta_RxbxCxV = (jnp.exp(logits_RxbxCxV - normalizer_RxbxC[..., None]) - hits_RxbxCxV) * mask_RxbxC[..., None]
    delta_RxbxCxV = delta_RxbxCxV.astype(hidden_BxLxD.dtype)
    hidden_gradient = jnp.einsum("rbcv,vd->rbcd", delta_RxbxCxV, head_VxD, preferred_element_type=wide)
    head_gradient_RxVxD += jnp.einsum("rbcv,rbcd->rvd", delta_RxbxCxV, hidden_RxbxCxD, preferred_element_type=wide)
    return (total_R + loss_R, head_gradient_RxVxD), hidden_gradient.astype(hidden_BxLxD.dtype)

  start = (_zeros(chunks[0], ()), _zeros(chunks[0], head_VxD.shape))
  (total_R, head_gradient_RxVxD), hidden_gradient_NxRxbxCxD = jax.lax.scan(chunk, start, chunks)
  split = hidden_gradient_NxRxbxCxD.reshape(-1, *_parts(hidden_BxLxD), *hidden_gradient_NxRxbxCxD.shape[2:])
  hidden_gradient_BxLxD = jnp.moveaxis(split, (0, 2), (3, 2)).reshape(hidden_BxLxD.shape)
  return total_R.sum(), (hidden_gradient_BxLxD, head_gradient_RxVxD.sum(0).astype(head_VxD.dtype))


def _backward(num_chunks, gradients, upstream):
  del num_chunks
  return tuple((upstream * g).astype(g.dtype) for g in gradients) + (None, None)


chunked_cross_entropy.defvjp(_forward, _backward)
