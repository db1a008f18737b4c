"""Attention of one new token of each row to the keys and values of its row, which lie in a ring of slots.

B rows, H query heads, K key/value heads, G = H / K, P slots, D head width.
"""

import functools

import jax
import jax.numpy as jnp

ROWS_OF_A_PRODUCT = 8  # below which the TPU compiler computes products on the vector unit, at a fraction of the speed


def decode_attention(
  q_BxHxD: jax.Array,
  keys_BxKxPxD: jax.Array,
  values_BxKxPxD: jax.Array,
  slot: jax.Array,
  next_B: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """softmax(D^-0.5 q k^T) v over the slots that hold a token of the row, [B, H, D]; sums are in float32 or wider.

  A slot holds the token that is as many positions before the newest one as the slot is before `slot`, going around;
  there is none if that position is below 0.

  Args:
    q_BxHxD: the newest token's queries.
    keys_BxKxPxD: of all slots, the newest token's included; K divides H.
    values_BxKxPxD: the same of values.
    slot: of the newest token, [], in all rows.
    next_B: position of the newest token in each row.
    implementation: as in `attention`: where that is the TPU kernel, this is one too if D is a multiple of 128, and P
      of 16.
  """
  by_backend = implementation in ("auto", "pallas", "pallas_deterministic")
  on_tpu = implementation == "pallas_tpu" or (by_backend and jax.default_backend() == "tpu")
  P, D = keys_BxKxPxD.shape[2:]
  if on_tpu and D % 128 == 0 and P % 16 == 0 and q_BxHxD.dtype != jnp.float64:
    from diffeq_nnx.kernels.attention.tpu_decode import decode_tpu

    return decode_tpu(q_BxHxD, keys_BxKxPxD, values_BxKxPxD, slot, next_B)
  return decode_reference(q_BxHxD, keys_BxKxPxD, values_BxKxPxD, slot, next_B)


def decode_reference(
  q_BxHxD: jax.Array, keys_BxKxPxD: jax.Array, values_BxKxPxD: jax.Array, slot: jax.Array, next_B: jax.Array
) -> jax.Array:
  """As `decode_attention`, in plain JAX; products are made for several equal queries on a TPU."""
  K, P = keys_BxKxPxD.shape[1:3]
  ages_P = (slot - jnp.arange(P, dtype=jnp.int32)) % P
  held_BxP = next_B[:, None] >= ages_P[None]
  copies = -(-ROWS_OF_A_PRODUCT * K // q_BxHxD.shape[1])
  single, several = (functools.partial(_attend, copies=count) for count in (1, copies))
  return jax.lax.platform_dependent(q_BxHxD, keys_BxKxPxD, values_BxKxPxD, held_BxP, tpu=several, default=single)


def _attend(q_BxHxD, keys_BxKxPxD, values_BxKxPxD, held_BxP, *, copies: int) -> jax.Array:
  B, H, D = q_BxHxD.shape
  K = keys_BxKxPxD.shape[1]

  def product(rows_BxKxGxN: jax.Array, equation: str, matrices: jax.Array) -> jax.Array:
    """The copies' results are equal: a maximum takes one of them, within the product."""
    several = jnp.broadcast_to(rows_BxKxGxN[..., None, :], (*rows_BxKxGxN.shape[:3], copies, rows_BxKxGxN.shape[3]))
    wide = jnp.promote_types(several.dtype, jnp.float32)
    return jnp.einsum(equation, several, matrices, preferred_element_type=wide).max(axis=3)

  scores_BxKxGxP = product(q_BxHxD.reshape(B, K, H // K, D), "bkgsd,bkpd->bkgsp", keys_BxKxPxD) * D**-0.5
  scores_BxKxGxP = jnp.where(held_BxP[:, None, None], scores_BxKxGxP, jnp.finfo(scores_BxKxGxP.dtype).min)
  weights_BxKxGxP = jax.nn.softmax(scores_BxKxGxP, axis=-1).astype(q_BxHxD.dtype)
  out_BxKxGxD = product(weights_BxKxGxP, "bkgsp,bkpd->bkgsd", values_BxKxPxD)
  return out_BxKxGxD.astype(q_BxHxD.dtype).reshape(B, H, D)
