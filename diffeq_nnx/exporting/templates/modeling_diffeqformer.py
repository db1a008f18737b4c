"""A DiffEqFormer with stored weights for Hugging Face's transformers; written by diffeq-nnx.

Load it with AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True). `generate` works with a cache (the
default, DynamicCache) and without. A layer is a weight set; steps may share one, and may use several.
"""

import itertools

import torch
from torch import nn
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


class DiffEqFormerConfig(PretrainedConfig):
  """field: gpt (LayerNorm, GELU, learned positions) or llama (RMSNorm, SwiGLU, rotary positions).

  solver: the name of the method.
  num_hidden_layers: entries of a key-value cache, one for each time that attention is evaluated.
  head_dim: channels of a head.
  norm_shift: whether the norms of llama's layers have a bias, as those of gpt do.
  qkv_bias: whether llama's queries, keys and values have a bias, as those of gpt do.
  qk_norm: whether llama's queries and keys are normalized, head by head, before they are rotated.
  tie_word_embeddings: whether the head is the token embedding.
  num_steps: S.
  num_weight_sets: layers.
  method: its kind and numbers, see `integrate`.
  step_sizes: dt of each step; all are 1 where dt is folded into the projections `out` and `down`.
  weight_sets: for each step the layers that it uses, one for each node of the method.
  rotary_base, rotary_scaling: of rotary positions; the second as Llama 3's rope_scaling, or None.
  """

  model_type = "diffeqformer"

  def __init__(self, use_cache=True, **kwargs):
    super().__init__(**kwargs)  # which keeps all keys
    self.use_cache = use_cache


def integrate(config, layers, evaluate, x):
  """The state [B, L, D] after all steps of config.method, whose "kind" is one of

  runge_kutta: k_i = f(x + dt sum_j a_ij k_j) with the weights of node nodes[i], then x + dt sum_i b_i k_i;
  splitting: x + share dt branch(x) for each (branch, share) of "parts";
  leapfrog: y_{i+1} = y_{i-1} + 2 dt f(y_i), of which the mean of the last two is the state; both begin as x.

  Sums are in float32 or wider. evaluate(part, layer, x) is a branch, "attention" or "feedforward", or their sum f,
  "slope".
  """
  method, before, middle = config.method, wide(x), wide(x)
  kind = method["kind"]
  for dt, sets in zip(config.step_sizes, config.weight_sets):
    used = [layers[u] for u in sets]
    if kind == "runge_kutta":
      slopes = []
      for row, node in zip(method["a"], method["nodes"]):
        slopes.append(evaluate("slope", used[node], add_increment(x, dt, row, slopes)))
      x = add_increment(x, dt, method["b"], slopes)
    elif kind == "splitting":
      for branch, share in method["parts"]:
        x = add_increment(x, dt, [share], [evaluate(branch, used[0], x)])
    elif kind == "leapfrog":
      before, middle = middle, add_increment(before, 2 * dt, [1.0], [evaluate("slope", used[0], middle.to(x.dtype))])
    else:
      raise ValueError(f"config.json: method.kind is {kind!r}, which this modeling file does not know")
  return ((before + middle) / 2).to(x.dtype) if kind == "leapfrog" else x


def add_increment(x, dt, factors, slopes):
  """x + dt sum_j factors_j slopes_j, in the dtype of x."""
  terms = [f * wide(slope) for f, slope in zip(factors, slopes) if f != 0]
  return (wide(x) + dt * sum(terms)).to(x.dtype) if terms else x


def wide(x):
  """In float32, or wider as it is."""
  return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
  """x / sqrt(mean x^2 + eps) * weight, plus a bias if there is one, computed in float32."""

  def __init__(self, size, eps, bias=False):
    super().__init__()
    self.weight, self.eps = nn.Parameter(torch.ones(size)), eps
    self.bias = nn.Parameter(torch.zeros(size)) if bias else None

  def forward(self, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype)


