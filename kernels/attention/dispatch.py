"""The public function: checks the arguments and chooses the implementation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from diffeq_nnx.kernels.attention.mask import Mask
from diffeq_nnx.kernels.attention.reference import attention_reference
from diffeq_nnx.kernels.backend import find_backend

IMPLEMENTATIONS = ("auto", "reference", "pallas", "pallas_deterministic", "cudnn")
# for compiling ahead: the backend is not checked
WITHOUT_BACKEND = ("pallas_tpu", "pallas_gpu", "pallas_gpu_deterministic")
GPU_KERNEL_HEAD_DIM = 256  # the widest head of the GPU kernel


def choose(
  implementation: str | None = None,
  *,
  dtype: Any,
  head_dim: int,
  unsupported: str | None = None,
  backend: str | None = None,
) -> tuple[str, str]:
  """The implementation that `attention` uses, and the reason: (implementation, reason).

  Args:
    implementation: the requested one; None is auto.
    dtype: of q.
    head_dim: D.
    unsupported: another requested feature that cuDNN lacks, in words.
    backend: as JAX names it; None: the default one.

  Raises:
    ValueError: no such implementation, or it lacks a feature, or this backend does not support it.
  """
  backend = backend or find_backend()
  lacking = unsupported
  if dtype != jnp.bfloat16:
    lacking = f"dtype {jnp.dtype(dtype)}"
  elif head_dim % 8 or head_dim > 128:
    lacking = f"head width {head_dim}"
  elif backend == "gpu" and _capability() < 8:
    lacking = "fused attention for GPUs other than NVIDIA's from Ampere on"
  if implementation in (None, "auto"):
    if backend == "tpu" and dtype != jnp.float64:
      return "pallas", "the backend is a TPU"
    if backend != "gpu":
      return "reference", f"no kernel for the backend {backend!r}"
    problem = _what_the_gpu_kernel_lacks(dtype, head_dim, here=True)
    if problem is None:
      return "pallas", "the GPU is a Hopper GPU"
    if lacking is None:
      return "cudnn", f"the Pallas kernel {problem}"
    return "reference", f"the Pallas kernel {problem}; cuDNN has no {lacking}"
  if implementation not in IMPLEMENTATIONS + WITHOUT_BACKEND:
    raise ValueError(f"implementation={implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
  kernel = implementation.removesuffix("_deterministic")
  needed = {"pallas": ("tpu", "gpu"), "cudnn": ("gpu",)}.get(kernel, (backend,))
  problem = None
  if backend not in needed:
    problem = f"the backend is {backend!r}, this implementation needs {' or '.join(map(repr, needed))}"
  elif implementation == "cudnn" and lacking:
    problem = f"has no {lacking}"
  elif implementation.startswith("pallas") and dtype == jnp.float64:
    problem = "has no dtype float64"
  elif kernel == "pallas_gpu" or kernel == "pallas" and backend == "gpu":
    problem = _what_the_gpu_kernel_lacks(dtype, head_dim, here=kernel == "pallas")
  if problem:
    raise ValueError(f"implementation={implementation!r}: {problem}; use 'auto' or 'reference'")
  return implementation, "it was requested"


def _capability() -> float:
  """CUDA's compute capability of the first GPU: 8 for Ampere, 9 for Hopper; 9 without a GPU, 0 for one of AMD."""
  found = str(getattr(jax.devices()[0], "compute_capability", 9.0))
  return 0.0 if found.startswith("gfx") else float(found)


def _what_the_gpu_kernel_lacks(dtype: Any, head_dim: int, here: bool) -> str | None:
  """The first missing feature in words, or None; `here`: the kernel runs on this machine's GPU."""
  if jax.__version_info__ < (0, 11, 2):
    return f"needs jax 0.11.2 on a GPU; this is {jax.__version__}"
  if here and not 9 <= _capability() < 10:
    return f"needs a Hopper GPU, compute capability 9; this GPU's is {_capability() or 'none'}"
  if dtype != jnp.bfloat16:
    return f"has no dtype {jnp.dtype(dtype)} on a GPU"
  return f"has no head width {head_dim} on a GPU" if head_dim > GPU_KERNEL_HEAD_DIM else None


