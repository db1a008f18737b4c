"""Runs tasks in several processes, with a progress bar."""

from collections.abc import Callable, Mapping
from concurrent import futures
import contextlib
import multiprocessing
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

Progress = Callable[[int], None]  # takes the bytes of text processed since its last call
Task = Callable[[Progress], Any]  # can be pickled; returns JSON


def run(what: str, tasks: Mapping[str, Task], num_processes: int, total: int = 0) -> list[Any]:
  """Runs the tasks that have no result yet and returns all results.

  This process works alone for the first `PATIENCE` seconds, and throughout if `num_processes` is 1; after that worker
  processes do. They end with this call, whatever they are doing, and with this process, even if it is killed.

  `tasks` are named by the files for their results; `total` is their bytes of text, in about equal shares, or 0 where
  it is not known. Raises RunError if a worker process dies, and what a task raises.
  """
  todo = {path: task for path, task in tasks.items() if not os.path.exists(path)}
  with bar(what, total, total * (len(tasks) - len(todo)) // len(tasks)) as shown:
    start = time.monotonic()
    while todo and (num_processes == 1 or time.monotonic() - start < PATIENCE):
      path = next(iter(todo))
      _run(path, todo.pop(path), shown.update)
    if todo:
      _run_in_workers(todo, num_processes, shown)
  return [read_json(path) for path in tasks]


def _run(path: str, task: Task, progress: Progress | None = None) -> None:
  write_json(path, task(progress or _progress))


def _run_in_workers(tasks: dict[str, Task], num_processes: int, shown: tqdm.tqdm) -> None:
  context = multiprocessing.get_context("spawn")  # forking a process that has threads can hang
  counter, before = context.Value("q", 0), shown.n
  receiver, alive = context.Pipe(duplex=False)
  pool = futures.ProcessPoolExecutor(num_processes, context, _begin, (counter, receiver))
  main = vars(sys.modules["__main__"])
  kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
  try:
    with pool, alive:  # whose closing ends the workers
      try:
        main.update(dict.fromkeys(kept))  # else each worker imports the main module, and a script runs again
        waiting = {pool.submit(_run, path, task) for path, task in tasks.items()}
      finally:
        main.update(kept)
      while waiting:
        finished, waiting = futures.wait(waiting, 0.2, futures.FIRST_EXCEPTION)
        shown.update(before + counter.value - shown.n)
        for future in finished:
          future.result()
  except futures.process.BrokenProcessPool as error:
    raise RunError(
      "a worker process ended, as when memory runs out; give data.num_processes a smaller number, and start again"
    ) from error


_counter: Any = None  # in a worker: bytes of text processed by all workers


def _begin(counter: Any, receiver: Any) -> None:
  """Initializes a worker process, which ends when the other end of `receiver` is closed."""
  global _counter
  _counter = counter
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
  os.environ["TOKENIZERS_PARALLELISM"] = "false"

  def watch() -> None:
    with contextlib.suppress(EOFError, OSError):
      receiver.recv()
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def _progress(num_bytes: int) -> None:
  with _counter.get_lock():
    _counter.value += num_bytes


def bar(what: str, total: int, done: int = 0) -> tqdm.tqdm:
  """Shows progress in bytes of text: as a bar on a terminal, otherwise as a line a minute; `total` may be 0."""
  options: dict[str, Any] = {"delay": 2, "leave": False}
  if not sys.stderr.isatty():
    line = "{desc}: {n_fmt} of {total_fmt} bytes of text after {elapsed}\n"
    options = {"delay": _LINE_SECONDS, "mininterval": _LINE_SECONDS, "miniters": 1, "bar_format": line}
  return tqdm.tqdm(desc=what, total=total or None, initial=done, unit="B", unit_scale=True, **options)


def num_cores() -> int:
  """How many cores this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
