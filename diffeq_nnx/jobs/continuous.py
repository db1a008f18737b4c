"""--job=continuous: a run whose stored weights became functions of time, made from another run."""

import dataclasses

import jax

from diffeq_nnx import presets
from diffeq_nnx.config import Config
from diffeq_nnx.depth.continuation import continuous_config, continuous_params
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.jobs.deriving import check_model, load_text, use_tokenizer, validate
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, portable
from diffeq_nnx.training.step import place_state

CONTINUATION_DIVISOR = 4  # divides the train steps and the peak rate of the source


def config_from(source: Config) -> Config:
  """The config of the new run: generated weights, as of `continuation.continuous_config`, to be trained elastically.

  That is for half to twice the source's number of solver steps, or for half to all of them if the source has a
  `model.depth_order`, whose steps are no samples of a smooth function. Instead of muon_weights, which the preset
  elastic does without too, it takes muon.
  docs/evidence/any_depth.md has the measurements behind `CONTINUATION_DIVISOR`, which are of AdamW.
  """
  steps = max(1, source.train.steps // CONTINUATION_DIVISOR)
  peak_rate = source.optimizer.peak_rate / CONTINUATION_DIVISOR
  counts = presets.around(source.model.num_steps)
  if source.model.depth_order:
    counts = tuple(count for count in counts if count <= source.model.num_steps)
  name = "muon" if source.optimizer.name == "muon_weights" else source.optimizer.name
  return dataclasses.replace(
    source,
    model=continuous_config(source.model),
    optimizer=dataclasses.replace(source.optimizer, name=name, peak_rate=peak_rate, schedule_steps=None),
    train=dataclasses.replace(source.train, steps=steps, step_counts=counts, step_schedule=(), remat_every=1),
    eval=dataclasses.replace(source.eval, every=min(source.eval.every, steps)),
    checkpoint=dataclasses.replace(source.checkpoint, every=min(source.checkpoint.every, steps)),
  )


def continuous(config: Config, workdir: str, *, from_workdir: str) -> dict:
  """Writes the newest model of a run with weights W(t), as a run of its own at step 0, and prints one JSON line.

  At its own number of steps the model computes what it did: the line has the validation values before and after, unless
  the run has no text, and the largest difference of a weight.

  Args:
    config: of the new run: `config_from`, perhaps with another time embedding, text, training or validation.

  Raises:
    UserError: weights that are not stored, a time embedding that can't hold them, another model or tokenizer than the
      run's, no checkpoint, or a directory that holds a run.
  """
  source = Run.open(from_workdir, flag="from_workdir")
  check_model(config.model, config_from(source.started).model, "time")
  workdir_lib.require_none(workdir)
  with jax.set_mesh(source.mesh):
    config = use_tokenizer(config, source, workdir)
    mesh, corpus, params = source.mesh, load_text(config, source), source.params
    before = validate(dataclasses.replace(portable(config), model=source.config.model), corpus, mesh, params)
    made = continuous_params(config.model, params, config.seed)
    after = validate(portable(config), corpus, mesh, made)
    wide = dataclasses.replace(config.model, dtype=str(params["embedding"].dtype))  # W before it is rounded
    again = discretized_params(wide, discretized_config(wide), made)
    pairs = zip(*(jax.tree.leaves(each["weight_source"]["stored"]) for each in (params, again)), strict=True)
    difference = max(float(abs(a - b).max()) for a, b in pairs)
    state = place_state(config, made, mesh)
    Run.create(config, workdir, source.tokenizer, corpus, state, after.get("loss"), source.hash)
  values = {"before": before, "after": after, "largest_difference": difference}
  return print_result("continuous", workdir, from_workdir=from_workdir, **values)
