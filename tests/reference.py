"""An independent NumPy float64 reference of the transformer with time-dependent weights.

Written from the mathematics alone, with plain loops where they are clearer than contractions.
Everything is converted to float64 on entry. Arrays carry their shape in their name:

  B batch          L positions                                    D embed_dim
  H query heads    K key/value heads                              G = H // K queries per key/value head
  C head_dim = D // H, Q = G + 2 slots of the fused qkv           F mlp_dim
  V vocabulary     S steps                                        T time_embed_dim
  M sinusoidal_dim P = 2M + 1 time features                       N groups (weight matrices and norms)

`w` is a nested dict of the block's weights at one time; `weights_S` is the same dict with a leading
axis S on every array. A norm's "scale" in `w` is the whole multiplier, 1 + sum_j e_j g_j: make it
with `generate(e_SxT, g_TxD, constant=np.ones(D))`.
"""

import numpy as np


def _f64(array):
  return np.asarray(array).astype(np.float64)


def _tree_map(function, tree):
  """Apply `function` to every array of a nested dict."""
  if isinstance(tree, dict):
    return {name: _tree_map(function, branch) for name, branch in tree.items()}
  return function(tree)


# Time: features, one small MLP per group, weights as combinations of a basis.


def fixed_frequencies(M):
  """w_k = 10000^(-k/M), k = 0..M-1 -> [M]."""
  return np.array([10000.0 ** (-k / M) for k in range(M)], dtype=np.float64)


def sinusoidal(times_S, frequencies_M, scale=1000.0):
  """s(t) = [t, sin(scale t w), cos(scale t w)] -> [S, 2M+1]."""
  times_S, frequencies_M = _f64(times_S), _f64(frequencies_M)
  angles_SxM = scale * times_S[:, None] * frequencies_M[None, :]
  return np.concatenate([times_S[:, None], np.sin(angles_SxM), np.cos(angles_SxM)], axis=1)


def time_vectors(features_SxP, mlp):
  """e = Linear2(silu(Linear1(s))), every group n with its own two layers -> [N, S, T]."""
  features_SxP = _f64(features_SxP)
  kernel1_NxPxT, bias1_NxT = _f64(mlp["kernel1"]), _f64(mlp["bias1"])
  kernel2_NxTxT, bias2_NxT = _f64(mlp["kernel2"]), _f64(mlp["bias2"])
  e_NxSxT = []
  for n in range(kernel1_NxPxT.shape[0]):
    hidden_SxT = silu(features_SxP @ kernel1_NxPxT[n] + bias1_NxT[n])
    e_NxSxT.append(hidden_SxT @ kernel2_NxTxT[n] + bias2_NxT[n])
  return np.stack(e_NxSxT)


def generate(e_SxT, basis_Tx, constant):
  """W(t) = sum_j e_j(t) F_j + F_0; `basis_Tx` is [T, ...] -> [S, ...]."""
  e_SxT, basis_Tx, constant = _f64(e_SxT), _f64(basis_Tx), _f64(constant)
  return np.stack([sum(e * basis for e, basis in zip(e_T, basis_Tx, strict=True)) + constant for e_T in e_SxT])


# Pointwise functions, norms, rotary positions.


def silu(x):
  """x sigmoid(x), the sigmoid as a tanh so that nothing overflows."""
  x = _f64(x)
  return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu(x):
  """The tanh approximation of GELU."""
  x = _f64(x)
  return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x_BxLxD, scale_D, shift_D, eps=1e-5):
  """LayerNorm over the last axis, biased variance."""
  x_BxLxD = _f64(x_BxLxD)
  centred_BxLxD = x_BxLxD - x_BxLxD.mean(axis=-1, keepdims=True)
  variance_BxLx1 = (centred_BxLxD**2).mean(axis=-1, keepdims=True)
  return centred_BxLxD / np.sqrt(variance_BxLx1 + eps) * _f64(scale_D) + _f64(shift_D)


def rms_norm(x_BxLxD, scale_D, eps=1e-6, shift_D=None):
  """RMSNorm over the last axis; some have a shift, sum_j e_j h_j."""
  x_BxLxD = _f64(x_BxLxD)
  square_BxLx1 = (x_BxLxD**2).mean(axis=-1, keepdims=True)
  scaled_BxLxD = x_BxLxD / np.sqrt(square_BxLx1 + eps) * _f64(scale_D)
  return scaled_BxLxD if shift_D is None else scaled_BxLxD + _f64(shift_D)


def rope(x_LxC, base=10000.0):
  """Rotate the pairs (i, i + C/2) of one head by position * base^(-2i/C), positions from 0."""
  x_LxC = _f64(x_LxC)
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


def _head(query_LxC, key_LxC, value_LxC):
  """Causal attention of one head: a position sees itself and those before -> [L, C]."""
  L, C = query_LxC.shape
  out_LxC = np.zeros((L, C))
  for position in range(L):
    scores_L = key_LxC[: position + 1] @ query_LxC[position] / np.sqrt(C)
    weights_L = np.exp(scores_L - scores_L.max())
    out_LxC[position] = (weights_L / weights_L.sum()) @ value_LxC[: position + 1]
  return out_LxC


