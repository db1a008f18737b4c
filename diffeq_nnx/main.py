"""The command line: python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny [--job=JOB]"""

from collections.abc import Sequence
import io
import os
import re
import sys
import textwrap
import traceback
from typing import Any

from absl import app, flags, logging

from diffeq_nnx import config as config_lib
from diffeq_nnx import files, jobs
from diffeq_nnx.errors import RunError, UserError, printable
from diffeq_nnx.jobs import ALIASES, JOBS

CONFIG = flags.DEFINE_string(
  "config",
  None,
  "The experiment's config file, PATH.py or PATH.py:ARGUMENT, which discretize and continuous don't take; "
  "--config.KEY=VALUE changes a key.",
)
SETTINGS = flags.DEFINE_multi_string("set", [], "KEY=VALUE of a config key, the same as --config.KEY=VALUE.")
WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the run: checkpoints, metrics, results.")
JOB = flags.DEFINE_enum("job", "train", [*JOBS, *ALIASES], "What to do.")
FROM_WORKDIR = flags.DEFINE_string("from_workdir", None, "For jobs that make a run from another: that run.")
flags.DEFINE_list(
  "num_steps",
  None,
  "Number of solver steps; for evaluate also several, e.g. 4,6,8,12. Default: for evaluate, generate and harness "
  "eval.num_steps if set; for rank_steps by loss, which stops there, half of the model's own; else the model's own.",
)
flags.DEFINE_list("step_sizes", None, "For discretize and finetune: the size of each step instead, e.g. 3,1.5,1.5.")
flags.DEFINE_float(
  "tolerance",
  None,
  "For discretize: choose the fewest steps whose validation loss is within this, in nats per token, of that of many.",
)
flags.DEFINE_integer(
  "fit_tokens",
  None,
  "For discretize and finetune with fewer steps: fit these to the states of all steps on this many tokens of text.",
)
flags.DEFINE_integer("tokens", None, "For rank_steps: tokens of text that the losses are measured on; default: 8192.")
flags.DEFINE_enum(
  "by", None, ["loss", "influence"], "For rank_steps: what makes a step matter; influence takes one pass over the text."
)
flags.DEFINE_multi_string("prompt", None, "For generate: the text to continue; may be given several times.")
flags.DEFINE_string("prompts", None, "For generate: a file of JSON lines with the key `prompt`, in place of --prompt.")
flags.DEFINE_bool(
  "chat",
  None,
  "For generate: prompts are messages of a user, or conversations under the key `messages` of --prompts, and the run's "
  "chat template writes them; the text is the assistant's turn.",
)
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
  ["hf", "hf_code", "stablehlo", "peft", "hf_base"],
  "For export: hf (the default: GPT-2, Llama or Qwen where they can hold the model), hf_code (our own modeling file), "
  "stablehlo, peft (the adapters alone) or hf_base (hf without the adapters).",
)
flags.DEFINE_string("base", None, "For export with --format=peft: the base model, a folder or a name on the hub.")
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
HELP_FLAGS = ("-h", "-help", "--help", "--helpshort")  # absl's names
COMMON_FLAGS = ("config", "set", "workdir", "coordinator", "num_processes", "process_id", "join_seconds")


