"""Optimizers with warm-up, cosine decay and clipping; what decays depends on where weights come from."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from diffeq_nnx.config import OptimizerConfig
from diffeq_nnx.model.parameters import TABLES, path_names
from diffeq_nnx.model.weight_sources import BlockSpecs, Heads


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate of the update after `count` others: a warm-up that is linear, then a cosine.

  Of N updates (`schedule_steps`, or the `steps` of the run) the first w are the warm-up, at least one, and without the
  last where there are several. Update n = count + 1 has the rate n / w of the peak in the warm-up, so that the w-th has
  the peak; the N-th of several has `final_fraction` of the peak, and so has each later one.
  """
  steps = config.schedule_steps or steps
  warmup = max(1, min(round(config.warmup_fraction * steps), steps - 1))
  by_number = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.peak_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
    end_value=config.peak_rate * config.final_fraction,
  )
  return lambda count: by_number(count + 1)


def decays(path: tuple[str, ...], generated: bool = False) -> bool:
  """Whether weight decay applies to the parameter at `path` in the pure dict of a model.

  It applies to the embedding tables, the head, stored or shared kernels, and, if `generated`, to those of generators;
  not to LoRA adapters, biases and norms.
  """
  return path[0] in TABLES or (is_matrix(path) and (generated or path[1] == "stored"))


MUON_MOMENTUM = 0.95
MUON_RMS = 0.2  # of an update's elements before the learning rate, about as Adam's (Liu et al. 2025, section 2.2)
TINY = -16  # exponents of elements below which a matrix is scaled before it is made orthogonal


def is_matrix(path: tuple[str, ...]) -> bool:
  """Whether the parameter at `path` is one that Muon updates: a kernel of the block, [..., in, out].

  Each matrix F_j of a generator, and each step's stored kernel, is updated by itself, and so is each of the matrices
  that it joins: the queries, keys and values of GPT-2's block.
  """
  return path[0] == "weight_source" and path[1] in ("generator", "stored") and path[-1] == "kernel"


def orthogonalize(update: jax.Array) -> jax.Array:
  """The nearest orthogonal matrices, about, for matrices [..., in, out]; elements of `MUON_RMS` (root mean square)."""
  axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  # without momentum Muon is this alone; optax exports nothing smaller
  muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=axes)
  _, exponents = jnp.frexp(jnp.abs(update).max((-2, -1), keepdims=True))
  update = jnp.ldexp(update, jnp.where(exponents < TINY, -exponents, 0))  # optax adds 1e-8 to the norm
  direction, _ = muon.update(update, muon.init(update))
  return direction * (MUON_RMS * max(update.shape[-2:]) ** 0.5)  # an orthogonal matrix has 1 / sqrt(max(in, out))


def orthogonalize_parts(update: jax.Array, heads: Heads | None, by_head: bool) -> jax.Array:
  """The same for each of the matrices that kernels [..., in, out] join, or for each of their heads."""
  if heads is None:
    return orthogonalize(update)
  slots = update.reshape(*update.shape[:-1], heads.groups, sum(heads.parts), heads.head_dim)
  if by_head:
    return jnp.moveaxis(orthogonalize(jnp.moveaxis(slots, -4, -2)), -2, -4).reshape(update.shape)
  ends = np.cumsum(heads.parts)[:-1].tolist()
  parts = jnp.split(slots, ends, axis=-2)  # of each [..., in, groups, heads, head_dim]
  made = [orthogonalize(part.reshape(*update.shape[:-1], -1)).reshape(part.shape) for part in parts]
  return jnp.concatenate(made, axis=-2).reshape(update.shape)


Vectors = Callable[[Any], dict[str, jax.Array]]  # parameters -> by group, e(t) with a one for F_0, [U, T + 1]


