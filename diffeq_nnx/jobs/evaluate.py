"""--job=evaluate: validation of a run's newest model, at one number of solver steps or at several."""

from collections.abc import Sequence
import os
from typing import Any

import jax

from diffeq_nnx.config import Config, check_num_steps
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import draw, markdown, print_result, say
from diffeq_nnx.runs.run import Run, checked_mesh
from diffeq_nnx.training import flops
from diffeq_nnx.training.evaluate import Evaluator

PICTURE = "depths.png"


def evaluate(config: Config, workdir: str, *, num_steps: int | Sequence[int] | None = None) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  With several numbers of solver steps, the line has a list of values, a table of them is printed on stderr, and
  `depths.png` is drawn in the work directory. Tokens per second are those of a second run over the validation text,
  when the program is compiled; `flops_per_token` are those of the forward pass.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, a mesh that the devices don't make, or a number of steps that the model has no weights for.
  """
  counts = num_steps if isinstance(num_steps, Sequence) else [num_steps]
  for count in counts:
    check_num_steps(config.model, "num_steps", count)
  mesh = checked_mesh(config, trains=False)
  with jax.set_mesh(mesh):
    run = Run.open(workdir, config, mesh=mesh)
    corpus, params, step = run.corpus, run.params, run.step
    for count in counts:
      run.say_untrained(count or config.eval.num_steps)
    if not isinstance(num_steps, Sequence):
      evaluator = Evaluator(config, corpus, mesh, num_steps)
      return print_result("evaluate", workdir, step=step, num_steps=evaluator.num_steps, **evaluator(params))
    rows = []
    for count in num_steps:
      evaluator = Evaluator(config, corpus, mesh, count)
      evaluator(params)  # compiles
      values = evaluator(params)
      per_token = flops.forward_flops(config.model, count)
      speed = values["tokens"] / values["seconds"]
      rows.append({"num_steps": count, **values, "tokens_per_second": speed, "flops_per_token": per_token})
  say(_table(rows))
  result = print_result("evaluate", workdir, step=step, by_num_steps=rows)
  distributed.on_main_process(_draw, rows, os.path.join(workdir, PICTURE))
  return result


def _table(rows: list[dict[str, Any]]) -> str:
  cells = []
  for row in rows:
    costs = f"{row['tokens_per_second']:,.0f}", f"{row['flops_per_token'] / 1e6:,.2f}"
    cells.append([str(row["num_steps"]), f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", *costs])
  return markdown(["steps", "loss", "perplexity", "tokens/s", "MFLOP a token"], cells)


def _draw(rows: list[dict[str, Any]], path: str) -> None:
  """Losses and rates against the number of steps."""

  def fill(figure: Any) -> None:
    counts = [row["num_steps"] for row in rows]
    labels = ("validation loss, nats per token", "tokens/s")
    for axes, key, label in zip(figure.subplots(1, 2), ("loss", "tokens_per_second"), labels, strict=True):
      axes.plot(counts, [row[key] for row in rows], "o-", markersize=4)
      axes.set(xlabel="solver steps (layers)", ylabel=label, xticks=counts)
      axes.grid(alpha=0.3)

  draw(path, (8, 3.6), fill)
