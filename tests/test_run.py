"""Whole runs on a small model: what they leave behind, and what other jobs make of it."""

import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import re
import shutil
import sys
import time
import types
from unittest import mock

from flax import nnx
import jax
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.data.preparation.directory import lock
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.runs.run import Run, portable
from diffeq_nnx.training import goodput
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import load_corpus, train
from diffeq_nnx.training.optimizer import schedule
from diffeq_nnx.training.report import Reporter, read_metrics
from tests.conftest import change, run_command, told
from tests.test_resume import kept, run  # noqa: F401

WANDB = "rivers" if importlib.util.find_spec("wandb") else None


@pytest.fixture(scope="module")
def longer(finished, tmp_path_factory):
  """(config, work directory, lines) of `finished`, trained on to 28 steps; not to be changed."""
  config, workdir = finished
  checkpoint = dict(every=100, minutes=1e-6, keep=9)
  config = change(config, train=dict(steps=28), checkpoint=checkpoint, report=dict(wandb=WANDB))
  workdir = shutil.copytree(workdir, tmp_path_factory.mktemp("longer") / "run")
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as lines:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DISABLE_GIT", "true")):
      patch.setenv(name, value)
    train(config, str(workdir))
  return config, workdir, lines.getvalue()


def test_a_checkpoint_is_also_saved_after_minutes_and_metrics_go_to_weights_and_biases(longer):
  """Checked where a step is logged, here every 5; the attention is named once."""
  _, workdir, lines = longer
  assert kept(workdir)[-2:] == [25, 28]
  assert lines.count("attention: reference (no kernel for the backend 'cpu')") == 1
  if WANDB:
    (folder,) = (workdir / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    assert folder.name.endswith(workdir_lib.run_hash(workdir)[:16])
    # The process that writes the file may still be at it when finish() returns: up to half a minute on a busy machine.
    deadline = time.monotonic() + 30
    while b"validation/loss" not in log.read_bytes() and time.monotonic() < deadline:
      time.sleep(0.1)
    assert b"validation/loss" in log.read_bytes() and b"rivers" in log.read_bytes()


def test_two_runs_of_one_command_are_not_the_same_run(run, tmp_path):
  config, workdir = run
  again = str(tmp_path / "again")
  workdir_lib.claim(again, config, Run.open(str(workdir)).tokenizer, None)
  assert workdir_lib.run_hash(again) != workdir_lib.run_hash(str(workdir))


def test_health_lines_tell_progress_and_a_stall(monkeypatch):
  monkeypatch.setattr(goodput, "HEALTH_SECONDS", 0.01)
  times = goodput.Goodput()
  times.mark_step(7)
  stalled = r"health: stalled: process 0 has not moved for \d+ s \(saving after step 7\)\n"
  with times.spending("saving"):
    for limit, line in ((300.0, r"health: step 7, goodput .*\n"), (0.0, stalled)):
      monkeypatch.setattr(goodput, "STALLED_SECONDS", limit)
      monkeypatch.setattr(sys, "stderr", told := io.StringIO())
      deadline = time.monotonic() + 30
      with times.watched():
        while not told.getvalue() and time.monotonic() < deadline:
          time.sleep(0.01)
      assert re.match(line, told.getvalue())


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


def test_tensorboard_is_written_without_importing_torch(tmp_path, monkeypatch):
  """Importing torch takes longer than all else that training imports."""
  for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "tensorboardX")]:
    monkeypatch.delitem(sys.modules, name)
  with Reporter(str(tmp_path), 0, 1) as reporter:
    reporter.validation(1, {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 0.4, "tokens": 5})
  assert "tensorboardX" in sys.modules and "torch" not in sys.modules
  assert os.listdir(tmp_path / "tensorboard")


def test_a_run_is_loaded_and_evaluated_as_it_was_left(finished, capsys):
  """In a program and by the job, which prints one line of JSON."""
  config, workdir = finished
  last = read_metrics(workdir, "validation")[-1]
  run, corpus = diffeq_nnx.load(str(workdir)), load_corpus(config)
  assert (run.config, run.step) == (portable(config), 20) and run.tokenizer.hash == corpus.tokenizer.hash
  with jax.set_mesh(run.mesh):
    values = Evaluator(config, corpus, run.mesh)(nnx.to_pure_dict(nnx.state(run.model, nnx.Param)))
  assert values["loss"] == last["loss"]
  at_three = change(config, eval=dict(num_steps=3))
  assert Evaluator(at_three, corpus, run.mesh).num_steps == 3
  tokens_a_byte = len(corpus.validation.tokens) / corpus.validation.num_bytes
  assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) * tokens_a_byte)
  capsys.readouterr()
  jobs.run("evaluate", config, str(workdir))
  (line,) = capsys.readouterr().out.splitlines()
  expected = {"step": 20, "num_steps": 2, **{name: last[name] for name in ("loss", "bits_per_byte")}}
  assert expected.items() <= json.loads(line).items()
  assert "holds no run" in told(lambda: diffeq_nnx.load(str(workdir.parent)))