def _muon(
  rest: optax.GradientTransformation, specs: BlockSpecs, by_head: bool, vectors: Vectors | None = None
) -> optax.GradientTransformation:
  """Muon for matrices, `rest` for the other parameters.

  With `vectors` it is Muon for W(t) at the times of the solver, W_u = sum_j e_uj F_j. F's gradient is e^T G, where G is
  that of W. With the pseudo-inverse p of e, G = p^T (e^T G) if the U rows of e are independent. The update of W is
  Muon's for G, and p pulls it back: the smallest change of F that changes W so. Momentum is kept of e^T G, so that it
  outlives a change of the times. Products with p are of full precision, since e may be nearly singular.
  """
  product = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)

  def with_inverses(inverses: dict[str, jax.Array]) -> optax.GradientTransformation:
    def one(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
      group = path_names(path)[2]
      spec, inverse = specs.get(group, {}).get("kernel"), inverses.get(group)
      if inverse is not None:
        update = product(inverse.T, update)
      update = orthogonalize_parts(update, None if spec is None else spec.heads, by_head)
      return update if inverse is None else product(inverse, update)

    apart = optax.stateless(lambda kept, _: jax.tree_util.tree_map_with_path(one, kept))
    matrices = optax.chain(optax.trace(MUON_MOMENTUM, nesterov=True), apart)
    return optax.partition({True: matrices, False: rest}, _by_path(is_matrix))

  def update(gradients: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
    found = {} if vectors is None else vectors(params)
    with jax.default_matmul_precision("highest"):
      inverses = {group: jnp.linalg.pinv(e_UxT1, rcond=1e-3) for group, e_UxT1 in found.items()}
    return with_inverses(inverses).update(gradients, state, params)

  return optax.GradientTransformation(with_inverses({}).init, update)


def _scale_time_updates(rest: optax.GradientTransformation, factor: float) -> optax.GradientTransformation:
  """`rest`, whose state it has, with the updates of what makes e(t) multiplied: time MLPs and learned frequencies."""

  def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
    updates, state = rest.update(updates, state, params)
    of_time = lambda names: names[0] == "weight_source" and names[1] in ("time_mlp", "frequencies_M")
    scale = lambda path, u: u * factor if of_time(path_names(path)) else u
    return jax.tree_util.tree_map_with_path(scale, updates), state

  return optax.GradientTransformation(rest.init, update)


def restrict_to_sets(rest: optax.GradientTransformation, used_W: np.ndarray) -> optax.GradientTransformation:
  """`rest`, for a step that uses some sets of stored weights or adapters; the others and their moments stay.

  Without this momentum and decay would move weights of which no gradient is known. Muon would even move them as far as
  it moves those in use, since it gives updates of all lengths the same length.
  """

  def choose(path: tuple[Any, ...], new: jax.Array, old: jax.Array) -> jax.Array:
    names = path_names(path)  # moments have the path of their parameter at the end of theirs
    if not {("weight_source", "stored"), ("weight_source", "lora")} & set(zip(names, names[1:])):
      return new
    return jnp.where(used_W.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  def update(gradients: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
    updates, after = rest.update(gradients, state, params)
    of_unused = jax.tree.map(jnp.zeros_like, updates)
    choose_all = jax.tree_util.tree_map_with_path
    return choose_all(choose, updates, of_unused), choose_all(choose, after, state)

  return optax.GradientTransformation(rest.init, update)


def _by_path(holds: Callable[[tuple[str, ...]], bool]) -> Callable[[Any], Any]:
  """A function of a tree of parameters that says for each whether its path fulfills a condition."""
  return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: holds(path_names(path)), params)


def make_optimizer(
  config: OptimizerConfig, steps: int, specs: BlockSpecs | None = None, vectors: Vectors | None = None
) -> optax.GradientTransformation:
  """Clip by the global norm, the optimizer's direction, decoupled weight decay, learning rate: in that order.

  Muon is that of Jordan et al. 2024. Parameters that it does not update get AdamW's direction, with b1, b2 and eps.
  Lion is that of Chen et al. 2023; its learning rate is usually 3 to 10 times smaller than AdamW's.

  `steps` is train.steps. `specs`, of the vector field, say what kernels join several matrices; None: no kernel does.
  `vectors` gives e(t) of the parameters, for muon_weights; None: weights are not generated, so that it is muon.
  """
  adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
  directions = {
    "adamw": adam,
    "muon": _muon(adam, specs or {}, config.muon_by_head),
    "muon_weights": _muon(adam, specs or {}, config.muon_by_head, vectors),
    "lion": optax.scale_by_lion(config.b1, config.b2),
  }
  of_weights = config.name == "muon_weights"  # defaults as they measured best: docs/evidence/quality.md#muon
  decay_generated = of_weights if config.decay_generated is None else config.decay_generated
  time_rate = float(not of_weights) if config.time_rate is None else config.time_rate
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    directions[config.name],
    optax.add_decayed_weights(config.weight_decay, _by_path(lambda path: decays(path, decay_generated))),
    _scale_time_updates(optax.scale_by_learning_rate(schedule(config, steps)), time_rate),
  )
