"""What `--job` can be: each a function of a config and a work directory."""

import dataclasses
import json
import os
from typing import Sequence

import jax
from jax.sharding import Mesh

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx import distributed
from diffeq_nnx import sharding
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config
from diffeq_nnx.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import UserError
from diffeq_nnx.evaluate import Evaluator
from diffeq_nnx.exporting.jobs import export_run, import_run
from diffeq_nnx.train import batch_iterator, claim, load_corpus, prepare, train
from diffeq_nnx.train_step import State, abstract_state, init_state, state_shardings


def evaluate(config: Config, workdir: str) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, or a mesh that the devices don't make.
  """
  distributed.end_on_sigterm()
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    corpus, state = _open_run(config, workdir, mesh)
    evaluator = Evaluator(config, corpus, mesh)
    return _print({"job": "evaluate", "workdir": workdir, "step": int(state["step"]),
                   "num_steps": evaluator.num_steps, **evaluator(state["params"])})


def _open_run(config: Config, workdir: str, mesh: Mesh, key: str = "workdir") -> tuple[data.Corpus, State]:
  """The corpus and the newest state of a run; errors name `key`."""
  with distributed.together():
    workdir_lib.require(workdir, config)  # before the text is read
  corpus = load_corpus(config)
  with distributed.together():
    workdir_lib.require(workdir, config, corpus.tokenizer.hash)
  restored = Checkpoints(workdir, config, corpus.tokenizer.hash).restore(abstract_state(config, mesh))
  if restored is None:
    raise UserError(f"{key}={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every", everywhere=True)
  return corpus, restored[0]


def _print(result: dict) -> dict:
  """One JSON line on stdout, from process 0."""
  if distributed.leads():
    print(json.dumps(result), flush=True)
  return result


def discretize(config: Config, workdir: str, *, from_workdir: str, num_steps: int | None = None,
               step_sizes: Sequence[float] | None = None) -> dict:
  """Writes the newest model of a run with stored weights, as a run of its own at step 0, and prints one JSON line.

  The line has the validation values of the model before, at its own number of steps, and after.

  Args:
    config: of the run in `from_workdir`.
    workdir: the new run's directory.
    from_workdir: the run's.
    num_steps: as for `discretization.discretize`.
    step_sizes: likewise.

  Raises:
    UserError: a number of steps or step sizes that can't be, no checkpoint, or a directory that holds a run.
  """
  distributed.end_on_sigterm()
  try:
    model = discretized_config(config.model, num_steps, step_sizes)
  except ValueError as error:
    raise UserError(f"--job=discretize: {error}", everywhere=True) from error
  every = config.train.remat_every if model.num_steps % config.train.remat_every == 0 else 1
  stored = config_lib.from_dict(config_lib.to_dict(dataclasses.replace(
      config, model=model, train=dataclasses.replace(config.train, step_counts=(), remat_every=every),
      eval=dataclasses.replace(config.eval, num_steps=None))))
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    with distributed.together():
      workdir_lib.require_none(workdir)
    corpus, state = _open_run(config, from_workdir, mesh, "from_workdir")
    places = state_shardings(stored, mesh)
    params = jax.jit(discretized_params, static_argnums=(0, 1), out_shardings=places["params"])(
        config.model, model, state["params"])
    before = Evaluator(config, corpus, mesh, config.model.num_steps)(state["params"])
    after = Evaluator(stored, corpus, mesh)(params)
    claim(stored, workdir, corpus)
    checkpoints = Checkpoints(workdir, stored, corpus.tokenizer.hash)
    batches = batch_iterator(stored, corpus, sharding.Share(mesh, stored.train.batch_size))
    state = jax.jit(init_state, static_argnums=0, out_shardings=places)(stored)
    checkpoints.save({**state, "params": params}, batches.get_state(), after["loss"])
    checkpoints.close()
    return _print({"job": "discretize", "workdir": workdir, "from_workdir": from_workdir,
                   "before": {"num_steps": config.model.num_steps, **before},
                   "after": {"num_steps": model.num_steps, **after}})


def prepare_shards(config: Config, workdir: str) -> dict:
  """Turns data.source into prepared shards in the work directory and prints one JSON line on stdout.

  Run again after it was killed, it goes on.

  Raises:
    UserError: text, a tokenizer or a directory that can't be used; more than one process of the job (this one starts
      data.num_processes of its own).
    RunError: one of those dies.
  """
  if jax.process_count() > 1:
    raise UserError("--job=prepare: runs on one host, with data.num_processes processes; start it on one", everywhere=True)
  distributed.end_on_sigterm()
  recipe = data.recipe(config.data, config.model.vocab_size, config.seed)
  try:
    manifest = data.prepare(workdir, recipe, config.data.num_processes or os.cpu_count() or 1)
  except OSError as error:
    raise UserError(f"workdir={workdir}: can't be written ({error.strerror or error}); make room, or choose another "
                    "directory; run the same command to go on from what is finished") from error
  counts = {name: {key: split[key] for key in ("tokens", "bytes", "documents")} | {"shards": len(split["shards"])}
            for name, split in manifest["splits"].items()}
  return _print({"job": "prepare", "workdir": workdir, "tokenizer": manifest["tokenizer"]["hash"],
                 "records": manifest["records"], **counts})


JOBS = {"train": train, "evaluate": evaluate, "prepare": prepare_shards, "discretize": discretize,
        "export": export_run, "import": import_run}
