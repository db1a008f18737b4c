"""python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny [--job=JOB]"""

import os
import pathlib
import re
import sys
import traceback
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.errors import RunError, UserError, printable
from diffeq_nnx.jobs import ALIASES, JOBS

CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment's config file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the run: checkpoints, metrics, results.")
JOB = flags.DEFINE_enum("job", "train", [*JOBS, *ALIASES], "What to do.")
FROM_WORKDIR = flags.DEFINE_string("from_workdir", None, "For jobs that make a run from another: that run.")
flags.DEFINE_list(
  "num_steps",
  None,
  "Number of solver steps; for evaluate also several, e.g. 4,6,8,12. Default: for evaluate, generate and harness "
  "eval.num_steps if set; otherwise, and for the other jobs, the model's own.",
)
flags.DEFINE_list("step_sizes", None, "For discretize and finetune: the size of each step instead, e.g. 3,1.5,1.5.")
flags.DEFINE_float(
  "tolerance",
  None,
  "For discretize: choose the fewest steps whose validation loss is within this, in nats per token, of that of many.",
)
flags.DEFINE_multi_string("prompt", None, "For generate: the text to continue; may be given several times.")
flags.DEFINE_string("prompts", None, "For generate: a file of JSON lines with the key `prompt`, in place of --prompt.")
flags.DEFINE_integer("rows", None, "For generate: prompts that are continued at a time; default: all, up to 64.")
flags.DEFINE_integer("draft_steps", None, "For generate: number of solver steps that draft tokens; default: no drafts.")
flags.DEFINE_integer("draft_tokens", None, "For generate: tokens drafted at a time; default: 4.")
flags.DEFINE_integer("max_tokens", None, "For generate: the largest number of new tokens; default: 128.")
flags.DEFINE_float("temperature", None, "For generate: divides the logits; 0: greedy; default: 1.")
flags.DEFINE_integer("top_k", None, "For generate: sample among this many most likely tokens; default: all.")
flags.DEFINE_float(
  "top_p",
  None,
  "For generate: sample among the fewest most likely tokens that together have this probability; default: 1.",
)
flags.DEFINE_integer("seed", None, "For generate: random seed; default: 0.")
flags.DEFINE_string("out", None, "For export: the folder to make. For generate: the file for the answers to --prompts.")
flags.DEFINE_enum(
  "format",
  None,
  ["hf", "hf_code", "stablehlo"],
  "For export: hf (the default: GPT-2, Llama or Qwen where they can hold the model), hf_code (our own modeling file) "
  "or stablehlo.",
)
flags.DEFINE_string("from_hf", None, "For import: a Hugging Face folder, a model's name on the hub, or a GGUF file.")
flags.DEFINE_string("text", None, "For analyze: the text whose sensitivity is measured; default: an English sentence.")
flags.DEFINE_integer("position", None, "For analyze: the output token, from 0; negative: from the end; default: -1.")
flags.DEFINE_integer("leading", None, "For analyze: number of Lyapunov exponents of each token; default: 16.")
flags.DEFINE_list("times", None, "For analyze: times of the spectra, e.g. 0,0.5,1; default: the solver's.")
flags.DEFINE_string(
  "baseline",
  None,
  "For harness: the work directory of another evaluated run, or a results.json of lm_eval, to compare with.",
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; detected on TPU pods and Slurm.")
NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes",
  None,
  "Number of processes of the job; goes with --coordinator. 1 alone: no detection of other processes.",
)
JOIN_SECONDS = flags.DEFINE_integer("join_seconds", 100, "How long to wait for the other processes at the start.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0; goes with --coordinator.")

HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")  # [madvise]: granted to those that ask

_overrides: list[str] = []  # KEY=VALUE of each --config.KEY=VALUE that changes a run's own config


