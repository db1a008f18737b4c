"""Jobs of several real processes on this machine: the same figures, and how they meet trouble."""

import contextlib
import json
import pathlib
import re
import shutil
import signal
import socket
import sys

import jax
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.data import load_tokenizer
from diffeq_nnx.data.preparation.directory import lock
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.jobs import prompt_files
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs.run import Run
from launch import local
from tests.conftest import mistake, run_command, told, write_run
from tests.processes import Process
from tests.test_data import write_jsonl
from tests.test_resume import records

MODEL = ("num_steps=2", "embed_dim=16", "num_heads=2", "vocab_size=300", "seq_len=32", "dropout=0.0")
MODEL += ("weights=stored",)  # which each process compiles faster; generated ones: test_sharding.py
RUN = ("train.batch_size=8", "train.log_every=1", "train.steps=8", "checkpoint.every=8", "eval.every=8")
RUN += ("train.peak_tflops=0.1",)  # else it is measured
RUN += ("data.tokenizer=bytes", "eval.max_batches=2", "optimizer.name=adamw")
SMALL = ["--config=configs/tiny.py", *(f"--config.model.{one}" for one in MODEL), *(f"--config.{one}" for one in RUN)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """A directory for the tokens, which the runs of this file share."""
  return tmp_path_factory.mktemp("cache")


@contextlib.contextmanager
def job(cache, workdir, processes, devices=1, more=(), first=lambda process: "", environment=lambda process: {}):
  """Processes that run together, none of them left behind; `first` is code that one runs before the main program."""
  arguments = [*SMALL, f"--config.data.cache_dir={cache}", f"--workdir={workdir}", *more]
  lines = local.commands(processes, local.free_port(), arguments)
  assert all(line[1:3] == ["-m", "diffeq_nnx.main"] for line in lines)
  running = [
    Process(line[3:], {**local.environment(devices), **environment(number)}, first(number))
    for number, line in enumerate(lines)
  ]
  try:
    yield running
  finally:
    for process in running:
      process.send(signal.SIGKILL)
      process.end()


@pytest.mark.slow(reason="trains with one, two and four processes, one set after another")
def test_one_two_and_four_processes_train_alike_and_take_over_from_each_other(cache, tmp_path):
  """Within 2e-6 in float32, and as many tokens count, beside a teacher that computes in bfloat16.

  SIGTERM to one of two ends both in order; four go on, on another mesh; one evaluates.
  """
  completions = [{"prompt": "ab " * (n % 11), "completion": "rivers " * (1 + n % 4 * (n % 3))} for n in range(80)]
  source = write_jsonl(tmp_path / "all.jsonl", completions)
  keys = (f"data.source={source}", "data.records=completion", "data.attend_across_documents=False")
  more = tuple(f"--config.{key}" for key in keys)
  settings = [word.removeprefix("--config.") for word in SMALL[1:]]
  teacher = config_lib.load("configs/tiny.py", [*settings, "model.dtype=bfloat16", "model.num_steps=1"])
  write_run(teacher, tmp_path / "teacher", load_tokenizer("bytes"))
  more = (*more, f"--config.train.teacher={tmp_path}/teacher")
  words = [*SMALL, f"--config.data.cache_dir={cache}", f"--workdir={tmp_path}/one", *more]
  assert run_command("--num_processes=1", *words, "--config.train.device_batch_size=2") == 0
  with job(cache, tmp_path / "many", 2, devices=2, more=more) as (first, second):
    first.wait_for("step 3/8")
    second.send(signal.SIGTERM)
    assert (first.end(), second.end()) == (0, 0)
    told = next(line for line in first.lines if line.startswith("SIGTERM: saved the checkpoint of step "))
    assert not any(line.startswith(("step", "error", "mesh")) for line in second.lines)  # process 0 speaks
  stopped = int(re.search(r"step (\d+);", told)[1])
  assert 3 <= stopped <= 8
  with job(cache, tmp_path / "many", 4, more=(*more, "--config.mesh.context=2")) as running:  # halves of each sequence
    assert [process.end() for process in running] == [0] * 4, running[0].lines[-20:]
    assert any("context 2" in line for line in running[0].lines)
    assert f"continuing from the checkpoint of step {stopped}" in "\n".join(running[0].lines)
  one, many = records(tmp_path / "one"), records(tmp_path / "many")
  assert len(one) == len(many) == 9 and one[7]["loss"] < one[0]["loss"]  # 8 of training, the last of validation
  assert len({record["counted_tokens"] for record in one[:-1]}) > 1
  for found, expected in zip(many, one):
    names = {"loss", "cross_entropy", "counted_tokens", "gradient_norm", "tokens"} & expected.keys()
    names |= {"divergence"} if expected["step"] <= 2 else set()  # later it is as small as its rounding
    assert len(names) >= 2
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, 2e-6, 1e-7)
  evaluated = jobs.run("evaluate", Run.open(str(tmp_path / "many")).started, str(tmp_path / "many"))
  assert evaluated["loss"] == pytest.approx(one[-1]["loss"], rel=2e-6)


