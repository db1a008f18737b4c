"""What a run meets, and goes on from: a kill (bit for bit), SIGTERM, checkpoints that are damaged, a loss of nan."""

import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import unittest.mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from diffeq_nnx import jobs
from diffeq_nnx.config import DAMAGED_FOLDER, CheckpointConfig, OptimizerConfig
from diffeq_nnx.errors import Diverged, RunError, UserError
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from tests.conftest import change, leaves_coroutines, told
from tests.processes import Process

pytestmark = leaves_coroutines  # orbax, where it can't read


def records(workdir) -> list[dict]:
  """metrics.jsonl without the figures that depend on the clock."""
  clock = {"seconds", "tokens_per_second", "waiting_for_data", "utilization", "utilization_with_generator"}
  with open(workdir / "metrics.jsonl", encoding="utf-8") as file:
    found = [json.loads(line) for line in file if line.endswith("\n")]
  return [{k: v for k, v in one.items() if k not in clock} for one in found if one["split"] != "time"]


def arrays(workdir, step) -> dict[str, np.ndarray]:
  """Every array of a checkpoint, by path."""
  found = {}
  for item in ("params", "optimizer", "counters"):
    tree = ocp.StandardCheckpointer().restore(os.path.abspath(workdir / "checkpoints" / str(step) / item))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found |= {item + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
  return found


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
  """`finished` as a copy to spoil, to be taken on to 28 steps."""
  config, workdir = finished
  shutil.copytree(workdir, tmp_path / "run")
  return change(config, train=dict(steps=28)), tmp_path / "run"


KILLED = """
import os, signal, sys, time
from diffeq_nnx.parallel import distributed
from diffeq_nnx.training.loop import train
from tests.conftest import run_config
_, text, workdir = sys.argv

def reached(self):
  if self._calls == 7:  # a validation asks twice
    while not os.path.isdir(workdir + "/checkpoints/24"):
      time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
  return told(self)

told, distributed.Preemption.reached = distributed.Preemption.reached, reached
train(run_config(text, steps=28), workdir)
"""


def test_killed_stopped_and_resumed_equals_uninterrupted(run, finished, monkeypatch, capfd):
  """SIGTERM ends it at once, in a validation too, and saves a checkpoint from which it goes on."""
  config, workdir = run
  whole = shutil.copytree(workdir, workdir.parent / "whole")
  train(config, str(whole))
  assert len(records(whole)) == 12  # 5 of training, 7 of validation
  killed = Process([str(finished[1].parent), str(workdir)], first=KILLED)
  assert killed.end(240) == -signal.SIGKILL, killed.lines[-20:]
  assert records(workdir)[-1]["step"] == 25
  reached, handler = distributed.Preemption.reached, signal.getsignal(signal.SIGTERM)

  def told(self):
    if self._calls + 1 == call:
      os.kill(os.getpid(), signal.SIGTERM)
    return reached(self)

  for before, call, step in ((24, 2, 26), (26, 4, 28)):  # in training; in the last validation, which asks twice
    monkeypatch.setattr(distributed.Preemption, "reached", told)
    assert train(config, str(workdir)) == {}
    assert f"continuing from the checkpoint of step {before}" in capfd.readouterr().err
    assert kept(workdir)[-1] == step and read_metrics(workdir, "validation")[-1]["step"] < step
    assert signal.getsignal(signal.SIGTERM) == handler
  # as if it had been killed after the validation that it repeats
  with open(workdir / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 28, "split": "validation", "loss": 0.0}) + "\n")
  monkeypatch.undo()
  train(config, str(workdir))
  assert records(workdir) == records(whole)
  of_last = [(one / "checkpoints/28/metrics/metrics").read_text() for one in (workdir, whole)]
  assert json.loads(of_last[0]) == json.loads(of_last[1])  # the loss by which the best checkpoint is kept
  ours, theirs = arrays(workdir, 28), arrays(whole, 28)
  assert ours.keys() == theirs.keys() and len(ours) > 20
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_the_step_of_a_validation_that_fails_is_kept(run, monkeypatch):
  """A validation may need more memory than a train step, and other text."""
  config, workdir = run
  other = shutil.copytree(workdir, workdir.parent / "other")
  for folder, error in ((other, UserError("no token counts")), (workdir, jax.errors.JaxRuntimeError("no memory"))):
    with monkeypatch.context() as patched, pytest.raises(type(error)):
      patched.setattr(Evaluator, "__call__", unittest.mock.Mock(side_effect=error))
      train(config, str(folder))
    assert kept(folder)[-1] == 24
  train(change(config, train=dict(steps=24)), str(workdir))
  assert [one["step"] for one in read_metrics(str(workdir), "validation")][-1] == 24


