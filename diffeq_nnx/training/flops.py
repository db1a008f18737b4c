"""How many floating-point operations a step is worth, and how many the device could do.

The rule, for one optimizer step. A product of [m, k] and [k, n] counts 2 m k n. Counted are the products
with the block's kernels and with the output head, and attention's two products over the full square of
positions (PaLM, Chowdhery et al. 2022, appendix B); not embeddings, norms, activations, the softmax or the
optimizer. The backward pass counts twice the forward pass; what rematerialization computes again is not
counted. Generating the weights counts apart: 2 S (T + 1) operations an element of the block's kernels and
the time MLPs' own products, also times three; it happens once an optimizer step.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.model import vector_fields
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


def model_flops(config: Config, num_steps: int) -> float:
  """FLOPs of one optimizer step, without those of the generator."""
  model = config.model
  kernels = num_elements(vector_fields.make_field(model).specs(model), "kernel")
  attention = 4 * model.seq_len * model.num_heads * model.head_dim
  token = num_steps * (2 * kernels + attention) + 2 * model.vocab_size * model.embed_dim
  return 3.0 * token * config.train.batch_size * model.seq_len


def generator_flops(model: ModelConfig, num_steps: int) -> float:
  """Of one optimizer step, for making the weights and for the gradient of that; 0 if nothing is generated."""
  if model.weights != "generated":
    return 0.0
  specs = vector_fields.make_field(model).specs(model)
  T, P = model.time.time_embed_dim, 2 * model.time.sinusoidal_dim + 1
  mlps = 1 if model.time.embedding == "shared_mlp" else len(specs)
  one_time = 2 * (T + 1) * num_elements(specs, "kernel") + mlps * 2 * (P * T + T * T)
  return 3.0 * num_steps * one_time


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
