"""Optimizers with warm-up, cosine decay and clipping; what decays depends on where weights come from."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from diffeq_nnx.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate by step: linear from 0 over the warm-up, then a cosine to `final_fraction` of the peak."""
  warmup = min(max(1, round(config.warmup_fraction * steps)), steps) if config.warmup_fraction else 0
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if warmup else config.peak_rate,
    peak_value=config.peak_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
    end_value=config.final_fraction * config.peak_rate,
  )


def decays(path: tuple[str, ...]) -> bool:
  """Whether weight decay applies to the parameter at `path` in the pure dict of a model.

  It applies to the embedding tables, the head, and stored or shared kernels; not to generators, LoRA adapters, biases
  and norms.
  """
  if path[0] in ("embedding", "positions", "head"):
    return True
  return path[:2] == ("weight_source", "stored") and path[-1] == "kernel"


MUON_RMS = 0.2  # of an update's elements before the learning rate, about as Adam's (Liu et al. 2025, section 2.2)


def is_matrix(path: tuple[str, ...]) -> bool:
  """Whether the parameter at `path` is one that Muon updates: a kernel of the block, [..., in, out].

  Each matrix F_j of a generator, and each step's stored kernel, is updated by itself.
  """
  return path[0] == "weight_source" and path[1] in ("generator", "stored") and path[-1] == "kernel"


def _muon(rest: optax.GradientTransformation) -> optax.GradientTransformation:
  """Muon for matrices, `rest` for the other parameters."""
  axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=lambda kept: jax.tree.map(lambda _: axes, kept))
  # an orthogonal matrix has elements of 1 / sqrt(max(in, out))
  scaled = optax.stateless(lambda kept, _: jax.tree.map(lambda u: u * (MUON_RMS * max(u.shape[-2:]) ** 0.5), kept))
  return optax.partition({True: optax.chain(orthogonal, scaled), False: rest}, _by_path(is_matrix))


def _by_path(holds: Callable[[tuple[str, ...]], bool]) -> Callable[[Any], Any]:
  """A function of a tree of parameters that says for each whether its path fulfills a condition."""
  return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: holds(tuple(k.key for k in path)), params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Clip by the global norm, the optimizer's direction, decoupled weight decay, learning rate: in that order.

  Muon: Jordan et al. 2024; its momentum is 0.95, and b1, b2 and eps are those of AdamW for the rest. Lion: Chen et al.
  2023, whose learning rate is usually 3 to 10 times smaller than AdamW's.
  """
  adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
  directions = {"adamw": adam, "muon": _muon(adam), "lion": optax.scale_by_lion(config.b1, config.b2)}
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    directions[config.name],
    optax.add_decayed_weights(config.weight_decay, _by_path(decays)),
    optax.scale_by_learning_rate(schedule(config, steps)),
  )
