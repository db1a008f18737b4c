"""Hugging Face folders of GPT-2, and of Llama and its relatives, as models with stored weights and sequential steps."""

import dataclasses
import fnmatch
import itertools
import math
import os
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from diffeq_nnx import files
from diffeq_nnx.config import DataConfig, ModelConfig, RopeConfig
from diffeq_nnx.data.tokenizers import Tokenizer, load
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.exporting import layouts
from diffeq_nnx.exporting.hub import open_folder
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, build
from diffeq_nnx.model.vector_fields import FIELDS, has_tied_head

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UNUSED = re.compile(r".*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")  # tables saved by old versions
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # that transformers takes where a file names none
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}

# Our key -> key in config.json, and its default in transformers.
_GPT2_SIZES = {
  "num_steps": ("n_layer", 12),
  "embed_dim": ("n_embd", 768),
  "num_heads": ("n_head", 12),
  "vocab_size": ("vocab_size", 50257),
  "seq_len": ("n_positions", 1024),
}
_LLAMA_SIZES = {
  "num_steps": ("num_hidden_layers", 32),
  "embed_dim": ("hidden_size", 4096),
  "num_heads": ("num_attention_heads", 32),
  "mlp_dim": ("intermediate_size", 11008),
  "vocab_size": ("vocab_size", 32000),
  "seq_len": ("max_position_embeddings", 2048),
}
_QWEN_SIZES = _LLAMA_SIZES | {
  "mlp_dim": ("intermediate_size", 22016),
  "vocab_size": ("vocab_size", 151936),
  "seq_len": ("max_position_embeddings", 32768),
}
SIZES = {
  "gpt2": _GPT2_SIZES,
  "llama": _LLAMA_SIZES,
  "mistral": _LLAMA_SIZES | {"mlp_dim": ("intermediate_size", 14336), "seq_len": ("max_position_embeddings", 131072)},
  "qwen2": _QWEN_SIZES,
  "qwen3": _QWEN_SIZES,
}
_ROTARY = {"hidden_act": ("silu", "swish"), "is_causal": (True,)}
_SUPPORTED: dict[str, dict[str, tuple]] = {  # key in config.json -> the values that our models have, the default first
  "gpt2": {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
  },
  "llama": {**_ROTARY, "attention_bias": (False,), "mlp_bias": (False,)},
  "mistral": _ROTARY,
  "qwen2": _ROTARY,
  "qwen3": {**_ROTARY, "attention_bias": (False,)},
}


def import_hf(folder: str, seq_len: int | None = None) -> Model:
  """A GPT-2, Llama, Mistral, Qwen 2 or Qwen 3 as a model with stored weights; its config is `model.config`.

  The computation's dtype is float32 where the folder names float32 or none, and bfloat16 where it names bfloat16 or
  float16.

  Args:
    folder: a path, the name of a model on the hub (see `hub.find_folder`), or a GGUF file of a Llama.
    seq_len: positions of the model; None: as many as the folder says.

  Raises:
    UserError: a folder that can't be read, another architecture, an unsupported property, or a longer `seq_len`.
  """
  with open_folder(folder) as opened:
    model, params = read(opened, seq_len)
  return build(model, jax.tree.map(jnp.asarray, params))


def read_tokenizer(folder: str, config: DataConfig = DataConfig()) -> Tokenizer:
  """The tokenizer in a Hugging Face folder, used as it was trained: tokenizer.json if there is one, as in transformers.

  Marks, and what becomes of unknown bytes, are chosen by `config`. Raises UserError if there is none, or it
  can't be used.
  """
  return load(folder, config, key="from_hf")


def read(folder: str, seq_len: int | None = None) -> tuple[ModelConfig, Params]:
  """`import_hf` as a config and float32 parameters in NumPy."""
  try:
    if not files.is_folder(folder):
      raise UserError(f"there is no such folder; name one with config.json and {_WEIGHTS}")
    if files.exists(os.path.join(folder, "adapter_config.json")):
      change = "merge it into its model with PEFT, model.merge_and_unload().save_pretrained(NEW), and name that"
      raise UserError(f"holds adapter_config.json, an adapter, which can't be imported; {change}")
    config = _read_json(folder, "config.json")
    kind = config.get("model_type")
    if kind not in tuple(SIZES):
      raise UserError(f"model_type is {kind!r}; {', '.join(SIZES)} can be imported")
    if config.get("quantization_config") is not None:
      raise UserError("quantization_config is set: the weights are not numbers; give the folder before quantization")
    try:
      model = _model_config(kind, config, seq_len)
    except UserError:
      raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:  # values of other types
      raise UserError(f"config.json can't be used ({first_line(error, 200)}); restore the file") from error
    return model, _params(kind, model, _read_tensors(folder))
  except UserError as error:
    raise UserError(f"from_hf={folder}: {error}") from error


