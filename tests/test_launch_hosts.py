"""What the shell launchers start on hosts, in pods and under Slurm, run with stand-ins for their tools."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from tests.launch_bench import BASH, GKE, LAUNCH, POD, PROGRAM, RECORDER, WAITER, Bench, bench, wait_for, write_tool  # noqa: F401  bench is a fixture


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
  assert bench.script("tpu_pod.sh", "start", *POD, "--", *PROGRAM).returncode == 0
  done = bench.bash("-c", bench.calls()[0][-1].removeprefix("--command="))
  assert done.returncode == 127 and "diffeq-nnx/src/launch/tpu_host.sh: No such file" in done.stderr  # not filled
  host = Host(bench)
  (host.folder / "run.pid").write_text(f"{os.getpid()}\n")  # another process, as after the host started again
  assert "not running, never started" in host.send("status")[0].stdout
  assert host.send("stop")[0].returncode == 0
  program = ["--", *PROGRAM, "--config.data.source=text:/runs/it's a/*.txt"]
  idle, started = host.send("start", *program)  # returns, though the program goes on
  assert (idle.returncode, started.returncode) == (0, 0)
  process = bench.waiter()
  assert f"started process {process}" in started.stdout
  said = ["start: " + " ".join(program[1:]), "-m", "diffeq_nnx.main", *program[1:]]
  wait_for(lambda: host.log.splitlines() == said)
  os.kill(process, signal.SIGHUP)  # what the end of a connection could send
  assert f"running, process {process}" in host.send("status")[0].stdout

  (refused,) = host.send("start", *program)
  assert refused.returncode == 1 and f"process {process} is already running; stop it first" in refused.stderr
  for subcommand in (["start", *PROGRAM], ["install"]):  # without asking all hosts first
    again = bench.bash(str(host.folder / "src" / "launch" / "tpu_host.sh"), *subcommand)
    assert again.returncode == 1 and "is already running" in again.stderr
  os.kill(process, 0)

  (stopped,) = host.send("stop")
  assert stopped.returncode == 0 and "not running, exit code 0" in stopped.stdout
  assert host.log.splitlines()[-2:] == ["told", "exit code 0"]
  with pytest.raises(ProcessLookupError):
    os.kill(process, 0)
  assert host.send("stop")[0].returncode == 0  # nothing to stop is no mistake


def test_the_status_of_a_host_has_the_newest_health_line_of_this_start_and_no_exit_code_after_a_shutdown(bench):
  host = Host(bench)
  write_tool(
    host.folder / "venv" / "bin" / "python",
    """#!/usr/bin/env bash
    echo "health: step 1, loss 5.0"
    echo "health: step 2, loss 4.0"
    echo "step 2/9: a later line"
    exit 1
    """,
  )
  name = host.send("stop")[0].stdout.split(":")[0]
  host.send("start", "--", *PROGRAM)
  wait_for(lambda: "exit code" in host.log)
  assert host.send("status")[0].stdout == f"{name}: not running, exit code 1; health: step 2, loss 4.0\n"
  write_tool(host.folder / "venv" / "bin" / "python", WAITER)
  host.send("start", "--", *PROGRAM)
  process = bench.waiter()
  assert host.send("status")[0].stdout == f"{name}: running, process {process}\n"
  parent = int(subprocess.run(["ps", "-o", "ppid=", str(process)], capture_output=True, text=True).stdout)
  for told in (parent, process):
    os.kill(told, signal.SIGTERM)
  wait_for(lambda: "told" in host.log)
  wait_for(lambda: host.send("status")[0].stdout == f"{name}: not running, no exit code\n")


def test_the_manifest_says_what_was_asked_for(bench):
  words = ["--config.a=x y", 'it\'s "b" \\ $(HOME) ${name} $$ & é: #', "", "null", "12"]
  done = bench.script("gke.sh", "start", *GKE, "--num-slices=3", "--max-restarts=7", "--", *PROGRAM, *words)
  assert done.returncode == 0
  manifest = bench.manifest()
  assert manifest["metadata"]["name"] == "llama"
  assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
  (slices,), job = manifest["spec"]["replicatedJobs"], bench.job()
  assert (slices["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (3, 4, 4, 0)
  pod = job["template"]["spec"]
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
  assert "tolerations" not in pod
  mistakes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
  assert (mistakes["containerName"], mistakes["values"]) == (container["name"], [2])


def test_a_bucket_needs_no_volume_and_spot_nodes_are_asked_for_on_all_hosts(bench):
  start = ["start", *(word for word in GKE if not word.startswith(("--volume", "--topology"))), "--spot"]
  program = ["--config=a.py", "--workdir=gs://bucket/run"]
  assert bench.script("gke.sh", *start, "--topology=16x16", "--chips-per-host=8", "--", *program).returncode == 0
  assert bench.job()["completions"] == 32
  pod = bench.job()["template"]["spec"]
  assert "volumes" not in pod and "volumeMounts" not in pod["containers"][0]
  assert pod["containers"][0]["args"] == program
  assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true" and len(pod["nodeSelector"]) == 3
  spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
  assert pod["tolerations"] == [spot]


def test_a_pod_that_was_told_to_go_fails_so_that_the_job_resumes(bench):
  assert bench.script("gke.sh", "start", *GKE, "--", *PROGRAM, "a b").returncode == 0
  container = bench.job()["template"]["spec"]["containers"][0]
  command = [*container["command"], *container["args"]]
  write_tool(bench.bin / "python", RECORDER)
  for code in (0, 2):
    assert subprocess.run(command, env=bench.environment(CODE=str(code)), timeout=30).returncode == code
  write_tool(bench.bin / "python", WAITER)
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=bench.environment(CODE="0"))
  bench.waiter()
  process.terminate()
  out, _ = process.communicate(timeout=30)
  assert process.returncode == 143
  assert out.splitlines() == ["-m", "diffeq_nnx.main", "--join_seconds=1800", *PROGRAM, "a b", "told"]


@pytest.mark.parametrize(
  "sent,code,requeued", [(signal.SIGUSR1, 0, True), (signal.SIGUSR1, 1, False), (signal.SIGTERM, 0, False)]
)
def test_a_slurm_job_has_the_code_of_its_tasks_and_only_the_time_limit_requeues_it(sent, code, requeued, bench):
  assert bench.script("slurm.sbatch", *PROGRAM, SLURM_JOB_ID="7", CODE=str(code)).returncode == code
  assert [call[0] for call in bench.calls()] == ["srun"]
  write_tool(bench.bin / "srun", WAITER)
  write_tool(bench.home / "scancel", RECORDER)
  write_tool(
    bench.bin / "scancel",
    """#!/usr/bin/env bash
kill -TERM "$(cat "$HOME/waiter.pid")"
exec "$HOME/scancel" "$@"
""",
  )
  words = [BASH, bench.repo / "launch" / "slurm.sbatch", *PROGRAM]
  environment = bench.environment(SLURM_JOB_ID="7", CODE=str(code))
  process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
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
