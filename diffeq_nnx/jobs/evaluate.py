"""--job=evaluate: validation of a run's newest model."""

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs.opening import read_params
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.setup import checked_mesh, corpus_of_run


def evaluate(config: Config, workdir: str, *, num_steps: int | None = None) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Args:
    config: of the run.
    workdir: the run's directory.
    num_steps: of the solver; None: eval.num_steps, or else the model's own.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, or a mesh that the devices don't make.
  """
  distributed.end_on_sigterm()
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    corpus = corpus_of_run(config, workdir)
    params, step = read_params(config, workdir, mesh, corpus.tokenizer.hash)
    evaluator = Evaluator(config, corpus, mesh, num_steps)
    return print_result(
      {"job": "evaluate", "workdir": workdir, "step": step, "num_steps": evaluator.num_steps, **evaluator(params)}
    )
