"""python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny [--job=evaluate]"""

import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import RunError, UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment's config file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and metrics go, and are found again.")
JOB = flags.DEFINE_enum("job", "train", ["train", "evaluate"], "What to do.")


def run(argv: list[str]) -> None:
  """Checks the flags and starts the job."""
  if len(argv) > 1:
    raise UserError(f"{argv[1]}: not a flag; flags are written --name=value")
  for flag in (CONFIG, WORKDIR):
    if flag.value is None:
      raise UserError(f"--{flag.name}: missing; e.g. --config=configs/tiny.py --workdir=runs/tiny")
  config = config_lib.from_config_dict(CONFIG.value)
  from diffeq_nnx import jobs  # after the flags, so that a mistake in them is told at once
  jobs.JOBS[JOB.value](config, WORKDIR.value)


def parse(argv: list[str]) -> list[str]:
  """absl's flag parsing, with every mistake as one line."""
  try:
    return flags.FLAGS(argv)
  except (flags.Error, UserError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise SystemExit(fail(error, 2)) from None


def fail(error: BaseException, code: int) -> int:
  """Prints the error as one line on stderr."""
  text = error.args[0] if isinstance(error, KeyError) and error.args else error
  print("error: " + " ".join(str(text).split()), file=sys.stderr, flush=True)
  return code


def main(argv: list[str]) -> int:
  """Exit code 2 for what the user can put right, 1 for a run that can't go on."""
  logging.set_verbosity(logging.WARNING)
  try:
    run(argv)
  except UserError as error:
    return fail(error, 2)
  except RunError as error:
    return fail(error, 1)
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
