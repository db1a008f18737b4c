"""Hugging Face folders: GPT-2 and Llama where they hold the model, else our own small modelling file.

Models with sequential steps are GPT-2 or Llama once dt is folded into the projections that write to the state. No
architecture of transformers holds parallel steps (looked at: every one with parallel branches in 5.23): GPT-NeoX,
GPT-J, CodeGen, Phi, Falcon, StableLM and Cohere have no learned positions for the gpt field, and of those only
StableLM and Cohere have SwiGLU, without RMSNorm for the llama field.
"""

import dataclasses
import os
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import folders, layouts, tokenizer_files
from diffeq_nnx.model.discretization import discretize
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, graph
from diffeq_nnx.model.solvers import make_grid

FORMS = ("hf", "hf_exact", "hf_code")
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", layouts.OWN: "DiffEqFormerForCausalLM"}
MODELING_FILE = "modeling_diffeqformer.py"
CHECKED_TOKENS = 64  # length of the two sequences whose logits are compared


def export_hf(model: Model, folder: str, *, tokenizer: Tokenizer | None = None, num_steps: int | None = None,
              form: str = "hf") -> dict[str, Any]:
  """Writes a model as a Hugging Face folder: config.json, generation_config.json, model.safetensors, tokenizer files.

  Sequential steps become GPT-2 (gpt) or Llama (llama), parallel ones and norms with a shift (llama) a folder with its
  own modeling file.

  Args:
    model: any model; generated and shared weights are discretised.
    folder: where to; made by this call.
    tokenizer: None: no tokenizer files, and no marks.
    num_steps: as for `diffeq_nnx.discretize`.
    form: hf, hf_exact (a Llama with a few channels more, whose one eps then does what our two do), or hf_code (our own
      modeling file for sequential steps too: it holds every model).

  Returns:
    What was written: folder, architecture, trust_remote_code, num_steps, dtype, logit_difference (the largest that a
    model made anew from the folder's files has, computed here in float32, with the eps that the architecture can say),
    and notes, a list of sentences.

  Raises:
    UserError: the folder holds something, there is no such number of steps, GPT-2 can't hold the heads, or hf_exact
      the norms.
  """
  stored = discretize(model, num_steps)
  return write(stored.config, nnx.to_pure_dict(nnx.state(stored, nnx.Param)), folder, tokenizer, form)


def architecture_of(model: ModelConfig, form: str) -> str:
  """gpt2, llama or diffeqformer; raises UserError where no folder can hold the model, or the form is none."""
  if form not in FORMS:
    raise UserError(f"form={form!r}: must be one of {', '.join(FORMS)}", everywhere=True)
  if model.field not in ("gpt", "llama") or model.solver not in ("euler", "sequential"):
    raise UserError(f"model.field={model.field}, model.solver={model.solver}: Hugging Face folders hold gpt and llama with "
                    "euler or sequential steps; --format=stablehlo holds any", everywhere=True)
  if form == "hf_code" or model.solver != "sequential":
    return layouts.OWN
  if model.field == "llama" and model.block_shift and form == "hf_exact":
    raise UserError(f"form={form!r}: this model's block norms have a shift (model.norm_shift), which those of "
                    "transformers' Llama lack; --format=hf_code (our own modeling file) and --format=stablehlo hold it",
                    everywhere=True)
  if model.field == "llama":
    return layouts.OWN if model.block_shift else "llama"
  if model.kv_heads != model.num_heads:
    raise UserError(f"model.num_kv_heads={model.kv_heads}: GPT-2 has no grouped-query heads, its key/value heads are as "
                    f"many as its query heads, {model.num_heads}; --format=hf_code (our own modelling file) and "
                    "--format=stablehlo hold them", everywhere=True)
  return "gpt2"


