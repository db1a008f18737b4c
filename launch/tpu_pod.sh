#!/usr/bin/env bash
# Training on every host of a TPU pod (Cloud TPU VMs).
#
#   launch/tpu_pod.sh create --name=NAME --zone=ZONE --type=v5p-16 [--version=VERSION] [--spot]
#                            [--queued [--num-slices=N]]
#   launch/tpu_pod.sh fill   --name=NAME --zone=ZONE    # copies this checkout to all hosts, installs it
#   launch/tpu_pod.sh start  --name=NAME --zone=ZONE -- --config=CONFIG --workdir=DIR [--job=evaluate]
#   launch/tpu_pod.sh follow --name=NAME --zone=ZONE [--host=0] [--slice=0]
#   launch/tpu_pod.sh status --name=NAME --zone=ZONE    # exit code and newest health or error line of each host
#   launch/tpu_pod.sh stop   --name=NAME --zone=ZONE    # SIGTERM: writes a checkpoint, then exits
#   launch/tpu_pod.sh delete --name=NAME --zone=ZONE    # writes no checkpoint; stop first
#   launch/tpu_pod.sh keep   --name=NAME --zone=ZONE --type=v5p-16 [--version=VERSION] [--spot] [--num-slices=N]
#                            [--max-restarts=10] [--poll-seconds=60]
#                            -- --config=CONFIG --workdir=gs://BUCKET/DIR
#
# Every subcommand takes --project=PROJECT, and --dry-run, which only prints the commands. With --queued the pod
# is requested as a queued resource, and status shows when it is ACTIVE; give --queued to the other subcommands
# too. --num-slices=N requests N slices of --type (multislice). The runtime version follows from --type unless
# --version is given. create and keep first print what they create.
#
# keep does all of it, for a queued resource: creates, fills, starts, and looks every --poll-seconds. A pod that was
# preempted is deleted and created again, and a program that failed is started again, at most --max-restarts times
# together. When the job has ended, on all hosts with exit code 0, or on one with 2 (an error in the command), keep
# prints the hosts' status, deletes the pod and ends with that code; with 1 if there were too many restarts. Let it run
# where it stays, e.g. in tmux. If it is killed, the job goes on, and the same command watches it again. A name belongs
# to one job. stop ends the job, and so keep.
#
# Host 0 of slice 0 prints all; the other hosts print only errors.
#
# The work directory is a bucket's, --workdir=gs://BUCKET/DIR, which the service account of the pod must be allowed
# to write, or a directory on a file system that all hosts share (Filestore or other NFS, Lustre), mounted by you at
# one path on every host. The same holds for text other than `builtin`. NFS is mounted with, for example,
#
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='
#     sudo apt-get install -y nfs-common && sudo mkdir -p /mnt/runs && sudo mount SERVER:/SHARE /mnt/runs'
#
# start leaves the program running on every host; the terminal may be closed. After stop, or after a preempted
# pod was deleted, created and filled again, the same start resumes. fill copies the files that git tracks, with
# uncommitted changes. Exit codes: 2 for an error in the command, 1 if gcloud fails.

set -euo pipefail
unset CDPATH  # with which cd prints where it goes
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR
source "$here/common.sh"
root=$(dirname "$here")

name='' zone='' project='' type='' version='' spot='' queued='' host=0 slice=0
max_restarts=10 poll_seconds=60

# runtime_version TYPE: Google's runtime version for JAX on this accelerator type.
runtime_version() {
  case $1 in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) mistake "--type=$1: no runtime version known for it; give --version=VERSION" ;;
  esac
}

# size: slices, chips and hosts of --num-slices and --type, whose number counts TensorCores, two a chip, or chips.
size() {
  local number=${type##*-}
  case $type in
    *-*[!0-9]* | *-0*) slices "$type" '' '' ;;
    v2-* | v3-* | v4-* | v5p-*) slices "$type" $((number / 2)) $(((number + 7) / 8)) ;;
    v5litepod-* | v6e-*) slices "$type" "$number" '' ;;
    *) slices "$type" '' '' ;;
  esac
}

