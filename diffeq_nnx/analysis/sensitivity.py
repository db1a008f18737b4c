"""Sensitivity of one token's final state to each token's initial state: finite-time Lyapunov exponents.

L positions, D embed_dim, S solver steps, r exponents, K tokens, c cotangents.

Both forms have a matrix M_k [D, D] for each input token k; the exponents are log sigma_i(M_k), the logarithms of its
singular values, per unit of time t, which runs from 0 to 1 whatever the horizon:

  exact      M_k = d x_n(1) / d x_k(0), through all tokens between: the Jacobian of the real forward pass.
  per_token  M_k = product over steps of (I + dt d f_n / d x_k): the paper's form (Tong et al. 2025), which follows one
             token's tangent and leaves out paths through other tokens. dt f_n is what a step of the solver, started at
             the recorded state, adds to token n: for Euler's method dt times the vector field.

The published code starts at q = I, orthonormalizes after each step and sums log |R_ii|, which agrees in the limit of
long times; after a dozen steps it depends on the basis, and the singular values don't. Without any influence exponents
are -inf in the exact form, and 0 in the per_token form, where M_k is then I: don't compare the sizes of the two.

States and times are those of the forward pass. The final norm comes after the flow and is not included.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, Pass, Progress
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.ready import ReadyModel

FORMS = ("exact", "per_token")
JACOBIAN_BYTES = 2**30  # of Jacobians held at a time
CHUNK_BYTES = 2**26  # of cotangents processed at a time, and their attention; a step takes ten times as much


def exponents(
  model: AnalyzedModel,
  tokens_L: Sequence[int] | np.ndarray,
  position: int = -1,
  *,
  leading: int | None = None,
  form: str = "exact",
  progress: Progress = lambda done: None,
) -> np.ndarray:
  """The finite-time Lyapunov exponents of every input token for one output token.

  The matrices M_k are computed by vector-Jacobian products, D for each group of tokens whose matrices take 1 GiB.

  Args:
    position: of the output token; negative ones count from the end.
    leading: number of exponents, r; None: all D.
    form: exact or per_token.
    progress: called with the number of tokens done since the last call.

  Returns:
    Exponents [position + 1, r], the largest first: natural logarithms of growth from t = 0 to 1. Later tokens have no
    influence. -inf stands for a singular value of 0, and for one below eps sqrt(D) of the largest, which the dtype
    of the product can't distinguish from 0.

  Raises:
    UserError: no tokens, ids that the model lacks, a position or number of exponents out of range.
  """
  tokens_L = model.check_tokens(tokens_L)
  D, position = model.config.embed_dim, model.check_position(position, len(tokens_L))
  if leading is not None and not 1 <= leading <= D:
    raise UserError(f"leading={leading}: must be 1 to {D}, the model's embed_dim")
  if form not in FORMS:
    raise UserError(f"form={form}: must be one of {', '.join(FORMS)}")
  passed = model.observe(tokens_L[: position + 1])
  values_Lxr = _singular_values(model, passed, form, D if leading is None else leading, progress)
  with np.errstate(divide="ignore"):  # a token without influence has singular values of 0
    return np.log(values_Lxr)


def jacobian(
  model: AnalyzedModel, passed: Pass, ks: np.ndarray, progress: Progress, alone: int | None = None
) -> np.ndarray:
  """d x_n(1) / d x_k(0) for the last token n and K tokens k, [K, D, D] (k, output, input).

  Args:
    ks: which tokens.
    progress: called with fractions of K.
    alone: a step to differentiate in place of all, as started at its recorded state.
  """
  L, D = passed.states.shape[2:]
  solver = model.without_generator.solver
  bytes_of_tangent = 4 * L * (D + 3 * solver.evaluations.attention * model.config.num_heads * L)  # and its attention
  num_chunks = -(-D // max(1, CHUNK_BYTES // bytes_of_tangent))
  chunk = -(-D // num_chunks)  # all of about the same size
  result_KxDxD = np.empty((len(ks), D, D), passed.states.dtype)
  with model.use_device():
    start, carries, links = passed.states[0], passed.carries, model.without_generator.links_of(model.ready.weights)
    if alone is not None:
      start = passed.states[alone]
      carries = jax.tree.map(lambda leaf: leaf[None], solver.init(start))
      links = jax.tree.map(lambda leaf: leaf[alone : alone + 1], links)
    for first in range(0, D, chunk):
      rows = np.arange(first, min(first + chunk, D))
      cotangents_cxD = jnp.asarray(np.eye(D)[np.resize(rows, chunk)], passed.states.dtype)  # one shape: compiled once
      pulled_cxLxD = pull_back(model.ready, start, carries, links, cotangents_cxD)
      result_KxDxD[:, rows] = np.asarray(pulled_cxLxD)[: len(rows), ks].swapaxes(0, 1)
      progress(len(ks) * len(rows) / D)
  return result_KxDxD


def _per_token(model: AnalyzedModel, passed: Pass, ks: np.ndarray, progress: Progress) -> np.ndarray:
  """The per_token form's M_k for K tokens, [K, D, D], multiplied in float64."""
  S, _, L, D = len(passed.states) - 1, *passed.states.shape[1:]
  carried_Kx1x1 = (ks != L - 1)[:, None, None]  # the state that d x_n / d x_k lacks for k other than n
  product_KxDxD = np.broadcast_to(np.eye(D), (len(ks), D, D))
  for step in range(S):
    step_KxDxD = jacobian(model, passed, ks, lambda done: progress(done / S), step)
    product_KxDxD = (carried_Kx1x1 * np.eye(D) + step_KxDxD) @ product_KxDxD
  return product_KxDxD


