"""Real processes: signals at random moments and in each phase of a run; one of several that is lost; odd configs."""

from collections.abc import Iterator
import contextlib
import os
import signal
import subprocess
import sys
import time

from launch import local
from launch.breaking.table import SETTINGS, STEPS, Row, Suite, losses

# Sends itself a signal after a delay from the first call of a function; then as `python -m diffeq_nnx.main`.
SIGNALED = """
import os, pkgutil, sys, threading
from absl import app
from diffeq_nnx import main
name, number, delay = sys.argv[1:4]
del sys.argv[1:4]
place, _, last = name.rpartition(".")
owner = pkgutil.resolve_name(place)
original = getattr(owner, last)
def called(*args, **kwargs):
  setattr(owner, last, original)
  timer = threading.Timer(float(delay), os.kill, (os.getpid(), int(number)))
  timer.daemon = True
  timer.start()
  return original(*args, **kwargs)
setattr(owner, last, called)
app.run(main.main, flags_parser=main.parse)
"""
PHASES = {  # where each begins, and the longest delay in seconds
  "tokenizing": ("diffeq_nnx.training.loop.load_corpus", 1.0),
  "restoring": ("diffeq_nnx.runs.checkpoint.Checkpoints.restore", 0.2),
  "compiling": ("diffeq_nnx.training.loop.make_train_step", 2.0),
  "validating": ("diffeq_nnx.training.evaluate.Evaluator.__call__", 0.5),
  "saving": ("diffeq_nnx.runs.checkpoint.Checkpoints.save", 0.3),
}
LOST_SECONDS = 120  # for the others to end


def command(suite: Suite, place: str, cache: str | None = None) -> list[str]:
  """The command line that trains the run in a place."""
  settings = [*SETTINGS, f"data.cache_dir={cache or suite.cache}"]
  words = [f"--config.{setting}" for setting in settings]
  return [sys.executable, "-m", "diffeq_nnx.main", "--config=configs/tiny.py", *words, f"--workdir={place}"]


