"""What a run needs before its first step: mesh, text, work directory, batches, state."""

import json
from typing import Any

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx import data
from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.kernels import attention
from diffeq_nnx.model.integration import make_adjoint
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.training.report import parameter_table
from diffeq_nnx.training.step import State, abstract_state, all_params, init_state, state_shardings


def checked_mesh(config: Config) -> Mesh:
  """The config's mesh, after the checks that need devices; prints which attention implementation the run uses.

  Raises:
    UserError: the devices or the backend don't fit the config, or the solver its adjoint.
  """
  with distributed.together():
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    if config.train.adjoint == "reversible":
      make_adjoint(config)
    say_attention(config.model, "log-sum-exp, which mesh.context needs" if mesh.shape["context"] > 1 else None)
    return mesh


def load_corpus(config: Config) -> data.Corpus:
  """The corpus, tokenized by process 0 first, so that processes that share its disk find the result."""
  for turn in (True, False):
    with distributed.together():
      if distributed.leads() == turn:
        corpus = data.load(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
  sizes = [
    (len(split.tokens), split.num_bytes, split.num_documents) for split in (*corpus.train.splits, corpus.validation)
  ]
  reports = distributed.exchange(json.dumps([corpus.tokenizer.hash[:12], corpus.fingerprint[-12:], sizes]))
  other = next((process for process, one in enumerate(reports) if one != reports[0]), None)
  if other is not None:
    raise UserError(
      f"data.source={config.data.source}: gives process {other} other tokens than process 0 (tokenizer, "
      f"tokens, then their number, bytes and documents: {reports[other]} and {reports[0]}); give every host "
      "the same files",
      everywhere=True,
    )
  return corpus


def claim_workdir(config: Config, workdir: str, corpus: data.Corpus, source: str | None = None) -> None:
  """Makes the work directory this run's, and checks that all processes see the same one.

  `source` is that of `workdir.claim`.

  Raises:
    UserError: as `workdir.claim` and `workdir.require`.
  """
  with distributed.together():
    if distributed.leads():
      workdir_lib.claim(workdir, config, corpus, source)
  with distributed.together():
    workdir_lib.require(workdir, config, corpus)


def say_attention(model: ModelConfig, unsupported: str | None = None) -> None:
  """Prints which implementation of attention the run uses, and why; `unsupported` is as for `attention.choose`.

  Raises:
    UserError: this backend lacks the requested one.
  """
  try:
    name, why = attention.choose(
      model.attention, dtype=jnp.dtype(model.dtype), head_dim=model.head_size, unsupported=unsupported
    )
  except ValueError as error:
    raise UserError(f"model.attention={model.attention!r}: {error}") from error
  say(f"attention: {name} ({why})")


def batch_iterator(
  config: Config, corpus: data.Corpus, share: sharding.Share, windows: int = 0
) -> grain.DatasetIterator:
  """This process's rows of the endless batches after `windows` training windows, read ahead by a thread.

  Raises:
    UserError: the text is too short; or documents must be kept apart, and their begin and end marks are the same.
  """
  batches = data.train_batches(
    corpus.train,
    seq_len=config.model.seq_len,
    batch_size=config.train.batch_size,
    seed=config.seed,
    rows=share.rows,
    start=windows,
    eos_id=data.document_end(config.data, corpus.tokenizer),
  )
  iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
  iterator.start_prefetch()  # the first batches of shards in a bucket take a second
  return iterator


def start_state(config: Config, checkpoints: Checkpoints, mesh: Mesh) -> tuple[State, dict[str, Any]]:
  """(state, position): the newest checkpoint's, or those of step 0.

  In the position, `windows` counts the windows trained on so far, and `validate` is whether SIGTERM kept the step of
  the checkpoint from its validation.

  Raises:
    UserError: no checkpoint can be read, or adapters without a trained model.
  """
  restored = checkpoints.restore(abstract_state(config, mesh))
  if restored is None and config.model.lora.rank:
    raise UserError(
      f"model.lora.rank={config.model.lora.rank}: adapters need a trained model; use --job=finetune "
      "--from_workdir=RUN, or set it to 0",
      everywhere=True,
    )
  if restored is None:
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    say(parameter_table(all_params(state)))
    return state, {"windows": 0}
  state, position = restored
  say(f"continuing from the checkpoint of step {int(state['step'])}")
  return state, position


def corpus_of_run(config: Config, workdir: str, flag: str = "workdir") -> data.Corpus:
  """The corpus of a run, after checks that config and text are the run's.

  Raises:
    UserError: they are not; the line names `flag`.
  """
  with distributed.together():
    workdir_lib.require(workdir, config, flag=flag)  # before the text is read
  corpus = load_corpus(config)
  with distributed.together():
    workdir_lib.require(workdir, config, corpus, flag)
  return corpus
