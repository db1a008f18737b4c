"""Hugging Face folders of GPT-2 and Llama as models with stored weights and sequential steps."""

import glob
import os
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from diffeq_nnx import data
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.data.tokenizers.files import parse_json
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.exporting import layouts
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, graph
from diffeq_nnx.model.vector_fields import ROPE_BASE

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UNUSED = re.compile(r".*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")  # tables that old versions saved
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}


def import_hf(folder: str) -> Model:
  """A Hugging Face folder of GPT-2 or Llama as a model with stored weights; its config is `model.config`.

  The computation is float32 where the folder says so or nothing, and bfloat16 where it says bfloat16 or float16.

  Raises:
    UserError: a folder or a file that can't be read, another architecture, or a property that this project can't hold.
  """
  model, params = read(folder)
  return nnx.merge(graph(model), jax.tree.map(jnp.asarray, params))


def tokenizer_of(folder: str, begin_mark: bool | None = None, begin_token: str | None = None,
                 end_token: str | None = None) -> Tokenizer:
  """The tokenizer in a Hugging Face folder; of tokenizer.model and tokenizer.json the first. Marks as `load_tokenizer`.

  Raises:
    UserError: there is none, or one that would lose text.
  """
  model = os.path.join(folder, "tokenizer.model")
  return data.load_tokenizer(model if os.path.exists(model) else folder, begin_mark=begin_mark, begin_token=begin_token,
                             end_token=end_token, key="from_hf")


def read(folder: str) -> tuple[ModelConfig, Params]:
  """`import_hf` as a config and float32 parameters in NumPy."""
  label = f"from_hf={folder}"
  if not os.path.isdir(folder):
    raise UserError(f"{label}: there is no such folder; name one with config.json and {_WEIGHTS}", everywhere=True)
  said = _json(folder, "config.json", label)
  kind = said.get("model_type")
  if kind not in ("gpt2", "llama"):
    raise UserError(f"{label}: model_type is {kind!r}; gpt2 and llama can be imported", everywhere=True)
  if said.get("quantization_config") is not None:
    raise UserError(f"{label}: quantization_config is set: the weights are not numbers; give the folder before it was "
                    "quantized", everywhere=True)
  model = _gpt2(said, label) if kind == "gpt2" else _llama(said, label)
  return model, _params(kind, model, said, _tensors(folder, label), label)


