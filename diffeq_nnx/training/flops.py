"""How many floating-point operations a step is worth, and how many the device could do.

The rule, for one optimizer step. A product of [m, k] and [k, n] counts 2 m k n. Counted are the products
with the block's kernels, and attention's two products over the full square of positions (PaLM, Chowdhery
et al. 2022, appendix B), for each evaluation of a branch by the solver, and those with the output head; not
embeddings, norms, activations, the softmax or the optimizer. The backward pass counts twice the forward
pass; what rematerialization computes again, or undoes, is not counted. Generating the weights counts apart:
2 (T + 1) operations an element of the block's kernels for each time whose weights the solver uses, and the
time MLPs' own products, also times three; it happens once an optimizer step. The forward pass of a
teacher counts apart too.
"""

import dataclasses
import math
import timeit

import jax
import jax.numpy as jnp

from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.model import grids, solvers, vector_fields
from diffeq_nnx.model.weight_sources import BlockSpecs

# bfloat16 dense peak of one device of JAX, in TFLOP/s, from the vendors' data sheets; the first key that is part
# of the device kind counts. A device is half a chip of TPU v3 and 7x. Those of NVL cards and of GB200 were not checked
# against a data sheet.
PEAK_TFLOPS = {
  "7x": 1153.5,
  "v6 lite": 918,
  "v6e": 918,
  "v5 lite": 197,
  "v5e": 197,
  "v5p": 459,
  "v5": 459,
  "v4": 275,
  "v3": 61.5,
  "H200 NVL": 835,
  "H200": 989,
  "H100 NVL": 835,
  "H100 PCIe": 756,
  "H100": 989,
  "GB200": 2500,
  "B200": 2250,
  "A100": 312,
  "L40S": 362,
  "L40": 181,
  "V100": 125,  # of float16, since it has no bfloat16
}


def model_flops(config: Config, num_steps: int) -> float:
  """FLOPs of one optimizer step at a number of solver steps, without those of the generator."""
  return 3.0 * config.train.batch_size * config.model.seq_len * forward_flops(config.model, num_steps)


def teacher_flops(config: Config, teacher: ModelConfig) -> float:
  """FLOPs of a teacher's forward pass over the batch of an optimizer step; its weights were made before."""
  model = dataclasses.replace(teacher, seq_len=config.model.seq_len)
  return config.train.batch_size * config.model.seq_len * forward_flops(model, model.num_steps)


def forward_flops(model: ModelConfig, num_steps: int) -> float:
  """FLOPs of a forward pass for each token of a sequence of `model.seq_len`."""
  field, evaluations = vector_fields.make_field(model), solvers.SOLVERS[model.solver].evaluations
  specs = field.specs(model)
  in_attention = _count_elements({group: specs[group] for group in field.attention_groups})
  attention = 2 * in_attention + 4 * model.seq_len * model.num_heads * model.head_size
  feedforward = 2 * (_count_elements(specs) - in_attention)
  step = evaluations.attention * attention + evaluations.feedforward * feedforward
  return float(num_steps * step + 2 * model.vocab_size * model.embed_dim)


def generator_flops(model: ModelConfig, num_steps: int) -> float:
  """Of one optimizer step, for making the weights and for the gradient of that; 0 if nothing is generated."""
  if model.weights != "generated":
    return 0.0
  specs = vector_fields.make_field(model).specs(model)
  T, P = model.time.time_embed_dim, 2 * model.time.sinusoidal_dim + 1
  mlps = 1 if model.time.embedding == "shared_mlp" else len(specs)
  U, Q = solvers.weight_times(model, grids.make_grid(model, num_steps)).points_UxQ.shape
  return 3.0 * U * (2 * (T + 1) * _count_elements(specs) + Q * mlps * 2 * (P * T + T * T))


def _count_elements(specs: BlockSpecs) -> int:
  """Elements of the block's kernels at one time."""
  return sum(math.prod(leaves["kernel"].shape) for leaves in specs.values() if "kernel" in leaves)


def device_peak_tflops(dtype: str) -> tuple[float, str]:
  """Peak rate of the first device in TFLOP/s, and where the figure comes from: a data sheet, or a measured product."""
  kind = jax.devices()[0].device_kind
  for part, peak in PEAK_TFLOPS.items():
    if part in kind:
      return float(peak), f"data sheet of {kind}, bfloat16"
  a = jnp.ones((1024, 1024), dtype)
  times = timeit.repeat(lambda: jax.block_until_ready(a @ a), number=1, repeat=7)
  return 2 * 1024**3 / min(times) / 1e12, f"measured on {kind}: a {dtype} product of 1024 x 1024"
