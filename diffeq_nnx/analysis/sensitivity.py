"""How sensitive the state of one token at the end is to each token at the start: finite-time Lyapunov exponents.

L positions, D embed_dim, S solver steps, p tangent vectors, r exponents, K key/value heads, C head_dim.

Both forms have M_k, a matrix [D, D] for each input token k, and the exponents log sigma_i(M_k), the singular values'
logarithms, by unit of the time t, which runs from 0 to 1 whatever the horizon:

  exact      M_k = d x_n(1) / d x_k(0), through all tokens between: the Jacobian of the real forward pass.
  per_token  M_k = product over steps of (I + dt d f_n / d x_k): the paper's form (Tong et al. 2025), which follows one
             token's tangent and leaves out what passes through others. For a sequential solver dt f_n is what the
             step adds to token n.

The published code begins with q = I, orthonormalises after each step and adds up log |R_ii|, which comes to the same
for long times; after a dozen steps it depends on the basis, and the singular values don't. No influence at all is -inf in
the exact form, and 0 in the per_token form, whose M_k is then I: the two can't be compared in size.

States and times are those of the forward pass. The final norm comes after the flow and is not in it.
"""

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.analysis import tangents
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, Pass, Progress, advance, steps_of
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import solvers, vector_fields
from diffeq_nnx.model.attention_context import Packing

FORMS = ("exact", "per_token")
METHODS = ("auto", "jacobian", "iteration")
JACOBIAN_BYTES = 2**30  # of Jacobians that are held at a time
ITERATED_PRODUCTS = 300  # with a Jacobian or its transpose, that the iteration takes for a token as a rule
BLOCK = 8  # tangent vectors of a token that go through the steps together
CHUNK_BYTES = 2**26  # of tangent vectors that do so at a time, and of their attention's; a step takes ten times as much


@dataclasses.dataclass(frozen=True)
class Sensitivity:
  """The exponents of each input token for one output token.

  Attributes:
    exponents: [n + 1, r], largest first, of the tokens up to the output token (later ones can't matter). -inf for a
      singular value of 0; by the Jacobian, for one below eps sqrt(D) of the largest, which the dtype can't tell from 0.
    position: n, the output token's.
    form: exact or per_token.
    residual: the largest last change of an exponent where they were iterated; 0 where they were not.
  """
  exponents: np.ndarray
  position: int
  form: str
  residual: float


def exponents(model: AnalyzedModel, tokens_L: Sequence[int], position: int = -1, *, leading: int | None = None,
              form: str = "exact", method: str = "auto", tolerance: float = 1e-3, seed: int = 0,
              progress: Progress = lambda done: None) -> Sensitivity:
  """The finite-time Lyapunov exponents of every input token for one output token.

  Args:
    model: the model.
    tokens_L: the text's tokens.
    position: of the output token; negative ones count from the end.
    leading: how many exponents, r; None: all D.
    form: exact or per_token.
    method: jacobian makes the exact form's M_k whole, D^2 numbers each and 1 GiB at a time, by D vector-Jacobian
      products for all of that time. iteration takes blocks of 8 tangent vectors there and back, in 8 D L numbers for a
      token, and keeps the basis that comes of them. auto: jacobian where all M_k fit or it takes fewer products. The
      per_token form is always iterated; for all exponents one sweep is exact.
    tolerance: the iteration ends when no exponent changed by more.
    seed: of the vectors that the iteration begins with.
    progress: called with the number of tokens done since the last call.

  Returns:
    Exponents [position + 1, r] and what belongs to them; natural logarithms of growth from t = 0 to 1.

  Raises:
    UserError: no tokens, ids that the model lacks, a position or number of exponents out of range.
  """
  tokens_L = model.check_tokens(tokens_L)
  D, position = model.config.embed_dim, model.check_position(position, len(tokens_L))
  if leading is not None and not 1 <= leading <= D:
    raise UserError(f"leading={leading}: must be 1 to {D}, the model's embed_dim")
  if form not in FORMS or method not in METHODS:
    raise UserError(f"form={form}, method={method}: must be of {', '.join(FORMS)} and of {', '.join(METHODS)}")
  tokens_L, num = tokens_L[:position + 1], D if leading is None else leading
  groups = _num_groups(model, len(tokens_L))
  fewer = groups == 1 or D * groups <= ITERATED_PRODUCTS * len(tokens_L)
  with model.computing():
    passed = model.observe(tokens_L)
    if form == "exact" and (method == "jacobian" or method == "auto" and fewer):
      return Sensitivity(_of_jacobian(model, passed, num, progress), position, form, 0.0)
    values_Lxr, residual = _iterated(model, passed, form, num, tolerance, seed, progress)
  return Sensitivity(values_Lxr, position, form, residual)