FAILS_ALONE = """
from diffeq_nnx.parallel import distributed

def reached(self):
  if self._calls == 4:
    raise OSError(28, "No space left on device")
  return told(self)

told, distributed.Preemption.reached = distributed.Preemption.reached, reached
distributed.ALIKE_SECONDS = 1
"""


@pytest.mark.parametrize("trouble", ["process 1 fails alone", "process 0 is killed"])
def test_when_one_goes_the_other_ends_with_one_line(trouble, cache, tmp_path):
  """With ours, or with that of JAX's service, which process 0 takes with it: whichever comes first."""
  more = ("--config.train.steps=100000",)
  first = lambda process: FAILS_ALONE if process and "fails" in trouble else ""
  with job(cache, tmp_path / "run", 2, more=more, first=first) as processes:
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
      assert leaving.end() == 1 and "error: process 1: workdir=" in leaving.errors[-1]


FAILS_TO_RESTORE = """
from diffeq_nnx.runs import checkpoint
from diffeq_nnx.parallel import distributed

def restore(self, *args, **kwargs):
  raise OSError("Stale file handle")

distributed.HEARTBEAT_SECONDS = 10
checkpoint.ocp.CheckpointManager.restore = restore
"""


@pytest.mark.slow(reason="processes that wait for a time-out")
def test_a_checkpoint_that_one_process_can_t_read_ends_all_and_stays(cache, tmp_path):
  with job(cache, tmp_path / "run", 1, more=("--config.train.steps=1",)) as (alone,):
    assert alone.end() == 0
  with job(cache, tmp_path / "run", 2, first=lambda process: FAILS_TO_RESTORE if process else "") as (one, other):
    assert other.end() == 1 and one.end() == 1
    assert "the checkpoint of step 1 can be read by some processes only (OSError: Stale" in other.errors[-1]
  assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(
  "home,part",
  [
    pytest.param("other", "data.source=text:~/*.txt: gives process 1 other tokens than process 0", id="other text"),
    pytest.param("full", "process 1: data.cache_dir=~/cache: can't be written", id="process 1 can't write its tokens"),
  ],
)
def test_trouble_of_one_process_ends_all_with_its_line(home, part, tmp_path):
  for name, count in (("one", 6), ("other", 9), ("full", 6)):
    (tmp_path / name).mkdir()
    for number in range(count):
      (tmp_path / name / f"{number}.txt").write_text(f"Document {number} of rain. " * 300)
  (tmp_path / "full" / "cache").write_text("")
  homes, more = [tmp_path / "one", tmp_path / home], ("--config.data.source=text:~/*.txt",)
  environment = lambda process: {"HOME": str(homes[process])}
  with job("~/cache", tmp_path / "run", 2, more=more, environment=environment) as (first, second):
    assert (first.end(), second.end()) == (2, 2)
    assert part in first.errors[0] and second.errors == []


def test_too_few_processes_end_with_one_line(tmp_path):
  line = local.commands(2, local.free_port(), [*SMALL, f"--workdir={tmp_path}", "--join_seconds=1"])[1]
  process = Process(line[3:], local.environment(1))
  assert process.end() == 1
  assert process.errors == [process.lines[-1]] and "not all processes joined within 1 s" in process.lines[-1]


def test_a_port_that_another_job_uses_is_told_and_a_directory_where_one_trains_before_joining(tmp_path, capsys):
  with socket.socket() as other:
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as JAX's service does
    other.bind(("", 0))
    other.listen()
    place = f"127.0.0.1:{other.getsockname()[1]}"
    assert f"--coordinator={place}: another program uses port" in told(
      lambda: distributed.start(place, 2, 0, 5), RunError
    )
  words = [*SMALL, f"--workdir={tmp_path}", "--num_processes=2", "--process_id=1", "--coordinator=127.0.0.1:9"]
  with lock(str(tmp_path), "workdir"):
    code, line = mistake(words, capsys)
  assert code == 1 and "another process trains there; wait for it, or stop it" in line


