"""The vector fields: pure functions of the state and the weights at one time.

B batch, L positions, D embed_dim, H query heads, K key/value heads, G = H / K, C head_dim, F mlp_dim.

Every kernel is a matrix [in, out] with heads concatenated, so that it fills a TPU's tiles and can be split along its
first axis over any number of devices.
"""

import abc
import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.config_model import FAMILIES
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.attention_context import AttentionContext, Packing, rotate_heads
from diffeq_nnx.model.cpu_kernels import OutputFirst
from diffeq_nnx.model.weight_sources import BlockSpecs, Heads, LeafSpec

Weights = dict[str, dict[str, jax.Array]]  # BlockWeights at one time: no leading axis

STD = 0.02  # standard deviation of a plain model's kernels and embeddings (GPT-2)


def _once(x: jax.Array) -> jax.Array:
  """x, which XLA then computes once, and not again inside each product that reads it."""
  return jax.lax.optimization_barrier(x)


def layer_norm(x_BxLxD: jax.Array, scale_D: jax.Array, shift_D: jax.Array, eps: float) -> jax.Array:
  """LayerNorm over the last axis, computed in float32 or wider, returned in the dtype of x."""
  wide_BxLxD = x_BxLxD.astype(jnp.promote_types(x_BxLxD.dtype, jnp.float32))
  centered_BxLxD = wide_BxLxD - wide_BxLxD.mean(-1, keepdims=True)
  return rms_norm(centered_BxLxD, scale_D, eps, shift_D).astype(x_BxLxD.dtype)


def rms_norm(x_BxLxD: jax.Array, scale_D: jax.Array, eps: float, shift_D: jax.Array | None = None) -> jax.Array:
  """RMSNorm over the last axis, computed in float32 or wider, returned in the dtype of x."""
  wide_BxLxD = x_BxLxD.astype(jnp.promote_types(x_BxLxD.dtype, jnp.float32))
  normed_BxLxD = wide_BxLxD * jax.lax.rsqrt(jnp.square(wide_BxLxD).mean(-1, keepdims=True) + eps)
  scaled_BxLxD = normed_BxLxD * scale_D[None, None]
  return (scaled_BxLxD if shift_D is None else scaled_BxLxD + shift_D[None, None]).astype(x_BxLxD.dtype)


def _add_bias(x_BxLxN: jax.Array, bias_N: jax.Array) -> jax.Array:
  """x + bias, [B, L, N]; the gradient of the bias is summed over tokens in float32 or wider."""
  wide = jnp.promote_types(x_BxLxN.dtype, jnp.float32)
  return (x_BxLxN.astype(wide) + bias_N.astype(wide)[None, None]).astype(x_BxLxN.dtype)


def _out_std(model: config_lib.ModelConfig) -> float:
  """Standard deviation of the two projections that write to the state: smaller, since 2 n of them add up (GPT-2)."""
  return STD / (2 * model.num_steps) ** 0.5


def _dense(
  fan_in: int, fan_out: int, axes: tuple[str, str], std: float, heads: Heads | None = None, bias: bool = True
) -> dict[str, LeafSpec]:
  """A kernel [in, out], and its bias if it has one."""
  leaves = {"kernel": LeafSpec((fan_in, fan_out), axes, std, heads=heads)}
  if bias:
    leaves["bias"] = LeafSpec((fan_out,), axes[1:])
  return leaves


class HeadKernels(NamedTuple):
  """The kernels of attention by head, and those of the feed-forward branch, with any leading axes."""

  query: jax.Array  # [..., D, H, C]
  key: jax.Array  # [..., D, K, C]; head h reads key head h // (H / K)
  value: jax.Array  # [..., D, K, C]
  out: jax.Array  # [..., H, C, D]
  up: jax.Array  # [..., D, F]
  down: jax.Array  # [..., F, D]


