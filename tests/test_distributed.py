"""Jobs of several real processes on this machine: the same figures, and how they meet trouble."""

import contextlib
import json
import pathlib
import re
import signal
import sys
import time

import jax
import numpy as np
import pytest

from diffeq_nnx import jobs
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs.run import Run
from launch import local
from tests.conftest import small_config
from tests.processes import Process
from tests.test_resume import records

MODEL = ("num_steps=2", "embed_dim=32", "num_heads=4", "vocab_size=512", "seq_len=64", "dropout=0.0")
RUN = ("train.batch_size=8", "train.log_every=1", "train.steps=8", "checkpoint.every=8", "eval.every=8")
RUN += ("train.peak_tflops=0.1",)  # else it is measured
SMALL = ["--config=configs/tiny.py", *(f"--config.model.{one}" for one in MODEL), *(f"--config.{one}" for one in RUN)]
SMALL.append("--config.eval.max_batches=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """A directory for the tokens, which the runs of this file share."""
  return tmp_path_factory.mktemp("cache")


@contextlib.contextmanager
def job(
  cache,
  workdir,
  processes: int,
  devices: int = 1,
  more: tuple[str, ...] = (),
  each=lambda process: (),
  program=lambda process: None,
  environment=lambda process: {},
):
  """Processes that run together, none of them left behind; `program` may replace `-m diffeq_nnx.main` in one."""
  arguments = [*SMALL, f"--config.data.cache_dir={cache}", f"--workdir={workdir}", *more]
  lines = local.commands(processes, local.free_port(), arguments)
  assert all(line[1:3] == ["-m", "diffeq_nnx.main"] for line in lines)
  running = [
    Process([*line[3:], *each(number)], {**local.environment(devices), **environment(number)}, program(number))
    for number, line in enumerate(lines)
  ]
  try:
    yield running
  finally:
    for process in running:
      process.send(signal.SIGKILL)
      process.end()


def losses(workdir) -> np.ndarray:
  """The training losses, by step."""
  return np.array([record["loss"] for record in records(workdir) if record["split"] == "train"])


def test_one_two_and_four_processes_train_alike_and_take_over_from_each_other(cache, tmp_path):
  """Within 2e-6 in float32. SIGTERM to one of two ends both in order; four go on, on another mesh; one evaluates."""
  with job(cache, tmp_path / "one", 1) as (alone,):
    assert alone.end() == 0, alone.lines[-20:]
  with job(cache, tmp_path / "many", 2, devices=2) as (first, second):
    first.wait_for("step 3/8")
    second.send(signal.SIGTERM)
    assert (first.end(), second.end()) == (0, 0)
    told = next(line for line in first.lines if line.startswith("SIGTERM: saved the checkpoint of step "))
    assert not any(line.startswith(("step", "error", "mesh")) for line in second.lines)  # process 0 speaks
  stopped = int(re.search(r"step (\d+);", told)[1])
  assert 3 <= stopped <= 8
  with job(cache, tmp_path / "many", 4, more=("--config.mesh.context=2",)) as running:  # halves of each sequence
    assert [process.end() for process in running] == [0] * 4, running[0].lines[-20:]
    assert any("context 2" in line for line in running[0].lines)
    assert f"continuing from the checkpoint of step {stopped}" in "\n".join(running[0].lines)
  one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
  assert len(one) == len(many) == 8 and one[-1] < one[0]
  np.testing.assert_allclose(many, one, rtol=2e-6)
  last = [
    [record for record in records(tmp_path / run) if record["split"] == "validation"][-1] for run in ("one", "many")
  ]
  assert last[1]["loss"] == pytest.approx(last[0]["loss"], rel=2e-6) and last[0]["tokens"] == last[1]["tokens"]
  evaluated = jobs.run("evaluate", Run.open(str(tmp_path / "many")).started, str(tmp_path / "many"))
  assert evaluated["loss"] == pytest.approx(last[1]["loss"], rel=2e-6)


def test_two_processes_have_the_masked_losses_of_one_beside_a_teacher(cache, tmp_path):
  """Within 2e-6 in float32, and as many tokens count; the teacher computes in bfloat16 and its tables are cast."""
  completions = [{"prompt": "ab " * (n % 11), "completion": "rivers " * (1 + n % 4 * (n % 3))} for n in range(80)]
  (tmp_path / "all.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in completions))
  keys = (f"data.source=jsonl:{tmp_path}/all.jsonl", "data.records=completion", "data.tokenizer=bytes")
  keys += ("data.attend_across_documents=False", "train.steps=2", "eval.every=2", "optimizer.name=adamw")
  more = tuple(f"--config.{key}" for key in keys)
  taught = (*more, f"--config.train.teacher={tmp_path}/teacher")
  for name, processes, settings in (
    ("teacher", 1, (*more, "--config.model.dtype=bfloat16", "--config.model.embed_dim=16")),
    ("one", 1, (*taught, "--config.train.device_batch_size=2")),
    ("two", 2, taught),
  ):
    with job(cache, tmp_path / name, processes, more=settings) as running:
      assert [process.end() for process in running] == [0] * processes, running[0].lines[-20:]
  one, two = ([record for record in records(tmp_path / run) if record["split"] != "time"] for run in ("one", "two"))
  assert len(one) == len(two) == 3 and len({record["counted_tokens"] for record in one[:-1]}) > 1
  for found, expected in zip(two, one):
    names = {"loss", "cross_entropy", "divergence", "counted_tokens", "gradient_norm", "tokens"} & expected.keys()
    assert len(names) >= 2
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, 2e-6, 1e-7)


FAILS_ALONE = """
from absl import app
from diffeq_nnx import main
from diffeq_nnx.parallel import distributed

def reached(self):
  if self._calls == 4:
    raise OSError(28, "No space left on device")
  return told(self)

told, distributed.Preemption.reached = distributed.Preemption.reached, reached
app.run(main.main, flags_parser=main.parse)
"""


@pytest.mark.parametrize("trouble", ["process 1 fails alone", "process 0 is killed"])
def test_when_one_goes_the_other_ends_with_one_line(trouble, cache, tmp_path):
  """With ours, or with that of JAX's service, which process 0 takes with it: whichever comes first."""
  program = lambda process: FAILS_ALONE if process and "fails" in trouble else None
  with job(cache, tmp_path / "run", 2, more=("--config.train.steps=100000",), program=program) as processes:
    processes[0].wait_for("step 3/")
    leaving, other = processes if "process 0" in trouble else processes[::-1]
    if "killed" in trouble:
      leaving.send(signal.SIGKILL)
    code, told = other.end(60), "\n".join(other.lines)
    if leaving is processes[0]:
      assert code != 0
      assert "another process of the job has died" in told or "service detected fatal errors" in told
    else:
      assert code == 1 and "process 0: another process of the job has died" in other.errors[-1]
      assert "run the same command" in other.errors[-1]
    if "fails" in trouble:
      assert leaving.end() == 1 and "error: process 1: workdir=" in leaving.errors[-1]


FAILS_TO_RESTORE = """
from absl import app
from diffeq_nnx import main
from diffeq_nnx.runs import checkpoint
from diffeq_nnx.parallel import distributed

def restore(self, *args, **kwargs):
  raise OSError("Stale file handle")

distributed.HEARTBEAT_SECONDS = 10
checkpoint.ocp.CheckpointManager.restore = restore
app.run(main.main, flags_parser=main.parse)
"""


@pytest.mark.slow(reason="processes that wait for a time-out")
def test_a_checkpoint_that_one_process_can_t_read_ends_all_and_stays(cache, tmp_path):
  with job(cache, tmp_path / "run", 1, more=("--config.train.steps=1",)) as (alone,):
    assert alone.end() == 0
  with job(cache, tmp_path / "run", 2, program=lambda process: FAILS_TO_RESTORE if process else None) as (
    first,
    second,
  ):
    assert second.end() == 1 and first.end() == 1
    assert "the checkpoint of step 1 can be read by some processes only (OSError: Stale" in second.errors[-1]
  assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


READS_ELSEWHERE = """
import os, sys
from absl import app
from diffeq_nnx import data, main

def load_there(*args, **kwargs):
  os.chdir(place)
  return load(*args, **kwargs)

place, load, data.load = sys.argv.pop(), data.load, load_there
app.run(main.main, flags_parser=main.parse)
"""


def test_hosts_with_different_text_are_told(cache, tmp_path):
  for name, count in (("here", 6), ("there", 9)):
    (tmp_path / name).mkdir()
    for number in range(count):
      (tmp_path / name / f"{number}.txt").write_text(f"Document {number} of rain. " * 300)
  more = ("--config.data.source=text:*.txt", "--config.data.tokenizer=bytes", "--config.data.cache_dir=cache")
  with job(
    cache,
    tmp_path / "run",
    2,
    more=more,
    program=lambda process: READS_ELSEWHERE,
    each=lambda process: (str(tmp_path / ("there" if process else "here")),),
  ) as (first, second):
    assert (first.end(), second.end()) == (2, 2)
    assert "gives process 1 other tokens than process 0" in first.errors[0] and second.errors == []


def test_too_few_processes_end_with_one_line(tmp_path):
  line = local.commands(2, local.free_port(), [*SMALL, f"--workdir={tmp_path}", "--join_seconds=4"])[1]
  process = Process(line[3:], local.environment(1))
  assert process.end() == 1
  assert process.errors == [process.lines[-1]] and "not all processes joined within 4 s" in process.lines[-1]


def test_processes_that_disagree_end_with_one_line(cache, tmp_path):
  different = ("--config.optimizer.peak_rate=0.5", "--workdir=elsewhere")
  with job(cache, tmp_path, 2, each=lambda process: different if process else ()) as (first, second):
    assert (first.end(), second.end()) == (2, 2) and second.errors == []
    for part in ("process 1 runs something else", "optimizer.peak_rate is 0.5 there", "--workdir is 'elsewhere' there"):
      assert part in first.errors[0]


def test_trouble_of_one_process_ends_all_with_its_line(cache, tmp_path):
  """Here process 1 can't write its tokens."""
  (tmp_path / "file").write_text("")
  homes = [tmp_path / "home", tmp_path / "file"]  # the cache directory itself must be the same in both
  with job("~/cache", tmp_path / "run", 2, environment=lambda process: {"HOME": str(homes[process])}) as running:
    assert [process.end() for process in running] == [2, 2]
    told = "\n".join(running[0].lines)
    assert "error: process 1: data.cache_dir=~/cache: can't be written" in told and running[1].errors == []


def test_code_that_differs_is_told(monkeypatch):
  """Two processes of which one has another version of the package."""

  def both(text):
    return [text, text.replace(distributed.hash_code(), "0123456789ab")]

  monkeypatch.setattr(distributed, "exchange", both)
  with pytest.raises(UserError) as told:
    distributed.agree(small_config(), "train", "runs", {})
  assert "process 1 runs something else: the code is '0123456789ab' there and" in str(told.value)


@pytest.mark.parametrize("problem,kind", [(OSError("no route to host"), RunError), (ValueError("no port"), UserError)])
def test_a_cluster_that_can_t_be_asked_is_one_line(problem, kind, monkeypatch):
  def fails(*args, **kwargs):
    raise problem

  monkeypatch.setattr(jax.distributed, "initialize", fails)
  with pytest.raises(kind, match=str(problem)):
    distributed.start(None, None, None, 5)
  distributed.start(None, 1, None, 5)  # nothing is asked


def test_local_prints_what_it_would_run(capsys):
  words = ["--processes=2", "--devices-per-process=4", "--dry-run", "--", "--config=a.py", "--workdir=a b"]
  assert local.main(words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 and all("device_count=4" in line and "'--workdir=a b'" in line for line in lines)
  assert lines[0].endswith("--num_processes=2 --process_id=0") and lines[1].endswith("--process_id=1")


def test_local_runs_its_processes_and_returns_the_first_failure():
  exits = lambda code: [sys.executable, "-c", f"import sys; sys.exit({code})"]
  assert local.run([exits(0), exits(0)], {}) == 0
  assert local.run([exits(0), exits(3)], {}) == 3
  assert local.run([[sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]], {}) == 137


def test_two_processes_answer_a_file_of_prompts_as_one_does_also_after_a_kill(finished, tmp_path):
  """Every prompt once, every bad line named; weights split over two processes of two devices each, with drafts.

  Without drafts they answer the tasks in tests/test_harness.py.
  """
  config, workdir = finished
  count = 60
  lines = [json.dumps({"prompt": "Document hills and rain. "[: 1 + n % 6] * (n % 2 + 1)}) for n in range(count)]
  bad = {3: "{", 20: '{"prompt": 5}', 41: '["a"]', 45: '{"prompt": ""}', 52: '{"prompt": "\\ud800"}'}
  bad[58] = json.dumps({"prompt": "rain " * 40})
  for n, line in bad.items():
    lines[n - 1] = line
  (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n\n")
  out = tmp_path / "out" / "two.jsonl"
  settings = {"max_tokens": 6, "seed": 3, "rows": 4, "draft_steps": 2, "draft_tokens": 2}
  one = {"prompts": str(tmp_path / "prompts.jsonl"), "out": str(tmp_path / "one.jsonl"), **settings}
  answers = jobs.run("generate", config, str(workdir), **one)
  assert [answer["line"] for answer in answers] == [*range(1, count + 1)]
  assert {answer["line"] for answer in answers if "error" in answer} == {*bad}
  words = ["--job=generate", f"--workdir={workdir}", f"--prompts={one['prompts']}", f"--out={out}"]
  words += ["--config.mesh.tensor=2", *(f"--{name}={value}" for name, value in settings.items())]

  def started():
    commands = local.commands(2, local.free_port(), words)
    return [Process(line[3:], local.environment(2)) for line in commands]

  running, unfinished = started(), pathlib.Path(f"{out}.unfinished")
  deadline = time.monotonic() + 300
  while not unfinished.exists() or len(unfinished.read_text().splitlines()) <= 10:
    assert time.monotonic() < deadline, running[0].lines[-20:]
    time.sleep(0.02)
  for process in running:
    process.send(signal.SIGKILL)
    process.end()
  before = unfinished.read_text()
  assert not out.exists() and 10 < len(before.splitlines()) < count
  unfinished.write_text(before + '{"line": 1')  # cut off
  running = started()
  assert [process.end() for process in running] == [0, 0], running[0].lines[-20:]
  assert out.read_text() == (tmp_path / "one.jsonl").read_text() and not unfinished.exists()
  unfinished.write_text('{"seed": 4}\n')
  out.unlink()
  with pytest.raises(UserError, match="begun with other settings"):
    jobs.run("generate", config, str(workdir), **{**one, "out": str(out)})
