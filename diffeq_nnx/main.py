"""python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny [--job=JOB]"""

import os
import re
import sys
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.jobs import JOBS

CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment's config file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and metrics go, and are found again.")
JOB = flags.DEFINE_enum("job", "train", list(JOBS), "What to do.")
FROM_WORKDIR = flags.DEFINE_string("from_workdir", None, "For discretize and finetune: the run whose newest model is "
                                   "taken.")
NUM_STEPS = flags.DEFINE_integer("num_steps", None, "For discretize, finetune and export: how many steps, of one size; "
                                 "default: its own. For evaluate, generate, analyse and harness: steps of the solver; "
                                 "default: eval.num_steps (analyse: not), or else its own.")
STEP_SIZES = flags.DEFINE_list("step_sizes", None, "For discretize and finetune: the size of each step instead, e.g. "
                               "0.5,0.25,0.25.")
PROMPT = flags.DEFINE_multi_string("prompt", None, "For generate: the text to go on from; may be given several times.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "For generate: as many tokens at most; default: 128.")
TEMPERATURE = flags.DEFINE_float("temperature", None, "For generate: logits are divided by it; 0: always the likeliest "
                                 "token; default: 1.")
TOP_K = flags.DEFINE_integer("top_k", None, "For generate: draw from so many of the likeliest tokens; default: all.")
TOP_P = flags.DEFINE_float("top_p", None, "For generate: draw from the fewest of the likeliest tokens that together "
                           "have this probability; default: 1.")
SEED = flags.DEFINE_integer("seed", None, "For generate: of the random numbers; default: 0.")
OUT = flags.DEFINE_string("out", None, "For export: the folder to make.")
FORMAT = flags.DEFINE_enum("format", None, ["hf", "hf_exact", "hf_code", "stablehlo"],
                           "For export: hf (the default: GPT-2 or Llama where they hold the model), hf_exact (a wider "
                           "Llama, for its eps), hf_code (our own modelling file) or stablehlo.")
FROM_HF = flags.DEFINE_string("from_hf", None, "For import: a Hugging Face folder of GPT-2 or Llama.")
TEXT = flags.DEFINE_string("text", None, "For analyse: whose tokens the sensitivity is of; default: an English sentence.")
POSITION = flags.DEFINE_integer("position", None, "For analyse: the output token, from 0; negative: from the end; "
                                "default: -1.")
LEADING = flags.DEFINE_integer("leading", None, "For analyse: how many Lyapunov exponents of each token; default: 16.")
TIMES = flags.DEFINE_list("times", None, "For analyse: times of the spectra, e.g. 0,0.5,1; default: the model's own.")
BASELINE = flags.DEFINE_string("baseline", None, "For harness: the work directory of another run that it was done on, or a "
                               "results.json of lm_eval, to be shown beside.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; on TPU pods and Slurm found by itself.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes the job has; goes with --coordinator. "
                                     "1 alone: don't look for others.")
JOIN_SECONDS = flags.DEFINE_integer("join_seconds", 100, "How long to wait for the other processes to come.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which process this is, from 0; goes with --coordinator.")


_overrides: list[str] = []  # KEY=VALUE of each --config.KEY=VALUE that goes on top of a run's own config


def run(argv: list[str]) -> None:
  """Checks the flags and starts the job."""
  if len(argv) > 1:
    raise UserError(f"{argv[1]}: not a flag; flags are written --name=value")
  name, job = JOB.value, JOBS[JOB.value]
  options = _options(name)
  if WORKDIR.value is None:
    raise UserError("--workdir: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  if CONFIG.value is None and job.config == "file":
    raise UserError("--config: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  if CONFIG.value is not None and job.config == "source":
    raise UserError(f"--config: --job={name} takes the config of the run in --from_workdir; leave it out")
  config = None if CONFIG.value is None else config_lib.from_config_dict(CONFIG.value)
  if config is None and job.config == "optional":
    config = config_lib.changed(config_lib.Config(), _overrides)
  from diffeq_nnx.parallel import distributed  # after the flags, so that mistakes in them are reported at once
  from diffeq_nnx.runs import workdir
  if config is None:
    flag = FROM_WORKDIR if job.config == "source" else WORKDIR
    config = config_lib.changed(workdir.config_of(flag.value, flag.name), _overrides)
  distributed.start(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, JOIN_SECONDS.value)
  if not distributed.leads():
    logging.set_verbosity(logging.ERROR)  # process 0 logs for all
  with distributed.in_one_line():
    distributed.agree(config, name, WORKDIR.value, options)
    job.function(config, WORKDIR.value, **options)


def _options(name: str) -> dict[str, object]:
  """The values of the flags of the job of this name, as keyword arguments of its function."""
  given = {}
  for flag in dict.fromkeys(flag for job in JOBS.values() for flag in job.flags):
    value = flags.FLAGS[flag].value
    if flag in JOBS[name].flags:
      given[flag] = value
    elif value is not None:
      jobs = [other for other, job in JOBS.items() if flag in job.flags]
      value = ",".join(value) if isinstance(value, list) else value
      raise UserError(f"--{flag}={value}: is for --job={' or '.join(jobs)}, and this is --job={name}; leave it out")
  for flag in JOBS[name].required:
    if given[flag] is None:
      raise UserError(f"--{flag}: missing; e.g. --job={name} {JOBS[name].example}")
  for flag in ("step_sizes", "times"):
    if given.get(flag):
      try:
        given[flag] = tuple(map(float, given[flag]))
      except ValueError:
        raise UserError(f"--{flag}={','.join(given[flag])}: must be numbers, e.g. 0.5,0.25,0.25") from None
  if "prompt" in given:
    given["prompts"] = given.pop("prompt")
  return {flag: value for flag, value in given.items() if value is not None}


def parse(argv: list[str]) -> list[str]:
  """absl's flag parsing, with every mistake as one line."""
  logging.set_verbosity(logging.ERROR)  # ml_collections warns of each place where it found no config file
  try:
    _check_overrides(argv)
    return flags.FLAGS(_without_overrides(argv))
  except (flags.Error, UserError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise SystemExit(fail(_cause(error), 2)) from None


def _check_overrides(argv: list[str]) -> None:
  """Every `--config.KEY=VALUE` against the known keys and their types, before any file is read."""
  types = config_lib.key_types()
  for argument in argv[1:]:
    name, _, value = argument.lstrip("-").partition("=")
    path = value.partition(":")[0]
    if name == "config" and not os.path.isfile(path):
      raise UserError(f"--config={value}: there is no file {path!r}; give the path of a config file, e.g. "
                      "configs/tiny.py")
    if not argument.startswith("-") or not name.startswith("config."):
      continue
    key = name.removeprefix("config.")
    if key not in types:
      raise UserError(f"{key}: unknown key; {config_lib.nearest(key, types)}")
    if types[key] in (int, float):
      try:
        types[key](value)
      except ValueError:
        raise UserError(f"{key}={value!r}: must be of type {types[key].__name__}; write --config.{key}="
                        f"{'10' if types[key] is int else '0.1'}, say") from None


def _without_overrides(argv: list[str]) -> list[str]:
  """All arguments; where no config file is named, those that set none of its keys: `_overrides` holds the others."""
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
  """Prints the error as one line on stderr, and returns the code.

  Of several processes the first tells what all of them raise, and each what it alone has met.
  """
  process, count = _whoami()
  everywhere = getattr(error, "everywhere", False)
  if not everywhere or process == 0:
    prefix = "" if everywhere or count == 1 else f"process {process}: "
    print(f"error: {prefix}" + " ".join(str(error).split()), file=sys.stderr, flush=True)
  return code


def _whoami() -> tuple[int, int]:
  """(this process, how many); (0, 1) where the processes have not joined."""
  module = sys.modules.get("diffeq_nnx.parallel.distributed")  # which takes seconds to import
  return module.whoami() if module else (0, 1)


def main(argv: list[str]) -> int:
  """Exit code 2 for what the user can put right, 1 for a run that can't go on, 130 for Ctrl-C."""
  logging.set_verbosity(logging.WARNING)
  try:
    run(argv)
    return 0
  except UserError as found:
    error, code = found, fail(found, 2)
  except RunError as found:
    error, code = found, fail(found, 1)
  except KeyboardInterrupt:
    error = RunError("interrupted; run the same command to go on from what is finished")
    code = fail(error, 130)
  except Exception as found:
    if _whoami()[1] == 1:
      raise
    traceback.print_exc()
    error, code = found, 1
  if _whoami()[1] > 1 and not getattr(error, "everywhere", False):
    sys.stderr.flush()
    os._exit(code)  # the others are waiting for this process: so they learn at once that it has gone
  return code


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