def _gpt2(said: dict[str, Any], label: str) -> ModelConfig:
  _require(said, label, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh"))
  _require(said, label, "scale_attn_weights", True, (True,))
  _require(said, label, "scale_attn_by_inverse_layer_idx", False, (False,))
  _require(said, label, "add_cross_attention", False, (False,))
  _require(said, label, "tie_word_embeddings", True, (True,))
  width, heads = _size(said, label, "n_embd", 768), _size(said, label, "n_head", 12)
  _check_heads(label, "n_head", heads, "n_embd", width)
  inner = said.get("n_inner")
  dropout = said.get("resid_pdrop", 0.1)
  return ModelConfig(
      weights="stored", field="gpt", solver="sequential", num_steps=_size(said, label, "n_layer", 12),
      embed_dim=width, num_heads=heads, mlp_dim=4 * width if inner is None else _size(said, label, "n_inner", inner),
      vocab_size=_size(said, label, "vocab_size", 50257), seq_len=_size(said, label, "n_positions", 1024),
      dropout=float(dropout if dropout == said.get("embd_pdrop", 0.1) else 0), dtype=_dtype(said, label),
      **_eps(said.get("layer_norm_epsilon", 1e-5), "gpt"))


def _llama(said: dict[str, Any], label: str) -> ModelConfig:
  _require(said, label, "hidden_act", "silu", ("silu", "swish"))
  _require(said, label, "attention_bias", False, (False,))
  _require(said, label, "mlp_bias", False, (False,))
  width, heads = _size(said, label, "hidden_size", 4096), _size(said, label, "num_attention_heads", 32)
  _check_heads(label, "num_attention_heads", heads, "hidden_size", width)
  _require(said, label, "head_dim", None, (None, width // heads))
  scaling = said.get("rope_scaling") or {}
  rope = {**scaling, **(said.get("rope_parameters") or {})}
  if rope.get("rope_type", rope.get("type", "default")) != "default":
    raise UserError(f"{label}: rope_scaling is {rope!r}: scaled rotary positions can't be held; give a folder without",
                    everywhere=True)
  base = rope.get("rope_theta", said.get("rope_theta", ROPE_BASE))
  _require({"rope_theta": base}, label, "rope_theta", ROPE_BASE, (ROPE_BASE,))
  _require(rope, label, "partial_rotary_factor", 1.0, (None, 1.0))
  kv_heads = said.get("num_key_value_heads")
  kv_heads = heads if kv_heads is None else _size(said, label, "num_key_value_heads", heads)
  _check_heads(label, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
  return ModelConfig(
      weights="stored", field="llama", solver="sequential", num_steps=_size(said, label, "num_hidden_layers", 32),
      embed_dim=width, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=_size(said, label, "intermediate_size", 11008),
      vocab_size=_size(said, label, "vocab_size", 32000), seq_len=_size(said, label, "max_position_embeddings", 2048),
      dtype=_dtype(said, label), **_eps(said.get("rms_norm_eps", 1e-6), "llama"))


def _require(said: dict[str, Any], label: str, key: str, default: Any, allowed: tuple[Any, ...]) -> None:
  """Raises UserError unless a property of config.json has a value that this project can hold."""
  value = said.get(key, default)
  if value not in allowed:
    shown = next(one for one in allowed if one is not None)
    raise UserError(f"{label}: {key} is {value!r}: can't be held, it must be {shown!r}; give a folder where it is",
                    everywhere=True)


def _size(said: dict[str, Any], label: str, key: str, default: int) -> int:
  value = said.get(key, default)
  if type(value) is not int or value < 1:
    raise UserError(f"{label}: {key} is {value!r}: must be a whole number above 0; restore config.json",
                    everywhere=True)
  return value


def _check_heads(label: str, key: str, heads: int, of_key: str, of: int) -> None:
  if of % heads:
    raise UserError(f"{label}: {key} is {heads}: must divide {of_key}, {of}; restore config.json", everywhere=True)


def _dtype(said: dict[str, Any], label: str) -> str:
  name = said.get("dtype") or said.get("torch_dtype") or "float32"
  if name not in _DTYPES:
    raise UserError(f"{label}: dtype is {name!r}: must be one of {', '.join(_DTYPES)}; convert the weights",
                    everywhere=True)
  return _DTYPES[name]


def _eps(eps: float, field: str) -> dict[str, float | None]:
  """The two keys for one eps, None where it is the default."""
  plain = ModelConfig(field=field)
  return {"norm_eps": None if eps == plain.block_eps else float(eps),
          "final_norm_eps": None if eps == plain.final_eps else float(eps)}


def _params(kind: str, model: ModelConfig, said: dict[str, Any], tensors: layouts.Tensors, label: str) -> Params:
  """The parameters; every array of the files must find its place."""
  if kind == "gpt2":
    tensors = {name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": array
               for name, array in tensors.items()}
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("transformer.wte.weight")
    if head is not None and not np.array_equal(head, embedding):
      raise UserError(f"{label}: lm_head.weight differs from the embedding: GPT-2's head is tied here; give a folder "
                      "where it is", everywhere=True)
  elif said.get("tie_word_embeddings") and "model.embed_tokens.weight" in tensors:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # a copy: llama's head is its own here
  try:
    params = layouts.to_params(kind, model, tensors)
  except KeyError as error:
    raise UserError(f"{label}: the weights lack {error.args[0]}; restore the folder", everywhere=True) from error
  except ValueError as error:
    raise UserError(f"{label}: {error}; give files that go together", everywhere=True) from error
  left = sorted(name for name in tensors if not _UNUSED.fullmatch(name))
  if left:
    raise UserError(f"{label}: the weights hold {left[0]}, which {kind} by this config.json lacks ({len(left)} such); "
                    "give files that go together", everywhere=True)
  return params


def _tensors(folder: str, label: str) -> layouts.Tensors:
  """All arrays of model.safetensors, or of the files that its index names, as float32 where they are narrower."""
  names = set(os.listdir(folder))
  if _WEIGHTS in names:
    files = [_WEIGHTS]
  elif _INDEX in names:
    files = sorted(set(_json(folder, _INDEX, label).get("weight_map", {}).values()))
  elif glob.glob(os.path.join(glob.escape(folder), "pytorch_model*.bin")):
    raise UserError(f"{label}: holds pytorch_model.bin, which is code as much as weights; convert it with transformers: "
                    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)", everywhere=True)
  else:
    raise UserError(f"{label}: holds no {_WEIGHTS}; restore the folder", everywhere=True)
  tensors = {}
  for name in files:
    try:
      with safetensors.safe_open(os.path.join(folder, name), "flax") as file:  # NumPy has no bfloat16
        tensors |= {key: np.asarray(file.get_tensor(key), np.float32) for key in file.keys()}
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
      raise UserError(f"{label}: {name} can't be read ({first_line(error, 200)}); restore the file",
                      everywhere=True) from error
  return tensors


def _json(folder: str, name: str, label: str) -> dict[str, Any]:
  path = os.path.join(folder, name)
  try:
    with open(path, "rb") as file:
      content = file.read()
  except OSError as error:
    raise UserError(f"{label}: {name} can't be read ({error.strerror}); name a folder that has it",
                    everywhere=True) from error
  said = parse_json(content, path, label)
  if not isinstance(said, dict):
    raise UserError(f"{label}: {name} must be a JSON object; restore the file", everywhere=True)
  return said

