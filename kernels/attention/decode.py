"""Attention of one or a few new tokens of each row to the keys and values of its row, which lie in a ring of slots.

B rows, Q new tokens, H query heads, K key/value heads, G = H / K, P slots, D head width.
"""

import functools

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.backend import takes_tpu_kernel

ROWS_OF_A_PRODUCT = 8  # below which the TPU compiler computes products on the vector unit, at a fraction of the speed


def decode_attention(
  q_BxHxQxD: jax.Array,
  keys_BxKxPxD: jax.Array,
  values_BxKxPxD: jax.Array,
  slot: jax.Array,
  next_B: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """Causal softmax(D^-0.5 q k^T) v over the row's tokens, [B, H, Q, D]; sums are in float32 or wider.

  A slot holds the token that is as many positions before the first new one as the slot is before `slot`, going around;
  there is none if that position is below 0. The other new tokens are in the slots that follow.

  Args:
    q_BxHxQxD: the new tokens' queries.
    keys_BxKxPxD: of all slots, the new tokens' included; K divides H.
    values_BxKxPxD: values of all slots.
    slot: of the first new token, [] in all rows, or [B].
    next_B: position of the first new token in each row.
    implementation: as in `attention`: where that is the TPU kernel, this is one too if D is a multiple of 128, and P
      of 16.
  """
  P, D = keys_BxKxPxD.shape[2:]
  if takes_tpu_kernel(implementation) and D % 128 == 0 and P % 16 == 0 and q_BxHxQxD.dtype != jnp.float64:
    from diffeq_nnx.kernels.attention.tpu_decode import decode_tpu

    return decode_tpu(q_BxHxQxD, keys_BxKxPxD, values_BxKxPxD, slot, next_B)
  return decode_reference(q_BxHxQxD, keys_BxKxPxD, values_BxKxPxD, slot, next_B)


def decode_reference(
  q_BxHxQxD: jax.Array, keys_BxKxPxD: jax.Array, values_BxKxPxD: jax.Array, slot: jax.Array, next_B: jax.Array
) -> jax.Array:
  """As `decode_attention`, in plain JAX; products are made for several equal queries on a TPU."""
  (H, Q), (K, P) = q_BxHxQxD.shape[1:3], keys_BxKxPxD.shape[1:3]
  ages_BxP = (slot.reshape(-1, 1) + (Q - 1) - jnp.arange(P, dtype=jnp.int32)[None]) % P  # the newest token's is 0
  youngest_Q = Q - 1 - jnp.arange(Q, dtype=jnp.int32)
  visible_BxQxP = (ages_BxP[:, None] >= youngest_Q[None, :, None]) & (ages_BxP < next_B[:, None] + Q)[:, None]
  copies = -(-ROWS_OF_A_PRODUCT * K // (H * Q))
  single, several = (functools.partial(_attend, copies=count) for count in (1, copies))
  return jax.lax.platform_dependent(q_BxHxQxD, keys_BxKxPxD, values_BxKxPxD, visible_BxQxP, tpu=several, default=single)


def _attend(q_BxHxQxD, keys_BxKxPxD, values_BxKxPxD, visible_BxQxP, *, copies: int) -> jax.Array:
  """N = G Q rows for each key head."""
  B, H, Q, D = q_BxHxQxD.shape
  K, P = keys_BxKxPxD.shape[1:3]

  def product(rows_BxKxNxM: jax.Array, equation: str, matrices: jax.Array) -> jax.Array:
    """The copies' results are equal: a maximum takes one of them, within the product."""
    several = jnp.broadcast_to(rows_BxKxNxM[..., None, :], (*rows_BxKxNxM.shape[:3], copies, rows_BxKxNxM.shape[3]))
    wide = jnp.promote_types(several.dtype, jnp.float32)
    return jnp.einsum(equation, several, matrices, preferred_element_type=wide).max(axis=3)

  scores_BxKxNxP = product(q_BxHxQxD.reshape(B, K, -1, D), "bknsd,bkpd->bknsp", keys_BxKxPxD) * D**-0.5
  scores_BxHxQxP = scores_BxKxNxP.reshape(B, H, Q, P)
  scores_BxHxQxP = jnp.where(visible_BxQxP[:, None], scores_BxHxQxP, jnp.finfo(scores_BxHxQxP.dtype).min)
  weights_BxHxQxP = jax.nn.softmax(scores_BxHxQxP, axis=-1).astype(q_BxHxQxD.dtype)
  out_BxKxNxD = product(weights_BxHxQxP.reshape(B, K, -1, P), "bknsp,bkpd->bknsd", values_BxKxPxD)
  return out_BxKxNxD.astype(q_BxHxQxD.dtype).reshape(B, H, Q, D)
