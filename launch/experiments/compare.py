"""Trains several presets at several peak rates and seeds, and prints a Markdown table.

  python -m launch.experiments.compare --config=configs/english.py --presets=diffeq,gpt --rates=4e-3,8e-3,16e-3 \
      --seeds=0,1,2 --workdir=runs/english [--set=train.steps=600] [--bracket] [--plot=FILE.png]

A preset's own settings follow it: `gpt@optimizer.b2=0.95@train.steps=1200`. Every rate is run with the first seed, and
the best one then with the other seeds. `--bracket` also runs half the lowest rate, or twice the highest, for as long as
the best is at that end, so that it lies between two worse ones. Finished runs are not repeated, so the same command
continues after an interruption, and several commands can share a work directory, as long as no two train the same run
at one time: each result is a file there, RUN.json.

The table has each preset's best rate, the mean of its validation losses in nats per token with the standard error over
seeds, the mean of its differences from the first preset's with the same seed and their standard error, losses by seed
and by rate, trained parameters and floating-point operations of the training (`training.flops`, generator included).
`--plot` draws validation losses against tokens and against those operations: means over seeds, and the range; and
prints the means in a second table, a column for each validation.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import math
import os

import jax
from matplotlib.figure import Figure
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config
from diffeq_nnx.depth.trained import draw_num_steps, list_computed
from diffeq_nnx.errors import Diverged, UserError
from diffeq_nnx.training import flops
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from diffeq_nnx.training.step import init_state
from launch import programs
from launch.experiments import tables

MOST_RATES = 12  # that are tried for a preset


def with_preset(config: str, preset: str) -> str:
  """A config file's path with a preset chosen: `FILE:PRESET`, or `FILE:CORPUS,PRESET` where it names a corpus."""
  return f"{config}{',' if ':' in config else ':'}{preset}"


def load_preset(args: argparse.Namespace, preset: str, settings: Sequence[str]) -> Config:
  """The config of a preset, with its own settings, these and those of the command line."""
  preset, *own = preset.split("@")
  key_of = lambda setting: setting.partition("=")[0]
  if taken := [one for one in (*args.set, *own) if key_of(one) in map(key_of, settings)]:
    raise UserError(f"{taken[0]}: this program chooses {key_of(taken[0])} itself; leave it out")
  return config_lib.load(with_preset(args.config, preset), [*settings, *args.set, *own])


def find_loss(args: argparse.Namespace, name: str, preset: str, settings: Sequence[str]) -> float:
  """The final validation loss of a run in nats per token, infinite if it diverged; trains it if it is missing.

  `settings` come before those of the command line. Raises UserError if the run that is there has others.
  """
  workdir = os.path.join(args.workdir, name)
  config = load_preset(args, preset, settings)
  tables.require_config(workdir, config)
  return tables.remember(f"{workdir}.json", lambda: train_to_end(config, workdir))


def name_run(preset: str, rate: float, seed: int) -> str:
  """The name of a run and of its directory."""
  return f"{preset.replace('/', '_')}_rate{rate:g}_seed{seed}"


def loss_at(args: argparse.Namespace, preset: str, rate: float, seed: int) -> float:
  """`find_loss` of a preset at a peak rate, with a seed."""
  return find_loss(args, name_run(preset, rate, seed), preset, [f"optimizer.peak_rate={rate!r}", f"seed={seed}"])


def train_to_end(config: Config, workdir: str) -> float:
  """Trains a run to its last step; its validation loss there, infinite if the run diverged.

  Raises:
    RunError: the run ended before, by SIGTERM or an error.
  """
  try:
    values = train(config, workdir)
  except Diverged as error:
    print(error, flush=True)
    return math.inf
  tables.check_finished(workdir, config.train.steps)
  return values["loss"]


@dataclasses.dataclass
class Found:
  """What was found for a preset; `losses` are by seed, `by_rate` those of the first seed."""

  name: str
  config: Config
  rate: float
  losses: list[float]
  by_rate: dict[float, float]