def rotary_rates(config):
  """Radians that each pair of channels turns for each position, [C / 2], with Llama 3's scaling if there is one."""
  half = config.head_dim // 2
  rates = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
  if scaling := config.rotary_scaling:
    turns = scaling["original_max_position_embeddings"] * rates / (2 * torch.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    rates = rates * (kept + (1 - kept) / scaling["factor"])
  return rates.float()


def rotate(x, cos, sin):
  """Rotary positions: channel i of x [B, heads, L, C] is rotated with channel i + C / 2."""
  first, second = x.float().chunk(2, -1)
  return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
  """The two branches with the weights of one set."""

  def __init__(self, config):
    super().__init__()
    D, N = config.hidden_size, config.intermediate_size
    self.is_gpt = config.field == "gpt"
    self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    norm, options = (nn.LayerNorm, {}) if self.is_gpt else (RMSNorm, {"bias": config.norm_shift})
    self.attention_norm, self.mlp_norm = (norm(D, eps=config.norm_eps, **options) for _ in range(2))
    width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
    if self.is_gpt:  # for each key/value head: its query heads, the key, the value
      self.qkv = nn.Linear(D, width + 2 * kv_width)
    else:
      self.query, self.gate = nn.Linear(D, width, bias=config.qkv_bias), nn.Linear(D, N, bias=False)
      self.key, self.value = (nn.Linear(D, kv_width, bias=config.qkv_bias) for _ in range(2))
    if config.qk_norm:
      self.query_norm, self.key_norm = (RMSNorm(self.head_dim, config.norm_eps) for _ in range(2))
    self.out, self.up = nn.Linear(width, D, bias=self.is_gpt), nn.Linear(D, N, bias=self.is_gpt)
    self.down = nn.Linear(N, D, bias=self.is_gpt)

  def attention(self, x, mask, rotation, cache, entry):
    B, L, _ = x.shape
    x, C = self.attention_norm(x), self.head_dim
    if self.is_gpt:
      slots = self.qkv(x).view(B, L, self.kv_heads, -1, C)
      q, k, v = slots[..., :-2, :].reshape(B, L, -1, C), slots[..., -2, :], slots[..., -1, :]
    else:
      q, k, v = (project(x).view(B, L, -1, C) for project in (self.query, self.key, self.value))
    if hasattr(self, "query_norm"):
      q, k = self.query_norm(q), self.key_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if rotation is not None:
      q, k = rotate(q, *rotation), rotate(k, *rotation)
    if cache is not None:
      k, v = cache.update(k, v, entry)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.kv_heads < self.heads)
    return self.out(out.transpose(1, 2).reshape(B, L, -1))

  def feedforward(self, x):
    x = self.mlp_norm(x)
    if self.is_gpt:
      return self.down(F.gelu(self.up(x), approximate="tanh"))
    return self.down(F.silu(self.gate(x)) * self.up(x))

  def slope(self, x, *context):
    return self.attention(x, *context) + self.feedforward(x)

  def forward(self, part, *arguments):
    """attention(...), feedforward(...) or slope(...): all through here, since hooks are on this method."""
    return getattr(self, part)(*arguments)


class DiffEqFormerForCausalLM(PreTrainedModel, GenerationMixin):
  """Embedding, integration, final norm, head."""

  config_class = DiffEqFormerConfig
  _no_split_modules = ["Layer"]
  _supports_sdpa = True
  _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # if config.tie_word_embeddings

  def __init__(self, config):
    super().__init__(config)
    D, is_gpt = config.hidden_size, config.field == "gpt"
    self.embed_tokens = nn.Embedding(config.vocab_size, D)
    self.positions = nn.Embedding(config.max_position_embeddings, D) if is_gpt else None
    self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_weight_sets)])
    self.final_norm = (nn.LayerNorm if is_gpt else RMSNorm)(D, eps=config.final_norm_eps)
    self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
    self.post_init()

  def get_input_embeddings(self):
    return self.embed_tokens

  def forward(
    self,
    input_ids,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    cache=None,
    use_cache=None,
    labels=None,
    logits_to_keep=0,
    num_items_in_batch=None,
    **kwargs,
  ):
    """Logits [B, L, V]. attention_mask [B, past + L] is 0 at padding, on either side.

    Without attention_mask, position_ids [B, L] that begin again divide a row into documents, which don't see each
    other. The loss is the mean over the labels of this call, or their sum over num_items_in_batch, which Trainer gives:
    the labels of all calls whose gradients it adds up. `cache` is the name under which transformers 5.24 passes
    past_key_values.
    """
    B, L = input_ids.shape
    past_key_values = past_key_values if cache is None else cache
    if use_cache is None:
      use_cache = self.config.use_cache and not self.training
    if use_cache and past_key_values is None:
      past_key_values = DynamicCache()
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    slots = torch.arange(past + L, device=input_ids.device)
    if position_ids is None:
      if attention_mask is None:
        position_ids = slots[None, past:].expand(B, L)
      else:
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -L:]
    mask = (slots[None, :] <= slots[past:, None])[None, None]
    if attention_mask is not None:
      visible = attention_mask.bool()[:, None, None]
      mask = mask & (visible | (slots[None, :] == slots[past:, None]))  # padding attends to itself: no row is empty
    elif past == 0:
      documents = F.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
      mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    x, rotation = self.embed_tokens(input_ids), None
    if self.positions is not None:
      x = x + self.positions(position_ids)
    else:
      angles = position_ids[:, None, :, None].float() * rotary_rates(self.config).to(x.device)
      rotation = angles.cos(), angles.sin()
    entries = itertools.count()

    def evaluate(part, layer, x):  # layers may be on other devices than the sums
      context = () if part == "feedforward" else (mask, rotation, past_key_values, next(entries))
      return layer(part, x, *context).to(x.device)

    x = self.final_norm(integrate(self.config, self.layers, evaluate, x))
    if logits_to_keep:
      x = x[:, -logits_to_keep:]
    logits = self.lm_head(x)
    loss = None
    if labels is not None:
      reduction = "mean" if num_items_in_batch is None else "sum"
      labels = labels.to(logits.device)
      loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction=reduction)
      if num_items_in_batch is not None:
        loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None)


# by which Trainer knows that labels are to be shifted where it computes the loss itself, as for label smoothing
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DiffEqFormerConfig.model_type] = DiffEqFormerForCausalLM.__name__
