"""BlockWeights and their sources: generated, stored or shared weights.

BlockWeights is a nested dict {group: {leaf: array}}, e.g. weights["up"]["kernel"]; every leaf has a leading
axis U, the requested times. A weight source is called once for all times that a solver will visit. GridWeights are
those of one pass, with its grid.

U weight sets (distinct times), Q points of a mean, T time_embed_dim, M frequencies or times, P = 2 M + 1 features, N
groups (weight matrices and norms).
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.model.grids import Grid, Times
from diffeq_nnx.model.time_embedding import frequencies, sinusoidal_features

BlockWeights = dict[str, dict[str, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridWeights:
  """The weights of one pass over a grid, and the grid, so that weights are never integrated over another one.

  `sets` are BlockWeights at the times of the grid and the solver, every leaf with a leading axis U; or unrolled, a list
  of U trees without it.
  """

  sets: Any
  grid: Grid = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Heads:
  """How heads lie along the last axis of a kernel, which is [groups, sum(parts), head_dim] in this order.

  The kernel joins several matrices, and `parts` says how many heads of a group each of them has. For example, (2, 1, 1)
  are two heads of queries, one of keys and one of values.
  """

  groups: int
  parts: tuple[int, ...]
  head_dim: int


@dataclasses.dataclass(frozen=True)
class LeafSpec:
  """One array of the block at one time."""

  shape: tuple[int, ...]  # without the axis U
  axes: tuple[str | None, ...]  # the names of its axes, which `sharding.RULES` maps to mesh axes
  std: float = 0.0  # standard deviation of a plain model's initial values; 0: all are `start`
  start: float = 0.0  # 0 for kernels and biases, 1 for the scale of a norm
  heads: Heads | None = None  # which columns belong to which matrix and head; None: one matrix without heads


BlockSpecs = dict[str, dict[str, LeafSpec]]


def initial_leaf(spec: LeafSpec, lead: tuple[int, ...], rngs: nnx.Rngs, dtype) -> nnx.Param:
  """A parameter with the leading axes `lead`, which are never split."""
  shape = lead + spec.shape
  values = spec.std * jax.random.normal(rngs.params(), shape, dtype) if spec.std else jnp.full(shape, spec.start, dtype)
  return nnx.Param(values, axes=(None,) * len(lead) + spec.axes)


def initial_leaves(specs: BlockSpecs, lead: tuple[int, ...], rngs: nnx.Rngs, dtype) -> dict[str, dict[str, nnx.Param]]:
  """`initial_leaf` for every leaf of the block."""
  return {
    group: {name: initial_leaf(leaf, lead, rngs, dtype) for name, leaf in leaves.items()}
    for group, leaves in specs.items()
  }


class StoredWeights(nnx.Module):
  """One weight set for each time of a grid, as in an ordinary transformer, where there is one a step."""

  def __init__(self, specs: BlockSpecs, num_sets: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.num_sets = num_sets
    self.stored = nnx.data(initial_leaves(specs, (num_sets,), rngs, dtype))

  def __call__(self, times: Times, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The stored sets in `dtype`, or those that the grid keeps; raises ValueError for times that have none."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), self._kept(times)["stored"])

  def _kept(self, times: Times) -> Any:
    """The parameters of the sets that a grid keeps, whose leading axes are U. Raises as `__call__`."""
    params, kept_W = nnx.to_pure_dict(nnx.state(self)), times.kept_W
    asked = len(times.points_UxQ if kept_W is None else kept_W)
    if asked != self.num_sets:
      raise ValueError(
        f"asked for weights at {asked} times: those of {self.num_sets} are stored; use the model's own number of "
        "steps, or a model with generated or shared weights"
      )
    return params if kept_W is None else jax.tree.map(lambda leaf: leaf[np.flatnonzero(kept_W)], params)


class SharedWeights(nnx.Module):
  """One set of weights for every step."""

  def __init__(self, specs: BlockSpecs, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.stored = nnx.data(initial_leaves(specs, (), rngs, dtype))

  def __call__(self, times: Times, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The one set in `dtype`, repeated along U."""
    return jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf.astype(dtype), (len(times.points_UxQ), *leaf.shape)),
      nnx.to_pure_dict(nnx.state(self))["stored"],
    )


