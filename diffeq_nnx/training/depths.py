"""With which numbers of solver steps a train step computes its loss."""

import numpy as np

from diffeq_nnx.config import Config


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


def _sandwich(step_counts: tuple[int, ...], one: int) -> tuple[int, ...]:
  return min(step_counts), max(step_counts), one, one
