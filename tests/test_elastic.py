"""One checkpoint at every depth: time embedding, drawn depths, stored weights made continuous."""

import contextlib
import dataclasses
import json
import shutil

from flax import nnx
import jax
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.config import TimeConfig
from diffeq_nnx.depth.continuation import continuous_config, continuous_params
from diffeq_nnx.depth.trained import draw_num_steps, find_costliest, list_num_steps, say_untrained
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.training import flops
from launch.experiments.elastic import RECIPES
from tests.conftest import Stop, change, equal, moved_instance, small_config, small_model, told, weights_of
from tests.test_discretize import logits

UNIFORM = TimeConfig(embedding="uniform", sinusoidal_dim=6, time_embed_dim=8, weights_at="mean")


# the time embedding


def test_weights_at_two_times_start_with_the_correlation_of_their_time_vectors():
  """cos(e(t), e(t')), and with the spread of a plain model's weights; a common feature makes all times more alike."""
  alike = []
  for common in (0.0, 16.0):
    time = dataclasses.replace(UNIFORM, common=common)
    config = small_model(time=time, embed_dim=64, mlp_dim=128)

    @jax.jit
    def start(config=config):
      model = Model(config, rngs=nnx.Rngs(0))
      vectors = model.weight_source.vectors_of_kernels(model.times())
      return model.block_weights().sets["up"]["kernel"], vectors["up"][:, :-1]

    kernels, e_UxT = map(np.asarray, start())
    flat = kernels.reshape(config.num_steps, -1)
    std, square = 0.02, np.square(e_UxT).sum(1).mean()  # GPT-2's
    np.testing.assert_allclose(flat @ flat.T / flat.shape[1] / std**2, e_UxT @ e_UxT.T / square, rtol=0, atol=0.06)
    alike.append(np.corrcoef(flat)[0, -1])
  assert alike[0] < 0.9 < alike[1], alike


# depths in training


def test_the_preset_elastic_is_the_recipe_that_was_chosen():
  preset = config_lib.load("configs/arena.py:elastic")
  assert preset == config_lib.load("configs/arena.py", RECIPES["elastic"])
  assert config_lib.load("configs/gpt_small.py:elastic").train.step_counts == (6, 8, 12, 16, 24)


def test_depths_are_drawn_late_from_seed_and_step_alone_or_grow_by_schedule():
  """A run that is trained further goes on drawing if the length of its schedule is fixed."""
  grows = small_config(step_counts=(1, 2, 3), step_schedule=(4, 6), steps=8)
  config = small_config(step_counts=(2, 4, 6), draw_from=0.7, steps=40)
  draw = lambda config: [draw_num_steps(config, step) for step in range(config.train.steps)]
  assert draw(grows) == [1, 1, 1, 1, 2, 2, 3, 3] and list_num_steps(grows) == [3, 2, 1]
  drawn = draw(config)
  assert set(drawn[:28]) == {3} and set(drawn[28:]) == {2, 4, 6}
  assert drawn == draw(config) != draw(dataclasses.replace(config, seed=1)) and set(draw(small_config())) == {3}
  assert list_num_steps(config) == [6, 4, 3, 2] and list_num_steps(small_config()) == [3]
  assert find_costliest(config) == 6 and find_costliest(change(config, train=dict(self_distillation=True))) == 4
  longer = small_config(step_counts=(2, 4, 6), draw_from=0.7, steps=80)
  fixed = change(longer, optimizer=dict(schedule_steps=40))
  assert set(draw(longer)[:56]) == {3} and draw(fixed) == drawn + draw(fixed)[40:]
  assert set(draw(fixed)[28:56]) == {2, 4, 6} and draw(fixed)[56:] == draw(longer)[56:]


def test_which_depths_count_as_trained(capsys):
  late, grown = dict(step_counts=(2, 4), draw_from=0.5), dict(step_counts=(1, 2, 3), step_schedule=(4, 6))
  for step, asked, sizes, how, trained in (
    (10, 4, (), late, None),
    (10, 5, (), late, "2, 3 and 4"),
    (5, 2, (), late, "3"),  # nothing was drawn yet
    (5, 2, (), grown, None),
    (5, 3, (), grown, "1 and 2"),
    (10, None, (0.5, 1.5, 1.0), {}, "3"),
  ):
    say_untrained(small_config(small_model(num_steps=3), steps=10, **how), step, asked, sizes)
    said = capsys.readouterr().err
    assert f"was trained at {trained} solver steps and never at" in said if trained else not said, (step, asked, how)


# several depths of one run


