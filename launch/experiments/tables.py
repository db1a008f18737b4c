"""What experiments share: results in files, tables of means with errors and differences, curves, runs by seed.

The runs of a preset are those that match a pattern, in the order of their seeds: `runs/small/gpt_rate0.001_seed*`.
"""

from collections.abc import Callable, Sequence
import glob
import os
import re
from typing import Any

from matplotlib.axes import Axes
import numpy as np
from numpy.typing import ArrayLike

from diffeq_nnx import files, jobs
from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.parallel.console import markdown as markdown
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.report import read_metrics
from launch.programs import COMMA


def remember(path: str, compute: Callable[[], Any]) -> Any:
  """The JSON value in a file; if the file is missing, `compute` is called and what it returns is written there."""
  path = files.absolute(path)
  if not files.exists(path):
    files.make_folder(os.path.dirname(path))
    print(f"-- {os.path.basename(path).removesuffix('.json')}", flush=True)
    files.write_json(path, compute())
  return files.read_json(path)


def require_settings(folder: str, settings: dict[str, Any]) -> None:
  """Keeps what all results in a folder depend on, in JSON's types; raises UserError if they are of something else."""
  path = os.path.join(folder, "settings.json")
  if remember(path, lambda: settings) != settings:
    raise UserError(f"{folder}: holds results of other settings, which are in {path}; name another folder")


def require_config(workdir: str, config: Config) -> None:
  """Raises UserError if a directory holds a run of another config, which its result would then be of."""
  if workdir_lib.holds_run(workdir):
    workdir_lib.require(workdir, config)
    started = Run.open(workdir).started
    if any(getattr(started, name) != getattr(config, name) for name in ("optimizer", "train", "eval")):
      raise UserError(
        f"{workdir}: was trained with other keys of optimizer, train or eval; name another folder, or remove it"
      )


def fine_tune(config: Config, workdir: str, source: str, num_steps: int | None, settings: Sequence[str]) -> None:
  """Fine-tunes the run `source` to the last train step, unless that is done; `settings` may change its model.

  Raises:
    RunError: the run ended before, by SIGTERM.
    UserError: the directory holds a run that was fine-tuned otherwise than this config says, apart from its model, and
      what follows from that, which are those of `source`.
  """
  # not eval.every: a validation loss is the same however often the run was validated
  teacher = lambda c: c.train.teacher and (c.train.teacher, c.train.teacher_weight)
  others = lambda c: (c.optimizer, c.train.steps, c.train.batch_size, c.eval.batch_size, c.eval.max_batches, c.seed)
  tuning = lambda c: (teacher(c), *others(c))
  if workdir_lib.holds_run(workdir) and tuning(Run.open(workdir).started) != tuning(config):
    raise UserError(f"{workdir}: was trained with other settings; name another folder")
  of_model = [one for one in settings if one.startswith("model.")]
  jobs.run("finetune", config, workdir, from_workdir=source, num_steps=num_steps, model_settings=of_model)
  check_finished(workdir, config.train.steps)


def check_finished(workdir: str, steps: int) -> None:
  """Raises RunError unless the last validation of a run is of its last train step: SIGTERM ends a run before."""
  records = read_metrics(workdir, "validation")
  if not records or records[-1]["step"] < steps:
    raise RunError(f"{workdir}: is not finished; run the same command to continue")


def mean_and_error(values: Sequence[float], digits: str = ".4f") -> str:
  """The mean, with its standard error where there are several values."""
  if len(values) == 1:
    return f"{values[0]:{digits}}"
  return f"{np.mean(values):{digits}} ± {np.std(values, ddof=1) / len(values) ** 0.5:{digits.lstrip('+')}}"


def difference(values: Sequence[float], base: Sequence[float], digits: str = "+.4f") -> str:
  """`mean_and_error` of the paired differences from `base`."""
  return mean_and_error([float(x) for x in np.subtract(values, base)], digits)


def draw_range(axes: Axes, places: ArrayLike, values: np.ndarray, label: str) -> None:
  """A line of the means over seeds and a band of their range, for values [seeds, places]."""
  (line,) = axes.plot(places, values.mean(0), marker="o", markersize=3, linewidth=1.3, label=label)
  axes.fill_between(places, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)


def runs_by_preset(patterns: str) -> dict[str, list[str]]:
  """Preset -> work directories of its seeds, for comma-separated patterns.

  Raises:
    UserError: a pattern that nothing matches, directories without `_seedN` at the end, or presets with different seeds.
  """
  found, seeds = {}, set()
  for pattern in re.split(COMMA, patterns):
    matches, names = {}, set()
    for path in filter(os.path.isdir, glob.glob(pattern)):
      named = re.fullmatch(r"(.+)_seed(\d+)", os.path.basename(path))
      if named is None:
        raise UserError(f"{path}: a run's name must end in _seedN, as those of launch.experiments.compare do")
      matches[int(named[2])] = path
      names.add(named[1])
    if len(names) != 1:
      raise UserError(f"{pattern!r}: must match runs of one preset, and matches {', '.join(sorted(names)) or 'none'}")
    found[names.pop()] = [matches[seed] for seed in sorted(matches)]
    seeds.add(tuple(sorted(matches)))
  if len(seeds) > 1:
    raise UserError(f"{patterns!r}: presets have different seeds: {', '.join(map(str, sorted(seeds)))}")
  return found
