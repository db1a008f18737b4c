"""--job=export and --job=import."""

import dataclasses
import os
from typing import Any

import jax

from diffeq_nnx import distributed
from diffeq_nnx import runs
from diffeq_nnx import sharding
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.config import Config
from diffeq_nnx.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import folders, huggingface, importing, stablehlo
from diffeq_nnx.report import print_result
from diffeq_nnx.train import load_corpus, prepare


def export_run(config: Config, workdir: str, *, out: str, format: str = "hf",  # pylint: disable=redefined-builtin
               num_steps: int | None = None) -> dict[str, Any]:
  """Writes the newest model of a run for other libraries, with stored weights, and prints one JSON line on stdout.

  Args:
    config: of the run.
    workdir: the run's directory.
    out: the folder to make.
    format: hf (GPT-2 or Llama where they hold the model, else our modelling file), hf_exact (a wider Llama, which
      holds both eps), hf_code (our modelling file always) or stablehlo.
    num_steps: as for `discretization.discretize`.

  Raises:
    UserError: a model that the format can't hold, a folder that holds something, no checkpoint, several processes.
  """
  distributed.end_on_sigterm()
  _one_process("export")
  model = discretized_config(config.model, num_steps)
  folders.check_new(out)
  if format != "stablehlo":
    huggingface.architecture_of(model, format)
  workdir_lib.require(workdir, config)
  tokenizer = workdir_lib.tokenizer_of(workdir, config)
  config = runs.anywhere(config)
  mesh = sharding.make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    params, step = runs.read(config, workdir, mesh, tokenizer.hash)
    params = jax.device_get(discretized_params(config.model, model, params))
  if format == "stablehlo":
    result = stablehlo.write(model, params, out, tokenizer)
  else:
    result = huggingface.write(model, params, out, tokenizer, format)
  return print_result({"job": "export", "workdir": workdir, "step": step, "format": format, **result})


def import_run(config: Config, workdir: str, *, from_hf: str) -> dict[str, Any]:
  """Writes a Hugging Face folder as a run at step 0 and prints one JSON line on stdout.

  Args:
    config: what the run is to be but for its model and tokenizer, which are the folder's.
    workdir: the new run's directory.
    from_hf: the folder.

  Raises:
    UserError: a folder that can't be held (see `importing.import_hf`), or a directory that holds a run.
  """
  distributed.end_on_sigterm()
  _one_process("import")
  workdir_lib.require_none(workdir)
  model, params = importing.read(from_hf)
  tokenizer = importing.tokenizer_of(from_hf, config.data.begin_mark, config.data.begin_token, config.data.end_token)
  path = os.path.join(os.path.abspath(workdir), tokenizer.file_name)
  config = runs.derived(
      config, dataclasses.replace(model, attention=config.model.attention),
      dataclasses.replace(config.data, tokenizer=path, begin_mark=tokenizer.bos_id is not None))
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    workdir_lib.clear(workdir, tokenizer)  # the run's own from the start: the folder may go
    runs.start(config, workdir, load_corpus(config), params, mesh, None)
  return print_result({"job": "import", "workdir": workdir, "from_hf": from_hf, "field": config.model.field,
                       "num_steps": config.model.num_steps, "dtype": config.model.dtype,
                       "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))})


def _one_process(job: str) -> None:
  if jax.process_count() > 1:
    raise UserError(f"--job={job}: runs on one host; start one process, whose devices hold the model", everywhere=True)