def test_evaluation_at_several_depths_is_that_of_each(finished, capsys):
  config, workdir = finished
  result = jobs.run("evaluate", config, str(workdir), num_steps=(1, 2, 4))
  printed = capsys.readouterr()
  assert json.loads(printed.out) == result
  rows = result["by_num_steps"]
  assert [row["num_steps"] for row in rows] == [1, 2, 4]
  assert rows[2]["loss"] == jobs.run("evaluate", config, str(workdir), num_steps=4)["loss"]
  for row in rows:
    assert f"| {row['num_steps']} | {row['loss']:.4f} |" in printed.err
    count = config.train.batch_size * config.model.seq_len
    assert row["flops_per_token"] == flops.model_flops(config, row["num_steps"]) / 3 / count
  assert (workdir / "depths.png").read_bytes().startswith(b"\x89PNG")
  (workdir / "depths.png").unlink()
  line = told(lambda: jobs.run("evaluate", config, str(workdir), num_steps=(2, 0)))
  assert "num_steps=0: must be 1 or above" in line


# from stored weights to W(t)


@pytest.mark.parametrize(
  "changes",
  [
    {"solver": "sequential", "num_steps": 6},
    {"solver": "heun", "field": "llama", "num_steps": 3, "step_sizes": (0.5, 1.5, 1.0)},
  ],
)
def test_continuous_then_discretized_are_the_stored_weights(changes):
  stored = moved_instance(small_model(weights="stored", **changes))
  config = continuous_config(stored.config)
  made = build(config, continuous_params(config, params_of(stored)))
  np.testing.assert_allclose(logits(made), logits(stored), atol=2e-5)
  again = diffeq_nnx.discretize(made)
  assert again.config == dataclasses.replace(stored.config, time=again.config.time, horizon=again.config.horizon)
  equal(*(params_of(model)["weight_source"] for model in (again, stored)), 1e-6)
  if changes["solver"] == "sequential":  # those of twice the steps lie near: their means in pairs are these
    fine, own = (np.asarray(weights_of(*of).sets["up"]["kernel"]) for of in ((made, made.grid(12)), (stored,)))
    equal((fine[::2] + fine[1::2]) / 2, own, 1e-6)
    assert abs(fine).max() < 2 * abs(own).max()


def test_what_can_t_become_continuous_is_told():
  assert "only stored weights are made continuous" in told(lambda: continuous_config(small_model()))
  stored = moved_instance(small_model(weights="stored", num_steps=6))
  config = continuous_config(stored.config)
  for keys, part in (
    ({"time_embed_dim": 5}, "time_embed_dim=5: must be at least the number of weight sets, 6"),
    ({"constant": True}, "hardly differs between the steps"),
  ):
    changed = dataclasses.replace(config, time=dataclasses.replace(config.time, **keys))
    assert part in told(lambda: continuous_params(changed, params_of(stored)))


# jobs that are asked for a depth of which the run knows nothing

# what comes after the warning, and other options than the depth
ASKED = {
  "evaluate": ("Evaluator", {}),
  "discretize": ("validate", {}),
  "finetune": ("store_params", {}),
  "generate": ("Decoder", {"prompt": ["The river"]}),
  "export": ("discretized_params", {"out": "unwritten", "format": "stablehlo"}),
  "analyze": ("find", {"text": "hills"}),
  "harness": (None, {}),
}


TAKING = {name for name, job in jobs.JOBS.items() if "num_steps" in job.flags}


@pytest.mark.parametrize("job", sorted(TAKING - {"rank_steps"}))  # which stops at that number
def test_each_job_warns_at_a_number_of_steps_that_was_never_trained(job, finished, tmp_path, capsys, monkeypatch):
  config, source = finished  # trained at 2 steps
  config = change(config, train=dict(step_counts=(2, 4)))  # as a later training may be, but that of the run was not
  following, options = ASKED[job]

  def stop(*arguments, **options):
    raise Stop

  if job == "harness":
    run = lambda count: pytest.importorskip("diffeq_nnx.harness.adapter").DiffEqLM(
      str(source), num_steps=count, config=config
    )
  else:
    monkeypatch.setattr(f"diffeq_nnx.jobs.{job}.{following}", stop)
    workdir = shutil.copytree(source, tmp_path / "run")
    if job in ("discretize", "finetune"):
      workdir, options = tmp_path / "new", {"from_workdir": str(source)}
    run = lambda count: jobs.run(job, config, str(workdir), num_steps=count, **options)
  for count, warned in ((4, True), (2, False)):
    with contextlib.suppress(Stop):
      run(count)
    said = capsys.readouterr().err
    assert said.count("warning: this run was trained at 2 solver steps and never at 4") == warned
    assert ("warning" in said) == warned
