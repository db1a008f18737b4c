"""Tasks shared out over processes, with a bar that shows how far they are."""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any, Protocol

import tqdm

from diffeq_nnx.errors import RunError

PATIENCE = 3.0  # seconds of work that are not worth starting processes for
_POLL_SECONDS = 0.2
_LINE_SECONDS = 60


class Task(Protocol):
  """A piece of work, which can be pickled.

  Attributes:
    done: A file that is there once the task is finished.
    size: Bytes of text that it works through; 0 where nobody knows yet.
  """

  done: str
  size: int


class Workers:
  """Processes that work off tasks: a context, at whose end they are gone, whatever they were doing.

  The first `PATIENCE` seconds of each list of tasks are worked by this process alone, and all of it where there is to
  be one. The others end when this one does, even if it is killed.
  """

  def __init__(self, num_processes: int):
    self._num_processes = num_processes
    self._pool: concurrent.futures.ProcessPoolExecutor | None = None

  def __enter__(self) -> "Workers":
    return self

  def __exit__(self, *unused) -> None:
    if self._pool is not None:
      self._alive.close()
      self._pool.shutdown(cancel_futures=True)

  def run(self, function: Callable[[Any, Callable[[int], None]], None], tasks: Sequence[Task], what: str) -> None:
    """Calls function(task, progress) of every task that is not done yet; `progress` takes bytes of text done.

    Raises:
      RunError: If a process dies.
      Exception: What a task raises; of several the first's.
    """
    todo = [task for task in tasks if not os.path.exists(task.done)]
    total = sum(task.size for task in tasks)
    with bar(what, total, total - sum(task.size for task in todo)) as shown:
      start = time.monotonic()
      while todo and (self._num_processes == 1 or time.monotonic() - start < PATIENCE):
        function(todo.pop(0), shown.update)
      if todo:
        self._share_out(function, todo, shown)

  def _share_out(self, function: Callable, tasks: list[Task], shown: "tqdm.tqdm | _Lines") -> None:
    if self._pool is None:
      self._start()
    with _without_main():  # submitting starts the processes
      futures = [self._pool.submit(_call, function, task) for task in tasks]
    before, already = self._counter.value, shown.n
    waiting: set[concurrent.futures.Future] = set(futures)
    while waiting:
      finished, waiting = concurrent.futures.wait(
        waiting, timeout=_POLL_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
      )
      shown.update(self._counter.value - before - (shown.n - already))
      if any(future.exception() for future in finished):
        break
    for future in futures:
      try:
        if future.done():
          future.result()
      except concurrent.futures.process.BrokenProcessPool as error:
        raise RunError(
          "a worker process ended, as when memory runs out; give data.num_processes a smaller number, and start "
          "again"
        ) from error

  def _start(self) -> None:
    context = multiprocessing.get_context("spawn")  # forking a process that has threads can hang
    self._counter = context.Value("q", 0)
    theirs, self._alive = context.Pipe(duplex=False)
    self._pool = concurrent.futures.ProcessPoolExecutor(
      self._num_processes, context, initializer=_begin, initargs=(self._counter, theirs)
    )


def bar(what: str, total: int, initial: int = 0) -> "tqdm.tqdm | _Lines":
  """Shows how much text is worked through, in bytes; `total` is 0 where nobody knows."""
  if not sys.stderr.isatty():
    return _Lines(what, total, initial)
  return tqdm.tqdm(
    desc=what, total=total or None, initial=initial, unit="B", unit_scale=True, leave=False, delay=2, mininterval=0.2
  )


class _Lines:
  """What a bar tells, as a line a minute, for a log."""

  def __init__(self, what: str, total: int, initial: int):
    self.n, self._what, self._total = initial, what, f" of {total / 1e9:.2f}" if total else ""
    self._start = self._told = time.monotonic()

  def update(self, num_bytes: int) -> None:
    """Counts on."""
    self.n += num_bytes
    now = time.monotonic()
    if now - self._told >= _LINE_SECONDS:
      self._told = now
      minutes = (now - self._start) / 60
      print(f"{self._what}: {self.n / 1e9:.2f}{self._total} GB of text after {minutes:.0f} min", file=sys.stderr)

  def __enter__(self) -> "_Lines":
    return self

  def __exit__(self, *unused) -> None:
    """Nothing is left open."""


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
  """Spares new processes the main module: they don't need it, and as a plain script it would run again in them."""
  main = sys.modules["__main__"]
  kept = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
  vars(main).pop("__file__", None)
  main.__spec__ = None
  try:
    yield
  finally:
    vars(main).update(kept)


def num_cores() -> int:
  """How many cores this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_counter: Any = None  # in a worker: shared by all, bytes of text done


def _begin(counter: Any, alive: Any) -> None:
  """Readies a worker process: it ends when the other end of `alive` is closed, and keeps to one thread."""
  global _counter
  _counter = counter
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
  os.environ["TOKENIZERS_PARALLELISM"] = "false"

  def watch() -> None:
    try:
      alive.recv()
    except (EOFError, OSError):
      os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def _call(function: Callable, task: Task) -> None:
  function(task, _progress)


def _progress(num_bytes: int) -> None:
  with _counter.get_lock():
    _counter.value += num_bytes
