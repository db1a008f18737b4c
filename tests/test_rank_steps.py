"""Steps that are left out: how --job=rank_steps searches, what jobs make of a ranked run, how the rest are fitted."""

import dataclasses
import itertools
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.analysis import ranking
from diffeq_nnx.config import LoraConfig
from diffeq_nnx.depth import fitting
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.depth.trained import draw_num_steps
from diffeq_nnx.jobs import deriving
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training import loop
from diffeq_nnx.training.report import read_metrics
from tests import conftest
from tests.conftest import change, equal, masked_batch, moved_instance, packed_batch, small_config, told, weights_of
from tests.test_depth_order import MIDDLE, UNEVEN, ordered, read

# the search


def test_leaving_out_takes_the_best_of_the_finalists():
  """On made-up losses of sets of steps, against all of them."""
  rng = np.random.default_rng(0)
  every = [frozenset(one) for n in range(10) for one in itertools.combinations(range(10), n)]
  parts = [dict(zip(every, rng.random(len(every)))) for _ in range(8)]
  total = lambda rest, start, stop: sum(part[frozenset(rest)] for part in parts[start:stop])
  kept = [*range(10)]

  def losses(kept, candidates, start, stop):
    return np.array([total({*kept} - {one}, start, stop) for one in candidates]), 7.0 * len(parts[start:stop])

  for step, loss in ranking.leave_out(losses, range(10), 1):
    finalists = kept
    for _, stop, going_on in ranking.ROUNDS:
      finalists = sorted(finalists, key=lambda one: total({*kept} - {one}, 0, stop))[:going_on]
    assert step == finalists[0] and loss == pytest.approx(total({*kept} - {step}, 0, None) / 56)
    kept.remove(step)
  assert len(kept) == 1


def test_steps_are_left_out_by_loss_where_none_of_the_first_tokens_counts():
  costs, counted = np.array([10.0, 10.0, 10.0, 0.1, 0.2, 0.3]), lambda start, stop: 5.0 * len(range(8)[start:stop][-2:])

  def losses(kept, candidates, start, stop):
    tokens = 0.0 if stop == 1 else counted(start, stop)
    return tokens * costs[candidates], tokens

  assert [step for step, _ in ranking.leave_out(losses, range(6), 3)] == [3, 4, 5]


def test_padding_of_which_the_state_is_0_has_no_influence():
  config = small_config(ordered(num_steps=2, depth_order=(), weights="stored", field="llama"))
  model, batch = moved_instance(config.model), masked_batch(config)
  batch["inputs"] = np.where(batch["mask"] > 0, np.maximum(batch["inputs"], 1), 0)
  params = params_of(model)
  influences = []
  for row in (params["embedding"][0], 0):
    changed = {**params, "embedding": params["embedding"].at[0].set(row)}
    influences.append(ranking.Ranker(config.model, changed, [batch]).measure_whole()[1])
  np.testing.assert_allclose(*influences, rtol=1e-5)


def test_losses_of_candidates_are_those_of_models_whose_order_leaves_them_out():
  """Of a solver that steps from two states, in a program that skips steps of a traced size."""
  config = small_config(ordered(num_steps=5, depth_order=(), weights="stored", field="llama", solver="leapfrog"))
  model, batches = moved_instance(config.model), [masked_batch(config, seed) for seed in range(3)]
  ranker = ranking.Ranker(config.model, params_of(model), batches)
  log_of = jax.jit(lambda model, tokens, n: jax.nn.log_softmax(model(tokens, n)), static_argnums=2)

  def losses(kept):
    order = (*reversed(kept), *(step for step in range(5) if step not in kept))
    nested = build(dataclasses.replace(config.model, depth_order=order), params_of(model))
    logs = [np.asarray(log_of(nested, batch["inputs"], len(kept))) for batch in batches]
    picked = [np.take_along_axis(log, b["targets"][..., None], 2)[..., 0] for log, b in zip(logs, batches)]
    return np.array([-(one * batch["mask"]).sum() for one, batch in zip(picked, batches)])

  expected = np.stack([losses(kept) for kept in ((0, 3), (0, 2), (0, 2, 3))], 1)  # [batches, candidates]
  for start, stop in ((0, None), (1, 2)):
    sums, count = ranker.losses((0, 2, 3), (2, 3, 5), start, stop)  # 5: none is left out
    np.testing.assert_allclose(sums, expected[start:stop].sum(0), rtol=1e-5)
    assert count == sum(batch["mask"].sum() for batch in batches[start:stop])


# runs


def losses_of(workdir):
  return [(one["step"], one["loss"]) for split in ("train", "validation") for one in read_metrics(workdir, split)]


