"""Attention in plain JAX: the reference of every kernel, used where there is no kernel.

B batch, S query positions, L key positions, H query heads, K key/value heads, G = H / K, D head width.
"""

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.mask import Mask


def attention_reference(
  q_BxSxHxD: jax.Array,
  k_BxLxKxD: jax.Array,
  v_BxLxKxD: jax.Array,
  q_segments_BxS: jax.Array | None,
  kv_segments_BxL: jax.Array | None,
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
  L, K = k_BxLxKxD.shape[1:3]
  wide = jnp.promote_types(q_BxSxHxD.dtype, jnp.float32)
  # q, k and v are put in the order of plain matrix products, so that a CPU doesn't reorder the scores, which are larger
  q_BxKxRxD = jnp.moveaxis(q_BxSxHxD.reshape(B, S, K, H // K, D), 1, 3).reshape(B, K, -1, D)  # R = G S
  k_BxKxLxD, v_BxKxLxD = (jnp.moveaxis(x_BxLxKxD, 1, 2) for x_BxLxKxD in (k_BxLxKxD, v_BxLxKxD))
  scores_BxKxRxL = jnp.einsum("bkrd,bktd->bkrt", q_BxKxRxD, k_BxKxLxD, preferred_element_type=wide) * scale
  scores_BxKxGxSxL = scores_BxKxRxL.reshape(B, K, -1, S, L)
  if logits_soft_cap is not None:
    scores_BxKxGxSxL = logits_soft_cap * jnp.tanh(scores_BxKxGxSxL / logits_soft_cap)
  visible_1xSxL = mask.visible(jnp.arange(S)[:, None], jnp.arange(L)[None, :])[None]
  if q_segments_BxS is not None and kv_segments_BxL is not None:
    visible_1xSxL = visible_1xSxL & (q_segments_BxS[:, :, None] == kv_segments_BxL[:, None, :])
  visible_Bx1x1xSxL = visible_1xSxL[:, None, None]
  scores_BxKxGxSxL = jnp.where(visible_Bx1x1xSxL, scores_BxKxGxSxL, jnp.finfo(wide).min)
  weights_BxKxGxSxL = jax.nn.softmax(scores_BxKxGxSxL, axis=-1)
  lse_BxKxGxS = jax.nn.logsumexp(scores_BxKxGxSxL, axis=-1)
  if q_segments_BxS is not None or not mask.every_row_attends(S, L):
    some_Bx1x1xS = visible_Bx1x1xSxL.any(-1)
    weights_BxKxGxSxL = jnp.where(some_Bx1x1xS[..., None], weights_BxKxGxSxL, 0)
    lse_BxKxGxS = jnp.where(some_Bx1x1xS, lse_BxKxGxS, -jnp.inf)
  weights_BxKxGxSxL = weights_BxKxGxSxL.astype(v_BxLxKxD.dtype)
  weights_BxKxRxL = weights_BxKxGxSxL.reshape(B, K, -1, L)
  out_BxKxRxD = jnp.einsum("bkrt,bktd->bkrd", weights_BxKxRxL, v_BxKxLxD, preferred_element_type=wide)
  out_BxSxKxGxD = jnp.moveaxis(out_BxKxRxD.reshape(B, K, -1, S, D), 3, 1)
  lse_BxSxH = jnp.moveaxis(lse_BxKxGxS.reshape(B, H, S), 1, 2)
  return out_BxSxKxGxD.reshape(B, S, H, D).astype(q_BxSxHxD.dtype), lse_BxSxH