def test_the_last_checkpoints_and_the_best_are_kept(run, monkeypatch):
  """A loss that is no number is not the best; and orbax does not ask whether SIGTERM came, which the loop counts."""
  config, workdir = run
  save, later = Checkpoints.save, iter([math.nan, 100.0])  # validation losses of steps 24 and 28
  monkeypatch.setattr(Checkpoints, "save", lambda self, state, position, _: save(self, state, position, next(later)))
  monkeypatch.setattr("orbax.checkpoint.utils.reached_preemption", None)
  losses = {r["step"]: r["loss"] for r in read_metrics(workdir, "validation")}
  best = min(losses, key=losses.get)
  assert kept(workdir) == sorted({16, 20, best})
  train(config, str(workdir))
  assert kept(workdir) == [best, 24, 28]


def largest_file(folder):
  """Of a checkpoint or of a part of it."""
  return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_checkpoint_that_can_t_be_read_at_the_moment_stays(run, monkeypatch):
  """A lack of memory or a disk that does not answer says nothing of the checkpoint, and the one before is not taken."""
  config, workdir = run
  before = kept(workdir)
  out_of_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of")
  for job, error in (("train", out_of_memory), ("evaluate", OSError(5, "Input/output error"))):
    monkeypatch.setattr(ocp.CheckpointManager, "restore", unittest.mock.Mock(side_effect=error))
    line = told(lambda: jobs.run(job, config, str(workdir)), RunError)
    assert "the checkpoint of step 20 can't be read at the moment" in line and type(error).__name__ in line
  assert kept(workdir) == before


