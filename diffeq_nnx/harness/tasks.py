"""Which tasks: the paper's list, and names that are checked before anything is computed."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
import os
import pathlib
import types
from typing import Any
from unittest import mock

from absl import logging
from lm_eval.api import metrics
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
import yaml

from diffeq_nnx.config import find_near, nearest
from diffeq_nnx.errors import UserError, first_line

GROUPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "groups")  # task files; lm_eval's --include_path
PAPER_SHOTS = (0, 5)
GROUP = "neural_ode_transformers"  # the paper's list among lm_eval's own task files; `paper` in a config


def make_manager(include_path: str | None, default_tasks: bool) -> TaskManager:
  """Makes a manager of lm_eval's tasks and the paper's group, if `default_tasks`, and of the tasks in a folder.

  Raises:
    UserError: there is no such folder.
  """
  if include_path is not None and not os.path.isdir(include_path):
    raise UserError(f"harness.include_path={include_path!r}: there is no such folder; name one that holds task files")
  for path in sorted(pathlib.Path(include_path).rglob("*.yaml")) if include_path else ():
    try:
      yaml.compose(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # lm_eval leaves such a file out, and says nothing
      logging.warning("%s is left out: it can't be read as YAML (%s)", path, first_line(error, 200))
  folders = [*([GROUPS] if default_tasks else []), *([] if include_path is None else [include_path])]
  return TaskManager(include_path=folders, include_defaults=default_tasks)


@contextlib.contextmanager
def mending(check: Callable[[ConfigurableTask], None] = lambda task: None) -> Iterator[None]:
  """Around calls of lm_eval, mends two of its faults, and calls `check` with each task that it makes.

  The examples of a task never include the question that is asked: lm_eval 0.4.13 leaves it out only if a task names the
  split of its examples, and that is its test split. Perplexities are infinite where lm_eval's own raise OverflowError,
  which would lose all results.
  """
  make = ConfigurableTask.__init__

  def make_task(task: ConfigurableTask, *args: Any, **kwargs: Any) -> None:
    make(task, *args, **kwargs)
    config, examples = task.config, task.fewshot_cfg
    if examples.split is None and examples.samples is None:
      examples.split = config.training_split or config.validation_split or config.test_split
    config.test_split = config.test_split or config.validation_split
    check(task)

  def exp(exponent: float) -> float:
    try:
      return math.exp(exponent)
    except OverflowError:
      return math.inf

  patched = mock.patch.object(metrics, "math", types.SimpleNamespace(**{**vars(math), "exp": exp}))
  with patched, mock.patch.object(ConfigurableTask, "__init__", make_task):
    yield


def is_paper(names: Sequence[str]) -> bool:
  """Whether only the paper's list is named."""
  return bool(names) and set(names) <= {"paper", GROUP}


def read_paper_tasks() -> list[str]:
  """Returns the tasks of the paper's list (Tong et al. 2025)."""
  with open(os.path.join(GROUPS, "paper.yaml"), encoding="utf-8") as file:
    return yaml.safe_load(file)["task"]


def match(names: Sequence[str], tasks: TaskManager) -> list[str]:
  """Returns the tasks, groups and tags that match names and patterns, without duplicates.

  Raises:
    UserError: a name or pattern that matches none of them.
  """
  found: list[str] = []
  known = tasks.all_tasks
  for name in names:
    matches = read_paper_tasks() if is_paper([name]) else tasks.match_tasks([name])
    missing = [one for one in matches if one not in known]
    if missing:
      raise UserError(
        f"harness.tasks={name}: {', '.join(missing)} not there; leave harness.default_tasks on, or name "
        "tasks of harness.include_path"
      )
    if not matches:
      shown = "python -m diffeq_nnx.harness ls tasks shows all" if len(known) >= 20 else nearest(name, known)
      advice = find_near(name, known) or shown
      raise UserError(f"harness.tasks={name!r}: there is no such task; {advice}")
    found += matches
  return list(dict.fromkeys(found))
