"""What a checkpoint costs: how long training is held up, and how long writing and reading take.

  python -m launch.benchmarks.saving --config=configs/llama1b.py --set=model.time.time_embed_dim=1 \
      --folders=/tmp/saving,gs://bucket/saving [--rounds=3] [--minutes=10]

Saves and restores a training state through the code of a run, on each folder in turn. `held up` is the time until
`save` returns, when the arrays are copied and training goes on; the last column divides it by an interval of --minutes.
`written` is the time until all of it is there. Medians of the rounds, quartiles in parentheses.
"""

import time

import jax
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.runs.run import checked_mesh
from diffeq_nnx.training.step import abstract_state, init_state, state_shardings
from launch import programs
from launch.experiments import tables

GIB = 2**30


def measure(config: config_lib.Config, folders: list[str], rounds: int) -> tuple[int, dict[str, np.ndarray]]:
  """Bytes of the state, and for each folder the seconds [round, (held up, written, read)]."""
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    abstract = abstract_state(config, mesh)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state["params"], state["opt_state"])))
    seconds: dict[str, list[list[float]]] = {folder: [] for folder in folders}
    for number in range(rounds + 1):  # the first one warms up
      for folder in folders:
        place = f"{files.absolute(folder)}/round{number}"
        writing = Checkpoints(place, config, "")
        start = time.perf_counter()
        writing.save(state, {"windows": 0}, None)
        held = time.perf_counter() - start
        writing.close()
        written = time.perf_counter() - start
        del writing  # and what it may hold of the arrays
        reading = Checkpoints(place, config, "", read_only=True)
        start = time.perf_counter()
        jax.block_until_ready(reading.restore(abstract)[0])
        read = time.perf_counter() - start
        reading.close()
        files.remove(place)
        if number:
          seconds[folder].append([held, written, read])
  return size, {folder: np.array(values) for folder, values in seconds.items()}


def main(argv: list[str] | None = None) -> None:
  """Prints a Markdown table."""
  args = programs.make_parser(__doc__, config=str, folders=[str], rounds=3, minutes=10.0).parse_args(argv)
  config = config_lib.load(args.config, args.set)
  size, seconds = measure(config, args.folders, args.rounds)
  print(f"state of {size / GIB:.2f} GiB; {args.rounds} rounds; seconds")
  rows = []
  for folder, values in seconds.items():
    held, written, _ = np.median(values, axis=0)
    cells = [programs.format_spread(column, ".2f") for column in values.T]
    rows.append([folder, *cells, f"{size / GIB / written:.2f}", f"{100 * held / (60 * args.minutes):.2f}"])
  columns = ["folder", "held up", "written", "read", "GiB/s written", f"share of {args.minutes:g} minutes, %"]
  print(tables.markdown(columns, rows))


if __name__ == "__main__":
  programs.start(main)
