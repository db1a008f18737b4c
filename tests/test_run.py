"""Whole runs on a small model: what they leave behind, and how they meet trouble."""

import dataclasses
import functools
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock

from flax import nnx
import jax
import matplotlib
import orbax.checkpoint as ocp
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.config import DAMAGED_FOLDER, CheckpointConfig, OptimizerConfig
from diffeq_nnx.errors import Diverged, RunError, UserError
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.runs.run import Run, portable
from diffeq_nnx.training import goodput
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import load_corpus, train
from diffeq_nnx.training.report import plot_losses, read_metrics
from tests.conftest import run_config, told

pytestmark = pytest.mark.filterwarnings(  # orbax leaves coroutines unfinished where it can't read
  "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def collected():
  """Such leftovers are collected within the test that made them."""
  yield
  gc.collect()


def kept(workdir) -> list[int]:
  """Steps with a checkpoint."""
  return sorted(int(name) for name in os.listdir(workdir / "checkpoints") if name.isdigit())


@pytest.fixture
def run(finished, tmp_path):
  """The same, as a copy to spoil, to be taken on to 28 steps."""
  config, workdir = finished
  shutil.copytree(workdir, tmp_path / "run")
  return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=28)), tmp_path / "run"


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory):
  """The work directory of the run that was taken on to 28 steps without a stop."""
  config, workdir = finished
  whole = shutil.copytree(workdir, tmp_path_factory.mktemp("whole") / "run")
  train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=28)), str(whole))
  return whole


@pytest.mark.parametrize("moment", ["training", "last validation"])
def test_sigterm_saves_a_checkpoint_from_which_the_run_goes_on(run, whole, monkeypatch, moment):
  """It ends at once, in a validation too, and the run then has the records of one that was not interrupted."""
  config, workdir = run
  reached, before = distributed.Preemption.reached, signal.getsignal(signal.SIGTERM)

  step, call = {"training": (22, 2), "last validation": (28, 12)}[moment]

  def told(self):
    if self._calls + 1 == call:
      os.kill(os.getpid(), signal.SIGTERM)
    return reached(self)

  with monkeypatch.context() as patch:
    patch.setattr(distributed.Preemption, "reached", told)
    assert bool(train(config, str(workdir))) == (moment != "training")
  assert kept(workdir)[-1] == step and read_metrics(workdir, "validation")[-1]["step"] < step
  assert signal.getsignal(signal.SIGTERM) == before
  if moment != "training":  # again, in the validation that it repeats
    with monkeypatch.context() as patch:
      patch.setattr(distributed.Preemption, "reached", lambda self: True)
      assert train(config, str(workdir)) == {} and kept(workdir)[-1] == step
    # as if the run had been killed after the validation that it repeats
    with open(workdir / "metrics.jsonl", "a") as file:
      file.write(json.dumps({"step": step, "split": "validation", "loss": 0.0}) + "\n")
  train(config, str(workdir))
  losses = [
    [(r["step"], r["loss"]) for r in read_metrics(folder, split)]
    for folder in (workdir, whole)
    for split in ("train", "validation")
  ]
  assert losses[:2] == losses[2:] and losses[0][-1][0] == 25 and losses[1][-1][0] == 28


