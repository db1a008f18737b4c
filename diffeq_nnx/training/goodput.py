"""Where the wall time of a run goes."""

from collections.abc import Iterator
import contextlib
import time

ACTIVITIES = ("reading the text", "starting", "compiling", "waiting for data", "validating", "saving")


class Goodput:
  """Adds up the seconds of each activity from now on; the rest of the time is training.

  Starting is making the first state, or restoring one. A step is compiled when its program first runs. What is done
  beside the train steps, such as writing a checkpoint that was copied off the device, does not count.
  """

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._seconds = dict.fromkeys(ACTIVITIES, 0.0)

  @contextlib.contextmanager
  def spending(self, activity: str) -> Iterator[None]:
    """A context whose time is that of one of `ACTIVITIES`."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[activity] += time.perf_counter() - start

  def shares(self) -> dict[str, float]:
    """The share of each activity in the time so far, and that of training, which is called goodput."""
    total = time.perf_counter() - self._start
    shares = {name.replace(" ", "_"): seconds / total for name, seconds in self._seconds.items()}
    return {"goodput": max(0.0, 1 - sum(shares.values())), **shares, "seconds": total}


def line(shares: dict[str, float]) -> str:
  """Shares as one line for the log."""
  parts = [f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in shares.items() if name != "seconds"]
  return f"{', '.join(parts)} of {shares['seconds']:,.0f} s"
