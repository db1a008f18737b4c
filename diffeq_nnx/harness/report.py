"""Results as Markdown: the table of lm_eval, or the comparison with a baseline."""

from collections.abc import Callable, Sequence
import fnmatch
import html
import json
import os
import re
from typing import Any, NamedTuple

from diffeq_nnx import files
from diffeq_nnx.errors import UserError, printable
from diffeq_nnx.parallel.console import markdown

NAME = "results.json"
# of results, in lm_eval's `config`
CONDITIONS = (
  *("limit", "num_steps", "begin_mark", "dtype", "max_length", "rolling_windows"),
  *("examples", "gen_kwargs", "fewshot_seed"),
  *("chat_template", "system_instruction"),  # which lm_eval's command line writes beside `config`
)
# lm_eval's `fewshot_as_multiturn` in words
CHAT_FORMS = {True: "examples are turns", False: "examples are part of the question"}

Results = dict[str, Any]  # what lm_eval returns


class Key(NamedTuple):
  """What an estimate measures."""

  task: str
  shots: int | None  # examples before each question
  metric: str
  filter: str  # lm_eval's name for how answers are extracted from responses


class Estimate(NamedTuple):
  """The value of a metric and its standard error, None if it is unknown."""

  value: float
  error: float | None

  def __str__(self) -> str:
    return f"{self.value:.4f}" if self.error is None else f"{self.value:.4f} ± {self.error:.4f}"


def read(path: str, folder: str) -> list[Results]:
  """Reads the results of a baseline: all of a run's directory, or those of one JSON file of lm_eval.

  Raises:
    UserError: no such file, or no results in it.
  """
  paths = [path]
  if files.is_folder(path):
    place = os.path.join(path, folder)
    paths = [os.path.join(place, name) for name in sorted(fnmatch.filter(files.list_sizes(place), "results*.json"))]
    if not paths:
      raise UserError(
        f"--baseline={path}: holds no {os.path.join(folder, NAME)}; run --job=harness on it with the "
        "same tasks first, or name a results.json"
      )
  found = []
  for one in paths:
    try:
      found.append(files.read_json(one))
      note_differences(found, found)  # reads all that is used later
    except FileNotFoundError as error:
      raise UserError(f"--baseline={one}: there is no such file or directory") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise UserError(f"--baseline={one}: is no results.json of lm_eval ({type(error).__name__})") from error
  return found


def collect_estimates(results: Sequence[Results]) -> dict[Key, Estimate]:
  """Collects the metrics of all tasks, without those of subtasks if their group has an average."""
  found: dict[Key, Estimate] = {}
  for one in results:
    entries = {**one["results"], **one.get("groups", {})}
    averaged = {
      task
      for group, tasks in one.get("group_subtasks", {}).items()
      for task in tasks
      if _read_entry(entries.get(group, {}))
    }
    found |= {
      Key(task, one.get("n-shot", {}).get(task), *metric): estimate
      for task, entry in entries.items()
      if task not in averaged
      for metric, estimate in _read_entry(entry).items()
    }
  return found


def _read_entry(entry: dict[str, Any]) -> dict[tuple[str, str], Estimate]:
  """Returns the estimates of one task from its entry, with the keys "metric,filter" and "metric_stderr,filter"."""
  found = {}
  for name, value in entry.items():
    metric, comma, filter_name = name.partition(",")
    if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
      error = entry.get(f"{metric}_stderr,{filter_name}")
      found[metric, filter_name] = Estimate(float(value), float(error) if isinstance(error, (int, float)) else None)
  return found


def _escape(text: str) -> str:
  """Returns a text as one line of Markdown, none of which is HTML, a link, code or the end of a cell."""
  return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(printable(" ".join(text.split())), quote=False))


def make_table(ours: Sequence[Results], baseline: Sequence[Results], notes: Sequence[str]) -> str:
  """Makes lm_eval's tables, or a comparison with a baseline, and then a list of the notes, in Markdown."""
  tables = [_compare(ours, baseline)] if baseline else [_tabulate(one) for one in ours]
  return "\n".join([*tables, *(f"- {_escape(note)}" for note in notes)]) + "\n"


def _tabulate(results: Results) -> str:
  """Makes lm_eval's table of the tasks and, if there are any, of the averages of groups."""
  from lm_eval import utils

  shown = dict(results)
  for column in ("results", "groups"):
    shown[column] = {
      task: {_escape(name): _escape(value) if isinstance(value, str) else value for name, value in entry.items()}
      | {"alias": _escape(entry.get("alias", task))}
      for task, entry in results.get(column, {}).items()
    }
  return "\n".join(utils.make_table(shown, column) for column in ("results", "groups") if shown[column])


def _compare(ours: Sequence[Results], baseline: Sequence[Results]) -> str:
  """Makes a table with a row for each metric: our estimate, the baseline's and the difference."""
  other = collect_estimates(baseline)
  rows = []
  for key, one in collect_estimates(ours).items():
    rows.append(
      [
        _escape(key.task),
        "" if key.shots is None else str(key.shots),
        _escape(key.metric if key.filter == "none" else f"{key.metric} ({key.filter})"),
        str(one),
        *([str(other[key]), f"{one.value - other[key].value:+.4f}"] if key in other else ["", ""]),
      ]
    )
  return markdown(["task", "shots", "metric", "ours", "baseline", "difference"], rows) + "\n"


def _read_condition(results: Results, name: str) -> Any:
  value = results["config"].get(name) or results.get(name)
  if name == "chat_template" and value and name not in results["config"]:
    return CHAT_FORMS[bool(results.get("fewshot_as_multiturn"))]
  return int(value) if isinstance(value, float) and value.is_integer() else value or None


def note_differences(ours: Sequence[Results], baseline: Sequence[Results]) -> list[str]:
  """Returns notes on what limits the comparison: conditions that differ, and metrics that the baseline lacks."""
  if not ours or not baseline:
    return []
  keys = collect_estimates(ours).keys()
  missing = len(keys - collect_estimates(baseline).keys())
  notes = [f"the baseline lacks {missing} of these {len(keys)} numbers"] if missing else []
  for name in CONDITIONS:
    here, there = (
      ", ".join(sorted({json.dumps(_read_condition(one, name), sort_keys=True) for one in some}))
      for some in (ours, baseline)
    )
    if here != there:
      notes.append(f"{name}: {here} here, {there} for the baseline")
  of_tasks: dict[str, Callable[[Results], dict[str, Any]]] = {
    "number of questions": lambda one: {task: count["effective"] for task, count in one.get("n-samples", {}).items()},
    "version of the task": lambda one: one.get("versions", {}),
  }
  for what, read_values in of_tasks.items():
    here, there = (
      {task: value for one in some for task, value in read_values(one).items()} for some in (ours, baseline)
    )
    tasks = sorted(task for task in here.keys() & there.keys() if here[task] != there[task])
    notes += [f"with another {what} for the baseline: {', '.join(tasks)}"] if tasks else []
  return notes
