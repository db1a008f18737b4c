"""Opening a run: its config, tokenizer and newest model, on the devices at hand."""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from diffeq_nnx.config import Config, MeshConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, abstract_params, build
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints


class Run(NamedTuple):
  """An opened run.

  Attributes:
    config: the run's, with this machine's mesh and attention.
    model: its newest, split over `mesh`.
    tokenizer: the one that the model was trained with.
    mesh: of all devices.
    step: optimizer steps that the model was trained for.
  """

  config: Config
  model: Model
  tokenizer: Tokenizer
  mesh: Mesh
  step: int


def load(workdir: str, config: Config | None = None) -> Run:
  """Reads a run's newest model; the text that it was trained on is not needed.

  Args:
    workdir: the run's directory.
    config: the run's, changed; None: unchanged. Mesh and attention are as for `described`.

  Raises:
    UserError: the directory holds no run, or no checkpoint that can be read.
  """
  return read(workdir, *described(workdir, workdir_lib.config_of(workdir) if config is None else config))


def described(workdir: str, config: Config) -> tuple[Config, Tokenizer]:
  """A run's config and tokenizer, without its model. Raises as `load`.

  Mesh and attention are those of `portable` unless `config` has others than the run's own.
  """
  own, here = workdir_lib.config_of(workdir), portable(config)
  if config.mesh != own.mesh:
    here = dataclasses.replace(here, mesh=config.mesh)
  if config.model.attention != own.model.attention:
    here = dataclasses.replace(here, model=dataclasses.replace(here.model, attention=config.model.attention))
  return here, workdir_lib.tokenizer_of(workdir, here)


def read(workdir: str, config: Config, tokenizer: Tokenizer) -> Run:
  """The run whose config and tokenizer `described` returned. Raises as `load`."""
  mesh = sharding.make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    params, step = read_params(config, workdir, mesh, tokenizer.hash)
  return Run(config, build(config.model, params), tokenizer, mesh, step)


def portable(config: Config) -> Config:
  """The config for a machine other than the one that it was trained on: default mesh and attention."""
  return dataclasses.replace(config, mesh=MeshConfig(), model=dataclasses.replace(config.model, attention="auto"))


def read_params(
  config: Config, workdir: str, mesh: Mesh, tokenizer_hash: str, flag: str = "workdir"
) -> tuple[Params, int]:
  """All parameters of a run's newest model, split over `mesh`, and its step; errors name `flag`.

  Raises:
    UserError: there is none, or none that can be read.
  """
  checkpoints = Checkpoints(workdir, config, tokenizer_hash, read_only=True)
  found = checkpoints.restore_params(abstract_params(config.model, mesh))
  if found is None:
    raise UserError(f"{flag}={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every")
  return found
