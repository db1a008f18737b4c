"""How many floating-point operations a step is worth, and how many the device could do.

The rule, for one optimizer step. A product of [m, k] and [k, n] counts 2 m k n. Counted are the products
with the block's kernels, and attention's two products over the full square of positions (PaLM, Chowdhery
et al. 2022, appendix B), for each evaluation of a branch by the solver, and those with the output head; not
embeddings, norms, activations, the softmax or the optimizer. The backward pass counts twice the forward
pass; what rematerialization computes again, or undoes, is not counted. Generating the weights counts apart:
2 (T + 1) operations an element of the block's kernels for each time whose weights the solver uses, and the
time MLPs' own products, also times three; it happens once an optimizer step.
"""

from collections.abc import Callable, Sequence
import functools
import math
import time

import jax
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.model import grids, solvers, vector_fields
from diffeq_nnx.model.model import block_specs
from diffeq_nnx.model.weight_sources import num_elements

# bfloat16 dense peak of one device, in TFLOP/s, from the vendors' data sheets; the first key that is part
# of the device kind counts
PEAK_TFLOPS = {
  "7x": 2307,
  "v6 lite": 918,
  "v6e": 918,
  "v5 lite": 197,
  "v5e": 197,
  "v5p": 459,
  "v5": 459,
  "v4": 275,
  "v3": 123,
  "H200": 989,
  "H100": 989,
  "B200": 2250,
  "A100": 312,
  "L40": 181,
  "V100": 125,
}


def model_flops(config: Config, counts: Sequence[int]) -> float:
  """FLOPs of one optimizer step, without those of the generator; `counts` as of `depths.drawn_counts`."""
  tokens = config.train.batch_size * config.model.seq_len
  return 3.0 * tokens * sum(forward_flops(config.model, count) for count in counts) / len(counts)


def forward_flops(model: ModelConfig, num_steps: int) -> float:
  """FLOPs of a forward pass for each token of a sequence of `model.seq_len`."""
  evaluations = solvers.SOLVERS[model.solver].evaluations
  in_attention, in_feedforward = branch_kernels(model)
  attention = 2 * in_attention + 4 * model.seq_len * model.num_heads * model.head_size
  step = evaluations.attention * attention + evaluations.feedforward * 2 * in_feedforward
  return float(num_steps * step + 2 * model.vocab_size * model.embed_dim)


class _NoKernel:
  """An attention context for tracing which weights the branch reads, on no device and with no kernel."""

  positions_BxL = None

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Something that depends on all three, [B, L, H, C]."""
    return q_BxLxHxC * k_BxLxKxC.sum() * v_BxLxKxC.sum()


@functools.lru_cache(maxsize=64)
def branch_kernels(model: ModelConfig) -> tuple[int, int]:
  """(elements of the kernels that the attention branch reads, of those that the feed-forward branch reads)."""
  field, x_1x1xD = vector_fields.make_field(model), jax.ShapeDtypeStruct((1, 1, model.embed_dim), jnp.float32)
  specs = field.specs(model)
  weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), specs)

  def read_by(branch: Callable) -> int:
    found = jax.make_jaxpr(branch)(x_1x1xD, weights).jaxpr
    used = {variable for equation in found.eqns for variable in equation.invars if not isinstance(variable, Literal)}
    paths = jax.tree_util.tree_leaves_with_path(weights)
    read = [(path, leaf) for (path, leaf), variable in zip(paths, found.invars[1:], strict=True) if variable in used]
    return sum(math.prod(leaf.shape) for path, leaf in read if path[-1].key == "kernel")

  return read_by(lambda x, w: field.attention(x, w, _NoKernel())), read_by(field.feedforward)


def generator_flops(model: ModelConfig, counts: Sequence[int]) -> float:
  """Of one optimizer step, for making the weights and for the gradient of that; 0 if nothing is generated."""
  if model.weights != "generated":
    return 0.0
  specs = block_specs(model)
  T, P = model.time.time_embed_dim, 2 * model.time.sinusoidal_dim + 1
  mlps = 1 if model.time.embedding == "shared_mlp" else len(specs)
  each = [solvers.weight_times(model, grids.make_grid(model, count)) for count in dict.fromkeys(counts)]
  U, Q = grids.joined(each).points_UxQ.shape
  return 3.0 * U * (2 * (T + 1) * num_elements(specs, "kernel") + Q * mlps * 2 * (P * T + T * T))


def peak_tflops(config: Config) -> tuple[float, str]:
  """Peak rate of one device in TFLOP/s, and where the figure comes from."""
  if config.train.peak_tflops is not None:
    return config.train.peak_tflops, "train.peak_tflops"
  return device_peak_tflops(config.model.dtype)


def device_peak_tflops(dtype: str) -> tuple[float, str]:
  """Peak rate of the first device in TFLOP/s, and where the figure comes from: a data sheet, or a measured product."""
  kind = jax.devices()[0].device_kind
  for part, peak in PEAK_TFLOPS.items():
    if part in kind:
      return float(peak), f"data sheet of {kind}, bfloat16"
  return _measured_tflops(dtype), f"measured on {kind}: a {dtype} product of 1024 x 1024"


def _measured_tflops(dtype: str, size: int = 1024, repeats: int = 7) -> float:
  a = jnp.ones((size, size), dtype)
  product = jax.jit(jnp.matmul)
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(product(a, a))
    times.append(time.perf_counter() - start)
  return 2 * size**3 / float(np.min(times)) / 1e12
