"""Trains transformers with stored weights whose depth grows by copying layers, as peers do it; prints a Markdown table.

  python -m launch.experiments.grow_stored --config=configs/arena.py:llama --workdir=runs/grown \\
      --schedules=6x1900,3x1000+6x1400 [--copies=stack,repeat] [--seeds=0,1,2] [--set=KEY=VALUE]

A schedule like 3x1000+6x1400 is 1,000 train steps with 3 layers and 1,400 with 6. Each number of layers must be a
multiple of the one before. `stack` repeats the layers as a whole (1 2 3 1 2 3: Gong et al. 2019; Saunshi et al. 2024,
MIDAS), `repeat` repeats each (1 1 2 2 3 3). Moments of the optimizer are copied with their layers, and the learning
rate follows one schedule over all train steps. With `--set=model.horizon=6` layers become shorter as there are more,
so that `repeat` changes the function little; without it each layer keeps its weight.

The table has the validation loss at the last number of layers in nats per token, its difference from that of the first
schedule, and how many layers were computed in all train steps. Losses are kept in `--workdir`; a run that was
interrupted begins anew. Growth of W(t) is a setting, `train.step_schedule`, which `launch.experiments.compare` takes.
"""

import argparse
import itertools
import os
import re

import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.parameters import path_names
from diffeq_nnx.model.solvers import SOLVERS
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs.run import checked_mesh, load_corpus
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import batch_iterator
from diffeq_nnx.training.step import State, all_params, init_state, make_train_step, state_shardings
from launch import programs
from launch.experiments import tables


def grow(state: State, times: int, copies: str) -> State:
  """The state with each layer copied so many times, its moments too."""

  def one(path, leaf):
    if "stored" not in path_names(path):
      return leaf
    return jnp.repeat(leaf, times, axis=0) if copies == "repeat" else jnp.concatenate([leaf] * times)

  return jax.tree_util.tree_map_with_path(one, state)


def train_growing(config: Config, phases: list[tuple[int, int]], copies: str) -> float:
  """The validation loss after all phases, each a number of layers and a number of train steps."""
  mesh, corpus = checked_mesh(config), load_corpus(config)
  share = sharding.Share(mesh, config.train.batch_size)
  with jax.set_mesh(mesh):
    layers, step = phases[0][0], 0
    with_layers = lambda count: config_lib.apply_settings(config, [f"model.num_steps={count}"])
    now = with_layers(layers)
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(now, mesh))(now)
    batches = batch_iterator(config, corpus, share)
    for count, steps in phases:
      now, times, layers = with_layers(count), count // layers, count
      state = jax.device_put(grow(state, times, copies), state_shardings(now, mesh))
      train_step = make_train_step(now, mesh)
      for batch in itertools.islice(batches, steps):
        state, metrics = train_step(state, share.place(batch), count)
        step += 1
        if step % config.train.log_every == 0:
          print(f"step {step}/{config.train.steps}: {count} layers, loss {metrics['loss']:.4f}", flush=True)
    return Evaluator(now, corpus, mesh)(all_params(state))["loss"]


def read_schedule(text: str) -> list[tuple[int, int]]:
  """The numbers of layers and of train steps of each phase; raises UserError for anything else."""
  phases = [tuple(map(int, part.split("x"))) for part in text.split("+") if re.fullmatch(r"[1-9]\d*x[1-9]\d*", part)]
  counts = [count for count, _ in phases]
  if len(phases) != text.count("+") + 1 or any(b % a for a, b in zip(counts, counts[1:])):
    raise UserError(f"--schedules={text}: must be like 3x1000+6x1400, each number of layers a multiple of the last")
  return phases


def main(argv: list[str] | None = None) -> None:
  """Trains what is missing, prints the table."""
  study = {"schedules": [str], "copies": ["stack", "repeat"], "seeds": [0, 1, 2]}
  args = programs.make_parser(__doc__, config=str, workdir=str, **study).parse_args(argv)
  schedules = {text: read_schedule(text) for text in args.schedules}
  model = config_lib.load(args.config, args.set).model
  if model.weights != "stored":
    raise UserError(f"model.weights={model.weights}: has no layers to copy; set it to stored")
  if len(SOLVERS[model.solver].nodes) > 1:  # as of heun, which reads one set of weights more than there are steps
    raise UserError(f"model.solver={model.solver}: its weights are not those of layers; set it to sequential")
  tables.require_settings(args.workdir, {"config": args.config, "set": args.set})
  rows, base = [], None
  for schedule, phases in schedules.items():
    for copies in args.copies if len(phases) > 1 else [""]:
      losses = [_find_loss(args, schedule, phases, copies, seed) for seed in args.seeds]
      against = "" if base is None else tables.difference(losses, base)
      base = losses if base is None else base
      rows.append([schedule, copies, tables.mean_and_error(losses), against, f"{sum(n * m for n, m in phases):,}"])
  print(tables.markdown(["schedule", "copies", "validation loss", "against the first", "layers in all steps"], rows))


def _find_loss(args: argparse.Namespace, schedule: str, phases: list[tuple[int, int]], copies: str, seed: int) -> float:
  settings = [*args.set, f"seed={seed}", f"train.steps={sum(steps for _, steps in phases)}"]
  config = config_lib.load(args.config, settings)
  path = os.path.join(args.workdir, "_".join(filter(None, [schedule, copies, f"seed{seed}"])) + ".json")
  return tables.remember(path, lambda: train_growing(config, phases, copies))


if __name__ == "__main__":
  programs.start(main)
