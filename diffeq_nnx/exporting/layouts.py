"""Names and layouts of a stored-weight model's arrays in other libraries.

U weight sets (one a step in GPT-2 and Llama), D embed_dim, H query heads, C head_dim. Our kernels are [in, out];
torch's Linear is [out, in], GPT-2's Conv1D [in, out].
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax import traverse_util
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.parameters import Params, abstract_model, params_of
from diffeq_nnx.model.solvers import weight_times

Tensors = dict[str, np.ndarray]

WRITING = ("out", "down")  # the projections onto the residual stream: dt is folded into them
OWN = "diffeqformer"  # the architecture of our own modeling file
LLAMAS = ("llama", "qwen2", "qwen3")  # architectures whose arrays have Llama's names; Mistral's are Llama's

_LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight", "shift": "bias", "gate": "gate"}
_GPT2_GROUPS = {
  "attention_norm": "ln_1",
  "qkv": "attn.c_attn",
  "out": "attn.c_proj",
  "mlp_norm": "ln_2",
  "up": "mlp.c_fc",
  "down": "mlp.c_proj",
}
LLAMA_GROUPS = {
  "attention_norm": "input_layernorm",
  "query": "self_attn.q_proj",
  "key": "self_attn.k_proj",
  "value": "self_attn.v_proj",
  "query_norm": "self_attn.q_norm",
  "key_norm": "self_attn.k_norm",
  "out": "self_attn.o_proj",
  "mlp_norm": "post_attention_layernorm",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
_OUTSIDE = {
  "gpt2": {"embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"},
  "llama": {"embedding": "model.embed_tokens", "final_norm": "model.norm"},
  OWN: {"embedding": "embed_tokens", "positions": "positions", "final_norm": "final_norm"},
}
_LAYERS = {"gpt2": ("transformer.h", _GPT2_GROUPS), "llama": ("model.layers", LLAMA_GROUPS), OWN: ("layers", None)}


class Entry(NamedTuple):
  """One array of a file."""

  name: str  # in the file
  path: tuple[str, ...]  # in our parameters
  weight_set: int | None  # the number of the weight set that it belongs to; None: to none, as an embedding
  # How the layouts differ: same, transposed (a kernel), or qkv (head by head here; all q, all k, all v there).
  kind: str


def entries(architecture: str, model: ModelConfig) -> Iterator[Entry]:
  """The arrays of a model in an architecture: gpt2, one of `LLAMAS`, or diffeqformer."""
  family = "llama" if architecture in LLAMAS else architecture
  outside, (layer, groups) = _OUTSIDE[family] | {"head": "lm_head"}, _LAYERS[family]
  kernel = "same" if architecture == "gpt2" else "transposed"
  field = vector_fields.FIELDS[model.field]
  tables = ["embedding"] + ["positions"] * field.learned_positions + ["head"] * (not vector_fields.has_tied_head(model))
  for name in tables:
    yield Entry(f"{outside[name]}.weight", (name,), None, "same")
  for leaf in field.norm_specs(model.embed_dim):
    yield Entry(f"{outside['final_norm']}.{_LEAVES[leaf]}", ("final_norm", leaf), None, "same")
  for u in range(len(weight_times(model).points_UxQ)):
    for group, leaves in field.specs(model).items():
      for leaf in leaves:
        name = f"{layer}.{u}.{groups[group] if groups else group}.{_LEAVES[leaf]}"
        kind = "qkv" if group == "qkv" and architecture == "gpt2" else kernel if leaf == "kernel" else "same"
        yield Entry(name, ("weight_source", "stored", group, leaf), u, kind)


def to_tensors(architecture: str, model: ModelConfig, params: Params, factors_U: Sequence[float] | None) -> Tensors:
  """Converts parameters with stored weights to the arrays of a file, in float32; a dt for each set is folded in."""
  tensors, leaves = {}, traverse_util.flatten_dict(params)
  for entry in entries(architecture, model):
    array = _of_set(leaves[entry.path], entry, factors_U)
    tensors[entry.name] = np.ascontiguousarray(_convert(array, entry.kind, model), np.float32)
  return tensors


def to_adapters(architecture: str, model: ModelConfig, lora: Params, factors_U: Sequence[float] | None) -> Tensors:
  """Converts adapters to the arrays of PEFT, whose names begin with those of the kernels' modules, in float32.

  A is [rank, in] there and B [out, rank], as torch's Linear has them, also where the kernel is GPT-2's Conv1D.
  """
  tensors = {}
  for entry in entries(architecture, model):
    if entry.weight_set is not None and entry.path[2] in lora and entry.path[3] == "kernel":
      module, adapter = entry.name.removesuffix("weight"), lora[entry.path[2]]
      b_RxO = _convert(_of_set(adapter["b"], entry, factors_U), "qkv" if entry.kind == "qkv" else "same", model)
      for name, array in (("lora_A", adapter["a"][entry.weight_set]), ("lora_B", b_RxO)):
        tensors[f"{module}{name}.weight"] = np.ascontiguousarray(array.T, np.float32)
  return tensors


def _of_set(leaf: np.ndarray, entry: Entry, factors_U: Sequence[float] | None) -> np.ndarray:
  """An entry's part of a leaf: that of its weight set in float64, with dt folded in where there are factors."""
  if entry.weight_set is None:
    return leaf
  array = np.asarray(leaf[entry.weight_set], np.float64)
  return array * factors_U[entry.weight_set] if factors_U and entry.path[2] in WRITING else array


def to_params(architecture: str, model: ModelConfig, tensors: Tensors) -> Params:
  """Converts the arrays of a file to parameters with stored weights, in float32; the inverse of `to_tensors`.

  Removes the arrays from `tensors`; those left there are unused. Raises KeyError with the name of an array that is
  missing, and ValueError for an array of another shape than the model's.
  """
  abstract = traverse_util.flatten_dict(params_of(abstract_model(model)))
  stacks: dict[tuple[str, ...], list[np.ndarray]] = {}
  for entry in entries(architecture, model):
    array = _convert(tensors.pop(entry.name), entry.kind, model, back=True)
    expected = abstract[entry.path].shape[entry.weight_set is not None :]  # stored weights have a leading axis U
    if array.shape != expected:
      raise ValueError(f"{entry.name}: has the shape {array.shape}, expected {expected} (axes in our order)")
    stacks.setdefault(entry.path, []).append(np.asarray(array, np.float32))
  return traverse_util.unflatten_dict(
    {path: np.stack(arrays) if path[0] == "weight_source" else arrays[0] for path, arrays in stacks.items()}
  )


def _convert(array: np.ndarray, kind: str, model: ModelConfig, back: bool = False) -> np.ndarray:
  """An array in the file's layout, or `back`. qkv is [..., H 3 C] here, head by head, and [..., 3 H C] there."""
  if kind == "transposed":
    return array.T
  if kind == "qkv":
    H, C = model.num_heads, model.head_size
    split = (3, H, C) if back else (H, 3, C)
    return array.reshape(*array.shape[:-1], *split).swapaxes(-3, -2).reshape(array.shape)
  return array
