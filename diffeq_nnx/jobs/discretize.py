"""--job=discretize: a run with stored weights, made from another run."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from diffeq_nnx import data
from diffeq_nnx.config import NO_TEXT, Config, ModelConfig
from diffeq_nnx.depth import adaptive
from diffeq_nnx.depth.discretization import discretized_config
from diffeq_nnx.depth.trained import say_kept_steps, say_untrained
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.jobs.deriving import (
  check_fit,
  check_model,
  derive_config,
  load_text,
  store_params,
  use_tokenizer,
  validate,
)
from diffeq_nnx.model import grids
from diffeq_nnx.model.parameters import Params, build
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import markdown, print_result, say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, localize, portable
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.step import place_state

REFINEMENTS = (4, 8)  # times the model's own number of steps: what the fine limit is measured with
GRADINGS = (0.5, 1.0)  # of uneven steps, as for `adaptive.graded_sizes`
TOLERANCE_FACTORS = (10, 3, 1)  # times the tolerance: the rows of the table


def discretize(
  config: Config,
  workdir: str,
  *,
  from_workdir: str,
  num_steps: int | None = None,
  step_sizes: Sequence[float] | None = None,
  tolerance: float | None = None,
  fit_tokens: int | None = None,
) -> dict:
  """Writes the newest model of a run with stored weights, as a run of its own at step 0, and prints one JSON line.

  The line has the validation values of the model before, at its own number of steps, and after, unless the run has no
  text. Adapters become part of the weights.

  Args:
    config: of the run in `from_workdir`, perhaps with other text and other settings of training and validation.
    tolerance: nats per token; the steps are then the fewest whose validation loss exceeds the limit of many steps by
      no more, and a table on stderr has what was found.
    fit_tokens: of the training text; steps that stay when others are left out are fitted to the whole model's states
      on so many, rounded up to whole batches, as `fitting.fit_kept_steps` does.

  Raises:
    UserError: a number of steps, step sizes or a tolerance that can't be, steps that can't be fitted, no checkpoint, or
      a directory that holds a run.
    RunError: the loss at many steps is not finite.
  """
  if tolerance is not None:
    _check_tolerance(config, tolerance, num_steps, step_sizes)
  model = discretized_config(config.model, num_steps, step_sizes)
  check_fit(config.model, model, config, fit_tokens)
  distributed.on_main_process(workdir_lib.require_none, workdir)
  source = Run.open(from_workdir, flag="from_workdir")
  check_model(config.model, source.started.model, "depth_order")
  here = localize(config, source.started)
  mesh = source.mesh = sharding.make_mesh(here.mesh)
  sharding.check_model(config.model, mesh)
  with jax.set_mesh(mesh):
    config = use_tokenizer(config, source, workdir)
    corpus, tokenizer, params, identity = load_text(config, source), source.tokenizer, source.params, source.hash
    sizes = () if say_kept_steps(config.model, model) else model.step_sizes
    had = dataclasses.replace(source.started, model=config.model)
    say_untrained(had, source.step, model.num_steps, sizes)
    del source  # which would keep its parameters in memory
    before = validate(here, corpus, mesh, params)
    chosen: dict[str, Any] = {}
    if tolerance is not None and corpus is not None:
      grid, found = _search(_Losses(here, corpus, mesh, params), tolerance)
      model = discretized_config(adaptive.on_grid(config.model, grid))
      chosen = {**found, "step_sizes": grids.make_grid(model).dts}
    stored = derive_config(config, model)
    params = store_params(config, stored, params, mesh, corpus, fit_tokens)
    after = validate(portable(stored), corpus, mesh, params)
    Run.create(stored, workdir, tokenizer, corpus, place_state(stored, params, mesh), after.get("loss"), identity)
    return print_result("discretize", workdir, from_workdir=from_workdir, before=before, after=after, **chosen)


def _check_tolerance(
  config: Config, tolerance: float, num_steps: int | None, step_sizes: Sequence[float] | None
) -> None:
  if num_steps is not None or step_sizes is not None:
    other = "num_steps" if num_steps is not None else "step_sizes"
    raise UserError(f"tolerance and {other}: a tolerance chooses the steps; give one of them")
  if not 0 < tolerance < math.inf:
    raise UserError(f"tolerance={tolerance}: must be above 0, in nats per token, e.g. 0.01")
  if config.model.weights == "stored":
    raise UserError(
      f"tolerance={tolerance}: the weights of this model are stored, for its own {config.model.num_steps} steps; start "
      "from a model with generated weights, or leave it out"
    )
  if config.data.source == NO_TEXT:
    raise UserError(f"tolerance={tolerance}: a loss needs text; name it with --config.data.source")


class _Losses:
  """Validation losses of a model on any grids, each measured once.

  Attributes:
    own: the model with its own grid.
    known: the loss of each grid so far, nats per token; infinite where it is not a number.
  """

  def __init__(self, config: Config, corpus: data.Corpus, mesh: Mesh, params: Params):
    self.own, self.known = config.model, dict[ModelConfig, float]()
    self._evaluators: dict[ModelConfig, Evaluator] = {}
    self._config, self._corpus, self._mesh, self._params = config, corpus, mesh, params

  def __call__(self, model: ModelConfig) -> float:
    """The loss of the model on its grid."""
    if model not in self.known:
      config = dataclasses.replace(self._config, model=model)
      self._evaluators[model] = Evaluator(config, self._corpus, self._mesh, model.num_steps)
      loss = self._evaluators[model](self._params)["loss"]
      self.known[model] = loss if math.isfinite(loss) else math.inf
      say(f"{_describe(model)}: validation loss {loss:.4f}")
    return self.known[model]

  def fewest(self, most: float) -> ModelConfig:
    """The grid of the fewest steps, and then the lowest loss, among those measured whose loss is at most `most`."""
    fitting = [model for model, loss in self.known.items() if loss <= most]
    return min(fitting, key=lambda model: (model.num_steps, self.known[model]))

  def speed(self, model: ModelConfig) -> float:
    """Validation tokens per second on a grid measured before, whose program is compiled."""
    values = self._evaluators[model](self._params)
    return values["tokens"] / values["seconds"]

  def errors(self, num_pairs: int) -> np.ndarray:
    """`adaptive.local_errors` on the first batch of the validation text, [M]."""
    estimate = jax.jit(
      lambda params, batch: adaptive.local_errors(build(self.own, params), batch, num_pairs),
      out_shardings=sharding.replicated(self._mesh),
    )
    return np.asarray(estimate(self._params, next(self._evaluators[self.own].batches())))


def _describe(model: ModelConfig) -> str:
  return f"{model.num_steps} {'uneven' if model.step_sizes else 'even'} step{'s' if model.num_steps > 1 else ''}"


def _search(losses: _Losses, tolerance: float) -> tuple[int | tuple[float, ...], dict[str, Any]]:
  """The fewest steps whose loss is within the tolerance of the fine limit: as for `adaptive.on_grid`; and a report."""
  own = losses.own
  losses(own)
  finest = _fine_limit(losses, tolerance)
  limit = losses(finest)
  pairs = finest.num_steps // 2
  errors_M = losses.errors(pairs)
  order = adaptive.order(errors_M, losses.errors(pairs // 2))

  def fits(num_steps: int) -> bool:
    candidates: list[int | tuple[float, ...]] = [num_steps]
    if num_steps > 1:
      candidates += [adaptive.graded_sizes(errors_M, order, num_steps, own.total_time, g) for g in GRADINGS]
    return min(losses(adaptive.on_grid(own, steps)) for steps in candidates) <= limit + tolerance

  fewest_that_fit(fits, finest.num_steps)  # measures what the rows choose from
  rows = {f"{factor * tolerance:g}": losses.fewest(limit + factor * tolerance) for factor in TOLERANCE_FACTORS}
  _print_table(losses, {"own steps": own, "fine limit": finest, **rows})
  if losses(own) < limit - tolerance:
    say(
      f"the loss at the model's own {own.num_steps} steps is below the fine limit by more than the tolerance: what it "
      "learned depends on its steps; --job=discretize without --tolerance keeps them"
    )
  chosen = rows[f"{tolerance:g}"]
  return chosen.step_sizes or chosen.num_steps, {
    "tolerance": tolerance,
    "fine_limit": {"num_steps": finest.num_steps, "loss": limit},
    "order": order,
    "measured": sorted([model.num_steps, loss] for model, loss in losses.known.items()),
  }


def _fine_limit(losses: _Losses, tolerance: float) -> ModelConfig:
  """The model with the fewest even steps, of `REFINEMENTS`, at which half as many have nearly the same loss."""
  previous = losses(adaptive.on_grid(losses.own, 2 * losses.own.num_steps))
  for factor in REFINEMENTS:
    model = adaptive.on_grid(losses.own, factor * losses.own.num_steps)
    change = abs(losses(model) - previous)
    if change < tolerance / 4:
      return model
    previous = losses(model)
  if not math.isfinite(previous):
    raise RunError(f"the validation loss at {model.num_steps} steps is not finite, so that it has no limit")
  say(
    f"the fine limit did not converge: from {model.num_steps // 2} to {model.num_steps} steps the loss changes by "
    f"{change:.2g}, which is not below a quarter of the tolerance; that at {model.num_steps} steps is used"
  )
  return model


def fewest_that_fit(fits: Callable[[int], bool], most: int) -> int:
  """The smallest number from 1 to `most` that fits, by doubling and bisection; `most` does, and is not asked.

  It is the smallest if every number above one that fits does so too.
  """
  below, fitting = 0, 1
  while fitting < most and not fits(fitting):
    below, fitting = fitting, min(2 * fitting, most)
  while fitting - below > 1:
    middle = (below + fitting) // 2
    below, fitting = (below, middle) if fits(middle) else (middle, fitting)
  return fitting


def _print_table(losses: _Losses, rows: dict[str, ModelConfig]) -> None:
  speeds = {model: losses.speed(model) for model in dict.fromkeys(rows.values())}
  cells = [[label, _describe(one), f"{losses(one):.4f}", f"{speeds[one]:,.0f}"] for label, one in rows.items()]
  say(markdown(["tolerance", "steps", "loss", "tokens/s"], cells))
