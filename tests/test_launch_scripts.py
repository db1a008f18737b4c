"""The shell launchers, run with stand-ins for gcloud, kubectl and Slurm that record how they were called."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from tests.launch_bench import ALIVE, GKE, HOST, LAUNCH, POD, PROGRAM, RECORDER, TPUS, bench, write_tool  # noqa: F401  bench is a fixture

NAMES = {
  "pod": shlex.join(POD),
  "gke": shlex.join(GKE),
  "program": shlex.join(PROGRAM),
  "vm": "gcloud compute tpus tpu-vm",
  "queued": "gcloud compute tpus queued-resources",
  "zone": "--zone=us-east5-a",
  "alive": ALIVE,
  "host": HOST,
}


def split(text: str) -> list[str]:
  """The words of a command line with these names filled in."""
  return shlex.split(text.format(**NAMES))


# command lines, and indented below each what is said about what will be created, and the calls that it leads to; fill
# is tested by itself
CALLS = r"""
tpu_pod.sh create {pod} --type=v5p-16
  creates: TPU pod in us-east5-a: 1 slice of v5p-16, 8 chips on 2 hosts; billed until it is deleted
  {vm} create pod {zone} --accelerator-type=v5p-16 --version=v2-alpha-tpuv5
tpu_pod.sh create {pod} --type=v6e-32 --queued --spot --project=p
  creates: queued TPU pod in us-east5-a, spot: 1 slice of v6e-32, 32 chips; billed until it is deleted
  {queued} create pod {zone} --project=p --accelerator-type=v6e-32 --runtime-version=v2-alpha-tpuv6e --node-id=pod \
      --spot
tpu_pod.sh create {pod} --type=v5litepod-16 --queued --num-slices=2
  creates: queued TPU pod in us-east5-a: 2 slices of v5litepod-16, 32 chips; billed until it is deleted
  {queued} create pod {zone} --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-count=2 \
      --node-prefix=pod
tpu_pod.sh create {pod} --type=v9-16 --version=mine
  creates: TPU pod in us-east5-a: 1 slice of v9-16; billed until it is deleted
  {vm} create pod {zone} --accelerator-type=v9-16 --version=mine
tpu_pod.sh start {pod} -- {program} '--config.data.source=text:/runs/a b/*.txt'
  {vm} ssh pod {zone} --worker=all {alive} '--command={host} idle'
  {vm} ssh pod {zone} --worker=all {alive} \
      "--command={host} start {program} '--config.data.source=text:/runs/a b/*.txt'"
tpu_pod.sh follow {pod}
  {vm} ssh pod {zone} --worker=0 {alive} '--command=tail -n 20 -F diffeq-nnx/run.log'
tpu_pod.sh follow {pod} --queued --host=3 --slice=1
  {queued} ssh pod {zone} --worker=3 --node=1 {alive} '--command=tail -n 20 -F diffeq-nnx/run.log'
tpu_pod.sh status {pod}
  {vm} describe pod {zone} '--format=value(state)'
  {vm} ssh pod {zone} --worker=all {alive} '--command={host} status'
tpu_pod.sh stop {pod}
  {vm} ssh pod {zone} --worker=all {alive} '--command={host} stop'
tpu_pod.sh delete {pod}
  {vm} delete pod {zone}
tpu_pod.sh delete {pod} --queued --project=p
  {queued} delete pod {zone} --project=p --force
gke.sh start {gke} --num-slices=2 --spot -- {program}
  creates: JobSet llama, spot: 2 slices of tpu-v5p-slice 2x2x4, 32 chips on 8 hosts, at most 10 restarts
  kubectl create --filename=-
gke.sh follow --name=llama --namespace=ml --host=3 --slice=1
  kubectl --namespace=ml logs --follow --tail=20 --selector=jobset.sigs.k8s.io/jobset-name=llama,\
jobset.sigs.k8s.io/job-index=1,batch.kubernetes.io/job-completion-index=3
gke.sh status --name=llama
  kubectl get jobset llama
  kubectl get pods --selector=jobset.sigs.k8s.io/jobset-name=llama --output=wide
gke.sh stop --name=llama
  kubectl delete jobset llama --cascade=foreground
