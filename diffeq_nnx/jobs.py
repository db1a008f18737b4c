"""What `--job` can be: each a function of a config and a work directory."""

import json

import jax

from diffeq_nnx import data
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.evaluate import Evaluator
from diffeq_nnx.train import say_attention, train
from diffeq_nnx.train_step import init_state


def evaluate(config: Config, workdir: str) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or tokenizer.
  """
  say_attention(config.model)
  known = workdir_lib.require(workdir, config)
  corpus = data.load(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
  workdir_lib.check(workdir, known, config, corpus.tokenizer.hash)
  restored = Checkpoints(workdir, config, corpus.tokenizer.hash).restore(jax.eval_shape(lambda: init_state(config)))
  if restored is None:
    raise UserError(f"workdir={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every")
  state, _ = restored
  evaluator = Evaluator(config, corpus)
  result = {"job": "evaluate", "workdir": workdir, "step": int(state["step"]), "num_steps": evaluator.num_steps,
            **evaluator(state["params"])}
  print(json.dumps(result), flush=True)
  return result


JOBS = {"train": train, "evaluate": evaluate}
