"""Times several configs in interleaved rounds within one process, and prints a Markdown table.

  python -m launch.benchmarks.step_time --configs=configs/benchmark.py:parallel,configs/benchmark.py:diffeq \
      [--what=train_step|loss_and_gradients] [--rounds=9] [--set=train.batch_size=8]

Settings of one config follow it: A.py:row@model.solver=heun@train.remat=full.

In each round every config runs once, so that slow periods of the machine affect all of them. Times are medians over
rounds; a ratio is the median of the rounds' ratios to the first config, with quartiles. Each config runs over all
devices, by its mesh. Tokens are random; compilation and the first run are not timed. The states of all configs are on
the device together. Memory is the compiler's: arguments, results and temporaries.
"""

import functools
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.depth.trained import list_computed
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training import flops
from diffeq_nnx.training.step import init_state, loss_and_gradients, make_train_step, state_shardings
from launch import programs
from launch.experiments import tables


class Program:
  """One config's compiled program and its state.

  Attributes:
    name: as on the command line.
    config: the config.
    bytes: of arguments, results and temporaries, each buffer counted once.
  """

  def __init__(self, name: str, config: config_lib.Config, what: str):
    self.name, self.config = name, config
    if config.train.teacher is not None:
      raise UserError(f"{name}: train.teacher: a teacher is not timed here; set it to None")
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    with jax.set_mesh(mesh):
      batch = sharding.Share(mesh, config.train.batch_size).place(random_batch(config))
      state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
      compiled, self._advance, self._carry = PROGRAMS[what](config, state, batch, mesh)
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    self.bytes = sum(sizes) - memory.alias_size_in_bytes

  def run(self):
    """Runs once, and returns what the next run starts from."""
    self._carry = self._advance(self._carry)
    return self._carry


def random_batch(config: config_lib.Config) -> dict[str, np.ndarray]:
  """Inputs and targets [batch_size, seq_len], the same for every config of these sizes; 0 is the end mark."""
  shape = (2, config.train.batch_size, config.model.seq_len)
  tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape).astype(np.int32)
  packing = {} if config.data.attend_across_documents else data.find_documents(tokens[0], 0)
  return {"inputs": tokens[0], "targets": tokens[1], **packing}


def train_step(config, state, batch, mesh):
  """The whole optimizer step, as in training: the compiled program, a function of its carry, and the first carry."""
  compiled = make_train_step(config, mesh).lower(state, batch, config.model.num_steps).compile()
  return compiled, lambda state: compiled(state, batch)[0], state


def loss_and_gradient(config, state, batch, mesh):
  """Loss and gradients alone; the gradients' buffers are reused by the next run, as in a train step."""
  grid = grids.make_grid(config.model)
  places = state_shardings(config, mesh)["params"]

  @functools.partial(jax.jit, donate_argnums=0, keep_unused=True, out_shardings=places)
  def run(old_gradients, params, batch, key):
    return loss_and_gradients(config, grid, params, batch, key)[1]

  arguments = (state["params"], batch, state["key"])
  gradients = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=places)(state["params"])
  compiled = run.lower(gradients, *arguments).compile()
  return compiled, lambda gradients: compiled(gradients, *arguments), gradients


PROGRAMS = {"train_step": train_step, "loss_and_gradients": loss_and_gradient}


def table(compared: list[Program], times: dict[int, np.ndarray]) -> str:
  """The measurements as Markdown; `times` are seconds by place in `compared`."""
  columns = ["config", "ms", "tokens/s", "model TFLOP/s", "with generator", "memory, MiB", "time against the first"]
  rows = []
  for place, one in enumerate(compared):
    config, seconds = one.config, statistics.median(times[place])
    tokens = config.train.batch_size * config.model.seq_len
    computed = list_computed(config, config.model.num_steps)  # two passes with self-distillation
    model = sum(flops.model_flops(config, count) for count in computed)
    generator = sum(flops.generator_flops(config.model, count) for count in computed)
    speeds = [f"{tokens / seconds:,.0f}", *(f"{each / seconds / 1e12:.3f}" for each in (model, model + generator))]
    ratio = programs.format_spread(times[place] / times[0])
    rows.append([one.name, f"{1e3 * seconds:.1f}", *speeds, f"{one.bytes / 2**20:,.0f}", ratio])
  return tables.markdown(columns, rows)


def main(argv: list[str] | None = None) -> None:
  """Compiles, times, prints."""
  parser = programs.make_parser(__doc__, configs=str, rounds=9)
  parser.add_argument("--what", choices=PROGRAMS, default="train_step")
  args = parser.parse_args(argv)
  names = re.split(r",(?=[^,:]*\.py)", args.configs)  # a config's argument may hold commas
  compared = []
  for name in names:
    path, *settings = name.split("@")
    compared.append(Program(name, config_lib.load(path, [*args.set, *settings]), args.what))
  calls = {place: one.run for place, one in enumerate(compared)}
  times = programs.time_rounds(calls, args.rounds)
  print(
    f"{args.what}, median of {args.rounds} interleaved rounds, {jax.device_count()} x {programs.describe_device()}\n"
  )
  print(table(compared, times))


if __name__ == "__main__":
  programs.start(main)
