"""`tpu_pod.sh keep`, run against a stand-in for gcloud that answers from a script."""

import re

import pytest

from tests.launch_bench import POD, bench, write_tool  # noqa: F401  bench is a fixture

PROGRAM = ["--config=configs/llama1b.py", "--workdir=gs://bucket/run"]
KEEP = ["keep", *POD, "--type=v5p-16", "--num-slices=2", "--spot"]

# records the subcommand; answers to describe and status are taken from the file answers, one line each
GCLOUD = r"""#!/usr/bin/env bash
case "$*" in
  *' describe '*) what=describe ;;
  *'tpu_host.sh status') what=status ;;
  *'tpu_host.sh install') what=install ;;
  *'tpu_host.sh idle') what=idle ;;
  *'tpu_host.sh start '*) what=start ;;
  *) what=$4 ;;
esac
case $what in
  describe | status)
    read -r answer <"$HOME/answers" || { kill "$PPID"; exit 1; }
    sed -i 1d "$HOME/answers"
    case $answer in
      ERROR*) echo "$answer" >&2; exit 1 ;;
      *) printf "$answer" ;;
    esac
    ;;
  *) echo "$what" >>"$HOME/record" ;;
esac
case " ${FAIL-} " in *" $what "*) exit 1 ;; esac
"""
NOT_THERE = "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found."
BOTH = "a: {0}\\nb: {0}\\n"
RUNNING = BOTH.format("running, process 7; health: step 3")
ENDED = BOTH.format("not running, exit code 0")
EMPTY = ""  # hosts that are not filled
CREATE, START = ["create"], ["scp", "install", "idle", "start"]
FIRST = [NOT_THERE, "ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE", EMPTY, "ACTIVE", RUNNING]  # until it runs

MOMENT = ["ACTIVE", "ERROR: ssh", "ACTIVE", "ERROR: ssh", "ERROR: UNAVAILABLE"]
# one of two slices is left out where gcloud can't reach it
SILENT = ["ACTIVE", "ERROR: ssh", "ACTIVE", "a: running, process 7\\n", "ACTIVE", "ERROR: ssh"]
ONCE = [*CREATE, *START, "delete"]
SIZE = "creates: queued TPU pod in us-east5-a, spot: 2 slices of v5p-16, 16 chips on 4 hosts"
MISTAKE = "a: not running, exit code 1\\nb: not running, exit code 2; error: no such config\\n"
FAILED = "error: the program failed, and --max-restarts=2 is reached\n"
# one host ended with 0, the other not, three times
FAILURES = [
  f"a: not running, {said}\\nb: not running, exit code 0\\n" for said in ("exit code 1", "no exit code", "exit code 20")
]
ENDS = "the job has ended\n"
REFUSED = "ended with exit code 1\n"

# what happens: gcloud's answers and the call that fails; then the exit code, the number of restarts, the calls that
# change something, what stands on stdout, and how stderr ends
CASES = {
  "it ends, after moments without an answer": (
    ([*FIRST, *MOMENT, "ACTIVE", RUNNING, *MOMENT, "ACTIVE", ENDED], ""),
    (0, 0, ONCE, ENDS, ""),
  ),
  "it is suspended, and then silent": (
    ([*FIRST, "SUSPENDING", "SUSPENDED", *FIRST, *SILENT, *FIRST, "ACTIVE", ENDED], ""),
    (0, 2, ONCE * 3, ENDS, ""),
  ),
  "an error in the command": (([*FIRST, "ACTIVE", MISTAKE], ""), (2, 0, ONCE, "", ": an error in the command\n")),
  "the program fails": (
    ([*FIRST, "ACTIVE", FAILURES[0], "ACTIVE", FAILURES[1], "ACTIVE", FAILURES[2]], ""),
    (1, 2, [*CREATE, *START * 3, "delete"], "", FAILED),
  ),
  "keep was killed, and takes over": (
    (["ACTIVE", RUNNING, "ACTIVE", ENDED], ""),
    (0, 0, ["delete"], ENDS, f"{SIZE}; deleted when the job has ended\n"),
  ),
  "gcloud does not create": (([NOT_THERE], "create"), (1, 0, CREATE, "", REFUSED)),
  "gcloud does not delete": ((["ACTIVE", ENDED], "delete"), (1, 0, ["delete"], "", REFUSED)),
  "the project can not be asked": ((["ERROR: PERMISSION_DENIED: no"], ""), (1, 0, [], "PERMISSION_DENIED: no\n", "")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_goes_on_in_a_new_pod_until_it_has_ended_or_can_not(case, bench):
  (answers, fails), (code, restarts, calls, out, err) = CASES[case]
  bench.make_repository()
  (bench.home / "answers").write_text("\n".join(answers) + "\n")
  write_tool(bench.bin / "gcloud", GCLOUD)
  done = bench.script("tpu_pod.sh", *KEEP, "--max-restarts=2", "--", *PROGRAM, FAIL=fails)
  record = bench.home / "record"
  assert not (bench.home / "answers").read_text().strip(), "it ended before its time"
  assert (done.returncode, record.read_text().split() if record.exists() else []) == (code, calls)
  assert out in done.stdout and done.stderr.endswith(err), done.stderr
  assert re.findall(r": restart (\d) of 2\n", done.stdout) == ["1", "2"][:restarts]


def test_a_dry_run_shows_the_commands_of_a_job_without_failures(bench):
  shown = bench.script("tpu_pod.sh", *KEEP, "--dry-run", "--", *PROGRAM)
  assert shown.returncode == 0 and bench.calls() == [] and not (bench.repo / "dist").exists()
  bench.make_repository()
  assert bench.bash("-c", shown.stdout).returncode == 0  # pasted
  calls = bench.calls()
  assert [call[4] for call in calls] == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
  assert all(call[3] == "queued-resources" for call in calls)
