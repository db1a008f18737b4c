"""What the programs of this folder share: command lines, initial models, timing in rounds, medians with quartiles."""

import argparse
from collections.abc import Callable, Mapping
import os
import re
import subprocess
import sys
import time
from typing import Any

from flax import nnx
import jax
import numpy as np
from numpy.typing import ArrayLike

from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, params_of

COMMA = r",(?![^(]*\))"  # one inside parentheses separates nothing: a setting may be a tuple


def make_parser(doc: str | None, **flags: Any) -> argparse.ArgumentParser:
  """A parser whose help is a module's docstring.

  A program with --config or --configs also has --set, for keys of the config.

  Args:
    doc: the docstring.
    **flags: defaults by name; `num_steps` is --num_steps, and --num-steps too. A type in place of a default makes the
      flag required, and so does a list that holds a type. A list stands for comma-separated values, False for a flag
      without a value, and None for text that may be left out. `rounds` must be 1 or more.
  """
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in flags.items():
    names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    example = default[0] if isinstance(default, list) else default
    kind = example if isinstance(example, type) else str if example is None else type(example)
    if name == "rounds":
      kind = _read_rounds
    if kind is bool:
      parser.add_argument(*names, action="store_true")
    else:
      kind = _split(kind) if isinstance(default, list) else kind
      parser.add_argument(*names, type=kind, default=default, required=isinstance(example, type))
  if {"config", "configs"} & flags.keys():
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  return parser


def _read_rounds(text: str) -> int:
  if not re.fullmatch(r"0*[1-9]\d*", text):
    raise argparse.ArgumentTypeError("must be 1 or more")
  return int(text)


def _split(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
  """An argparse type: comma-separated values."""
  return lambda text: [kind(part) for part in re.split(COMMA, text)]


def start(main: Callable[[], object]) -> None:
  """Runs a program, and reports its errors in one line."""
  try:
    main()
  except (RunError, UserError) as error:
    raise SystemExit(f"error: {error}") from None


def compile_in_child(file: str, words: list[str], variables: dict[str, str], what: str) -> str:
  """What the Python program `file` prints, which compiles for a device that is not here, with variables of its own.

  Raises:
    SystemExit: it fails; the line names `what` it compiles.
  """
  path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **variables}
  done = subprocess.run([sys.executable, file, *words], env=environment, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"error: {what} does not compile: {done.stderr[-2000:]}")
  return done.stdout


def init_model(config: Config) -> Model:
  """A model with initial weights, on one device."""
  init = jax.jit(lambda: params_of(Model(config.model, rngs=nnx.Rngs(config.seed))))
  return build(config.model, init())


def time_rounds(calls: Mapping[Any, Callable[[], object]], rounds: int, repeats: int = 1) -> dict[Any, np.ndarray]:
  """Seconds of each call in each round, [rounds]; a round makes all calls, so that slow periods affect all.

  A call is made `repeats` times in a row, and its result is then waited for; the seconds are those of one. A round
  before the others, which may compile, is not measured.
  """
  seconds: dict[Any, list[float]] = {name: [] for name in calls}
  for _ in range(1 + rounds):
    for name, call in calls.items():
      start = time.perf_counter()
      for _ in range(repeats):
        result = call()  # those of earlier calls are given up
      jax.block_until_ready(result)
      seconds[name].append((time.perf_counter() - start) / repeats)
  return {name: np.array(values[1:]) for name, values in seconds.items()}


def describe_device() -> str:
  """The kind of the first device, its platform, and JAX's version."""
  device = jax.devices()[0]
  return f"{device.device_kind} ({device.platform}), jax {jax.__version__}"


def format_spread(values: ArrayLike, digits: str = ".3f") -> str:
  """The median and, in parentheses, the quartiles."""
  low, middle, high = np.percentile(values, (25, 50, 75))
  return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"
