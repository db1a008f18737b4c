"""Heun's method as a class: configs/tiny.py with a solver of our own."""

import runpy

from diffeq_nnx.model import solvers


class Heun(solvers.Solver):
  """x + dt/2 (f(x, W(t)) + f(x + dt f(x, W(t)), W(t + dt)))."""

  nodes = (0.0, 1.0)
  evaluations = solvers.Evaluations(attention=2, feedforward=2)

  def step(self, field, x_BxLxD, weights, dt, key):
    """One step, from the weights at both nodes."""
    first_BxLxD = field(x_BxLxD, weights[0], key)
    second_BxLxD = field(solvers.add_increment(x_BxLxD, dt, [1.0], [first_BxLxD]), weights[1], key)
    return solvers.add_increment(x_BxLxD, dt, [0.5, 0.5], [first_BxLxD, second_BxLxD])


solvers.register("my_heun", Heun())


def get_config(choice=""):
  """The experiment of configs/tiny.py with this solver."""
  config = runpy.run_path("configs/tiny.py")["get_config"](choice)
  config.model.solver = "my_heun"
  return config
