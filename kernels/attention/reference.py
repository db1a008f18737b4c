"""Attention in plain JAX: what every kernel must agree with.

B batch, S query positions, T key positions, H query heads, K key/value heads, G = H / K, D head width.
"""

import jax
import jax.numpy as jnp


def attention_reference(q_BxSxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array, *,
                        causal: bool = True) -> jax.Array:
  """softmax(q k^T / sqrt(D)) v, shape [B, S, H, D], in the dtype of q.

  Query head h reads key/value head h // G. Scores, softmax and sums are float32 or wider.
  """
  B, S, H, D = q_BxSxHxD.shape
  T, K = k_BxTxKxD.shape[1:3]
  wide = jnp.promote_types(q_BxSxHxD.dtype, jnp.float32)
  q_BxSxKxGxD = q_BxSxHxD.reshape(B, S, K, H // K, D)
  scores_BxKxGxSxT = jnp.einsum("bskgd,btkd->bkgst", q_BxSxKxGxD, k_BxTxKxD, preferred_element_type=wide)
  scores_BxKxGxSxT = scores_BxKxGxSxT * D**-0.5
  if causal:
    seen_SxT = jnp.arange(S)[:, None] >= jnp.arange(T)[None, :]
    scores_BxKxGxSxT = jnp.where(seen_SxT[None, None, None], scores_BxKxGxSxT, jnp.finfo(wide).min)
  weights_BxKxGxSxT = jax.nn.softmax(scores_BxKxGxSxT, axis=-1).astype(v_BxTxKxD.dtype)
  out_BxSxKxGxD = jnp.einsum("bkgst,btkd->bskgd", weights_BxKxGxSxT, v_BxTxKxD, preferred_element_type=wide)
  return out_BxSxKxGxD.reshape(B, S, H, D).astype(q_BxSxHxD.dtype)
