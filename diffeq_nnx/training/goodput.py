"""Where the wall time of a run goes, and whether the run still moves."""

from collections.abc import Iterator
import contextlib
import sys
import threading
import time

from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import say

ACTIVITIES = ("reading the text", "starting", "compiling", "waiting for data", "validating", "saving")
HEALTH_SECONDS = 60.0  # how often process 0 prints a health line
STALLED_SECONDS = 300.0  # without a train step, or another activity, after which any process prints one


class Goodput:
  """Adds up the seconds of each activity from now on; the rest of the time is training.

  Starting is making the first state, or restoring one. A step is compiled when its program first runs. What is done
  beside the train steps, such as writing a checkpoint that was copied off the device, does not count.
  """

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
    self._activity, self._step, self._progressed = "training", 0, self._start

  @contextlib.contextmanager
  def spending(self, activity: str) -> Iterator[None]:
    """A context whose time is that of one of `ACTIVITIES`."""
    start = time.perf_counter()
    self._activity, self._progressed = activity, start
    try:
      yield
    finally:
      self._activity, self._progressed = "training", time.perf_counter()
      self._seconds[activity] += self._progressed - start

  def spent(self, *activities: str) -> float:
    """The seconds that these activities have taken together."""
    return sum(self._seconds[activity] for activity in activities)

  def mark_step(self, step: int) -> None:
    """Records that a train step started."""
    self._step, self._progressed = step, time.perf_counter()

  def shares(self) -> dict[str, float]:
    """The share of each activity in the time so far, and that of training, which is called goodput."""
    total = time.perf_counter() - self._start
    shares = {name.replace(" ", "_"): seconds / total for name, seconds in self._seconds.items()}
    return {"goodput": max(0.0, 1 - sum(shares.values())), **shares, "seconds": total}

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """A context in which a thread prints lines that begin with `health:`.

    Process 0 prints one a minute, unless it shows a progress bar; any process does while it has not moved for five.
    """
    end = threading.Event()
    thread = threading.Thread(target=self._watch, args=(end,), daemon=True)
    thread.start()
    try:
      yield
    finally:
      end.set()
      thread.join()

  def _watch(self, end: threading.Event) -> None:
    while not end.wait(HEALTH_SECONDS):
      seconds = time.perf_counter() - self._progressed
      if seconds > STALLED_SECONDS:
        process = f"process {distributed.whoami()[0]}"
        where = f"{self._activity} after step {self._step}"
        print(f"health: stalled: {process} has not moved for {seconds:.0f} s ({where})", file=sys.stderr, flush=True)
      elif not sys.stderr.isatty():
        say(f"health: step {self._step}, {line(self.shares())}")


def line(shares: dict[str, float]) -> str:
  """Shares as one line for the log."""
  parts = [f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in shares.items() if name != "seconds"]
  return f"{', '.join(parts)} of {shares['seconds']:,.0f} s"