def kaplan_yorke_dimension(exponents_N: np.ndarray) -> float:
  """The dimension that small volumes keep: j + (l_1 + ... + l_j) / |l_{j+1}| (Kaplan & Yorke 1979).

  j is the largest number whose first j exponents add up to at least 0; N where all of them do, 0 where the first is
  negative.

  Args:
    exponents_N: all of them, in any order.
  """
  ordered_N = np.sort(exponents_N)[::-1]
  sums_N = np.cumsum(ordered_N)
  if ordered_N[0] < 0 or sums_N[-1] >= 0:
    return 0.0 if ordered_N[0] < 0 else float(len(ordered_N))
  j = int(np.max(np.nonzero(sums_N >= 0)[0]))
  return float(j + 1 + sums_N[j] / abs(ordered_N[j + 1]))


def jacobian(model: AnalyzedModel, passed: Pass, ks: Sequence[int] | None = None,
             progress: Progress = lambda done: None) -> np.ndarray:
  """d x_n(1) / d x_k(0) for the last token n and K tokens k, [K, D, D] (k, output, input).

  Args:
    model: the model.
    passed: a forward pass of one text.
    ks: which tokens; None: all L.
    progress: called with shares of K.
  """
  _, _, L, D = passed.states.shape
  ks = np.arange(L) if ks is None else np.asarray(ks)
  chunk = -(-D // _num_chunks(D, _tangent_bytes(model, L)))
  made_KxDxD = np.empty((len(ks), D, D), passed.states.dtype)
  for first in range(0, D, chunk):
    rows = np.arange(first, min(first + chunk, D))
    cotangents_cxD = jnp.asarray(np.eye(D)[np.resize(rows, chunk)], passed.states.dtype)  # one shape: compiled once
    with model.computing():
      made_cxLxD = _pulled_back(model.config, model.grid, model.weights, passed.states, cotangents_cxD)
    made_KxDxD[:, rows] = np.asarray(made_cxLxD)[:len(rows), ks].swapaxes(0, 1)
    progress(len(ks) * len(rows) / D)
  return made_KxDxD


def _tangent_bytes(model: AnalyzedModel, length: int) -> int:
  """Of one tangent of all tokens' states, and of its attention over a step."""
  return 4 * length * (model.config.embed_dim + 3 * model.config.num_heads * length)


def _num_groups(model: AnalyzedModel, length: int) -> int:
  """Into how many groups tokens go, so that the Jacobians of one take no more than JACOBIAN_BYTES."""
  each = model.config.embed_dim**2 * jnp.dtype(model.config.dtype).itemsize
  return -(-length // max(1, JACOBIAN_BYTES // each))


def _of_jacobian(model: AnalyzedModel, passed: Pass, num: int, progress: Progress) -> np.ndarray:
  halved = lambda done: progress(done / 2)
  L = passed.states.shape[2]
  values_Lxr = np.empty((L, num))
  for ks in np.array_split(np.arange(L), _num_groups(model, L)):
    for k, made_DxD in zip(ks, jacobian(model, passed, ks, halved)):
      values_D = np.linalg.svd(made_DxD, compute_uv=False)
      noise = np.finfo(made_DxD.dtype).eps * len(values_D)**0.5 * values_D[0]
      values_Lxr[k] = np.where(values_D > noise, values_D, 0)[:num]
      halved(1)
  return _logarithms(values_Lxr)


def _logarithms(values: np.ndarray) -> np.ndarray:
  """log, of 0 too: where a token doesn't reach the output at all its exponents are -inf."""
  with np.errstate(divide="ignore"):
    return np.log(values)


def _iterated(model: AnalyzedModel, passed: Pass, form: str, num: int, tolerance: float, seed: int,
              progress: Progress) -> tuple[np.ndarray, float]:
  """(exponents [L, r], the largest last change)."""
  _, _, L, D = passed.states.shape
  block_size = D if num == D else BLOCK
  each = 8 * D if form == "per_token" else _tangent_bytes(model, L)  # of one tangent vector: of two tokens, or all
  basis = 16 * D * (2 * num + 4 * block_size) * CHUNK_BYTES // JACOBIAN_BYTES  # is kept beside, up to JACOBIAN_BYTES
  chunks = [ks for ks in np.array_split(np.arange(L - 1), _num_chunks(L, max(block_size * each, basis))) if len(ks)]
  values_Lxr, residual = [], 0.0
  for ks in [*chunks, np.array([L - 1])]:

    def sweep(reverse: bool, vectors_KxpxD: np.ndarray, ks=ks) -> np.ndarray:
      vectors_KxpxD = jnp.asarray(vectors_KxpxD, passed.states.dtype)
      linear = _exact if form == "exact" else _of_itself if ks[0] == L - 1 else _of_another
      progress(0)  # a sign of life
      return tangents.whole(*_swept(model.config, model.grid, linear, reverse, model.weights, passed,
                                    jnp.asarray(ks), vectors_KxpxD))

    values_Kxr, change = tangents.leading_singular_values(
        functools.partial(sweep, False), functools.partial(sweep, True), len(ks), D, num, block=block_size,
        tolerance=tolerance, seed=seed)
    values_Lxr.append(values_Kxr)
    residual = max(residual, change)
    progress(len(ks))
  return _logarithms(np.concatenate(values_Lxr)), residual


def _num_chunks(pieces: int, bytes_each: int) -> int:
  """In how many chunks pieces go, so that each stays below CHUNK_BYTES."""
  return -(-pieces // max(1, CHUNK_BYTES // bytes_each))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pulled_back(config: ModelConfig, grid: solvers.Grid, weights: Any, states_Sx1xLxD: jax.Array,
                 cotangents_cxD: jax.Array) -> jax.Array:
  """Cotangents of the last token's state at the end, as cotangents of all states at the start, [c, L, D]."""
  def back(rows_cxLxD, one):
    x_1xLxD, step = one
    _, pull = jax.vjp(functools.partial(advance, config, Packing(), *step), x_1xLxD)
    return jax.vmap(lambda row_LxD: pull(row_LxD[None])[0][0])(rows_cxLxD), None

  L, D = states_Sx1xLxD.shape[2:]
  rows_cxLxD = jnp.zeros((len(cotangents_cxD), L, D), cotangents_cxD.dtype).at[:, -1].set(cotangents_cxD)
  rows_cxLxD, _ = jax.lax.scan(back, rows_cxLxD, (states_Sx1xLxD[:-1], steps_of(config, grid, weights)), reverse=True)
  return rows_cxLxD


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _swept(config: ModelConfig, grid: solvers.Grid, linear: Callable, reverse: bool, weights: Any, passed: Pass,
           ks: jax.Array, vectors_KxpxD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """M_k of each vector, or its transpose's, for several tokens k, as `tangents.propagate` gives them."""
  chain = (passed.states[:-1], passed.keys, passed.values, steps_of(config, grid, weights))
  L, D = passed.states.shape[2:]

  def one(k: jax.Array, vectors_pxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    step = lambda link, vectors: linear(config, reverse, k, link, vectors)
    if linear is not _exact:
      return tangents.propagate(step, chain, vectors_pxD, reverse)
    enters, leaves = (L - 1, k) if reverse else (k, L - 1)  # states of all tokens, one beside the other
    placed_pxN = jnp.zeros((len(vectors_pxD), L, D), vectors_pxD.dtype).at[:, enters].set(vectors_pxD)
    end_pxN, r_Sxpxp = tangents.propagate(step, chain, placed_pxN.reshape(len(vectors_pxD), -1), reverse)
    return end_pxN.reshape(-1, L, D)[:, leaves], r_Sxpxp

  return jax.vmap(one)(ks, vectors_KxpxD)


def _exact(config: ModelConfig, reverse: bool, k: jax.Array, link: Any, vectors_pxN: jax.Array) -> jax.Array:
  """Tangents of all tokens' states after a step, N = L D."""
  del k
  x_1xLxD, _, _, step = link
  moved = lambda x_N: advance(config, Packing(), *step, x_N.reshape(x_1xLxD.shape)).reshape(-1)
  return _through(moved, x_1xLxD.reshape(-1), vectors_pxN, reverse)


def _of_itself(config: ModelConfig, reverse: bool, k: jax.Array, link: Any, vectors_pxD: jax.Array) -> jax.Array:
  """I + dt d f_n / d x_n of each vector."""
  x_1xLxD, *_ = link
  moved = lambda x_D: _moved(config, link, k, x_D, x_D)
  return _through(moved, x_1xLxD[0, -1], vectors_pxD, reverse)


def _of_another(config: ModelConfig, reverse: bool, k: jax.Array, link: Any, vectors_pxD: jax.Array) -> jax.Array:
  """I + dt d f_n / d x_k of each vector, k before n."""
  x_1xLxD, *_ = link
  moved = lambda x_D: _moved(config, link, k, x_D, x_1xLxD[0, -1])
  return vectors_pxD + _through(moved, x_1xLxD[0, k], vectors_pxD, reverse)


def _moved(config: ModelConfig, link: Any, k: jax.Array, x_k_D: jax.Array, x_n_D: jax.Array) -> jax.Array:
  """The state of the last token n after a step, [D]; of tokens k and n alone: the others' keys and values are known."""
  x_1xLxD, keys, values, (weights, dt) = link
  seen = _TwoOfMany((keys, values), jnp.stack([k, jnp.asarray(x_1xLxD.shape[1] - 1, k.dtype)])[None])
  field = _SecondOnly(vector_fields.make_field(config), seen)
  x_1x2xD = jnp.stack([x_k_D, x_n_D])[None]
  return solvers.SOLVERS[config.solver](field, x_1x2xD, weights, dt, solvers.no_dropout, jax.random.key(0))[0, 1]


def _through(function: Callable, x: jax.Array, vectors: jax.Array, reverse: bool) -> jax.Array:
  """The Jacobian of a function at x, times each vector; `reverse`: its transpose."""
  if reverse:
    _, pull = jax.vjp(function, x)
    return jax.vmap(lambda vector: pull(vector)[0])(vectors)
  return jax.vmap(lambda vector: jax.jvp(function, (x,), (vector,))[1])(vectors)


@dataclasses.dataclass(frozen=True)
class _SecondOnly(vector_fields.BoundField):
  """A field that does no more than it must where only the second of two tokens is asked for."""

  def feedforward(self, x_1x2xD: jax.Array, w: vector_fields.Weights) -> jax.Array:
    """The second token's; zero for the first."""
    second_1x1xD = self.field.feedforward(x_1x2xD[:, 1:], w)
    return jnp.concatenate([jnp.zeros_like(second_1x1xD), second_1x1xD], axis=1)


@dataclasses.dataclass
class _TwoOfMany:
  """Two tokens of a text, of which the second attends, and the known keys and values of all, [1, K, L, C] each.

  Written with the two beside the known ones, so that tangents are of two keys and values, not of all.
  """
  kept: tuple[jax.Array, jax.Array]
  positions_BxL: jax.Array  # [1, 2]

  def attend(self, q_1x2xHxC: jax.Array, k_1x2xKxC: jax.Array, v_1x2xKxC: jax.Array, implementation: str) -> jax.Array:
    """Attention of the second token to all before it, [1, 2, H, C]; zero for the first, whose own is not asked for."""
    del implementation
    keys_KxLxC, values_KxLxC = self.kept[0][0], self.kept[1][0]
    (K, L, C), (first, second) = keys_KxLxC.shape, self.positions_BxL[0]
    q_KxGxC = q_1x2xHxC[0, 1].reshape(K, -1, C) * C**-0.5
    places_L = jnp.arange(L)
    known_L = (places_L != first) & (places_L != second)
    there_2 = jnp.stack([first != second, True])  # the second alone where both are the same token
    scores_KxGxM = jnp.concatenate([  # M = L + 2
        jnp.where(known_L, jnp.einsum("kgc,klc->kgl", q_KxGxC, keys_KxLxC), -jnp.inf),
        jnp.where(there_2, jnp.einsum("kgc,lkc->kgl", q_KxGxC, k_1x2xKxC[0]), -jnp.inf)], axis=-1)
    shares_KxGxM = jax.nn.softmax(scores_KxGxM, axis=-1)
    seen_KxGxC = (jnp.einsum("kgl,klc->kgc", shares_KxGxM[..., :L], values_KxLxC)
                  + jnp.einsum("kgl,lkc->kgc", shares_KxGxM[..., L:], v_1x2xKxC[0]))
    return jnp.stack([jnp.zeros((K * len(seen_KxGxC[0]), C), seen_KxGxC.dtype), seen_KxGxC.reshape(-1, C)])[None]
