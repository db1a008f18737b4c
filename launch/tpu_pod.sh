#!/usr/bin/env bash
# Training on every host of a TPU pod (Cloud TPU VMs).
#
#   launch/tpu_pod.sh create --name=NAME --zone=ZONE --type=v5p-16 [--version=VERSION] [--spot]
#                            [--queued [--num-slices=N]]
#   launch/tpu_pod.sh fill   --name=NAME --zone=ZONE    # copies this checkout to all hosts, installs it
#   launch/tpu_pod.sh start  --name=NAME --zone=ZONE -- --config=CONFIG --workdir=DIR [--job=evaluate]
#   launch/tpu_pod.sh follow --name=NAME --zone=ZONE    # the log of host 0, the only one that prints
#   launch/tpu_pod.sh status --name=NAME --zone=ZONE
#   launch/tpu_pod.sh stop   --name=NAME --zone=ZONE    # SIGTERM: writes a checkpoint, then exits
#   launch/tpu_pod.sh delete --name=NAME --zone=ZONE    # writes no checkpoint; stop first
#
# Every subcommand takes --project=PROJECT, and --dry-run, which only prints the commands. With --queued the pod
# is requested as a queued resource, and status shows when it is ACTIVE; give --queued to the other subcommands
# too. --num-slices=N requests N slices of --type (multislice). The runtime version follows from --type unless
# --version is given.
#
# The work directory is a bucket's, --workdir=gs://BUCKET/DIR, which the service account of the pod must be allowed
# to write, or a directory on a file system that all hosts share (Filestore or other NFS, Lustre), mounted by you at
# one path on every host. The same holds for text other than `builtin`. NFS is mounted with, for example,
#
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='sudo apt-get install -y
#     nfs-common && sudo mkdir -p /mnt/runs && sudo mount SERVER:/SHARE /mnt/runs'
#
# start leaves the program running on every host; the terminal may be closed. After stop, or after a preempted
# pod was deleted, created and filled again, the same start resumes. fill copies the files that git tracks, with
# uncommitted changes. Exit codes: 2 for an error in the command, 1 if gcloud fails.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR
source "$here/common.sh"
root=$(dirname "$here")

name='' zone='' project='' type='' version='' spot='' queued='' num_slices=1

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

# on_hosts WHICH COMMAND: runs a shell command on all hosts, or on host 0.
on_hosts() {
  local hosts=(--worker="$1")
  [ -z "$queued" ] || hosts+=(--node="$1")
  run "${tpus[@]}" ssh "$name" "${where[@]}" "${hosts[@]}" --command="$2"
}

# on_all_hosts SUBCOMMAND ARGUMENT...: runs a subcommand of tpu_host.sh on all hosts.
on_all_hosts() {
  on_hosts all "bash diffeq-nnx/src/launch/tpu_host.sh $(quote "$@")"
}

create() {
  local flags=(--accelerator-type="$type")
  [ -n "$version" ] || version=$(runtime_version "$type")
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

fill() {
  local archive=$root/dist/$name.tar.gz hosts=(--worker=all)
  [ -z "$queued" ] || hosts+=(--node=all)
  # git stash create writes the tracked files with uncommitted changes to an unreferenced commit
  # shellcheck disable=SC2016  # the inner shell expands these
  run bash -c 'cd "$0" && mkdir -p dist && tree=$(git stash create) &&
    git archive --format=tar.gz --output="$1" "${tree:-HEAD}"' "$root" "$archive"
  run "${tpus[@]}" scp "$archive" "$name:diffeq-nnx.tar.gz" "${where[@]}" "${hosts[@]}"
  on_hosts all "rm -rf diffeq-nnx-new && mkdir diffeq-nnx-new && tar -xzf diffeq-nnx.tar.gz -C\
 diffeq-nnx-new && bash diffeq-nnx-new/launch/tpu_host.sh install"
}

start() {
  on_all_hosts idle  # all are checked before the first one starts
  on_all_hosts start "${program[@]}"
}

follow() {
  on_hosts 0 'tail -n 20 -F diffeq-nnx/run.log'
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

subcommand=${1-}
case $subcommand in
  create) parse 'name zone project type version num-slices' 'spot queued dry-run' "${@:2}" ;;
  fill | start | follow | status | stop | delete) parse 'name zone project' 'queued dry-run' "${@:2}" ;;
  -h | --help)
    usage
    exit
    ;;
  *) mistake "${subcommand:-no subcommand}: not one of create, fill, start, follow, status, stop, delete" ;;
esac
require name zone
if [ "$subcommand" = create ]; then
  require type
  require_count num-slices
  [ "$num_slices" = 1 ] || [ -n "$queued" ] || mistake "--num-slices=$num_slices: needs --queued"
fi
require_program "$subcommand"
if [ "$subcommand" = start ]; then
  [[ " ${program[*]}" == *' --workdir=/'* || " ${program[*]}" == *' --workdir=gs://'* ]] ||
    mistake "--workdir: must be gs://BUCKET/DIR, or an absolute path on a file system that all hosts share"
fi
require_tool gcloud "the Google Cloud CLI"

where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")
tpus=(gcloud compute tpus tpu-vm)
[ -z "$queued" ] || tpus=(gcloud compute tpus queued-resources)
"$subcommand"