def best_of(args: argparse.Namespace, preset: str) -> Found:
  """A preset at its best rate.

  Raises:
    UserError: with `--bracket`, the best of `MOST_RATES` is still the lowest or the highest.
  """
  by_rate: dict[float, float] = {}
  rates = list(args.rates)
  while rates:
    by_rate |= {rate: loss_at(args, preset, rate, args.seeds[0]) for rate in rates}
    best, low, high = min(by_rate, key=lambda rate: by_rate[rate]), min(by_rate), max(by_rate)
    rates = [rate for end, rate in ((low, low / 2), (high, high * 2)) if best == end] if args.bracket else []
    if rates and len(by_rate) >= MOST_RATES:
      raise UserError(
        f"--bracket: of {len(by_rate)} rates {best:g} is the best for {preset}, at an end; change --rates"
      )
  losses = [loss_at(args, preset, best, seed) for seed in args.seeds]
  config = load_preset(args, preset, [f"optimizer.peak_rate={best!r}"])
  return Found(preset, config, best, losses, dict(sorted(by_rate.items())))


def operations(config: Config, steps: int) -> float:
  """Floating-point operations of so many train steps, generating weights included."""
  counts = [count for step in range(steps) for count in list_computed(config, draw_num_steps(config, step))]
  each = {one: flops.model_flops(config, one) + flops.generator_flops(config.model, one) for one in set(counts)}
  return sum(each[one] for one in counts)


def num_parameters(config: Config) -> int:
  """Parameters that are trained."""
  shapes = jax.eval_shape(lambda: init_state(config))["params"]
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def table(presets: list[Found]) -> str:
  """The presets as a Markdown table."""
  head = "preset,peak rate,validation loss,against the first,by seed,by rate,parameters,operations".split(",")
  cells = []
  for preset in presets:
    against = tables.difference(preset.losses, presets[0].losses) if preset is not presets[0] else ""
    by_seed = ", ".join(f"{loss:.4f}" for loss in preset.losses)
    by_rate = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in preset.by_rate.items())
    cost = [f"{num_parameters(preset.config):,}", f"{operations(preset.config, preset.config.train.steps):.3g}"]
    cells.append(
      [preset.name, f"{preset.rate:g}", tables.mean_and_error(preset.losses), against, by_seed, by_rate, *cost]
    )
  return tables.markdown(head, cells)


def plot(args: argparse.Namespace, presets: list[Found]) -> str:
  """Draws validation losses of each preset at its best rate against tokens and operations; returns them as Markdown."""
  figure = Figure(figsize=(9.6, 4.4), layout="constrained")
  panels, by_preset = figure.subplots(1, 2, sharey=True), {}
  for preset in presets:
    workdirs = [os.path.join(args.workdir, name_run(preset.name, preset.rate, seed)) for seed in args.seeds]
    # a step's last record, where a run was continued
    curves = [{one["step"]: one["loss"] for one in read_metrics(workdir, "validation")} for workdir in workdirs]
    steps = list(curves[0])
    length = min(map(len, curves))  # a run that diverged has fewer
    steps, losses = steps[:length], np.array([list(curve.values())[:length] for curve in curves])
    by_preset[preset.name] = {n: tables.mean_and_error(column.tolist(), ".3f") for n, column in zip(steps, losses.T)}
    tokens = [step * preset.config.train.batch_size * preset.config.model.seq_len for step in steps]
    for axes, places in zip(panels, (tokens, [operations(preset.config, step) for step in steps])):
      tables.draw_range(axes, places, losses, preset.name)
  panels[0].set(xlabel="tokens", ylabel="validation loss, nats per token")
  panels[1].set(xlabel="floating-point operations")
  for axes in panels:
    axes.grid(alpha=0.25)
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8)
  figure.savefig(args.plot, dpi=120)
  steps = sorted(set().union(*by_preset.values()))
  cells = [[name, *(found.get(step, "") for step in steps)] for name, found in by_preset.items()]
  return tables.markdown(["preset", *(f"step {step}" for step in steps)], cells)


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  study = {"presets": ["diffeq", "baseline"], "rates": [1e-3, 2e-3, 4e-3], "seeds": [0, 1, 2]}
  args = programs.make_parser(__doc__, config=str, workdir=str, **study, bracket=False, plot=None).parse_args(argv)
  presets = [best_of(args, preset) for preset in args.presets]
  print(table(presets))
  if args.plot:
    print("\n" + plot(args, presets))


if __name__ == "__main__":
  programs.start(main)