def test_a_checkpoint_is_also_saved_after_minutes_and_metrics_go_to_weights_and_biases(run, capfd, monkeypatch):
  """Checked where a step is logged, here every 5; the attention is named once."""
  config, workdir = run
  wandb = "rivers" if importlib.util.find_spec("wandb") else None
  for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DISABLE_GIT", "true")):
    monkeypatch.setenv(name, value)
  checkpoint, report = CheckpointConfig(every=100, minutes=1e-6, keep=9), config_lib.ReportConfig(wandb=wandb)
  train(dataclasses.replace(config, checkpoint=checkpoint, report=report), str(workdir))
  assert kept(workdir)[-2:] == [25, 28]
  assert capfd.readouterr().err.count("attention: reference (no kernel for the backend 'cpu')") == 1
  if wandb:
    (folder,) = (workdir / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    assert folder.name.endswith(workdir_lib.run_hash(workdir)[:16])
    assert b"validation/loss" in log.read_bytes() and b"rivers" in log.read_bytes()


def test_two_runs_of_one_command_are_not_the_same_run(run, tmp_path):
  config, workdir = run
  again = str(tmp_path / "again")
  workdir_lib.claim(again, config, Run.open(str(workdir)).tokenizer, None)
  assert workdir_lib.run_hash(again) != workdir_lib.run_hash(str(workdir))


def test_health_lines_tell_progress_and_a_stall(capfd, monkeypatch):
  monkeypatch.setattr(goodput, "HEALTH_SECONDS", 0.01)
  times = goodput.Goodput()
  times.mark_step(7)
  with times.watched(), times.spending("saving"):
    time.sleep(0.1)
    monkeypatch.setattr(goodput, "STALLED_SECONDS", 0.0)
    time.sleep(0.1)
  lines = capfd.readouterr().err.splitlines()
  assert lines[0].startswith("health: step 7, goodput")
  assert lines[-1].startswith("health: stalled: process 0 has not moved for 0 s (saving after step 7)")


def test_what_a_run_leaves_behind(finished):
  config, workdir = finished
  assert [r["step"] for r in read_metrics(workdir, "train")] == [5, 10, 15, 20]
  validation = read_metrics(workdir, "validation")
  assert [r["step"] for r in validation] == [4, 8, 12, 16, 20]
  assert validation[-1]["loss"] < validation[0]["loss"] < math.log(300) + 0.1
  last = read_metrics(workdir, "train")[-1]
  assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
  assert 0 < last["utilization"] < last["utilization_with_generator"] and 0 < last["waiting_for_data"] < 1
  assert {"loss", "bits_per_byte", "gradient_norm", "learning_rate", "tokens_per_second"} < last.keys()
  (spent,) = read_metrics(workdir, "time")
  shares = {name: share for name, share in spent.items() if name not in ("step", "split", "seconds")}
  assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0 and spent["step"] == 20
  assert shares["compiling"] > 0 and shares["validating"] > 0 and shares["saving"] > 0
  assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
  assert any("tfevents" in name for name in os.listdir(workdir / "tensorboard"))
  assert json.loads((workdir / "run.json").read_text())["tokenizer_hash"]


def test_a_run_is_loaded_and_evaluated_as_it_was_left(finished, capsys):
  """In a program and by the job, which prints one line of JSON."""
  config, workdir = finished
  last = read_metrics(workdir, "validation")[-1]
  run, corpus = diffeq_nnx.load(str(workdir)), load_corpus(config)
  assert (run.config, run.step) == (portable(config), 20) and run.tokenizer.hash == corpus.tokenizer.hash
  with jax.set_mesh(run.mesh):
    values = Evaluator(config, corpus, run.mesh)(nnx.to_pure_dict(nnx.state(run.model, nnx.Param)))
  assert values["loss"] == last["loss"]
  tokens_a_byte = len(corpus.validation.tokens) / corpus.validation.num_bytes
  assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) * tokens_a_byte)
  capsys.readouterr()
  jobs.run("evaluate", config, str(workdir))
  (line,) = capsys.readouterr().out.splitlines()
  expected = {"step": 20, "num_steps": 2, **{name: last[name] for name in ("loss", "bits_per_byte")}}
  assert expected.items() <= json.loads(line).items()
  assert "holds no run" in told(lambda: diffeq_nnx.load(str(workdir.parent)))


def test_drawing_the_losses_leaves_the_caller_s_figures_alone(finished, tmp_path):
  """A notebook shows nothing more once another backend is chosen."""
  shutil.copy(finished[1] / "metrics.jsonl", tmp_path)
  before = matplotlib.get_backend()
  matplotlib.use("svg")
  try:
    plot_losses(str(tmp_path))
    assert matplotlib.get_backend() == "svg" and (tmp_path / "loss.png").exists()
  finally:
    matplotlib.use(before)


