"""Solvers as data, which our own modeling file runs."""

from typing import Any

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.model import solvers
from diffeq_nnx.model.grids import make_grid


def describe(solver: solvers.Solver) -> dict[str, Any] | None:
  """The method as JSON values; None: the modeling file can't run it.

  A subclass of a method is another one, since it may define its own step.
  """
  if type(solver) is solvers.RungeKutta:
    nodes = [solver.nodes.index(c) for c in solver.c]  # of each stage
    return {"kind": "runge_kutta", "a": solver.a, "b": solver.b, "nodes": nodes}
  if type(solver) is solvers.Splitting:
    return {"kind": "splitting", "parts": solver.parts}
  return {"kind": "leapfrog"} if type(solver) is solvers.Leapfrog else None


def folds(solver: solvers.Solver) -> bool:
  """Whether dt is folded into the weights: those of one evaluation a step are used by that step alone."""
  return solver.evaluations == (1, 1)


def keys(exported: ModelConfig) -> dict[str, Any]:
  """What config.json says of the integration; num_hidden_layers is the number of entries of a key-value cache.

  A model whose dt is folded has steps of size 1.
  """
  solver, grid = solvers.SOLVERS[exported.solver], make_grid(exported)
  times = solvers.weight_times(exported, grid)
  return {
    "num_hidden_layers": grid.num_steps * solver.evaluations.attention,
    "num_steps": grid.num_steps,
    "num_weight_sets": len(times.points_UxQ),
    "solver": exported.solver,
    "method": describe(solver),
    "step_sizes": grid.dts,
    "weight_sets": times.index_SxN.tolist(),
  }