def run(argv: list[str]) -> None:
  """Checks the flags and starts the job."""
  if len(argv) > 1:
    raise UserError(f"{argv[1]}: not a flag; flags are written --name=value")
  name = ALIASES.get(JOB.value, JOB.value)
  job = JOBS[name]
  for flag in (WORKDIR, FROM_WORKDIR) if name != "prepare" else ():  # whose directory is of shards
    if flag.value:
      files.check_place(flag.value, flag.name)
  run_file = os.path.join(WORKDIR.value or "", config_lib.RUN_FILE)
  holds_run = CONFIG.value is None and bool(WORKDIR.value) and files.exists(run_file)
  # No file has the config of a run that was made from another one. It is then read for the parts that it registers.
  registers = CONFIG.value is not None and job.config == "run" and bool(files.read_notes(run_file).get("source"))
  settings = SETTINGS.value
  if job.config == "file_or_source" and (CONFIG.value is not None or holds_run):
    # The job itself applies an order of steps, which is one of the run in --from_workdir.
    settings = [setting for setting in settings if not setting.startswith("model.depth_order=")]
  config = None if CONFIG.value is None else config_lib.load(CONFIG.value, [] if registers else settings)
  options = _options(name)
  if WORKDIR.value is None:
    raise UserError("--workdir: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  if CONFIG.value is None and (job.config == "file" or job.config == "file_or_run" and not holds_run):
    raise UserError("--config: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  if CONFIG.value is not None and job.config == "source":
    raise UserError(f"--config: --job={name} takes the config of the run in --from_workdir; leave it out")
  if config is None and job.config == "optional":
    config = config_lib.apply_settings(job.prepared(config_lib.Config()), SETTINGS.value)
  if job.config in ("optional", "file_or_source"):  # the model is another's, of which a job changes a few keys
    options["model_settings"] = [setting for setting in SETTINGS.value if setting.startswith("model.")]
  from diffeq_nnx.data.preparation.directory import is_locked
  from diffeq_nnx.jobs.deriving import start_from  # after the flags, so that mistakes in them are reported at once
  from diffeq_nnx.parallel import distributed
  from diffeq_nnx.parallel.console import say
  from diffeq_nnx.runs.run import Run

  known = None  # the validation text of the run that a new one is made from
  if config is None or registers:
    from_source = job.config == "source" or job.config == "file_or_source" and not holds_run
    flag = FROM_WORKDIR if from_source else WORKDIR
    config = job.prepared(Run.open(str(flag.value), flag=flag.name).started)
    known = config.data.validation if from_source else None
    config = (start_from if from_source else config_lib.apply_settings)(config, settings)
  # A process of a second job would join the first one at the same port, and so end it. Process 0 looks at the port.
  if PROCESS_ID.value and name in ("train", "finetune") and is_locked(WORKDIR.value):
    raise RunError(f"workdir={WORKDIR.value}: another process trains there; wait for it, or stop it")
  distributed.start(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, JOIN_SECONDS.value)
  if not distributed.is_main_process():
    logging.set_verbosity(logging.ERROR)  # process 0 logs for all
  if known is not None and config.data.validation is None:
    say(
      f"data.validation={known}: is for the text of --from_workdir, and left out; give it again if this text needs it"
    )
  if registers:
    say(f"--config={CONFIG.value}: only registers its parts; the run was made from another, and has its own config")
  with distributed.shorten_errors():
    distributed.agree(config, name, WORKDIR.value, options)
    jobs.run(name, config, WORKDIR.value, **options)
  distributed.finish()


def _options(name: str) -> dict[str, Any]:
  """The values of the flags of the job of this name, as keyword arguments of its function."""
  given: dict[str, Any] = {}
  for flag in dict.fromkeys(flag for job in JOBS.values() for flag in job.flags):
    value = flags.FLAGS[flag].value
    if flag in JOBS[name].flags:
      given[flag] = value
    elif value is not None:
      others = [other for other, job in JOBS.items() if flag in job.flags]
      value = ",".join(value) if isinstance(value, list) else value
      raise UserError(f"--{flag}={value}: is for --job={' or '.join(others)}, and this is --job={name}; leave it out")
  required = JOBS[name].required
  if required and all(given[flag] is None for flag in required):
    raise UserError(f"--{required[0]}: missing; e.g. --job={name} {JOBS[name].example}")
  given = {flag: value for flag, value in given.items() if value is not None}
  for flag in sorted(given.keys() & {"num_steps", "step_sizes", "times"}):
    kind, rule = (int, "a whole number, e.g. 12") if flag == "num_steps" else (float, "numbers, e.g. 0.5,0.25,0.25")
    text = ",".join(given[flag])
    try:
      given[flag] = tuple(map(kind, text.split(",")))
    except ValueError:
      raise UserError(f"--{flag}={text}: must be {rule}") from None
  counts = given.get("num_steps", ())
  if len(counts) == 1:
    given["num_steps"] = counts[0]
  elif counts and name != "evaluate":
    text = ",".join(map(str, counts))
    raise UserError(f"--num_steps={text}: several are for --job=evaluate, and this is --job={name}; give one")
  return given


def parse(argv: list[str]) -> list[str]:
  """absl's flag parsing, with every mistake reported in one line; --config.KEY=VALUE is read as --set=KEY=VALUE.

  --help prints our own text, since absl's lists the flags of all jobs without the jobs.
  """
  try:
    argv = [argv[0], *flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)]  # what --flagfile=FILE holds
    words = [re.sub(r"^--?config\.", "--set=", argument) for argument in argv if argument not in HELP_FLAGS]
    rest = flags.FLAGS(words)
  except (flags.Error, ValueError) as error:
    raise SystemExit(fail(error, 2)) from None
  if len(words) < len(argv):
    try:
      print(describe_job(ALIASES.get(JOB.value, JOB.value)) if JOB.present else describe_jobs(), flush=True)
    except BrokenPipeError:  # as in `--help | head`
      os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(0)
  return rest


def describe_jobs() -> str:
  """The answer to --help: what each job does, and the flags that all take."""
  summaries = "\n".join(_describe(name, job.summary) for name, job in JOBS.items())
  return f"""\
python -m diffeq_nnx.main --workdir=DIR [--config=FILE.py] [--config.KEY=VALUE ...] [--job=JOB] [job's flags]

Jobs; --help --job=JOB lists the flags of one:
{summaries}

Flags of every job:
{_describe_flags(COMMON_FLAGS)}"""


def describe_job(name: str) -> str:
  """The answer to --help --job=NAME: what the job does, an example, and its flags beside those of every job."""
  job, common = JOBS[name], ", ".join(f"--{flag}" for flag in COMMON_FLAGS)
  own = f"Flags of this job:\n{_describe_flags(job.flags)}\n\n" if job.flags else ""
  return f"--job={name} {job.summary}.\n\nExample: {example_of(name)}\n\n{own}Flags of every job: {common}; see --help."


def example_of(name: str) -> str:
  """Returns the command line of a job's example."""
  return f"python -m diffeq_nnx.main {'' if name == 'train' else f'--job={name} '}{JOBS[name].example}"


def help_of(name: str) -> str:
  """Returns the help of a flag, without the advice that absl adds where a flag may be given several times."""
  return str(flags.FLAGS[name].help).partition(";\n")[0]


def _describe_flags(names: Sequence[str]) -> str:
  return "\n".join(_describe(f"--{name}", help_of(name)) for name in names)


def _describe(name: str, text: str) -> str:
  return textwrap.fill(f"  {name:<15} {text}", 100, subsequent_indent=" " * 18, break_on_hyphens=False)


def fail(error: BaseException, code: int) -> int:
  """Prints the error in one line on stderr, and returns the code; of several processes that fail alike process 0 does.

  A process that fails alone ends at once, so that the processes that wait for it notice.
  """
  distributed = sys.modules.get("diffeq_nnx.parallel.distributed")  # importing it takes seconds
  process = distributed.whoami()[0] if distributed else 0
  alike = distributed is None or distributed.all_end_with(error)
  if not alike or process == 0:
    prefix = "" if alike else f"process {process}: "
    print(f"error: {prefix}" + printable(" ".join(str(error).split())), file=sys.stderr, flush=True)
  if distributed:
    distributed.finish()
    if not alike:
      os._exit(code)
  return code


def main(argv: list[str]) -> int:
  """Exit code 2 for mistakes that the user can correct, 1 for a run that can't continue, 130 for Ctrl-C."""
  logging.set_verbosity(logging.WARNING)
  try:
    run(argv)
    return 0
  except (UserError, RunError) as error:
    return fail(error, 2 if isinstance(error, UserError) else 1)
  except KeyboardInterrupt:
    return fail(RunError("interrupted; run the same command to continue from what is finished"), 130)
  except BrokenPipeError:  # as in `--job=generate | head`
    return fail(RunError("the reader of the output, or a server, closed the connection before the end"), 1)
  except OSError as error:
    place = f"{error.filename}: " if error.filename else ""
    return fail(RunError(f"{place}{error.strerror or error}; check the name, the permissions and the network"), 1)
  except Exception as error:
    if "Unable to initialize backend" in str(error):  # what JAX_PLATFORMS names is missing, or another process uses it
      return fail(RunError(str(error)), 1)
    if isinstance(error, AssertionError) and traceback.extract_tb(error.__traceback__)[-1].name == "backends":  # JAX's
      platforms = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
      return fail(RunError(f"{platforms}: JAX finds no such devices; unset it, or install JAX for them"), 1)
    traceback.print_exc()
    where = "unexpected: the lines above say where, please report them"
    return fail(RunError(f"{type(error).__name__}: {error}; {where}"), 1)


def _program(argv: list[str]) -> int:
  """As `main`; after a failure it ends at once, so that no thread of a library prints a traceback after the line.

  The row "the disk is full" of launch/faults.py wants the line to be the last.
  """
  os.environ.pop("MPLBACKEND", None)  # of a notebook that runs this command, whose package may be missing here
  if isinstance(sys.stdout, io.TextIOWrapper):  # a text may have characters that its encoding lacks
    sys.stdout.reconfigure(errors="backslashreplace")
  code = main(argv)
  if code == 1:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  return code


if __name__ == "__main__":
  app.run(_program, flags_parser=parse)
