"""A run: its config, tokenizer, text and newest model, from its work directory alone; and the devices that hold it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx import data
from diffeq_nnx.config import Config, MeshConfig, ModelConfig
from diffeq_nnx.data import Corpus, Tokenizer
from diffeq_nnx.depth import trained
from diffeq_nnx.errors import UserError
from diffeq_nnx.kernels import attention
from diffeq_nnx.model.integration import make_adjoint
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params, abstract_params, build
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints


class Run:
  """A run that `open` found; what its properties hold is read at their first use. `create` writes another one.

  Attributes:
    workdir: its directory.
    started: the config that it was started with.
    config: that of `open`.
  """

  def __init__(self, workdir: str, started: Config, config: Config, flag: str):
    self.workdir, self.started, self.config, self._flag = workdir, started, config, flag

  @classmethod
  def open(
    cls, workdir: str, config: Config | None = None, *, mesh: Mesh | None = None, flag: str = "workdir"
  ) -> "Run":
    """The run in a work directory; all processes of a job must call it.

    Args:
      config: the run's, changed, of which `localize` is taken; None: that of `portable`.
      mesh: of the devices that hold the model; None: that of the config.
      flag: what errors call the directory.

    Raises:
      UserError: the directory holds no run, or one of another model or text than the config's.
    """
    with distributed.sync_errors():
      started = workdir_lib.config_of(workdir, flag)
      if config is not None:
        workdir_lib.require(workdir, config, flag=flag)
    run = cls(workdir, started, portable(started) if config is None else localize(config, started), flag)
    if mesh is not None:
      run.mesh = mesh
    return run

  def say_untrained(self, num_steps: int | None) -> None:
    """Warns if the run was never trained at so many steps, whatever the changed config says of training."""
    trained.say_untrained(dataclasses.replace(self.started, model=self.config.model), self.step, num_steps)

  @staticmethod
  def create(
    config: Config,
    workdir: str,
    tokenizer: Tokenizer,
    corpus: Corpus | None,
    state: dict[str, Any],
    loss: float | None = None,
    source: str | None = None,
  ) -> None:
    """Writes a run at step 0, with run.json last, so that a run is complete or absent; all processes must call it.

    Args:
      workdir: its directory, which holds no run.
      corpus: what `config.data` gives; None: the run has no text yet.
      state: as of `training.step.place_state`.
      loss: of the validation, nats per token; None: unknown.
      source: `hash` of the run that it comes from.

    Raises:
      UserError: the directory can't be written.
      RunError: the checkpoint can't be written.
    """
    distributed.on_main_process(workdir_lib.clear, workdir, tokenizer)
    checkpoints = Checkpoints(workdir, config, tokenizer.hash)
    checkpoints.save_frozen(state["frozen"])
    checkpoints.save(state, {"windows": 0, "validate": False}, loss)
    checkpoints.close()
    workdir_lib.claim(workdir, config, tokenizer, corpus, source)

  @property
  def hash(self) -> str:
    """What identifies the run wherever its directory is, in hex."""
    return workdir_lib.run_hash(self.workdir)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The one that the model was trained with. Raises UserError where the directory lacks it."""
    return workdir_lib.tokenizer_of(self.workdir, self.config)

  @functools.cached_property
  def corpus(self) -> Corpus:
    """The text of the config. Raises UserError unless it is the run's."""
    corpus = load_corpus(self.config)
    with distributed.sync_errors():
      workdir_lib.require(self.workdir, self.config, corpus, self._flag)
    return corpus

  @functools.cached_property
  def mesh(self) -> Mesh:
    """Of the devices that hold the model. Raises UserError where it would cut a head."""
    mesh = sharding.make_mesh(self.config.mesh)
    sharding.check_model(self.config.model, mesh)
    return mesh

  @functools.cached_property
  def _newest(self) -> tuple[Params, int]:
    require_float64(self.config.model)
    with jax.set_mesh(self.mesh):
      checkpoints = Checkpoints(self.workdir, self.config, self.tokenizer.hash, read_only=True)
      found = checkpoints.restore_params(abstract_params(self.config.model, self.mesh))
    if found is None:
      raise UserError(f"{self._flag}={self.workdir}: holds no checkpoint yet; train first, or lower checkpoint.every")
    return found

  @property
  def params(self) -> Params:
    """All parameters of the newest model. Raises UserError where no checkpoint can be read."""
    return self._newest[0]

  @property
  def step(self) -> int:
    """Optimizer steps that the newest model was trained for. Raises as `params`."""
    return self._newest[1]

  @functools.cached_property
  def model(self) -> Model:
    """The newest model, split over the mesh. Raises as `params`."""
    with jax.set_mesh(self.mesh):
      return build(self.config.model, self.params)