def test_the_rest_of_a_run_may_be_deleted(finished, tmp_path, capsys):
  """All but the config, the tokenizer and one checkpoint."""
  config, workdir = finished
  for name in ("run.json", "tokenizer.model", "checkpoints/20"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (shutil.copytree if name.startswith("checkpoints") else shutil.copy)(workdir / name, tmp_path / name)
  losses = [jobs.run("evaluate", config, str(place))["loss"] for place in (workdir, tmp_path)]
  assert losses[0] == losses[1]
  train(change(config, train=dict(steps=24)), str(tmp_path))
  assert "continuing from the checkpoint of step 20" in capsys.readouterr().err


def test_a_discretized_run_is_a_run(finished, tmp_path, capsys, monkeypatch):
  """Of uneven steps, with the loss that evaluate finds with no config named."""
  config, workdir = finished
  new = str(tmp_path / "new")
  discretize = lambda to, source=workdir, **how: jobs.run("discretize", config, to, from_workdir=str(source), **how)
  result = discretize(new, step_sizes=(0.5, 0.5, 1.0))
  printed = capsys.readouterr()
  assert json.loads(printed.out) == result and "never at the 3 step sizes that it is asked for" in printed.err
  assert result["before"]["loss"] == read_metrics(workdir, "validation")[-1]["loss"]
  assert result["after"]["perplexity"] == pytest.approx(math.exp(result["after"]["loss"]))
  stored = Run.open(new).started
  assert (stored.model.weights, stored.model.step_sizes) == ("stored", (0.5, 0.5, 1.0))
  assert jobs.run("evaluate", stored, new)["loss"] == result["after"]["loss"]
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)  # a device was used already
  file = tmp_path / "parts.py"  # as one that registers a part, with another model than the run's
  content = config_lib.to_dict(config)
  file.write_text(f"import ml_collections\nget_config = lambda choice: ml_collections.ConfigDict({content})\n")
  assert run_command("--job=evaluate", f"--config={file}", f"--workdir={new}") == 0
  shutil.copytree(workdir, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
  for to, source, part in (
    ("new", workdir, "holds a run already"),
    ("other", tmp_path / "empty", f"from_workdir={tmp_path}/empty: holds no checkpoint yet"),
  ):
    assert part in told(lambda: discretize(str(tmp_path / to), source)), part
  assert not (tmp_path / "other").exists()


def test_a_run_continues_prompts_where_its_text_is_gone(finished, tmp_path, capsys, monkeypatch):
  """One prompt: its text alone, streamed or not; several: a JSON line each, each as if it were alone."""
  config, workdir = finished
  config = change(config, data=dict(source="text:/nowhere/*.txt"))
  record = json.loads((workdir / "run.json").read_text())
  shutil.copytree(workdir, tmp_path / "run")
  (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"config": config_lib.to_dict(config)}))
  prompts, how = ["Document 3 tells", "hills"], {"max_tokens": 5, "temperature": 0.0}
  generate = functools.partial(jobs.run, "generate", config, str(tmp_path / "run"))
  results = generate(prompt=prompts, **how)
  assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
  assert [(one["prompt"], one["tokens"], one["stopped"]) for one in results] == [(p, 5, "length") for p in prompts]
  (alone,) = generate(prompt=prompts[1:], **how)
  assert alone == results[1] and capsys.readouterr().out == alone["text"] + "\n"
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  generate(prompt=prompts[1:], **how)
  assert capsys.readouterr().out == alone["text"] + "\n"
  for options, part in (
    ({"prompt": ["a " * 40]}, "prompts[0]: "),
    ({"prompt": ["a"], "prompts": "b"}, "--prompt, --prompts: give one of them"),
    ({"prompt": ["a"], "draft_steps": 0}, "--draft_steps: num_steps=0: must be 1"),
    ({"prompts": "/none", "out": str(tmp_path / "out")}, "--prompts=/none: can't be read"),
    ({"prompts": __file__, "out": __file__}, "already exists"),
    ({"prompts": __file__, "out": "gs://bucket/out"}, "must be on a disk"),
    ({"prompts": __file__, "out": f"{tmp_path}/answers/"}, "names a folder"),
  ):
    assert part in told(lambda: generate(**options)), part
  shutil.rmtree(tmp_path / "run" / "checkpoints")
  assert "holds no checkpoint yet" in told(lambda: generate(prompt=["a"]))
  (tmp_path / "run" / "tokenizer.model").write_bytes(b"another")
  assert "lacks the tokenizer of its run" in told(lambda: generate(prompt=["a"]))


