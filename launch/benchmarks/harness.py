"""lm_eval's results and requests per second: a run here against the same weights in lm_eval's hf backend.

  python -m diffeq_nnx.main --job=export --workdir=runs/smol --out=exported/smol
  python -m launch.benchmarks.harness --workdir=runs/smol --folder=exported/smol --out=harness/smol \\
      --include_path=docs/tasks --tasks=everyday [--limit=0] [--num_fewshot=0] [--batch_size=16]
      [--text=FILE --windows=512,2048 --ways=disjoint,sliding]

`--folder` holds the weights of the run's newest model for transformers. Both compute in float32 on the CPU. Each task
is done here and then by the hf backend, with `--batch_size` sequences there, over its first `--limit` questions (0: all
of them). Results are kept in `--out`, by task and side, and what is there is not computed again; for another model,
or task files of another folder, name another `--out`. Seconds are those of the calls for log-likelihoods, the
compilation here included.

With `--text` the perplexity of a file, as one text, is computed in windows of each length: `disjoint` windows lie side
by side, `sliding` ones move by half their length. There transformers computes the same windows one by one. The
results are kept in `--out` after every 100 windows, so that a command that was interrupted goes on there.
"""

from collections.abc import Callable
import functools
import itertools
import os
import time
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
import numpy as np
import torch

from diffeq_nnx import files
from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.runs import workdir as workdir_lib
from launch import programs
from launch.experiments import tables

PART = 100  # windows whose results are written together
Windows = list[tuple[list[int], list[int]]]


def evaluate(lm: Any, task: str, manager: TaskManager, arguments: Any) -> dict[str, Any]:
  """lm_eval's figures of a task, the log-likelihood of each request, and seconds."""
  seconds, compute = [0.0], lm.loglikelihood

  def timed(requests, **keywords):
    start = time.perf_counter()
    found = compute(requests, **keywords)
    seconds[0] += time.perf_counter() - start
    return found

  lm.loglikelihood = timed
  few, limit = arguments.num_fewshot, arguments.limit or None
  found = simple_evaluate(lm, tasks=[task], num_fewshot=few, limit=limit, task_manager=manager, bootstrap_iters=100)
  lm.loglikelihood = compute
  samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
  scores = [answer[0][0] for sample in samples for answer in sample["resps"]]
  metrics = {
    name.removesuffix(",none"): value for name, value in found["results"][task].items() if name.endswith(",none")
  }
  return {"metrics": metrics, "questions": len(samples), "scores": scores, "seconds": seconds[0]}


def compare(task: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
  """A row of the table."""
  cells = []
  for side in (ours, theirs):
    metrics = side["metrics"]
    shown = f"{metrics['acc']:.4f} ± {metrics['acc_stderr']:.4f}"
    cells.append(f"{shown}, perplexity {metrics['perplexity']:.3f}" if "perplexity" in metrics else shown)
  difference = float(np.abs(np.subtract(ours["scores"], theirs["scores"])).max())
  rates = [len(side["scores"]) / side["seconds"] for side in (ours, theirs)]
  speeds = [*(f"{rate:.1f}" for rate in rates), f"{rates[0] / rates[1]:.2f}"]
  return [task, f"{ours['questions']:,}", *cells, f"{difference:.1e}", *speeds]


def measure(path: str, windows: Windows, count_nats: Callable[[Windows], float]) -> float:
  """Nats of all windows; they are counted, and written to files that begin with `path`, in parts."""
  parts = [windows[first : first + PART] for first in range(0, len(windows), PART)]
  remember = lambda number: tables.remember(f"{path}_{number}.json", functools.partial(count_nats, parts[number]))
  return tables.remember(f"{path}.json", lambda: sum(map(remember, range(len(parts)))))


def count_here(lm: DiffEqLM, windows: Windows) -> float:
  """Nats of the continuations in windows by this package."""
  requests = [Request(tuple(context), tuple(continuation)) for context, continuation in windows]
  return -sum(score.logprob for _, score in lm.scorer(requests))


def count_there(model: Any, windows: Windows) -> float:
  """Nats of the continuations in windows by transformers."""
  nats = 0.0
  for context, continuation in windows:
    tokens = torch.tensor([[*context, *continuation[:-1]]])
    with torch.no_grad():
      logits = model(tokens, logits_to_keep=len(continuation)).logits[0]
    scores = torch.log_softmax(logits, -1).gather(1, torch.tensor(continuation)[:, None])
    nats -= scores.sum(dtype=torch.float64).item()
  return nats


def main() -> None:
  """Evaluates what is not in the folder yet, and prints the tables."""
  names = dict(workdir=str, folder=str, out=str, include_path="docs/tasks", tasks=["everyday"], text=None)
  names |= dict(num_fewshot=0, batch_size=16)
  parser = programs.make_parser(__doc__, **names, windows=[512], ways=["disjoint", "sliding"], limit=0)
  arguments = parser.parse_args()
  hf = HFLM(pretrained=arguments.folder, device="cpu", dtype="float32", batch_size=arguments.batch_size)
  ours = DiffEqLM(arguments.workdir, dtype="float32")
  manager = TaskManager(include_path=arguments.include_path, include_defaults=False)
  text = files.read(arguments.text).decode() if arguments.text else ""
  settings = ("folder", "include_path", "num_fewshot", "batch_size", "limit")
  model = {"run": workdir_lib.run_hash(arguments.workdir), **ours.get_model_info()}
  tables.require_settings(arguments.out, {name: getattr(arguments, name) for name in settings} | model)
  rows = []
  for task in filter(None, arguments.tasks):
    found = []
    for name, side in (("ours", ours), ("hf", hf)):
      path = os.path.join(arguments.out, f"{task}_{name}.json")
      found.append(tables.remember(path, functools.partial(evaluate, side, task, manager, arguments)))
    rows.append(compare(task, *found))
  head = ["task", "questions", "ours: acc", "hf: acc", "largest difference", "ours, requests/s", "hf, requests/s"]
  print(f"{programs.describe_device()}, torch {torch.__version__}\n\n{tables.markdown([*head, 'ratio'], rows)}\n")
  if not text:
    return
  rows = []
  for window, length in itertools.product(arguments.ways, arguments.windows):
    lm = DiffEqLM(arguments.workdir, dtype="float32", max_length=length, window=window)
    name, windows = f"{files.hash_json(text)[:12]}_{window}{length}", lm.make_windows(text)
    path = os.path.join(arguments.out, name)
    ours = measure(f"{path}_ours", windows, functools.partial(count_here, lm))
    theirs = measure(f"{path}_hf", windows, functools.partial(count_there, hf.model))
    sizes = len(text.split()), len(text.encode())
    rows.append([window, str(length), *(f"{np.exp(nats / size):.4f}" for size in sizes for nats in (ours, theirs))])
  units = [f"{side}, a {unit}" for unit in ("word", "byte") for side in ("ours", "transformers")]
  print(tables.markdown(["windows", "length", *units], rows))


if __name__ == "__main__":
  programs.start(main)
