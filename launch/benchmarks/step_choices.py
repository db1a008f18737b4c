"""Compiles the train step with each choice of memory for speed, and says which of those that fit is the fastest.

  python -m launch.benchmarks.step_choices --config=configs/llama1b.py --topology=v5p:2x2x2 [--num-slices=2] \
      [--remat=full,dots,none] [--sequences=4,8,16,32] [--set=KEY=VALUE]

`--topology` is of TPUs or GPUs, as for `launch.compile_ahead`. `--sequences` are values of train.device_batch_size: how
many sequences a device processes at a time. The time is the estimate of `launch.compile_ahead` with all communication
hidden, and has its limits. A choice fits if it leaves a twentieth of the device's memory. Prints a row of a Markdown
table for each choice as soon as it is compiled, then the settings of the fastest. Exit code 1: none fits.
"""

import dataclasses
import itertools
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # as launch.compile_ahead, which is imported after JAX

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel import sharding
from launch import compile_ahead, programs
from launch.benchmarks import hlo

SPARE = 0.05  # of a device's memory


def estimate(step: compile_ahead.Step) -> tuple[float, float]:
  """(seconds of a step with all communication hidden, GiB of a device at its peak)."""
  parts, sent, _, _ = compile_ahead.times(step, hlo.Program(step.compiled.as_text()))
  peak = step.compiled.memory_analysis().peak_memory_in_bytes / 2**30
  return max(sum(seconds for seconds, _ in parts.values()), sent), peak


def main(argv: list[str] | None = None) -> int:
  """Compiles all choices, prints, and returns the exit code."""
  tried = {"remat": ["full", "dots", "none"], "sequences": [4, 8, 16, 32]}
  args = programs.make_parser(__doc__, config=str, topology=str, num_slices=1, **tried).parse_args(argv)
  config = config_lib.load(args.config, args.set)
  mesh = compile_ahead.mesh_over(config, args.topology, args.num_slices)
  found = {}
  print("| `train.remat` | `train.device_batch_size` | peak, GiB | step, s |\n| --- | --- | --- | --- |", flush=True)
  held = config.train.batch_size // sharding.num_shards("batch", mesh.shape)
  divisors = [count for count in args.sequences if count > 0 and held % count == 0]
  if not divisors:
    raise UserError(f"--sequences={','.join(map(str, args.sequences))}: none divides the {held} sequences of a device")
  for remat, sequences in itertools.product(args.remat, divisors):
    train = dataclasses.replace(config.train, remat=remat, device_batch_size=sequences)
    try:
      step = compile_ahead.compile_step(dataclasses.replace(config, train=train), mesh)
    except compile_ahead.DoesNotFit:
      print(f"| {remat} | {sequences} | does not fit | |", flush=True)
      continue
    seconds, peak = estimate(step)
    print(f"| {remat} | {sequences} | {peak:.2f} | {seconds:.3f} |", flush=True)
    if peak <= (1 - SPARE) * step.chip.hbm:
      found[remat, sequences] = seconds
  if not found:
    print("none fits: use more devices, or see the advice of launch.compile_ahead")
    return 1
  remat, sequences = min(found, key=lambda choice: found[choice])
  print(f"fastest: --config.train.remat={remat} --config.train.device_batch_size={sequences}")
  return 0


if __name__ == "__main__":
  compile_ahead.program(main)
