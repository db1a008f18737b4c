"""With which number of solver steps a train step computes its loss, and what a run was not trained for."""

import bisect

import numpy as np

from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.depth.discretization import leaves_out_steps
from diffeq_nnx.model.grids import make_grid
from diffeq_nnx.parallel.console import say


def count_steps_before_drawing(config: Config) -> float:
  """How many train steps use the model's own number of solver steps before numbers are drawn.

  A run that is trained further, with the length of its schedule fixed, goes on drawing.
  """
  return config.train.draw_from * (config.optimizer.schedule_steps or config.train.steps)


def draw_num_steps(config: Config, step: int) -> int:
  """The number of solver steps of train step `step`, from the seed and the step alone."""
  train = config.train
  if train.step_schedule:
    return train.step_counts[bisect.bisect_right(train.step_schedule, step)]
  if not train.step_counts or step < count_steps_before_drawing(config):
    return config.model.num_steps
  return int(np.random.default_rng((config.seed, step)).choice(train.step_counts))


def list_num_steps(config: Config) -> list[int]:
  """All numbers that `draw_num_steps` may give, the largest first."""
  found = set(config.train.step_counts)
  if not found or config.train.draw_from:
    found.add(config.model.num_steps)
  return sorted(found, reverse=True)


def find_costliest(config: Config) -> int:
  """The number of solver steps of the train step that computes most, in which the largest number may teach."""
  return max(list_num_steps(config), key=lambda num_steps: sum(list_computed(config, num_steps)))


def find_teaching_count(config: Config, num_steps: int) -> int | None:
  """The number of steps at which the model teaches itself at `num_steps` in the same train step; None: it does not."""
  most = list_num_steps(config)[0]
  return most if config.train.self_distillation and num_steps < most else None


def list_computed(config: Config, num_steps: int) -> list[int]:
  """The numbers of solver steps that the train step at `num_steps` computes: its own, and that which teaches there."""
  return [num_steps, *filter(None, [find_teaching_count(config, num_steps)])]


def say_kept_steps(model: ModelConfig, stored: ModelConfig) -> bool:
  """Says which steps stay if `stored`, made of a model, leaves steps out, and returns whether it does."""
  if not leaves_out_steps(model, stored):
    return False
  kept = ", ".join(map(str, make_grid(model, stored.num_steps).kept_S))
  say(f"of the {model.num_steps} steps, numbered from 0, these {stored.num_steps} stay: {kept}")
  return True


def say_untrained(config: Config, step: int, num_steps: int | None, sizes: tuple[float, ...] = ()) -> None:
  """Warns in one line if a run is asked for a number of solver steps at which it was never trained.

  Args:
    config: of the run.
    step: the train steps that it has had.
    num_steps: what it is asked for; None: its own.
    sizes: of the solver steps, where others than its own are asked for.
  """
  own, asked = config.model.num_steps, num_steps or len(sizes) or config.model.num_steps
  if changes := config.train.step_schedule:
    trained = {draw_num_steps(config, number) for number in (0, *changes) if number < max(step, 1)}
  else:
    drawn = step > count_steps_before_drawing(config)  # before, the model's own, and that which teaches it
    trained = set(list_num_steps(config)) if drawn else set(list_computed(config, own))
  if asked in trained and sizes in ((), make_grid(config.model, asked).dts):
    return
  what = f"the {asked} step sizes that it is asked for" if sizes else f"{asked}"
  *others, last = map(str, sorted(trained))
  listed = f"{', '.join(others)} and {last}" if others else last
  far, remedy = ("", "") if len(trained) > 1 else ("far ", "; a run of the preset elastic serves many numbers of steps")
  if config.model.depth_order and asked < own and not sizes:
    remedy = "; fine-tuning there (--job=finetune) brings it down"
  say(
    f"warning: this run was trained at {listed} solver steps and never at {what}, where its loss may "
    f"be {far}higher{remedy}"
  )
