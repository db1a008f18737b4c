"""Token latency relative to reading the weights once (ideal 1.0), in interleaved rounds within one process.

  python -m launch.benchmarks.generation --config=configs/llama1b.py:builtin,llama [--rows=1,16] [--slots=256] \
      [--rounds=9] [--set=model.num_steps=4]

The token is one call of the program that generation runs for each token of all rows, greedy, with keys and values of
`slots` tokens a row. The read is a sum over every array that this program reads (block weights, output head, keys and
values), with the bandwidth that it reaches. Times are medians over rounds of `--tokens` consecutive calls, ratios are
medians of the rounds' ratios with quartiles; the last column is tokens/s over those of the first number of prompts.
Weights have their initial values, generated on the first device.

With e.g. --topology=v5e:2x2 the program is compiled for one chip of that TPU, without TPU hardware (needs the TPU
compiler, pip install 'jax[tpu]'). A token then takes the compiler's cycles at the chip's clock, and for the kernel of
attention, of which the compiler has no estimate, its bytes at the memory bandwidth. With --topology=h100:1 or h200:1
(needs two wheels, see `launch.gpus.devices_of`) it takes at least the roofline's time of each kernel: `roofline`. With
--draft=4,4 a round of self-speculation is compiled, too, of 4 tokens drafted at 4 steps: how many of them must be kept
for plain decoding's speed, and the speed if all are kept.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import math
import statistics
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference import decoding, speculation
from diffeq_nnx.inference.sampling import Sampling
from diffeq_nnx.model import grids, solvers
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import abstract_model, graph, params_of
from diffeq_nnx.model.ready import generated
from diffeq_nnx.training import flops
from launch import gpus
from launch.benchmarks import hlo, roofline
from launch.experiments import tables
from launch.experiments.compare import numbers

GREEDY = Sampling(temperature=0)


def read_by_a_token(weights: decoding.Weights, state: dict) -> dict[str, Any]:
  """The arrays that a token reads in full: all but the embedding tables, of which it reads rows."""
  head = weights["rest"].get("head")
  return {
    "blocks": weights["blocks"],
    "head": weights["rest"]["embedding"] if head is None else head,
    "cache": state["cache"],
  }


def state_of(config: ModelConfig, num_steps: int, rows: int, slots: int) -> dict:
  """The state with all slots but one filled."""
  shape = (rows, config.kv_heads, slots, config.head_size)
  evaluations = num_steps * solvers.SOLVERS[config.solver].evaluations.attention
  cache = [tuple(jnp.zeros(shape, config.dtype) for _ in range(2)) for _ in range(evaluations)]
  return {
    "cache": cache,
    "slot": jnp.int32(slots - 1),
    "next_B": jnp.full(rows, slots - 1, jnp.int32),
    "numbers_B": jnp.zeros(rows, jnp.uint32),
  }


class Programs:
  """The two programs and their arguments."""

  def __init__(self, decoder: decoding.Decoder, rows: int, slots: int):
    self.prompts, self._decoder = rows, decoder
    rows = decoder.num_rows(rows)
    self._state = state_of(decoder.config, decoder.grid.num_steps, rows, slots)
    self._tokens_B = jnp.zeros(rows, jnp.int32)
    self._values = GREEDY.values()

  def read_arrays(self) -> dict[str, Any]:
    """The arrays that both read."""
    return read_by_a_token(self._decoder.weights, self._state)

  def token(self) -> jax.Array:
    """One token of each row; slots are overwritten one after the other, and all are read."""
    decoder = self._decoder
    self._state, self._tokens_B = decoding.read_more(
      decoder.config, GREEDY.filters, decoder.weights, self._values, self._state, self._tokens_B
    )
    return self._tokens_B

  def read(self) -> jax.Array:
    """One read of the same arrays."""
    return _sum(self.read_arrays())


@jax.jit
def _sum(arrays: Any) -> jax.Array:
  """A number that depends on every element."""
  return sum(leaf.sum(dtype=jnp.float32) for leaf in jax.tree.leaves(arrays))


def timed(call: Callable[[], jax.Array], count: int) -> float:
  """Seconds per call, of so many consecutive ones."""
  start = time.perf_counter()
  for _ in range(count):
    result = call()
  jax.block_until_ready(result)
  return (time.perf_counter() - start) / count


def ahead(config: Config, topology: str, rows: int, slots: int, draft: tuple[int, int] | None = None) -> list[str]:
  """Cells of a row of an estimate for one chip, without the hardware; columns as in `main`.

  The floor is the larger of the read and of the products' time at the chip's peak. `draft` has the numbers of steps and
  of tokens of a draft.
  """
  from launch import compile_ahead  # its import keeps JAX from searching for TPUs

  on_gpu = gpus.named(topology)
  model = dataclasses.replace(config.model, attention="reference" if on_gpu else "pallas_tpu")  # which `auto` is there
  grid = grids.make_grid(model, config.eval.num_steps)
  prompts, rows = rows, max(rows, 2)  # see `Decoder.num_rows`
  device = (gpus.devices_of(topology) if on_gpu else compile_ahead.devices_of(topology, 1))[0]
  chip = compile_ahead.CHIPS[device.device_kind]
  peak = compile_ahead.peak_flops(device.device_kind)
  placed = functools.partial(
    jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
  )
  values, tokens_B = placed((jax.eval_shape(GREEDY.values), jax.ShapeDtypeStruct((rows,), jnp.int32)))

  def read_at(grid: grids.Grid) -> tuple[decoding.Weights, decoding.State]:
    blocks, rest = jax.eval_shape(functools.partial(generated, model, grid, True), params_of(abstract_model(model)))
    return placed(
      ({"blocks": blocks, "rest": rest}, jax.eval_shape(lambda: state_of(model, grid.num_steps, rows, slots)))
    )

  def seconds(traced) -> float:
    program = hlo.Program(traced.lower(lowering_platforms=("cuda" if on_gpu else "tpu",)).compile().as_text())
    if isinstance(chip, gpus.Gpu):
      return sum(roofline.seconds(program, chip, peak).values())
    by_kernels = sum(kernel.times * kernel.bytes for kernel in program.kernels)
    return program.cycles / (1e9 * chip.clock) + by_kernels / (1e9 * chip.bandwidth)

  weights, state = read_at(grid)
  size, cached = (
    sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    for arrays in (read_by_a_token(weights, state), state["cache"])
  )
  token = seconds(decoding.read_more.trace(model, GREEDY.filters, weights, values, state, tokens_B))
  read = size / (1e9 * chip.bandwidth)
  products = rows * flops.forward_flops(dataclasses.replace(model, seq_len=slots), grid.num_steps) / peak
  mebibytes = [f"{part / 2**20:,.1f}" for part in (size - cached, cached)]
  cells = [str(prompts), *mebibytes, *(f"{1e3 * one:.3f}" for one in (token, read, products))]
  cells.append(f"{token / max(read, products):.3f}")
  if draft is not None:
    coarse = grids.make_grid(model, draft[0])
    both = [(held, {**one, "slot": tokens_B}) for held, one in ((weights, state), read_at(coarse))]  # slots by row
    round_ = seconds(
      speculation.next_several.trace(
        model, GREEDY.filters, draft[1], *(held for held, _ in both), values, *(one for _, one in both), tokens_B
      )
    )
    cells += [f"{1e3 * round_:.3f}", f"{round_ / token - 1:.2f}", f"{(draft[1] + 1) * token / round_:.2f}"]
  return cells


def main(argv: list[str] | None = None) -> None:
  """Compiles, times, prints."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", required=True, metavar="FILE.py[:ARGUMENT]")
  parser.add_argument("--rows", type=numbers(int), default=[1], help="numbers of prompts in a batch, e.g. 1,16")
  parser.add_argument("--slots", type=int, default=256, help="tokens in the cache of each row")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--tokens", type=int, default=16, help="calls in a round")
  parser.add_argument("--topology", metavar="VERSION:SIZES", help="compile for this TPU or GPU instead of running")
  parser.add_argument(
    "--draft", type=numbers(int), metavar="STEPS,TOKENS", help="with --topology: also self-speculation"
  )
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  args = parser.parse_args(argv)
  config = config_lib.load(args.config, args.set)
  if config.model.field == "gpt" and args.slots > config.model.seq_len:
    raise UserError(f"--slots={args.slots}: the model has {config.model.seq_len} positions; give at most that many")
  if args.topology:
    print(f"{args.config}, rows of {args.slots} slots, estimated for one chip of {args.topology}\n")
    columns = ["prompts", "weights, MiB", "keys and values, MiB", "token, ms", "read once, ms", "products, ms"]
    columns.append("token / floor")
    if args.draft:
      columns += ["round of drafting, ms", "drafts kept at equal speed", "speed if all are kept"]
    draft = tuple(args.draft) if args.draft else None
    print(tables.markdown(columns, [ahead(config, args.topology, rows, args.slots, draft) for rows in args.rows]))
    return
  make = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Model(config.model, rngs=nnx.Rngs(config.seed)), nnx.Param)))
  decoder = decoding.Decoder(nnx.merge(graph(config.model), make()), config.eval.num_steps)
  each = [Programs(decoder, rows, args.slots) for rows in args.rows]
  calls = [call for programs in each for call in (programs.token, programs.read)]
  for call in calls:
    timed(call, 2)
  times = np.array([[timed(call, args.tokens) for call in calls] for _ in range(args.rounds)])
  device = jax.devices()[0]
  print(
    f"{args.config}, rows of {args.slots} slots, median of {args.rounds} interleaved rounds of {args.tokens}, "
    f"{device.device_kind} ({device.platform}), jax {jax.__version__}\n"
  )
  print(
    "| prompts | weights, MiB | keys and values, MiB | token, ms | tokens/s | read once, ms | GB/s | token / read | "
    "tokens/s over the first |"
  )
  print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
  spread = lambda ratios: "{1:.3f} ({0:.3f} to {2:.3f})".format(*np.percentile(ratios, (25, 50, 75)))
  for n, programs in enumerate(each):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(programs.read_arrays()))
    weights = size - sum(leaf.nbytes for leaf in jax.tree.leaves(programs.read_arrays()["cache"]))
    token, read = times[:, 2 * n], times[:, 2 * n + 1]
    gained = programs.prompts / each[0].prompts * times[:, 0] / token
    print(
      f"| {programs.prompts} | {weights / 2**20:,.1f} | {(size - weights) / 2**20:,.1f} | "
      f"{1e3 * statistics.median(token):.3f} | {programs.prompts / statistics.median(token):,.1f} | "
      f"{1e3 * statistics.median(read):.3f} | {size / statistics.median(read) / 1e9:,.1f} | {spread(token / read)} | "
      f"{spread(gained)} |"
    )


if __name__ == "__main__":
  try:
    main()
  except UserError as error:
    raise SystemExit(f"error: {error}") from None
