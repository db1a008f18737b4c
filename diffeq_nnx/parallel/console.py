"""What a job prints: progress on stderr, results on stdout, by process 0 only."""

from collections.abc import Sequence
import json
import sys
from typing import Any

from tqdm import tqdm

from diffeq_nnx.errors import printable
from diffeq_nnx.parallel import distributed


def say(line: str) -> None:
  """Prints one line on stderr, from process 0 only; stdout is for results."""
  if distributed.is_main_process():
    tqdm.write(printable(line), file=sys.stderr)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Makes a Markdown table of cells."""
  return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def print_result(job: str, workdir: str, **values: Any) -> dict[str, Any]:
  """Prints the result of a job as one JSON line on stdout, from process 0 only, and returns it."""
  result = {"job": job, "workdir": workdir, **values}
  if distributed.is_main_process():
    print(json.dumps(result), flush=True)
  return result
