"""Time and peak memory of the analysis of a model: spectra, and sensitivity to the tokens of a text.

  python -m launch.benchmarks.analysis --config=configs/gpt_small.py [--tokens=32] [--leading=16] \
      [--set=model.num_steps=4]

Each measurement is one run, including compilation, with initial weights and a text of `--tokens` random tokens, for
which it computes `--leading` exponents. The peak is that of the process so far. Prints one JSON line at the end.
"""

from collections.abc import Callable
import functools
import json
import resource
import time
from typing import Any

import jax
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.analysis.findings import show_progress
from diffeq_nnx.analysis.sensitivity import FORMS, exponents
from diffeq_nnx.analysis.spectra import spectra
from launch import programs


def time_call(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
  """The result, seconds, and the peak memory so far in GiB."""
  start = time.perf_counter()
  made = work()
  seconds = time.perf_counter() - start
  return made, {
    "seconds": round(seconds, 4),
    "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
  }


def measure(config: config_lib.Config, num_tokens: int, leading: int) -> dict[str, dict[str, float]]:
  """Seconds and memory by task."""
  analyzed, times = time_call(lambda: jax.block_until_ready(AnalyzedModel(programs.init_model(config))))
  found = {"weights": times}
  with show_progress("spectra", analyzed.grid.num_steps) as progress:
    found["spectra"] = time_call(lambda: spectra(analyzed, progress=progress))[1]
  tokens_L = np.random.default_rng(0).integers(config.model.vocab_size, size=num_tokens)
  for form in FORMS:
    with show_progress(form, num_tokens) as progress:
      settings = {"leading": leading, "form": form, "progress": progress}
      found[form] = time_call(functools.partial(exponents, analyzed, tokens_L, **settings))[1]
  return found


def main(argv: list[str] | None = None) -> None:
  """Measures and prints."""
  args = programs.make_parser(__doc__, config=str, tokens=32, leading=16).parse_args(argv)
  config = config_lib.load(args.config, args.set)
  given = {"config": args.config, "tokens": args.tokens, "leading": args.leading}
  print(json.dumps(given | measure(config, args.tokens, args.leading)))


if __name__ == "__main__":
  programs.start(main)
