"""StableHLO through jax.export: a function of (weights, tokens) and the weights beside it, for CPU, CUDA and TPU.

The weights are arguments, since constants would limit the program to 2 GB.
"""

import dataclasses
import os
from typing import Any

from flax import traverse_util
import jax
import jax.export  # not loaded by jax alone
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.depth.discretization import discretize
from diffeq_nnx.exporting import folders, huggingface, tokenizer_files
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, build, params_of

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM, WEIGHTS, LOADER = "model.jax_export", "weights.safetensors", "load.py"


def export_stablehlo(
  model: Model, folder: str, *, tokenizer: Tokenizer | None = None, num_steps: int | None = None
) -> dict[str, Any]:
  """Writes a model as a program that needs jax, flatbuffers and safetensors, but not this package.

  The program maps tokens [B, L] int32 to logits [B, L, V], at any B and any L up to seq_len, in the model's dtype.

  Args:
    model: any model; generated and shared weights are discretized.
    folder: made by this call: the program, its weights, load.py, model.json, tokenizer files.
    tokenizer: None: no tokenizer files.
    num_steps: as for `diffeq_nnx.discretize`.

  Returns:
    A description: folder, platforms, num_steps, dtype, logit_difference (the largest difference between the model and
    the program read back, on this machine), notes.

  Raises:
    UserError: the folder is not empty, or there is no such number of steps.
  """
  stored = discretize(model, num_steps)
  return write(stored.config, params_of(stored), folder, tokenizer)


def write(stored: ModelConfig, params: Params, folder: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """`export_stablehlo` of a config and parameters with stored weights."""
  portable = dataclasses.replace(stored, attention="reference")
  weights = {name: np.asarray(array) for name, array in traverse_util.flatten_dict(params, sep=".").items()}
  with folders.new_folder(folder, "model.json") as place:
    with open(os.path.join(place, PROGRAM), "wb") as file:
      file.write(_program(portable, weights).serialize())
    folders.write_tensors(place, WEIGHTS, weights)
    folders.copy_template(LOADER, place)
    keys = ("field", "solver", "num_steps", "vocab_size", "seq_len", "dtype")
    facts = {key: getattr(stored, key) for key in keys} | {"platforms": PLATFORMS}
    folders.write_json(place, "model.json", facts | tokenizer_files.mark_ids(tokenizer))
    notes = [] if tokenizer is None else tokenizer_files.write(tokenizer, place, stored.seq_len)
    difference = _logit_difference(portable, params, place)
  return {
    "folder": folder,
    "architecture": "StableHLO",
    "trust_remote_code": False,
    "platforms": PLATFORMS,
    "num_steps": stored.num_steps,
    "dtype": stored.dtype,
    "logit_difference": difference,
    "notes": notes,
  }


def _program(model: ModelConfig, weights: dict[str, np.ndarray]) -> jax.export.Exported:
  @jax.jit
  def logits(weights, tokens_BxL):
    return build(model, traverse_util.unflatten_dict(weights, sep="."))(tokens_BxL)

  shape = jax.export.symbolic_shape("batch, length", constraints=[f"length <= {model.seq_len}"])
  shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weights)
  return jax.export.export(logits, platforms=PLATFORMS)(shapes, jax.ShapeDtypeStruct(shape, jnp.int32))


def _logit_difference(model: ModelConfig, params: Params, folder: str) -> float:
  """The largest difference in logits between a model and the program read back, in the model's dtype."""
  tokens_BxL = huggingface.make_tokens(model)
  with open(os.path.join(folder, PROGRAM), "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
  theirs = program.call(safetensors.numpy.load_file(os.path.join(folder, WEIGHTS)), tokens_BxL)
  return float(jnp.abs(huggingface.compute_logits(model, params, tokens_BxL) - theirs).max())
