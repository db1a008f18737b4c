"""Token latency relative to reading the weights once (ideal 1.0), in interleaved rounds within one process.

  python -m launch.benchmarks.generation --config=configs/llama1b.py:builtin,llama [--rows=1,16] [--slots=256] \
      [--rounds=9] [--set=model.num_steps=4]

The token is one call of the program that generation runs for each token of all rows, greedy, with keys and values of
`--slots` tokens a row, for each number of prompts in `--rows`. The read is a sum over every array that this program
reads (block weights, output head, keys and values), with the bandwidth that it reaches. Times are medians over rounds
of `--tokens` consecutive calls, ratios are medians of the rounds' ratios with quartiles; the last column is tokens/s
over those of the first number of prompts. Weights have their initial values, generated on the first device.

With e.g. --topology=v5e:2x2 the program is compiled for one chip of that TPU, without TPU hardware (needs the TPU
compiler, pip install 'jax[tpu]'). A token then takes the compiler's cycles at the chip's clock, and for the kernel of
attention, of which the compiler has no estimate, its bytes at the memory bandwidth. With --topology=h100:1 or h200:1
(needs two wheels, see `launch.gpus.devices_of`) it takes at least the roofline's time of each kernel: `roofline`. With
--draft=4,4 a round of self-speculation is compiled, too, of 4 tokens drafted at 4 steps: how many of them must be kept
for plain decoding's speed, and the speed if all are kept.
"""

import dataclasses
import functools
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference import decoding, speculation
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.model import grids, solvers, vector_fields
from diffeq_nnx.model.parameters import abstract_model, params_of
from diffeq_nnx.model.ready import ReadyModel, generate_weights
from diffeq_nnx.training import flops
from launch import gpus, programs
from launch.benchmarks import hlo, roofline
from launch.experiments import tables

GREEDY = GenerationOptions(temperature=0)


def read_by_a_token(ready: ReadyModel, state: decoding.DecodeState) -> dict[str, Any]:
  """The arrays that a token reads in full: all but the embedding tables, of which it reads rows."""
  head = ready.rest.get("head")
  return {"blocks": ready.weights, "head": ready.rest["embedding"] if head is None else head, "cache": state.cache}


def make_state(config: ModelConfig, num_steps: int, rows: int, slots: int) -> decoding.DecodeState:
  """The state with all slots but one filled."""
  shape = (rows, config.kv_heads, slots, config.head_size)
  evaluations = num_steps * solvers.SOLVERS[config.solver].evaluations.attention
  cache = [tuple(jnp.zeros(shape, config.dtype) for _ in range(2)) for _ in range(evaluations)]
  next_B = jnp.full(rows, slots - 1, jnp.int32)
  return decoding.DecodeState(cache, jnp.int32(slots - 1), next_B, GREEDY.make_sampler(range(rows)))


class Pair:
  """Both programs, which generate a token and read the same arrays, and their arguments."""

  def __init__(self, decoder: decoding.Decoder, rows: int, slots: int):
    self.prompts, self._decoder = rows, decoder
    rows = decoder.count_rows(rows)
    self._state = make_state(decoder.ready.config, decoder.grid.num_steps, rows, slots)
    self._tokens_B = jnp.zeros(rows, jnp.int32)

  def read_arrays(self) -> dict[str, Any]:
    """The arrays that both read."""
    return read_by_a_token(self._decoder.ready, self._state)

  def token(self) -> jax.Array:
    """One token of each row; slots are overwritten one after the other, and all are read."""
    self._state, self._tokens_B = decoding.read_tokens(self._decoder.ready, self._state, self._tokens_B)
    return self._tokens_B

  def read(self) -> jax.Array:
    """One read of the same arrays."""
    return _sum(self.read_arrays())


@jax.jit
def _sum(arrays: Any) -> jax.Array:
  """A number that depends on every element."""
  return sum(leaf.sum(dtype=jnp.float32) for leaf in jax.tree.leaves(arrays))