def test_what_is_damaged_or_unfinished_is_passed_by_and_set_aside_by_training_alone(run, capfd):
  """Unfinished by a kill: under the name of one that is being written, or its own with half of its parts.

  Damaged: one with a changed bit; one without its position in the data; one without anything.
  """
  config, workdir = run
  folder = workdir / "checkpoints"
  unfinished = [folder / name for name in ("24.orbax-checkpoint-tmp", "24.orbax-checkpoint-tmp-1700000000", "24")]
  for newest in unfinished:
    shutil.copytree(folder / "20", newest)
    shutil.rmtree(newest / "params")
  assert jobs.run("evaluate", config, str(workdir))["step"] == 20
  largest = largest_file(folder / "20" / "params")
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 64  # where no format checks it
  largest.write_bytes(content)
  contents = lambda: {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
  before = contents()
  assert jobs.run("evaluate", config, str(workdir))["step"] == 16
  assert "the checkpoint of step 20 is damaged" in capfd.readouterr().err and contents() == before
  shutil.rmtree(unfinished[-1])
  shutil.copytree(folder / "16", folder / "21")
  shutil.rmtree(folder / "21" / "data")
  (folder / "22").mkdir()
  train(config, str(workdir))
  told = capfd.readouterr().err
  assert "the checkpoint of step 20 is damaged" in told and "continuing from the checkpoint of step 16" in told
  assert sorted(os.listdir(workdir / DAMAGED_FOLDER)) == ["20", "21", "22"]
  assert kept(workdir)[-1] == 28 and not any(path.exists() for path in unfinished[:2])
  assert [r["step"] for r in read_metrics(workdir, "validation")] == [4, 8, 12, 16, 20, 24, 28]


def test_checkpoints_of_another_run_stay_and_are_not_taken(run):
  """As where run.json was removed, or the folder was copied."""
  config, workdir = run
  for other in (dict(embed_dim=24), dict(solver="midpoint")):  # the latter has the same parameters
    (workdir / "run.json").unlink(missing_ok=True)
    before = kept(workdir)
    with pytest.raises(UserError, match="belongs to another run: model"):
      train(change(config, model=other), str(workdir))
    assert kept(workdir) == before
  (workdir / "run.json").unlink()
  said = workdir / "checkpoints" / str(before[-1]) / "run" / "metadata"
  said.write_text(said.read_text().replace('"solver"', '"solvez"'))  # damage, of which restoring needs nothing
  train(config, str(workdir))
  assert kept(workdir)[-1] == 28 and not (workdir / DAMAGED_FOLDER).exists()


def test_a_work_directory_that_can_t_be_used_is_told(run):
  config, workdir = run
  for step in kept(workdir):
    largest_file(workdir / "checkpoints" / str(step) / "params").unlink()
  with pytest.raises(UserError, match="none of its checkpoints .* can be read"):
    train(config, str(workdir))
  with pytest.raises(UserError, match=r"workdir=.*can't be written"):
    train(config, str(workdir / "run.json" / "run"))


def test_a_run_that_diverges_goes_on_from_a_good_checkpoint_at_a_lower_rate(run, monkeypatch):
  """Parameters that are not finite, or whose loss isn't, are in no checkpoint that is left; the ones before stay."""
  config, workdir = run
  save, huge = Checkpoints.save, lambda leaf: np.full(leaf.shape, 3e38, leaf.dtype)
  spoil = lambda self, state, *rest: save(self, {**state, "params": jax.tree.map(huge, state["params"])}, *rest)
  with monkeypatch.context() as patch:
    patch.setattr(Checkpoints, "save", spoil)
    with pytest.raises(Diverged, match="^step 24: the norm of the parameters is inf .*the checkpoint of step 20"):
      train(config, str(workdir))
  assert kept(workdir)[-1] == 20
  optimizer = OptimizerConfig(peak_rate=1e10, clip_norm=1e30)
  wild = dataclasses.replace(config, optimizer=optimizer, checkpoint=CheckpointConfig(every=1))
  with pytest.raises(Diverged, match="^step 2[1-8]: the (loss|gradient) .*lower optimizer.peak_rate") as told:
    train(wild, str(workdir))
  newest = kept(workdir)[-1]
  assert newest >= 20 and f"from the checkpoint of step {newest}" in str(told.value)
  assert 20 in kept(workdir)
  assert math.isfinite(train(config, str(workdir))["loss"])


FULL = """
import io, resource, sys
import jax
from diffeq_nnx.errors import RunError
from diffeq_nnx.training.loop import train
from tests.conftest import run_config
_, text, workdir = sys.argv
jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)  # no part of a compiled program is kept
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (9_000, 0):  # bytes a file: too few for the arrays; none at all
  sys.stderr = io.StringIO()
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # a write beyond fails, as on a full disk
  try:
    train(run_config(text, steps=28), workdir)
  except RunError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(error)
sys.exit()
"""


@pytest.mark.slow(reason="a process of its own that starts the run twice")
def test_a_full_disk_loses_no_earlier_checkpoint(run, finished, capfd):
  config, workdir = run
  process = Process([str(finished[1].parent), str(workdir)], first=FULL)
  assert process.end() == 0, process.lines
  lines = process.out.splitlines()
  assert len(lines) == 2 and all("run the same command to continue" in line for line in lines), lines
  train(config, str(workdir))
  assert "continuing from the checkpoint of step 20" in capfd.readouterr().err and kept(workdir)[-1] == 28