def test_a_longer_schedule_is_said_and_its_length_can_be_fixed(longer, tmp_path, capfd):
  config, workdir, lines = longer
  workdir = shutil.copytree(workdir, tmp_path / "run")
  rates = lambda: {record["step"]: record["learning_rate"] for record in read_metrics(workdir, "train")}
  rate = float(schedule(config.optimizer, 28)(20))
  assert "has 28 steps now and had 20 until step 20" in lines and "optimizer.schedule_steps=20" in lines
  assert f"from {rates()[20]:.3g} to {rate:.3g}" in lines and rate > rates()[20]
  longer = change(config, optimizer=dict(schedule_steps=28), report=dict(wandb=None), train=dict(steps=32))
  train(longer, str(workdir))
  assert "schedule" not in capfd.readouterr().err
  assert rates()[30] == pytest.approx(config.optimizer.peak_rate * config.optimizer.final_fraction)


def test_a_directory_of_another_model_optimizer_text_or_tokenizer_names_the_keys(run):
  config, workdir = run
  data, optimizer = dict(attend_across_documents=False), dict(name="lion")
  other = change(config, model=dict(num_steps=3), data=data, optimizer=optimizer)
  line = told(lambda: train(other, str(workdir)))
  for part in (
    "optimizer.name is 'adamw' there and 'lion' here",
    "data.attend_across_documents is True there and False here",
    "model.num_steps is 2 there and 3 here",
  ):
    assert part in line
  assert "model.num_heads" not in line
  record = json.loads((workdir / "run.json").read_text())
  (workdir / "run.json").write_text(json.dumps({**record, "tokenizer_hash": "0" * 64}))
  assert "the tokenizer is 000000000000 there and" in told(lambda: train(config, str(workdir)))
  (workdir / "run.json").write_text(json.dumps({**record, "hash": 5}))
  assert "run.json: damaged" in told(lambda: workdir_lib.run_hash(str(workdir)))


def test_the_commit_of_a_data_set_of_the_hub_may_be_named_later():
  at = lambda name: workdir_lib.identity(change(config_lib.Config(), data=dict(source=name)))
  assert at("hf:a/b@1:train") == at("hf:a/b:train") != at("hf:a/c@1:train")


def test_a_directory_whose_run_never_began_takes_another_config(finished, tmp_path, monkeypatch):
  config, _ = finished
  adapted = change(config, model=dict(weights="stored", lora=config_lib.LoraConfig(rank=2)))
  line = told(lambda: train(adapted, str(tmp_path)))
  assert "adapters need a trained model" in line and "use --job=finetune" in line
  corpus = load_corpus(config)
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(workdir_lib, "save_tokenizer", mock.Mock(side_effect=KeyboardInterrupt))
    workdir_lib.claim(str(tmp_path), config, corpus.tokenizer, corpus)
  (tmp_path / corpus.tokenizer.file_name).write_text("another, of a command that was killed after it")
  workdir_lib.claim(str(tmp_path), config, corpus.tokenizer, corpus)
  assert workdir_lib.config_of(str(tmp_path)).model.lora.rank == 0


def test_an_error_waits_for_the_checkpoint_that_is_being_written(run, monkeypatch):
  closed, close = [], Checkpoints.close
  monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(self) or close(self))
  monkeypatch.setattr(Reporter, "train", lambda *_, **__: os.close(-1))  # at step 25, after a checkpoint
  assert "can't be written" in told(lambda: train(run[0], str(run[1])), RunError)
  assert closed


def test_a_second_training_in_one_directory_is_refused_and_changes_nothing(finished, tmp_path):
  """Also before the first has a checkpoint."""
  (config, workdir), corpus = finished, load_corpus(finished[0])
  workdir_lib.claim(str(tmp_path), config, corpus.tokenizer, corpus)
  before = (tmp_path / "run.json").read_bytes()
  for place, second in ((workdir, config), (tmp_path, change(config, model=dict(num_steps=3)))):
    with lock(str(place), "here"):
      line = told(lambda: train(second, str(place)))
    assert "another process trains there; wait for it, or stop it" in line
  assert (tmp_path / "run.json").read_bytes() == before


def test_a_run_goes_on_where_weights_and_biases_is_lost(tmp_path, capfd):
  lost = types.SimpleNamespace(log=lambda *_, **__: os.close(-1), finish=lambda: os.close(-1))
  with Reporter(str(tmp_path), 0, 4) as report:
    report._wandb = lost
    for step in (1, 2):
      report.validation(step, {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 1.0, "tokens": 9})
  assert len(read_metrics(str(tmp_path), "validation")) == 2
  assert capfd.readouterr().err.count("report.wandb: is lost") == 1


def test_an_attention_that_this_backend_lacks_is_told(finished):
  config = change(finished[0], model=dict(attention="pallas"))
  for job in ("train", "evaluate"):
    with pytest.raises(UserError, match="model.attention='pallas': .*the backend is 'cpu'.*use 'auto'"):
      jobs.run(job, config, str(finished[1]))
