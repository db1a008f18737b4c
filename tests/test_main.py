"""The command line: every mistake is one line and exit code 2; evaluate prints one JSON line."""

import re
import subprocess
import sys

from absl.testing import flagsaver
import pytest

import diffeq_nnx
from diffeq_nnx import config, main
from diffeq_nnx.jobs import JOBS
from tests.conftest import change, mistake, run_command, run_config, write_documents, write_run
from tests.processes import Process

TINY = "--config=configs/tiny.py"
DISCRETIZE = ["--workdir=x", "--job=discretize"]
JOINING = [TINY, "--workdir=x", "--num_processes=2"]


@pytest.mark.parametrize(
  "arguments,parts",
  [
    ([TINY, "--config.trian.steps=1"], ["trian.steps: unknown key", "did you mean 'train.steps'?"]),
    ([TINY, "--config.train.steps=abc"], ["train.steps='abc'", "must be of type int"]),
    (["--config=configs/nope.py"], ["--config=configs/nope.py", "no file"]),
    (["--config=configs/tiny.py:gtp"], ["'gtp'", "did you mean 'gpt'?"]),
    (["--config=configs/tiny.py:gpt,elastic"], ["names a second preset, elastic"]),
    ([TINY, "--confg=configs/tiny.py"], ["confg", "config"]),
    (JOINING, ["give all three"]),
    ([*JOINING, "--coordinator=a", "--process_id=0"], ["must be HOST:PORT"]),
    ([*JOINING, "--coordinator=a:80", "--process_id=2"], ["between 0 and --num_processes=2"]),
    ([], ["--workdir: missing"]),
    (["--workdir=x", "--job=evaluate", "--tolerance=1"], ["--tolerance=1.0: is for --job=discretize"]),
    (["--workdir=x"], ["--config: missing"]),
    (["--workdir=a[1]", TINY], ["workdir=a[1]: orbax keeps no checkpoints where a path has '['"]),
    (["--workdir=gs://a//b", TINY], ["workdir=gs://a//b: libraries read #, //, /./ and /../ in a URL in different"]),
    (["--workdir=gs://a/b#1", TINY], ["name a path without them"]),
    (["--workdir=a\\b", TINY], ["orbax keeps no checkpoints where a path has '\\\\'"]),
    (["--workdir=/none", "--job=evaluate"], ["--workdir=/none: holds no run; name the directory of one"]),
    ([*DISCRETIZE, "--from_workdir=/none"], ["--from_workdir=/none: holds no run"]),
    ([*DISCRETIZE, "--from_workdir=/none", "--step_sizes=1,b"], ["--step_sizes=1,b: must be numbers"]),
    ([*DISCRETIZE, "--from_workdir=y", TINY], ["--config: --job=discretize takes"]),
    ([TINY, "--workdir=x", "--num_steps=3"], ["--num_steps=3: is for --job=evaluate or discretize"]),
    (["--workdir=x", "--job=evaluate", "--num_steps=3,b"], ["--num_steps=3,b: must be a whole number"]),
    (["--workdir=x", "--job=analyze", "--num_steps=3,4"], ["--num_steps=3,4: several are for --job=evaluate"]),
    (["--workdir=x", "--job=generate"], ["--prompt: missing"]),
    (["--workdir=x", "more"], ["more: not a flag"]),
  ],
)
def test_a_mistake_in_the_flags_is_one_line(arguments, parts, capsys):
  code, line = mistake(arguments, capsys)
  assert code == 2 and line.startswith("error: ")
  for part in parts:
    assert part in line


def test_a_config_file_that_fails_is_one_line(tmp_path, capsys):
  for content, part in (("def get_config(argument):\n  return {}[argument]", "KeyError"), ("a", "NameError")):
    (tmp_path / "config.py").write_text(content)
    code, line = mistake([f"--config={tmp_path}/config.py"], capsys)
    assert code == 2 and f"--config={tmp_path}/config.py: can't be used ({part}" in line


