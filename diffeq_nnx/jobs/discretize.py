"""--job=discretize: a run with stored weights, made from another run."""

from collections.abc import Sequence

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.model.discretization import discretized_config
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.opening import portable, read_params
from diffeq_nnx.training import starting
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.setup import corpus_of_run


def discretize(
  config: Config,
  workdir: str,
  *,
  from_workdir: str,
  num_steps: int | None = None,
  step_sizes: Sequence[float] | None = None,
) -> dict:
  """Writes the newest model of a run with stored weights, as a run of its own at step 0, and prints one JSON line.

  The line has the validation values of the model before, at its own number of steps, and after. Adapters become part
  of the weights.

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
  stored = starting.derived(config, discretized_config(config.model, num_steps, step_sizes))
  here = portable(config)
  with distributed.together():
    mesh = sharding.make_mesh(here.mesh)
  with jax.set_mesh(mesh):
    with distributed.together():
      workdir_lib.require_none(workdir)
    corpus = corpus_of_run(config, from_workdir, "from_workdir")
    params, _ = read_params(here, from_workdir, mesh, corpus.tokenizer.hash, "from_workdir")
    before = Evaluator(here, corpus, mesh, config.model.num_steps)(params)
    params = starting.stored_params(config, stored, params, mesh)
    after = Evaluator(portable(stored), corpus, mesh)(params)
    starting.start(stored, workdir, corpus, params, mesh, after["loss"], workdir_lib.run_hash(from_workdir))
    return print_result(
      {
        "job": "discretize",
        "workdir": workdir,
        "from_workdir": from_workdir,
        "before": {"num_steps": config.model.num_steps, **before},
        "after": {"num_steps": stored.model.num_steps, **after},
      }
    )
