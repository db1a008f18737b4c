"""--job=harness: a run's newest model, evaluated by lm_eval."""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import time
import traceback
from typing import Any
from unittest import mock

import jax

from diffeq_nnx import files
from diffeq_nnx.config import Config, HarnessConfig
from diffeq_nnx.data import sources
from diffeq_nnx.data.documents import text_of
from diffeq_nnx.errors import RunError, UserError, first_line
from diffeq_nnx.harness import report
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import print_result, say, to_finite
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run

OURS = os.path.join(os.path.dirname(report.__file__), "adapter.py")  # what is called by lm_eval
BOOTSTRAP = 1000  # resamples for standard errors that have no formula, those of perplexities
ENVIRONMENT = {  # of lm_eval
  "DISABLE_MULTIPROC": "1",  # bootstrap without forks, which JAX may not survive
  "LOCAL_RANK": "0",  # every process gets the results
}
KEYS_OF_TEXT = ("text_key", "bad_records", "tfds_dir", "download")  # of data, which say how `harness.text` is read
# on which the perplexity of a text depends
CONDITIONS = "rolling_windows max_length mark_before_texts_without_context dtype num_steps checkpoint_step".split()


def evaluate_downstream(
  config: Config, workdir: str, *, baseline: str | None = None, num_steps: int | None = None
) -> dict[str, Any]:
  """Evaluates the newest model of a run with lm_eval, and prints one JSON line on stdout.

  Writes to the folder `config.harness.folder` of the run: results.json as lm_eval makes it (results_5shot.json and so
  on where numbers of examples are given), table.md, and perplexity.json if there is a `text`.

  Args:
    config: of the run; `config.harness` sets what is evaluated, and how.

  Raises:
    UserError: lm_eval is missing, an unknown task, unavailable data, no checkpoint, no such baseline, or a directory
      that can't be written.
    RunError: the disk is full.
  """
  start, settings = time.perf_counter(), config.harness
  try:
    from diffeq_nnx.harness import adapter, tasks  # they need an extra that other jobs don't
  except ImportError as error:
    raise UserError("--job=harness: needs lm_eval 0.4.13 or later; pip install 'diffeq-nnx[harness]'") from error
  if baseline is not None and not settings.names:
    raise UserError(f"--baseline={baseline}: is for tasks, and harness.tasks={settings.tasks}; leave it out")
  texts = _open_text(config)
  if texts is not None:  # the keys are for it, and the run's own text, for which they may be others, isn't read
    started = workdir_lib.config_of(workdir).data
    own = {key: getattr(started, key) for key in (*KEYS_OF_TEXT, "records")}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **own))
  Run.open(workdir, config)
  folder = os.path.join(workdir, settings.folder)
  distributed.on_main_process(workdir_lib.require_writable, folder)
  shots = list(settings.num_fewshot or (tasks.PAPER_SHOTS if tasks.is_paper(settings.names) else (None,)))
  theirs = [] if baseline is None else report.read(baseline, settings.folder)
  names, manager = [], None
  if settings.names:
    with _lm_eval_errors(settings):
      manager = tasks.make_manager(settings.include_path, settings.default_tasks)
      names = tasks.match(settings.names, manager)
  lm = adapter.DiffEqLM(
    workdir,
    config=config,
    num_steps=config.eval.num_steps if num_steps is None else num_steps,
    batch_size=settings.batch_size,
    dtype=settings.dtype,
    begin_mark=settings.begin_mark,
    window=settings.window,
    stride=settings.stride,
  )
  # Each file is written as soon as its numbers are known, so that no later error loses them.
  save = functools.partial(distributed.on_main_process, _save, folder, [])
  text, ours = None, list[report.Results]()
  if texts is not None:
    text = lm.measure_perplexity(map(text_of, texts.documents()), settings.limit)
    conditions = {name: lm.get_model_info()[name] for name in CONDITIONS}
    save("perplexity.json", {"text": settings.text, **text, **conditions})
  for count in shots if names else ():
    ours.append(_evaluate(lm, names, manager, count, settings))
    save(report.NAME if count is None else f"results_{count}shot.json", ours[-1])
  found, info = report.collect_estimates(ours), lm.get_model_info()
  if theirs and ours and not found.keys() & report.collect_estimates(theirs).keys():
    say(f"--baseline={baseline}: has no number in common with these results; run --job=harness on it with the same")
  save("table.md", report.make_table(ours, theirs, _describe(settings, info, shots, ours, theirs, text)))
  tested = lambda key: key.task if key.shots is None else f"{key.task} ({key.shots}-shot)"
  accuracies = {tested(key): round(one.value, 4) for key, one in found.items() if key.metric == "acc"}
  return print_result(
    "harness",
    workdir,
    step=info["checkpoint_step"],
    results=folder,
    begin_mark=info["begin_mark"],
    acc=accuracies,
    text=text,
    seconds=time.perf_counter() - start,
  )


