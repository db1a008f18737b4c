"""Fine-tuning: what learns, what stays, what is saved, and that adapters become part of the weights."""

import dataclasses
import json
import math
import os
import pathlib
import shutil

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.config import LoraConfig
from diffeq_nnx.jobs import finetune
from diffeq_nnx.model.parameters import graph
from diffeq_nnx.runs import checkpoint
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from diffeq_nnx.training.step import all_params, init_state, make_train_step
from tests.conftest import change, perturb, random_batch, run_config, small_config, small_model, told, weights_of

LORA = LoraConfig(rank=2, alpha=3.0, targets="qkv|up")


def lora_config(dtype="float64", **lora):
  return small_config(small_model(weights="stored", dtype=dtype, lora=dataclasses.replace(LORA, **lora)))


def start(config):
  state = jax.jit(init_state, static_argnums=0)(config)
  return {**state, "params": perturb(state["params"]), "frozen": perturb(state["frozen"], seed=1)}


def test_new_adapters_add_nothing_and_only_what_learns_moves(x64):
  config = lora_config()
  state = jax.jit(init_state, static_argnums=0)(config)
  without_embeddings = jax.eval_shape(lambda: init_state(lora_config(embeddings=False)))
  assert without_embeddings["params"].keys() == {"weight_source"}
  assert state["params"].keys() == {"embedding", "positions", "weight_source"}
  assert {*state["params"]["weight_source"]} == {"lora"}
  assert state["params"]["weight_source"]["lora"].keys() == {"qkv", "up"}
  assert not any(np.any(adapter["b"]) for adapter in state["params"]["weight_source"]["lora"].values())
  before = jax.tree.map(np.asarray, (state["params"], state["frozen"]))
  step = make_train_step(config)
  for number in range(2):  # the first moves b alone
    state, _ = step(state, random_batch(config, number), 3)
  jax.tree.map(np.testing.assert_array_equal, before[1], state["frozen"])
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before[0], state["params"])
  assert all(jax.tree.leaves(moved))
  sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state["params"], state["opt_state"])]
  assert sizes[1] <= 2 * sizes[0] + 8  # two moments of what learns and counters: nothing of what stays


def test_a_kernel_is_its_own_and_the_product_of_its_adapters_which_drop_out_in_training_only(x64):
  """A feature of an adapter is there, larger, or not at all, so that the mean stays."""
  config = lora_config(dropout=0.3)
  whole = all_params(start(config))
  model, source = nnx.merge(graph(config.model), whole), whole["weight_source"]
  merged = weights_of(model).sets
  for group, kernels in source["stored"].items():
    for name, kernel in kernels.items():
      expected = np.asarray(kernel)
      if group in ("qkv", "up") and name == "kernel":
        adapter = source["lora"][group]
        expected = expected + 1.5 * np.einsum("sir,sro->sio", adapter["a"], adapter["b"])
      np.testing.assert_allclose(merged[group][name], expected, rtol=1e-12)
  plain, stored = (np.asarray(sets["qkv"]["kernel"]) for sets in (merged, source["stored"]))
  draw = jax.jit(jax.vmap(lambda number: model.block_weights(None, jax.random.key(number)).sets["qkv"]["kernel"]))
  drawn = np.asarray(draw(jnp.arange(4000)))
  assert abs(drawn.mean(0) - plain).max() < 0.15 * abs(plain - stored).max()
  ratio = (drawn[0] - stored) / (plain - stored)
  assert set(np.round(np.unique(ratio), 6)) == {0.0, round(1 / 0.7, 6)}
  assert np.isclose((drawn[:50] == stored).mean(), 0.3, atol=0.05)


@pytest.fixture(scope="module")
def tuned(finished, tmp_path_factory):
  """(config, source, work directory, last values) of adapters, tuned at 3 steps on other text and at half the length.

  The source is a copy of the run; nothing of these is to be changed.
  """
  folder = tmp_path_factory.mktemp("tuned")
  for i in range(12):
    (folder / f"{i}.txt").write_text(f"Text {i} is of ships and the sea. " * (20 + i))
  config = run_config(folder, steps=4)
  config = change(config, model=dict(lora=LoraConfig(rank=2), seq_len=8))  # of the source's 16
  source, new = str(folder / "source"), str(folder / "new")
  shutil.copytree(finished[1], source)
  return config, source, new, jobs.run("finetune", config, new, from_workdir=source, num_steps=3)


