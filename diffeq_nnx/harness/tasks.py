"""Which tasks: the paper's list, and names made sure of before anything is computed."""

import os

from lm_eval.tasks import TaskManager

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError

GROUPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "groups")  # task files; lm_eval's --include_path
PAPER = ("arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "lambada_standard", "logiqa", "mmlu", "piqa",
         "sciq", "winogrande", "wsc273")  # Tong et al. 2025; zero-shot and five-shot
PAPER_SHOTS = (0, 5)


def manager(include_path: str | None, default_tasks: bool) -> TaskManager:
  """lm_eval's tasks and those of a folder.

  Raises:
    UserError: there is no such folder.
  """
  if include_path is not None and not os.path.isdir(include_path):
    raise UserError(f"harness.include_path={include_path!r}: there is no such folder; name one that holds task files")
  return TaskManager(include_path=include_path, include_defaults=default_tasks)


def chosen(names: str, tasks: TaskManager) -> list[str]:
  """The tasks, groups and tags that a comma-separated list names.

  Raises:
    UserError: a name or pattern that fits none of them.
  """
  found: dict[str, None] = {}
  for name in filter(None, (name.strip() for name in names.split(","))):
    if name == "paper" and name not in tasks.all_tasks:
      missing = [one for one in PAPER if one not in tasks.all_tasks]
      if missing:
        raise UserError(f"harness.tasks=paper: {', '.join(missing)} not there; leave harness.default_tasks on, or name "
                        "tasks of harness.include_path")
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
