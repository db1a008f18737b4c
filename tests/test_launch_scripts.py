"""The shell launchers, run with stand-ins for gcloud, kubectl and Slurm that record how they were called."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
BASH = shutil.which("bash")
PROGRAM = ["--config=configs/llama1b.py:openwebtext,diffeq", "--workdir=/runs/a"]
POD = ["--name=pod", "--zone=us-east5-a"]
GKE = ["--name=llama", "--image=gcr.io/p/diffeq:1", "--volume=runs", "--accelerator=tpu-v5p-slice", "--topology=2x2x4"]
TPUS = ["gcloud", "compute", "tpus"]
HOST = "bash diffeq-nnx/src/launch/tpu_host.sh"

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
    shutil.copytree(LAUNCH, self.repo / "launch", ignore=shutil.ignore_patterns("__pycache__"))

  def environment(self, **changes: str) -> dict[str, str]:
    """A clean environment but for PATH."""
    return {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.home), "RECORD": str(self.record), **changes}

  def bash(self, *words: str, **changes: str) -> subprocess.CompletedProcess:
    """Runs bash with these words, in the home directory."""
    return subprocess.run(
      [BASH, *words],
      env=self.environment(**changes),
      cwd=self.home,
      capture_output=True,
      text=True,
      timeout=60,
      stdin=subprocess.DEVNULL,
    )

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


def remote(worker: str, text: str) -> list[str]:
  """The call that runs a shell command on TPU VM hosts."""
  return [*TPUS, "tpu-vm", "ssh", "pod", "--zone=us-east5-a", f"--worker={worker}", f"--command={text}"]


# script, arguments, the calls that they lead to; fill is tested by itself
CASES = [
  (
    "tpu_pod.sh",
    ["create", *POD, "--type=v5p-16"],
    [[*TPUS, "tpu-vm", "create", "pod", "--zone=us-east5-a", "--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5"]],
  ),
  (
    "tpu_pod.sh",
    ["create", *POD, "--type=v6e-32", "--queued", "--spot", "--project=p"],
    [
      [
        *TPUS,
        "queued-resources",
        "create",
        "pod",
        "--zone=us-east5-a",
        "--project=p",
        "--accelerator-type=v6e-32",
        "--runtime-version=v2-alpha-tpuv6e",
        "--node-id=pod",
        "--spot",
      ]
    ],
  ),
  (
    "tpu_pod.sh",
    ["create", *POD, "--type=v5litepod-16", "--queued", "--num-slices=2"],
    [
      [
        *TPUS,
        "queued-resources",
        "create",
        "pod",
        "--zone=us-east5-a",
        "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--node-count=2",
        "--node-prefix=pod",
      ]
    ],
  ),
  (
    "tpu_pod.sh",
    ["create", *POD, "--type=v9-16", "--version=mine"],
    [[*TPUS, "tpu-vm", "create", "pod", "--zone=us-east5-a", "--accelerator-type=v9-16", "--version=mine"]],
  ),
  (
    "tpu_pod.sh",
    ["start", *POD, "--", *PROGRAM, "--config.data.source=text:/runs/a b/*.txt"],
    [
      remote("all", f"{HOST} idle"),
      remote("all", f"{HOST} start {' '.join(PROGRAM)} '--config.data.source=text:/runs/a b/*.txt'"),
    ],
  ),
  (
    "tpu_pod.sh",
    ["start", *POD, "--queued", "--", *PROGRAM],
    [
      [
        *TPUS,
        "queued-resources",
        "ssh",
        "pod",
        "--zone=us-east5-a",
        "--worker=all",
        "--node=all",
        f"--command={HOST} {rest}",
      ]
      for rest in ("idle", f"start {' '.join(PROGRAM)}")
    ],
  ),
  ("tpu_pod.sh", ["follow", *POD], [remote("0", "tail -n 20 -F diffeq-nnx/run.log")]),
  (
    "tpu_pod.sh",
    ["follow", *POD, "--queued"],
    [
      [
        *TPUS,
        "queued-resources",
        "ssh",
        "pod",
        "--zone=us-east5-a",
        "--worker=0",
        "--node=0",
        "--command=tail -n 20 -F diffeq-nnx/run.log",
      ]
    ],
  ),
  (
    "tpu_pod.sh",
    ["status", *POD],
    [
      [*TPUS, "tpu-vm", "describe", "pod", "--zone=us-east5-a", "--format=value(state)"],
      remote("all", f"{HOST} status"),
    ],
  ),
  ("tpu_pod.sh", ["stop", *POD], [remote("all", f"{HOST} stop")]),
  ("tpu_pod.sh", ["delete", *POD], [[*TPUS, "tpu-vm", "delete", "pod", "--zone=us-east5-a"]]),
  (
    "tpu_pod.sh",
    ["delete", *POD, "--queued", "--project=p"],
    [[*TPUS, "queued-resources", "delete", "pod", "--zone=us-east5-a", "--project=p", "--force"]],
  ),
  ("gke.sh", ["start", *GKE, "--", *PROGRAM], [["kubectl", "create", "--filename=-"]]),
  (
    "gke.sh",
    ["follow", "--name=llama", "--namespace=ml"],
    [
      [
        "kubectl",
        "--namespace=ml",
        "logs",
        "--follow",
        "--tail=20",
        "--selector=jobset.sigs.k8s.io/jobset-name=llama,"
        "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0",
      ]
    ],
  ),
  (
    "gke.sh",
    ["status", "--name=llama"],
    [
      ["kubectl", "get", "jobset", "llama"],
      ["kubectl", "get", "pods", "--selector=jobset.sigs.k8s.io/jobset-name=llama", "--output=wide"],
    ],
  ),
  ("gke.sh", ["stop", "--name=llama"], [["kubectl", "delete", "jobset", "llama", "--cascade=foreground"]]),
  (
    "slurm.sbatch",
    [*PROGRAM, "--config.data.source=text:/runs/a b/*.txt"],
    [
      [
        "srun",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=8",
        ".venv/bin/python",
        "-m",
        "diffeq_nnx.main",
        *PROGRAM,
        "--config.data.source=text:/runs/a b/*.txt",
      ]
    ],
  ),
]
IDS = [f"{script}-{index}-{arguments[0].split('=')[0]}" for index, (script, arguments, _) in enumerate(CASES)]


def dry(script: str, arguments: list[str]) -> list[str]:
  """The arguments with --dry-run where the script takes it."""
  place = 0 if script == "slurm.sbatch" else 1
  return [*arguments[:place], "--dry-run", *arguments[place:]]


@pytest.mark.parametrize("script,arguments,calls", CASES, ids=IDS)
def test_a_subcommand_calls_its_tool_and_a_dry_run_prints_just_that(script, arguments, calls, bench):
  done = bench.script(script, *arguments, SLURM_JOB_ID="7")
  assert (done.returncode, done.stderr) == (0, "")
  assert bench.calls() == calls
  stdin = pathlib.Path(f"{bench.record}.stdin")
  manifest = stdin.read_text() if stdin.exists() else None
  shown = bench.script(script, *dry(script, arguments))
  assert (shown.returncode, shown.stderr) == (0, "")
  assert bench.calls() == []
  if manifest is None:
    assert [shlex.split(line) for line in shown.stdout.splitlines()] == calls
  assert bench.bash("-c", shown.stdout).returncode == 0  # pasted
  assert bench.calls() == calls
  assert manifest is None or stdin.read_text() == manifest


@pytest.mark.parametrize(
  "script,arguments",
  [case[:2] for case in CASES if case[0] != "slurm.sbatch"],
  ids=[name for name in IDS if "slurm" not in name],
)
def test_a_tool_that_fails_is_one_line_and_ends_the_script(script, arguments, bench):
  done = bench.script(script, *arguments, CODE="3")
  assert done.returncode == 1
  assert re.fullmatch(r"error: '(gcloud|kubectl) [^\n]*' ended with exit code 3\n", done.stderr)
  assert len(bench.calls()) == 1


def test_status_does_not_look_for_hosts_before_they_are_there(bench):
  done = bench.script("tpu_pod.sh", "status", *POD, "--queued", STATE="WAITING_FOR_RESOURCES")
  assert (done.returncode, done.stdout) == (0, "WAITING_FOR_RESOURCES\n")
  assert bench.calls() == [
    [*TPUS, "queued-resources", "describe", "pod", "--zone=us-east5-a", "--format=value(state.state)"]
  ]


@pytest.mark.parametrize(
  "script,arguments,part",
  [
    ("tpu_pod.sh", [], "no subcommand: not one of create, fill, "),
    ("tpu_pod.sh", ["begin", *POD], "begin: not one of create, fill, "),
    ("tpu_pod.sh", ["stop", "--zone=z"], "--name: missing"),
    ("tpu_pod.sh", ["stop", "--name=pod"], "--zone: missing"),
    ("tpu_pod.sh", ["stop", *POD, "--project="], "--project: write --project=VALUE"),
    ("tpu_pod.sh", ["stop", *POD, "--project", "p"], "--project: write --project=VALUE"),
    ("tpu_pod.sh", ["stop", *POD, "--queued=yes"], "--queued: takes no value"),
    ("tpu_pod.sh", ["stop", *POD, "--spot"], "--spot: no option of this subcommand"),
    ("tpu_pod.sh", ["stop", *POD, "now"], "now: not an option"),
    ("tpu_pod.sh", ["stop", *POD, "--", "--config=a.py"], "--config=a.py: only start takes "),
    ("tpu_pod.sh", ["create", *POD], "--type: missing"),
    ("tpu_pod.sh", ["create", *POD, "--type=v9-16"], "--type=v9-16: no runtime version known for it"),
    ("tpu_pod.sh", ["create", *POD, "--type=v5p-16", "--num-slices=2"], "--num-slices=2: needs --queued"),
    ("tpu_pod.sh", ["create", *POD, "--type=v5p-16", "--num-slices=0", "--queued"], "--num-slices=0: must "),
    ("tpu_pod.sh", ["start", *POD], "--config: missing"),
    ("tpu_pod.sh", ["start", *POD, "--", "--workdir=/runs/a"], "--config: missing"),
    ("tpu_pod.sh", ["start", *POD, "--", "--config=a.py"], "--workdir: missing"),
    ("tpu_pod.sh", ["start", *POD, "--", "--config=a.py", "--workdir=gs://a"], "--workdir: must be an "),
    ("gke.sh", ["begin"], "begin: not one of start, follow, status, stop"),
    ("gke.sh", ["stop"], "--name: missing"),
    ("gke.sh", ["stop", "--name=Llama_1"], "--name=Llama_1: must be up to 40 of a-z"),
    ("gke.sh", ["start", *GKE[:-1], "--", *PROGRAM], "--topology: missing"),
    ("gke.sh", ["start", *GKE], "--config: missing"),
    ("gke.sh", ["start", *GKE, "--topology=2by2", "--", *PROGRAM], "--topology=2by2: must be of the form 4x4"),
    (
      "gke.sh",
      ["start", *GKE, "--topology=3x3", "--", *PROGRAM],
      "--topology=3x3: its 9 chips are not a multiple of --chips-per-host=4",
    ),
    ("gke.sh", ["start", *GKE, "--chips-per-host=none", "--", *PROGRAM], "--chips-per-host=none: must "),
    ("gke.sh", ["start", *GKE, "--", "--config=a.py", "--workdir=/tmp/a"], "--workdir: must be below /runs"),
    ("gke.sh", ["start", *GKE, "--", *PROGRAM, "a\nb"], "a line break or tab in an argument"),
    ("slurm.sbatch", ["--workdir=/runs/a"], "--config: missing"),
    ("slurm.sbatch", ["--dry-run", "--config=a.py"], "--workdir: missing"),
    ("slurm.sbatch", PROGRAM, "not a Slurm job"),
  ],
)
def test_a_mistake_is_one_line_and_calls_nothing(script, arguments, part, bench):
  done = bench.script(script, *arguments)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith(f"error: {part}") and done.stderr.count("\n") == 1
  assert bench.calls() == []


@pytest.mark.parametrize(
  "script,arguments,tool", [("tpu_pod.sh", ["stop", *POD], "gcloud"), ("gke.sh", ["stop", "--name=llama"], "kubectl")]
)
def test_a_tool_that_is_not_installed_is_a_mistake(script, arguments, tool, bench, tmp_path):
  (tmp_path / "few").mkdir()
  (tmp_path / "few" / "dirname").symlink_to(shutil.which("dirname"))
  done = bench.script(script, *arguments, PATH=str(tmp_path / "few"))
  assert (done.returncode, done.stderr.count("\n")) == (2, 1)
  assert done.stderr.startswith(f"error: {tool}: not found; install ")


@pytest.mark.parametrize(
  "script,subcommands",
  [
    ("tpu_pod.sh", ["create", "fill", "start", "follow", "status", "stop", "delete"]),
    ("gke.sh", ["start", "follow", "status", "stop"]),
  ],
)
def test_help_shows_every_subcommand(script, subcommands, bench):
  done = bench.script(script, "--help")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith("Training on ") and "set -euo" not in done.stdout
  assert re.findall(rf"^  launch/{script} (\w+)", done.stdout, re.MULTILINE) == subcommands


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
  tool = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
  assert tool, "shellcheck is missing; pip install -e '.[test]'"
  done = subprocess.run([tool, "--external-sources", LAUNCH / script], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("seed", range(3))
def test_any_argument_survives_the_two_shells_between(seed, bench):
  rng = np.random.default_rng(seed)
  letters = list("ab '\"\\$`!&|;<>(){}[]*?~#%=\u00e9\n\t")
  words = ["".join(rng.choice(letters, size=size)) for size in rng.integers(0, 9, size=20)]
  shown = bench.script("tpu_pod.sh", "start", "--dry-run", *POD, "--", *PROGRAM, *words)
  commands = shlex.split(shown.stdout)  # of two lines, each beginning with gcloud
  assert commands.count("gcloud") == 2
  text = commands[-1].removeprefix("--command=")
  assert shlex.split(text)[3:] == [*PROGRAM, *words]
  printed = bench.bash("-c", text.replace(f"{HOST} start", "printf '%s\\0'", 1))
  assert printed.stdout.split("\0")[:-1] == [*PROGRAM, *words]


def test_fill_sends_the_tracked_files_as_they_are_and_a_host_installs_them(bench):
  bench.make_repository()
  head = (bench.repo / ".git" / "HEAD").read_text()
  shown = bench.script("tpu_pod.sh", "fill", "--dry-run", *POD)
  assert (shown.returncode, bench.calls()) == (0, []) and not (bench.repo / "dist").exists()
  done = bench.script("tpu_pod.sh", "fill", *POD)
  assert (done.returncode, done.stderr) == (0, "")
  archive = bench.repo / "dist" / "pod.tar.gz"
  copy, unpack = calls = bench.calls()
  assert copy == [*TPUS, "tpu-vm", "scp", str(archive), "pod:diffeq-nnx.tar.gz", "--zone=us-east5-a", "--worker=all"]
  assert unpack[:-1] == remote("all", "")[:-1]
  with tarfile.open(archive) as files:
    names = set(files.getnames())
    assert files.extractfile("changed").read() == b"new"
  assert {"kept", "changed", "launch/tpu_host.sh"} <= names and not {"deleted", "untracked"} & names
  assert (bench.repo / ".git" / "HEAD").read_text() == head and (bench.repo / "changed").read_text() == "new"
  archive.unlink()
  assert bench.bash("-c", shown.stdout).returncode == 0  # pasted
  assert bench.calls() == calls and archive.exists()

  shutil.copy(archive, bench.home / "diffeq-nnx.tar.gz")
  folder = bench.home / "diffeq-nnx"
  write_tool(bench.bin / "uv", RECORDER)
  install = ["uv", "pip", "install", "--python=venv/bin/python", "jax[tpu]", "--editable", "src"]
  for first in (True, False):  # the second time over the first
    assert bench.bash("-c", unpack[-1].removeprefix("--command=")).returncode == 0
    assert (folder / "src" / "changed").read_text() == "new"
    assert bench.calls() == [["uv", "venv", "--python=3.12", "venv"]] * first + [install]
    write_tool(folder / "venv" / "bin" / "python", RECORDER)


def test_queued_resources_are_filled_on_all_nodes(bench):
  bench.make_repository()
  assert bench.script("tpu_pod.sh", "fill", *POD, "--queued").returncode == 0
  for call in bench.calls():
    assert call[3] == "queued-resources" and {"--worker=all", "--node=all"} <= set(call)


class Host:
  """One host of a pod, filled, with a stand-in for its Python; runs the strings that tpu_pod.sh sends."""

  def __init__(self, bench: Bench):
    self._bench, self.folder = bench, bench.home / "diffeq-nnx"
    shutil.copytree(bench.repo, self.folder / "src")
    write_tool(self.folder / "venv" / "bin" / "python", WAITER)

  @property
  def log(self) -> str:
    return (self.folder / "run.log").read_text()

  def send(self, subcommand: str, *program: str) -> list[subprocess.CompletedProcess]:
    """Runs the commands of a subcommand until one fails, as tpu_pod.sh would."""
    assert self._bench.script("tpu_pod.sh", subcommand, *POD, *program).returncode == 0
    done = []
    for call in self._bench.calls():
      if call[4] == "ssh" and not (done and done[-1].returncode):
        done.append(self._bench.bash("-c", call[-1].removeprefix("--command=")))
    return done


def test_a_host_starts_detached_refuses_a_second_start_and_stops_with_sigterm(bench):
  host = Host(bench)
  program = ["--", *PROGRAM, "--config.data.source=text:/runs/it's a/*.txt"]
  idle, started = host.send("start", *program)  # returns, though the program goes on
  assert (idle.returncode, started.returncode) == (0, 0)
  process = bench.waiter()
  assert f"started process {process}" in started.stdout
  wait_for(lambda: host.log.splitlines() == ["-m", "diffeq_nnx.main", *program[1:]])
  os.kill(process, signal.SIGHUP)  # what the end of a connection could send
  assert f"running, process {process}" in host.send("status")[0].stdout

  (refused,) = host.send("start", *program)
  assert refused.returncode == 1 and f"process {process} is already running; stop it first" in refused.stderr
  for subcommand in (["start", *PROGRAM], ["install"]):  # without asking all hosts first
    again = bench.bash(str(host.folder / "src" / "launch" / "tpu_host.sh"), *subcommand)
    assert again.returncode == 1 and "is already running" in again.stderr
  os.kill(process, 0)

  (stopped,) = host.send("stop")
  assert stopped.returncode == 0 and "not running; the log ends: exit code 0" in stopped.stdout
  assert host.log.splitlines()[-2:] == ["told", "exit code 0"]
  with pytest.raises(ProcessLookupError):
    os.kill(process, 0)
  assert host.send("stop")[0].returncode == 0  # nothing to stop is no mistake


def test_a_host_takes_no_other_process_for_the_program(bench):
  host = Host(bench)
  (host.folder / "run.pid").write_text(f"{os.getpid()}\n")  # as after the host started again
  assert "not running; the log ends: no log" in host.send("status")[0].stdout
  assert host.send("stop")[0].returncode == 0


def test_a_host_that_is_not_filled_says_so(bench):
  assert bench.script("tpu_pod.sh", "start", *POD, "--", *PROGRAM).returncode == 0
  done = bench.bash("-c", bench.calls()[0][-1].removeprefix("--command="))
  assert done.returncode == 127 and "diffeq-nnx/src/launch/tpu_host.sh: No such file" in done.stderr


def test_the_manifest_says_what_was_asked_for(bench):
  words = ["--config.a=x y", 'it\'s "b" \\ $(HOME) ${name} $$ & é: #', "", "null", "12"]
  done = bench.script("gke.sh", "start", *GKE, "--num-slices=3", "--max-restarts=7", "--", *PROGRAM, *words)
  assert (done.returncode, done.stderr) == (0, "")
  manifest = bench.manifest()
  assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  assert manifest["metadata"]["name"] == "llama"
  assert manifest["metadata"]["annotations"] == {
    "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
  }
  assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
  (slices,), job = manifest["spec"]["replicatedJobs"], bench.job()
  assert (slices["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (3, 4, 4, 0)
  pod = job["template"]["spec"]
  assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 600)
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
    "cloud.google.com/gke-tpu-topology": "2x2x4",
  }
  (container,) = pod["containers"]
  assert container["image"] == "gcr.io/p/diffeq:1"
  assert container["resources"] == {"requests": {"google.com/tpu": 4}, "limits": {"google.com/tpu": 4}}
  (claim,), (mount,) = pod["volumes"], container["volumeMounts"]
  assert claim["persistentVolumeClaim"] == {"claimName": "runs"}
  assert (mount["name"], mount["mountPath"]) == (claim["name"], "/runs")
  # Kubernetes reads $$ as $
  assert [word.replace("$$", "$") for word in container["args"]] == [*PROGRAM, *words]
  assert not re.search(r"\$\(", "".join(container["command"]))  # Kubernetes would replace it
  mistakes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
  assert (mistakes["containerName"], mistakes["values"]) == (container["name"], [2])


@pytest.mark.parametrize("topology,chips,hosts", [("2x4", 8, 1), ("16x16", 4, 64), ("1x1", 1, 1)])
def test_hosts_of_a_slice(topology, chips, hosts, bench):
  size = [f"--topology={topology}", f"--chips-per-host={chips}"]
  done = bench.script("gke.sh", "start", *GKE, *size, "--", *PROGRAM)
  assert done.returncode == 0
  assert bench.job()["completions"] == hosts


@pytest.mark.parametrize("told,code,expected", [(False, 0, 0), (False, 2, 2), (True, 0, 143), (True, 1, 143)])
def test_a_pod_that_was_told_to_go_fails_so_that_the_job_resumes(told, code, expected, bench):
  assert bench.script("gke.sh", "start", *GKE, "--", *PROGRAM, "a b").returncode == 0
  container = bench.job()["template"]["spec"]["containers"][0]
  write_tool(bench.bin / "python", WAITER if told else RECORDER)
  process = subprocess.Popen(
    [*container["command"], *container["args"]],
    stdout=subprocess.PIPE,
    text=True,
    env=bench.environment(CODE=str(code)),
  )
  if told:
    bench.waiter()
    process.terminate()
  out, _ = process.communicate(timeout=30)
  assert process.returncode == expected
  if told:
    assert out.splitlines() == ["-m", "diffeq_nnx.main", *PROGRAM, "a b", "told"]


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_slurm_job_ends_with_the_code_of_its_tasks(code, bench):
  assert bench.script("slurm.sbatch", *PROGRAM, SLURM_JOB_ID="7", CODE=code).returncode == int(code)
  assert [call[0] for call in bench.calls()] == ["srun"]


@pytest.mark.parametrize(
  "sent,code,requeued", [(signal.SIGUSR1, 0, True), (signal.SIGUSR1, 1, False), (signal.SIGTERM, 0, False)]
)
def test_only_the_time_limit_queues_a_slurm_job_again(sent, code, requeued, bench):
  write_tool(bench.bin / "srun", WAITER)
  write_tool(bench.home / "scancel", RECORDER)
  write_tool(
    bench.bin / "scancel",
    """#!/usr/bin/env bash