def _read_json(folder: str, name: str) -> dict[str, Any]:
  """Returns the object in a JSON file."""
  try:
    values = files.parse_json(files.read(os.path.join(folder, name)), name)
  except OSError as error:
    raise UserError(f"{name} can't be read ({error.strerror}); name a folder that has it") from error
  if not isinstance(values, dict):
    raise UserError(f"{name} must be a JSON object; restore the file")
  return values


def _read_tensors(folder: str) -> layouts.Tensors:
  """Returns all arrays of model.safetensors, or of the files that its index names, as float32."""
  there = files.list_sizes(folder)
  names: list[Any]
  if _WEIGHTS in there:
    names = [_WEIGHTS]
  elif _INDEX in there:
    weight_map = _read_json(folder, _INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
  elif fnmatch.filter(there, "pytorch_model*.bin"):
    raise UserError(
      "holds pytorch_model.bin, which can run code when it is read; convert it with transformers: "
      "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    )
  else:
    raise UserError(f"holds no {_WEIGHTS}; restore the folder")
  for name in names:
    if not files.is_name(name):
      raise UserError(f"{_INDEX} names {name!r}, which is no file of the folder; restore the folder")
  tensors: layouts.Tensors = {}
  for name in sorted(set(names)):
    try:
      with (
        files.local(os.path.join(folder, name)) as path,
        safetensors.safe_open(path, "flax") as file,  # NumPy has no bfloat16
      ):
        keys = list(itertools.filterfalse(_UNUSED.fullmatch, file.keys()))
        quantized = {file.get_slice(key).get_dtype() for key in keys} - {"F16", "BF16", "F32", "F64"}
        tensors |= {} if quantized else {key: np.asarray(file.get_tensor(key), np.float32) for key in keys}
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
      raise UserError(f"{name} can't be read ({first_line(error, 200)}); restore the file") from error
    if quantized:
      raise UserError(
        f"{name} holds quantized weights ({min(quantized)}); give the model's folder without quantization"
      )
  for key, array in tensors.items():
    if not np.isfinite(array).all():
      raise UserError(f"{key} holds numbers that are not finite; restore the files")
  return tensors


def _size(values: dict[str, Any], key: str, default: int) -> int:
  """Returns the positive integer that a key has in config.json, or in an object in it."""
  value = values.get(key, default)
  if type(value) is not int or value < 1:
    raise UserError(f"{key} is {value!r}: must be an integer above 0; restore config.json")
  return value


def _above(values: dict[str, Any], key: str, bound: float) -> float:
  """Returns the finite number above a bound that a key has."""
  value: Any = values.get(key)
  if type(value) not in (int, float) or not bound < value < math.inf:
    raise UserError(f"{key} is {value!r}: must be a number above {bound}; restore config.json")
  return float(value)


def _require(values: dict[str, Any], key: str, *allowed: Any) -> None:
  """Raises UserError unless a key has one of these values or, for the first of them, is missing."""
  value = values.get(key, allowed[0])
  if value not in allowed:
    shown = next(one for one in allowed if one is not None)
    raise UserError(f"{key} is {value!r}: not supported, it must be {shown!r}; give a folder that has that")


def _model_config(kind: str, values: dict[str, Any], seq_len: int | None) -> ModelConfig:
  """The config of our model, from the values of config.json."""
  keys = SIZES[kind]
  for key, allowed in _SUPPORTED[kind].items():
    _require(values, key, *allowed)
  changes: dict[str, Any] = {ours: _size(values, *theirs) for ours, theirs in keys.items()}
  width, heads = changes["embed_dim"], changes["num_heads"]
  field, head_dim = "gpt" if kind == "gpt2" else "llama", None
  if field == "gpt":
    dropout, eps = values.get("resid_pdrop", 0.1), values.get("layer_norm_epsilon", 1e-5)
    changes["mlp_dim"] = 4 * width if values.get("n_inner") is None else _size(values, "n_inner", 0)
    changes["dropout"] = float(dropout if dropout == values.get("embd_pdrop", 0.1) else 0)
  else:
    eps = values.get("rms_norm_eps", 1e-6)
    said = {"num_key_value_heads": _KV_HEADS.get(kind), **values}
    kv_heads = heads if said["num_key_value_heads"] is None else _size(said, "num_key_value_heads", heads)
    if heads % kv_heads:
      raise UserError(
        f"num_key_value_heads is {kv_heads}: must divide num_attention_heads, {heads}; restore config.json"
      )
    if values.get("head_dim", 128 if kind == "qwen3" else None) is not None:
      head_dim = _size(values, "head_dim", 128)
    changes |= {
      "num_kv_heads": kv_heads,
      "head_dim": None if head_dim == width / heads else head_dim,
      "rope": _rope(values, changes["seq_len"]),
      "qkv_bias": kind == "qwen2",
      "qk_norm": kind == "qwen3",
    }
  if width % heads and head_dim is None:
    raise UserError(
      f"{keys['num_heads'][0]} is {heads}: must divide {keys['embed_dim'][0]}, {width}; restore config.json"
    )
  tied, usually_tied = values.get("tie_word_embeddings", field == "gpt"), FIELDS[field].tied_head
  changes["tied_head"] = None if tied is usually_tied else bool(tied)
  changes["seq_len"] = _checked_len(kind, values, changes["num_steps"], changes["seq_len"], seq_len)
  dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
  if dtype not in _DTYPES:
    raise UserError(f"dtype is {dtype!r}: must be one of {', '.join(_DTYPES)}; convert the weights")
  order = values.get("depth_order") or ()
  numbers = isinstance(order, list) and all(type(one) is int for one in order)
  if numbers and sorted(order) == list(range(len(order))) != list(range(changes["num_steps"])):
    # Another program has changed the layers, and kept a key that it doesn't know.
    logging.warning("depth_order=%s: is of %d layers, and left out; --job=rank_steps finds another", order, len(order))
    order = ()
  defaults = ModelConfig(field=field)
  return dataclasses.replace(
    defaults,
    weights="stored",
    solver="sequential",
    dtype=_DTYPES[dtype],
    norm_eps=None if eps == defaults.block_eps else float(eps),
    final_norm_eps=None if eps == defaults.final_eps else float(eps),
    depth_order=tuple(order),
    **changes,
  )


def _checked_len(kind: str, values: dict[str, Any], layers: int, most: int, seq_len: int | None) -> int:
  """The number of positions; raises UserError unless the folder's model sees all of them from the last."""
  chosen = most if seq_len is None else seq_len
  if not 0 < chosen <= most:
    raise UserError(f"the model has {most} positions, not {chosen}; choose at most {most}")
  kinds = values.get("layer_types")
  if kinds is None and values.get("use_sliding_window") and values.get("max_window_layers", 28) < layers:
    kinds = ["sliding_attention"]  # of the last layers, as transformers fills it in
  slides = kind == "mistral" or "sliding_attention" in (kinds or ())
  window = values.get("sliding_window", 4096) if slides else None
  if kind != "gpt2" and window is not None and window < chosen:
    raise UserError(
      f"attention is limited to the last {window} positions (sliding_window), which is not supported; with "
      f"--config.model.seq_len={window}, or import_hf(..., seq_len={window}) in Python, that is no limit"
    )
  return chosen


def _rope(values: dict[str, Any], seq_len: int) -> RopeConfig:
  """The rotary positions; raises UserError unless they are plain or scaled as Llama 3's."""
  rope = {"rope_theta": values.get("rope_theta", RopeConfig().base)}
  rope |= values.get("rope_scaling") or values.get("rope_parameters") or {}  # transformers too takes one of the two
  if (outside := values.get("original_max_position_embeddings")) is not None:  # which it prefers to that within
    rope["original_max_position_embeddings"] = outside
  _require(rope, "partial_rotary_factor", None, 1.0)
  kind, base = rope.get("rope_type", rope.get("type", "default")), _above(rope, "rope_theta", 0)
  if kind not in ("default", "llama3"):
    raise UserError(f"rope_type is {kind!r}: not supported, it must be 'default' or 'llama3'")
  if kind == "default" or rope.get("factor") == 1:
    return RopeConfig(base)
  return RopeConfig(
    base,
    factor=_above(rope, "factor", 1),
    low_freq_factor=_above(rope, "low_freq_factor", 0),
    high_freq_factor=_above(rope, "high_freq_factor", _above(rope, "low_freq_factor", 0)),
    original_len=_size(rope, "original_max_position_embeddings", seq_len),
  )


def _params(kind: str, model: ModelConfig, tensors: layouts.Tensors) -> Params:
  """The parameters; raises UserError unless each array of the files has its counterpart."""
  prefix = "transformer." if kind == "gpt2" else "model."
  if not any(name.startswith(prefix) for name in tensors):  # as transformers saves the model without its head
    tensors = {name if name.startswith("lm_head.") else f"{prefix}{name}": array for name, array in tensors.items()}
  if (positions := "transformer.wpe.weight") in tensors:
    tensors[positions] = tensors[positions][: model.seq_len]
  head = tensors.pop("lm_head.weight", None) if has_tied_head(model) else None
  if head is not None:  # safetensors.torch.save_model keeps one name of a shared array, the first by the alphabet
    tensors.setdefault(f"{prefix}{'wte' if kind == 'gpt2' else 'embed_tokens'}.weight", head)
  try:
    params = layouts.to_params("llama" if kind == "mistral" else kind, model, tensors)
  except KeyError as error:
    raise UserError(f"the weights lack {error.args[0]}; restore the folder") from error
  except ValueError as error:
    raise UserError(f"{error}; give files of one model") from error
  if head is not None and not np.array_equal(head, params["embedding"]):
    raise UserError(
      "lm_head.weight differs from the embedding, to which config.json ties it (tie_word_embeddings); correct one of "
      "the two"
    )
  if left := sorted(tensors):
    raise UserError(
      f"the weights hold {left[0]}, which {kind} by this config.json lacks ({len(left)} such); give files of one model"
    )
  return params
