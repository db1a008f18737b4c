"""--job=continuous: a run whose stored weights became functions of time, made from another run."""

import dataclasses

import jax

from diffeq_nnx import presets
from diffeq_nnx.config import Config
from diffeq_nnx.depth.continuation import continuous_config, continuous_params
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, portable
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.step import place_state

PART = 4  # the new run is to train for 1/PART of the source's steps, with 1/PART of its peak rate


def config_from(source: Config) -> Config:
  """The config of the new run: generated weights, as of `continuation.continuous_config`, to be trained elastically.

  That is for half to twice the source's number of solver steps, for which muon_weights, at one number, becomes muon.
  docs/depth.md has the measurements behind `PART`, which are of AdamW.
  """
  steps = max(1, source.train.steps // PART)
  name = "muon" if source.optimizer.name == "muon_weights" else source.optimizer.name
  return dataclasses.replace(
    source,
    model=continuous_config(source.model),
    optimizer=dataclasses.replace(source.optimizer, name=name, peak_rate=source.optimizer.peak_rate / PART),
    train=dataclasses.replace(
      source.train, steps=steps, step_counts=presets.around(source.model.num_steps), remat_every=1
    ),
    eval=dataclasses.replace(source.eval, every=min(source.eval.every, steps)),
    checkpoint=dataclasses.replace(source.checkpoint, every=min(source.checkpoint.every, steps)),
  )


def continuous(config: Config, workdir: str, *, from_workdir: str) -> dict:
  """Writes the newest model of a run with weights W(t), as a run of its own at step 0, and prints one JSON line.

  At its own number of steps the model computes what it did: the line has the validation values before and after, and
  the largest difference of a weight.

  Args:
    config: of the new run: `config_from`, perhaps with another time embedding, training or validation.
    workdir: the new run's directory.
    from_workdir: the run's; its weights are stored.

  Raises:
    UserError: weights that are not stored, a time embedding that can't hold them, another model than the run's, no
      checkpoint, or a directory that holds a run.
  """
  source = Run.open(from_workdir, flag="from_workdir")
  _check_same(config, config_from(source.started))
  workdir_lib.require_none(workdir)
  with jax.set_mesh(source.mesh):
    mesh, corpus, params = source.mesh, source.corpus, source.params
    before = Evaluator(source.config, corpus, mesh)(params)
    made = continuous_params(config.model, params, config.seed)
    after = Evaluator(portable(config), corpus, mesh, config.model.num_steps)(made)
    wide = dataclasses.replace(config.model, dtype=str(params["embedding"].dtype))  # W before it is rounded
    again = discretized_params(wide, discretized_config(wide), made)
    pairs = zip(*(jax.tree.leaves(each["weight_source"]["stored"]) for each in (params, again)), strict=True)
    difference = max(float(abs(a - b).max()) for a, b in pairs)
    Run.create(config, workdir, corpus, place_state(config, made, mesh), after["loss"], source.hash)
  return print_result(
    {
      "job": "continuous",
      "workdir": workdir,
      "from_workdir": from_workdir,
      "before": {"num_steps": source.config.model.num_steps, **before},
      "after": {"num_steps": config.model.num_steps, **after},
      "largest_difference": difference,
    }
  )


def _check_same(config: Config, expected: Config) -> None:
  """Raises UserError unless the model is the expected one but for its time embedding, dropout and attention."""
  model = expected.model
  same = dataclasses.replace(config.model, time=model.time, dropout=model.dropout, attention=model.attention)
  if same != model:
    raise UserError(
      "only model.time, model.dropout and model.attention may differ from the run in --from_workdir; leave out the "
      "other model keys"
    )
  if workdir_lib.identity(dataclasses.replace(config, model=expected.model)) != workdir_lib.identity(expected):
    raise UserError("the seed and the text are those of the run in --from_workdir; leave out seed and data keys")