def attention(
  q_BxSxHxD: jax.Array,
  k_BxLxKxD: jax.Array,
  v_BxLxKxD: jax.Array,
  *,
  causal: bool = True,
  window: int | None = None,
  segment_ids: Any = None,
  scale: float | None = None,
  logits_soft_cap: float | None = None,
  return_lse: bool = False,
  deterministic: bool = False,
  implementation: str | None = None,
) -> Any:
  """softmax(scale q k^T) v over the keys that a query attends to; differentiable once, in reverse mode.

  Query head h reads key/value head h // (H / K). Softmax and sums are float32 (float64 for float64 input, which
  only the reference takes). A row without keys is zero.

  Limits of the kernels:

  - They support first-order reverse-mode differentiation only; the reference supports higher orders and forward mode.
  - The gradient of the scores is a difference of two rounded sums. Where one weight of a row is 1, it is rounding
    instead of zero, which counts only for very large q and k.
  - TPU: heads of 64 lie two to a block of 128 lanes, heads of 32 four, and each costs the arithmetic of a head of 128.
    Shared key/value heads are copied for that. Where two (four) does not divide the number of heads, or of query heads
    that share a key/value head, each head is padded to 128 and copied. So are other widths, such as 80 and 96.
  - TPU: without a soft cap, q is multiplied by the scale and log2 e and rounded to its dtype before the product with k.
  - TPU: block sizes don't depend on the chip, except on v4, which has 16 MiB of VMEM. Ahead of time, v4 is recognized
    under `jax.shard_map` only, and long sequences don't compile for it otherwise.
  - TPU: gradients of more than 8,448 positions of width 128 in bfloat16 are computed in chunks, which write their parts
    of dK and dV in float32. With grouped heads, each query head writes such a part.
  - GPU: Hopper only, since Blackwell lacks its matrix instructions. Block sizes were derived, not tuned. Heads are
    padded to multiples of 16; 48 and 112 take two passes. One pass takes a float32 array of the size of dQ.
  - GPU: with grouped heads there are as many blocks of threads as tiles of keys and key/value heads, which may be fewer
    than multiprocessors.

  Args:
    q_BxSxHxD: queries, float32 or bfloat16.
    k_BxLxKxD: keys; K divides H.
    v_BxLxKxD: values.
    causal: query i attends to keys up to i.
    window: query i attends to keys above i - window, at least 1: itself included. If not `causal`, any integer: keys
      that lie n positions before the queries are seen through the window w with `window=w - n`.
    segment_ids: integers [B, S], or a pair ([B, S], [B, L]): a query attends to keys of its own segment only.
    scale: of the scores; None: D^-0.5.
    logits_soft_cap: c: scaled scores s become c tanh(s / c).
    return_lse: also return the log of each row's softmax denominator, [B, S, H], float32; -inf for a row
      without keys.
    deterministic: sums in the gradients have a fixed order, so that they are the same in each run; the kernel then
      takes two passes on a GPU, and `auto` does not take cuDNN.
    implementation: auto (or None), reference, pallas, pallas_deterministic (pallas with `deterministic`) or cudnn.
      `pallas_tpu`, `pallas_gpu` and `pallas_gpu_deterministic` are for compiling ahead: the backend is not checked.

  Returns:
    [B, S, H, D] in the dtype of q, and with `return_lse` a pair of that and the log-sum-exp.

  Raises:
    ValueError: inconsistent arguments, or an implementation that the backend does not support.
  """
  q_segments_BxS, kv_segments_BxL = _segments(segment_ids)
  _check(q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, q_segments_BxS, kv_segments_BxL, causal, window, scale, logits_soft_cap)
  if window is not None:  # one that hides no key is none, and one that hides all could leave the kernels' integers
    S, L = q_BxSxHxD.shape[1], k_BxLxKxD.shape[1]
    window = None if window >= S else max(window, -L)
  mask = Mask(causal, window)
  scale = q_BxSxHxD.shape[-1] ** -0.5 if scale is None else float(scale)
  unsupported = _what_cudnn_lacks(
    q_BxSxHxD, k_BxLxKxD, q_segments_BxS, kv_segments_BxL, mask, logits_soft_cap, return_lse, deterministic
  )
  chosen, _ = choose(implementation, dtype=q_BxSxHxD.dtype, head_dim=q_BxSxHxD.shape[-1], unsupported=unsupported)
  if chosen == "cudnn":
    return _cudnn(q_BxSxHxD, k_BxLxKxD, v_BxLxKxD, q_segments_BxS, mask, scale)
  out_BxSxHxD, lse_BxSxH = _function(chosen, deterministic)(
    q_BxSxHxD,
    k_BxLxKxD,
    v_BxLxKxD,
    q_segments_BxS,
    kv_segments_BxL,
    mask=mask,
    scale=scale,
    logits_soft_cap=logits_soft_cap,
  )
  return (out_BxSxHxD, lse_BxSxH) if return_lse else out_BxSxHxD


