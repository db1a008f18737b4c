"""What `--job` can be: each a function of a config and a work directory."""

import json

import jax

from diffeq_nnx import data
from diffeq_nnx import distributed
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.evaluate import Evaluator
from diffeq_nnx.train import load_corpus, prepare, train
from diffeq_nnx.train_step import abstract_state


def evaluate(config: Config, workdir: str) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, or a mesh that the devices don't make.
  """
  distributed.end_on_sigterm()
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    with distributed.together():
      workdir_lib.require(workdir, config)  # before the text is read
    corpus = load_corpus(config)
    with distributed.together():
      workdir_lib.require(workdir, config, corpus)
    restored = Checkpoints(workdir, config, corpus.tokenizer.hash).restore(abstract_state(config, mesh))
    if restored is None:
      raise UserError(f"workdir={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every",
                      everywhere=True)
    state, _ = restored
    evaluator = Evaluator(config, corpus, mesh)
    result = {"job": "evaluate", "workdir": workdir, "step": int(state["step"]), "num_steps": evaluator.num_steps,
              **evaluator(state["params"])}
  if distributed.leads():
    print(json.dumps(result), flush=True)
  return result


def prepare_shards(config: Config, workdir: str) -> dict:
  """Turns data.source into prepared shards in the work directory and prints one JSON line on stdout.

  Run again after it was killed, it goes on.

  Raises:
    UserError: text, a tokenizer or a directory that can't be used; more than one process of the job (this one starts
      data.num_processes of its own).
    RunError: one of those dies, or the disk is full.
  """
  if jax.process_count() > 1:
    raise UserError("--job=prepare: runs on one host, with data.num_processes processes; start it on one",
                    everywhere=True)
  distributed.end_on_sigterm()
  recipe = data.recipe(config.data, config.model.vocab_size, config.seed)
  try:
    manifest = data.prepare(workdir, recipe, config.data.num_processes or data.num_cores())
  except (PermissionError, NotADirectoryError, FileExistsError) as error:
    raise UserError(f"workdir={workdir}: can't be written ({error.strerror}); choose another directory") from error
  except OSError as error:
    raise RunError(f"workdir={workdir}: can't be written ({error.strerror or error}); make room, and run the same "
                   "command to go on from what is finished") from error
  counts = {name: {key: split[key] for key in ("tokens", "bytes", "documents")} | {"shards": len(split["shards"])}
            for name, split in manifest["splits"].items()}
  result = {"job": "prepare", "workdir": workdir, "tokenizer": manifest["tokenizer"]["hash"],
            "records": manifest["records"], **counts}
  print(json.dumps(result), flush=True)
  return result


JOBS = {"train": train, "evaluate": evaluate, "prepare": prepare_shards}
