"""Breaks small runs in every way that it knows, and counts what they survive; docs/reliability.md.

  python -m launch.faults --workdir=/tmp/faults [--kinds=kill,term,damage,refuse,configs,run_files,records,tokenizers] \
      [--tries=20] [--seed=0]

Prints a Markdown table. A run survives a fault if, started again, it ends with the losses of the run without faults,
bit for bit. Bad input is survived if it is used as it was, or rejected with one line. Details of what is not survived
are printed on stderr. Kinds that train in this process do so without compilation times; the others start real ones.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, files, jobs
from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from launch.object_store import BUCKET, ObjectStore

EVERY, STEPS = 4, 20  # steps between checkpoints, and of the run
SETTINGS = [
  "model.num_steps=2",
  "model.embed_dim=32",
  "model.num_heads=4",
  "model.vocab_size=512",
  "train.batch_size=8",
  "train.log_every=1",
  f"train.steps={STEPS}",
  f"checkpoint.every={EVERY}",
  f"eval.every={EVERY}",
  "checkpoint.keep=3",
  "eval.max_batches=2",
]
JUNK = ["", "0", "-1", "1e9", "nan", "inf", "None", "True", "()", "(1,)", "[]", "{}", "x", "é\x00", "../..", "1" * 40]


@dataclasses.dataclass
class Row:
  """One line of the table."""

  fault: str
  tries: int = 0
  survived: int = 0
  lost: int = 0  # the most steps trained again
  seconds: float = 0.0  # the longest try

  def add(self, survived: bool, seconds: float, lost: int = 0, detail: str = "") -> None:
    """Counts one try."""
    self.tries, self.survived = self.tries + 1, self.survived + survived
    self.lost, self.seconds = max(self.lost, lost), max(self.seconds, seconds)
    if not survived:
      print(f"not survived: {self.fault}: {detail}", file=sys.stderr, flush=True)

  def __str__(self) -> str:
    return f"| {self.fault} | {self.tries} | {self.survived} | {self.lost} | {self.seconds:.0f} |"


class Faults:
  """All kinds of faults, each a method that returns its rows."""

  def __init__(self, workdir: str, tries: int, seed: int):
    self._folder, self._tries, self._random = os.path.abspath(workdir), tries, random.Random(seed)
    self._cache = os.path.join(self._folder, "cache")
    self._config = config_lib.load("configs/tiny.py", [*SETTINGS, f"data.cache_dir={self._cache}"])
    self._whole = os.path.join(self._folder, "whole")
    with _quiet():
      train(self._config, self._whole)
    self._losses = losses(self._whole)

  def kill(self) -> Iterator[Row]:
    """SIGKILL at random moments of a process, from its start to its end."""
    yield self._signaled(Row("SIGKILL at a random moment"), signal.SIGKILL)

  def term(self) -> Iterator[Row]:
    """SIGTERM likewise."""
    yield self._signaled(Row("SIGTERM at a random moment"), signal.SIGTERM)

  def _signaled(self, row: Row, number: signal.Signals) -> Row:
    words = [f"--config.{setting}" for setting in [*SETTINGS, f"data.cache_dir={self._cache}"]]
    command = [sys.executable, "-m", "diffeq_nnx.main", "--config=configs/tiny.py", *words]
    start = time.monotonic()
    subprocess.run([*command, f"--workdir={self._place('timed')}"], capture_output=True, check=True)
    whole = time.monotonic() - start
    for _ in range(self._tries):
      place, start = self._place("signaled"), time.monotonic()
      process = subprocess.Popen([*command, f"--workdir={place}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
      after = self._random.uniform(0, whole)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after)
      process.send_signal(number)
      _, told = process.communicate()
      reached = len(losses(place))
      done = subprocess.run([*command, f"--workdir={place}"], capture_output=True, text=True)
      restored = [line for line in done.stderr.splitlines() if "from the checkpoint of step" in line]
      lost = reached - (int(restored[0].split("step ")[1]) if restored else 0)
      good = done.returncode == 0 and losses(place) == self._losses and b"Traceback" not in told
      row.add(
        good, time.monotonic() - start, lost if reached < STEPS else 0, f"after {after:.2f} s: {_last(done.stderr)}"
      )
    return row

  def damage(self) -> Iterator[Row]:
    """Each file of the newest checkpoint of an unfinished run, with a byte changed, cut in half, or missing."""
    shutil.rmtree(os.path.join(self._whole, "checkpoints", str(STEPS)))
    number = str(STEPS - EVERY)
    newest = pathlib.Path(self._whole, "checkpoints", number)
    values = {record["step"]: record["loss"] for record in read_metrics(self._whole, "validation")}
    names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    for how in ("with a byte changed", "cut in half", "missing"):
      row, reading = Row(f"a file of the newest checkpoint {how}"), Row(f"the same, --job=evaluate, {how}")
      for name in names:
        place = self._place("damaged")
        shutil.copytree(self._whole, place)
        path = pathlib.Path(place, "checkpoints", number, name)
        content = bytearray(path.read_bytes())
        if how == "with a byte changed" and content:
          content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        path.write_bytes(content[: len(content) // 2] if how == "cut in half" else content)
        if how == "missing":
          path.unlink()
        before, start, found = _tree(place), time.monotonic(), {}
        problem = _told(lambda place=place, found=found: found.update(jobs.run("evaluate", self._config, place)))
        good = problem == "" and _tree(place) == before and found["loss"] == values[found["step"]]
        reading.add(good, time.monotonic() - start, 0, f"{name}: {problem or found}")
        start = time.monotonic()
        problem = _told(lambda place=place: train(self._config, place))
        good = problem == "" and losses(place) == self._losses
        row.add(good, time.monotonic() - start, EVERY, f"{name}: {problem or 'other losses'}")
      yield row
      yield reading

  def refuse(self) -> Iterator[Row]:
    """A bucket that refuses everything from a random write on."""
    row = Row("bucket refuses from a random write on")
    with ObjectStore() as store:
      os.environ.update(store.environment)
      with _quiet():
        train(self._config, f"gs://{BUCKET}/counted")
      writes = sum(method != "GET" for method, _, _ in store.requests)
      for number in range(self._tries):
        place, start = f"gs://{BUCKET}/run{number}", time.monotonic()
        left = [self._random.randrange(writes)]

        def fault(method: str, path: str, left: list[int] = left) -> str | None:
          left[0] -= method != "GET"
          return "403" if left[0] < 0 and method != "GET" else None

        allowed, store.fault = left[0], fault
        problem = _told(lambda place=place: train(self._config, place))
        store.fault = lambda method, path: None
        again = _told(lambda place=place: train(self._config, place))
        good = "Unexpected" not in problem and again == "" and losses(place) == self._losses
        row.add(good, time.monotonic() - start, EVERY, f"after {allowed} of {writes}: {problem} | {again}")
    yield row

  def configs(self) -> Iterator[Row]:
    """Random values for random keys."""
    row, keys = Row("a config key with a random value"), sorted(config_lib.key_types())
    for _ in range(10 * self._tries):
      setting, start = f"{self._random.choice(keys)}={self._random.choice(JUNK)}", time.monotonic()
      problem = _told(lambda setting=setting: config_lib.load("configs/tiny.py", [setting]))
      row.add("Unexpected" not in problem, time.monotonic() - start, 0, f"{setting}: {problem}")
    yield row

  def run_files(self) -> Iterator[Row]:
    """run.json and a manifest of shards with a changed, cut or doubled part."""
    cached = next(pathlib.Path(self._cache).iterdir())
    for name, folder, use in (
      ("run.json", pathlib.Path(self._whole), lambda place: jobs.run("evaluate", _config_of(place), place)),
      ("manifest.json", cached, lambda place: data.load(_shards(self._config, place).data, 512, seed=0)),
    ):
      row = Row(f"{name} with a random change")
      for _ in range(2 * self._tries):
        place = self._place("changed")
        shutil.copytree(folder, place)
        path = pathlib.Path(place, name)
        path.write_bytes(self._mutated(path.read_bytes()))
        start = time.monotonic()
        problem = _told(lambda use=use, place=place: use(place))
        row.add("Unexpected" not in problem, time.monotonic() - start, 0, problem)
      yield row

  def records(self) -> Iterator[Row]:
    """JSON lines with a random change, among good ones."""
    row = Row("a JSON line with a random change")
    path = pathlib.Path(self._folder, "records.jsonl")
    good = [
      json.dumps({"text": f"Document {number} tells of rivers, é and hills. " * 5}).encode() for number in range(20)
    ]
    for number in range(10 * self._tries):
      lines = [self._mutated(line) if place == 7 else line for place, line in enumerate(good)]
      path.write_bytes(b"\n".join(lines) + b"\n")
      config = dataclasses.replace(
        self._config.data, source=f"jsonl:{path}", tokenizer="bytes", cache_dir=self._place(f"records{number % 2}")
      )
      start = time.monotonic()
      problem = _told(lambda config=config: data.load(config, 512, seed=0))
      row.add("Unexpected" not in problem, time.monotonic() - start, 0, problem)
    yield row

  def tokenizers(self) -> Iterator[Row]:
    """Tokenizer files with a random change."""
    row, path = Row("a tokenizer file with a random change"), pathlib.Path(self._folder, "changed.model")
    sources = [pathlib.Path(self._whole, "tokenizer.model").read_bytes(), data.load_tokenizer("bytes").model_bytes]
    for number in range(3 * self._tries):
      path.write_bytes(self._mutated(sources[number % 2]))
      start = time.monotonic()
      problem = _told(lambda: data.load_tokenizer(str(path)))
      row.add("Unexpected" not in problem, time.monotonic() - start, 0, problem)
    yield row

  def _mutated(self, content: bytes) -> bytes:
    """Bytes with one random change."""
    at, to = sorted(self._random.randrange(len(content) + 1) for _ in range(2))
    some = bytes(self._random.randrange(256) for _ in range(self._random.randrange(1, 9)))
    changes: list[Callable[[], bytes]] = [
      lambda: content[:at],
      lambda: content[:at] + content[to:],
      lambda: content[:at] + some + content[at:],
      lambda: content[:at] + content[at:to] * 2 + content[to:],
      lambda: content.replace(b'"', b"", self._random.randrange(1, 4)),
      lambda: content.replace(b"1", b"-1e999", 3),
    ]
    return self._random.choice(changes)()

  def _place(self, name: str) -> str:
    """A directory that is not there."""
    place = os.path.join(self._folder, name)
    shutil.rmtree(place, ignore_errors=True)
    return place


def losses(workdir: str) -> list[float]:
  """Training losses, by step; [] before the first."""
  with contextlib.suppress(OSError):
    return [record["loss"] for record in read_metrics(workdir, "train")]
  return []


def _config_of(place: str) -> Config:
  from diffeq_nnx.runs import workdir

  return workdir.config_of(place)


def _shards(config: Config, place: str) -> Config:
  return dataclasses.replace(config, data=dataclasses.replace(config.data, source=f"shards:{place}"))


def _tree(folder: str) -> dict[str, str]:
  """The hash of each file."""
  paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
  return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _told(call: Callable[[], object]) -> str:
  """What a call fails with; empty: nothing."""
  try:
    with _quiet():
      call()
    return ""
  except (UserError, RunError, OSError) as error:
    line = str(error)
    return line if "\n" not in line else f"Unexpected: several lines: {line}"
  except Exception as error:
    return f"Unexpected {type(error).__name__}: {error}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
    yield


def _last(text: str) -> str:
  return text.strip().splitlines()[-1] if text.strip() else ""


KINDS = ("kill", "term", "damage", "refuse", "configs", "run_files", "records", "tokenizers")


def main(argv: list[str] | None = None) -> None:
  """Prints each row when it is known."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
  parser.add_argument("--tries", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  unknown = set(args.kinds) - set(KINDS)
  if unknown:
    raise UserError(f"--kinds={','.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
  files.make_folder(args.workdir)
  faults = Faults(args.workdir, args.tries, args.seed)
  print("| fault | tries | survived | steps lost, at most | longest, s |\n| --- | --- | --- | --- | --- |", flush=True)
  for kind in args.kinds:
    for row in getattr(faults, kind)():
      print(row, flush=True)


if __name__ == "__main__":
  try:
    main()
  except UserError as error:
    raise SystemExit(f"error: {error}") from None
