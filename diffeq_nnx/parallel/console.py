"""What a job shows: progress on stderr and results on stdout, by process 0 only, and pictures beside the results."""

from collections.abc import Callable, Sequence
import contextlib
import json
import math
import sys
from typing import Any

from tqdm import tqdm

from diffeq_nnx import files
from diffeq_nnx.errors import first_line, printable
from diffeq_nnx.parallel import distributed


def say(line: str) -> None:
  """Prints one line on stderr, from process 0 only; stdout is for results."""
  if distributed.is_main_process():
    with contextlib.suppress(OSError):  # of a terminal or a pipe that was closed, which must not end a run
      tqdm.write(printable(line), file=sys.stderr)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Makes a Markdown table of cells."""
  return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def print_result(job: str, workdir: str, **values: Any) -> dict[str, Any]:
  """Prints the result of a job as one JSON line on stdout, from process 0 only, and returns it."""
  result = {"job": job, "workdir": workdir, **values}
  if distributed.is_main_process():
    print(json.dumps(to_finite(result)), flush=True)
  return result


def to_finite(value: Any) -> Any:
  """The value with None in place of numbers that JSON doesn't have: infinities, and what is no number."""
  if isinstance(value, dict):
    return {name: to_finite(one) for name, one in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_finite(one) for one in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: str, size: tuple[float, float], fill: Callable[[Any], None]) -> None:
  """Writes a PNG file, of `size` in inches, of a figure of Matplotlib that `fill` draws on.

  Matplotlib's settings are its own, not the user's. A picture that can't be made costs a line, and not the job.
  """
  try:
    from matplotlib import figure, style  # here, since they take a second to import

    with style.context("default", after_reset=True), files.replacing(path) as part:
      drawn = figure.Figure(figsize=size, layout="constrained")  # not pyplot's, whose backend is the caller's
      fill(drawn)
      drawn.savefig(part, dpi=120, format="png")
  except Exception as error:
    say(f"{path}: can't be drawn ({type(error).__name__}: {first_line(error, 200)})")
