"""The losses, which never hold the logits of all positions at one time.

B batch, L positions, N chunks, C positions a chunk, D embed_dim, E a teacher's embed_dim, V vocab_size. The batch is
taken as R = P X parts, one to a device: P parts of b sequences, each in X stretches where positions are split over
devices. Each part adds up its own loss and gradient of the head over the chunks, and they are added across devices
once, at the end.
"""

import functools
import math

import jax
import jax.numpy as jnp

from diffeq_nnx.parallel import sharding

LOGITS_BYTES = 2**30  # of a chunk in float32, a teacher's included


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
    mask_BxL: weight of each position, usually 0 or 1; not differentiated.
    num_chunks: must divide L, or a device's stretch of it; None: about the fewest whose logits take at most
      `LOGITS_BYTES` on a device, since each chunk reads and writes the whole gradient of the head.

  Raises:
    ValueError: num_chunks does not divide it.
  """
  return chunked_losses(hidden_BxLxD, head_VxD, (), targets_BxL, mask_BxL, num_chunks, 0.0)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def chunked_losses(hidden_BxLxD, head_VxD, teacher, targets_BxL, mask_BxL, num_chunks, weight):
  """The cross-entropy alone, or beside a teacher.

  Args:
    hidden_BxLxD, head_VxD, targets_BxL, mask_BxL, num_chunks: as for `chunked_cross_entropy`.
    teacher: () or a teacher's last hidden state [B, L, E] and its head [V, E]; not differentiated.
    weight: the share of the divergence.

  Returns:
    (cross-entropy,) or ((1 - weight) * cross-entropy + weight * divergence, cross-entropy, divergence), where
    the divergence is mask * KL(teacher || model) in nats; only the first of them may be differentiated.
  """
  # JAX leaves out of a compiled program what is unused, here the gradients
  return _forward(hidden_BxLxD, head_VxD, teacher, targets_BxL, mask_BxL, num_chunks, weight)[0]


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
    most = max(LOGITS_BYTES // (b * V * 4), 1)  # positions
    fewest = math.ceil(length / most)
    num_chunks = next((n for n in range(fewest, 2 * fewest) if length % n == 0), fewest)  # else the last is filled up
  elif length % num_chunks:
    raise ValueError(f"num_chunks={num_chunks}: must divide the {length} positions of a sequence that a device holds")
  missing = -length % num_chunks

  def split(a):
    a = a.reshape(P, b, X, length, *a.shape[2:])
    a = jnp.pad(a, [(0, missing) if axis == 3 else (0, 0) for axis in range(a.ndim)])  # with a mask of 0
    a = jnp.moveaxis(a.reshape(P, b, X, num_chunks, -1, *a.shape[4:]), (3, 2), (0, 2))
    a = a.reshape(num_chunks, P * X, *a.shape[3:])
    return sharding.constrain(a, None, "parts", *[None] * (a.ndim - 2))

  return tuple(map(split, arrays))


def _parts(a_BxL: jax.Array) -> tuple[int, int]:
  """How a batch is split over devices: the number of parts of its sequences, and of their positions."""
  P, X = sharding.num_shards("batch"), sharding.num_shards("context")
  B, L = a_BxL.shape[:2]
  return P if B % P == 0 else 1, X if L % X == 0 else 1


def _chunk_losses(heads, weight, hidden_RxbxCxD, targets_RxbxC, mask_RxbxC, teacher_RxbxCxE=None):
  """(losses, logits, their normalizer, probabilities of the teacher) of a chunk."""
  logits_RxbxCxV = _logits(hidden_RxbxCxD, heads[0])
  normalizer_RxbxC = jax.nn.logsumexp(logits_RxbxCxV, axis=-1)
  picked_RxbxC = jnp.take_along_axis(logits_RxbxCxV, targets_RxbxC[..., None], axis=-1)[..., 0]
  cross_entropy_R = jnp.sum(mask_RxbxC * (normalizer_RxbxC - picked_RxbxC), axis=(1, 2))
  if teacher_RxbxCxE is None:
    return (cross_entropy_R,), logits_RxbxCxV, normalizer_RxbxC, None
  teacher_RxbxCxV = _logits(teacher_RxbxCxE, heads[1]).astype(logits_RxbxCxV.dtype)
  # by the same operations as for the student, so that between equal models the divergence is exactly 0
  log_RxbxCxV = teacher_RxbxCxV - jax.nn.logsumexp(teacher_RxbxCxV, axis=-1)[..., None]
  probability_RxbxCxV = jnp.exp(log_RxbxCxV)
  ratio_RxbxCxV = log_RxbxCxV - (logits_RxbxCxV - normalizer_RxbxC[..., None])
  divergence_R = jnp.sum(mask_RxbxC * jnp.sum(probability_RxbxCxV * ratio_RxbxCxV, axis=-1), axis=(1, 2))
  loss_R = (1 - weight) * cross_entropy_R + weight * divergence_R
  return (loss_R, cross_entropy_R, divergence_R), logits_RxbxCxV, normalizer_RxbxC, probability_RxbxCxV


def _logits(hidden_RxbxCxD, head_VxD):
  wide = jnp.promote_types(hidden_RxbxCxD.dtype, jnp.float32)
  return jnp.einsum("rbcd,vd->rbcv", hidden_RxbxCxD, head_VxD, preferred_element_type=wide)


def _forward(hidden_BxLxD, head_VxD, teacher, targets_BxL, mask_BxL, num_chunks, weight):
  wide = jnp.promote_types(hidden_BxLxD.dtype, jnp.float32)
  heads = (head_VxD, *teacher[1:])
  chunks = _chunks((hidden_BxLxD, targets_BxL, mask_BxL, *teacher[:1]), num_chunks, sum(map(len, heads)))

  def chunk(carry, args):
    totals_R, head_gradient_RxVxD = carry
    hidden_RxbxCxD, targets_RxbxC, mask_RxbxC = args[:3]
    losses_R, logits_RxbxCxV, normalizer_RxbxC, probability_RxbxCxV = _chunk_losses(heads, weight, *args)
    wanted_RxbxCxV = targets_RxbxC[..., None] == jnp.arange(head_VxD.shape[0])[None, None, None]
    if probability_RxbxCxV is not None:
      wanted_RxbxCxV = (1 - weight) * wanted_RxbxCxV + weight * probability_RxbxCxV
    delta_RxbxCxV = (jnp.exp(logits_RxbxCxV - normalizer_RxbxC[..., None]) - wanted_RxbxCxV) * mask_RxbxC[..., None]
    delta_RxbxCxV = delta_RxbxCxV.astype(hidden_BxLxD.dtype)
    hidden_gradient = jnp.einsum("rbcv,vd->rbcd", delta_RxbxCxV, head_VxD, preferred_element_type=wide)
    head_gradient_RxVxD += jnp.einsum("rbcv,rbcd->rvd", delta_RxbxCxV, hidden_RxbxCxD, preferred_element_type=wide)
    return (jax.tree.map(jnp.add, totals_R, losses_R), head_gradient_RxVxD), hidden_gradient.astype(hidden_BxLxD.dtype)

  start = ((_zeros(chunks[0], ()),) * (3 if teacher else 1), _zeros(chunks[0], head_VxD.shape))
  (totals_R, head_gradient_RxVxD), hidden_gradient_NxRxbxCxD = jax.lax.scan(chunk, start, chunks)
  P, X = _parts(hidden_BxLxD)
  split = jnp.moveaxis(
    hidden_gradient_NxRxbxCxD.reshape(-1, P, X, *hidden_gradient_NxRxbxCxD.shape[2:]), (0, 2), (3, 2)
  )
  whole = split.reshape(*split.shape[:3], -1, split.shape[-1])[..., : hidden_BxLxD.shape[1] // X, :]
  hidden_gradient_BxLxD = whole.reshape(hidden_BxLxD.shape)
  gradients = hidden_gradient_BxLxD, head_gradient_RxVxD.sum(0).astype(head_VxD.dtype)
  return jax.tree.map(jnp.sum, totals_R), gradients


def _backward(num_chunks, weight, gradients, upstream):
  del num_chunks, weight
  return tuple((upstream[0] * g).astype(g.dtype) for g in gradients) + (None, None, None)


chunked_losses.defvjp(_forward, _backward)
