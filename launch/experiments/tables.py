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

from diffeq_nnx import files
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel.console import markdown as markdown


def remember(path: str, compute: Callable[[], Any]) -> Any:
  """The JSON value in a file; if the file is missing, `compute` is called and what it returns is written there."""
  if not os.path.exists(path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    print(f"-- {os.path.basename(path).removesuffix('.json')}", flush=True)
    files.write_json(path, compute())
  return files.read_json(path)


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
  for pattern in patterns.split(","):
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