def _open_text(config: Config) -> sources.Source | None:
  """The text of `harness.text`, if there is one, read as the keys of `data` say."""
  options = sources.Options(**{key: getattr(config.data, key) for key in KEYS_OF_TEXT})
  text = config.harness.text
  return None if text is None else sources.open_source(text, "harness.text", options)


@contextlib.contextmanager
def _lm_eval_errors(settings: HarnessConfig) -> Iterator[None]:
  """Around calls of lm_eval: keeps stdout for our line, and reports errors of tasks and their data in one line."""
  try:
    with mock.patch.dict(os.environ, ENVIRONMENT), contextlib.redirect_stdout(sys.stderr):
      yield
  except (UserError, RunError, jax.errors.JaxRuntimeError):
    raise
  except ImportError as error:
    raise UserError(
      f"harness.tasks={settings.tasks}: a task needs another package ({first_line(error, 200)}); install lm_eval's "
      "extra for it, for example pip install 'lm_eval[ifeval]' or 'lm_eval[tasks]', or name other tasks"
    ) from error
  except Exception as error:  # whatever the functions of a task raise
    if any(frame.filename == OURS for frame in traceback.extract_tb(error.__traceback__)):
      raise
    raise UserError(
      f"harness.tasks={settings.tasks}: a task or its data can't be used ({type(error).__name__}: "
      f"{first_line(error, 200)}); check that its data can be downloaded or is cached, correct the "
      "task's files, or name other tasks"
    ) from error


def _evaluate(lm: Any, names: list[str], manager: Any, shots: int | None, settings: HarnessConfig) -> report.Results:
  """lm_eval's results, with `shots` examples before each question; None: as many as each task says."""
  from lm_eval import simple_evaluate

  from diffeq_nnx.harness import tasks

  lm.truncated = lm.merged = 0
  with _lm_eval_errors(settings), tasks.mending(lm.check_task):
    found = simple_evaluate(
      model=lm,
      tasks=names,
      num_fewshot=shots,
      limit=settings.limit,
      batch_size=settings.batch_size,
      apply_chat_template=settings.apply_chat_template,
      fewshot_as_multiturn=settings.fewshot_as_multiturn,
      task_manager=manager,
      log_samples=False,
      bootstrap_iters=BOOTSTRAP,
    )
  found["config"]["model"] = "diffeq_nnx"
  if any(found["n-shot"].values()):
    found["config"]["examples"] = "never the question"  # see `tasks.mending`
  if settings.apply_chat_template:
    found["config"]["chat_template"] = report.CHAT_FORMS[settings.fewshot_as_multiturn]
  return found


def _describe(
  settings: HarnessConfig,
  info: dict[str, Any],
  shots: list[int | None],
  ours: list[report.Results],
  theirs: list[report.Results],
  text: dict[str, Any] | None,
) -> list[str]:
  """What a reader of the table must know: of our results, the baseline's, those of a text and about the model."""
  mark = lambda name: "none" if info[name] is None else f"the mark {info[name]}"
  truncated, merged = (
    ", ".join(
      str(one["config"][name]) + ("" if count is None else f" ({count}-shot)") for one, count in zip(ours, shots)
    )
    for name in ("truncated_requests", "merged_requests")
  )
  notes = [
    f"begin mark: {info['begin_mark']}; contexts begin with {mark('mark_before_contexts')}, and texts without a "
    f"context follow {mark('mark_before_texts_without_context')}",
    f"computed in {info['dtype']}, {info['num_steps']} solver steps; checkpoint {info['checkpoint_step']}",
    f"windows over long texts: {info['rolling_windows']}; {info['max_length']} tokens at a time",
  ]
  if ours:
    notes.append(
      f"requests that lost the beginning of their context: {truncated}; continuations that merged into it: {merged}"
    )
    if settings.apply_chat_template:
      notes.append(f"the run's chat template writes the contexts: {ours[0]['config']['chat_template']}")
  notes += report.note_differences(ours, theirs)
  if settings.limit is not None:
    notes.append(f"only the first {settings.limit} of each task: not comparable with published results")
  if text is not None:
    per = ", ".join(f"{text[f'perplexity_per_{unit}']:.4f} a {unit}" for unit in ("token", "word", "byte"))
    notes.append(f"{settings.text}: perplexity {per}, over {text['documents']} documents")
  return notes


def _save(folder: str, saved: list[str], name: str, content: Any) -> None:
  """Writes a text, or a value as JSON, to a file of results.

  Results of an earlier job, which are not among the names `saved` so far, are removed.
  """
  if not isinstance(content, str):
    content = json.dumps(to_finite(content), indent=2, default=str, ensure_ascii=False) + "\n"
  with files.writing(folder, "copy the run to a place of yours"):
    files.make_folder(folder)
    for old in files.list_sizes(folder):
      if old not in saved and re.fullmatch(r"results(_\d+shot)?\.json|perplexity\.json|table\.md", old):
        files.remove(os.path.join(folder, old))
    files.write(os.path.join(folder, name), content.encode())
  saved.append(name)