class GeneratedWeights(nnx.Module):
  """W(t) = sum_j e_j(t) F_j + F_0, where e(t) = Linear2(silu(Linear1(s(t)))).

  Each group has its own e(t), unless `time.embedding` is shared_mlp.

  Tong et al. 2025, section 3.1; s(t) is `sinusoidal_features`. Biases have no F_0; the scale of a norm is
  1 + sum_j e_j g_j and its shift sum_j e_j h_j.

  A mean of W over time is W of the mean of e, since W is linear in e: it costs no more than W at one time.

  One call computes all groups at all times: one batched product per layer of the MLPs, then one product per leaf
  that reads F once whatever the number of times. F_0 is stored as the last row of a kernel's F, so that the same
  products compute its term and its gradient.
  """

  def __init__(
    self,
    specs: BlockSpecs,
    time: config_lib.TimeConfig,
    initialization: str,
    times: Times,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    """`times`: those at which W initially has the standard deviations of the specs."""
    self.time = time
    self.groups = tuple(specs)
    self.starts = nnx.static(
      tuple((group, name, leaf.start) for group, leaves in specs.items() for name, leaf in leaves.items())
    )
    N = 1 if time.embedding == "shared_mlp" else len(specs)
    P, T = 2 * time.sinusoidal_dim + 1, time.time_embed_dim
    published = initialization == "published"

    std = lambda fan_in: 0.02 if published else fan_in**-0.5

    def linear(fan_in: int, fan_out: int) -> nnx.Param:
      return nnx.Param(std(fan_in) * jax.random.normal(rngs.params(), (N, fan_in, fan_out), dtype))

    self.time_mlp = nnx.data(
      {
        "kernel1": linear(P, T),
        "bias1": nnx.Param(jnp.zeros((N, T), dtype)),
        "kernel2": linear(T, T),
        "bias2": nnx.Param(jnp.zeros((N, T), dtype)),
      }
    )
    if time.embedding == "learned":
      self.frequencies_M = nnx.Param(frequencies(time, dtype))
    if time.common:
      self.time_mlp["bias1"][...] = time.common * std(P) * jax.random.normal(rngs.params(), (N, T), dtype)
    mean_square_norm_N = jnp.square(self.mean_vectors(times)).sum(-1).mean(-1)
    self.generator = nnx.data(
      {
        group: {
          name: self._initial_leaf(name, leaf, mean_square_norm_N[n % N], published, rngs, dtype)
          for name, leaf in leaves.items()
        }
        for n, (group, leaves) in enumerate(specs.items())
      }
    )

  def _initial_leaf(
    self, name: str, leaf: LeafSpec, mean_square_norm: jax.Array, published: bool, rngs: nnx.Rngs, dtype
  ) -> nnx.Param:
    """F [T, ...], and for a kernel F_0 = 0 as one more row; `mean_square_norm` is that of e over times."""
    T = self.time.time_embed_dim
    if name != "kernel":  # published biases start at 1e-4, norms as in a plain model
      std = 1e-4 if published and name == "bias" else 0.0
      return initial_leaf(dataclasses.replace(leaf, std=std, start=0.0), (T,), rngs, dtype)
    std = 0.02 if published else leaf.std / jnp.sqrt(mean_square_norm)
    basis = jax.random.normal(rngs.params(), (T + 1, *leaf.shape), dtype)
    stds_T1 = jnp.full((T + 1,), std).at[T].set(0.0)
    return nnx.Param(basis * stds_T1.reshape(-1, *[1] * len(leaf.shape)).astype(dtype), axes=(None, *leaf.axes))

  def time_vectors(self, times_M: jax.typing.ArrayLike) -> jax.Array:
    """e(t) of every group at any times, [N, M, T] (N = 1 with a shared MLP), in the parameters' dtype."""
    mlp = self.time_mlp
    dtype = mlp["kernel1"][...].dtype
    times_M = jnp.asarray(times_M, dtype)
    if self.time.constant:
      times_M = jnp.zeros_like(times_M)
    learned = self.time.embedding == "learned"
    features_MxP = sinusoidal_features(
      times_M, self.frequencies_M[...] if learned else frequencies(self.time, dtype), self.time.radians
    )
    highest = jax.lax.Precision.HIGHEST  # the products are small, and their error would affect every weight
    hidden_NxMxT = jnp.einsum("mp,npt->nmt", features_MxP, mlp["kernel1"][...], precision=highest)
    hidden_NxMxT = jax.nn.silu(hidden_NxMxT + mlp["bias1"][...][:, None])
    e_NxMxT = jnp.einsum("nmt,ntu->nmu", hidden_NxMxT, mlp["kernel2"][...], precision=highest)
    return e_NxMxT + mlp["bias2"][...][:, None]

  def mean_vectors(self, times: Times) -> jax.Array:
    """e of every weight set, [N, U, T]: at its time, or its mean over a step."""
    U, Q = times.points_UxQ.shape
    e_NxMxT = self.time_vectors(times.points_UxQ.reshape(-1))
    if Q == 1:
      return e_NxMxT
    e_NxUxQxT = e_NxMxT.reshape(len(e_NxMxT), U, Q, -1)
    shares_UxQ = jnp.asarray(times.shares_UxQ, e_NxMxT.dtype)
    return jnp.einsum("nuqt,uq->nut", e_NxUxQxT, shares_UxQ, precision=jax.lax.Precision.HIGHEST)

  def vectors_of_kernels(self, times: Times) -> dict[str, jax.Array]:
    """`mean_vectors` by group, with a one for F_0 at the end, [U, T + 1]."""
    e_NxUxT = self.mean_vectors(times)
    e_NxUxT1 = jnp.concatenate([e_NxUxT, jnp.ones_like(e_NxUxT[..., :1])], axis=2)
    return {group: e_NxUxT1[n % len(e_NxUxT1)] for n, group in enumerate(self.groups)}

  def __call__(self, times: Times, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """W of each set in `dtype`, made in float32 or wider; a TPU rounds the factors of products itself."""
    vectors = self.vectors_of_kernels(times)
    weights: BlockWeights = {group: {} for group in self.groups}
    for group, name, start in self.starts:
      e_UxT = vectors[group] if name == "kernel" else vectors[group][:, :-1]
      made = _combine(e_UxT, self.generator[group][name][...], dtype)
      weights[group][name] = (made + start if start else made).astype(dtype)
    return weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _combine(e_UxT: jax.Array, basis: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """sum_j e_j F_j: [U, T] and [T, ...] -> [U, ...]; the gradient of the result is rounded to `dtype`.

  F is read as it is stored: a TPU's product rounds float32 to bfloat16 on the way, where a cast before it would write
  and read all of F again.
  """
  return _contract(e_UxT, basis, 1)


def _combine_forward(e_UxT, basis, dtype):
  return _combine(e_UxT, basis, dtype), (e_UxT, basis)


def _combine_backward(dtype, residuals, made_gradient):
  e_UxT, basis = residuals
  made_gradient = made_gradient.astype(dtype)
  product = functools.partial(_contract, axes=1)
  wide = lambda *factors: product(*(one.astype(jnp.promote_types(one.dtype, jnp.float32)) for one in factors))
  # XLA has no product of bfloat16 into float32 for CPUs where a factor is transposed
  basis_gradient = jax.lax.platform_dependent(e_UxT.T.astype(dtype), made_gradient, cpu=wide, default=product)
  axes = tuple(range(1, basis.ndim))  # with F as the first operand XLA's CPU product over millions is 1.5 times as fast
  e_gradient_TxU = _contract(basis, made_gradient.astype(basis.dtype), (axes, axes))
  return e_gradient_TxU.T.astype(e_UxT.dtype), basis_gradient.astype(basis.dtype)


def _contract(a: jax.Array, b: jax.Array, axes) -> jax.Array:
  return jnp.tensordot(a, b, axes, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


_combine.defvjp(_combine_forward, _combine_backward)
