"""The devices of a run: its mesh, and the implementation of attention for them."""

import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.kernels import attention
from diffeq_nnx.model.integration import make_adjoint
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say


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
