"""Damaged checkpoints, a full disk, a bucket that refuses."""

from collections.abc import Iterator
import json
import os
import pathlib
import shlex
import subprocess
import time

from diffeq_nnx import jobs
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from launch.breaking import processes
from launch.breaking.table import EVERY, STEPS, Row, Suite, find_problem, losses, quiet, tree
from launch.object_store import BUCKET, ObjectStore


def damage(suite: Suite) -> Iterator[Row]:
  """Each file of the newest checkpoint of an unfinished run, with a byte changed, cut in half, or missing."""
  number = str(STEPS - EVERY)
  newest = pathlib.Path(suite.whole, "checkpoints", number)
  values = {record["step"]: record["loss"] for record in read_metrics(suite.whole, "validation")}
  names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
  for how in ("with a byte changed", "cut in half", "missing"):
    row, reading = Row(f"a file of the newest checkpoint {how}"), Row(f"the same, --job=evaluate, {how}")
    for name in names:
      place = suite.copy_unfinished("damaged")
      path = pathlib.Path(place, "checkpoints", number, name)
      content = bytearray(path.read_bytes())
      if how == "with a byte changed" and content:
        content[suite.random.randrange(len(content))] ^= 1 << suite.random.randrange(8)
      path.write_bytes(content[: len(content) // 2] if how == "cut in half" else content)
      if how == "missing":
        path.unlink()
      before, start, found = tree(place), time.monotonic(), {}
      problem = find_problem(lambda place=place, found=found: found.update(jobs.run("evaluate", suite.config, place)))
      good = problem == "" and tree(place) == before and found["loss"] == values[found["step"]]
      reading.add(good, time.monotonic() - start, 0, f"{name}: {problem or found}")
      start = time.monotonic()
      problem = find_problem(lambda place=place: train(suite.config, place))
      good = problem == "" and losses(place) == suite.losses
      row.add(good, time.monotonic() - start, EVERY, f"{name}: {problem or 'other losses'}")
    yield row
    yield reading


def refuse(suite: Suite) -> Iterator[Row]:
  """A bucket that refuses everything from each write on, in turn."""
  row = Row("a bucket refuses everything from a write on, for each write of a run")
  with ObjectStore() as store:
    os.environ.update(store.environment)
    with quiet():
      train(suite.config, f"gs://{BUCKET}/counted")
    writes = sum(method != "GET" for method, _, _ in store.requests)
    for allowed in range(0, writes, max(1, writes // (10 * suite.tries))):
      place, start, left = f"gs://{BUCKET}/run{allowed}", time.monotonic(), [allowed]

      def fault(method: str, path: str, left: list[int] = left) -> str | None:
        left[0] -= method != "GET"
        return "403" if left[0] < 0 and method != "GET" else None

      store.fault = fault
      problem = find_problem(lambda place=place: train(suite.config, place))
      store.fault = lambda method, path: None
      again = find_problem(lambda place=place: train(suite.config, place))
      good = "Unexpected" not in problem and again == "" and losses(place) == suite.losses
      row.add(good, time.monotonic() - start, EVERY, f"after {allowed} of {writes}: {problem} | {again}")
  yield row


def disk(suite: Suite) -> Iterator[Row]:
  """A disk that is full after so many bytes, at sizes from nothing to what the run needs; then it has room.

  The disk is a tmpfs in a user namespace of the kernel.
  """
  row = Row("the disk is full, at sizes up to what a run needs")
  place = suite.place("disk")
  os.makedirs(place)
  needed = sum(path.stat().st_size + 4096 for path in pathlib.Path(suite.whole).rglob("*"))
  for number in range(suite.tries):
    size, start = 4096 + needed * number // suite.tries, time.monotonic()
    command = shlex.join(processes.command(suite, os.path.join(place, "run")))
    metrics = os.path.join(place, "run", "metrics.jsonl")
    script = (
      f"mount -t tmpfs -o size={size} none {shlex.quote(place)} || exit 99; {command} >/dev/null; echo code $? >&2; "
      f"mount -o remount,size=1g {shlex.quote(place)}; {command} >/dev/null 2>&1 && cat {shlex.quote(metrics)}"
    )
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True)
    if done.returncode == 99:
      raise OSError(f"the disk can't be made: {done.stderr.decode()}")
    told = done.stderr.decode().splitlines()
    ended = told and (told[-1] == "code 0" or (len(told) > 1 and told[-2].startswith("error:")))
    records = map(json.loads, done.stdout.splitlines())
    found = [one["loss"] for one in records if one["split"] == "train"] if done.returncode == 0 else []
    good = bool(ended) and found == suite.losses
    row.add(good, time.monotonic() - start, EVERY, f"{size} of {needed} bytes: {told[-3:]}")
  yield row
