"""Hugging Face folders: as GPT-2, Llama or Qwen where these can hold the model, else with our own small modeling file.

Models with sequential steps are GPT-2, Llama or Qwen once dt is folded into the projections onto the residual stream.
No architecture of transformers 5.24 can represent parallel steps: of those with parallel branches, GPT-NeoX, GPT-J,
CodeGen, Phi, Falcon, StableLM and Cohere have no learned positions for the gpt field, and only StableLM and Cohere have
SwiGLU, but without RMSNorm for the llama field. Nor any whose steps evaluate a branch more than once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from diffeq_nnx.config import ModelConfig, RopeConfig
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.depth.discretization import discretize
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import folders, importing, layouts, tokenizer_files
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.grids import make_grid
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, build, params_of
from diffeq_nnx.model.solvers import SOLVERS, Leapfrog, RungeKutta, Solver, Splitting, weight_times

FORMS = ("hf", "hf_code")
CLASSES = {
  "gpt2": "GPT2LMHeadModel",
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  layouts.OWN: "DiffEqFormerForCausalLM",
}
MODELING_FILE = "modeling_diffeqformer.py"
CHECKED_TOKENS = 64  # tokens of each of the two sequences whose logits are compared


def export_hf(
  model: Model, folder: str, *, tokenizer: Tokenizer | None = None, num_steps: int | None = None, form: str = "hf"
) -> dict[str, Any]:
  """Writes a model as a Hugging Face folder: config.json, generation_config.json, model.safetensors, tokenizer files.

  Sequential steps become GPT-2 (gpt), or Llama, Qwen 2 (biases of queries, keys and values) or Qwen 3 (norms of queries
  and keys) (llama). Those of other solvers, and what these classes lack, become a folder with its own modeling file.

  Args:
    model: any model; generated and shared weights are discretized.
    folder: made by this call.
    tokenizer: None: no tokenizer files, and no marks.
    num_steps: as for `diffeq_nnx.discretize`.
    form: hf, or hf_code (our own modeling file for sequential steps too: it represents every model).

  Returns:
    A description: folder, architecture, trust_remote_code, num_steps, dtype, logit_difference (the largest difference
    between the model and one read back from the folder, computed here in float32, with the eps of the architecture),
    and notes, a list of sentences.

  Raises:
    UserError: the folder is not empty, there is no such number of steps, GPT-2 can't represent the heads, or the
      modeling file an added field or solver.
  """
  stored = discretize(model, num_steps)
  return write(stored.config, params_of(stored), folder, tokenizer, form)


def choose_architecture(model: ModelConfig, form: str) -> tuple[str, str]:
  """The name of the architecture: gpt2, one of `layouts.LLAMAS`, or diffeqformer; and why it is diffeqformer.

  Raises UserError for an unknown form, or a model that it can't represent.
  """
  if form not in FORMS:
    raise UserError(f"form={form!r}: must be one of {', '.join(FORMS)}")
  if model.field not in ("gpt", "llama") or _describe_method(SOLVERS[model.solver]) is None:
    raise UserError(
      f"model.field={model.field}, model.solver={model.solver}: Hugging Face folders support the fields gpt and llama, "
      "and the solvers of this package, Runge-Kutta methods and splittings; --format=stablehlo supports any"
    )
  if model.solver != "sequential":
    return layouts.OWN, "no architecture of transformers represents this model"
  if form == "hf_code":
    return layouts.OWN, "as requested"
  if model.field == "llama":
    if model.embed_dim % model.num_heads:
      return layouts.OWN, "the Llama of transformers requires a width that is a multiple of its number of heads"
    if model.block_shift or (model.qkv_bias and model.qk_norm):
      problem = "no Llama of transformers has a shift in its norms, or both biases and norms of queries and keys"
      return layouts.OWN, problem
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama", ""
  problem = ""
  if model.head_size * model.num_heads != model.embed_dim:
    problem = f"model.head_dim={model.head_dim}: GPT-2's heads have the width model.embed_dim / model.num_heads"
  elif model.kv_heads != model.num_heads:
    rule = f"it needs as many key/value heads as query heads, {model.num_heads}"
    problem = f"model.num_kv_heads={model.kv_heads}: GPT-2 has no grouped-query heads, {rule}"
  if problem:
    raise UserError(f"{problem}; --format=hf_code (our own modeling file) and --format=stablehlo support others")
  return "gpt2", ""


def write(stored: ModelConfig, params: Params, folder: str, tokenizer: Tokenizer | None, form: str) -> dict[str, Any]:
  """`export_hf` of a config and parameters with stored weights."""
  architecture, reason = choose_architecture(stored, form)
  exported = _exported_config(stored, architecture)
  notes, params = [], jax.device_get(params)
  with folders.new_folder(folder, "config.json") as place:
    settings, marks = _settings(exported, architecture), tokenizer_files.mark_ids(tokenizer)
    tensors = layouts.to_tensors(architecture, stored, params, folded_factors(stored))
    folders.write_json(place, "config.json", {**settings, **marks})
    folders.write_json(place, "generation_config.json", marks | tokenizer_files.list_ends(tokenizer))
    if architecture == layouts.OWN:
      folders.copy_template(MODELING_FILE, place)
      notes.append(f"{reason}: the folder has its own {MODELING_FILE}, and loads with trust_remote_code=True only")
    if tokenizer is not None:
      notes += tokenizer_files.write(tokenizer, place, stored.seq_len)
      if architecture == "qwen2":
        notes.append(
          "tokenizer: AutoTokenizer of transformers 5.24 takes Qwen2Tokenizer for any qwen2, which divides text as "
          "Qwen's own tokenizer does, after NFC; PreTrainedTokenizerFast.from_pretrained gives our ids"
        )
    path = folders.write_tensors(place, "model.safetensors", tensors)
    del tensors  # as large as the model
    read = layouts.to_params(architecture, exported, safetensors.numpy.load_file(path))
    difference = _logit_difference(stored, params, exported, read)
  if exported.final_eps != stored.final_eps:
    notes.append(
      f"{architecture} has one eps, {exported.block_eps:g}, which is the block's; the final norm's is "
      f"{stored.final_eps:g} here, and all of logit_difference beyond rounding comes from that; "
      "--format=hf_code and --format=stablehlo keep both"
    )
  if architecture in layouts.LLAMAS and exported.rope.factor != 1 and exported.seq_len <= exported.rope.original_len:
    notes.append(
      f"transformers warns that max_position_embeddings, {exported.seq_len}, is not above the length of the rotary "
      f"scaling, {exported.rope.original_len}, and computes the same"
    )
  return {
    "folder": folder,
    "architecture": CLASSES[architecture],
    "trust_remote_code": architecture == layouts.OWN,
    "num_steps": stored.num_steps,
    "dtype": "float32",
    "logit_difference": difference,
    "notes": notes,
  }


def folded_factors(stored: ModelConfig) -> tuple[float, ...] | None:
  """The dt of each weight set where it is folded into the projections `layouts.WRITING`.

  It is for one evaluation a step, whose weights are used by that step alone.
  """
  return make_grid(stored).dts if SOLVERS[stored.solver].evaluations == (1, 1) else None


def _describe_method(solver: Solver) -> dict[str, Any] | None:
  """The method as JSON values, which our own modeling file runs; None: it can't.

  A subclass of a method is another one, since it may define its own step.
  """
  if type(solver) is RungeKutta:
    nodes = [solver.nodes.index(c) for c in solver.c]  # of each stage
    return {"kind": "runge_kutta", "a": solver.a, "b": solver.b, "nodes": nodes}
  if type(solver) is Splitting:
    return {"kind": "splitting", "parts": solver.parts}
  return {"kind": "leapfrog"} if type(solver) is Leapfrog else None


def _exported_config(stored: ModelConfig, architecture: str) -> ModelConfig:
  """The exported model: dt may be folded, and only our own architecture has an eps for the final norm."""
  final_eps = stored.final_eps if architecture == layouts.OWN else stored.block_eps
  folded: dict[str, Any] = {"horizon": None, "step_sizes": ()} if folded_factors(stored) else {}
  return dataclasses.replace(stored, norm_eps=stored.block_eps, final_norm_eps=final_eps, **folded)


def _settings(exported: ModelConfig, architecture: str) -> dict[str, Any]:
  """The values of config.json, without the marks."""
  names = importing.SIZES["gpt2" if architecture == "gpt2" else "llama"]
  common: dict[str, Any] = {
    "architectures": [CLASSES[architecture]],
    "model_type": architecture,
    "torch_dtype": "float32",
    **{theirs: getattr(exported, ours) for ours, (theirs, _) in names.items()},
    "initializer_range": 0.02,
    "tie_word_embeddings": vector_fields.has_tied_head(exported),
    **({"depth_order": exported.depth_order} if exported.depth_order else {}),  # which only this package reads
  }
  if architecture == "gpt2":
    return common | {
      "n_inner": exported.hidden_dim,
      "activation_function": "gelu_new",
      "layer_norm_epsilon": exported.block_eps,
      "resid_pdrop": exported.dropout,
      "embd_pdrop": exported.dropout,
      "attn_pdrop": 0.0,
    }
  common |= {
    "intermediate_size": exported.hidden_dim,  # also where `mlp_dim` leaves it to the field
    "num_key_value_heads": exported.kv_heads,
    "head_dim": exported.head_size,
  }
  if architecture in layouts.LLAMAS:
    llama = {
      "hidden_act": "silu",
      "rms_norm_eps": exported.block_eps,
      "rope_theta": exported.rope.base,
      "rope_scaling": _scaling(exported.rope),
    }
    without_biases = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}.get(architecture, ())
    return common | llama | dict.fromkeys(without_biases, False)
  module, solver, grid = MODELING_FILE.removesuffix(".py"), SOLVERS[exported.solver], make_grid(exported)
  times = weight_times(exported, grid)
  return common | {
    "auto_map": {
      "AutoConfig": f"{module}.DiffEqFormerConfig",
      "AutoModelForCausalLM": f"{module}.{CLASSES[layouts.OWN]}",
    },
    "num_hidden_layers": grid.num_steps * solver.evaluations.attention,  # entries of a key-value cache
    "field": exported.field,
    "num_steps": grid.num_steps,
    "num_weight_sets": len(times.points_UxQ),
    "solver": exported.solver,
    "method": _describe_method(solver),
    "step_sizes": grid.dts,  # all are 1 where dt is folded
    "weight_sets": times.index_SxN.tolist(),
    "norm_eps": exported.block_eps,
    "final_norm_eps": exported.final_eps,
    "norm_shift": exported.block_shift,
    "qkv_bias": exported.qkv_bias,
    "qk_norm": exported.qk_norm,
    "rotary_base": exported.rope.base,
    "rotary_scaling": _scaling(exported.rope),
  }


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
  """The scaling as config.json has it."""
  if rope.factor == 1:
    return None
  return {
    "rope_type": "llama3",
    "factor": rope.factor,
    "low_freq_factor": rope.low_freq_factor,
    "high_freq_factor": rope.high_freq_factor,
    "original_max_position_embeddings": rope.original_len,
  }


def make_tokens(model: ModelConfig) -> jax.Array:
  """Makes the tokens [2, L] on which a model and its export are compared."""
  shape = (2, min(model.seq_len, CHECKED_TOKENS))
  return jnp.asarray(np.random.default_rng(0).integers(model.vocab_size, size=shape), jnp.int32)


def compute_logits(model: ModelConfig, params: Params, tokens_BxL: jax.Array) -> jax.Array:
  """Computes logits [B, L, V] without a kernel; one program serves models that differ in unset defaults alone."""
  horizon = None if model.step_sizes else model.total_time
  explicit: dict[str, Any] = {"norm_eps": model.block_eps, "final_norm_eps": model.final_eps, "horizon": horizon}
  return _compute(dataclasses.replace(model, attention="reference", **explicit), params, tokens_BxL)


@functools.partial(jax.jit, static_argnums=0)
def _compute(model: ModelConfig, params: Params, tokens_BxL: jax.Array) -> jax.Array:
  return build(model, params)(tokens_BxL)


def _logit_difference(stored: ModelConfig, params: Params, exported: ModelConfig, read: Params) -> float:
  """The largest difference in logits between a model and the one read back, both computed here in float32."""
  tokens_BxL = make_tokens(stored)
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
  ours = compute_logits(dataclasses.replace(stored, dtype="float32"), params, tokens_BxL)
  theirs = compute_logits(dataclasses.replace(exported, dtype="float32"), read, tokens_BxL)
  return float(np.abs(np.subtract(ours, theirs)).max())