def test_a_run_that_keeps_documents_apart_stays_one(tmp_path, capsys):
  """It learns, its evaluation agrees, its losses are not those of a run that doesn't, and it can't become one."""
  for i in range(30):
    (tmp_path / f"{i}.txt").write_text(f"Rain {i}." * (1 + i % 3))
  across = run_config(tmp_path, steps=8)
  apart = dataclasses.replace(across, data=dataclasses.replace(across.data, attend_across_documents=False))
  last = train(apart, str(tmp_path / "apart"))
  first, second = (record["loss"] for record in read_metrics(tmp_path / "apart", "validation"))
  assert second == last["loss"] < first
  jobs.run("evaluate", apart, str(tmp_path / "apart"))
  assert json.loads(capsys.readouterr().out)["loss"] == last["loss"]
  assert abs(train(across, str(tmp_path / "across"))["loss"] - last["loss"]) > 1e-4
  with pytest.raises(UserError, match="data.attend_across_documents is False there and True here"):
    train(across, str(tmp_path / "apart"))


def test_a_discretized_run_is_a_run(finished, tmp_path, capsys):
  """The same loss, found again by evaluate with no config named, and a start for training; at any steps."""
  config, workdir = finished
  new = str(tmp_path / "new")
  discretize = lambda to, source=workdir, **how: jobs.run("discretize", config, to, from_workdir=str(source), **how)
  result = discretize(new)
  assert json.loads(capsys.readouterr().out) == result
  assert result["before"]["loss"] == read_metrics(workdir, "validation")[-1]["loss"]
  assert result["after"]["loss"] == pytest.approx(result["before"]["loss"], abs=1e-5)
  assert result["after"]["perplexity"] == pytest.approx(math.exp(result["after"]["loss"]))
  stored = Run.open(new).started
  assert (stored.model.weights, stored.model.num_steps) == ("stored", 2)
  assert jobs.run("evaluate", stored, new)["loss"] == result["after"]["loss"]
  shorter = dataclasses.replace(stored, train=dataclasses.replace(stored.train, steps=8))
  assert train(shorter, new)["loss"] < result["after"]["loss"]  # 8 steps more, of stored weights
  assert discretize(str(tmp_path / "uneven"), step_sizes=(0.5, 1.5))["after"]["num_steps"] == 2
  after = discretize(str(tmp_path / "three"), num_steps=3)["after"]
  there = dataclasses.replace(config, eval=dataclasses.replace(config.eval, num_steps=3))
  for evaluated in (jobs.run("evaluate", there, str(workdir)), jobs.run("evaluate", config, str(workdir), num_steps=3)):
    assert (after["num_steps"], after["loss"]) == (3, pytest.approx(evaluated["loss"], abs=1e-5))
  shutil.copytree(workdir, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
  for to, source, how, part in (
    ("new", workdir, {}, "holds a run already"),
    ("other", workdir, {"num_steps": 0}, "num_steps=0: must be 1 or above"),
    ("other", workdir, {"step_sizes": (1.0, 2.0)}, "add up to the model's horizon, 2"),
    ("other", tmp_path / "empty", {}, f"from_workdir={tmp_path}/empty: holds no checkpoint yet"),
    ("other", tmp_path, {}, "holds no run"),
  ):
    assert part in told(lambda: discretize(str(tmp_path / to), source, **how)), part
  assert not (tmp_path / "other").exists()


def test_a_run_continues_prompts_where_its_text_is_gone(finished, tmp_path, capsys, monkeypatch):
  """One prompt: its text alone, streamed or not; several: a JSON line each, each as if it were alone."""
  config, workdir = finished
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="text:/nowhere/*.txt"))
  record = json.loads((workdir / "run.json").read_text())
  shutil.copytree(workdir, tmp_path / "run")
  (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"config": config_lib.to_dict(config)}))
  prompts, how = ["Document 3 tells", "hills"], {"max_tokens": 5, "temperature": 0.0}
  results = jobs.run("generate", config, str(tmp_path / "run"), prompt=prompts, **how)
  assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
  assert [(one["prompt"], one["tokens"], one["stopped"]) for one in results] == [(p, 5, "length") for p in prompts]
  (alone,) = jobs.run("generate", config, str(tmp_path / "run"), prompt=prompts[1:], **how)
  assert alone == results[1] and capsys.readouterr().out == alone["text"] + "\n"
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  jobs.run("generate", config, str(tmp_path / "run"), prompt=prompts[1:], **how)
  assert capsys.readouterr().out == alone["text"] + "\n"
  for options, part in (
    ({"prompt": ["a " * 40]}, "prompts[0]: "),
    ({"prompt": []}, "prompts: none given"),
    ({"prompt": [""]}, "prompts[0]='': gives no tokens"),
    ({"prompt": ["a"], "temperature": -1.0}, "temperature=-1.0: must be 0"),
    ({"prompt": ["a"], "num_steps": 0}, "num_steps=0: must be 1"),
    ({"prompt": ["a"], "rows": 0}, "rows=0: must be 1"),
    ({"prompt": ["a"], "prompts": "b"}, "--prompt, --prompts: give one of them"),
    ({"prompts": "b"}, "--prompts, --out: go together"),
    ({"prompt": ["a"], "draft_tokens": 2}, "--draft_tokens=2: goes with --draft_steps"),
    ({"prompt": ["a"], "draft_steps": 0}, "--draft_steps: num_steps=0: must be 1"),
    ({"prompts": "/none", "out": str(tmp_path / "out")}, "--prompts=/none: can't be read"),
    ({"prompts": __file__, "out": __file__}, "already exists"),
    ({"prompts": __file__, "out": "gs://bucket/out"}, "must be on a disk"),
  ):
    assert part in told(lambda: jobs.run("generate", config, str(tmp_path / "run"), **options)), part
  shutil.rmtree(tmp_path / "run" / "checkpoints")
  assert "holds no checkpoint yet" in told(lambda: jobs.run("generate", config, str(tmp_path / "run"), prompt=["a"]))
  (tmp_path / "run" / "tokenizer.model").write_bytes(b"another")
  assert "lacks the tokenizer of its run" in told(
    lambda: jobs.run("generate", config, str(tmp_path / "run"), prompt=["a"])
  )


