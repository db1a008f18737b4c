"""A run's adapters as a folder of Hugging Face's PEFT library, which loads them onto the exported base model."""

import dataclasses
import re
from typing import Any

from diffeq_nnx.config import LoraConfig, ModelConfig
from diffeq_nnx.exporting import folders, huggingface, layouts
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.parameters import TABLES, Params


def write(model: ModelConfig, params: Params, folder: str, base: str | None = None) -> dict[str, Any]:
  """Writes adapter_config.json and adapter_model.safetensors, which fit the base model as `huggingface.write` names it.

  Tables that learned are saved whole.

  Args:
    model: with stored weights and adapters.
    params: all of its parameters, on the host.
    base: where PEFT finds the base model, a folder or a name on the hub; None: its user says.

  Returns:
    A description: folder, architecture, trust_remote_code, num_steps, and the modules that have adapters or are saved.

  Raises:
    UserError: a model that the form hf can't hold, or a folder that is not empty.
  """
  stored, factors = dataclasses.replace(model, lora=LoraConfig()), huggingface.folded_factors(model)
  architecture, _ = huggingface.choose_architecture(stored, "hf")
  arrays = layouts.to_adapters(architecture, stored, params["weight_source"]["lora"], factors)
  modules = {"target_modules": sorted({re.sub(r".*\.\d+\.", "", name.rsplit(".lora_", 1)[0]) for name in arrays})}
  tables = {
    entry.name: params[entry.path[0]] for entry in layouts.entries(architecture, stored) if entry.path[0] in TABLES
  }
  # PEFT ties the copies of two modules only if both are listed.
  tied = model.lora.embeddings and vector_fields.has_tied_head(stored)
  if tied:
    tables["lm_head.weight"] = params["embedding"].copy()
  if model.lora.embeddings:
    arrays |= tables
    modules["modules_to_save"] = [name.split(".")[-2] for name in tables]
  settings = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": model.lora.rank,
    "lora_alpha": model.lora.alpha,
    "lora_dropout": model.lora.dropout,
    "fan_in_fan_out": architecture == "gpt2",
    "ensure_weight_tying": tied,
    "inference_mode": True,
    **modules,
  }
  with folders.new_folder(folder, "adapter_config.json") as place:
    arrays = {f"base_model.model.{name}": array for name, array in arrays.items()}
    folders.write_tensors(place, "adapter_model.safetensors", arrays)
    folders.write_json(place, "adapter_config.json", settings)
  return {
    "folder": folder,
    "architecture": huggingface.CLASSES[architecture],
    "trust_remote_code": architecture == layouts.OWN,
    "num_steps": stored.num_steps,
    **modules,
  }
