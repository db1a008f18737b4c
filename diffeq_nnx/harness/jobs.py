"""--job=harness: a run's newest model, evaluated by lm_eval."""

import json
import os
import time
from typing import Any

from diffeq_nnx import distributed
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.config import Config, HarnessConfig
from diffeq_nnx.data import sources
from diffeq_nnx.errors import RunError, UserError, first_line
from diffeq_nnx.files import write, write_json
from diffeq_nnx.harness import report
from diffeq_nnx.report import print_result


def evaluate_downstream(config: Config, workdir: str, *, baseline: str | None = None,
                        num_steps: int | None = None) -> dict[str, Any]:
  """Evaluates the newest model of a run with lm_eval, and prints one JSON line on stdout.

  In `config.harness.folder` of the run's directory are then results.json as lm_eval writes it (results_5shot.json and
  so on where numbers of examples are given), table.md, bars.png, and perplexity.json if there is a `text`.

  Args:
    config: of the run; `config.harness` says what to do.
    workdir: the run's directory.
    baseline: another run's directory that has results, or a results.json, to be shown beside.
    num_steps: of the solver; None: eval.num_steps, or else the model's own.

  Raises:
    UserError: lm_eval is missing, an unknown task, data that can't be had, no checkpoint, or no such baseline.
    RunError: the results can't be written.
  """
  distributed.end_on_sigterm()
  start, settings = time.perf_counter(), config.harness
  try:
    import lm_eval  # an extra: only this job needs it
  except ImportError as error:
    raise UserError("--job=harness: needs lm_eval; pip install 'diffeq-nnx[harness]'", everywhere=True) from error
  from diffeq_nnx.harness import adapter, perplexity, tasks
  workdir_lib.require(workdir, config)
  shots = list(settings.num_fewshot or (tasks.PAPER_SHOTS if settings.tasks == "paper" else (None,)))
  theirs = [] if baseline is None else report.read(baseline, settings.folder)
  options = sources.Options(text_key=config.data.text_key, bad_records=config.data.bad_records)
  texts = None if settings.text is None else sources.open_source(settings.text, "harness.text", options)
  names, manager = [], None
  if settings.tasks and settings.tasks != "none":
    manager = tasks.manager(settings.include_path, settings.default_tasks)
    names = tasks.chosen(settings.tasks, manager)
  lm = adapter.DiffEqLM(workdir, batch_size=settings.batch_size, dtype=settings.dtype, begin_mark=settings.begin_mark,
                        window=settings.window, stride=settings.stride, num_steps=num_steps)
  ours = [_evaluated(lm_eval, lm, names, manager, settings, one) for one in (shots if names else [])]
  said = None if texts is None else perplexity.corpus_perplexity(lm, texts.documents(), settings.limit)
  folder = os.path.join(workdir, settings.folder)
  info = lm.get_model_info()
  with distributed.together():
    if distributed.leads():
      _write(folder, ours, theirs, shots, said, info, settings, (os.path.basename(os.path.abspath(workdir)), baseline))
  accuracies = {f"{task}{'' if count is None else f' ({count}-shot)'}": round(figure.value, 4) for one in ours
                for (task, count, metric, _), figure in report.figures(one).items() if metric in report.BARS[:1]}
  return print_result({"job": "harness", "workdir": workdir, "step": info["checkpoint_step"], "results": folder,
                       "begin_mark": info["begin_mark"], "acc": accuracies, "text": said,
                       "seconds": time.perf_counter() - start})


def _evaluated(lm_eval: Any, lm: Any, names: list[str], manager: Any, settings: HarnessConfig,
               shots: int | None) -> dict[str, Any]:
  """lm_eval's results with so many examples before each question."""
  lm.encoder.truncated = 0
  try:
    results = lm_eval.simple_evaluate(model=lm, tasks=names, num_fewshot=shots, limit=settings.limit,
                                      batch_size=settings.batch_size, task_manager=manager, log_samples=False)
  except (ConnectionError, FileNotFoundError) as error:
    raise UserError(f"harness.tasks={settings.tasks}: the data of a task can't be had ({first_line(error, 200)}); see "
                    "that they can be downloaded or are cached, or name other tasks") from error
  results["config"]["model"] = "diffeq_nnx"
  return results


def _write(folder: str, ours: list[dict], theirs: list[dict], shots: list[int | None], said: dict | None,
           info: dict[str, Any], settings: HarnessConfig, names: tuple[str, str | None]) -> None:
  """Writes the job's files.

  Raises:
    RunError: they can't be written.
  """
  lost = ", ".join(f"{one['config']['truncated_requests']}{'' if count is None else f' ({count}-shot)'}"
                   for one, count in zip(ours, shots))
  notes = [f"begin mark: {info['begin_mark']}; contexts begin with {_mark(info['mark_before_contexts'])}, and texts "
           f"without a context follow {_mark(info['mark_before_texts_without_context'])}",
           f"computed in {info['dtype']}, {info['num_steps']} solver steps; checkpoint {info['checkpoint_step']}",
           f"windows over long texts: {info['rolling_windows']}; {info['max_length']} tokens at a time",
           *([f"requests that lost the beginning of their context: {lost}"] if lost else [])]
  if settings.limit is not None:
    notes.append(f"only the first {settings.limit} of each task: not to be compared with others' figures")
  if said is not None:
    notes.append(f"{settings.text}: perplexity {said['perplexity_per_token']:.4f} a token, "
                 f"{said['perplexity_per_word']:.4f} a word, {said['perplexity_per_byte']:.4f} a byte, over "
                 f"{said['documents']} documents")
  try:
    os.makedirs(folder, exist_ok=True)
    for one, count in zip(ours, shots):
      text = json.dumps(one, indent=2, default=str, ensure_ascii=False)
      write(os.path.join(folder, report.name_of(count)), text.encode())
    if said is not None:
      how = {name: info[name] for name in ("rolling_windows", "max_length", "mark_before_texts_without_context",
                                           "dtype", "num_steps", "checkpoint_step")}
      write_json(os.path.join(folder, "perplexity.json"), {"text": settings.text, **said, **how})
    write(os.path.join(folder, "table.md"), report.table(ours, theirs, notes).encode())
    other = names[1] and os.path.basename(os.path.abspath(names[1]))
    report.draw(os.path.join(folder, "bars.png"), ours, theirs, (names[0], other or ""))
  except OSError as error:
    raise RunError(f"{folder}: can't be written ({error.strerror or error})") from error


def _mark(token: int | None) -> str:
  return "none" if token is None else f"the mark {token}"