def test_a_run_is_fine_tuned_at_another_depth_and_needs_its_source_no_more(tuned, tmp_path, capsys):
  config, source, tuned_folder, last = tuned
  new, moved = (str(tmp_path / name) for name in ("new", "moved"))
  shutil.copytree(tuned_folder, new)
  records = read_metrics(new, "validation")
  assert [record["step"] for record in records] == [0, 4]
  assert records[-1]["loss"] == last["loss"] < records[0]["loss"]
  run = Run.open(new)
  assert len(run.params["positions"]) == 8 and "frozen" in {path.split(os.sep)[-1] for path, _, _ in os.walk(new)}
  assert (run.started.model.num_steps, run.started.model.weights, run.started.model.lora.rank) == (3, "stored", 2)
  assert jobs.run("evaluate", run.started, new)["loss"] == pytest.approx(last["loss"], abs=1e-6)
  (tmp_path / "other").mkdir()
  record = json.loads(pathlib.Path(source, "run.json").read_text())
  (tmp_path / "other" / "run.json").write_text(json.dumps({**record, "hash": "0" * 32}))
  other = str(tmp_path / "other")
  assert "was not started from" in told(lambda: jobs.run("finetune", config, new, from_workdir=other))
  half = change(config, model=dict(dtype="bfloat16"))
  assert "model.dtype is 'float32' there" in told(lambda: jobs.run("finetune", half, new, from_workdir=source))
  for key, value, part in (("begin_mark", True, "=True: is False"), ("end_token", "a", "is chosen by its tokenizer")):
    marked = change(config, data={key: value})
    assert part in told(lambda: jobs.run("finetune", marked, str(tmp_path / "marked"), from_workdir=source))
  uneven = {"from_workdir": source, "step_sizes": (0.5, 0.5, 1.0)}
  assert "step_sizes=(0.5, 0.5, 1.0): the run in" in told(lambda: jobs.run("finetune", config, new, **uneven))
  fixed = dict(schedule_steps=4)  # of which a step is compiled already
  longer = change(config, optimizer=fixed, train=dict(steps=6))
  again = jobs.run("finetune", longer, new, from_workdir=str(tmp_path / "none"), num_steps=3)  # it goes on
  assert read_metrics(new, "validation")[-1]["step"] == 6 and math.isfinite(again["loss"])
  shutil.move(new, moved)
  merged = jobs.run("discretize", Run.open(moved).started, str(tmp_path / "merged"), from_workdir=moved)
  assert merged["after"]["loss"] == pytest.approx(again["loss"], abs=1e-5)
  assert Run.open(str(tmp_path / "merged")).started.model.lora == LoraConfig()
  capsys.readouterr()
  kept = {path: path.read_bytes() for path in pathlib.Path(moved, "frozen").rglob("*") if path.is_file()}
  path, content = max(kept.items(), key=lambda item: len(item[1]))
  place = len(content) // 2
  path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
  assert "frozen, the parameters that don't learn, can't be read" in told(lambda: Run.open(moved).params)
  path.write_bytes(content)
  (one,) = jobs.run("generate", Run.open(moved).started, moved, prompt=["Text"], max_tokens=3, temperature=0.0)
  assert one["tokens"] == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_run_is_tuned_in_the_type_that_is_asked_for(x64, finished, tmp_path, monkeypatch, dtype):
  config, source, new = finished[0], str(finished[1]), str(tmp_path)
  config = change(config, model=dict(dtype=dtype))
  monkeypatch.setattr("diffeq_nnx.jobs.finetune.train", lambda config, workdir: {})
  jobs.run("finetune", config, new, from_workdir=source)
  own, tuned = Run.open(source), Run.open(new)
  assert (own.started.model.dtype, tuned.started.model.dtype) == ("float32", dtype)
  np.testing.assert_array_equal(tuned.params["embedding"], own.params["embedding"])
  assert tuned.params["embedding"].dtype == (np.float64 if dtype == "float64" else np.float32)
  loss = jobs.run("evaluate", own.started, source)["loss"]
  tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
  assert read_metrics(new, "validation")[0]["loss"] == pytest.approx(loss, abs=tolerance)