def send_signals(suite: Suite, number: signal.Signals) -> Iterator[Row]:
  """A signal at random moments of a process, and in each phase."""
  yield _at_random(suite, number, suite.tries if number == signal.SIGKILL else suite.tries // 2)
  yield _in_phases(suite, number)


def _run_with_errors(words: list[str]) -> subprocess.Popen[bytes]:
  """Starts a process of which only stderr is kept."""
  return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _at_random(suite: Suite, number: signal.Signals, tries: int) -> Row:
  row = Row(f"{number.name} at a random moment")
  start = time.monotonic()
  subprocess.run(command(suite, suite.place("timed")), capture_output=True, check=True)
  whole = time.monotonic() - start
  for _ in range(tries):
    place, after = suite.place("signaled"), suite.random.uniform(0, whole)
    process = _run_with_errors(command(suite, place))
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(after)
    process.send_signal(number)
    _finish(suite, row, process, place, f"after {after:.2f} s")
  return row


def _in_phases(suite: Suite, number: signal.Signals) -> Row:
  row = Row(f"{number.name} while {', '.join(PHASES)}")
  for phase, (where, longest) in PHASES.items():
    for _ in range(max(1, suite.tries // 5)):
      place = suite.copy_unfinished("signaled") if phase == "restoring" else suite.place("signaled")
      cache = suite.place("cache_of_signaled") if phase == "tokenizing" else None
      delay = suite.random.uniform(0, longest)
      words = [where, str(int(number)), str(delay), *command(suite, place, cache)[3:]]
      process = _run_with_errors([sys.executable, "-c", SIGNALED, *words])
      _finish(suite, row, process, place, f"{phase}, {delay:.2f} s", cache)
  return row


def _finish(
  suite: Suite, row: Row, process: subprocess.Popen[bytes], place: str, detail: str, cache: str | None = None
) -> None:
  """Waits for a process that got a signal, runs the same command again, and counts the try."""
  start, hangs = time.monotonic(), False
  try:
    _, told = process.communicate(timeout=LOST_SECONDS)
  except subprocess.TimeoutExpired:
    hangs = True
    process.kill()
    _, told = process.communicate()
  reached = len(losses(place))
  done = subprocess.run(command(suite, place, cache), capture_output=True, text=True)
  good = not hangs and done.returncode == 0 and losses(place) == suite.losses and b"Traceback" not in told
  detail = f"{detail}: hangs {hangs}, {_last(done.stderr)}"
  row.add(good, time.monotonic() - start, _lost(reached, done.stderr), detail)


def _lost(reached: int, told: str) -> int:
  """Train steps that were repeated, of so many: what a resumed run tells of its start."""
  restored = [line for line in told.splitlines() if "from the checkpoint of step" in line]
  return reached - (int(restored[0].split("step ")[1]) if restored else 0) if reached < STEPS else 0


def several(suite: Suite) -> Iterator[Row]:
  """Each of 2 and of 4 processes is killed, stopped, or cut off from the others; the same command then goes on."""
  for count in (2, 4):
    whole = suite.place(f"whole{count}")
    if any(process.wait() for process in _start(suite, whole, count)):
      raise RuntimeError(f"{count} processes don't train")
    for how in ("killed", "stopped", "cut off"):
      row = Row(f"each of {count} processes is {how}")
      for victim in range(count):
        _lose_one(suite, row, count, victim, how, losses(whole))
      yield row


def _start(suite: Suite, place: str, count: int, group: int | None = None, victim: int = 0) -> list[subprocess.Popen]:
  """The processes of a job; the user group of one of them may be set."""
  lines = local.commands(count, local.free_port(), command(suite, place)[3:])
  variables = {**os.environ, **local.environment(1)}
  folder = suite.place("output")
  os.makedirs(folder)
  processes = []
  for number, line in enumerate(lines):
    output, own_group = open(os.path.join(folder, str(number)), "wb"), group if number == victim else None
    processes.append(subprocess.Popen(line, env=variables, stdout=subprocess.DEVNULL, stderr=output, group=own_group))
  return processes


def _lose_one(suite: Suite, row: Row, count: int, victim: int, how: str, expected: list[float]) -> None:
  place, group, after = suite.place("several"), os.getpid() % 10_000 + 20_000, suite.random.randrange(1, STEPS - 5)
  rule = ["OUTPUT", "-m", "owner", "--gid-owner", str(group), "-j", "DROP"]  # everything that the process sends
  running = _start(suite, place, count, group if how == "cut off" else None, victim)
  while len(losses(place)) < after and all(process.poll() is None for process in running):
    time.sleep(0.05)
  start = time.monotonic()
  try:
    if how == "cut off":
      subprocess.run(["iptables", "-A", *rule], check=True)
    else:
      running[victim].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    waited = [process for number, process in enumerate(running) if number != victim or how == "cut off"]
    while (hangs := any(process.poll() is None for process in waited)) and time.monotonic() < start + LOST_SECONDS:
      time.sleep(0.1)
  finally:
    seconds = time.monotonic() - start
    for process in running:
      process.kill()
      process.wait()
    if how == "cut off":
      subprocess.run(["iptables", "-D", *rule])
  time.sleep(0.5)  # for the last lines
  lines = [_last(open(os.path.join(suite.folder, "output", str(number))).read()) for number in range(count)]
  told = all(line.startswith("error: ") for line in lines)
  reached = len(losses(place))
  codes = [process.wait() for process in _start(suite, place, count)]
  text = open(os.path.join(suite.folder, "output", "0")).read()
  good = not hangs and told and codes == [0] * count and losses(place) == expected
  detail = f"process {victim} after step {after}: hangs {hangs}, last lines {lines}, then {codes}, {_last(text)}"
  row.add(good, seconds, _lost(reached, text), detail)


def try_config(suite: Suite, row: Row, setting: str) -> None:
  """Trains one step with a setting, within 12 GB and a minute; a longer run must end in order when asked."""
  words = [*command(suite, suite.place("odd")), "--config.train.steps=1", f"--config.{setting}"]
  start = time.monotonic()
  process = _run_with_errors(["sh", "-c", 'ulimit -v 12000000; exec "$@"', "sh", *words])
  try:
    _, told = process.communicate(timeout=60)
    good = process.returncode == 0 or process.returncode in (1, 2) and _last(told.decode()).startswith("error:")
  except subprocess.TimeoutExpired:
    process.terminate()
    _, told = process.communicate(timeout=LOST_SECONDS)
    good = process.returncode in (0, -signal.SIGTERM)
  good = good and b"Traceback" not in told
  row.add(good, time.monotonic() - start, 0, f"{setting}: {process.returncode}: {told.decode()[-500:]}")


def _last(text: str) -> str:
  return text.strip().splitlines()[-1] if text.strip() else ""
