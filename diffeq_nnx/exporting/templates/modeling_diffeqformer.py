"""A DiffEqFormer with stored weights for Hugging Face's transformers; written by diffeq-nnx.

Load it with AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True). Step sizes are folded into the
projections `out` and `down`. `generate` works with a cache (the default, DynamicCache) and without.
"""

import torch
from torch import nn
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast


class DiffEqFormerConfig(PretrainedConfig):
  """field: gpt (LayerNorm, GELU, learned positions, tied head) or llama (RMSNorm, SwiGLU, rotary positions).

  solver: euler (both branches read the same state) or sequential (feed-forward reads the sum with attention).
  norm_shift: whether the norms of llama's layers have a bias, as those of gpt do.
  """

  model_type = "diffeqformer"

  def __init__(
    self,
    field="gpt",
    solver="euler",
    vocab_size=50257,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    max_position_embeddings=1024,
    norm_eps=1e-5,
    final_norm_eps=1e-5,
    norm_shift=False,
    use_cache=True,
    **kwargs,
  ):
    super().__init__(**kwargs)
    self.field, self.solver = field, solver
    self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
    self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
    self.num_key_value_heads, self.max_position_embeddings = num_key_value_heads, max_position_embeddings
    self.norm_eps, self.final_norm_eps, self.norm_shift = norm_eps, final_norm_eps, norm_shift
    self.use_cache = use_cache


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


def rotate(x, cos, sin):
  """Rotary positions: channel i of x [B, heads, L, C] is rotated with channel i + C / 2."""
  first, second = x.float().chunk(2, -1)
  return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
  """The two branches of one step."""

  def __init__(self, config, index):
    super().__init__()
    D, N = config.hidden_size, config.intermediate_size
    self.config, self.index, self.is_gpt = config, index, config.field == "gpt"
    self.heads, self.kv_heads, self.head_dim = (
      config.num_attention_heads,
      config.num_key_value_heads,
      D // config.num_attention_heads,
    )
    norm, options = (nn.LayerNorm, {}) if self.is_gpt else (RMSNorm, {"bias": config.norm_shift})
    self.attention_norm, self.mlp_norm = (norm(D, eps=config.norm_eps, **options) for _ in range(2))
    width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
    if self.is_gpt:  # for each key/value head: its query heads, the key, the value
      self.qkv = nn.Linear(D, width + 2 * kv_width)
    else:
      self.query, self.gate = nn.Linear(D, width, bias=False), nn.Linear(D, N, bias=False)
      self.key, self.value = nn.Linear(D, kv_width, bias=False), nn.Linear(D, kv_width, bias=False)
    self.out, self.up = nn.Linear(width, D, bias=self.is_gpt), nn.Linear(D, N, bias=self.is_gpt)
    self.down = nn.Linear(N, D, bias=self.is_gpt)

  def attention(self, x, mask, rotation, cache):
    B, L, _ = x.shape
    x, C = self.attention_norm(x), self.head_dim
    if self.is_gpt:
      slots = self.qkv(x).view(B, L, self.kv_heads, -1, C)
      q, k, v = slots[..., :-2, :].reshape(B, L, -1, C), slots[..., -2, :], slots[..., -1, :]
    else:
      q, k, v = (project(x).view(B, L, -1, C) for project in (self.query, self.key, self.value))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if rotation is not None:
      q, k = rotate(q, *rotation), rotate(k, *rotation)
    if cache is not None:
      k, v = cache.update(k, v, self.index)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.kv_heads < self.heads)
    return self.out(out.transpose(1, 2).reshape(B, L, -1))

  def feedforward(self, x):
    x = self.mlp_norm(x)
    if self.is_gpt:
      return self.down(F.gelu(self.up(x), approximate="tanh"))
    return self.down(F.silu(self.gate(x)) * self.up(x))

  def forward(self, x, mask, rotation, cache):
    if self.config.solver == "euler":
      return x + (self.attention(x, mask, rotation, cache) + self.feedforward(x))
    x = x + self.attention(x, mask, rotation, cache)
    return x + self.feedforward(x)


class DiffEqFormerForCausalLM(PreTrainedModel, GenerationMixin):
  """Embedding, steps, final norm, head."""

  config_class = DiffEqFormerConfig
  _no_split_modules = ["Layer"]
  _supports_sdpa = True

  def __init__(self, config):
    super().__init__(config)
    D, is_gpt = config.hidden_size, config.field == "gpt"
    self.embed_tokens = nn.Embedding(config.vocab_size, D)
    self.positions = nn.Embedding(config.max_position_embeddings, D) if is_gpt else None
    self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
    self.final_norm = (nn.LayerNorm if is_gpt else RMSNorm)(D, eps=config.final_norm_eps)
    self.lm_head = None if is_gpt else nn.Linear(D, config.vocab_size, bias=False)  # gpt's is tied to the embedding
    self.post_init()

  def get_input_embeddings(self):
    return self.embed_tokens

  def forward(
    self,
    input_ids,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=None,
    labels=None,
    logits_to_keep=0,
    **kwargs,
  ):
    """Logits [B, L, V]. attention_mask [B, past + L] is 0 at padding, on either side."""
    B, L = input_ids.shape
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
    x, rotation = self.embed_tokens(input_ids), None
    if self.positions is not None:
      x = x + self.positions(position_ids)
    else:
      half = self.config.hidden_size // self.config.num_attention_heads // 2
      rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
      angles = position_ids[:, None, :, None].float() * rates
      rotation = angles.cos(), angles.sin()
    for layer in self.layers:
      x = layer(x, mask, rotation, past_key_values)
    x = self.final_norm(x)
    if logits_to_keep:
      x = x[:, -logits_to_keep:]
    logits = F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
    loss = None
    if labels is not None:
      loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None)
