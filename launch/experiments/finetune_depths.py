"""Fine-tunes runs at several numbers of steps; prints validation losses before and after as a Markdown table.

  python -m launch.experiments.finetune_depths --config=configs/finetune_small.py \\
      --from_workdir='runs/english/diffeq_rate0.008_seed*' --workdir=runs/rfc --presets=full,lora --steps=3,4,6,8,12 \\
      [--set=train.steps=200]

Losses are in nats per token. `over training` is the validation loss less the mean training loss of the last tenth of
the steps, of those that `train.log_every` logs: how much a model overfits. Where --from_workdir matches several runs,
cells are means with standard errors. A run with stored weights has one number of steps: give that as --steps. Finished
runs are not repeated, so the same command continues after an interruption.
"""

import argparse
import glob
import os
import statistics

import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError
from diffeq_nnx.training.report import read_metrics
from launch import programs
from launch.experiments import tables
from launch.experiments.compare import with_preset


def tune(args: argparse.Namespace, source: str, preset: str, num_steps: int) -> tuple[float, float, float]:
  """Fine-tunes one run unless that is done; its validation losses before and after, and the latter over training."""
  config = config_lib.load(with_preset(args.config, preset), args.set)
  last_logged = config.train.steps // config.train.log_every * config.train.log_every
  if last_logged <= 0.9 * config.train.steps:
    raise UserError(f"train.log_every={config.train.log_every}: logs no step of the last tenth; lower it")
  name = f"{preset}_{num_steps}_{_find_name(source)}"
  workdir = os.path.join(args.workdir, name)
  tables.fine_tune(config, workdir, source, num_steps, args.set)
  recorded = read_metrics(workdir, "validation")
  last = [one["loss"] for one in read_metrics(workdir, "train") if one["step"] > 0.9 * config.train.steps]
  before, after = recorded[0]["loss"], recorded[-1]["loss"]
  return before, after, after - statistics.mean(last)


def _find_name(source: str) -> str:
  return os.path.basename(os.path.abspath(source))


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  presets, steps = ["full", "lora"], [3, 4, 6, 8, 12]
  parser = programs.make_parser(__doc__, config=str, from_workdir=str, workdir=str, presets=presets, steps=steps)
  args = parser.parse_args(argv)
  matches = sorted(filter(os.path.isdir, glob.glob(args.from_workdir)))
  sources = matches or [args.from_workdir]  # which may be in a bucket
  if len(set(map(_find_name, sources))) < len(sources):
    raise UserError(f"--from_workdir={args.from_workdir}: two runs have one name; give their folders different names")
  cells = []
  for count in args.steps:
    values = np.array([[tune(args, source, preset, count) for source in sources] for preset in args.presets])
    before, after = values[0, :, 0], values[:, :, 1:].swapaxes(1, 2).reshape(-1, len(sources))
    cells.append([str(count), *(tables.mean_and_error(losses, ".3f") for losses in (before, *after))])
  print(tables.markdown(["steps", "before", *(x for preset in args.presets for x in (preset, "over training"))], cells))


if __name__ == "__main__":
  programs.start(main)
