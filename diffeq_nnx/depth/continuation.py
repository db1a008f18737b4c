"""From stored weights to weights that are functions of time: the inverse of discretizing.

U weight sets, M times, T time_embed_dim, C columns (T, and one for F_0), N groups.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig, TimeConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.model.solvers import weight_times
from diffeq_nnx.model.vector_fields import make_field

FINE_TIMES = 16  # where curvature is measured, for each half turn of the fastest wave
RIDGE = 1e-2  # weight of the size of F beside the curvature of W; their mean squares are scaled to 1


def continuous_config(model: ModelConfig) -> ModelConfig:
  """The config of what `continuous_params` makes of a model with stored weights, with a time embedding that fits.

  The embedding is uniform, with a frequency and two basis matrices for each weight set. Where each step has a set of
  its own, that is the mean of W over the step.

  Raises:
    UserError: the weights are not stored, or there are adapters.
  """
  if model.weights != "stored":
    raise UserError(f"model.weights={model.weights}: only stored weights are made continuous")
  if model.lora.rank:
    raise UserError("the model has adapters: merge them first, with --job=discretize")
  times = weight_times(model)
  U, own = len(times.points_UxQ), len(times.points_UxQ) == model.num_steps
  time = TimeConfig(
    embedding="uniform", sinusoidal_dim=U, time_embed_dim=2 * U, weights_at="mean" if own else model.time.weights_at
  )
  return dataclasses.replace(model, weights="generated", time=time)


def continuous_params(model: ModelConfig, params: Params, seed: int = 0) -> Params:
  """Parameters of the generated model `model` whose W on its own grid is that of a model with stored weights.

  The time MLPs are those of a new model. Of all F with sum_j e_j F_j + F_0 = W for each weight set, it takes those with
  the least integral of |W''(t)|^2, plus a little of the size of F.

  Args:
    model: as `continuous_config` gives, perhaps with another time embedding.
    params: of the model with stored weights, with the same grid.
    seed: of the time MLPs.

  Raises:
    UserError: fewer basis matrices than weight sets, or an embedding whose e(t) hardly differ between them.
  """
  times = weight_times(model)
  if model.time.time_embed_dim < len(times.points_UxQ):
    raise UserError(
      f"model.time.time_embed_dim={model.time.time_embed_dim}: must be at least the number of weight sets, "
      f"{len(times.points_UxQ)}"
    )
  fine_M = np.linspace(0.0, 1.0, FINE_TIMES * max(1, round(model.time.radians / np.pi)) + 1)

  @jax.jit
  def embedded():
    source = Model(model, rngs=nnx.Rngs(params=seed)).weight_source
    rest = {name: leaf for name, leaf in nnx.to_pure_dict(nnx.state(source)).items() if name != "generator"}
    return rest, source.mean_vectors(times), source.time_vectors(fine_M)

  rest, e_NxUxT, fine_NxMxT = embedded()
  e_NxUxT, fine_NxMxT = (np.asarray(array, np.float64) for array in (e_NxUxT, fine_NxMxT))
  specs, wide = make_field(model).specs(model), parameter_dtype(model.dtype)

  def made(n: int, name: str, leaf: jax.Array, start: float) -> jax.Array:
    solved_CxU = _least_curvature(e_NxUxT[n % len(e_NxUxT)], fine_NxMxT[n % len(e_NxUxT)], name == "kernel")
    highest = jax.lax.Precision.HIGHEST
    return jnp.tensordot(jnp.asarray(solved_CxU, wide), leaf.astype(wide) - start, 1, precision=highest)

  stored = params["weight_source"]["stored"]
  generator = {
    group: {name: made(n, name, stored[group][name], leaf.start) for name, leaf in leaves.items()}
    for n, (group, leaves) in enumerate(specs.items())
  }
  return {**params, "weight_source": {**rest, "generator": generator}}


def _least_curvature(e_UxT: np.ndarray, fine_MxT: np.ndarray, constant: bool) -> np.ndarray:
  """Which F, for each weight set, is W = 1 there and 0 at the other sets, with the least curvature, [C, U].

  The Lagrange conditions of min tr(A^T H A) with e A = 1. `constant`: F_0 is the last row of A.
  """
  U, T = e_UxT.shape
  curvature_MxT = np.diff(fine_MxT, 2, axis=0)
  H_CxC = np.zeros((T + constant, T + constant))
  H_CxC[:T, :T] = curvature_MxT.T @ curvature_MxT
  H_CxC = T * H_CxC / max(np.trace(H_CxC), 1e-300) + RIDGE * np.eye(len(H_CxC))
  e_UxC = np.concatenate([e_UxT, np.ones((U, 1))], axis=1) if constant else e_UxT
  if np.linalg.cond(e_UxC) > 1e5:
    raise UserError(
      "model.time: e(t) hardly differs between the steps; use model.time.embedding=uniform, with a "
      "model.time.sinusoidal_dim of about the number of steps"
    )
  conditions = np.block([[H_CxC, e_UxC.T], [e_UxC, np.zeros((U, U))]])
  wanted = np.concatenate([np.zeros((len(H_CxC), U)), np.eye(U)])
  return np.linalg.solve(conditions, wanted)[: len(H_CxC)]