# on_hosts HOST SLICE COMMAND: runs a shell command on a host of a slice; all means each.
on_hosts() {
  local hosts=(--worker="$1")
  [ -z "$queued" ] || hosts+=(--node="$2")
  run "${tpus[@]}" ssh "$name" "${where[@]}" "${hosts[@]}" --ssh-flag=-oServerAliveInterval=30 --command="$3"
}

# on_all_hosts SUBCOMMAND ARGUMENT...: runs a subcommand of tpu_host.sh on all hosts.
on_all_hosts() {
  on_hosts all all "bash diffeq-nnx/src/launch/tpu_host.sh $(quote "$@")"
}

create() {
  local flags=(--accelerator-type="$type")
  if [ -z "$queued" ]; then
    flags+=(--version="$version")
  elif [ "$num_slices" = 1 ]; then
    flags+=(--runtime-version="$version" --node-id="$name")
  else
    flags+=(--runtime-version="$version" --node-count="$num_slices" --node-prefix="$name")
  fi
  [ -z "$spot" ] || flags+=(--spot)
  run "${tpus[@]}" create "$name" "${where[@]}" "${flags[@]}"
}

# pack: the archive of this checkout.
pack() {
  # git stash create writes the tracked files with uncommitted changes to an unreferenced commit
  # shellcheck disable=SC2016  # the inner shell expands these
  run bash -c 'cd "$0" && mkdir -p dist && tree=$(git stash create) &&
    git archive --format=tar.gz --output="$1" "${tree:-HEAD}"' "$root" "$archive"
}

# send: copies the archive to all hosts and installs it.
send() {
  local hosts=(--worker=all)
  [ -z "$queued" ] || hosts+=(--node=all)
  run "${tpus[@]}" scp "$archive" "$name:diffeq-nnx.tar.gz" "${where[@]}" "${hosts[@]}"
  on_hosts all all "rm -rf diffeq-nnx-new && mkdir diffeq-nnx-new && tar -xzf diffeq-nnx.tar.gz -C\
 diffeq-nnx-new && bash diffeq-nnx-new/launch/tpu_host.sh install"
}

fill() {
  pack
  send
}

start() {
  on_all_hosts idle  # all are checked before the first one starts
  on_all_hosts start "${program[@]}"
}

follow() {
  on_hosts "$host" "$slice" 'tail -n 20 -F diffeq-nnx/run.log'
}

status() {
  local state field=state
  [ -z "$queued" ] || field=state.state
  state=$(run "${tpus[@]}" describe "$name" "${where[@]}" --format="value($field)")
  echo "$state"
  case ${dry_run:-$state} in
    yes | READY | ACTIVE) on_all_hosts status ;;
  esac
}

stop() {
  on_all_hosts stop
}

delete() {
  local flags=("${where[@]}")
  [ -z "$queued" ] || flags+=(--force)  # its nodes first
  run "${tpus[@]}" delete "$name" "${flags[@]}"
}

# end CODE REASON: deletes the pod and ends keep.
end() {
  (delete) || [ "$1" != 0 ] || exit 1
  [ "$1" = 0 ] || fail "$1" "$2"
  echo "$2"
  exit
}

# again REASON: counts a restart of keep.
again() {
  [ "$restarts" -lt "$max_restarts" ] || end 1 "$1, and --max-restarts=$max_restarts is reached"
  restarts=$((restarts + 1))
  echo "$1: restart $restarts of $max_restarts"
}

# replace REASON: deletes the pod, so that keep creates it again.
replace() {
  again "$1"
  (delete) || true  # the next look finds it still there
  started='' answering=0 silent=0
}

