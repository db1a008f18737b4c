#!/usr/bin/env bash
# The part of tpu_pod.sh that runs on each host, as tpu_host.sh SUBCOMMAND [ARGUMENT...].
#
# ~/diffeq-nnx has src/ (the checkout, from which the program runs), venv/, run.log and run.pid.

set -euo pipefail
folder=$HOME/diffeq-nnx

# running: whether the process is running; after a reboot its id may belong to another process.
running() {
  [ -s run.pid ] && [[ $(ps -o args= -p "$(cat run.pid)") == *diffeq_nnx.main* ]]
}

fail() {
  echo "error: $(hostname): $1" >&2
  exit 1
}

# idle: fails if the program is running.
idle() {
  ! running || fail "process $(cat run.pid) is already running; stop it first"
}

# install: moves the checkout of this script to src/ and installs its package.
install() {
  idle
  rm -rf src
  mv "$(dirname "$(dirname "$script")")" src
  export PATH=$HOME/.local/bin:$PATH
  # uv installs its own Python; that of the runtime version may be too old for jax
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  [ -x venv/bin/python ] || uv venv --python=3.12 venv
  uv pip install --python=venv/bin/python 'jax[tpu]' --editable 'src[gcs]'
}

# start ARGUMENT...: starts the program, detached; its output and exit code go to run.log. A host that shuts down ends
# this shell too, so that a program ended by that has no exit code.
start() {
  idle
  rm -f run.pid
  echo "start: $*" >>run.log
  trap '' HUP  # inherited by the program: it survives the end of the connection
  (
    cd src
    PYTHONUNBUFFERED=1 ../venv/bin/python -m diffeq_nnx.main "$@" &
    echo $! >../run.pid
    code=0
    wait $! || code=$?
    echo "exit code $code"
  ) >>run.log 2>&1 </dev/null &
  until [ -s run.pid ]; do sleep 0.1; done
  echo "$(hostname): started process $(cat run.pid)"
}

# status: one line: running or the exit code, and the newest line of this start that begins with health: or error:
status() {
  local state=''
  # the shell that waits for the program writes its exit code a moment after its end
  if running; then state="running, process $(cat run.pid)"; else sleep 1; fi
  touch run.log
  awk -v state="$(hostname): $state" '
    /^start: / { code = "no exit code"; said = "" }
    /^exit code / { code = $0 }
    /^(health|error): / { said = "; " $0 }
    END {
      if (state ~ /: $/) state = state "not running, " (code ? code : "never started")
      print state said
    }' run.log
}

# stop: sends SIGTERM and waits while the checkpoint is written.
stop() {
  if running; then
    kill -TERM "$(cat run.pid)"
    for _ in {1..600}; do
      running || break
      sleep 1
    done
    ! running || fail "process $(cat run.pid) is still running 600 s after SIGTERM"
  fi
  status
}

unset CDPATH  # with which cd prints where it goes
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
mkdir -p "$folder"
cd "$folder"
"$@"
