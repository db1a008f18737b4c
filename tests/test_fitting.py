"""Steps that stay when others are left out, fitted by least squares."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.depth import fitting
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.jobs import deriving
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.report import read_metrics
from tests.conftest import change, equal, moved_instance, packed_batch, small_config, told, weights_of
from tests.test_depth_order import MIDDLE, UNEVEN, ordered
from tests.test_rank_steps import begun, ranked  # noqa: F401

ORDER = (0, 3, 2, 1)  # 3 of 4 steps: the second is left out


@pytest.mark.parametrize(
  "changes",
  [
    {"weights": "stored", "solver": "sequential", "field": "llama", "step_sizes": UNEVEN},
    {"solver": "euler", "field": "gpt", "time": MIDDLE, "horizon": 2.0},  # generated
  ],
)
def test_each_kernel_is_that_of_the_least_squares_and_those_before_the_first_gap_stay(changes):
  """Against NumPy's least squares on the derivative of a step by its kernel, one step after the other."""
  with jax.enable_x64(True):
    whole = moved_instance(ordered(dtype="float64", mlp_dim=8, depth_order=ORDER, **changes), scale=0.3)
    made = diffeq_nnx.discretize(whole, 3)
    batch = packed_batch(small_config(whole.config))
    batch["mask"] = np.random.default_rng(1).integers(2, size=batch["inputs"].shape).astype(np.float64)
    batch = jax.tree.map(jnp.asarray, batch)
    halves = [jax.tree.map(lambda leaf, n=n: leaf[n : n + 2], batch) for n in (0, 2)]
    before = params_of(made)
    found = fitting.fit_kept_steps(whole.config, made.config, params_of(whole), before, halves)
    sets, context = weights_of(whole), Packing(batch["segment_ids"], batch["positions"])
    field = vector_fields.BoundField(whole.field, context)

    def step(kernel, x, dt, weights):
      weights = {**weights, "down": {**weights["down"], "kernel": kernel}}
      return whole.solver.step(field, x, [weights], dt, jax.random.key(0))

    slope_of, step = jax.jit(jax.jacfwd(step)), jax.jit(step)
    at = lambda tree, place: jax.tree.map(lambda leaf: leaf[place], tree)
    states = [whole.embed(batch["inputs"], batch["positions"])]
    for number, dt in enumerate(whole.grid().sizes):
      weights = at(sets.sets, number)
      states.append(step(weights["down"]["kernel"], states[-1], dt, weights))
    x, kernels = states[0], []
    for place, (end, dt) in enumerate(zip((2, 3, 4), made.grid().dts)):
      weights = at(before["weight_source"]["stored"], place)
      old = weights["down"]["kernel"]
      share = np.sqrt(batch["mask"] / np.square(states[end]).sum(-1))[..., None]
      slope = np.reshape(share[..., None, None] * slope_of(old, x, dt, weights), (x.size, old.size))
      error = np.ravel(share * (states[end] - step(old, x, dt, weights)))
      ridge = np.sqrt(fitting.RIDGE * np.square(slope).sum() / old.size) * np.eye(old.size)
      change = np.linalg.lstsq(np.concatenate([slope, ridge]), np.concatenate([error, np.zeros(old.size)]))[0]
      kernels.append(old + change.reshape(old.shape))
      x = step(kernels[-1], x, dt, weights)
    np.testing.assert_allclose(found["weight_source"]["stored"]["down"]["kernel"], np.stack(kernels), atol=1e-9)
    assert np.abs(np.stack(kernels) - before["weight_source"]["stored"]["down"]["kernel"]).max() > 1e-3
    found["weight_source"]["stored"]["down"]["kernel"] = before["weight_source"]["stored"]["down"]["kernel"]
    equal(found, before)  # nothing else changes
    late = dataclasses.replace(whole.config, depth_order=(0, 1, 2, 3))  # the last is left out
    made = diffeq_nnx.discretize(build(late, params_of(whole)), 3)
    found = fitting.fit_kept_steps(late, made.config, params_of(whole), params_of(made), halves)
    changed = found["weight_source"]["stored"]["down"]["kernel"] != sets.sets["down"]["kernel"][:3]
    assert changed.any((1, 2)).tolist() == [False, False, True]


def test_a_job_says_how_close_the_states_come_and_fine_tuning_begins_with_it(ranked, tmp_path, capsys, monkeypatch):  # noqa: F811
  workdir, started = ranked[0], Run.open(ranked[0]).started
  made = jobs.run("discretize", started, str(tmp_path / "new"), from_workdir=workdir, num_steps=3, fit_tokens=600)
  errors = re.findall(r"fitted; .* (\S+) -> (\S+)\n", capsys.readouterr().err)
  assert len(errors) == 3 and all(float(before) > float(after) for before, after in errors)
  new = str(tmp_path / "tuned")
  monkeypatch.setattr("diffeq_nnx.jobs.finetune.train", lambda config, workdir: None)
  jobs.run("finetune", started, new, from_workdir=workdir, num_steps=3, fit_tokens=600)
  first = read_metrics(new, "validation")[0]
  assert (first["step"], first["loss"]) == (0, pytest.approx(made["after"]["loss"], abs=1e-6))


def test_what_can_t_be_fitted_is_one_line(ranked, tmp_path):  # noqa: F811
  workdir, started = ranked[0], Run.open(ranked[0]).started
  textless = dataclasses.replace(started, data=config_lib.DataConfig(source="none"))
  for job, config, options, part in (
    ("finetune", started, {"fit_tokens": 100}, "none of the 5 steps is left out"),
    ("discretize", started, {"num_steps": 3, "fit_tokens": 0}, "fit_tokens=0: must be 1 or above"),
    ("discretize", textless, {"num_steps": 3, "fit_tokens": 9}, "fit_tokens=9: needs text"),
  ):
    assert part in told(lambda: jobs.run(job, config, str(tmp_path / "new"), from_workdir=workdir, **options))
  generated = dataclasses.replace(started.model, weights="generated")
  other = discretized_config(generated, step_sizes=(2.0, 3.0))
  assert "none of the 5 steps is left out" in told(lambda: deriving.check_fit(generated, other, started, 9))
  leapfrog = change(started, model=dict(solver="leapfrog"))
  shorter = dataclasses.replace(leapfrog.model, num_steps=3, depth_order=(0, 1, 2))
  assert "model.solver=leapfrog" in told(lambda: deriving.check_fit(leapfrog.model, shorter, leapfrog, 9))
  assert not (tmp_path / "new").exists()
  batch, params = dict.fromkeys(("inputs", "mask"), jnp.zeros((1, 8), jnp.int32)), Run.open(workdir).params
  shorter = discretized_config(started.model, 3)
  made = discretized_params(started.model, shorter, params)
  line = told(lambda: fitting.fit_kept_steps(started.model, shorter, params, made, [batch]))
  assert "none of those that are read counts" in line
