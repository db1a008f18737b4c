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
    kernels = {f"{group}.kernel": group for group, leaves in specs.items() if "kernel" in leaves}
    groups = [group for name, group in kernels.items() if re.search(lora.targets, name)]
    if not groups:
      raise UserError(f"model.lora.targets={lora.targets!r}: matches none of {', '.join(kernels)}; name one of them")
    adapters = {}
    for group in groups:
      (fan_in, fan_out), axes = specs[group]["kernel"].shape, specs[group]["kernel"].axes
      a = LeafSpec((fan_in, lora.rank), (axes[0], None), fan_in**-0.5)
      b = LeafSpec((lora.rank, fan_out), (None, axes[1]))
      adapters[group] = {name: initial_leaf(leaf, (num_sets,), rngs, dtype) for name, leaf in (("a", a), ("b", b))}
    self.lora = nnx.data(adapters)

  def __call__(self, times: Times, dtype: jnp.dtype, dropout_key: jax.Array | None = None) -> BlockWeights:
    """The stored sets with their adapters, in `dtype`; raises as `StoredWeights`."""
    params, keep = self._kept(times), 1.0 - self.config.dropout
    made = dict(params["stored"])
    for number, (group, adapter) in enumerate(sorted(params["lora"].items())):
      a_SxIxR, b_SxRxO = adapter["a"], adapter["b"] * (self.config.alpha / self.config.rank)
      if dropout_key is not None and self.config.dropout:
        kept = jax.random.bernoulli(jax.random.fold_in(dropout_key, number), keep, a_SxIxR.shape[:2])
        a_SxIxR = jnp.where(kept[..., None], a_SxIxR / keep, 0)
      delta = jnp.einsum("sir,sro->sio", a_SxIxR, b_SxRxO, precision=jax.lax.Precision.HIGHEST)
      made[group] = {**made[group], "kernel": made[group]["kernel"] + delta}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), made)
