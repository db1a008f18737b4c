"""Results as a table and a picture of bars, ours beside a baseline's."""

import glob
import json
import os
from typing import Any, NamedTuple, Sequence

from matplotlib.figure import Figure as Canvas
import numpy as np

from diffeq_nnx.errors import UserError
from diffeq_nnx.files import replacing

NAME = "results.json"
BARS = ("acc", "exact_match", "f1")  # metrics with a bar, the first that a task has; shares, the larger the better
CONDITIONS = ("limit", "begin_mark", "dtype", "max_length", "rolling_windows")  # of figures, in lm_eval's `config`

Results = dict[str, Any]  # what lm_eval returns


class Figure(NamedTuple):
  """One number of one task.

  Attributes:
    value: of it.
    error: its standard error; None: unknown.
  """
  value: float
  error: float | None

  def __str__(self) -> str:
    return f"{self.value:.4f}" if self.error is None else f"{self.value:.4f} ± {self.error:.4f}"


Key = tuple[str, Any, str, str]  # task, shots, metric, filter


def name_of(shots: int | None) -> str:
  """The file of results with so many examples before each question; None: as the tasks say."""
  return NAME if shots is None else f"results_{shots}shot.json"


def read(path: str, folder: str) -> list[Results]:
  """The results of a baseline: all of a run's directory, or a JSON file of lm_eval.

  Raises:
    UserError: there are none, or what is there is none.
  """
  paths = [path]
  if os.path.isdir(path):
    paths = sorted(glob.glob(os.path.join(glob.escape(path), folder, "results*.json")))
    if not paths:
      raise UserError(f"--baseline={path}: holds no {os.path.join(folder, NAME)}; run --job=harness on it with the "
                      "same tasks first, or name a results.json")
  found = []
  for one in paths:
    try:
      with open(one, encoding="utf-8") as file:
        results = json.load(file)
      figures(results)
    except FileNotFoundError as error:
      raise UserError(f"--baseline={one}: there is no such file or directory") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise UserError(f"--baseline={one}: is no results.json of lm_eval ({type(error).__name__})") from error
    found.append(results)
  return found


def figures(results: Results) -> dict[Key, Figure]:
  """The numbers of all tasks, without those that a group's own number stands for."""
  entries = {**results["results"], **results.get("groups", {})}
  hidden = {child for group, children in results.get("group_subtasks", {}).items() for child in children
            if _numbers(entries.get(group, {}))}
  return {(task, results.get("n-shot", {}).get(task), metric, way): figure for task, entry in entries.items()
          if task not in hidden for (metric, way), figure in _numbers(entry).items()}


def _numbers(entry: dict[str, Any]) -> dict[tuple[str, str], Figure]:
  found = {}
  for name, value in entry.items():
    metric, comma, way = name.partition(",")
    if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
      error = entry.get(f"{metric}_stderr,{way}")
      found[metric, way] = Figure(float(value), float(error) if isinstance(error, (int, float)) else None)
  return found


def table(ours: Sequence[Results], theirs: Sequence[Results], notes: Sequence[str]) -> str:
  """Markdown: a line for each number, the baseline's and the difference beside it, with standard errors."""
  mine, other = _all(ours), _all(theirs)
  head = ["task", "shots", "metric", "ours"] + (["baseline", "difference"] if theirs else [])
  lines = [head, ["---"] * len(head)]
  for key, figure in mine.items():
    task, shots, metric, way = key
    line = [task, "" if shots is None else str(shots), metric if way == "none" else f"{metric} ({way})", str(figure)]
    if theirs:
      line += [str(other[key]), f"{figure.value - other[key].value:+.4f}"] if key in other else ["", ""]
    lines.append(line)
  return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *(f"- {note}" for note in notes)]) + "\n"


def shared(ours: Sequence[Results], theirs: Sequence[Results]) -> set[Key]:
  """The numbers that both have."""
  return _all(ours).keys() & _all(theirs).keys()


def differences(ours: Sequence[Results], theirs: Sequence[Results]) -> list[str]:
  """What a reader must know who compares the two: conditions that differ, numbers that only one has."""
  if not theirs:
    return []
  notes, both = [], shared(ours, theirs)
  if len(both) < len(_all(ours)):
    notes.append(f"the baseline lacks {len(_all(ours)) - len(both)} of these {len(_all(ours))} numbers")
  for name in CONDITIONS:
    mine, other = ({json.dumps(one["config"].get(name)) for one in some} for some in (ours, theirs))
    if ours and mine != other:
      notes.append(f"{name}: {', '.join(sorted(mine))} here, {', '.join(sorted(other))} for the baseline")
  counts = [{task: given["effective"] for one in some for task, given in one.get("n-samples", {}).items()}
            for some in (ours, theirs)]
  other = sorted(task for task in counts[0].keys() & counts[1].keys() if counts[0][task] != counts[1][task])
  if other:
    notes.append("with another number of questions for the baseline: " + ", ".join(other))
  return notes


def _all(results: Sequence[Results]) -> dict[Key, Figure]:
  return {key: figure for one in results for key, figure in figures(one).items()}


def draw(path: str, ours: Sequence[Results], theirs: Sequence[Results], names: tuple[str, str]) -> bool:
  """Draws a bar for each task, a panel for each number of shots, standard errors on top; False: there is none."""
  mine, other = _all(ours), _all(theirs)
  panels: dict[Any, dict[str, Key]] = {}  # by shots: what each task's bar shows
  for key in sorted((key for key in mine if key[2] in BARS), key=lambda key: BARS.index(key[2])):
    panels.setdefault(key[1], {}).setdefault(key[0], key)
  if not panels:
    return False
  tasks = list(dict.fromkeys(task for task, *_ in mine if any(task in panel for panel in panels.values())))
  width = 0.4 if theirs else 0.7
  figure = Canvas(figsize=(max(4.0, 1.6 + 0.8 * len(tasks)), 1.2 + 2.6 * len(panels)), layout="constrained")
  rows = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)
  for axes, (shots, keys) in zip(rows[:, 0], panels.items()):
    for figures_here, name, shift, colour in ((mine, names[0], -0.5, "C0"), (other, names[1], 0.5, "0.6")):
      chosen = [(place, figures_here[keys[task]]) for place, task in enumerate(tasks) if keys.get(task) in figures_here]
      if chosen:
        at = np.array([place for place, _ in chosen]) + (shift * width if theirs else 0)
        axes.bar(at, [one.value for _, one in chosen], width, color=colour, label=name, zorder=2,
                 yerr=[one.error or 0.0 for _, one in chosen], capsize=3, error_kw={"zorder": 3})
    axes.set_ylabel("share right" + ("" if shots is None else f", {shots}-shot") + "\n± standard error", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
  axes.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
  named = {label: handle for axes in rows[:, 0] for handle, label in zip(*axes.get_legend_handles_labels())}
  figure.legend(named.values(), named.keys(), fontsize=8, loc="outside upper center", ncols=2, frameon=False)
  with replacing(path) as part, open(part, "wb") as file:
    figure.savefig(file, dpi=130, format="png")
  return True