@dataclasses.dataclass(frozen=True)
class _Field(abc.ABC):
  """What both blocks need to know of the model."""

  num_heads: int
  num_kv_heads: int
  head_dim: int
  implementation: str  # of attention, as in model.attention
  norm_eps: float  # of the block's norms
  final_norm_eps: float  # of the norm after the last step
  rope: config_lib.RopeConfig = config_lib.RopeConfig()  # unused where positions are learned

  def final_norm(self, x_BxLxD: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """The norm after the last step, [B, L, D] -> [B, L, D]."""
    return self._norm(x_BxLxD, w, self.final_norm_eps)

  def _block_norm(self, x_BxLxD: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return _once(self._norm(x_BxLxD, w, self.norm_eps))

  @abc.abstractmethod
  def _norm(self, x_BxLxD: jax.Array, w: dict[str, jax.Array], eps: float) -> jax.Array:
    """The block's kind of norm, [B, L, D] -> [B, L, D]."""


class GPTField(_Field):
  """GPT-2's block: LayerNorm, fused qkv, tanh-approximated GELU, biases."""

  attention_groups: ClassVar[tuple[str, ...]] = ("attention_norm", "qkv", "out")  # the rest is the other branch's
  learned_positions: ClassVar[bool] = True
  tied_head: ClassVar[bool] = True

  @staticmethod
  def norm_specs(embed_dim: int) -> dict[str, LeafSpec]:
    """The arrays of one norm."""
    return {"scale": LeafSpec((embed_dim,), ("embed",), start=1.0), "shift": LeafSpec((embed_dim,), ("embed",))}

  def _norm(self, x_BxLxD: jax.Array, w: dict[str, jax.Array], eps: float) -> jax.Array:
    return layer_norm(x_BxLxD, w["scale"], w["shift"], eps)

  @staticmethod
  def specs(model: config_lib.ModelConfig) -> BlockSpecs:
    """Every array of the block at one time.

    qkv is [D, K (G + 2) C]: for each key/value head its G query heads, the key, the value, so that it
    can be split over K.
    """
    D, H, K, C, F = model.embed_dim, model.num_heads, model.kv_heads, model.head_size, model.hidden_dim
    norm = GPTField.norm_specs(D)
    return {
      "attention_norm": norm,
      "qkv": _dense(D, (H + 2 * K) * C, ("embed", "heads"), STD, Heads(K, (H // K, 1, 1), C)),
      "out": _dense(H * C, D, ("heads", "embed"), _out_std(model)),
      "mlp_norm": norm,
      "up": _dense(D, F, ("embed", "mlp"), STD),
      "down": _dense(F, D, ("mlp", "embed"), _out_std(model)),
    }

  def head_kernels(self, w: Weights) -> HeadKernels:
    """The kernels by head; leaves of `w` may have leading axes."""
    qkv, out = w["qkv"]["kernel"], w["out"]["kernel"]
    split = qkv.reshape(*qkv.shape[:-1], self.num_kv_heads, -1, self.head_dim)  # [..., D, K, G + 2, C]
    query = split[..., :-2, :].reshape(*qkv.shape[:-1], self.num_heads, self.head_dim)
    by_head = out.reshape(*out.shape[:-2], self.num_heads, self.head_dim, -1)
    return HeadKernels(query, split[..., -2, :], split[..., -1, :], by_head, w["up"]["kernel"], w["down"]["kernel"])

  def attention(self, x_BxLxD: jax.Array, w: Weights, context: AttentionContext = Packing()) -> jax.Array:
    """Norm, causal attention, projection: [B, L, D] -> [B, L, D]."""
    B, L, D = x_BxLxD.shape
    normed_BxLxD = self._block_norm(x_BxLxD, w["attention_norm"])
    slots = (self.num_kv_heads, self.num_heads // self.num_kv_heads + 2, self.head_dim)
    kernel, bias_N = w["qkv"]["kernel"], w["qkv"]["bias"]

    whole_BxLxKxSxC = None
    # For a single token it is cheaper to slice the product, and for more tokens to slice the weights, which
    # OutputFirst can't do.
    if L == 1 or isinstance(kernel, OutputFirst):
      whole_BxLxKxSxC = _once(_add_bias(normed_BxLxD @ kernel, bias_N)).reshape(B, L, *slots)

    def project(part: slice) -> jax.Array:
      if whole_BxLxKxSxC is not None:
        return whole_BxLxKxSxC[..., part, :].reshape(B, L, -1, self.head_dim)
      kernel_DxN = kernel.reshape(D, *slots)[:, :, part].reshape(D, -1)
      made_BxLxN = _add_bias(normed_BxLxD @ kernel_DxN, bias_N.reshape(slots)[:, part].reshape(-1))
      return made_BxLxN.reshape(B, L, -1, self.head_dim)

    out_BxLxHxC = context.attend(
      project(slice(0, -2)), project(slice(-2, -1)), project(slice(-1, None)), self.implementation
    )
    return _add_bias(out_BxLxHxC.reshape(B, L, -1) @ w["out"]["kernel"], w["out"]["bias"])

  def feedforward(self, x_BxLxD: jax.Array, w: Weights) -> jax.Array:
    """Norm, up, GELU, down: [B, L, D] -> [B, L, D]."""
    normed_BxLxD = self._block_norm(x_BxLxD, w["mlp_norm"])
    hidden_BxLxF = _add_bias(normed_BxLxD @ w["up"]["kernel"], w["up"]["bias"])
    hidden_BxLxF = _once(jax.nn.gelu(hidden_BxLxF, approximate=True))
    return _add_bias(hidden_BxLxF @ w["down"]["kernel"], w["down"]["bias"])


class LlamaField(_Field):
  """Llama's block: RMSNorm, rotary positions, SwiGLU, no biases.

  With `model.block_shift` the block's two norms have a shift beside the scale, as in the published code of Tong et al.
  2025; the final norm has none. With `model.qkv_bias` queries, keys and values have biases, as in Qwen 2. With
  `model.qk_norm` an RMSNorm over the channels of a head, with one scale for all heads, is applied to queries and keys
  before they are rotated, as in Qwen 3.
  """

  attention_groups: ClassVar[tuple[str, ...]] = ("attention_norm", "query", "key", "value", "out")
  learned_positions: ClassVar[bool] = False
  tied_head: ClassVar[bool] = False

  @staticmethod
  def norm_specs(embed_dim: int) -> dict[str, LeafSpec]:
    """The arrays of the final norm, and of a norm in the block without a shift."""
    return {"scale": LeafSpec((embed_dim,), ("embed",), start=1.0)}

  def _norm(self, x_BxLxD: jax.Array, w: dict[str, jax.Array], eps: float) -> jax.Array:
    return rms_norm(x_BxLxD, w["scale"], eps, w.get("shift"))

  @staticmethod
  def specs(model: config_lib.ModelConfig) -> BlockSpecs:
    """Every array of the block at one time."""
    D, H, K, C, F = model.embed_dim, model.num_heads, model.kv_heads, model.head_size, model.hidden_dim
    kernel = functools.partial(_dense, bias=False)
    by_head = lambda heads: _dense(D, heads * C, ("embed", "heads"), STD, Heads(heads, (1,), C), bias=model.qkv_bias)
    head_norm = {"scale": LeafSpec((C,), (None,), start=1.0)}
    norm = LlamaField.norm_specs(D) | ({"shift": LeafSpec((D,), ("embed",))} if model.block_shift else {})
    return {
      "attention_norm": norm,
      "query": by_head(H),
      "key": by_head(K),
      "value": by_head(K),
      **({"query_norm": head_norm, "key_norm": head_norm} if model.qk_norm else {}),
      "out": kernel(H * C, D, ("heads", "embed"), _out_std(model)),
      "mlp_norm": norm,
      "gate": kernel(D, F, ("embed", "mlp"), STD),
      "up": kernel(D, F, ("embed", "mlp"), STD),
      "down": kernel(F, D, ("mlp", "embed"), _out_std(model)),
    }

  def head_kernels(self, w: Weights) -> HeadKernels:
    """The kernels by head; leaves of `w` may have leading axes."""
    by_head = lambda name, heads: w[name]["kernel"].reshape(*w[name]["kernel"].shape[:-1], heads, self.head_dim)
    query, key, value = by_head("query", self.num_heads), *(by_head(k, self.num_kv_heads) for k in ("key", "value"))
    out = w["out"]["kernel"].reshape(*w["out"]["kernel"].shape[:-2], self.num_heads, self.head_dim, -1)
    return HeadKernels(query, key, value, out, w["up"]["kernel"], w["down"]["kernel"])

  def attention(self, x_BxLxD: jax.Array, w: Weights, context: AttentionContext = Packing()) -> jax.Array:
    """Norm, causal attention on rotated queries and keys, projection: [B, L, D] -> [B, L, D]."""
    normed_BxLxD = self._block_norm(x_BxLxD, w["attention_norm"])

    def project(name: str) -> jax.Array:
      projected_BxLxN = normed_BxLxD @ w[name]["kernel"]
      if "bias" in w[name]:
        projected_BxLxN = _add_bias(projected_BxLxN, w[name]["bias"])
      B, L, _ = projected_BxLxN.shape
      if L == 1:  # else the TPU compiler would transpose the weights
        projected_BxLxN = _once(projected_BxLxN)
      return projected_BxLxN.reshape(B, L, -1, self.head_dim)

    def rotate(name: str) -> jax.Array:
      x_BxLxNxC, norm = project(name), w.get(f"{name}_norm")
      if norm is not None:
        x_BxLxNxC = rms_norm(x_BxLxNxC, norm["scale"][None], self.norm_eps)
      return rotate_heads(x_BxLxNxC, context.positions_BxL, self.rope, self.implementation)

    out_BxLxHxC = context.attend(rotate("query"), rotate("key"), project("value"), self.implementation)
    return out_BxLxHxC.reshape(x_BxLxD.shape[:2] + (-1,)) @ w["out"]["kernel"]

  def feedforward(self, x_BxLxD: jax.Array, w: Weights) -> jax.Array:
    """Norm, SwiGLU: [B, L, D] -> [B, L, D]."""
    normed_BxLxD = self._block_norm(x_BxLxD, w["mlp_norm"])
    gate_BxLxF = jax.nn.silu(normed_BxLxD @ w["gate"]["kernel"])
    return _once(gate_BxLxF * (normed_BxLxD @ w["up"]["kernel"])) @ w["down"]["kernel"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
  """Dropout whose masks depend on the key and on the row's number, not on the batch that the row is in."""

  rate: float = dataclasses.field(default=0.0, metadata={"static": True})  # the share of elements that become 0
  rows_B: jax.Array | None = None  # the number of each row; None where the rate is 0

  def __call__(self, key: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
    """[B, L, D] -> [B, L, D]; the elements that stay are divided by the share that does.

    Each random number of 32 bits decides for two elements, so that share is 1 - rate rounded to a multiple of 2^-16.
    """
    if not self.rate:
      return x_BxLxD
    L, D = x_BxLxD.shape[1:]
    kept = max(1, round((1.0 - self.rate) * 2**16))

    def draw(row):
      bits = jax.random.bits(jax.random.fold_in(key, row), (-(-L // 2), D), jnp.uint32)
      return jnp.concatenate([bits & 0xFFFF < kept, bits >> 16 < kept])[:L]

    # the barrier keeps random numbers out of the fusions of matrix products, which they would slow down
    kept_BxLxD = jax.lax.optimization_barrier(jax.vmap(draw)(self.rows_B))
    wide = jnp.promote_types(x_BxLxD.dtype, jnp.float32)  # in bfloat16 the share itself would be rounded
    scaled_BxLxD = (x_BxLxD.astype(wide) / jnp.asarray(kept / 2**16, wide)).astype(x_BxLxD.dtype)
    return jnp.where(kept_BxLxD, scaled_BxLxD, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundField:
  """A vector field with the attention context and dropout of one batch bound to it, as solvers evaluate it."""

  field: GPTField | LlamaField = dataclasses.field(metadata={"static": True})
  context: AttentionContext = Packing()
  dropout: Dropout = Dropout()

  def attention(self, x_BxLxD: jax.Array, weights: Weights, key: jax.Array) -> jax.Array:
    """The field's attention branch in this context, with dropout, [B, L, D] -> [B, L, D]."""
    return self.dropout(jax.random.split(key)[0], self.field.attention(x_BxLxD, weights, self.context))

  def feedforward(self, x_BxLxD: jax.Array, weights: Weights, key: jax.Array) -> jax.Array:
    """The field's feed-forward branch with dropout, [B, L, D] -> [B, L, D]."""
    return self.dropout(jax.random.split(key)[1], self.field.feedforward(x_BxLxD, weights))

  def __call__(self, x_BxLxD: jax.Array, weights: Weights, key: jax.Array) -> jax.Array:
    """The sum of both branches, [B, L, D] -> [B, L, D]."""
    return self.attention(x_BxLxD, weights, key) + self.feedforward(x_BxLxD, weights, key)


FIELDS: dict[str, type[GPTField] | type[LlamaField]] = {"gpt": GPTField, "llama": LlamaField}


def register(name: str, field: type[GPTField] | type[LlamaField]) -> None:
  """Adds a vector field, a class with the methods of `GPTField`, as a choice of `model.field`.

  Raises:
    UserError: another field has this name, by which compiled programs are cached; or it is not such a class.
  """
  missing = [one for one in dir(GPTField) if not one.startswith("_") and not hasattr(field, one)]
  if not isinstance(field, type) or missing:
    lacks = f"lacks {missing[0]}" if missing else "is not a class"
    raise UserError(f"{name}: {field!r} {lacks}; pass a class like GPTField, as a subclass of it")
  if FIELDS.setdefault(name, field) is not field:
    raise UserError(f"{name}: is the name of a vector field already; register it under another name")
  config_lib.add_choice("model.field", name)
  if inherited := [own for own in ("gpt", "llama") if issubclass(field, FIELDS[own])]:
    FAMILIES[name] = inherited[0]


def only_multiplies(model: config_lib.ModelConfig) -> bool:
  """Whether the block is known to do nothing with a kernel but multiply by it, so that it may be stored differently."""
  return FIELDS[model.field] in (GPTField, LlamaField)


def has_tied_head(model: config_lib.ModelConfig) -> bool:
  """Whether the output head is the token embedding: as the config says, or else as the field has it."""
  return FIELDS[model.field].tied_head if model.tied_head is None else model.tied_head


def make_field(model: config_lib.ModelConfig) -> GPTField | LlamaField:
  """The vector field that `model.field` names."""
  return FIELDS[model.field](
    model.num_heads, model.kv_heads, model.head_size, model.attention, model.block_eps, model.final_eps, model.rope
  )
