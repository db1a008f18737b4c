"""AdamW with warm-up, cosine decay and clipping; what decays depends on where weights come from."""

import jax
import optax

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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Clip by the global norm, Adam, decoupled weight decay, learning rate: in that order."""

  def mask(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(tuple(k.key for k in path)), params)

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.scale_by_adam(config.b1, config.b2, config.eps),
    optax.add_decayed_weights(config.weight_decay, mask),
    optax.scale_by_learning_rate(schedule(config, steps)),
  )
