"""A config file with a solver of its own, Kutta's method of third order; docs/extending.md shows it."""

import runpy

from diffeq_nnx.model import solvers

solvers.register("kutta3", solvers.RungeKutta(a=((), (0.5,), (-1.0, 2.0)), b=(1 / 6, 2 / 3, 1 / 6), c=(0.0, 0.5, 1.0)))


def get_config(choice=""):
  """The experiment of configs/tiny.py with this solver."""
  config = runpy.run_path("configs/tiny.py")["get_config"](choice)
  config.model.solver = "kutta3"
  return config
