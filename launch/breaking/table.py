"""What all kinds of faults share: the small run that they break, places for its copies, a row of the table."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import random
import shutil
import sys
import time

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics

EVERY, STEPS = 4, 20  # steps between checkpoints, and of the run
SETTINGS = ["model.num_steps=2", "model.embed_dim=32", "model.num_heads=4", "model.vocab_size=512"]
SETTINGS += ["train.batch_size=8", "train.log_every=1", f"train.steps={STEPS}"]
SETTINGS += [f"checkpoint.every={EVERY}", f"eval.every={EVERY}", "checkpoint.keep=3", "eval.max_batches=2"]
HEADER = "| fault | tries | survived | steps lost, at most | longest, s |\n| --- | --- | --- | --- | --- |"


@dataclasses.dataclass
class Row:
  """One line of the table."""

  fault: str
  tries: int = 0
  survived: int = 0
  lost: int = 0  # the most steps trained again
  seconds: float = 0.0  # the longest try

  def add(self, survived: bool, seconds: float, lost: int, detail: str) -> None:
    """Counts one try."""
    self.tries, self.survived = self.tries + 1, self.survived + survived
    self.lost, self.seconds = max(self.lost, lost), max(self.seconds, seconds)
    if not survived:
      print(f"not survived: {self.fault}: {detail}", file=sys.stderr, flush=True)

  def __str__(self) -> str:
    return f"| {self.fault} | {self.tries} | {self.survived} | {self.lost} | {self.seconds:.0f} |"


class Suite:
  """A finished run of `STEPS` train steps, `whole`, to break copies of.

  Its config is `config`, its training losses are `losses`, and its text is kept in `cache`. Everything happens in
  `folder`.
  """

  def __init__(self, workdir: str, tries: int, seed: int):
    """`tries`: how often each kind of fault is tried; some kinds do a multiple. `seed`: of the random choices."""
    self.folder, self.tries, self.random = os.path.abspath(workdir), tries, random.Random(seed)
    self.cache = os.path.join(self.folder, "cache")
    self.config = config_lib.load("configs/tiny.py", [*SETTINGS, f"data.cache_dir={self.cache}"])
    self.whole = os.path.join(self.folder, "whole")
    os.makedirs(self.folder, exist_ok=True)
    with quiet():
      train(self.config, self.whole)
    self.losses = losses(self.whole)

  def place(self, name: str) -> str:
    """A directory that is not there."""
    place = os.path.join(self.folder, name)
    shutil.rmtree(place, ignore_errors=True)
    return place

  def copy_unfinished(self, name: str) -> str:
    """A copy of the run without its newest checkpoint."""
    place = self.place(name)
    shutil.copytree(self.whole, place)
    shutil.rmtree(os.path.join(place, "checkpoints", str(STEPS)))
    return place

  def mutate(self, content: bytes) -> bytes:
    """Bytes with one random change."""
    at, to = sorted(self.random.randrange(len(content) + 1) for _ in range(2))
    some = bytes(self.random.randrange(256) for _ in range(self.random.randrange(1, 9)))
    changes: list[Callable[[], bytes]] = [
      lambda: content[:at],
      lambda: content[:at] + content[to:],
      lambda: content[:at] + some + content[at:],
      lambda: content[:at] + content[at:to] * 2 + content[to:],
      lambda: content.replace(b'"', b"", self.random.randrange(1, 4)),
      lambda: content.replace(b"1", b"-1e999", 3),
    ]
    return self.random.choice(changes)()

  def use(self, row: Row, call: Callable[[], object], detail: str = "") -> None:
    """Counts a call that must do its work, or fail with one line."""
    start = time.monotonic()
    problem = find_problem(call)
    row.add("Unexpected" not in problem, time.monotonic() - start, 0, f"{detail}: {problem}")


def losses(workdir: str) -> list[float]:
  """Training losses, by step; [] before the first."""
  with contextlib.suppress(OSError):
    return [record["loss"] for record in read_metrics(workdir, "train")]
  return []


def tree(folder: str) -> dict[str, str]:
  """The hash of each file."""
  paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
  return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def find_problem(call: Callable[[], object]) -> str:
  """What a call fails with; empty: nothing."""
  try:
    with quiet():
      call()
    return ""
  except (UserError, RunError, OSError) as error:
    line = str(error)
    return line if "\n" not in line else f"Unexpected: several lines: {line}"
  except Exception as error:
    return f"Unexpected {type(error).__name__}: {error}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Nothing is printed inside."""
  with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
    yield
