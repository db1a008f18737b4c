"""Which tasks: the paper's list, and names made sure of before anything is computed."""

import os
from typing import Sequence

from lm_eval.tasks import TaskManager

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError

GROUPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "groups")  # task files; lm_eval's --include_path
PAPER = ("arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "lambada_standard", "logiqa", "mmlu", "piqa",
         "sciq", "winogrande", "wsc273")  # Tong et al. 2025; zero-shot and five-shot
PAPER_SHOTS = (0, 5)
GROUP = "neural_ode_transformers"  # the paper's list among lm_eval's own task files; `paper` in a config


def manager(include_path: str | None, default_tasks: bool) -> TaskManager:
  """lm_eval's tasks, the paper's group, and those of a folder.

  Raises:
    UserError: there is no such folder.
  """
  if include_path is not None and not os.path.isdir(include_path):
    raise UserError(f"harness.include_path={include_path!r}: there is no such folder; name one that holds task files")
  folders = [*([GROUPS] if default_tasks else []), *([] if include_path is None else [include_path])]
  return TaskManager(include_path=folders, include_defaults=default_tasks)


def kinds(names: Sequence[str], tasks: TaskManager) -> set[str]:
  """What kinds of request tasks make, e.g. generate_until; their data is loaded for that."""
  return {task.get_config("output_type") for task in tasks.load(list(names))["tasks"].values()}


def is_paper(names: Sequence[str]) -> bool:
  """Whether the paper's list is all that is named."""
  return bool(names) and set(names) <= {"paper", GROUP}


def chosen(names: Sequence[str], tasks: TaskManager) -> list[str]:
  """The tasks, groups and tags that names and patterns fit.

  Raises:
    UserError: a name or pattern that fits none of them.
  """
  found: dict[str, None] = {}
  for name in names:
    if is_paper([name]):
      missing = [one for one in PAPER if one not in tasks.all_tasks]
      if missing:
        raise UserError(f"harness.tasks={name}: {', '.join(missing)} not there; leave harness.default_tasks on, or "
                        "name tasks of harness.include_path")
      found |= dict.fromkeys(PAPER)
      continue
    matches = tasks.match_tasks([name])
    if not matches:
      known = tasks.all_tasks
      way = config_lib.nearest(name, known) if len(known) < 20 or "did you" in config_lib.nearest(name, known) else (
          "python -m diffeq_nnx.harness ls tasks shows all")
      raise UserError(f"harness.tasks={name!r}: there is no such task; {way}")
    found |= dict.fromkeys(matches)
  return list(found)
