"""Time and peak memory of the analysis of a model: spectra, and sensitivity to the tokens of a text.

  python -m launch.benchmarks.analysis --config=configs/gpt_small.py [--set=model.num_steps=4]

Each measurement is one run, including compilation, with initial weights and a text of 32 random tokens, for which it
computes 16 exponents. The peak is that of the process so far. Prints one JSON line at the end.
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
from diffeq_nnx.analysis.sensitivity import FORMS, exponents
from diffeq_nnx.analysis.spectra import spectra
from launch import programs

TOKENS, LEADING = 32, 16


def time_call(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
  """The result, seconds, and the peak memory so far in GiB."""
  start = time.perf_counter()
  made = work()
  seconds = time.perf_counter() - start
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return made, {"seconds": round(seconds, 4), "peak_gib": round(peak, 2)}


def main(argv: list[str] | None = None) -> None:
  """Measures and prints."""
  args = programs.make_parser(__doc__, config=str).parse_args(argv)
  config = config_lib.load(args.config, args.set)
  found: dict[str, Any] = {"config": args.config, "tokens": TOKENS, "leading": LEADING}
  analyzed, found["weights"] = time_call(lambda: jax.block_until_ready(AnalyzedModel(programs.init_model(config))))
  found["spectra"] = time_call(lambda: spectra(analyzed))[1]
  tokens_L = np.random.default_rng(0).integers(config.model.vocab_size, size=TOKENS)
  for form in FORMS:
    found[form] = time_call(functools.partial(exponents, analyzed, tokens_L, leading=LEADING, form=form))[1]
  print(json.dumps(found))


if __name__ == "__main__":
  programs.start(main)
