"""The adaptive reference: all solvers approach it, each at its order."""

import sys

import numpy as np
import pytest

from diffeq_nnx.analysis import flow
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.config import TimeConfig
from diffeq_nnx.errors import RunError
from tests.conftest import moved_instance, small_model, told

TOKENS = np.random.default_rng(0).integers(31, size=9)


def smooth(solver="euler"):
  """A model in float64 whose weights change little over depth."""
  time = TimeConfig(sinusoidal_dim=6, time_embed_dim=5, scale=1.0)
  return moved_instance(small_model(dtype="float64", horizon=0.2, time=time, solver=solver))


def test_a_solver_approaches_it_at_its_order_and_it_says_what_it_took(x64):
  found = flow.integrate(AnalyzedModel(smooth()), TOKENS, rtol=1e-10, atol=1e-10)
  coarse, fine = flow.distances(smooth(solver="rk4"), TOKENS, [32, 64], found)
  assert fine < 1e-7 and coarse / fine == pytest.approx(16, rel=0.15)
  assert found.state_1xLxD.shape == (1, 9, 24) and found.state_1xLxD.dtype == np.float64
  assert found.times[0] == 0 and found.times[-1] == 1 and (np.diff(found.times) > 0).all()
  assert found.evaluations >= 6 * (len(found.times) - 1)


def test_mistakes_are_one_line(monkeypatch):
  one, stored = (AnalyzedModel(moved_instance(small_model(weights=weights))) for weights in ("shared", "stored"))
  assert "the weights of this model are stored" in told(lambda: flow.integrate(stored, TOKENS))
  assert "rtol=0: must be above 0" in told(lambda: flow.integrate(one, TOKENS, rtol=0))
  assert "the model's ids are 0 to 30" in told(lambda: flow.integrate(one, [31]))
  with pytest.raises(RunError, match=r"^integrate: 3 steps reach t = 0\.\d+ at rtol=1e-10, atol=1e-10; raise[^\n]*$"):
    flow.integrate(one, TOKENS, rtol=1e-10, atol=1e-10, max_steps=3)
  monkeypatch.setitem(sys.modules, "diffrax", None)
  assert "pip install 'diffeq-nnx[analysis]'" in told(lambda: flow.integrate(one, TOKENS))