slurm.sbatch {program} '--config.data.source=text:/runs/a b/*.txt'
  srun --kill-on-bad-exit=1 --cpus-per-task=8 .venv/bin/python -m diffeq_nnx.main {program} \
      '--config.data.source=text:/runs/a b/*.txt'
""".replace("\\\n", "")


def read_cases() -> list[tuple[str, str, list[list[str]]]]:
  """(command line, what is said, the calls) of each case."""
  cases = re.findall(r"^(\S.*)\n(?:  (creates: .*\n))?((?: .*\n)+)", CALLS, re.MULTILINE)
  return [(command, said, [split(call) for call in calls.splitlines()]) for command, said, calls in cases]


@pytest.mark.parametrize("command,said,calls", read_cases())
def test_a_subcommand_calls_its_tool_a_dry_run_prints_just_that_and_a_failure_is_one_line(command, said, calls, bench):
  script, *arguments = split(command)
  done = bench.script(script, *arguments, SLURM_JOB_ID="7")
  assert (done.returncode, done.stderr) == (0, said)
  assert bench.calls() == calls
  stdin = pathlib.Path(f"{bench.record}.stdin")
  manifest = stdin.read_text() if stdin.exists() else None
  place = 0 if script == "slurm.sbatch" else 1
  shown = bench.script(script, *arguments[:place], "--dry-run", *arguments[place:])
  assert (shown.returncode, shown.stderr) == (0, said)
  assert bench.calls() == []
  if manifest is None:
    assert [shlex.split(line) for line in shown.stdout.splitlines()] == calls
  assert bench.bash("-c", shown.stdout).returncode == 0  # pasted
  assert bench.calls() == calls
  assert manifest is None or stdin.read_text() == manifest
  if script != "slurm.sbatch":
    failed = bench.script(script, *arguments, CODE="3")
    told = re.escape(said) + r"error: '(gcloud|kubectl) [^\n]*' ended with exit code 3\n"
    assert failed.returncode == 1 and re.fullmatch(told, failed.stderr) and len(bench.calls()) == 1


def test_status_does_not_look_for_hosts_before_they_are_there(bench):
  done = bench.script("tpu_pod.sh", "status", *POD, "--queued", STATE="WAITING_FOR_RESOURCES")
  assert (done.returncode, done.stdout) == (0, "WAITING_FOR_RESOURCES\n")
  assert bench.calls() == [
    [*TPUS, "queued-resources", "describe", "pod", "--zone=us-east5-a", "--format=value(state.state)"]
  ]


@pytest.mark.parametrize(
  "command,part",
  [
    ("tpu_pod.sh", "no subcommand: not one of create, fill, "),
    ("tpu_pod.sh stop --name=pod", "--zone: missing"),
    ("tpu_pod.sh stop {pod} --project=", "--project: write --project=VALUE"),
    ("tpu_pod.sh stop {pod} --queued=yes", "--queued: takes no value"),
    ("tpu_pod.sh stop {pod} --spot", "--spot: no option of this subcommand"),
    ("tpu_pod.sh stop {pod} now", "now: not an option"),
    ("tpu_pod.sh stop {pod} -- --config=a.py", "--config=a.py: stop takes none of the program"),
    ("tpu_pod.sh create {pod} --type=v9-16", "--type=v9-16: no runtime version known for it"),
    ("tpu_pod.sh create {pod} --type=v5p-16 --num-slices=2", "--num-slices=2: needs --queued"),
    ("tpu_pod.sh create {pod} --type=v5p-16 --num-slices=0 --queued", "--num-slices=0: must "),
    ("tpu_pod.sh keep {pod} --type=v5p-16 -- {program}", "--workdir=/runs/a: must be gs://BUCKET/DIR with keep"),
    ("tpu_pod.sh start {pod} -- '--config=a.py --workdir=gs://bucket/a'", "--workdir: missing"),
    ("tpu_pod.sh start {pod} -- --config=a.py --workdir=runs/a", "--workdir=runs/a: must be gs://BUCKET/DIR, "),
    ("gke.sh stop --name=Llama_1", "--name=Llama_1: must be up to 40 of a-z"),
    ("gke.sh start {gke} --topology=2by2 -- {program}", "--topology=2by2: must be of the form 4x4"),
    ("gke.sh start {gke} --topology=3x3 -- {program}", "--topology=3x3: its 9 chips are not a multiple of --chips"),
    ("gke.sh start {gke} -- --config=a.py --workdir=/tmp/a", "--workdir=/tmp/a: must be gs://BUCKET/DIR, "),
    ("gke.sh start {gke} -- {program} 'a\nb'", "a line break or tab in an argument"),
    ("slurm.sbatch --config=a.py", "--workdir: missing"),
    ("slurm.sbatch {program}", "not a Slurm job"),
  ],
)
def test_a_mistake_is_one_line_and_calls_nothing(command, part, bench):
  done = bench.script(*split(command))
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith(f"error: {part}") and done.stderr.count("\n") == 1
  assert bench.calls() == []


def test_a_tool_that_is_not_installed_is_a_mistake(bench, tmp_path):
  (tmp_path / "few").mkdir()
  (tmp_path / "few" / "dirname").symlink_to(shutil.which("dirname"))
  for command, tool in (("tpu_pod.sh stop {pod}", "gcloud"), ("gke.sh stop --name=llama", "kubectl")):
    done = bench.script(*split(command), PATH=str(tmp_path / "few"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {tool}: not found; install ")


def test_scripts_are_executable_and_help_shows_every_subcommand(bench):
  for script, subcommands in (
    ("tpu_pod.sh", ["create", "fill", "start", "follow", "status", "stop", "delete", "keep"]),
    ("gke.sh", ["start", "follow", "status", "stop"]),
  ):
    done = bench.script(script, "--help")
    assert (done.returncode, done.stderr) == (0, "") and os.access(LAUNCH / script, os.X_OK)
    assert done.stdout.startswith("Training on ") and "set -euo" not in done.stdout
    assert re.findall(rf"^  launch/{script} (\w+)", done.stdout, re.MULTILINE) == subcommands


def test_shellcheck_finds_nothing():
  tool = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
  assert tool, "shellcheck is missing; pip install -e '.[test]'"
  scripts = [path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch")]
  done = subprocess.run([tool, "--external-sources", *scripts], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def test_any_argument_survives_the_two_shells_between(bench):
  rng = np.random.default_rng(0)
  letters = list("ab '\"\\$`!&|;<>(){}[]*?~#%=\u00e9\n\t")
  words = ["".join(rng.choice(letters, size=size)) for size in rng.integers(0, 9, size=60)]
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
  done = bench.script("tpu_pod.sh", "fill", *POD)
  assert (done.returncode, done.stderr) == (0, "")
  archive = bench.repo / "dist" / "pod.tar.gz"
  copy, unpack = bench.calls()
  assert copy == [*TPUS, "tpu-vm", "scp", str(archive), "pod:diffeq-nnx.tar.gz", "--zone=us-east5-a", "--worker=all"]
  assert unpack[:-1] == split("{vm} ssh pod {zone} --worker=all {alive}")
  with tarfile.open(archive) as files:
    names = set(files.getnames())
    assert files.extractfile("changed").read() == b"new"
  assert {"kept", "changed", "launch/tpu_host.sh"} <= names and not {"deleted", "untracked"} & names
  assert (bench.repo / ".git" / "HEAD").read_text() == head and (bench.repo / "changed").read_text() == "new"
  assert bench.script("tpu_pod.sh", "fill", *POD, "--queued").returncode == 0
  for call in bench.calls():
    assert call[3] == "queued-resources" and {"--worker=all", "--node=all"} <= set(call)

  shutil.copy(archive, bench.home / "diffeq-nnx.tar.gz")
  folder = bench.home / "diffeq-nnx"
  write_tool(bench.bin / "uv", RECORDER)
  install = ["uv", "pip", "install", "--python=venv/bin/python", "jax[tpu]", "--editable", "src[gcs]"]
  for first in (True, False):  # the second time over the first
    assert bench.bash("-c", unpack[-1].removeprefix("--command=")).returncode == 0
    assert (folder / "src" / "changed").read_text() == "new"
    assert bench.calls() == [["uv", "venv", "--python=3.12", "venv"]] * first + [install]
    write_tool(folder / "venv" / "bin" / "python", RECORDER)
