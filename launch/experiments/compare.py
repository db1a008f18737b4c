"""Trains several rows of the model table at several peak rates and seeds, and prints a Markdown table.

  python -m launch.experiments.compare --config=configs/english.py --rows=diffeq,gpt --rates=1e-3,2e-3,4e-3 \
      --seeds=0,1,2 --workdir=runs/english [--set=train.steps=600] [--set=model.num_steps=6]

Every rate is run with the first seed, and the best one then with the other seeds; `--all-seeds` runs every rate with
every seed and chooses the best by the mean. Finished runs are not repeated, so the same command continues after an
interruption. Results are in results.json of the work directory.
"""

import argparse
import json
import os
import statistics

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.training.loop import train


class Runs:
  """Finished runs by name, stored in results.json."""

  def __init__(self, args: argparse.Namespace):
    self._args = args
    self._path = os.path.join(args.workdir, "results.json")
    os.makedirs(args.workdir, exist_ok=True)
    self.losses: dict[str, float] = {}
    if os.path.exists(self._path):
      with open(self._path, encoding="utf-8") as file:
        self.losses = json.load(file)

  def loss(self, row: str, rate: float, seed: int) -> float:
    """Final validation loss of one run, in nats per token; infinite if it diverged."""
    settings = [f"optimizer.peak_rate={rate!r}", f"seed={seed}"]
    return self.loss_of(f"{row}_rate{rate:g}_seed{seed}", row, settings)

  def loss_of(self, name: str, row: str, settings: list[str]) -> float:
    """The same of a run of this name, with settings before those of the command line."""
    if name not in self.losses:
      settings = [*settings, *self._args.set]
      config = config_lib.load(f"{self._args.config}:{row}", settings)
      print(f"-- {name}", flush=True)
      try:
        self.losses[name] = train(config, os.path.join(self._args.workdir, name))["loss"]
      except RunError as error:
        print(error, flush=True)
        self.losses[name] = float("inf")
      with open(self._path, "w", encoding="utf-8") as file:
        json.dump(self.losses, file, indent=2)
    return self.losses[name]


def best_of(runs: Runs, row: str, rates: list[float], seeds: list[int], all_seeds: bool):
  """(best rate, its losses by seed, {rate: mean loss over the seeds that it ran with})."""
  tried = seeds if all_seeds else seeds[:1]
  by_rate = {rate: statistics.mean(runs.loss(row, rate, seed) for seed in tried) for rate in rates}
  best = min(by_rate, key=by_rate.get)
  return best, [runs.loss(row, best, seed) for seed in seeds], by_rate


def numbers(kind):
  """An argparse type: comma-separated numbers."""
  return lambda text: [kind(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", required=True)
  parser.add_argument("--rows", type=lambda text: text.split(","), default=["diffeq", "baseline"])
  parser.add_argument("--rates", type=numbers(float), default=[1e-3, 2e-3, 4e-3])
  parser.add_argument("--seeds", type=numbers(int), default=[0, 1, 2])
  parser.add_argument("--all-seeds", action="store_true")
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  args = parser.parse_args(argv)
  runs = Runs(args)
  lines = ["| row | peak rate | mean validation loss | by seed | by rate |", "| --- | --- | --- | --- | --- |"]
  for row in args.rows:
    rate, losses, by_rate = best_of(runs, row, args.rates, args.seeds, args.all_seeds)
    lines.append(
      f"| {row} | {rate:g} | {statistics.mean(losses):.4f} | {', '.join(f'{l:.4f}' for l in losses)} | "
      f"{', '.join(f'{r:g}: {l:.4f}' for r, l in by_rate.items())} |"
    )
  print("\n".join(lines))


if __name__ == "__main__":
  try:
    main()
  except UserError as error:
    raise SystemExit(f"error: {error}") from None