def test_a_real_process_prints_the_line_and_ends_with_the_code():
  arguments = ["--config=configs/tiny.py", "--config.train.step=1"]
  done = subprocess.run([sys.executable, "-m", "diffeq_nnx.main", *arguments], capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: train.step: unknown key")


def test_no_thread_prints_after_the_line_of_a_failure():
  program = """
import sys, threading, time
import diffeq_nnx
from diffeq_nnx import config, main

def fails(argv):
  threading.Thread(target=lambda: (time.sleep(0.3), 1 / 0)).start()
  return main.fail(OSError("the disk is full"), 1)

main.main = fails
sys.exit(main._program([]))
"""
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert done.returncode == 1 and done.stderr == "error: the disk is full\n"


def test_the_package_imports_no_jax_and_training_nothing_that_draws():
  program = "import sys, diffeq_nnx; assert not {'jax', 'flax', 'ml_collections'} & {*sys.modules}"
  subprocess.run([sys.executable, "-c", program], check=True)
  program = """
import pkgutil, sys
from diffeq_nnx.jobs import JOBS
pkgutil.resolve_name("diffeq_nnx." + JOBS["train"].home)
sys.exit(str({"jinja2", "lm_eval", "matplotlib", "plotly", "transformers"} & {*sys.modules}))
"""
  process = Process([], first=program)
  process.end()
  assert process.lines == ["set()"]


def test_public_names_are_at_the_top_level():
  assert diffeq_nnx.Config is config.Config
  assert isinstance(diffeq_nnx.load_config("configs/tiny.py", ["train.steps=3"]), config.Config)
  for name in diffeq_nnx._HOMES:
    assert name in dir(diffeq_nnx) and callable(getattr(diffeq_nnx, name)), name


@pytest.mark.parametrize(
  "error,line",
  [
    (AssertionError(), "JAX_PLATFORMS=cuda: JAX finds no such devices"),
    (BrokenPipeError(32, "Broken pipe"), "the reader of the output, or a server, closed the connection"),
  ],
)
def test_what_is_none_of_our_errors_is_told_in_one_line(monkeypatch, capsys, error, line):
  def backends():  # as in jax._src.xla_bridge
    raise error

  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  monkeypatch.setattr(main, "run", lambda argv: backends())
  assert main.main([]) == 1
  told = capsys.readouterr().err
  assert told.startswith(f"error: {line}") and told.count("\n") == 1


def test_a_file_of_flags_may_set_keys(tmp_path):
  path = tmp_path / "flags"
  path.write_text("# of a sweep\n--config.train.steps=3\n--workdir=runs/x\n")
  with flagsaver.flagsaver():
    main.parse(["diffeq_nnx.main", f"--flagfile={path}", "--config.seed=2"])
    assert (main.SETTINGS.value, main.WORKDIR.value) == (["train.steps=3", "seed=2"], "runs/x")


def test_a_config_file_only_registers_parts_for_a_run_that_was_made_from_another(tmp_path, monkeypatch, capsys):
  """Its other keys need not fit that run: its depths can't be those of 4 stored layers."""
  made = change(run_config(tmp_path), model=dict(num_steps=4, weights="stored"), optimizer=dict(name="lion"))
  write_documents(tmp_path)
  write_run(made, tmp_path / "made", source="0" * 64)
  asked = []
  monkeypatch.setattr("diffeq_nnx.jobs.run", lambda name, config, workdir: asked.append(config))
  words = ["--config=configs/tiny.py:elastic", f"--workdir={tmp_path / 'made'}", "--job=evaluate", "--num_processes=1"]
  with flagsaver.flagsaver():
    run_command(*words, "--config.eval.batch_size=3")
  assert asked == [change(made, eval=dict(batch_size=3))] and "only registers its parts" in capsys.readouterr().err


def test_help_says_what_each_job_does_and_a_jobs_help_lists_its_flags_alone(capsys):
  def ask(*arguments):
    with pytest.raises(SystemExit) as end:
      main.parse(["diffeq_nnx.main", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out

  every = ask("--help")
  flags = {flag for job in JOBS.values() for flag in job.flags}
  for name, job in JOBS.items():
    assert re.search(rf"^  {name} +{re.escape(job.summary[:40])}", every, re.MULTILINE)
    listed = re.findall(r"^  --(\w+)", ask(f"--job={name}", "--help"), re.MULTILINE)
    assert listed == [*job.flags]
  assert not flags & {*re.findall(r"^  --(\w+)", every, re.MULTILINE)}
