"""--job=export and --job=import."""

import dataclasses
import math
import os
from typing import Any

import jax

from diffeq_nnx import config as config_lib
from diffeq_nnx import distributed
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import huggingface, importing, stablehlo
from diffeq_nnx.report import print_result
from diffeq_nnx.train import claim, load_corpus, prepare
from diffeq_nnx.train_step import abstract_state, init_state, state_shardings


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
  try:
    model = discretized_config(config.model, num_steps)
  except ValueError as error:
    raise UserError(f"--job=export: {error}") from error
  huggingface.check_new(out)
  if format != "stablehlo":
    huggingface.architecture_of(model, format)
  workdir_lib.require(workdir, config)
  tokenizer = workdir_lib.tokenizer_of(workdir, config)
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    checkpoints = Checkpoints(workdir, config, tokenizer.hash)
    params = checkpoints.restore_params(abstract_state(config, mesh))
    if params is None:
      raise UserError(f"workdir={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every")
    params = jax.device_get(jax.jit(discretized_params, static_argnums=(0, 1))(config.model, model, params))
  if format == "stablehlo":
    result = stablehlo.write(model, params, out, tokenizer)
  else:
    result = huggingface.write(model, params, out, tokenizer, format)
  return print_result({"job": "export", "workdir": workdir, "step": checkpoints.steps()[-1], "format": format, **result})


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
  tokenizer = importing.tokenizer_of(from_hf, config.data.begin_mark)
  config = _run_config(config, model, tokenizer, os.path.join(os.path.abspath(workdir), tokenizer.file_name))
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    workdir_lib.write_tokenizer(workdir, tokenizer)  # the run's own from the start: the folder may go
    corpus = load_corpus(config)
    claim(config, workdir, corpus)
    places = state_shardings(config, mesh)
    state = jax.jit(init_state, static_argnums=0, out_shardings=places)(config)
    checkpoints = Checkpoints(workdir, config, corpus.tokenizer.hash)
    checkpoints.save({**state, "params": jax.device_put(params, places["params"])}, {"windows": 0}, None)
    checkpoints.close()
  return print_result({"job": "import", "workdir": workdir, "from_hf": from_hf, "field": config.model.field,
                 "num_steps": config.model.num_steps, "dtype": config.model.dtype,
                 "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))})


def _run_config(config: Config, model: ModelConfig, tokenizer: Tokenizer, path: str) -> Config:
  """The config of an imported run: keys that must go with the model go with this one."""
  train = config.train
  return config_lib.from_dict(config_lib.to_dict(dataclasses.replace(
      config, model=dataclasses.replace(model, attention=config.model.attention),
      data=dataclasses.replace(config.data, tokenizer=path, begin_mark=tokenizer.bos_id is not None),
      train=dataclasses.replace(train, step_counts=(), loss_chunks=math.gcd(train.loss_chunks, model.seq_len),
                                remat_every=train.remat_every if model.num_steps % train.remat_every == 0 else 1),
      eval=dataclasses.replace(config.eval, num_steps=None))))


def _one_process(job: str) -> None:
  if jax.process_count() > 1:
    raise UserError(f"--job={job}: runs on one host; start one process, whose devices hold the model", everywhere=True)