def write(stored: ModelConfig, params: Params, folder: str, tokenizer: Tokenizer | None,
          form: str) -> dict[str, Any]:
  """`export_hf` of a config and parameters with stored weights."""
  architecture = architecture_of(stored, form)
  wide = form == "hf_exact" and architecture == "llama" and stored.final_eps > stored.block_eps
  held = held_model(stored, layouts.OWN if wide else architecture)
  notes, params = [], jax.device_get(params)
  with folders.new_folder(folder) as place:
    settings, marks = _settings(held, architecture), tokenizer_files.mark_ids(tokenizer)
    tensors = layouts.to_tensors(architecture, stored, params, make_grid(stored).dts_S)
    if wide:
      tensors, eps = layouts.widened(held, tensors)
      settings |= {"hidden_size": held.embed_dim + held.num_heads, "rms_norm_eps": eps, "mlp_bias": True}
      notes.append(f"a Llama with {held.num_heads} channels more than the model's {held.embed_dim} and biases in its "
                   "feed-forward branches, by which its one eps does what our two do")
    folders.write_json(place, "config.json", {**settings, **marks})
    folders.write_json(place, "generation_config.json", marks)
    if architecture == layouts.OWN:
      folders.copy_template(MODELING_FILE, place)
      notes.append(_why_own(stored, form))
    if tokenizer is not None:
      notes += tokenizer_files.write(tokenizer, place, stored.seq_len)
    path = os.path.join(place, "model.safetensors")
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    del tensors
    tensors = safetensors.numpy.load_file(path)
    if wide:
      tensors, block_eps, final_eps = layouts.narrowed(held, tensors, eps)
      held = dataclasses.replace(held, norm_eps=block_eps, final_norm_eps=final_eps)
    difference = _logit_difference(stored, params, held, layouts.to_params(architecture, held, tensors))
  if held.final_eps != stored.final_eps and not wide:
    notes.append(f"{architecture} has one eps, {held.block_eps:g}, which is the block's; the final norm's is "
                 f"{stored.final_eps:g} here, and all of logit_difference beyond rounding comes from that; "
                 "--format=hf_exact (Llama only), hf_code and stablehlo hold both")
  return {"folder": folder, "architecture": CLASSES[architecture], "trust_remote_code": architecture == layouts.OWN,
          "num_steps": stored.num_steps, "dtype": "float32", "logit_difference": difference, "notes": notes}


def _why_own(stored: ModelConfig, form: str) -> str:
  """The note on a folder that has its own modeling file."""
  own = f"the folder has its own {MODELING_FILE}"
  only = "and loads with trust_remote_code=True only"
  if stored.solver == "euler":
    return f"no architecture of transformers holds this model exactly: {own}, {only}"
  if form == "hf_code":
    return f"{own}, as asked, {only}"
  return f"this model's block norms have a shift, which those of transformers' Llama lack: {own}, {only}"


def held_model(stored: ModelConfig, architecture: str) -> ModelConfig:
  """The model that the folder holds: dt is folded, and only our own architecture has an eps for the final norm."""
  final_eps = stored.final_eps if architecture == layouts.OWN else stored.block_eps
  return dataclasses.replace(stored, horizon=None, step_sizes=(), norm_eps=stored.block_eps, final_norm_eps=final_eps)


def _settings(held: ModelConfig, architecture: str) -> dict[str, Any]:
  """config.json without the marks."""
  common = {"architectures": [CLASSES[architecture]], "model_type": architecture, "torch_dtype": "float32",
            "vocab_size": held.vocab_size, "initializer_range": 0.02}
  if architecture == "gpt2":
    return common | {
        "n_positions": held.seq_len, "n_embd": held.embed_dim, "n_layer": held.num_steps, "n_head": held.num_heads,
        "n_inner": held.hidden_dim, "activation_function": "gelu_new", "layer_norm_epsilon": held.block_eps,
        "resid_pdrop": held.dropout, "embd_pdrop": held.dropout, "attn_pdrop": 0.0, "tie_word_embeddings": True}
  sizes = {"hidden_size": held.embed_dim, "intermediate_size": held.hidden_dim, "num_hidden_layers": held.num_steps,
           "num_attention_heads": held.num_heads, "num_key_value_heads": held.kv_heads,
           "max_position_embeddings": held.seq_len, "tie_word_embeddings": False}
  if architecture == "llama":
    return common | sizes | {"head_dim": held.head_dim, "hidden_act": "silu", "rms_norm_eps": held.block_eps,
                             "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False}
  module = MODELING_FILE.removesuffix(".py")
  auto_map = {"AutoConfig": f"{module}.DiffEqFormerConfig", "AutoModelForCausalLM": f"{module}.DiffEqFormerForCausalLM"}
  return common | sizes | {"auto_map": auto_map, "field": held.field, "solver": held.solver,
                           "norm_eps": held.block_eps, "final_norm_eps": held.final_eps, "norm_shift": held.block_shift}


def _logit_difference(stored: ModelConfig, params: Params, held: ModelConfig, read: Params) -> float:
  """The largest difference in logits between a model and what was read back, both computed here in float32."""
  tokens_BxL = np.random.default_rng(0).integers(stored.vocab_size, size=(2, min(stored.seq_len, CHECKED_TOKENS)))

  def logits(config: ModelConfig, params: Params) -> np.ndarray:
    plain = dataclasses.replace(config, dtype="float32", attention="reference")
    run = jax.jit(lambda params, tokens_BxL: nnx.merge(graph(plain), params)(tokens_BxL))
    return np.asarray(run(params, jnp.asarray(tokens_BxL)))

  return float(np.abs(logits(stored, params) - logits(held, read)).max())
