"""What the programs of this folder share: their command lines, models with initial weights, spreads of measurements."""

import argparse
from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import numpy as np
from numpy.typing import ArrayLike

from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import graph


def make_parser(doc: str | None, settings: bool = True) -> argparse.ArgumentParser:
  """A parser whose help is a module's docstring; with `settings` it has --set, for keys of a config."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  if settings:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  return parser


def split(kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
  """An argparse type: comma-separated values."""
  return lambda text: [kind(part) for part in text.split(",")]


def start(main: Callable[[], object]) -> None:
  """Runs a program, and reports its errors in one line."""
  try:
    main()
  except (RunError, UserError) as error:
    raise SystemExit(f"error: {error}") from None


def init_model(config: Config) -> Model:
  """A model with initial weights, on one device."""
  init = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Model(config.model, rngs=nnx.Rngs(config.seed)), nnx.Param)))
  return nnx.merge(graph(config.model), init())


def format_spread(values: ArrayLike, digits: str = ".3f") -> str:
  """The median and, in parentheses, the quartiles."""
  low, middle, high = np.percentile(values, (25, 50, 75))
  return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"
