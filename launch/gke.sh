#!/usr/bin/env bash
# Training on TPU slices of a GKE Standard cluster that has JobSet (https://jobset.sigs.k8s.io).
#
#   docker build --file=launch/Dockerfile --tag=IMAGE . && docker push IMAGE
#   launch/gke.sh start  --name=NAME --image=IMAGE --accelerator=tpu-v5p-slice --topology=2x2x2
#                        [--volume=CLAIM] [--num-slices=N] [--chips-per-host=4] [--spot] [--max-restarts=10]
#                        -- --config=CONFIG --workdir=gs://BUCKET/DIR [--job=evaluate]
#   launch/gke.sh follow --name=NAME [--host=0] [--slice=0]
#   launch/gke.sh status --name=NAME
#   launch/gke.sh stop   --name=NAME    # SIGTERM: writes a checkpoint, then the JobSet is deleted
#
# Every subcommand takes --namespace=NAMESPACE, and --dry-run, which prints manifest and commands without running
# them. The cluster is that of kubectl's current context. --accelerator is the node label
# cloud.google.com/gke-tpu-accelerator: tpu-v4-podslice, tpu-v5-lite-podslice (v5e), tpu-v5p-slice,
# tpu-v6e-slice. --topology is that of one slice; its chips divided by --chips-per-host are its hosts.
#
# The work directory is a bucket's, which the service account of the node pool must be allowed to write, with a storage
# scope that allows it (pods on the hosts' network, as these are, don't use Workload Identity), or
# --workdir=/runs/DIR: --volume names a PersistentVolumeClaim, mounted at /runs on all hosts, so it must be
# ReadWriteMany (Filestore, Lustre). Text other than `builtin` is in the same places.
#
# start first prints what it creates. --spot asks for nodes of Spot node pools, which without it are not used if they
# have the taint cloud.google.com/gke-spot. A job that loses a host or is preempted restarts automatically, on new
# nodes, and resumes, up to --max-restarts times; processes wait half an hour for each other, as nodes may. A host that
# ends with exit code 2 (an error in the command) ends the job. After stop the same start resumes.
#
# Host 0 of slice 0 prints all; the other hosts print only errors. Exit codes: 2 for an error in the command, 1 if
# kubectl fails. JobSet must be 0.7 or later.

set -euo pipefail
unset CDPATH  # with which cd prints where it goes
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR
source "$here/common.sh"

name='' namespace='' image='' volume='' accelerator='' topology='' spot=''
chips_per_host=4 max_restarts=10 host=0 slice=0

# json WORD...: JSON strings, which are also YAML, separated by commas.
json() {
  local word list='' backslash=\\
  for word in "$@"; do
    word=${word//"$backslash"/"$backslash$backslash"}
    word=${word//\"/"$backslash\""}
    list+="${list:+, }\"$word\""
  done
  printf '%s' "$list"
}

# hosts_of_slice: the chips of the topology divided by the chips of a host.
hosts_of_slice() {
  [[ $topology =~ ^[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,2}$ ]] ||
    mistake "--topology=$topology: must be of the form 4x4 or 2x2x2"
  local chips=$((${topology//x/*}))
  [ $((chips % chips_per_host)) = 0 ] ||
    mistake "--topology=$topology: its $chips chips are not a multiple of --chips-per-host=$chips_per_host"
  echo $((chips / chips_per_host))
}

# manifest HOSTS: jobset.yaml with its placeholders replaced, and without the lines marked for options not given.
# shellcheck disable=SC2016  # placeholders look like variables
manifest() {
  local text omitted=none
  [ -n "$volume" ] || omitted+='|volume'
  [ -n "$spot" ] || omitted+='|spot'
  text=$(grep -vE "# --($omitted)\$" "$here/jobset.yaml")
  text=${text//'${name}'/"$(json "$name")"}
  text=${text//'${image}'/"$(json "$image")"}
  text=${text//'${volume}'/"$(json "$volume")"}
  text=${text//'${accelerator}'/"$(json "$accelerator")"}
  text=${text//'${topology}'/"$(json "$topology")"}
  text=${text//'${hosts}'/"$1"}
  text=${text//'${num_slices}'/"$num_slices"}
  text=${text//'${chips_per_host}'/"$chips_per_host"}
  text=${text//'${max_restarts}'/"$max_restarts"}
  # last, since they may hold any text; Kubernetes reads $$ as $, and would replace $(X)
  local dollars='$$'  # which bash 4.2 and earlier would expand where it is written
  text=${text//'${arguments}'/"[$(json "${program[@]//'$'/$dollars}")]"}
  printf '%s' "$text"
}

start() {
  local hosts filled
  case "$image$volume$accelerator${program[*]}" in
    *[[:cntrl:]]*) mistake "a line break or tab in an argument: not supported" ;;
  esac
  hosts=$(hosts_of_slice)
  creates "JobSet $name${spot:+, spot}: $(slices "$accelerator $topology" $((hosts * chips_per_host)) "$hosts"), at most\
 $max_restarts restarts"
  filled=$(manifest "$hosts")
  if [ -n "$dry_run" ]; then
    printf "%s <<'EOF'\n%s\nEOF\n" "$(quote "${kubectl[@]}" create --filename=-)" "$filled"
  else
    # create rejects a name in use, while apply would change the existing job
    run "${kubectl[@]}" create --filename=- <<<"$filled"
  fi
}

follow() {
  local job="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=$slice"
  run "${kubectl[@]}" logs --follow --tail=20 --selector="$job,batch.kubernetes.io/job-completion-index=$host"
}

status() {
  run "${kubectl[@]}" get jobset "$name"
  run "${kubectl[@]}" get pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --output=wide
}

stop() {
  run "${kubectl[@]}" delete jobset "$name" --cascade=foreground  # waits until the pods are gone
}

subcommand=${1-}
case $subcommand in
  start)
    options='name namespace image volume accelerator topology num-slices chips-per-host max-restarts'
    parse "$options" 'spot dry-run' "${@:2}"
    ;;
  follow) parse 'name namespace host slice' dry-run "${@:2}" ;;
  status | stop) parse 'name namespace' dry-run "${@:2}" ;;
  -h | --help)
    usage
    exit
    ;;
  *) mistake "${subcommand:-no subcommand}: not one of start, follow, status, stop" ;;
esac
require name
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  mistake "--name=$name: must be up to 40 of a-z, 0-9 and -, starting with a letter"
require_program "$subcommand"
require_count host 0
require_count slice 0
if [ "$subcommand" = start ]; then
  require image accelerator topology
  require_count num-slices
  require_count chips-per-host
  require_count max-restarts 0
  [[ -n $volume && $workdir == /runs/* || $workdir == gs://* ]] ||
    mistake "--workdir=$workdir: must be gs://BUCKET/DIR, or below /runs with --volume; other files are lost with the pod"
fi
require_tool kubectl "it (gcloud components install kubectl)"

kubectl=(kubectl)
[ -z "$namespace" ] || kubectl+=(--namespace="$namespace")
"$subcommand"
