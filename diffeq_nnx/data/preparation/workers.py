"""Runs tasks in several processes, with a progress bar."""

from collections.abc import Callable
from concurrent import futures
import contextlib
import multiprocessing
from multiprocessing.connection import Connection
import os
import signal
import sys
import threading
import time
from typing import Any

import tqdm

from diffeq_nnx.errors import RunError
from diffeq_nnx.files import read_json, write_json

PATIENCE = 3.0  # seconds of work that are not worth starting processes for
_LINE_SECONDS = 60

Task = Callable[[], Any]  # can be pickled; returns JSON


def run(what: str, tasks: dict[str, Task], num_processes: int) -> list[Any]:
  """Runs the tasks that have no result yet and returns all results. A task is named by the file for its result.

  This process works alone for the first `PATIENCE` seconds, and throughout if `num_processes` is 1. After that worker
  processes work, which end with this call, whatever they are doing, and with this process, even if it is killed.
  Raises RunError if a worker process dies, and what a task raises.
  """
  todo = {path: task for path, task in tasks.items() if not os.path.exists(path)}
  program = getattr(sys.modules["__main__"], "__file__", None)
  # of a program from standard input, which worker processes can't import, and in a process that may have none
  if program and not os.path.exists(program) or multiprocessing.current_process().daemon:
    num_processes = 1
  with make_bar(what, len(tasks), len(tasks) - len(todo)) as bar:
    start = time.monotonic()
    while todo and (num_processes == 1 or time.monotonic() - start < PATIENCE):
      path = next(iter(todo))
      _run(path, todo.pop(path))
      bar.update()
    if todo:
      _run_in_workers(todo, num_processes, bar)
  return [read_json(path) for path in tasks]


def _run(path: str, task: Task) -> None:
  write_json(path, task())


def _run_in_workers(tasks: dict[str, Task], num_processes: int, bar: tqdm.tqdm) -> None:
  context = multiprocessing.get_context("spawn")  # forking a process that has threads can hang
  receiver, alive = context.Pipe(duplex=False)
  pool = futures.ProcessPoolExecutor(num_processes, context, _start_worker, (receiver,))
  try:
    with pool, alive:  # whose closing ends the workers
      for future in futures.as_completed([pool.submit(_run, path, task) for path, task in tasks.items()]):
        future.result()
        bar.update()
  except futures.process.BrokenProcessPool as error:
    raise RunError(
      "a worker process ended; if no line above says why, memory ran out: give data.num_processes a smaller number"
    ) from error


def _start_worker(receiver: Connection) -> None:
  """Initializes a worker process, which ends when the other end of `receiver` is closed."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
  os.environ["TOKENIZERS_PARALLELISM"] = "false"

  def watch() -> None:
    with contextlib.suppress(EOFError, OSError):
      receiver.recv()
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def make_bar(what: str, total: int, done: int) -> tqdm.tqdm:
  """Makes a display of how many tasks are done: a bar on a terminal, otherwise a line each minute."""
  options: dict[str, Any] = {"delay": 2, "leave": False}
  if not sys.stderr.isatty():
    line = "{desc}: {n_fmt} of {total_fmt} parts after {elapsed}\n"
    options = {"delay": _LINE_SECONDS, "mininterval": _LINE_SECONDS, "miniters": 1, "bar_format": line}
  return tqdm.tqdm(desc=what, total=total, initial=done, **options)


def num_cores() -> int:
  """Returns the number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
