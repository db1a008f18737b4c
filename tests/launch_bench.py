"""Stand-ins for gcloud, kubectl and Slurm that record how the shell launchers call them."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
BASH = shutil.which("bash")
PROGRAM = ["--config=configs/llama1b.py:openwebtext,diffeq", "--workdir=/runs/a"]
POD = ["--name=pod", "--zone=us-east5-a"]
GKE = ["--name=llama", "--image=gcr.io/p/diffeq:1", "--volume=runs", "--accelerator=tpu-v5p-slice", "--topology=2x2x4"]
TPUS = ["gcloud", "compute", "tpus"]
HOST = "bash diffeq-nnx/src/launch/tpu_host.sh"
ALIVE = "--ssh-flag=-oServerAliveInterval=30"

RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(os.environ["RECORD"], "a") as record:
  record.write(json.dumps(call) + "\\n")
if "--filename=-" in call:
  open(os.environ["RECORD"] + ".stdin", "w").write(sys.stdin.read())
if "describe" in call:
  print(os.environ.get("STATE", "READY"))
sys.exit(int(os.environ.get("CODE", "0")))
"""

# waits for SIGTERM as the program does, and ends with $CODE
WAITER = """#!/usr/bin/env bash
trap 'echo told; exit ${CODE:-0}' TERM
echo $$ >"$HOME/waiter.pid"
printf '%s\\n' "$@"
while :; do sleep 0.05; done
"""


def write_tool(path: pathlib.Path, text: str) -> None:
  """An executable file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def wait_for(condition, seconds: float = 10.0):
  """The first true value of the condition; fails when there is none in time."""
  end = time.monotonic() + seconds
  while not (value := condition()):
    assert time.monotonic() < end, "waited in vain"
    time.sleep(0.02)
  return value


class Bench:
  """A home directory, the stand-ins first on PATH, and a small checkout that holds launch/."""

  def __init__(self, path: pathlib.Path):
    self.home, self.bin, self.repo = path / "home", path / "bin", path / "repo"
    self.record = path / "record"
    self.home.mkdir()
    for tool in ("gcloud", "kubectl", "srun", "scancel", "scontrol"):
      write_tool(self.bin / tool, RECORDER)
    write_tool(self.bin / "sleep", f"#!/bin/sh\nexec {shutil.which('sleep')} 0.02\n")
    shutil.copytree(LAUNCH, self.repo / "launch", ignore=shutil.ignore_patterns("__pycache__"))

  def environment(self, **changes: str) -> dict[str, str]:
    """A clean environment but for PATH."""
    return {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.home), "RECORD": str(self.record), **changes}

  def bash(self, *words: str, **changes: str) -> subprocess.CompletedProcess:
    """Runs bash with these words, in the home directory."""
    place = {"cwd": self.home, "env": self.environment(**changes), "stdin": subprocess.DEVNULL}
    return subprocess.run([BASH, *words], **place, capture_output=True, text=True, timeout=60)

  def script(self, name: str, *words: str, **changes: str) -> subprocess.CompletedProcess:
    """Runs a launcher of the small checkout."""
    return self.bash(str(self.repo / "launch" / name), *words, **changes)

  def calls(self) -> list[list[str]]:
    """The stand-ins' argument vectors since the last time."""
    lines = self.record.read_text().splitlines() if self.record.exists() else []
    self.record.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]

  def waiter(self) -> int:
    """The process id of the WAITER that was started."""
    path = self.home / "waiter.pid"
    return int(wait_for(lambda: path.exists() and path.read_text()))

  def manifest(self) -> dict:
    """What kubectl was given on its standard input."""
    return yaml.safe_load(pathlib.Path(f"{self.record}.stdin").read_text())

  def job(self) -> dict:
    """The specification of a slice's Job in it."""
    return self.manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]

  def make_repository(self) -> None:
    """Commits the small checkout, and then changes it in each way."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for name in ("kept", "changed", "deleted"):
      (self.repo / name).write_text("old")
    (self.repo / ".gitignore").write_text("dist/\n")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
      subprocess.run([*git, *words], cwd=self.repo, check=True, env=self.environment())
    (self.repo / "changed").write_text("new")
    (self.repo / "deleted").unlink()
    (self.repo / "untracked").write_text("new")


@pytest.fixture
def bench(tmp_path):
  """A Bench, whose left-over stand-in program is ended."""
  bench = Bench(tmp_path)
  yield bench
  with contextlib.suppress(OSError, ValueError):
    os.kill(int((bench.home / "waiter.pid").read_text()), signal.SIGKILL)
