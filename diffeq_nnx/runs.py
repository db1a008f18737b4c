"""Runs as beginnings: reading the newest model of one, and writing one that starts from parameters."""

import dataclasses
import math
from typing import NamedTuple

from flax import nnx
import jax
from jax.sharding import Mesh

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx import distributed
from diffeq_nnx import sharding
from diffeq_nnx import trainable
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config, MeshConfig, ModelConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import Model
from diffeq_nnx.train import claim
from diffeq_nnx.train_step import Params, abstract_state, all_params, graph, state_of, state_shardings


class Run(NamedTuple):
  """A run as it is looked at.

  Attributes:
    config: the run's, for this machine.
    model: its newest, split over `mesh`.
    tokenizer: that the model was trained with.
    mesh: of all devices.
    step: optimizer steps that the model was trained for.
  """
  config: Config
  model: Model
  tokenizer: Tokenizer
  mesh: Mesh
  step: int


def load(workdir: str, config: Config | None = None) -> Run:
  """Reads a run's newest model; the text that it was trained on need not be there.

  Args:
    workdir: the run's directory.
    config: the run's, changed; None: as it is. The run's own mesh and attention stay behind; changed ones count.

  Raises:
    UserError: the directory holds no run, or no checkpoint that can be read.
  """
  own = workdir_lib.config_of(workdir)
  asked, config = own if config is None else config, anywhere(own if config is None else config)
  if asked.mesh != own.mesh:
    config = dataclasses.replace(config, mesh=asked.mesh)
  if asked.model.attention != own.model.attention:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=asked.model.attention))
  tokenizer = workdir_lib.tokenizer_of(workdir, config)
  mesh = sharding.make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    params, step = read(config, workdir, mesh, tokenizer.hash)
  return Run(config, nnx.merge(graph(config.model), params), tokenizer, mesh, step)


def anywhere(config: Config) -> Config:
  """The config for a look at a run on another machine than it was trained on: its mesh and attention stay behind."""
  return dataclasses.replace(config, mesh=MeshConfig(), model=dataclasses.replace(config.model, attention="auto"))


def read(config: Config, workdir: str, mesh: Mesh, tokenizer_hash: str, flag: str = "workdir") -> tuple[Params, int]:
  """All parameters of a run's newest model, split over `mesh`, and its step; errors name `flag`.

  Raises:
    UserError: there is none, or none that can be read.
  """
  checkpoints = Checkpoints(workdir, config, tokenizer_hash)
  params = checkpoints.restore_params(abstract_state(config, mesh))
  if params is None:
    raise UserError(f"{flag}={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every", everywhere=True)
  return params, checkpoints.steps()[-1]


def derived(config: Config, model: ModelConfig, data_config: config_lib.DataConfig | None = None) -> Config:
  """The config with a model of stored weights; keys that must go with a model go with this one.

  Raises:
    UserError: two keys that don't fit.
  """
  train = config.train
  return config_lib.from_dict(config_lib.to_dict(dataclasses.replace(
      config, model=model, data=data_config or config.data,
      train=dataclasses.replace(train, step_counts=(), loss_chunks=math.gcd(train.loss_chunks, model.seq_len),
                                remat_every=train.remat_every if model.num_steps % train.remat_every == 0 else 1),
      eval=dataclasses.replace(config.eval, num_steps=None))))


def start(config: Config, workdir: str, corpus: data.Corpus, params: Params, mesh: Mesh, loss: float | None,
          source: str | None = None) -> None:
  """Writes a run at step 0 that has these parameters, all of the model's; run.json comes last, so that it is whole.

  Args:
    config: the run's.
    workdir: its directory, which holds no run.
    corpus: what `config.data` gives.
    params: as arrays of any place.
    mesh: of the devices.
    loss: of the validation, nats a token; None: unknown.
    source: `workdir.run_hash` of the run that they are from.

  Raises:
    UserError: the directory can't be written.
    RunError: the checkpoint can't be written.
  """
  with distributed.together():
    if distributed.leads():
      workdir_lib.clear(workdir, corpus.tokenizer)
  places = state_shardings(config, mesh)
  learning, frozen = trainable.split(config.model, params)
  params = jax.device_put(trainable.join(learning, frozen), all_params(places))
  state = jax.jit(state_of, static_argnums=0, out_shardings=places)(config, params)
  checkpoints = Checkpoints(workdir, config, corpus.tokenizer.hash)
  checkpoints.save_frozen(state["frozen"])
  checkpoints.save(state, {"windows": 0}, loss)
  checkpoints.close()
  claim(config, workdir, corpus, source)
