"""Low-rank adapters on stored weights (Hu et al. 2021)."""

import re

from flax import nnx
import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.grids import Times
from diffeq_nnx.model.weight_sources import BlockSpecs, BlockWeights, LeafSpec, StoredWeights, initial_leaf


class LoraWeights(StoredWeights):
  """Frozen stored weights, and low-rank adapters that learn on some of the kernels.

  Kernel s of those stored is W_s + alpha / rank A_s B_s, A_s [in, rank], B_s [rank, out] (Hu et al. 2021). The
  full kernel is computed once per train step, like generated weights; so dropout, which in that paper is drawn for each
  token, is drawn here for each input feature and weight set.
  """

  def __init__(self, specs: BlockSpecs, lora: config_lib.LoraConfig, num_sets: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    """Raises UserError where no kernel's name matches `lora.targets`."""
    super().__init__(specs, num_sets, dtype, rngs)
    self.config = lora
    self.lora = nnx.data(
      {
        group: {
          "a": initial_leaf(LeafSpec((fan_in, lora.rank), (axes[0], None), fan_in**-0.5), (num_sets,), rngs, dtype),
          "b": initial_leaf(LeafSpec((lora.rank, fan_out), (None, axes[1])), (num_sets,), rngs, dtype),
        }
        for group, (fan_in, fan_out), axes in _targets(specs, lora)
      }
    )

  def __call__(self, times: Times, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The stored sets with their adapters, in `dtype`; raises as `StoredWeights`."""
    self._check(times)
    params, keep = nnx.to_pure_dict(nnx.state(self)), 1.0 - self.config.dropout
    made = dict(params["stored"])
    for number, (group, adapter) in enumerate(sorted(params["lora"].items())):
      a_SxIxR, b_SxRxO = adapter["a"], adapter["b"] * (self.config.alpha / self.config.rank)
      if dropout_key is not None and self.config.dropout:
        kept = jax.random.bernoulli(jax.random.fold_in(dropout_key, number), keep, a_SxIxR.shape[:2])
        a_SxIxR = jnp.where(kept[..., None], a_SxIxR / keep, 0)
      delta = jnp.einsum("sir,sro->sio", a_SxIxR, b_SxRxO, precision=jax.lax.Precision.HIGHEST)
      made[group] = {**made[group], "kernel": made[group]["kernel"] + delta}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), made)


def _targets(
  specs: BlockSpecs, lora: config_lib.LoraConfig
) -> list[tuple[str, tuple[int, ...], tuple[str | None, ...]]]:
  """(group, shape, axis names) of the kernels that get adapters."""
  kernels = {
    f"{group}.kernel": (group, leaves["kernel"].shape, leaves["kernel"].axes)
    for group, leaves in specs.items()
    if "kernel" in leaves
  }
  found = [value for name, value in kernels.items() if re.search(lora.targets, name)]
  if not found:
    raise UserError(f"model.lora.targets={lora.targets!r}: matches none of {', '.join(kernels)}; name one of them")
  return found
