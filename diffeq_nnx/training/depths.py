"""With which numbers of solver steps a train step computes its loss, and what a run was not trained for."""

import numpy as np

from diffeq_nnx.config import Config
from diffeq_nnx.parallel.console import say


def drawn_counts(config: Config, step: int) -> tuple[int, ...]:
  """Numbers of solver steps for equal parts of the batch in train step `step`, from the seed and the step alone."""
  train = config.train
  if not train.step_counts or step < train.draw_from * train.steps:
    return (config.model.num_steps,)
  one = int(np.random.default_rng((config.seed, step)).choice(train.step_counts))
  return (one,) if train.draw == "one" else _sandwich(train.step_counts, one)


def possible_counts(config: Config) -> list[tuple[int, ...]]:
  """Everything that `drawn_counts` may give, that with the most solver steps in all first."""
  train = config.train
  found = {(one,) if train.draw == "one" else _sandwich(train.step_counts, one) for one in train.step_counts}
  if not found or train.draw_from:
    found = {(config.model.num_steps,), *found}
  return sorted(found, key=lambda counts: -sum(counts) / len(counts))


def say_untrained(config: Config, step: int, num_steps: int | None, sizes: tuple[float, ...] = ()) -> None:
  """Warns in one line if a run is asked for a number of solver steps at which it was never trained.

  Args:
    config: of the run.
    step: the train steps that it has had.
    num_steps: what it is asked for; None: its own.
    sizes: of the solver steps, where others than its own are asked for.
  """
  own, asked = config.model.num_steps, num_steps or len(sizes) or config.model.num_steps
  drawn = step > config.train.draw_from * config.train.steps  # before, the model's own alone
  trained = {n for counts in possible_counts(config) for n in counts} if drawn else {own}
  if asked in trained and sizes in ((), config.model.step_sizes):
    return
  what = f"the {asked} step sizes that it is asked for" if sizes else f"{asked}"
  far, remedy = ("", "") if len(trained) > 1 else ("far ", "; a run of the row elastic serves many numbers of steps")
  say(
    f"warning: this run was trained at {_listed(sorted(trained))} solver steps and never at {what}, where its loss may "
    f"be {far}higher{remedy}"
  )


def _listed(counts: list[int]) -> str:
  return " and ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1]))))


def _sandwich(step_counts: tuple[int, ...], one: int) -> tuple[int, ...]:
  return min(step_counts), max(step_counts), one, one