def rank(config, workdir, **options):
  return jobs.run("rank_steps", config, str(workdir), **{"num_steps": 3, "tokens": 300, **options})


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
  """(config, work directory) of a run of 5 stored steps, before its first train step."""
  folder = tmp_path_factory.mktemp("text")
  conftest.write_documents(folder)
  model = dict(num_steps=5, weights="stored", field="llama", solver="sequential")
  config = change(conftest.run_config(folder, steps=8), model=model, train=dict(log_every=1))
  return config, conftest.write_run(config, folder / "run")


@pytest.fixture(scope="module")
def ranked(begun, tmp_path_factory):
  """A copy of that run with an order, down to 3 steps, and what the job returned."""
  copy = shutil.copytree(begun[1], tmp_path_factory.mktemp("ranked") / "run")
  return str(copy), rank(begun[0], copy)


def restricted(order, n):
  """The first of an order, numbered among themselves."""
  return tuple(map(sorted(order[:n]).index, order[:n]))


def test_the_job_writes_an_order_and_an_interrupted_one_goes_on(begun, ranked, tmp_path, capsys, monkeypatch):
  (config, source), (whole, result), path = begun, ranked, tmp_path / "run"
  order, saved = result["depth_order"], read(whole, "steps.json")
  influences = np.asarray(saved["influences"])
  assert Run.open(whole).started == change(config, model=dict(depth_order=order)) and sorted(order) == [*range(5)]
  assert workdir_lib.run_hash(whole) == workdir_lib.run_hash(source)
  assert [step for step, _ in saved["left_out"]] == [*order[:2:-1]] and saved["tokens"] >= 300
  assert (np.diff(influences[list(order[:3])]) <= 0).all()
  assert (pathlib.Path(whole) / "steps.png").read_bytes().startswith(b"\x89PNG")
  shutil.copytree(source, path)
  measured = ranking.Ranker.losses

  def losses(self, kept, *arguments):
    if len(kept) == 4:
      raise conftest.Stop
    return measured(self, kept, *arguments)

  with monkeypatch.context() as patch, pytest.raises(conftest.Stop):
    patch.setattr(ranking.Ranker, "losses", losses)
    rank(config, path)
  assert Run.open(str(path)).started.model.depth_order == () and len(read(path, "steps.json")["left_out"]) == 1
  capsys.readouterr()
  assert rank(config, path)["depth_order"] == order and read(path, "steps.json") == saved
  assert "steps.json, with 4 steps left" in capsys.readouterr().err
  lower = rank(config, path, num_steps=1)  # it goes on
  assert lower["left_out"][:2] == saved["left_out"] and lower["depth_order"][3:] == order[3:]
  by_influence = rank(config, path, by="influence", num_steps=None)
  assert by_influence["left_out"] == [] and by_influence["influences"] == influences.tolist()
  assert list(by_influence["depth_order"]) == np.argsort(-influences).tolist()
  assert "steps.json, which differs in: by" in capsys.readouterr().err  # it is replaced
  rows = change(config, data=dict(rows="padded"))
  assert rank(rows, path, by="influence", num_steps=None)["influences"] != influences.tolist()  # of other rows


def test_a_ranked_run_is_evaluated_discretized_and_trains_on(begun, ranked, tmp_path, monkeypatch):
  config, (workdir, result) = begun[0], ranked
  started, new = Run.open(workdir).started, str(tmp_path / "three")
  evaluated = jobs.run("evaluate", started, workdir, num_steps=3)
  made = jobs.run("discretize", started, new, from_workdir=workdir, num_steps=3)
  assert made["after"]["loss"] == pytest.approx(evaluated["loss"], abs=1e-6)
  assert Run.open(new).started.model.depth_order == restricted(result["depth_order"], 3)
  copy = str(shutil.copytree(workdir, tmp_path / "on"))

  def draw(config, step):
    raise conftest.Stop  # what follows is the same for any model: the training at drawn steps below

  with monkeypatch.context() as patch, pytest.raises(conftest.Stop):
    patch.setattr(loop, "draw_num_steps", draw)
    loop.train(config, copy)  # a config without the order
  assert Run.open(copy).started == started


def test_made_continuous_the_steps_keep_their_order(ranked, tmp_path, capsys):
  workdir, new = ranked[0], str(tmp_path / "new")
  source = Run.open(workdir).started
  config = jobs.JOBS["continuous"].prepared(source)
  assert config.model.depth_order == source.model.depth_order and max(config.train.step_counts) == 5
  result = jobs.run("continuous", config, new, from_workdir=workdir)
  assert result["largest_difference"] < 1e-6
  assert result["after"]["loss"] == pytest.approx(result["before"]["loss"], abs=1e-5)
  own = Run.open(new).started
  assert own == config and own.model.weights == "generated"
  other = change(config, model=dict(embed_dim=32))
  line = told(lambda: jobs.run("continuous", other, str(tmp_path / "other"), from_workdir=workdir))
  assert "only model.time" in line


