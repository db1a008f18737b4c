"""An independent NumPy float64 reference of the transformer with time-dependent weights.

Written from the mathematics alone, with plain loops where they are clearer than contractions. Arrays are float64 and
carry their shape in their name:

  B batch          L positions                                    D embed_dim
  H query heads    K key/value heads                              G = H // K queries per key/value head
  C head_dim = D // H, Q = G + 2 slots of the fused qkv           F mlp_dim
  V vocabulary     S steps                                        T time_embed_dim
  M sinusoidal_dim P = 2M + 1 time features                       N groups (weight matrices and norms)

`w` is a nested dict of the block's weights at one time. A norm's "scale" in it is the whole multiplier,
1 + sum_j e_j g_j: `generate(e_SxT, g_TxD, constant=np.ones(D))`.
"""

import numpy as np

# Time: features, one small MLP per group, weights as combinations of a basis.


def fixed_frequencies(M):
  """w_k = 10000^(-k/M), k = 0..M-1 -> [M]."""
  return np.array([10000.0 ** (-k / M) for k in range(M)])


def sinusoidal(times_S, frequencies_M, scale):
  """s(t) = [t, sin(scale t w), cos(scale t w)] -> [S, 2M+1]."""
  angles_SxM = scale * times_S[:, None] * frequencies_M[None, :]
  return np.concatenate([times_S[:, None], np.sin(angles_SxM), np.cos(angles_SxM)], axis=1)


def time_vectors(features_SxP, mlp):
  """e = Linear2(silu(Linear1(s))), every group n with its own two layers -> [N, S, T]."""
  e_NxSxT = []
  for kernel1_PxT, bias1_T, kernel2_TxT, bias2_T in zip(mlp["kernel1"], mlp["bias1"], mlp["kernel2"], mlp["bias2"]):
    e_NxSxT.append(silu(features_SxP @ kernel1_PxT + bias1_T) @ kernel2_TxT + bias2_T)
  return np.stack(e_NxSxT)


def generate(e_SxT, basis_Tx, constant):
  """W(t) = sum_j e_j(t) F_j + F_0; `basis_Tx` is [T, ...] -> [S, ...]."""
  return np.stack([sum(e * basis for e, basis in zip(e_T, basis_Tx, strict=True)) + constant for e_T in e_SxT])


# Pointwise functions, norms, rotary positions.


def silu(x):
  """x sigmoid(x), the sigmoid as a tanh so that nothing overflows."""
  return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu(x):
  """The tanh approximation of GELU."""
  return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x_BxLxD, norm, eps=1e-5):
  """LayerNorm over the last axis, biased variance."""
  centred_BxLxD = x_BxLxD - x_BxLxD.mean(axis=-1, keepdims=True)
  variance_BxLx1 = (centred_BxLxD**2).mean(axis=-1, keepdims=True)
  return centred_BxLxD / np.sqrt(variance_BxLx1 + eps) * norm["scale"] + norm["shift"]


def rms_norm(x_BxLxD, norm, eps=1e-6):
  """RMSNorm over the last axis; some have a shift, sum_j e_j h_j."""
  square_BxLx1 = (x_BxLxD**2).mean(axis=-1, keepdims=True)
  return x_BxLxD / np.sqrt(square_BxLx1 + eps) * norm["scale"] + norm.get("shift", 0.0)