def ahead(config: Config, topology: str, rows: int, slots: int, draft: tuple[int, int] | None = None) -> list[str]:
  """Cells of a row of an estimate for one chip, without the hardware; columns as in `main`.

  The floor is the larger of the read and of the products' time at the chip's peak. `draft` has the numbers of steps and
  of tokens of a draft.
  """
  from launch import compile_ahead  # its import keeps JAX from searching for TPUs

  on_gpu = gpus.is_gpu(topology)
  # attention of a new token is plain JAX on a GPU
  model = dataclasses.replace(config.model, attention="reference" if on_gpu else "pallas_tpu")
  grid = grids.make_grid(model, config.eval.num_steps)
  prompts, rows = rows, max(rows, 2)  # see `Decoder.count_rows`
  device = compile_ahead.devices_of(topology)[0]
  chip = compile_ahead.CHIPS[device.device_kind]
  peak = compile_ahead.peak_flops(device.device_kind)
  placed = functools.partial(
    jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
  )
  tokens_B = placed(jax.ShapeDtypeStruct((rows,), jnp.int32))
  mesh = jax.sharding.Mesh([device], "x")

  def read_at(grid: grids.Grid) -> tuple[ReadyModel, decoding.DecodeState]:
    generate = functools.partial(generate_weights, model, grid, True)
    ready = ReadyModel(model, *jax.eval_shape(generate, params_of(abstract_model(model))), mesh)
    return placed((ready, jax.eval_shape(lambda: make_state(model, grid.num_steps, rows, slots))))

  def seconds(traced) -> float:
    program = hlo.Program(traced.lower(lowering_platforms=("cuda" if on_gpu else "tpu",)).compile().as_text())
    if isinstance(chip, gpus.Gpu):
      return sum(roofline.seconds(program, chip, peak).values())
    by_kernels = sum(kernel.times * kernel.bytes for kernel in program.kernels)
    return program.cycles / (1e9 * chip.clock) + by_kernels / (1e9 * chip.bandwidth)

  ready, state = read_at(grid)
  size, cached = (
    sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    for arrays in (read_by_a_token(ready, state), state.cache)
  )
  token = seconds(decoding.read_tokens.trace(ready, state, tokens_B))
  read = size / (1e9 * chip.bandwidth)
  products = rows * flops.forward_flops(dataclasses.replace(model, seq_len=slots), grid.num_steps) / peak
  mebibytes = [f"{part / 2**20:,.1f}" for part in (size - cached, cached)]
  cells = [str(prompts), *mebibytes, *(f"{1e3 * one:.3f}" for one in (token, read, products))]
  cells.append(f"{token / max(read, products):.3f}")
  if draft is not None:
    coarse = grids.make_grid(model, draft[0])
    draft_ready, draft_state = read_at(coarse)
    states = (dataclasses.replace(one, slot=tokens_B) for one in (state, draft_state))  # slots by row
    round_ = seconds(speculation.run_round.trace(ready, draft_ready, *states, tokens_B, draft[1]))
    cells += [f"{1e3 * round_:.3f}", f"{round_ / token - 1:.2f}", f"{(draft[1] + 1) * token / round_:.2f}"]
  return cells


def main(argv: list[str] | None = None) -> None:
  """Compiles, times, prints."""
  parser = programs.make_parser(
    __doc__, config=str, rows=[1], slots=256, rounds=9, tokens=16, topology=None, draft=[0, 0]
  )
  args = parser.parse_args(argv)
  config = config_lib.load(args.config, args.set)
  if vector_fields.FIELDS[config.model.field].learned_positions and args.slots > config.model.seq_len:
    raise UserError(f"--slots={args.slots}: the model has {config.model.seq_len} positions; give at most that many")
  if len(args.draft) != 2 or any(args.draft) and not args.topology:
    raise UserError("--draft: must be two numbers, of steps and of tokens, and is for --topology")
  if args.topology:
    print(f"{args.config}, rows of {args.slots} slots, estimated for one chip of {args.topology}\n")
    columns = ["prompts", "weights, MiB", "keys and values, MiB", "token, ms", "read once, ms", "products, ms"]
    columns.append("token / floor")
    draft = tuple(args.draft) if any(args.draft) else None
    if draft:
      columns += ["round of drafting, ms", "drafts kept at equal speed", "speed if all are kept"]
    print(tables.markdown(columns, [ahead(config, args.topology, rows, args.slots, draft) for rows in args.rows]))
    return
  decoder = decoding.Decoder(programs.init_model(config), config.eval.num_steps)
  each = [Pair(decoder, rows, args.slots) for rows in args.rows]
  calls = dict(enumerate(call for pair in each for call in (pair.token, pair.read)))
  times = programs.time_rounds(calls, args.rounds, args.tokens)
  print(
    f"{args.config}, rows of {args.slots} slots, median of {args.rounds} interleaved rounds of {args.tokens}, "
    f"{programs.describe_device()}\n"
  )
  columns = ["prompts", "weights, MiB", "keys and values, MiB", "token, ms", "tokens/s", "read once, ms", "GB/s"]
  table = []
  for n, pair in enumerate(each):
    arrays = pair.read_arrays()
    size, cached = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in (arrays, arrays["cache"]))
    token, read = times[2 * n], times[2 * n + 1]
    sizes = [f"{part / 2**20:,.1f}" for part in (size - cached, cached)]
    speeds = [f"{1e3 * statistics.median(token):.3f}", f"{pair.prompts / statistics.median(token):,.1f}"]
    reads = [f"{1e3 * statistics.median(read):.3f}", f"{size / statistics.median(read) / 1e9:,.1f}"]
    gained = pair.prompts / each[0].prompts * times[0] / token
    ratios = map(programs.format_spread, (token / read, gained))
    table.append([str(pair.prompts), *sizes, *speeds, *reads, *ratios])
  print(tables.markdown([*columns, "token / read", "tokens/s over the first"], table))


if __name__ == "__main__":
  programs.start(main)
