"""--job=import: a published checkpoint as a run."""

import dataclasses
import os
from typing import Any

import jax

from diffeq_nnx import files
from diffeq_nnx.config import Config
from diffeq_nnx.exporting import importing
from diffeq_nnx.exporting.hub import open_folder
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training import starting
from diffeq_nnx.training.setup import checked_mesh, load_corpus


def import_run(config: Config, workdir: str, *, from_hf: str) -> dict[str, Any]:
  """Writes a published checkpoint as a run at step 0 and prints one JSON line on stdout.

  Args:
    config: what the run is to be but for its model and tokenizer, which are the checkpoint's.
    workdir: the new run's directory.
    from_hf: a Hugging Face folder, the name of a model on the hub (see `hub.find_folder`), or a GGUF file of a Llama.

  Raises:
    UserError: a checkpoint that can't be held (see `importing.import_hf`), or a directory that holds a run.
  """
  distributed.require_one_process("import")
  workdir_lib.require_none(workdir)
  with open_folder(from_hf) as folder:
    model, params = importing.read(folder)
    tokenizer = importing.tokenizer_of(folder, config.data)
  path = os.path.join(files.absolute(workdir), tokenizer.file_name)
  config = starting.derived(
    config,
    dataclasses.replace(model, attention=config.model.attention),
    dataclasses.replace(config.data, tokenizer=path, begin_mark=tokenizer.bos_id is not None),
  )
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    workdir_lib.clear(workdir, tokenizer)  # the run's own from the start: the folder may go
    starting.start(config, workdir, load_corpus(config), params, mesh, None)
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