def test_that_the_run_has_seen_what_is_held_out_now_is_told(capsys):
  source = change(config_lib.Config(), data=dict(source="text:a", validation_fraction=0.3))
  for changes, warned in (
    ({}, False),
    ({"validation_seed": 0}, False),
    ({"validation_seed": 1}, True),
    ({"validation_fraction": 0.2}, True),
    ({"validation": "text:b"}, False),
    ({"validation_seed": 1, "source": "text:b"}, False),
  ):
    finetune._say_hold_out(source, change(source, data=changes))
    way_out = "set data.validation=None, data.validation_fraction=0.3 and data.validation_seed=0"
    assert (way_out in capsys.readouterr().err) == warned, changes


def test_killed_before_its_first_checkpoint_it_starts_again(tuned, tmp_path, monkeypatch):
  config, source, tuned_folder, _ = tuned
  killed = str(tmp_path / "killed")
  tune = lambda: jobs.run("finetune", config, killed, from_workdir=source, num_steps=3)
  with monkeypatch.context() as patched, pytest.raises(OSError):
    patched.setattr(checkpoint.Checkpoints, "save", lambda *_: os.close(-1))  # its frozen parameters are there
    tune()
  assert not workdir_lib.holds_run(killed)
  monkeypatch.setattr("diffeq_nnx.jobs.finetune.train", lambda config, workdir: {})
  tune()
  assert Run.open(killed).step == 0
  assert read_metrics(killed, "validation")[0]["loss"] == read_metrics(tuned_folder, "validation")[0]["loss"]


def test_a_run_that_began_meanwhile_keeps_its_metrics(tuned, tmp_path, monkeypatch):
  config, source, tuned_folder, _ = tuned
  load = finetune.load_text

  def begin(*arguments):
    shutil.copytree(tuned_folder, tmp_path / "run", dirs_exist_ok=True)
    return load(*arguments)

  monkeypatch.setattr(finetune, "load_text", begin)
  tune = lambda: jobs.run("finetune", config, str(tmp_path / "run"), from_workdir=source, num_steps=3)
  assert "holds a run already" in told(tune)
  assert read_metrics(str(tmp_path / "run"), "validation") == read_metrics(tuned_folder, "validation") != []


def test_mistakes_are_one_line_and_checkpoints_of_something_else_are_not_removed(finished, tmp_path):
  config, source = finished
  new, thesis = str(tmp_path / "new"), tmp_path / "new" / "checkpoints" / "thesis"
  tune = lambda job="finetune", config=config, **options: told(
    lambda: jobs.run(job, config, new, from_workdir=str(source), **options)
  )
  assert "model.lora.targets='(': is no regular expression" in told(lambda: LoraConfig(2, targets="("))
  assert "model.lora.alpha=32.0: is for adapters" in told(lambda: LoraConfig(alpha=32.0))
  message = told(lambda: init_state(lora_config("float32", targets="query$")))
  assert message.startswith("model.lora.targets='query$': matches none of qkv.kernel, out.kernel")
  other = change(config, data=dict(tokenizer="bytes"))
  assert "was trained with another tokenizer" in tune(config=other)
  assert "model.num_steps: the model is that of" in tune(model_settings=["model.num_steps=1"])
  assert "but for model.seq_len, model.dtype" in tune(model_settings=["model.time.scale=2.0"])
  assert not os.path.exists(new)
  thesis.parent.mkdir(parents=True)
  thesis.write_text("x")
  for job, options in (("finetune", {}), ("discretize", {"num_steps": 3})):
    assert "holds checkpoints and no run.json" in tune(job, **options)
  assert thesis.exists()
  shutil.rmtree(thesis.parent)
  theirs = tmp_path / "new" / "tokenizer.model"
  theirs.write_text("x")  # as a published checkpoint's folder
  for begin in (tune, lambda: told(lambda: train(config, new))):
    assert "holds tokenizer.model and no run.json" in begin()
  assert theirs.read_text() == "x"


def test_a_run_is_exported_and_discretized_on_another_machine(finished, tmp_path):
  """Its mesh and its attention are of the machine that it was trained on."""
  config = change(finished[0], mesh=dict(data=2, fsdp=4, tensor=1), model=dict(attention="pallas"))
  elsewhere = shutil.copytree(finished[1], tmp_path / "elsewhere")
  record = json.loads((elsewhere / "run.json").read_text())
  (elsewhere / "run.json").write_text(json.dumps(record | {"config": config_lib.to_dict(config)}))
  result = jobs.run("discretize", config, str(tmp_path / "new"), from_workdir=str(elsewhere))
  assert result["after"]["loss"] == pytest.approx(result["before"]["loss"], abs=1e-5)
  jobs.run("export", config, str(elsewhere), out=str(tmp_path / "out"))
