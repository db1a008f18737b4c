"""The flow of dx/dt = f(x, W(t)) itself: adaptive integration with diffrax, and how far fixed grids are from it.

L positions, D embed_dim.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.model import grids, vector_fields
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, params_of, partial_model
from diffeq_nnx.parallel import sharding

FIRST_STEP = 1e-4  # of an adaptive integration, in t; so short that it is hardly ever rejected


class Flow(NamedTuple):
  """An integration from t = 0 to 1."""

  state_1xLxD: np.ndarray  # the state at t = 1, before the final norm
  times: np.ndarray  # where its steps begin and end, from 0 to 1
  evaluations: int  # of the vector field, also in steps that were rejected


def integrate(
  model: AnalyzedModel, tokens_L: Sequence[int], *, rtol: float = 1e-6, atol: float = 1e-6, max_steps: int = 4096
) -> Flow:
  """The state of a text carried from t = 0 to 1 by steps that the error of each chooses.

  It integrates dx/dt = horizon f(x, W(t)), where f is the sum of both branches, by the method of Tsitouras (2011), of
  order 5, with diffrax (Kidger 2021). W(t) is generated at every evaluation. The model's own solver and steps play no
  part: all solvers approach this state as their steps become short.

  Args:
    model: with weights that are not stored; float32 or wider, as the model is: float32 limits the accuracy to 1e-6.
    tokens_L: the text.
    rtol: allowed error of a step, relative to the state.
    atol: allowed error of a step, absolute.
    max_steps: the most steps to try.

  Raises:
    UserError: diffrax is not installed, the weights are stored, a tolerance or number of steps is not above 0, or as
      `AnalyzedModel.check_tokens`.
    RunError: it would take more steps, or a state is not finite.
  """
  try:
    import diffrax  # noqa: F401
  except ImportError:
    raise UserError("integrate: needs diffrax; pip install 'diffeq-nnx[analysis]'") from None
  if model.config.weights == "stored":
    raise UserError(
      f"integrate: the weights of this model are stored, for the times of its own {model.config.num_steps} steps "
      "only; use the model with generated weights"
    )
  for name, value in (("rtol", rtol), ("atol", atol), ("max_steps", max_steps)):
    if not value > 0:
      raise UserError(f"{name}={value}: must be above 0")
  tokens_1xL = model.check_tokens(tokens_L)[None]
  with model.use_device():
    source = jax.device_put(model.source, sharding.replicated(model.ready.mesh))
    state, times, evaluations, done = jax.device_get(
      _integrate(model.config, rtol, atol, max_steps, {**model.ready.rest, "weight_source": source}, tokens_1xL)
    )
  times = times[np.isfinite(times)]
  if not done:
    raise RunError(
      f"integrate: {max_steps} steps reach t = {times[-1]:.3g} at rtol={rtol:g}, atol={atol:g}; raise max_steps or the "
      "tolerances"
    )
  if not np.isfinite(state).all():
    raise RunError("integrate: the state is not finite; the model's weights are too large, or not numbers")
  return Flow(state, times, int(evaluations))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _integrate(
  config: ModelConfig, rtol: float, atol: float, max_steps: int, params: dict[str, Any], tokens_1xL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """(state at the end, times of the accepted steps and then infinity, number of evaluations, whether it arrived)."""
  import diffrax

  model = partial_model(config, params)
  field = vector_fields.BoundField(model.field)
  key = jax.random.key(0)  # unused, since there is no dropout

  def slope(t, x_1xLxD, unused):
    weights = model.weight_source(grids.at_times(jnp.asarray(t)[None]), x_1xLxD.dtype)
    return config.total_time * field(x_1xLxD, jax.tree.map(lambda leaf: leaf[0], weights), key)

  steps = diffrax.SubSaveAt(t0=True, steps=True, fn=lambda t, x_1xLxD, unused: None)
  solution = diffrax.diffeqsolve(
    diffrax.ODETerm(slope),
    diffrax.Tsit5(),
    t0=0.0,
    t1=1.0,
    dt0=FIRST_STEP,
    y0=model.embed(tokens_1xL),
    saveat=diffrax.SaveAt(subs=[diffrax.SubSaveAt(t1=True), steps]),
    stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
    adjoint=diffrax.ForwardMode(),
    max_steps=max_steps,
    throw=False,
  )
  evaluations = 6 * solution.stats["num_steps"] + 1  # the last slope of a step is the first of the next
  return solution.ys[0][0], solution.ts[1], evaluations, solution.result == diffrax.RESULTS.successful


def distances(model: Model, tokens_L: Sequence[int], num_steps: Sequence[int], flow: Flow) -> np.ndarray:
  """|x_n - x| / |x| for each number of steps n, where x is the state of the flow and x_n that of the model's solver.

  `flow` is what `integrate` gave for this model and text. Steps are of one size; none is left out. Raises UserError as
  `Model.grid` and `AnalyzedModel.check_tokens`, and RunError if a state is not finite.
  """
  even = dataclasses.replace(model.config, depth_order=(), step_sizes=(), horizon=model.config.total_time)
  model = build(even, params_of(model))
  states = [AnalyzedModel(model, n).observe(tokens_L).states[-1] for n in num_steps]
  size = np.linalg.norm(flow.state_1xLxD)
  return np.array([np.linalg.norm(np.asarray(state) - flow.state_1xLxD) / size for state in states])
