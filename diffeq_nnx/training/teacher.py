"""Distillation: another run's newest model, whose predictions the model in training learns to imitate."""

import dataclasses

from jax.sharding import Mesh

from diffeq_nnx.config import Config
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.runs.run import Run


def find_teacher(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> Run | None:
  """The run in train.teacher, after the checks that need no parameters; None: the config names none.

  Raises:
    UserError: there is no run, its tokenizer, vocabulary or length doesn't fit, or the mesh doesn't fit its model.
  """
  if config.train.teacher is None:
    return None
  run = Run.open(config.train.teacher, mesh=mesh, flag="config.train.teacher")
  model, key = run.config.model, f"train.teacher={config.train.teacher}"
  with distributed.sync_errors():
    if run.tokenizer.hash != tokenizer.hash:
      raise UserError(
        f"{key}: has another tokenizer ({run.tokenizer.hash[:12]}) than the run that it teaches "
        f"({tokenizer.hash[:12]}); name a run with the same one, or train with the tokenizer in its directory"
      )
    if model.vocab_size != config.model.vocab_size:
      raise UserError(
        f"{key}: has model.vocab_size={model.vocab_size}, and the run that it teaches {config.model.vocab_size}; name "
        "a run with the same vocabulary"
      )
    if model.seq_len < config.model.seq_len:
      raise UserError(
        f"{key}: has model.seq_len={model.seq_len}, less than the {config.model.seq_len} of the run that it teaches; "
        "lower model.seq_len, or name another run"
      )
    try:
      sharding.check(dataclasses.replace(config, model=dataclasses.replace(model, seq_len=config.model.seq_len)), mesh)
    except UserError as error:
      raise UserError(f"{key}: its model doesn't fit the mesh; {error}") from error
  return run
