# Sourced by tpu_pod.sh and gke.sh: parses options, reports errors, runs or prints commands.
# shellcheck shell=bash

dry_run='' num_slices=1
program=()  # the program's arguments, given after --
workdir=''  # that of the program

# fail CODE MESSAGE: prints one line on stderr and exits.
fail() {
  echo "error: $2" >&2
  exit "$1"
}

# mistake MESSAGE: reports an error that the user can correct.
mistake() {
  fail 2 "$1"
}

# usage: prints the comment at the top of the script.
usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# parse "OPTIONS" "FLAGS" ARGUMENT...: --num-slices=2 sets num_slices=2, --spot sets spot=yes.
parse() {
  local options=" $1 " flags=" $2 " option value
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      --)
        shift
        program=("$@")
        return
        ;;
      --*) ;;
      *) mistake "$1: not an option; write --name=VALUE, and the program's arguments after --" ;;
    esac
    option=${1%%=*}
    option=${option#--}
    if [[ $options == *" $option "* ]]; then
      value=${1#--"$option"}
      value=${value#=}
      [ -n "$value" ] || mistake "--$option: write --$option=VALUE"
    elif [[ $flags == *" $option "* ]]; then
      [ "$1" = "--$option" ] || mistake "--$option: takes no value"
      value=yes
    else
      mistake "--$option: no option of this subcommand; see $0 --help"
    fi
    printf -v "${option//-/_}" %s "$value"
    shift
  done
}

# require OPTION...: checks that each was given.
require() {
  local option variable
  for option in "$@"; do
    variable=${option//-/_}
    [ -n "${!variable}" ] || mistake "--$option: missing; see $0 --help"
  done
}

# require_count OPTION [LEAST]: checks that it is an integer of at least LEAST, by default 1.
require_count() {
  local variable=${1//-/_} least=${2-1}
  [[ ${!variable} =~ ^(0|[1-9][0-9]{0,5})$ && ${!variable} -ge $least ]] ||
    mistake "--$1=${!variable}: must be an integer of at least $least"
}

# require_program SUBCOMMAND: checks that start and keep, and no other subcommand, have the program's arguments; sets
# workdir.
require_program() {
  local word
  if [[ $1 != start && $1 != keep ]]; then
    [ ${#program[@]} -eq 0 ] || mistake "${program[0]}: $1 takes none of the program's arguments"
    return
  fi
  for word in "${program[@]-}"; do
    [[ $word != --workdir=* ]] || workdir=${word#*=}
  done
  [ -n "$workdir" ] ||
    mistake "--workdir: missing; write the program's arguments after --, -- --config=... --workdir=..."
}

# require_tool NAME WHAT: checks that it is installed, except in a dry run.
require_tool() {
  [ -n "$dry_run" ] || command -v "$1" >/dev/null || mistake "$1: not found; install $2"
}

# quote WORD...: prints one line that a shell parses to these words.
quote() {
  local word line='' mark=\' escaped="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) word=\'${word//$mark/"$escaped"}\' ;;
    esac
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# creates WHAT: one line on stderr before anything is created.
creates() {
  echo "creates: $1" >&2
}

# count NUMBER WORD: "1 chip", "2 chips".
count() {
  if [ "$1" = 1 ]; then echo "1 $2"; else echo "$1 ${2}s"; fi
}

# slices TYPE CHIPS HOSTS: what --num-slices slices are together; '' for what is not known.
slices() {
  local text
  text="$(count "$num_slices" slice) of $1"
  [ -z "$2" ] || text+=", $(count $((num_slices * $2)) chip)"
  [ -z "$3" ] || text+=" on $(count $((num_slices * $3)) host)"
  echo "$text"
}

# run COMMAND...: runs it, or with --dry-run prints it in a form that can be pasted.
run() {
  if [ -n "$dry_run" ]; then
    quote "$@"
  else
    "$@" || fail 1 "'${*:1:5}' ended with exit code $?"
  fi
}