def _singular_values(model: AnalyzedModel, passed: Pass, form: str, num: int, progress: Progress) -> np.ndarray:
  """The r largest singular values of each M_k, [L, r]."""
  half = lambda done: progress(done / 2)
  L, D = passed.states.shape[2:]
  values_Lxr = np.empty((L, num))
  compute, copies = (jacobian, 1) if form == "exact" else (_per_token, 6)  # the products are in float64
  tokens_at_a_time = max(1, JACOBIAN_BYTES // (copies * D**2 * passed.states.dtype.itemsize))
  for ks in np.array_split(np.arange(L), -(-L // tokens_at_a_time)):
    matrices_KxDxD = compute(model, passed, ks, half)
    for k, matrix_DxD in zip(ks, matrices_KxDxD):
      values_D = np.linalg.svd(matrix_DxD, compute_uv=False)
      noise = np.finfo(matrix_DxD.dtype).eps * len(values_D) ** 0.5 * values_D[0]
      values_Lxr[k] = np.where(values_D > noise, values_D, 0)[:num]
      half(1)
  return values_Lxr


def pull_back(
  ready: ReadyModel, start_1xLxD: jax.Array, carries: Any, links: Any, cotangents_cxD: jax.Array
) -> jax.Array:
  """Cotangents of the last token's final state, pulled back to all initial states `start_1xLxD`, [c, L, D].

  `carries` and `links` are, for each step, the carry before it and what it reads.
  """
  on_cpu = ready.mesh.devices.flat[0].platform == "cpu"
  compiled = _compiled_without_fusions if on_cpu and jax.__version_info__ < (0, 11) else _compiled
  return compiled(ready, start_1xLxD, carries, links, cotangents_cxD)


def _pull_back(
  ready: ReadyModel, start_1xLxD: jax.Array, carries: Any, links: Any, cotangents_cxD: jax.Array
) -> jax.Array:
  model = ready.make_model()
  step, solver = model.make_step(ready.weights.grid), model.solver

  def pull_rows(function, at, rows):  # rows: cotangents with a leading axis c
    _, pull = jax.vjp(function, at)
    return jax.vmap(lambda row: pull(row)[0])(rows)

  def back(rows, one):
    carry, link = one
    return pull_rows(lambda carry: step(carry, link), carry, rows), None

  L, D = start_1xLxD.shape[1:]
  rows = jnp.zeros((len(cotangents_cxD), 1, L, D), cotangents_cxD.dtype).at[:, 0, -1].set(cotangents_cxD)
  last = step(*jax.tree.map(lambda leaf: leaf[-1], (carries, links)))
  rows, _ = jax.lax.scan(back, pull_rows(solver.read, last, rows), (carries, links), reverse=True)
  return pull_rows(solver.init, start_1xLxD, rows)[:, 0]


_compiled = jax.jit(_pull_back)
# The CPU's compiler of jax 0.10 gives wrong rows where queries and keys are normalized (model.qk_norm), by what it
# fuses for the library YNNPACK; products alone are right.
_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
_compiled_without_fusions = jax.jit(_pull_back, compiler_options=_LIBRARY)
