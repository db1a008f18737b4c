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
  # q, k and v are put in the order of plain matrix products, so that a CPU doesn't reorder the scores, which are larger
  q_BxKxRxD = jnp.moveaxis(q_BxSxHxD.reshape(B, S, K, H // K, D), 1, 3).reshape(B, K, -1, D)  # R = G S
  k_BxKxTxD, v_BxKxTxD = (jnp.moveaxis(x_BxTxKxD, 1, 2) for x_BxTxKxD in (k_BxTxKxD, v_BxTxKxD))
  scores_BxKxRxT = jnp.einsum("bkrd,bktd->bkrt", q_BxKxRxD, k_BxKxTxD, preferred_element_type=wide) * scale
  scores_BxKxGxSxT = scores_BxKxRxT.reshape(B, K, -1, S, T)
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
  weights_BxKxRxT = weights_BxKxGxSxT.reshape(B, K, -1, T)
  out_BxKxRxD = jnp.einsum("bkrt,bktd->bkrd", weights_BxKxRxT, v_BxKxTxD, preferred_element_type=wide)
  out_BxSxKxGxD = jnp.moveaxis(out_BxKxRxD.reshape(B, K, -1, S, D), 3, 1)
  lse_BxSxH = jnp.moveaxis(lse_BxKxGxS.reshape(B, H, S), 1, 2)
  return out_BxSxKxGxD.reshape(B, S, H, D).astype(q_BxSxHxD.dtype), lse_BxSxH
