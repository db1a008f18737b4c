"""Fine-tunes runs at several numbers of steps; prints validation losses before and after as a Markdown table.

  python -m launch.experiments.finetune_depths --config=configs/finetune_small.py \\
      --from_workdir='runs/english/diffeq_rate0.008_seed*' --workdir=runs/rfc --rows=full,lora --steps=3,4,6,8,12 \\
      [--set=train.steps=200]

Losses are in nats per token. `over training` is the validation loss less the mean training loss of the last tenth of
the steps: how much a model overfits. Where --from_workdir matches several runs, cells are means with standard errors. A
run with stored weights has one number of steps: give that as --steps. Finished runs are not repeated, so the same
command continues after an interruption.
"""

import argparse
import dataclasses
import glob
import os
import statistics

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.report import read_metrics
from launch import programs
from launch.experiments import tables
from launch.experiments.compare import with_row


@dataclasses.dataclass(frozen=True)
class Tuned:
  """Validation losses at step 0 and at the last step, and the second less the last training loss."""

  before: float
  after: float
  over_training: float


def tune(args: argparse.Namespace, source: str, row: str, num_steps: int) -> Tuned:
  """Fine-tunes one run unless that is done, and reads its losses."""
  config = config_lib.load(with_row(args.config, row), args.set)
  name = f"{row}_{num_steps}_{os.path.basename(os.path.abspath(source))}"
  workdir = os.path.join(args.workdir, name)
  if workdir_lib.holds_run(workdir):
    settings = lambda config: (config.optimizer, config.train.steps, config.train.batch_size, config.seed)
    if settings(Run.open(workdir).started) != settings(config):
      raise UserError(f"--workdir={args.workdir}: {name} was trained with other settings; name another")
  jobs.run("finetune", config, workdir, from_workdir=source, num_steps=num_steps)
  recorded = read_metrics(workdir, "validation")
  if recorded[0]["step"] or recorded[-1]["step"] < config.train.steps:
    raise RunError(f"{workdir}: is not finished; run the same command to continue")
  last = [one["loss"] for one in read_metrics(workdir, "train") if one["step"] > 0.9 * config.train.steps]
  after = recorded[-1]["loss"]
  return Tuned(recorded[0]["loss"], after, after - statistics.mean(last))


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  rows, steps = ["full", "lora"], [3, 4, 6, 8, 12]
  parser = programs.make_parser(__doc__, config=str, from_workdir=str, workdir=str, rows=rows, steps=steps)
  args = parser.parse_args(argv)
  matches = sorted(filter(os.path.isdir, glob.glob(args.from_workdir)))
  sources = matches or [args.from_workdir]  # which may be in a bucket
  cells = []
  for count in args.steps:
    found = [[tune(args, source, row, count) for source in sources] for row in args.rows]
    cell = lambda runs, of: tables.mean_and_error([getattr(one, of) for one in runs], ".3f")
    after = [cell(runs, of) for runs in found for of in ("after", "over_training")]
    cells.append([str(count), cell(found[0], "before"), *after])
  print(tables.markdown(["steps", "before", *(x for row in args.rows for x in (row, "over training"))], cells))


if __name__ == "__main__":
  programs.start(main)