def test_mistakes_of_the_job_are_one_line_and_the_run_stays(begun, tmp_path):
  config, copy = begun[0], shutil.copytree(begun[1], tmp_path / "run")
  textless = dataclasses.replace(config, data=config_lib.DataConfig(source="none"))
  for part, changed, options in (
    ("num_steps=5: must be from 1 to 4", config, {"num_steps": 5}),
    ("model.num_steps", change(config, model=dict(num_steps=4)), {}),  # is not the run's
    ("must be one of loss, influence", config, {"by": "size"}),
    ("num_steps=2: is for by=loss", config, {"by": "influence", "num_steps": 2}),
    ("data.source=none: the run has no text yet", textless, {}),
  ):
    assert part in told(lambda: rank(changed, copy, **options))
  assert read(copy, "run.json") == read(begun[1], "run.json")
  (tmp_path / "other.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("hail", "snow", "rain" * 99)))
  other = change(config, data=dict(source=f"jsonl:{tmp_path}/other.jsonl"))  # too short for a tokenizer of its own
  assert len(rank(other, copy, tokens=16, by="influence", num_steps=None)["depth_order"]) == 5
  tuned = change(config, model=dict(depth_order=(4, 3, 2, 1, 0), lora=LoraConfig(2)))
  line = told(lambda: jobs.run("export", tuned, str(copy), out=str(tmp_path / "out"), format="peft", num_steps=2))
  assert line.startswith("--num_steps=2: --format=peft writes all")


# training


def test_tuning_at_drawn_steps_keeps_the_order_and_goes_on_bit_for_bit(begun, ranked, tmp_path, monkeypatch, capsys):
  model = dict(seq_len=2 * begun[0].model.seq_len)  # becomes that of the run
  train, optimizer = dict(step_counts=(2, 4, 5), self_distillation=True), dict(name="muon_weights")
  config = change(begun[0], model=model, train=train, optimizer=optimizer)
  tune = lambda workdir: jobs.run("finetune", config, workdir, from_workdir=ranked[0], num_steps=4)
  whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
  tune(whole)
  kept = sorted(Run.open(ranked[0]).started.model.depth_order[:4])
  said = capsys.readouterr().err
  assert f"these 4 stay: {', '.join(map(str, kept))}\n" in said and "warning" not in said
  assert f"model.seq_len={config.model.seq_len}: becomes {config.model.seq_len // 2}" in said
  start_state, opened = loop.start_state, []

  def draw(config, step):
    if step == 6:
      opened[0].close()  # the checkpoint of step 4 is written
      raise conftest.Stop
    return draw_num_steps(config, step)

  with monkeypatch.context() as patch, pytest.raises(conftest.Stop):
    patch.setattr(loop, "start_state", lambda *arguments: opened.append(arguments[1]) or start_state(*arguments))
    patch.setattr(loop, "draw_num_steps", draw)
    tune(halves)
  tune(halves)
  first, second = Run.open(whole), Run.open(halves)
  assert first.started == second.started and first.started.train.step_counts == (2, 4)
  assert first.started.model.depth_order == restricted(ranked[1]["depth_order"], 4)
  assert losses_of(whole) == losses_of(halves)
  equal(first.params, second.params)
  asked, order, own = [], (3, 2, 1, 0), first.started.model.depth_order
  monkeypatch.setattr("diffeq_nnx.jobs.finetune.train", lambda config, workdir: asked.append(config.model.depth_order))
  for given in (order, (4, 3, 2, 1, 0)):  # the latter is of the source, as the command that began may have it
    jobs.run("finetune", config, whole, from_workdir=ranked[0], model_settings=[f"model.depth_order={given}"])
  assert asked == [order, own]
  taught = ["full_cross_entropy" in record for record in read_metrics(whole, "train")]
  assert taught == [draw_num_steps(first.started, step) == 2 for step in range(8)] and len({*taught}) == 2


# steps that stay when others are left out, fitted by least squares

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


def test_a_job_says_how_close_the_states_come_and_fine_tuning_begins_with_it(ranked, tmp_path, capsys, monkeypatch):
  workdir, started = ranked[0], Run.open(ranked[0]).started
  made = jobs.run("discretize", started, str(tmp_path / "new"), from_workdir=workdir, num_steps=3, fit_tokens=600)
  errors = re.findall(r"fitted; .* (\S+) -> (\S+)\n", capsys.readouterr().err)
  assert len(errors) == 3 and all(float(before) > float(after) for before, after in errors)
  new = str(tmp_path / "tuned")
  monkeypatch.setattr("diffeq_nnx.jobs.finetune.train", lambda config, workdir: None)
  jobs.run("finetune", started, new, from_workdir=workdir, num_steps=3, fit_tokens=600)
  first = read_metrics(new, "validation")[0]
  assert (first["step"], first["loss"]) == (0, pytest.approx(made["after"]["loss"], abs=1e-6))


def test_what_can_t_be_fitted_is_one_line(ranked, tmp_path):
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
