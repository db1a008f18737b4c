"""BlockWeights and their sources: generated, stored or shared weights.

BlockWeights is a nested dict {group: {leaf: array}}, e.g. weights["up"]["kernel"]; every leaf has a leading
axis S, the requested times. A weight source is called once for all times that a solver will visit.

S times, T time_embed_dim, M frequencies, P = 2 M + 1 features, N groups (weight matrices and norms).
"""

import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx.model.time_embedding import fixed_frequencies, sinusoidal_features

BlockWeights = dict[str, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LeafSpec:
  """One array of the block at one time.

  Attributes:
    shape: without the axis S.
    axes: the names of its axes, which `sharding.RULES` maps to mesh axes.
    std: standard deviation of a plain model's initial values; 0: all are `start`.
    start: 0 for kernels and biases, 1 for the scale of a norm.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  std: float = 0.0
  start: float = 0.0


BlockSpecs = dict[str, dict[str, LeafSpec]]


def block_axes(specs: BlockSpecs) -> dict[str, dict[str, tuple[str | None, ...]]]:
  """The axis names of BlockWeights at one time, in its structure."""
  return {group: {name: leaf.axes for name, leaf in leaves.items()} for group, leaves in specs.items()}


def initial_leaf(spec: LeafSpec, lead: tuple[int, ...], rngs: nnx.Rngs, dtype) -> nnx.Param:
  """A parameter with the leading axes `lead`, which are never split."""
  shape = lead + spec.shape
  values = spec.std * jax.random.normal(rngs.params(), shape, dtype) if spec.std else jnp.full(shape, spec.start, dtype)
  return nnx.Param(values, axes=(None,) * len(lead) + spec.axes)


class StoredWeights(nnx.Module):
  """One set of weights a step, as in an ordinary transformer."""

  def __init__(self, specs: BlockSpecs, num_steps: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.num_steps = num_steps
    self.stored = nnx.data(
      {
        group: {name: initial_leaf(leaf, (num_steps,), rngs, dtype) for name, leaf in leaves.items()}
        for group, leaves in specs.items()
      }
    )

  def __call__(self, times_S: np.ndarray, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The stored sets in `dtype`; raises ValueError unless S is the number stored."""
    self._check(times_S)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.to_pure_dict(nnx.state(self))["stored"])

  def _check(self, times_S: np.ndarray) -> None:
    if len(times_S) != self.num_steps:
      raise ValueError(
        f"asked for {len(times_S)} steps: the weights of {self.num_steps} are stored; use that "
        "number, or a model with generated or shared weights"
      )


