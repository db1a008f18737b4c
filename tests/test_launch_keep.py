"""`tpu_pod.sh keep`, run against a stand-in for gcloud that answers from a script."""

import pytest

from tests.launch_bench import (
  POD,
  bench,  # noqa: F401  a fixture
  write_tool,
)

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


def keep(bench, answers, *options, **changes):
  """What keep did, with these answers of gcloud: the process, and the subcommands that change something."""
  bench.make_repository()
  (bench.home / "answers").write_text("\n".join(answers) + "\n")
  write_tool(bench.bin / "gcloud", GCLOUD)
  write_tool(bench.bin / "sleep", "#!/bin/sh\n")
  done = bench.script("tpu_pod.sh", *KEEP, *options, "--", *PROGRAM, **changes)
  record = bench.home / "record"
  assert not (bench.home / "answers").read_text().strip(), "it ended before its time"
  return done, record.read_text().split() if record.exists() else []


def test_a_job_is_created_filled_started_and_deleted_when_it_has_ended(bench):
  done, calls = keep(bench, [*FIRST, "ACTIVE", RUNNING, "ACTIVE", ENDED])
  assert (done.returncode, calls) == (0, [*CREATE, *START, "delete"])
  size = "2 slices of v5p-16, 16 chips on 4 hosts"
  assert done.stderr == f"creates: queued TPU pod in us-east5-a, spot: {size}; deleted when the job has ended\n"
  assert done.stdout.endswith("b: not running, exit code 0\nthe job has ended\n")


@pytest.mark.parametrize(
  "gone",
  [
    ["SUSPENDING", "SUSPENDED"],
    ["ACTIVE", "ERROR: ssh", "ACTIVE", "ERROR: ssh", "ACTIVE", "ERROR: ssh"],
    ["ACTIVE", "a: running, process 7\\n"] * 3,  # the other slice is left out
  ],
  ids=["suspended", "silent", "a slice silent"],
)
def test_a_pod_that_was_preempted_is_created_again_and_the_job_goes_on(gone, bench):
  done, calls = keep(bench, [*FIRST, *gone, *FIRST, "ACTIVE", ENDED])
  assert (done.returncode, calls) == (0, [*CREATE, *START, "delete", *CREATE, *START, "delete"])
  assert "restart 1 of 10\n" in done.stdout


def test_hosts_that_do_not_answer_for_a_moment_are_no_preemption(bench):
  moment = ["ACTIVE", "ERROR: ssh", "ACTIVE", "ERROR: ssh", "ERROR: UNAVAILABLE"]
  done, calls = keep(bench, [*FIRST, *moment, "ACTIVE", RUNNING, *moment, "ACTIVE", ENDED])
  assert (done.returncode, calls) == (0, [*CREATE, *START, "delete"])


def test_an_error_in_the_command_is_not_tried_again(bench):
  answer = "a: not running, exit code 1\\nb: not running, exit code 2; error: no such config\\n"
  done, calls = keep(bench, [*FIRST, "ACTIVE", answer])
  assert (done.returncode, calls) == (2, [*CREATE, *START, "delete"])
  assert "b: not running, exit code 2; error: no such config\n" in done.stdout
  assert done.stderr.endswith("error: exit code 2: an error in the command\n")


@pytest.mark.parametrize("said", ["exit code 1", "no exit code", "exit code 20", "never started"])
def test_a_program_that_fails_is_started_again_so_many_times(said, bench):
  failed = ["ACTIVE", f"a: not running, {said}\\nb: not running, exit code 0\\n"]
  done, calls = keep(bench, [*FIRST, *failed * 3], "--max-restarts=2")
  assert (done.returncode, calls) == (1, [*CREATE, *START * 3, "delete"])
  assert done.stderr.endswith("error: the program failed, and --max-restarts=2 is reached\n")


def test_keep_that_was_killed_takes_over_a_running_job(bench):
  done, calls = keep(bench, ["ACTIVE", RUNNING, "ACTIVE", ENDED])
  assert (done.returncode, calls) == (0, ["delete"])


@pytest.mark.parametrize("fails,made", [("create", CREATE), ("delete", ["delete"])])
def test_keep_ends_with_an_error_when_gcloud_refuses_for_good(fails, made, bench):
  done, calls = keep(bench, [NOT_THERE] if fails == "create" else ["ACTIVE", ENDED], FAIL=fails)
  assert (done.returncode, calls) == (1, made)
  assert done.stderr.splitlines()[-1].startswith("error: 'gcloud compute tpus queued-resources ")


def test_requests_that_fail_do_not_go_on_for_ever(bench):
  done, calls = keep(bench, [NOT_THERE, "FAILED"] * 3, "--max-restarts=2")
  assert (done.returncode, calls) == (1, ["create", "delete"] * 3)


def test_a_project_that_can_not_be_asked_is_an_error(bench):
  done, calls = keep(bench, ["ERROR: PERMISSION_DENIED: no"])
  assert (done.returncode, calls) == (1, []) and "PERMISSION_DENIED" in done.stdout


def test_a_dry_run_shows_the_commands_of_a_job_without_failures(bench):
  shown = bench.script("tpu_pod.sh", *KEEP, "--dry-run", "--", *PROGRAM)
  assert shown.returncode == 0 and bench.calls() == [] and not (bench.repo / "dist").exists()
  bench.make_repository()
  assert bench.bash("-c", shown.stdout).returncode == 0  # pasted
  calls = bench.calls()
  assert [call[4] for call in calls] == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
  assert all(call[3] == "queued-resources" for call in calls)