def gpt_attention(x_BxLxD, w):
  """LayerNorm, fused qkv [D, K, G+2, C] (G queries, then key, then value), attention, output."""
  x_BxLxD, w = _f64(x_BxLxD), _tree_map(_f64, w)
  y_BxLxD = layer_norm(x_BxLxD, w["attention_norm"]["scale"], w["attention_norm"]["shift"])
  kernel_DxKxQxC, bias_KxQxC = w["qkv"]["kernel"], w["qkv"]["bias"]
  out_HxCxD = w["out"]["kernel"]
  K, G = kernel_DxKxQxC.shape[1], kernel_DxKxQxC.shape[2] - 2
  result_BxLxD = np.zeros_like(x_BxLxD) + w["out"]["bias"]
  for b in range(x_BxLxD.shape[0]):
    for k in range(K):
      slots = [y_BxLxD[b] @ kernel_DxKxQxC[:, k, q] + bias_KxQxC[k, q] for q in range(G + 2)]
      key_LxC, value_LxC = slots[G], slots[G + 1]
      for g in range(G):
        result_BxLxD[b] += _head(slots[g], key_LxC, value_LxC) @ out_HxCxD[k * G + g]
  return result_BxLxD


def gpt_feedforward(x_BxLxD, w):
  """LayerNorm, up, tanh-GELU, down, with biases."""
  x_BxLxD, w = _f64(x_BxLxD), _tree_map(_f64, w)
  y_BxLxD = layer_norm(x_BxLxD, w["mlp_norm"]["scale"], w["mlp_norm"]["shift"])
  hidden_BxLxF = gelu(y_BxLxD @ w["up"]["kernel"] + w["up"]["bias"])
  return hidden_BxLxF @ w["down"]["kernel"] + w["down"]["bias"]


def llama_attention(x_BxLxD, w):
  """RMSNorm, query/key/value, rotary positions on query and key, attention, output.

  Queries, keys and values may have biases; the query and the key of a head may be normalized before they are rotated.
  """
  x_BxLxD, w = _f64(x_BxLxD), _tree_map(_f64, w)
  y_BxLxD = rms_norm(x_BxLxD, w["attention_norm"]["scale"], shift_D=w["attention_norm"].get("shift"))
  query_DxHxC, key_DxKxC, value_DxKxC = w["query"]["kernel"], w["key"]["kernel"], w["value"]["kernel"]
  out_HxCxD = w["out"]["kernel"]
  H, K = query_DxHxC.shape[1], key_DxKxC.shape[1]
  G = H // K
  result_BxLxD = np.zeros_like(x_BxLxD)
  for b in range(x_BxLxD.shape[0]):
    for h in range(H):
      k = h // G
      query_LxC = y_BxLxD[b] @ query_DxHxC[:, h]
      key_LxC = y_BxLxD[b] @ key_DxKxC[:, k]
      value_LxC = y_BxLxD[b] @ value_DxKxC[:, k]
      if "bias" in w["query"]:
        query_LxC, key_LxC, value_LxC = (
          query_LxC + w["query"]["bias"][h],
          key_LxC + w["key"]["bias"][k],
          value_LxC + w["value"]["bias"][k],
        )
      if "query_norm" in w:
        query_LxC = rms_norm(query_LxC, w["query_norm"]["scale"])
        key_LxC = rms_norm(key_LxC, w["key_norm"]["scale"])
      query_LxC, key_LxC = rope(query_LxC), rope(key_LxC)
      result_BxLxD[b] += _head(query_LxC, key_LxC, value_LxC) @ out_HxCxD[h]
  return result_BxLxD


def llama_feedforward(x_BxLxD, w):
  """RMSNorm, SwiGLU: down(silu(gate x) * up x)."""
  x_BxLxD, w = _f64(x_BxLxD), _tree_map(_f64, w)
  y_BxLxD = rms_norm(x_BxLxD, w["mlp_norm"]["scale"], shift_D=w["mlp_norm"].get("shift"))
  hidden_BxLxF = silu(y_BxLxD @ w["gate"]["kernel"]) * (y_BxLxD @ w["up"]["kernel"])
  return hidden_BxLxF @ w["down"]["kernel"]


# The model: integration over time, logits, loss.


def integrate(x, weights_S, attention, feedforward, dts_S, sequential):
  """Euler steps; `sequential` lets the feed-forward branch read what attention has just written.

  `attention` and `feedforward` are functions of (x_BxLxD, w), such as `gpt_attention`.
  """
  x_BxLxD, dts_S = _f64(x), _f64(dts_S)
  for s, dt in enumerate(dts_S):
    w = _tree_map(lambda array_Sx: _f64(array_Sx)[s], weights_S)
    attended_BxLxD = x_BxLxD + dt * attention(x_BxLxD, w)
    x_BxLxD = attended_BxLxD + dt * feedforward(attended_BxLxD if sequential else x_BxLxD, w)
  return x_BxLxD


def logits(tokens_BxL, embedding_VxD, positions_LxD, weights_S, field, dts_S, sequential, final_norm, head_VxD):
  """Embed, integrate, final norm (eps 1e-5 for both fields), project -> [B, L, V].

  `field` is "gpt" or "llama"; `positions_LxD` (None for llama) may have more rows than L.
  """
  tokens_BxL = np.asarray(tokens_BxL)
  x_BxLxD = _f64(embedding_VxD)[tokens_BxL]
  if field == "gpt":
    x_BxLxD = x_BxLxD + _f64(positions_LxD)[: tokens_BxL.shape[1]]
    x_BxLxD = integrate(x_BxLxD, weights_S, gpt_attention, gpt_feedforward, dts_S, sequential)
    x_BxLxD = layer_norm(x_BxLxD, final_norm["scale"], final_norm["shift"], eps=1e-5)
  else:
    x_BxLxD = integrate(x_BxLxD, weights_S, llama_attention, llama_feedforward, dts_S, sequential)
    x_BxLxD = rms_norm(x_BxLxD, final_norm["scale"], eps=1e-5)
  return x_BxLxD @ _f64(head_VxD).T