kill -TERM "$(cat "$HOME/waiter.pid")"
exec "$HOME/scancel" "$@"
""",
  )
  process = subprocess.Popen(
    [BASH, bench.repo / "launch" / "slurm.sbatch", *PROGRAM],
    stdout=subprocess.PIPE,
    text=True,
    env=bench.environment(SLURM_JOB_ID="7", CODE=str(code)),
  )
  task = bench.waiter()
  process.send_signal(sent)
  if sent == signal.SIGTERM:  # Slurm sends it to the tasks itself
    os.kill(task, signal.SIGTERM)
  out, _ = process.communicate(timeout=30)
  assert process.returncode == code and out.endswith("told\n")
  calls = [["scancel", "--signal=TERM", "7"]] if sent == signal.SIGUSR1 else []
  assert bench.calls() == calls + ([["scontrol", "requeue", "7"]] if requeued else [])


def test_slurm_has_a_task_a_gpu_and_warns_the_script_itself():
  text = (LAUNCH / "slurm.sbatch").read_text()
  options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
  assert options["gres"] == f"gpu:{options['ntasks-per-node']}"
  assert options["signal"] == "B:USR1@120" and "requeue" in options
  assert not {"gpus-per-task", "gpu-bind"} & set(options)  # jax.distributed picks the GPU by the local id


def test_the_image_has_what_its_links_point_to(tmp_path):
  """The Dockerfile's COPY lines, done here."""
  lines = re.findall(r"^COPY (.+) (\S+)$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)
  for names, place in lines:
    for name in names.split():
      source = LAUNCH.parent / name
      if source.is_dir():
        shutil.copytree(source, tmp_path / place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
      else:
        shutil.copy(source, tmp_path / place)
  assert (tmp_path / "diffeq_nnx" / "main.py").exists() and (tmp_path / "configs").is_dir()
  assert [str(path) for path in tmp_path.rglob("*") if not path.exists()] == []  # broken links


@pytest.mark.parametrize("script", ["tpu_pod.sh", "gke.sh"])
def test_a_script_can_be_run_as_a_file(script):
  assert os.access(LAUNCH / script, os.X_OK)
