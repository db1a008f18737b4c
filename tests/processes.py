"""Real processes of the main program, forked from one that has imported JAX and the rest, which takes seconds."""

import atexit
import functools
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import time

from absl import app

from diffeq_nnx import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.processes", "diffeq_nnx.training.loop", "diffeq_nnx.jobs.evaluate"])


@functools.cache
def _output_folder() -> str:
  """Where the processes' output goes; removed at the end."""
  folder = tempfile.mkdtemp(prefix="output-of-tests-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return folder


def _run(words: list[str], first: str, environment: dict[str, str], out: str, err: str) -> None:
  """In the new process: the code `first`, then `python -m diffeq_nnx.main WORDS`."""
  os.environ.update(environment)
  for path, number in ((out, 1), (err, 2)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
  sys.argv = ["diffeq_nnx.main", *words]
  exec(compile(first, "first", "exec"), {"__name__": "__main__"})
  app.run(main.main, flags_parser=main.parse)


class Process:
  """One process, which runs from the start.

  Args:
    words: the arguments.
    environment: changes to the environment.
    first: Python code to run before the main program.
  """

  def __init__(self, words: list[str], environment: dict[str, str] | None = None, first: str = ""):
    folder = pathlib.Path(tempfile.mkdtemp(dir=_output_folder()))
    self._out, self._err = folder / "out", folder / "err"
    for path in (self._out, self._err):
      path.touch()
    self._process = CONTEXT.Process(target=_run, args=(words, first, environment or {}, str(self._out), str(self._err)))
    self._process.start()

  @property
  def lines(self) -> list[str]:
    """What it has written on stderr so far."""
    return self._err.read_text(errors="replace").splitlines()

  @property
  def out(self) -> str:
    """What it has written on stdout so far."""
    return self._out.read_text(errors="replace")

  @property
  def errors(self) -> list[str]:
    """Its error lines."""
    return [line for line in self.lines if line.startswith("error: ")]

  def wait_for(self, text: str) -> None:
    """Until a line on stderr holds the text; fails where the process ends before."""
    deadline = time.monotonic() + 300
    while not any(text in line for line in self.lines):
      assert self._process.is_alive() and time.monotonic() < deadline, "\n".join(self.lines[-20:])
      time.sleep(0.02)

  def send(self, number: int) -> None:
    """Sends a signal, if the process still runs."""
    if self._process.is_alive():
      os.kill(self._process.pid, number)

  def end(self, seconds: float = 300) -> int:
    """Waits for its end, and returns its exit code."""
    self._process.join(seconds)
    assert self._process.exitcode is not None, "\n".join(["still running:", *self.lines[-20:]])
    return self._process.exitcode
