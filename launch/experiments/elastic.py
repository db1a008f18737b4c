"""Trains one checkpoint for several depths by several recipes, and models for one depth (docs/evidence/any_depth.md).

  python -m launch.experiments.elastic --config=configs/arena.py --workdir=runs/elastic [--recipes=own,late,...] \
      [--seeds=0,1,2] [--set=KEY=VALUE] [--plot=docs/evidence/elastic.png]

Prints a Markdown table of validation losses in nats per token by number of solver steps, means over the seeds; then
their paired differences from the models of `--own`, which are trained at that number of steps alone, with standard
errors. Each run's result is a file of the work directory: finished runs are not repeated, so the same command continues
after an interruption, and commands with other recipes or seeds can run beside it.
"""

import argparse
from collections.abc import Sequence
import math
import os
import statistics
from typing import Any

import jax
from matplotlib.figure import Figure
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.errors import UserError
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, checked_mesh
from diffeq_nnx.training.evaluate import Evaluator
from launch import programs
from launch.experiments import tables
from launch.experiments.compare import train_to_end

COUNTS = (2, 3, 4, 5, 6, 8, 9, 12, 16)  # at which every checkpoint is evaluated
TRAINED = (3, 4, 6, 8, 12)
OWN = (3, 6, 12)

_UNIFORM = ["model.time.embedding=uniform", "model.time.weights_at=mean", "model.time.sinusoidal_dim=12"]
_SLOW = ["model.time.scale=20.0", "model.time.weights_at=mean"]
_MIXED = [f"train.step_counts={TRAINED}"]
_LATE = [*_MIXED, "train.draw_from=0.7"]
_STORED = ["model.weights=stored", "model.solver=sequential", "optimizer.peak_rate=4e-3"]
_until = lambda steps: [f"{key}={steps}" for key in ("train.steps", "eval.every", "checkpoint.every")]
CONTINUED = {  # recipes that begin with the finished run of another, made continuous: its name, and what changes
  "continued": ("stored6", [*_MIXED, *_until(300), "optimizer.peak_rate=1e-3"]),
  "stored_then_elastic": ("stored6_first", []),
  "stored_then_distilled": ("stored6_first", ["train.self_distillation=True"]),
}
RECIPES: dict[str, list[str]] = {
  **{f"own{n}": [f"model.num_steps={n}", "model.horizon=6.0"] for n in OWN},
  "slow_late": [*_SLOW, *_LATE],
  "slow_mixed_mean": [*_SLOW, *_MIXED],
  "elastic": [*_UNIFORM, *_LATE],
  # 3, 6 and 12 steps lie evenly, each half as long as one of 6: the first three at 0, 4 and 8 of twelve
  "nested": [*_LATE, "model.num_steps=12", "model.horizon=6.0", "model.depth_order=(0,4,8,2,6,10,1,5,9,3,7,11)"],
  **{f"stored{n}": [*_STORED, f"model.num_steps={n}"] for n in OWN},
  "stored6_first": [*_STORED, "model.num_steps=6", *_until(1200)],
  **{name: settings for name, (_, settings) in CONTINUED.items()},
}

Losses = dict[int, float]  # of validation, by number of solver steps


def run(args: argparse.Namespace, recipe: str, seed: int) -> Losses:
  """Trains and evaluates one run, or reads its result."""
  workdir = os.path.join(args.workdir, f"{recipe}_seed{seed}")
  source = CONTINUED[recipe][0] if recipe in CONTINUED else recipe
  own = config_lib.load(args.config, [*RECIPES[source], *args.set, f"seed={seed}"])
  tables.require_config(os.path.join(args.workdir, f"{source}_seed{seed}"), own)

  def train_and_evaluate() -> Losses:
    config = _make_continuous(args, recipe, seed, workdir) if recipe in CONTINUED else own
    finite = math.isfinite(train_to_end(config, workdir))
    return evaluate(config, workdir) if finite else dict.fromkeys(COUNTS, math.inf)

  return {int(n): loss for n, loss in tables.remember(f"{workdir}.json", train_and_evaluate).items()}