# attend: looks at the hosts of a pod that is there: starts the program, or ends keep if the job has ended.
attend() {
  local report='' answers
  report=$(on_hosts all all '[ ! -e diffeq-nnx/src ] || bash diffeq-nnx/src/launch/tpu_host.sh status') || report=error
  answers=$(grep -cE ': (not )?running, ' <<<"$report") || true
  if [[ $report = error || $answers -lt $answering ]]; then  # gcloud leaves out a slice that it can't reach
    silent=$((silent + 1))
    [ "$silent" -lt 3 ] || replace 'hosts gave no answer three times'
    return
  fi
  silent=0 answering=$answers
  ! grep -q ': running, ' <<<"$report" || return 0
  [ -z "$report" ] || echo "$report"
  ! grep -qE ': not running, exit code 2(;|$)' <<<"$report" || end 2 'exit code 2: an error in the command'
  [[ $answers = 0 || $(grep -cE ': not running, exit code 0(;|$)' <<<"$report") != "$answers" ]] ||
    end 0 'the job has ended'
  [ -z "$started" ] || again 'the program failed'
  started=yes
  (send && start) || true  # the next look finds it not running
}

keep() {
  local state='' seen='' started='' answering=0 silent=0 restarts=0
  pack  # once, so that every start has the same code
  if [ -n "$dry_run" ]; then  # as when nothing fails
    create
    send
    start
    on_all_hosts status
    delete
    return
  fi
  export CLOUDSDK_CORE_DISABLE_PROMPTS=1  # nobody is there to confirm
  while :; do
    state=$("${tpus[@]}" describe "$name" "${where[@]}" --format='value(state.state)' 2>&1) || true
    [ "$state" = "$seen" ] || echo "$(date '+%F %T') ${state%%$'\n'*}"
    case $state in
      *NOT_FOUND*) (create) || { [ "$restarts" != 0 ] && again 'not created'; } || exit 1 ;;
      *ERROR*) [ -n "$seen" ] || exit 1 ;;
      *ACTIVE) attend ;;
      *SUSPENDED | *FAILED) replace "${state##*$'\n'}" ;;
    esac
    seen=$state
    sleep "$poll_seconds"
  done
}

subcommand=${1-}
case $subcommand in
  create) parse 'name zone project type version num-slices' 'spot queued dry-run' "${@:2}" ;;
  keep)
    queued=yes
    parse 'name zone project type version num-slices max-restarts poll-seconds' 'spot queued dry-run' "${@:2}"
    ;;
  follow) parse 'name zone project host slice' 'queued dry-run' "${@:2}" ;;
  fill | start | status | stop | delete) parse 'name zone project' 'queued dry-run' "${@:2}" ;;
  -h | --help)
    usage
    exit
    ;;
  *) mistake "${subcommand:-no subcommand}: not one of create, fill, start, follow, status, stop, delete, keep" ;;
esac
require name zone
require_count num-slices
require_count max-restarts 0
require_count poll-seconds
require_count host 0
require_count slice 0
[ "$num_slices" = 1 ] || [ -n "$queued" ] || mistake "--num-slices=$num_slices: needs --queued"
[ "$slice" = 0 ] || [ -n "$queued" ] || mistake "--slice=$slice: needs --queued"
require_program "$subcommand"
if [ "$subcommand" = start ]; then
  [[ $workdir == /* || $workdir == gs://* ]] ||
    mistake "--workdir=$workdir: must be gs://BUCKET/DIR, or an absolute path on a file system that all hosts share"
fi
if [[ $subcommand == create || $subcommand == keep ]]; then
  require type
  [ -n "$version" ] || version=$(runtime_version "$type")
fi
if [ "$subcommand" = keep ]; then
  [[ $workdir == gs://* ]] ||
    mistake "--workdir=$workdir: must be gs://BUCKET/DIR with keep; nothing else is there after a pod was created again"
fi
require_tool gcloud "the Google Cloud CLI"

archive=$root/dist/$name.tar.gz
where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")
tpus=(gcloud compute tpus tpu-vm)
[ -z "$queued" ] || tpus=(gcloud compute tpus queued-resources)
case $subcommand in
  create) creates "${queued:+queued }TPU $name in $zone${spot:+, spot}: $(size); billed until it is deleted" ;;
  keep) creates "queued TPU $name in $zone${spot:+, spot}: $(size); deleted when the job has ended" ;;
esac
"$subcommand"
