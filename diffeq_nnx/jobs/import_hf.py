"""--job=import: a published checkpoint as a run."""

import dataclasses
import os
from typing import Any

import jax

from diffeq_nnx import files
from diffeq_nnx.config import Config
from diffeq_nnx.exporting import importing
from diffeq_nnx.exporting.hub import open_folder
from diffeq_nnx.jobs.discretize import derive_config
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.devices import checked_mesh
from diffeq_nnx.runs.run import Run, load_corpus
from diffeq_nnx.training.step import place_state


def import_run(config: Config, workdir: str, *, from_hf: str) -> dict[str, Any]:
  """Writes a published checkpoint as a run at step 0 and prints one JSON line on stdout.

  Args:
    config: what the run is to be but for its model and tokenizer, which are the checkpoint's.
    workdir: the new run's directory.
    from_hf: a Hugging Face folder, the name of a model on the hub (see `hub.find_folder`), or a GGUF file of a Llama.

  Raises:
    UserError: a checkpoint that can't be held (see `importing.import_hf`), or a directory that holds a run.
  """
  workdir_lib.require_none(workdir)
  with open_folder(from_hf) as folder:
    model, params = importing.read(folder)
    tokenizer = importing.read_tokenizer(folder, config.data)
  path = os.path.join(files.absolute(workdir), tokenizer.file_name)
  config = derive_config(
    config,
    dataclasses.replace(model, attention=config.model.attention),
    dataclasses.replace(config.data, tokenizer=path, begin_mark=tokenizer.bos_id is not None),
  )
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    workdir_lib.clear(workdir, tokenizer)  # the run's own from the start: the folder may go
    Run.create(config, workdir, load_corpus(config), place_state(config, params, mesh), None)
  return print_result(
    {
      "job": "import",
      "workdir": workdir,
      "from_hf": from_hf,
      "field": config.model.field,
      "num_steps": config.model.num_steps,
      "dtype": config.model.dtype,
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
  )
