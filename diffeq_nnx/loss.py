"""Cross-entropy that never holds the logits of all positions at one time.

B batch, L positions, N chunks, C = L / N positions a chunk, D embed_dim, V vocab_size.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_cross_entropy(hidden_BxLxD: jax.Array, head_VxD: jax.Array, targets_BxL: jax.Array,
                          mask_BxL: jax.Array, num_chunks: int) -> jax.Array:
  """Sum over positions of mask * -log softmax(hidden head^T)[target], a scalar in float32 or wider, nats.

  Works on L / num_chunks positions of all sequences at a time, so that a batch sharded over devices stays
  so. Logits are accumulated in float32 or wider. Where a gradient is wanted, the forward pass makes it
  chunk by chunk while the logits are at hand: three matrix products a chunk, no second look. Memory beyond
  the gradients themselves is a few arrays of [B, C, V].

  Args:
    hidden_BxLxD: the model's last hidden state.
    head_VxD: the output head.
    targets_BxL: token ids.
    mask_BxL: weight of each position, usually 0 or 1; not differentiated.
    num_chunks: must divide L.

  Raises:
    ValueError: num_chunks does not divide L.
  """
  def chunk(total, args):
    loss, _, _ = _chunk_loss(head_VxD, *args)
    return total + loss, None

  total, _ = jax.lax.scan(chunk, _zero(hidden_BxLxD), _chunks((hidden_BxLxD, targets_BxL, mask_BxL), num_chunks))
  return total


def _zero(x: jax.Array) -> jax.Array:
  return jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))


def _chunks(arrays, num_chunks: int):
  """[B, L, ...] -> [N, B, C, ...] for each array."""
  length = arrays[0].shape[1]
  if length % num_chunks:
    raise ValueError(f"num_chunks={num_chunks}: must divide the sequence length {length}")
  return tuple(jnp.moveaxis(a.reshape(a.shape[0], num_chunks, -1, *a.shape[2:]), 1, 0) for a in arrays)


def _chunk_loss(head_VxD, hidden_BxCxD, targets_BxC, mask_BxC):
  wide = jnp.promote_types(hidden_BxCxD.dtype, jnp.float32)
  logits_BxCxV = jnp.einsum("bcd,vd->bcv", hidden_BxCxD, head_VxD, preferred_element_type=wide)
  normalizer_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
  picked_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
  return jnp.sum(mask_BxC * (normalizer_BxC - picked_BxC)), logits_BxCxV, normalizer_BxC


def _forward(hidden_BxLxD, head_VxD, targets_BxL, mask_BxL, num_chunks):
  wide = jnp.promote_types(hidden_BxLxD.dtype, jnp.float32)

  def chunk(carry, args):
    total, head_gradient_VxD = carry
    hidden_BxCxD, targets_BxC, mask_BxC = args
    loss, logits_BxCxV, normalizer_BxC = _chunk_loss(head_VxD, *args)
    hits_BxCxV = targets_BxC[..., None] == jnp.arange(head_VxD.shape[0])[None, None]
    delta_BxCxV = (jnp.exp(logits_BxCxV - normalizer_BxC[..., None]) - hits_BxCxV) * mask_BxC[..., None]
    delta_BxCxV = delta_BxCxV.astype(hidden_BxLxD.dtype)
    hidden_gradient_BxCxD = jnp.einsum("bcv,vd->bcd", delta_BxCxV, head_VxD, preferred_element_type=wide)
    head_gradient_VxD += jnp.einsum("bcv,bcd->vd", delta_BxCxV, hidden_BxCxD, preferred_element_type=wide)
    return (total + loss, head_gradient_VxD), hidden_gradient_BxCxD.astype(hidden_BxLxD.dtype)

  start = (_zero(hidden_BxLxD), jnp.zeros(head_VxD.shape, wide))
  (total, head_gradient_VxD), hidden_gradient_NxBxCxD = jax.lax.scan(
      chunk, start, _chunks((hidden_BxLxD, targets_BxL, mask_BxL), num_chunks))
  hidden_gradient_BxLxD = jnp.moveaxis(hidden_gradient_NxBxCxD, 0, 1).reshape(hidden_BxLxD.shape)
  return total, (hidden_gradient_BxLxD, head_gradient_VxD.astype(head_VxD.dtype))


def _backward(num_chunks, gradients, upstream):
  del num_chunks
  return tuple((upstream * g).astype(g.dtype) for g in gradients) + (None, None)


chunked_cross_entropy.defvjp(_forward, _backward)
