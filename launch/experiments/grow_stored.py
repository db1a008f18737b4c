"""Trains transformers with stored weights whose depth grows by copying layers, as peers do it; prints a Markdown table.

  python -m launch.experiments.grow_stored --config=configs/arena.py:llama --workdir=runs/grown \\
      --counts=3,6,12 --changes=400,900 [--copies=stack,repeat] [--seeds=0,1,2] [--set=KEY=VALUE]

The model has the first of `--counts` layers, and from the k-th of `--changes` (train steps) on the number after it,
which must be a multiple. `stack` repeats the layers as a whole (1 2 3 1 2 3: Gong et al. 2019; Saunshi et al. 2024,
MIDAS), `repeat` repeats each (1 1 2 2 3 3). Moments of the optimizer are copied with their layers, and the learning
rate follows one schedule over all train steps. With `--set=model.horizon=6` layers become shorter as there are more,
so that `repeat` changes the function little; without it each layer keeps its weight.

The table has the validation loss at the last number of layers in nats per token, and how many layers were computed in
all train steps. Losses are kept in `--workdir`; a run that was interrupted begins anew. Growth of W(t) is a setting,
`train.step_schedule`, which `launch.experiments.compare` takes.
"""

import argparse
import bisect
import dataclasses
import os

import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.parameters import path_names
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs.devices import checked_mesh
from diffeq_nnx.runs.run import load_corpus
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


def with_layers(config: Config, num_steps: int) -> Config:
  """The config at another number of layers."""
  return dataclasses.replace(config, model=dataclasses.replace(config.model, num_steps=num_steps))


def train_growing(config: Config, counts: list[int], changes: list[int], copies: str) -> float:
  """The validation loss after all train steps."""
  mesh, corpus = checked_mesh(config), load_corpus(config)
  share = sharding.Share(mesh, config.train.batch_size)
  with jax.set_mesh(mesh):
    first = with_layers(config, counts[0])
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(first, mesh))(first)
    batches, layers = batch_iterator(config, corpus, share), counts[0]
    for step in range(config.train.steps):
      count = counts[bisect.bisect_right(changes, step)]
      if count != layers:
        places = state_shardings(with_layers(config, count), mesh)
        state, layers = jax.device_put(grow(state, count // layers, copies), places), count
      train_step = make_train_step(with_layers(config, count), mesh)
      state, metrics = train_step(state, share.place(next(batches)), count)
      if (step + 1) % config.train.log_every == 0:
        print(f"step {step + 1}/{config.train.steps}: {count} layers, loss {metrics['loss']:.4f}", flush=True)
    return Evaluator(with_layers(config, layers), corpus, mesh)(all_params(state))["loss"]


def main(argv: list[str] | None = None) -> None:
  """Trains what is missing, prints the table."""
  study = {"counts": [3, 6, 12], "changes": [400, 900], "copies": ["stack", "repeat"], "seeds": [0, 1, 2]}
  args = programs.make_parser(__doc__, config=str, workdir=str, **study).parse_args(argv)
  if len(args.changes) != len(args.counts) - 1 or any(b % a for a, b in zip(args.counts, args.counts[1:])):
    raise UserError("--counts: each must be a multiple of the one before, with one of --changes for each but the first")
  rows = []
  for copies in args.copies:
    losses = []
    for seed in args.seeds:
      config = config_lib.load(args.config, [*args.set, f"seed={seed}"])
      losses.append(_find_loss(args, config, copies, seed))
    ends = [0, *args.changes, config.train.steps]
    computed = sum(count * (end - start) for count, start, end in zip(args.counts, ends, ends[1:]))
    rows.append([copies, tables.mean_and_error(losses), f"{computed:,}"])
  print(tables.markdown(["copies", "validation loss", "layers in all train steps"], rows))


def _find_loss(args: argparse.Namespace, config: Config, copies: str, seed: int) -> float:
  path = os.path.join(args.workdir, f"{copies}_seed{seed}.json")
  return tables.remember(path, lambda: train_growing(config, args.counts, args.changes, copies))


if __name__ == "__main__":
  programs.start(main)