def test_processes_that_run_something_else_are_told(monkeypatch, capsys):
  different = {"optimizer.peak_rate": 0.5, "--workdir": "elsewhere", "the code": "0123456789ab"}
  monkeypatch.setattr(distributed, "exchange", lambda facts: [facts, facts | different])
  code, line = mistake([*SMALL, "--workdir=here", "--num_processes=1"], capsys)
  assert code == 2 and line.startswith("error: process 1 runs something else: ")
  for key, value in different.items():
    assert f"{key} is {value!r} there and " in line, key


@pytest.mark.parametrize("problem,kind", [(OSError("no route to host"), RunError), (ValueError("no port"), UserError)])
def test_a_cluster_that_can_t_be_asked_is_one_line(problem, kind, monkeypatch):
  def fails(*args, **kwargs):
    raise problem

  monkeypatch.setattr(jax.distributed, "initialize", fails)
  with pytest.raises(kind, match=str(problem)):
    distributed.start(None, None, None, 5)
  distributed.start(None, 1, None, 5)  # nothing is asked


def test_local_prints_what_it_would_run_and_returns_the_first_failure(capsys):
  words = ["--processes=2", "--devices-per-process=4", "--dry-run", "--", "--config=a.py", "--workdir=a b"]
  assert local.main(words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 and all("device_count=4" in line and "'--workdir=a b'" in line for line in lines)
  assert lines[0].endswith("--num_processes=2 --process_id=0") and lines[1].endswith("--process_id=1")
  program = lambda text: [sys.executable, "-c", f"import os, sys; {text}"]
  assert local.run([program(""), program("sys.exit(3)")], {}) == 3
  assert local.run([program("os.kill(os.getpid(), 9)")], {}) == 137


@pytest.mark.slow(reason="answers the prompts once in one process and twice in two")
def test_two_processes_answer_a_file_of_prompts_as_one_does_also_after_a_kill(finished, tmp_path, monkeypatch):
  """Every prompt once, every bad line named; weights split over two processes of two devices each, with drafts.

  Without drafts they answer the tasks in tests/test_harness.py.
  """
  config, workdir = finished
  count = 16
  lines = [json.dumps({"prompt": "Document hills and rain. "[: 1 + n % 4]}) for n in range(count)]
  bad = {2: "{", 4: '{"prompt": 5}', 9: '["a"]', 10: '{"prompt": ""}', 13: '{"prompt": "\\ud800"}'}
  bad[15] = json.dumps({"prompt": "rain " * 40})
  for n, line in bad.items():
    lines[n - 1] = line
  (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n\n")
  out = tmp_path / "out" / "two.jsonl"
  unfinished = pathlib.Path(f"{out}.unfinished")
  settings = {"max_tokens": 6, "seed": 3, "rows": 4, "draft_steps": 2, "draft_tokens": 2}
  one = {"prompts": str(tmp_path / "prompts.jsonl"), "out": str(tmp_path / "one.jsonl"), **settings}
  answers = jobs.run("generate", config, str(workdir), **one)
  assert [answer["line"] for answer in answers] == [*range(1, count + 1)]
  assert {answer["line"] for answer in answers if "error" in answer} == {*bad}
  two, add, before = {**one, "out": str(out)}, prompt_files.Answers.add, []

  def killed(self, line, answer):
    if len(self._answers) == 6:
      before.append(unfinished.read_text())  # all that a kill leaves
      self._file.close()
      raise KeyboardInterrupt
    add(self, line, answer)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(prompt_files.Answers, "add", killed)
    jobs.run("generate", config, str(workdir), **two)
  assert not out.exists() and len(before[0].splitlines()) == 7
  unfinished.write_text(before[0] + '{"line": 1')  # cut off
  # the default of a setting, when it is given, is no other setting
  words = ["--job=generate", f"--workdir={workdir}", *(f"--{k}={v}" for k, v in {**two, "temperature": 1.0}.items())]
  commands = local.commands(2, local.free_port(), [*words, "--config.mesh.tensor=2"])
  running = [Process(line[3:], local.environment(2)) for line in commands]
  assert [process.end() for process in running] == [0, 0], running[0].lines[-20:]
  assert out.read_text() == (tmp_path / "one.jsonl").read_text() and not unfinished.exists()
  out.unlink()
  other = shutil.copytree(workdir, tmp_path / "other")
  record = json.loads((other / "run.json").read_text())
  (other / "run.json").write_text(json.dumps({**record, "hash": "of another run"}))
  for content, place in (('{"seed": 4}\n', workdir), (before[0], other)):
    unfinished.write_text(content)
    assert "begun with other settings" in told(lambda: jobs.run("generate", config, str(place), **two))
