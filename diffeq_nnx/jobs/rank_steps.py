"""--job=rank_steps: the order in which the steps of a run's model matter, by which it serves all fewer steps too."""

import dataclasses
import os
import time
from typing import Any

import jax
import numpy as np

from diffeq_nnx import files
from diffeq_nnx.analysis.ranking import Ranker, leave_out
from diffeq_nnx.config import KEYS_OF_ROWS, NO_TEXT, Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.jobs.deriving import load_text, make_batches, use_tokenizer
from diffeq_nnx.model import grids
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import draw, markdown, print_result, say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, checked_mesh

WAYS = ("loss", "influence")
RESULT, PICTURE = "steps.json", "steps.png"


def rank_steps(
  config: Config, workdir: str, *, num_steps: int | None = None, tokens: int = 8192, by: str = "loss"
) -> dict[str, Any]:
  """Finds in which order the steps of a run's newest model matter, and saves it with the run as model.depth_order.

  By loss, it leaves out the step whose absence costs least, and again of what is left, until `num_steps` are left;
  these are ordered by their influence. It prints a table on stderr and one JSON line on stdout, and writes steps.json
  and steps.png. The same command continues what was interrupted.

  Args:
    config: of the run, perhaps with other keys of `data`; the text is the training part of it.
    tokens: of the text that losses are measured on, rounded up to whole batches.

  Raises:
    UserError: a model of one step or another than the run's, a number out of range, no text or that of another
      tokenizer, no checkpoint, or a directory that can't be written.
    RunError: the disk is full.
  """
  own, start = config.model.num_steps, time.perf_counter()
  fewest = (own + 1) // 2 if num_steps is None else num_steps
  if own == 1:
    raise UserError("model.num_steps=1: the run has one step, which can't be left out")
  if not 0 < fewest < own:
    raise UserError(f"num_steps={fewest}: must be from 1 to {own - 1}, less than the run's own {own} steps")
  if tokens < 1:
    raise UserError(f"tokens={tokens}: must be 1 or above")
  if by not in WAYS:
    raise UserError(f"by={by!r}: must be one of {', '.join(WAYS)}")
  if by == "influence" and num_steps is not None:
    raise UserError(f"num_steps={num_steps}: is for by=loss, since by=influence ranks all steps; leave it out")
  if config.data.source == NO_TEXT:
    raise UserError("data.source=none: the run has no text yet; name one with --config.data.source")
  mesh = checked_mesh(config, trains=False)
  run = Run.open(workdir, mesh=mesh)
  distributed.on_main_process(workdir_lib.require_writable, workdir)
  workdir_lib.require(workdir, dataclasses.replace(run.started, model=config.model))
  with jax.set_mesh(mesh):
    config = use_tokenizer(config, run, workdir)
    corpus = load_text(config, run)
    assert corpus is not None  # the config names one
    batches = make_batches(config, corpus, tokens)
    ranker = Ranker(run.config.model, run.params, batches)
    key = {"step": run.step, "by": by, "text": corpus.fingerprint, "tokens": sum(b["inputs"].size for b in batches)}
    key |= {"seed": config.seed, **{name: getattr(config.data, name) for name in KEYS_OF_ROWS}}
    path = os.path.join(workdir, RESULT)
    known = files.read_notes(path)
    if others := [name for name, value in key.items() if known.get(name) != value]:
      if known:
        say(f"replacing the ranking in {path}, which differs in: {', '.join(others)}")
      loss, influences = ranker.measure_whole()
      known = {**key, "loss": loss, "influences": influences.tolist(), "left_out": []}
      files.write_json(path, known)
      say(f"{own} steps: loss {loss:.4f}")
    else:
      say(f"continuing from {path}, with {own - len(known['left_out'])} steps left")
    left_out, loss = known["left_out"], known["loss"]
    if by == "loss":
      kept = sorted(set(range(own)) - {step for step, _ in left_out})
      for step, found in leave_out(ranker.losses, kept, fewest):
        left_out.append((step, found))
        files.write_json(path, known)
        say(f"{own - len(left_out)} steps: without step {step}, loss {found:.4f} ({found - loss:+.4f})")
  gone = [step for step, _ in left_out]
  kept = [step for step in np.argsort(known["influences"], kind="stable")[::-1].tolist() if step not in gone]
  order = (*kept, *reversed(gone))
  _warn_of_even_steps(run.started)
  workdir_lib.set_depth_order(workdir, order)
  say(_table(known, own))
  _draw(known, grids.make_grid(config.model), os.path.join(workdir, PICTURE))
  seconds = time.perf_counter() - start
  return print_result("rank_steps", workdir, **known, depth_order=order, seconds=seconds)


def _warn_of_even_steps(config: Config) -> None:
  """Warns if a run was trained at fewer even steps over its horizon, in whose place an order leaves steps out."""
  model, fewer = config.model, [count for count in config.train.step_counts if count < config.model.num_steps]
  if fewer and model.weights == "generated" and not model.depth_order:
    say(
      f"warning: this run was trained at {', '.join(map(str, fewer))} even steps; from now on, jobs and training "
      f"take so many of its {model.num_steps} steps instead; --config.model.depth_order='()' gives the even ones back"
    )


def _table(known: dict[str, Any], own: int) -> str:
  influences = known["influences"]
  if known["by"] == "influence":
    rows = [[str(step), f"{influences[step]:.4f}"] for step in np.argsort(influences).tolist()]
    return markdown(["step, from the one that matters least", "influence"], rows)
  rows = [[str(own), "", f"{known['loss']:.4f}", "", ""]]
  for step, loss in known["left_out"]:
    rows.append(
      [str(own - len(rows)), str(step), f"{loss:.4f}", f"{loss - known['loss']:+.4f}", f"{influences[step]:.4f}"]
    )
  return markdown(["steps", "left out", "loss", "price", "influence"], rows)


def _draw(known: dict[str, Any], grid: grids.Grid, path: str) -> None:
  """Loss against the steps that are left, where it was measured, and the influence of each step over time."""

  def fill(figure: Any) -> None:
    losses = [known["loss"], *(loss for _, loss in known["left_out"])]
    *left, right = figure.subplots(1, 2 if len(losses) > 1 else 1, squeeze=False)[0]
    for axes in left:
      axes.plot([grid.num_steps - place for place in range(len(losses))], losses, "o-", markersize=4)
      axes.set(xlabel="solver steps (layers) that are left", ylabel="loss, nats per token")
      axes.xaxis.get_major_locator().set_params(integer=True)
      axes.grid(alpha=0.3)
    gone = {step for step, _ in known["left_out"]}
    colors = ["tab:gray" if step in gone else "tab:blue" for step in range(grid.num_steps)]
    right.bar(grid.edges[:-1], known["influences"], np.diff(grid.edges), align="edge", color=colors, edgecolor="white")
    right.set(xlabel="depth t", ylabel="influence, 1 - cos" + ("; gray: left out" if gone else ""))

  draw(path, (8, 3.6), fill)
