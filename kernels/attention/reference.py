"""Attention in plain JAX: the reference of every kernel, used where there is no kernel.

B batch, S query positions, T key positions, H query heads, K key/value heads, G = H / K, D head width.
"""

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.mask import Mask


def attention_reference(
  q_BxSxHxD: jax.Array,
  k_BxTxKxD: jax.Array,
  v_BxTxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxT: jax.Array | None,
  *,
  mask: Mask,
  scale: float,
  logits_soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """(softmax(scale q k^T) v [B, S, H, D] in the dtype of q, log-sum-exp [B, S, H] in float32 or wider).

  Query head h reads key/value head h // G. Scores, softmax and sums are float32 or wider. A row without
  keys is zero, and its log-sum-exp is -inf.
  """
  B, S, H, D = q_BxSxHxD.shape
  T, K = k_BxTxKxD.shape[1:3]
  wide = jnp.promote_types(q_BxSxHxD.dtype, jnp.float32)
  q_BxSxKxGxD = q_BxSxHxD.reshape(B, S, K, H // K, D)
  scores_BxKxGxSxT = jnp.einsum("bskgd,btkd->bkgst", q_BxSxKxGxD, k_BxTxKxD, preferred_element_type=wide) * scale
  if logits_soft_cap is not None:
    scores_BxKxGxSxT = logits_soft_cap * jnp.tanh(scores_BxKxGxSxT / logits_soft_cap)
  visible_1xSxT = mask.visible(jnp.arange(S)[:, None], jnp.arange(T)[None, :])[None]
  if q_segments_BxS is not None and kv_segments_BxT is not None:
    visible_1xSxT = visible_1xSxT & (q_segments_BxS[:, :, None] == kv_segments_BxT[:, None, :])
  visible_Bx1x1xSxT = visible_1xSxT[:, None, None]
  scores_BxKxGxSxT = jnp.where(visible_Bx1x1xSxT, scores_BxKxGxSxT, jnp.finfo(wide).min)
  weights_BxKxGxSxT = jax.nn.softmax(scores_BxKxGxSxT, axis=-1)
  lse_BxKxGxS = jax.nn.logsumexp(scores_BxKxGxSxT, axis=-1)
  if q_segments_BxS is not None or not mask.every_row_attends(S, T):
    some_Bx1x1xS = visible_Bx1x1xSxT.any(-1)
    weights_BxKxGxSxT = jnp.where(some_Bx1x1xS[..., None], weights_BxKxGxSxT, 0)
    lse_BxKxGxS = jnp.where(some_Bx1x1xS, lse_BxKxGxS, -jnp.inf)
  weights_BxKxGxSxT = weights_BxKxGxSxT.astype(v_BxTxKxD.dtype)
  out_BxSxKxGxD = jnp.einsum("bkgst,btkd->bskgd", weights_BxKxGxSxT, v_BxTxKxD, preferred_element_type=wide)
  lse_BxSxH = jnp.moveaxis(lse_BxKxGxS.reshape(B, H, S), 1, 2)
  return out_BxSxKxGxD.reshape(B, S, H, D).astype(q_BxSxHxD.dtype), lse_BxSxH