def _function(chosen: str, deterministic: bool):
  """The implementation, imported at its first use, since each needs its own part of Pallas."""
  if chosen == "reference":
    return attention_reference
  kernel = chosen.removesuffix("_deterministic")
  if kernel == "pallas_gpu" or (kernel == "pallas" and find_backend() == "gpu"):
    from diffeq_nnx.kernels.attention.gpu import attention_gpu

    return functools.partial(attention_gpu, deterministic=deterministic or kernel != chosen)
  from diffeq_nnx.kernels.attention.tpu import attention_tpu

  return attention_tpu


def _segments(segment_ids):
  if segment_ids is None or not isinstance(segment_ids, (tuple, list)):
    return segment_ids, segment_ids
  if len(segment_ids) != 2:
    raise ValueError(f"segment_ids: {len(segment_ids)} arrays; must be one [B, S], or a pair for queries and keys")
  return tuple(segment_ids)


def _check(q, k, v, q_segments, kv_segments, causal, window, scale, logits_soft_cap) -> None:
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.ndim != 4:
      raise ValueError(f"{name}: shape {x.shape}; must have 4 axes: batch, position, head, head width")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
      raise ValueError(f"{name}: dtype {x.dtype}; must be float32 or bfloat16")
    if x.dtype != q.dtype:
      raise ValueError(f"{name}: dtype {x.dtype}; must be that of q, {q.dtype}")
    if 0 in x.shape:
      raise ValueError(f"{name}: shape {x.shape}; no axis may be empty")
  B, S, H, D = q.shape
  L, K = k.shape[1:3]
  for name, x, shape in (("k", k, (B, L, K, D)), ("v", v, (B, L, K, D))):
    if x.shape != shape:
      raise ValueError(f"{name}: shape {x.shape}; with q {q.shape} and k {k.shape} it must be {shape}")
  if H % K:
    raise ValueError(f"k: {K} heads; must divide the {H} heads of q")
  if (q_segments is None) != (kv_segments is None):
    raise ValueError("segment_ids: one of the pair is None; give both, or None for no segments")
  for name, ids, shape in (("queries", q_segments, (B, S)), ("keys", kv_segments, (B, L))):
    if ids is not None and (ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer)):
      raise ValueError(f"segment_ids of {name}: {ids.dtype} {ids.shape}; must be integers {shape}")
  if window is not None and (not isinstance(window, int) or (causal and window < 1)):
    raise ValueError(
      f"window={window!r}: must be an integer, with causal=True of at least 1 (a query attends to itself)"
    )
  for name, value in (("scale", scale), ("logits_soft_cap", logits_soft_cap)):
    if value is not None and not (math.isfinite(value) and value > 0):
      raise ValueError(f"{name}={value}: must be above 0")


def _what_cudnn_lacks(
  q, k, q_segments, kv_segments, mask: Mask, logits_soft_cap, return_lse, deterministic
) -> str | None:
  """The first feature that jax.nn.dot_product_attention lacks with cuDNN, or None."""
  if mask.window is not None and not mask.causal:
    return "window without a causal mask"
  if q.shape[1] % 2 or k.shape[1] % 2:
    return "an odd number of positions"  # whose gradients it lacks
  if mask.causal and q.shape[1] != k.shape[1]:
    return f"causal mask over {q.shape[1]} queries and {k.shape[1]} keys"
  if q_segments is not kv_segments:
    return "segment ids of keys that differ from the queries'"
  if logits_soft_cap is not None:
    return "soft cap"
  if deterministic:
    return "deterministic gradients"  # their order is left to a flag of XLA's
  return "log-sum-exp" if return_lse else None


def _cudnn(q, k, v, segments_BxS, mask: Mask, scale: float):
  same_Bx1xSxS = None if segments_BxS is None else (segments_BxS[:, :, None] == segments_BxS[:, None, :])[:, None]
  window = None if mask.window is None else (mask.window - 1, 0)
  return jax.nn.dot_product_attention(
    q, k, v, mask=same_Bx1xSxS, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
  )