def run(argv: list[str]) -> None:
  """Checks the flags and starts the job."""
  if len(argv) > 1:
    raise UserError(f"{argv[1]}: not a flag; flags are written --name=value")
  name = ALIASES.get(JOB.value, JOB.value)
  job = JOBS[name]
  options = _options(name)
  if WORKDIR.value is None:
    raise UserError("--workdir: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  holds_run = files.exists(os.path.join(WORKDIR.value, config_lib.RUN_FILE))
  if CONFIG.value is None and (job.config == "file" or job.config == "file_or_run" and not holds_run):
    raise UserError("--config: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  if CONFIG.value is not None and job.config == "source":
    raise UserError(f"--config: --job={name} takes the config of the run in --from_workdir; leave it out")
  config = None if CONFIG.value is None else config_lib.from_config_dict(CONFIG.value)
  if config is None and job.config == "optional":
    config = config_lib.changed(config_lib.Config(), _overrides)
  from diffeq_nnx.parallel import distributed  # after the flags, so that mistakes in them are reported at once
  from diffeq_nnx.runs import buckets, workdir

  for flag in (WORKDIR, FROM_WORKDIR) if name != "prepare" else ():  # whose directory is of shards
    buckets.check(flag.value or "", flag.name)
  if config is None:
    flag = FROM_WORKDIR if job.config == "source" else WORKDIR
    config = config_lib.changed(job.prepared(workdir.config_of(str(flag.value), flag.name)), _overrides)
  distributed.start(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, JOIN_SECONDS.value)
  if not distributed.leads():
    logging.set_verbosity(logging.ERROR)  # process 0 logs for all
  with distributed.in_one_line():
    distributed.agree(config, name, WORKDIR.value, options)
    job.function(config, WORKDIR.value, **options)
  distributed.finish()


def _options(name: str) -> dict[str, Any]:
  """The values of the flags of the job of this name, as keyword arguments of its function."""
  given: dict[str, Any] = {}
  for flag in dict.fromkeys(flag for job in JOBS.values() for flag in job.flags):
    value = flags.FLAGS[flag].value
    if flag in JOBS[name].flags:
      given[flag] = value
    elif value is not None:
      jobs = [other for other, job in JOBS.items() if flag in job.flags]
      value = ",".join(value) if isinstance(value, list) else value
      raise UserError(f"--{flag}={value}: is for --job={' or '.join(jobs)}, and this is --job={name}; leave it out")
  for either in JOBS[name].required:
    either = (either,) if isinstance(either, str) else either
    if all(given[flag] is None for flag in either):
      raise UserError(f"--{either[0]}: missing; e.g. --job={name} {JOBS[name].example}")
  for flag in ("step_sizes", "times"):
    if given.get(flag):
      try:
        given[flag] = tuple(map(float, given[flag]))
      except ValueError:
        raise UserError(f"--{flag}={','.join(given[flag])}: must be numbers, e.g. 0.5,0.25,0.25") from None
  if given.get("num_steps"):
    given["num_steps"] = _num_steps(name, given["num_steps"])
  if "prompt" in given:
    given["prompts_file"], given["prompts"] = given.pop("prompts"), given.pop("prompt")
  return {flag: value for flag, value in given.items() if value is not None}


def _num_steps(job: str, parts: list[str]) -> int | tuple[int, ...]:
  """The flag's one number, or for evaluate perhaps several."""
  try:
    counts = tuple(map(int, parts))
  except ValueError:
    raise UserError(f"--num_steps={','.join(parts)}: must be a whole number, e.g. 12") from None
  if len(counts) == 1:
    return counts[0]
  if job != "evaluate":
    raise UserError(f"--num_steps={','.join(parts)}: several are for --job=evaluate, and this is --job={job}; give one")
  return counts


def parse(argv: list[str]) -> list[str]:
  """absl's flag parsing, with every mistake reported in one line."""
  logging.set_verbosity(logging.ERROR)  # ml_collections warns of each place where it found no config file
  try:
    _check_overrides(argv)
    return flags.FLAGS(_without_overrides(argv))
  except (flags.Error, UserError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise SystemExit(fail(_cause(error), 2)) from None


def _check_overrides(argv: list[str]) -> None:
  """Checks every `--config.KEY=VALUE` against the known keys and their types, before any file is read."""
  types = config_lib.key_types()
  for argument in argv[1:]:
    name, _, value = argument.lstrip("-").partition("=")
    path = value.partition(":")[0]
    if name == "config" and not os.path.isfile(path):
      raise UserError(
        f"--config={value}: there is no file {path!r}; give the path of a config file, e.g. configs/tiny.py"
      )
    if not argument.startswith("-") or not name.startswith("config."):
      continue
    key = name.removeprefix("config.")
    if key not in types:
      raise UserError(f"{key}: unknown key; {config_lib.nearest(key, types)}")
    if types[key] in (int, float):
      try:
        types[key](value)
      except ValueError:
        raise UserError(
          f"{key}={value!r}: must be of type {types[key].__name__}; write --config.{key}="
          f"{'10' if types[key] is int else '0.1'}, say"
        ) from None


def _without_overrides(argv: list[str]) -> list[str]:
  """All arguments; without a config file, those that set none of its keys: the others are put into `_overrides`."""
  _overrides.clear()
  if "config" in [argument.lstrip("-").partition("=")[0] for argument in argv]:
    return argv
  is_setting = lambda argument: re.match(r"--?config\..*=", argument)
  _overrides.extend(argument.lstrip("-").removeprefix("config.") for argument in argv[1:] if is_setting(argument))
  return [argv[0], *(argument for argument in argv[1:] if not is_setting(argument))]


def _cause(error: BaseException) -> BaseException | str:
  """The UserError that a config file raised, which ml_collections hides in the text of a traceback."""
  found = re.search(r"UserError: (.*)$", str(error), re.MULTILINE)
  return found[1] if found else error


def fail(error: BaseException | str, code: int) -> int:
  """Prints the error in one line on stderr, and returns the code.

  An error that all processes raise is printed by process 0, any other by the process that met it.
  """
  process, count = _whoami()
  everywhere = getattr(error, "everywhere", False)
  if not everywhere or process == 0:
    prefix = "" if everywhere or count == 1 else f"process {process}: "
    print(f"error: {prefix}" + printable(" ".join(str(error).split())), file=sys.stderr, flush=True)
  return code


def _whoami() -> tuple[int, int]:
  """(number of this process, number of processes); (0, 1) before the processes have joined."""
  module = sys.modules.get("diffeq_nnx.parallel.distributed")  # importing it takes seconds
  return module.whoami() if module else (0, 1)


def main(argv: list[str]) -> int:
  """Exit code 2 for mistakes that the user can correct, 1 for a run that can't continue, 130 for Ctrl-C."""
  logging.set_verbosity(logging.WARNING)
  try:
    run(argv)
    return 0
  except UserError as found:
    error, code = found, fail(found, 2)
  except RunError as found:
    error, code = found, fail(found, 1)
  except KeyboardInterrupt:
    error = RunError("interrupted; run the same command to continue from what is finished")
    code = fail(error, 130)
  except OSError as found:
    place = f"{found.filename}: " if found.filename else ""
    error = RunError(f"{place}{found.strerror or found}; check the name, the permissions and the network")
    code = fail(error, 1)
  except Exception as found:
    traceback.print_exc()
    error = RunError(f"{type(found).__name__}: {found}; unexpected: the lines above say where, please report them")
    code = fail(error, 1)
  if _whoami()[1] > 1:
    sys.modules["diffeq_nnx.parallel.distributed"].finish()
    if not getattr(error, "everywhere", False):
      sys.stderr.flush()
      os._exit(code)  # at once, so that the processes that wait for this one notice
  return code


def _with_huge_pages() -> None:
  """Starts this process again with the C library's huge pages, where Linux grants them to programs that ask.

  A train step on a CPU spends a quarter of its time on finding pages of 4 KiB. The C library reads the setting once.
  """
  setting = "GLIBC_TUNABLES"
  if setting not in os.environ and HUGE_PAGES.exists() and "[madvise]" in HUGE_PAGES.read_text():
    os.execve(sys.executable, sys.orig_argv, os.environ | {setting: "glibc.malloc.hugetlb=1"})


def _program(argv: list[str]) -> int:
  """As `main`; after a failure it ends at once, so that no thread of a library prints a traceback after the line."""
  _with_huge_pages()
  code = main(argv)
  if code == 1:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  return code


if __name__ == "__main__":
  app.run(_program, flags_parser=parse)