def test_the_last_checkpoints_and_the_best_are_kept(run, monkeypatch):
  """A loss that is no number is not the best; and orbax does not ask whether SIGTERM came, which the loop counts."""
  config, workdir = run
  save = Checkpoints.save
  monkeypatch.setattr(
    Checkpoints,
    "save",
    lambda self, state, position, loss: save(self, state, position, math.nan if self.steps()[-1] == 20 else loss),
  )
  monkeypatch.setattr("orbax.checkpoint.utils.reached_preemption", None)
  losses = {r["step"]: r["loss"] for r in read_metrics(workdir, "validation")}
  best = min(losses, key=losses.get)
  assert kept(workdir) == sorted({16, 20, best})
  # a rate that throws the model far away: nothing later is as good
  train(dataclasses.replace(config, optimizer=OptimizerConfig(peak_rate=30.0)), str(workdir))
  losses = {r["step"]: r["loss"] for r in read_metrics(workdir, "validation")}
  assert min(losses, key=losses.get) == best, losses
  assert kept(workdir) == [best, 24, 28]


def remove_a_file(checkpoint):
  """The largest file of the parameters is gone."""
  files = [path for path in (checkpoint / "params").rglob("*") if path.is_file()]
  max(files, key=lambda path: path.stat().st_size).unlink()


def truncate_a_file(checkpoint):
  """The largest file is cut to half, as after a crash of the machine."""
  largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)


