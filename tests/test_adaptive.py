"""Grids that follow the solver's error: short steps where the state moves unsteadily, and the fewest that suffice."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from diffeq_nnx import jobs
from diffeq_nnx.config import DataConfig
from diffeq_nnx.depth import adaptive
from diffeq_nnx.errors import RunError
from diffeq_nnx.jobs import discretize
from diffeq_nnx.model import grids
from diffeq_nnx.runs.run import Run
from tests.conftest import moved_instance, small_model, told
from tests.test_discretize import TOKENS_2x12
from tests.test_solvers import smooth

HORIZON = 3.0


def errors(model, num_pairs, mask_BxL=np.ones((2, 12))):
  batch = {"inputs": TOKENS_2x12, "mask": mask_BxL}
  return np.asarray(jax.jit(lambda batch: adaptive.local_errors(model, batch, num_pairs))(batch))


def test_the_estimate_is_that_of_both_steps_by_hand(x64):
  """Euler's, of two pairs: one step of a pair's size is x + 2 h f(x, W(end)), two are in two halves."""
  model = moved_instance(small_model(dtype="float64", horizon=HORIZON))
  field = lambda x, weights: model.field.attention(x, weights) + model.field.feedforward(x, weights)

  @jax.jit
  def by_hand():
    weights = model.block_weights(grids.make_grid(adaptive.on_grid(model.config, 4)))
    x, h, found = model.embed(TOKENS_2x12), HORIZON / 4, []
    for pair in range(2):
      first, second = (jax.tree.map(lambda leaf, n=n: leaf[n], weights.sets) for n in (2 * pair, 2 * pair + 1))
      half = x + h * field(x, first)
      end = half + h * field(half, second)
      found.append(x + 2 * h * field(x, second) - end)
      x = end
    return x, found

  end, found = by_hand()
  mask_BxL = np.ones((2, 12))
  mask_BxL[1, 7:] = 0
  size = lambda state_BxLxD: np.linalg.norm(np.asarray(state_BxLxD) * mask_BxL[..., None])
  np.testing.assert_allclose(errors(model, 2, mask_BxL), [size(one) / size(end) for one in found], rtol=1e-10)


def test_the_order_is_measured(x64):
  model = moved_instance(smooth(scale=1.0, dtype="float64", solver="heun", horizon=0.5))
  assert adaptive.order(errors(model, 16), errors(model, 8)) == pytest.approx(2, abs=0.2)


def test_sizes_have_equal_errors_within_limits():
  """Of C(t) = t^2 and order 1 the density is t, whose integral is t^2 / 2: edges are square roots."""
  middles_M = (np.arange(1000) + 0.5) / 1000
  sizes = adaptive.graded_sizes(middles_M**2, 1.0, 4, 2.0)
  np.testing.assert_allclose(np.cumsum(sizes) / 2, np.sqrt([0.25, 0.5, 0.75, 1]), atol=5e-3)
  halved = adaptive.graded_sizes(middles_M**2, 1.0, 4, 2.0, grading=0.5)  # the density is sqrt(t)
  np.testing.assert_allclose(np.cumsum(halved) / 2, np.array([0.25, 0.5, 0.75, 1]) ** (2 / 3), atol=5e-3)
  spike_M = np.where(np.arange(100) == 50, 1.0, 1e-12)
  narrow = adaptive.graded_sizes(spike_M, 1.0, 100, 1.0)
  assert 10 < max(narrow) / min(narrow) < 1.001 * adaptive.MAX_DENSITY**2
  for flat in ([3.0] * 8, [0.0] * 8, [1.0, math.nan, 2.0]):
    np.testing.assert_allclose(adaptive.graded_sizes(np.array(flat), 1.0, 5, 2.0), 0.4)
  assert adaptive.order(np.zeros(4), np.zeros(2)) == adaptive.order(np.ones(4), np.ones(2)) == 1


def test_the_fewest_that_fit_are_found_with_few_questions():
  for most in range(1, 40):
    for fewest in range(1, most + 1):
      asked = []
      fits = lambda n: asked.append(n) or n >= fewest
      assert discretize.fewest_that_fit(fits, most) == fewest
      assert len(asked) == len(set(asked)) <= 2 * math.log2(most) + 2


def test_the_job_writes_the_fewest_steps_within_the_tolerance(finished, tmp_path, capsys):
  config, workdir = finished
  new = str(tmp_path / "new")
  result = jobs.run("discretize", config, new, from_workdir=str(workdir), tolerance=0.05)
  printed = capsys.readouterr()
  assert json.loads(printed.out) == json.loads(json.dumps(result))
  after, limit = result["after"], result["fine_limit"]
  assert limit["num_steps"] in (8, 16) and [limit["num_steps"], limit["loss"]] in result["measured"]
  assert after["loss"] <= limit["loss"] + 0.05 + 1e-5
  within = [steps for steps, loss in result["measured"] if loss <= limit["loss"] + 0.05]
  assert after["num_steps"] == min(within) == len(result["step_sizes"])
  assert sum(result["step_sizes"]) == pytest.approx(config.model.total_time)
  stored = Run.open(new).started
  assert (stored.model.weights, stored.model.num_steps) == ("stored", after["num_steps"])
  assert jobs.run("evaluate", stored, new)["loss"] == after["loss"]
  table = [line.split(" | ") for line in printed.err.splitlines() if line.startswith("| ")]
  assert [row[0] for row in table[2:]] == ["| own steps", "| fine limit", "| 0.5", "| 0.15", "| 0.05"]
  assert table[-1][2] == f"{after['loss']:.4f}"


def replace_losses(monkeypatch, loss_of):
  """Lets the search for steps find these losses of models in no time, and errors that grow over depth."""

  def loss(self, model):
    self.known[model] = loss_of(model)
    return self.known[model]

  monkeypatch.setattr(discretize._Losses, "__call__", loss)
  monkeypatch.setattr(discretize._Losses, "speed", lambda self, model: 1.0)
  monkeypatch.setattr(discretize._Losses, "errors", lambda self, num_pairs: np.arange(num_pairs) + 1.0)


def test_uneven_steps_are_written_where_they_are_better_and_a_limit_must_be_finite(finished, tmp_path, monkeypatch):
  """The losses are replaced: first by one that 2 steps reach if they are uneven."""
  config, workdir = finished
  monkeypatch.setattr(discretize, "validate", lambda *arguments: {})
  search = lambda new: jobs.run("discretize", config, str(tmp_path / new), from_workdir=str(workdir), tolerance=0.1)
  replace_losses(monkeypatch, lambda model: 1.0 if model.step_sizes or model.num_steps > 2 else 9.0)
  sizes = search("uneven")["step_sizes"]
  assert len(sizes) == 2 and sizes[0] != sizes[1]
  assert Run.open(str(tmp_path / "uneven")).started.model.step_sizes == sizes
  replace_losses(monkeypatch, lambda model: 1.0 if model.num_steps == 2 else math.inf)
  assert "at 16 steps is not finite" in told(lambda: search("other"), RunError)


def test_mistakes_in_a_tolerance_are_one_line(finished, tmp_path):
  config, workdir = finished
  new = str(tmp_path / "new")
  stored = dataclasses.replace(config, model=small_model(weights="stored"))
  textless = dataclasses.replace(config, data=DataConfig(source="none"))
  for changed, options, part in (
    (config, {"tolerance": 0}, "tolerance=0: must be above 0"),
    (config, {"num_steps": 3}, "tolerance and num_steps: a tolerance chooses the steps"),
    (stored, {}, "the weights of this model are stored"),
    (textless, {}, "a loss needs text"),
  ):
    options = {"tolerance": 0.1, **options}
    assert part in told(lambda: jobs.run("discretize", changed, new, from_workdir=str(workdir), **options))
  assert not (tmp_path / "new").exists()