def rope(x_LxC, base=10000.0):
  """Rotate the pairs (i, i + C/2) of one head by position * base^(-2i/C), positions from 0."""
  L, C = x_LxC.shape
  out_LxC = np.empty_like(x_LxC)
  for position in range(L):
    for i in range(C // 2):
      angle = position * base ** (-2.0 * i / C)
      a, b = x_LxC[position, i], x_LxC[position, i + C // 2]
      out_LxC[position, i] = a * np.cos(angle) - b * np.sin(angle)
      out_LxC[position, i + C // 2] = b * np.cos(angle) + a * np.sin(angle)
  return out_LxC


# The branches, each with its norm at the beginning.


def head(query_LxC, key_LxC, value_LxC):
  """Causal attention of one head: a position sees itself and those before -> [L, C]."""
  L, C = query_LxC.shape
  out_LxC = np.zeros((L, C))
  for position in range(L):
    scores_L = key_LxC[: position + 1] @ query_LxC[position] / np.sqrt(C)
    weights_L = np.exp(scores_L - scores_L.max())
    out_LxC[position] = (weights_L / weights_L.sum()) @ value_LxC[: position + 1]
  return out_LxC


def attention(y_BxLxD, w, rotate=lambda x_LxC: x_LxC):
  """Query, key and value of each head, normalized where there is a norm, and rotated; attention, output.

  Queries, keys and values may have biases, and so may the output.
  """
  out_HxCxD = w["out"]["kernel"]
  G = len(out_HxCxD) // w["key"]["kernel"].shape[1]
  result_BxLxD = np.zeros_like(y_BxLxD) + w["out"].get("bias", 0.0)

  def project(name, b, h):
    part_LxC = y_BxLxD[b] @ w[name]["kernel"][:, h]
    if "bias" in w[name]:
      part_LxC = part_LxC + w[name]["bias"][h]
    return rms_norm(part_LxC, w[f"{name}_norm"]) if f"{name}_norm" in w else part_LxC

  for b in range(len(y_BxLxD)):
    for h in range(len(out_HxCxD)):
      query_LxC, key_LxC, value_LxC = project("query", b, h), project("key", b, h // G), project("value", b, h // G)
      result_BxLxD[b] += head(rotate(query_LxC), rotate(key_LxC), value_LxC) @ out_HxCxD[h]
  return result_BxLxD


def gpt_attention(x_BxLxD, w):
  """LayerNorm, attention with fused qkv [D, K, G+2, C]: G queries, then key, then value."""
  queries = {name: part[..., :-2, :].reshape(*part.shape[:-3], -1, part.shape[-1]) for name, part in w["qkv"].items()}
  keys, values = ({name: part[..., slot, :] for name, part in w["qkv"].items()} for slot in (-2, -1))
  y_BxLxD = layer_norm(x_BxLxD, w["attention_norm"])
  return attention(y_BxLxD, {**w, "query": queries, "key": keys, "value": values})


def gpt_feedforward(x_BxLxD, w):
  """LayerNorm, up, tanh-GELU, down, with biases."""
  y_BxLxD = layer_norm(x_BxLxD, w["mlp_norm"])
  return gelu(y_BxLxD @ w["up"]["kernel"] + w["up"]["bias"]) @ w["down"]["kernel"] + w["down"]["bias"]


def llama_attention(x_BxLxD, w):
  """RMSNorm, attention with rotary positions on query and key."""
  return attention(rms_norm(x_BxLxD, w["attention_norm"]), w, rope)


def llama_feedforward(x_BxLxD, w):
  """RMSNorm, SwiGLU: down(silu(gate x) * up x)."""
  y_BxLxD = rms_norm(x_BxLxD, w["mlp_norm"])
  return (silu(y_BxLxD @ w["gate"]["kernel"]) * (y_BxLxD @ w["up"]["kernel"])) @ w["down"]["kernel"]


def logits(tokens_BxL, params, weights, field, dts_S, sequential):
  """Embed, integrate by Euler steps, final norm (eps 1e-5 for both fields), project -> [B, L, V].

  `field` is "gpt" or "llama". `weights` are the block's, with a leading axis S. `sequential` lets the feed-forward
  branch read what attention has just written.
  """
  gpt = field == "gpt"
  attend, feedforward = (gpt_attention, gpt_feedforward) if gpt else (llama_attention, llama_feedforward)
  x_BxLxD = params["embedding"][tokens_BxL]
  if gpt:
    x_BxLxD = x_BxLxD + params["positions"][: tokens_BxL.shape[1]]
  for s, dt in enumerate(dts_S):
    w = {group: {name: leaf_Sx[s] for name, leaf_Sx in leaves.items()} for group, leaves in weights.items()}
    attended_BxLxD = x_BxLxD + dt * attend(x_BxLxD, w)
    x_BxLxD = attended_BxLxD + dt * feedforward(attended_BxLxD if sequential else x_BxLxD, w)
  x_BxLxD = (layer_norm if gpt else rms_norm)(x_BxLxD, params["final_norm"], eps=1e-5)
  return x_BxLxD @ params.get("head", params["embedding"]).T