load = Run.open  # its name at the top level of the package


def portable(config: Config) -> Config:
  """The config for a machine other than the one that it was trained on: default mesh and attention."""
  return dataclasses.replace(config, mesh=MeshConfig(), model=dataclasses.replace(config.model, attention="auto"))


def localize(config: Config, started: Config) -> Config:
  """The config, with the default mesh or attention where its own is that of its run and doesn't suit this machine."""
  mesh, model = config.mesh, config.model
  if mesh == started.mesh:
    try:
      sharding.make_mesh(mesh)
    except UserError:
      mesh = MeshConfig()
  if model.attention == started.model.attention:
    try:
      choose_attention(model)
    except UserError:
      model = dataclasses.replace(model, attention="auto")
  return dataclasses.replace(config, mesh=mesh, model=model)


def load_corpus(config: Config) -> Corpus:
  """The corpus, tokenized by process 0 first, so that processes that share its disk find the result."""
  for turn in (True, False):
    with distributed.sync_errors():
      if distributed.is_main_process() == turn:
        corpus = data.load(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
  sizes = [
    (len(split.tokens), split.num_bytes, split.num_documents) for split in (*corpus.train.splits, corpus.validation)
  ]
  reports = distributed.exchange([corpus.tokenizer.hash[:12], corpus.fingerprint[-12:], sizes])
  other = next((process for process, one in enumerate(reports) if one != reports[0]), None)
  if other is not None:
    raise UserError(
      f"data.source={config.data.source}: gives process {other} other tokens than process 0 (tokenizer, "
      f"tokens, then their number, bytes and documents: {reports[other]} and {reports[0]}); give every host "
      "the same files"
    )
  return corpus


def checked_mesh(config: Config, trains: bool = True) -> Mesh:
  """The config's mesh, after the checks that need devices; prints which attention implementation the run uses.

  Args:
    trains: whether the job takes train steps, whose batch the mesh must divide too.

  Raises:
    UserError: the devices or the backend don't fit the config, or the solver its adjoint.
  """
  with distributed.sync_errors():
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh, trains)
    if config.train.adjoint == "reversible":
      make_adjoint(config)
    odd = "an odd number of positions" if config.model.seq_len % 2 else None
    say_attention(config.model, "log-sum-exp, which mesh.context needs" if mesh.shape["context"] > 1 else odd)
    return mesh


def say_attention(model: ModelConfig, unsupported: str | None = None) -> None:
  """Prints what `choose_attention` returns, and raises as it does."""
  name, why = choose_attention(model, unsupported)
  say(f"attention: {name} ({why})")


def require_float64(model: ModelConfig) -> None:
  """Raises UserError where float64 is asked for and off in JAX."""
  if model.dtype == "float64" and jnp.result_type(float) != jnp.float64:
    raise UserError("model.dtype=float64: JAX computes in float32 here; set the environment variable JAX_ENABLE_X64=1")


def choose_attention(model: ModelConfig, unsupported: str | None = None) -> tuple[str, str]:
  """Returns which implementation of attention a run uses, and why; `unsupported` is as for `attention.choose`.

  Raises:
    UserError: this backend lacks the requested one, or float64 is asked for and off in JAX.
  """
  require_float64(model)
  try:
    return attention.choose(
      model.attention, dtype=jnp.dtype(model.dtype), head_dim=model.head_size, unsupported=unsupported
    )
  except ValueError as error:
    raise UserError(f"model.attention={model.attention!r}: {error}") from error