def change_a_byte(checkpoint):
  """In the middle of the parameters, where no format checks it."""
  largest = max((checkpoint / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 64
  largest.write_bytes(content)


def remove_an_item(checkpoint):
  """The position in the data is gone."""
  shutil.rmtree(checkpoint / "data")


def empty(checkpoint):
  """Nothing is left but the folder."""
  shutil.rmtree(checkpoint)
  checkpoint.mkdir()


@pytest.mark.parametrize(
  "error", [OSError(5, "Input/output error"), MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of")]
)
def test_a_checkpoint_that_can_t_be_read_at_the_moment_stays(run, error, monkeypatch):
  """A lack of memory or a disk that does not answer says nothing of the checkpoint, and the one before is not taken."""
  config, workdir = run
  monkeypatch.setattr(ocp.CheckpointManager, "restore", unittest.mock.Mock(side_effect=error))
  before = kept(workdir)
  for use in (train, functools.partial(jobs.run, "evaluate")):
    with pytest.raises(RunError, match="the checkpoint of step 20 can't be read at the moment"):
      use(config, str(workdir))
  assert kept(workdir) == before


def test_a_job_that_only_reads_leaves_a_damaged_checkpoint_where_it_is(run, capfd):
  config, workdir = run
  change_a_byte(workdir / "checkpoints" / "20")
  contents = lambda: {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
  before = contents()
  assert jobs.run("evaluate", config, str(workdir))["step"] == 16
  assert "the checkpoint of step 20 is damaged" in capfd.readouterr().err and contents() == before


def test_damaged_checkpoints_are_set_aside_and_the_one_before_taken(run, capfd):
  config, workdir = run
  for name in ("21", "22"):
    shutil.copytree(workdir / "checkpoints" / "20", workdir / "checkpoints" / name)
  for name, damage in (("20", truncate_a_file), ("21", remove_an_item), ("22", empty)):
    damage(workdir / "checkpoints" / name)
  train(config, str(workdir))
  told = capfd.readouterr().err
  assert "the checkpoint of step 20 is damaged" in told and "continuing from the checkpoint of step 16" in told
  assert sorted(os.listdir(workdir / DAMAGED_FOLDER)) == ["20", "21", "22"]
  assert kept(workdir)[-1] == 28
  assert [r["step"] for r in read_metrics(workdir, "validation")] == [4, 8, 12, 16, 20, 24, 28]


def test_a_checkpoint_that_a_kill_left_unfinished_is_not_read(run):
  """Under the name of one that is being written, or, as without renaming, its own with half of its parts."""
  config, workdir = run
  for name in ("24.orbax-checkpoint-tmp", "24.orbax-checkpoint-tmp-1700000000", "24"):
    newest = workdir / "checkpoints" / name
    shutil.copytree(workdir / "checkpoints" / "20", newest)
    shutil.rmtree(newest / "params")
  assert jobs.run("evaluate", config, str(workdir))["step"] == 20


def test_a_work_directory_that_can_t_be_used_is_told(run):
  config, workdir = run
  for step in kept(workdir):
    remove_a_file(workdir / "checkpoints" / str(step))
  with pytest.raises(UserError, match="none of its checkpoints .* can be read"):
    train(config, str(workdir))
  with pytest.raises(UserError, match=r"workdir=.*can't be written"):
    train(config, str(workdir / "run.json" / "run"))


def test_a_run_that_diverges_goes_on_from_a_good_checkpoint_at_a_lower_rate(finished, tmp_path):
  """Parameters that are not finite, or whose loss isn't, are in no checkpoint that is left."""
  optimizer = OptimizerConfig(name="muon_weights", peak_rate=1e-3)
  config = dataclasses.replace(finished[0], optimizer=optimizer, checkpoint=CheckpointConfig(every=1))
  with_steps = lambda steps: dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
  train(with_steps(3), str(tmp_path))
  wild = dataclasses.replace(optimizer, peak_rate=1e10, clip_norm=1e30)
  with pytest.raises(Diverged, match=r"^step \d+: the .*lower optimizer.peak_rate.* step (\d+)") as told:
    train(dataclasses.replace(with_steps(8), optimizer=wild), str(tmp_path))
  newest = kept(tmp_path)[-1]
  assert newest >= 3 and f"from the checkpoint of step {newest}" in str(told.value)
  assert 3 in kept(tmp_path)  # the best one
  assert math.isfinite(train(with_steps(newest + 2), str(tmp_path))["loss"])


def test_a_checkpoint_that_a_run_was_continued_from_stays_when_it_diverges(run):
  config, workdir = run
  before = kept(workdir)
  config = dataclasses.replace(config, optimizer=OptimizerConfig(peak_rate=1e30, clip_norm=1e30))
  with pytest.raises(RunError, match=r"^step 2[1-4]: the (loss|gradient norm) is (nan|inf)"):
    train(config, str(workdir))
  assert kept(workdir) == before


def test_a_longer_schedule_is_said_and_its_length_can_be_fixed(finished, tmp_path, capfd):
  def continued(steps, **more):
    optimizer = dataclasses.replace(finished[0].optimizer, warmup_fraction=0.1, **more)
    settings = dataclasses.replace(finished[0].train, steps=steps, log_every=1)
    train(dataclasses.replace(finished[0], optimizer=optimizer, train=settings), str(tmp_path))
    return capfd.readouterr().err

  assert "schedule" not in continued(8)
  told = continued(12)
  rates = {record["step"]: record["learning_rate"] for record in read_metrics(tmp_path, "train")}
  assert "has 12 steps now and had 8 until step 8" in told and "optimizer.schedule_steps=8" in told
  assert f"from {rates[8]:.3g} to {rates[9]:.3g}" in told and rates[9] > rates[8]
  assert "schedule" not in continued(16, schedule_steps=12)
  rates = {record["step"]: record["learning_rate"] for record in read_metrics(tmp_path, "train")}
  assert {rates[step] for step in range(12, 17)} == {rates[12]}


def test_a_directory_of_another_model_optimizer_or_tokenizer_names_the_keys(run, tmp_path):
  config, workdir = run
  other = dataclasses.replace(config, model=dataclasses.replace(config.model, num_steps=3, embed_dim=32))
  other = dataclasses.replace(other, optimizer=dataclasses.replace(config.optimizer, name="lion"))
  with pytest.raises(UserError) as told:
    train(other, str(workdir))
  assert "optimizer.name is 'adamw' there and 'lion' here" in str(told.value)
  assert "model.num_steps is 2 there and 3 here" in str(told.value)
  assert "model.embed_dim is 16 there and 32 here" in str(told.value)
  assert "model.num_heads" not in str(told.value)
  record = json.loads((workdir / "run.json").read_text())
  (workdir / "run.json").write_text(json.dumps({**record, "tokenizer_hash": "0" * 64}))
  with pytest.raises(UserError, match="the tokenizer is 000000000000 there and"):
    train(config, str(workdir))


def test_an_attention_that_this_backend_lacks_is_told(finished, tmp_path):
  config = dataclasses.replace(finished[0], model=dataclasses.replace(finished[0].model, attention="pallas"))
  workdir = str(finished[1])
  for job, place, how in (
    ("train", workdir, {}),
    ("evaluate", workdir, {}),
    ("finetune", str(tmp_path), {"from_workdir": workdir}),
  ):
    with pytest.raises(UserError, match="model.attention='pallas': .*the backend is 'cpu'.*use 'auto'"):
      jobs.run(job, config, place, **how)


FULL = """
import resource, sys
from diffeq_nnx.errors import RunError
from diffeq_nnx.training.loop import train
from tests.conftest import run_config
for limit in (9_000, 0):  # bytes a file: too few for the arrays; none at all
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit,) * 2)  # a write beyond fails, as on a full disk
  try:
    train(run_config(sys.argv[1], steps=28), sys.argv[2])
  except RunError as error:
    print(error)
"""


def test_a_full_disk_loses_no_earlier_checkpoint(run, finished, capfd):
  config, workdir = run
  text = str(finished[1].parent)
  command = [sys.executable, "-c", FULL, text, str(workdir)]
  environment = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "3600"}  # no part of a program is kept
  done = subprocess.run(command, text=True, capture_output=True, timeout=300, env=environment)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 2 and all("run the same command to continue" in line for line in lines), done.stdout
  train(config, str(workdir))
  assert "continuing from the checkpoint of step 20" in capfd.readouterr().err and kept(workdir)[-1] == 28