class SharedWeights(nnx.Module):
  """One set of weights for every step."""

  def __init__(self, specs: BlockSpecs, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.stored = nnx.data(
      {
        group: {name: initial_leaf(leaf, (), rngs, dtype) for name, leaf in leaves.items()}
        for group, leaves in specs.items()
      }
    )

  def __call__(self, times_S: np.ndarray, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The one set in `dtype`, repeated along S."""
    return jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf.astype(dtype), (len(times_S), *leaf.shape)),
      nnx.to_pure_dict(nnx.state(self))["stored"],
    )


class GeneratedWeights(nnx.Module):
  """W(t) = sum_j e_j(t) F_j + F_0, where e(t) = Linear2(silu(Linear1(s(t)))).

  Each group has its own e(t), unless `time.embedding` is shared_mlp.

  Tong et al. 2025, section 3.1; s(t) is `sinusoidal_features`. Biases have no F_0; the scale of a norm is
  1 + sum_j e_j g_j and its shift sum_j e_j h_j.

  One call computes all groups at all times: one batched product per layer of the MLPs, then one product per leaf
  that reads F once whatever the number of times. F_0 is stored as the last row of a kernel's F, so that the same
  products compute its term and its gradient.
  """

  def __init__(
    self,
    specs: BlockSpecs,
    time: config_lib.TimeConfig,
    initialization: str,
    times_S: np.ndarray,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    """`times_S`: the times at which W initially has the standard deviations of the specs."""
    self.time = time
    self.groups = tuple(specs)
    self.starts = nnx.static(
      tuple((group, name, leaf.start) for group, leaves in specs.items() for name, leaf in leaves.items())
    )
    N = 1 if time.embedding == "shared_mlp" else len(specs)
    P, T = 2 * time.sinusoidal_dim + 1, time.time_embed_dim
    published = initialization == "published"

    def linear(fan_in: int, fan_out: int) -> nnx.Param:
      std = 0.02 if published else fan_in**-0.5
      return nnx.Param(std * jax.random.normal(rngs.params(), (N, fan_in, fan_out), dtype))

    self.time_mlp = nnx.data(
      {
        "kernel1": linear(P, T),
        "bias1": nnx.Param(jnp.zeros((N, T), dtype)),
        "kernel2": linear(T, T),
        "bias2": nnx.Param(jnp.zeros((N, T), dtype)),
      }
    )
    if time.embedding == "learned":
      self.frequencies_M = nnx.Param(fixed_frequencies(time.sinusoidal_dim, dtype))
    squares_N = jnp.square(self.time_vectors(times_S)).sum(-1).mean(-1)
    self.generator = nnx.data(
      {
        group: {
          name: self._initial_leaf(name, leaf, squares_N[n % N], published, rngs, dtype)
          for name, leaf in leaves.items()
        }
        for n, (group, leaves) in enumerate(specs.items())
      }
    )

  def _initial_leaf(
    self, name: str, leaf: LeafSpec, square: jax.Array, published: bool, rngs: nnx.Rngs, dtype
  ) -> nnx.Param:
    """F [T, ...], and for a kernel F_0 as one more row; `square` is the mean over times of sum_j e_j^2."""
    T = self.time.time_embed_dim
    if name != "kernel":  # published biases start at 1e-4, norms as in a plain model
      std = 1e-4 if published and name == "bias" else 0.0
      return initial_leaf(dataclasses.replace(leaf, std=std, start=0.0), (T,), rngs, dtype)
    std = 0.02 if published else leaf.std / jnp.sqrt(square)
    basis = std * jax.random.normal(rngs.params(), (T + 1, *leaf.shape), dtype)
    return nnx.Param(basis.at[T].set(0.0), axes=(None, *leaf.axes))

  def time_vectors(self, times_S: np.ndarray) -> jax.Array:
    """e(t) of every group, [N, S, T] (N = 1 with a shared MLP), in the parameters' dtype."""
    mlp = self.time_mlp
    dtype = mlp["kernel1"][...].dtype
    times_S = jnp.asarray(np.zeros_like(times_S) if self.time.constant else times_S, dtype)
    if self.time.embedding == "learned":
      frequencies_M = self.frequencies_M[...]
    else:
      frequencies_M = fixed_frequencies(self.time.sinusoidal_dim, dtype)
    features_SxP = sinusoidal_features(times_S, frequencies_M, self.time.scale)
    highest = jax.lax.Precision.HIGHEST  # the products are small, and their error would affect every weight
    hidden_NxSxT = jnp.einsum("sp,npt->nst", features_SxP, mlp["kernel1"][...], precision=highest)
    hidden_NxSxT = jax.nn.silu(hidden_NxSxT + mlp["bias1"][...][:, None])
    e_NxSxT = jnp.einsum("nst,ntu->nsu", hidden_NxSxT, mlp["kernel2"][...], precision=highest)
    return e_NxSxT + mlp["bias2"][...][:, None]

  def __call__(self, times_S: np.ndarray, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """W(t) at `times_S` in `dtype`; products are in `dtype`, sums in float32 or wider."""
    e_NxSxT = self.time_vectors(times_S)
    weights: BlockWeights = {group: {} for group in self.groups}
    for group, name, start in self.starts:
      e_SxT = e_NxSxT[self.groups.index(group) % len(e_NxSxT)]
      if name == "kernel":  # a one for F_0
        e_SxT = jnp.concatenate([e_SxT, jnp.ones_like(e_SxT[:, :1])], axis=1)
      made = _combine(e_SxT, self.generator[group][name][...], dtype)
      weights[group][name] = (made + start if start else made).astype(dtype)
    return weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _combine(e_SxT: jax.Array, basis: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """sum_j e_j F_j: [S, T] and [T, ...] -> [S, ...], products in `dtype`, sums in float32 or wider."""
  return _contract(e_SxT.astype(dtype), basis.astype(dtype), 1)


def _combine_forward(e_SxT, basis, dtype):
  return _combine(e_SxT, basis, dtype), (e_SxT, basis)


def _combine_backward(dtype, residuals, made_gradient):
  e_SxT, basis = residuals
  made_gradient = made_gradient.astype(dtype)
  basis_gradient = _contract(e_SxT.T.astype(dtype), made_gradient, 1)
  axes = tuple(range(1, basis.ndim))  # with F as the first operand XLA's CPU product over millions is 1.5 times as fast
  e_gradient_TxS = _contract(basis.astype(dtype), made_gradient, (axes, axes))
  return e_gradient_TxS.T.astype(e_SxT.dtype), basis_gradient.astype(basis.dtype)


def _contract(a: jax.Array, b: jax.Array, axes) -> jax.Array:
  return jnp.tensordot(a, b, axes, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


_combine.defvjp(_combine_forward, _combine_backward)


def num_elements(specs: BlockSpecs, leaf_name: str | None = None) -> int:
  """Elements of the block at one time: of all its leaves, or of those called `leaf_name`."""
  return sum(
    math.prod(leaf.shape) for leaves in specs.values() for name, leaf in leaves.items() if leaf_name in (None, name)
  )