def _make_continuous(args: argparse.Namespace, recipe: str, seed: int, workdir: str) -> config_lib.Config:
  """The config of a run in `workdir` that goes on from another recipe's run; makes both where they are missing."""
  source, settings = CONTINUED[recipe]
  run(args, source, seed)
  from_workdir = os.path.join(args.workdir, f"{source}_seed{seed}")
  job = jobs.JOBS["continuous"]
  config = config_lib.apply_settings(job.prepared(Run.open(from_workdir).started), settings)
  if not workdir_lib.holds_run(workdir):
    jobs.run("continuous", config, workdir, from_workdir=from_workdir)
  return config


def evaluate(config: config_lib.Config, workdir: str) -> Losses:
  """Validation losses of a run's newest model at all of COUNTS that it has weights for."""
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    run = Run.open(workdir, config, mesh=mesh)
    counts = (config.model.num_steps,) if config.model.weights == "stored" else COUNTS
    return {n: Evaluator(config, run.corpus, mesh, n)(run.params)["loss"] for n in counts}


def losses_at(results: list[Losses], num_steps: int) -> list[float]:
  """The losses of a recipe's runs at a number of solver steps; [] where its weights are for another number."""
  return [losses[num_steps] for losses in results if num_steps in losses]


def make_tables(found: dict[str, list[Losses]], own: str) -> str:
  """Losses by recipe and number of steps, and the differences from the models trained at one number alone."""
  mean = lambda values: f"{statistics.mean(values):.3f}" if values else ""
  rows = [[recipe, *(mean(losses_at(results, n)) for n in COUNTS)] for recipe, results in found.items()]
  by_recipe = tables.markdown(["recipe", *map(str, COUNTS)], rows)
  bases = {n: losses_at(found[own.format(n)], n) for n in OWN if own.format(n) in found}
  if not bases:
    return by_recipe
  differ = lambda values, base: tables.difference(values, base, "+.3f") if values else ""
  rows = [
    [recipe, *(differ(losses_at(results, n), base) for n, base in bases.items())] for recipe, results in found.items()
  ]
  against = tables.markdown(["recipe", *(f"at {n}, against {own.format(n)}" for n in bases)], rows)
  return f"{by_recipe}\n\n{against}"


def plot(found: dict[str, list[Losses]], own: str, path: str) -> None:
  """Losses against the number of steps: a line for each recipe, a point for each model trained at one number alone."""
  figure = Figure(figsize=(6.4, 4.2), layout="constrained")
  axes = figure.subplots()

  def draw(recipes: list[str], counts: Sequence[int], **style: Any) -> None:
    losses = [losses_at(found[recipe], n) for recipe, n in zip(recipes, counts, strict=True)]
    axes.errorbar(counts, list(map(np.mean, losses)), list(map(np.std, losses)), capsize=2, **style)

  for recipe, results in found.items():
    if set(results[0]) == set(COUNTS) and not recipe.startswith("own"):
      draw([recipe] * len(COUNTS), COUNTS, marker="o", markersize=4, linewidth=1.3, label=recipe)
  bases = [n for n in OWN if own.format(n) in found]
  draw([own.format(n) for n in bases], bases, fmt="k*", markersize=10, label="trained at this number alone")
  axes.set(xlabel="solver steps (layers)", ylabel="validation loss, nats per token", xticks=COUNTS)
  axes.grid(alpha=0.25)
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
  """Runs what is missing, seed by seed, and prints the tables."""
  study = {"recipes": list(RECIPES), "seeds": [0, 1, 2], "own": "own{}", "plot": None}
  args = programs.make_parser(__doc__, config="configs/arena.py", workdir=str, **study).parse_args(argv)
  unknown = set(args.recipes) - set(RECIPES)
  if unknown:
    raise UserError(f"--recipes={','.join(sorted(unknown))}: choose from {', '.join(RECIPES)}")
  found: dict[str, list[Losses]] = {recipe: [] for recipe in args.recipes}
  for seed in args.seeds:  # seed by seed, so that an unfinished comparison has every recipe
    for recipe in args.recipes:
      found[recipe].append(run(args, recipe, seed))
  print(make_tables(found, args.own))
  if args.plot:
    plot(found, args.own, args.plot)


if __name__ == "__main__":
  programs.start(main)
