"""--job=harness: a run's newest model, evaluated by lm_eval."""

import contextlib
import json
import os
import re
import sys
import time
from typing import Any, Iterator

import jax

from diffeq_nnx.config import Config, HarnessConfig
from diffeq_nnx.data import sources
from diffeq_nnx.errors import RunError, UserError, first_line
from diffeq_nnx.files import write, write_json
from diffeq_nnx.harness import report
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib

BOOTSTRAP = 1000  # resamples for errors that have no formula, those of perplexities
ENVIRONMENT = {  # of lm_eval
    "DISABLE_MULTIPROC": "1",  # errors by bootstrap without forks, which JAX may not survive
    "LOCAL_RANK": "0"}  # the results are put together in every process


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

    from diffeq_nnx.harness import adapter, perplexity, tasks
  except ImportError as error:
    raise UserError("--job=harness: needs lm_eval 0.4.13 or later; pip install 'diffeq-nnx[harness]'",
                    everywhere=True) from error
  workdir_lib.require(workdir, config)
  shots = list(settings.num_fewshot or (tasks.PAPER_SHOTS if tasks.is_paper(settings.names) else (None,)))
  theirs = [] if baseline is None else report.read(baseline, settings.folder)
  options = sources.Options(config.data.text_key, config.data.bad_records, config.data.tfds_dir, config.data.download)
  texts = None if settings.text is None else sources.open_source(settings.text, "harness.text", options)
  names, manager = [], None
  if settings.names:
    with _of_lm_eval(settings):
      manager = tasks.manager(settings.include_path, settings.default_tasks)
      names = tasks.chosen(settings.names, manager)
      if "generate_until" in tasks.kinds(names, manager):  # before anything is computed
        adapter.check_generating()
  lm = adapter.DiffEqLM(workdir, batch_size=settings.batch_size, dtype=settings.dtype, begin_mark=settings.begin_mark,
                        window=settings.window, stride=settings.stride, config=config,
                        num_steps=config.eval.num_steps if num_steps is None else num_steps)
  ours = [_evaluated(lm_eval, lm, names, manager, settings, one) for one in (shots if names else [])]
  said = None if texts is None else perplexity.corpus_perplexity(lm, texts.documents(), settings.limit)
  if theirs and ours and not report.shared(ours, theirs):
    raise UserError(f"--baseline={baseline}: has no number in common with harness.tasks={settings.tasks}, "
                    f"{len(shots)} numbers of examples; run --job=harness on it with the same")
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


@contextlib.contextmanager
def _of_lm_eval(settings: HarnessConfig) -> Iterator[None]:
  """Around what lm_eval does: stdout is kept for our line, nothing forks, and errors of tasks and data are one line."""
  import jinja2  # with lm_eval
  kept = {name: os.environ.get(name) for name in ENVIRONMENT}
  os.environ.update(ENVIRONMENT)
  try:
    with contextlib.redirect_stdout(sys.stderr):
      yield
  except (UserError, RunError):
    raise
  except (OSError, ValueError, KeyError, TypeError, RuntimeError, jinja2.TemplateError) as error:
    if isinstance(error, jax.errors.JaxRuntimeError):
      raise  # of a device, not of a task
    raise UserError(f"harness.tasks={settings.tasks}: a task or its data can't be used ({type(error).__name__}: "
                    f"{first_line(error, 200)}); see that data can be downloaded or is cached, mend the task's files, "
                    "or name other tasks") from error
  finally:
    for name, value in kept.items():
      os.environ.pop(name) if value is None else os.environ.update({name: value})


def _evaluated(lm_eval: Any, lm: Any, names: list[str], manager: Any, settings: HarnessConfig,
               shots: int | None) -> dict[str, Any]:
  """lm_eval's results with so many examples before each question."""
  lm.encoder.truncated = lm.encoder.merged = 0
  with _of_lm_eval(settings):
    results = lm_eval.simple_evaluate(model=lm, tasks=names, num_fewshot=shots, limit=settings.limit,
                                      batch_size=settings.batch_size, task_manager=manager, log_samples=False,
                                      bootstrap_iters=BOOTSTRAP)
  results["config"]["model"] = "diffeq_nnx"
  return results


def _write(folder: str, ours: list[dict], theirs: list[dict], shots: list[int | None], said: dict | None,
           info: dict[str, Any], settings: HarnessConfig, names: tuple[str, str | None]) -> None:
  """Writes the job's files.

  Raises:
    RunError: they can't be written.
  """
  lost, merged = (", ".join(f"{one['config'][name]}{'' if count is None else f' ({count}-shot)'}"
                            for one, count in zip(ours, shots)) for name in ("truncated_requests", "merged_requests"))
  notes = [f"begin mark: {info['begin_mark']}; contexts begin with {_mark(info['mark_before_contexts'])}, and texts "
           f"without a context follow {_mark(info['mark_before_texts_without_context'])}",
           f"computed in {info['dtype']}, {info['num_steps']} solver steps; checkpoint {info['checkpoint_step']}",
           f"windows over long texts: {info['rolling_windows']}; {info['max_length']} tokens at a time",
           *([f"requests that lost the beginning of their context: {lost}; continuations that merged into it: {merged}"]
             if ours else []), *report.differences(ours, theirs)]
  if settings.limit is not None:
    notes.append(f"only the first {settings.limit} of each task: not to be compared with others' figures")
  if said is not None:
    notes.append(f"{settings.text}: perplexity {said['perplexity_per_token']:.4f} a token, "
                 f"{said['perplexity_per_word']:.4f} a word, {said['perplexity_per_byte']:.4f} a byte, over "
                 f"{said['documents']} documents")
  written = {"table.md", "bars.png"}
  try:
    os.makedirs(folder, exist_ok=True)
    for one, count in zip(ours, shots):
      text = json.dumps(one, indent=2, default=str, ensure_ascii=False)
      write(os.path.join(folder, report.name_of(count)), text.encode())
      written.add(report.name_of(count))
    if said is not None:
      how = {name: info[name] for name in ("rolling_windows", "max_length", "mark_before_texts_without_context",
                                           "dtype", "num_steps", "checkpoint_step")}
      write_json(os.path.join(folder, "perplexity.json"), {"text": settings.text, **said, **how})
      written.add("perplexity.json")
    write(os.path.join(folder, "table.md"), report.table(ours, theirs, notes).encode())
    other = names[1] and os.path.basename(os.path.abspath(names[1]))
    if not report.draw(os.path.join(folder, "bars.png"), ours, theirs, (names[0], other or "")):
      written.remove("bars.png")
    for name in os.listdir(folder):  # of an earlier job
      if name not in written and re.fullmatch(r"results(_\d+shot)?\.json|bars\.png|perplexity\.json", name):
        os.remove(os.path.join(folder, name))
  except OSError as error:
    raise RunError(f"{folder}: can't be written ({error.strerror or error})") from error


def _mark(token: int | None) -> str:
  return "none" if token is None else f"the mark {token}"
