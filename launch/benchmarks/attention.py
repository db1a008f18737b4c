"""Times our attention and other installed ones at the named shapes, on the available backend.

  python -m launch.benchmarks.attention [--shapes=gpt_small,llama1b] [--dtype=bfloat16] [--rounds=9] [--batch=1] \\
      [--calls=10] [--implementations=ours,cudnn]

For each shape, forward and forward with backward: this package's kernel (if the backend has one), its reference,
jax.nn.dot_product_attention by XLA and by cuDNN, and splash attention (TPU). Rounds are interleaved; times are medians.
--batch is the number of sequences in place of the shape's own. A time is that of --calls in a row, divided by their
number, so that the device need not wait for the host between them.

TFLOP/s count the products that the mask leaves, 4 D operations for each visible pair of query and key and each head in
the forward pass, and 2.5 times that in the backward pass (FlashAttention's count); packed documents count as one.
Implementations that materialize all scores are skipped if these would fill half of the device's memory.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import math
import os
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.kernels.attention import attention
from diffeq_nnx.kernels.attention.shapes import SHAPES, Shape
from diffeq_nnx.training.fastest import memory_limit
from diffeq_nnx.training.flops import device_peak_tflops
from launch import programs
from launch.experiments import tables

MATERIALIZED = ("reference", "xla")  # implementations that hold scores [B, H, S, S] in memory


def ours(shape: Shape, segments, implementation: str) -> Callable:
  """This package's attention."""
  return functools.partial(
    attention,
    window=shape.window,
    segment_ids=segments,
    logits_soft_cap=shape.logits_soft_cap,
    implementation=implementation,
  )


def jax_nn(shape: Shape, segments, implementation: str) -> Callable | None:
  """jax.nn.dot_product_attention."""
  if shape.logits_soft_cap is not None:
    return None
  mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
  window = None if shape.window is None else (shape.window - 1, 0)
  return functools.partial(
    jax.nn.dot_product_attention, mask=mask, is_causal=True, local_window_size=window, implementation=implementation
  )


def splash(shape: Shape, segments, block: int = 512) -> Callable | None:
  """JAX's splash attention with its fused backward kernel; it takes no scale, and heads first."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  length = (shape.length, shape.length)
  if shape.length % block:
    return None
  mask = masks.CausalMask(length) if shape.window is None else masks.LocalMask(length, (shape.window - 1, 0), 0)
  inner = min(block, 512)
  forward = {"block_q": block, "block_kv": block, "block_kv_compute": inner}
  backward = {"block_q_dkv": block, "block_kv_dkv": block, "block_kv_dkv_compute": inner}
  sizes = kernels.BlockSizes(**forward, **backward, use_fused_bwd_kernel=True)
  masks_of_heads, shards = masks.MultiHeadMask([mask] * shape.heads), {"head_shards": 1, "q_seq_shards": 1}
  kernel = kernels.make_splash_mha(
    masks_of_heads, **shards, block_sizes=sizes, attn_logits_soft_cap=shape.logits_soft_cap
  )
  ids = None if segments is None else kernels.SegmentIds(segments, segments)

  def run(q, k, v):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v, ids), 1, 2)

  return run


def candidates(shape: Shape) -> dict[str, Callable]:
  """The implementations that the backend has and that support the shape, by name."""
  segments, backend = shape.segment_ids(), jax.default_backend()
  found = {"reference": ours(shape, segments, "reference"), "xla": jax_nn(shape, segments, "xla")}
  if backend != "cpu":
    found["ours"] = ours(shape, segments, "pallas")
  if backend == "tpu":
    found["splash"] = splash(shape, segments)
  if backend == "gpu":
    found["cudnn"] = jax_nn(shape, segments, "cudnn")
    found["ours in two passes"] = ours(shape, segments, "pallas_deterministic")
  return {name: function for name, function in found.items() if function is not None}


def measure(shape: Shape, args: argparse.Namespace, asked: set[str], backward: bool) -> dict[str, float | str]:
  """Median seconds of each implementation `asked` for (all, if none is), or the reason in words that there are none."""
  runs, results, inputs = {}, {}, shape.inputs(args.dtype)
  limit = memory_limit(jax.devices()[0])
  memory = limit if math.isfinite(limit) else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  for name, function in candidates(shape).items():
    if asked and name not in asked:
      continue
    if name in MATERIALIZED and 3 * 4 * shape.batch * shape.heads * shape.length**2 > memory / 2:
      results[name] = "the scores would not fit"
      continue
    try:
      if backward:
        function = jax.grad(lambda q, k, v, f=function: f(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
      runs[name] = functools.partial(jax.jit(function).lower(*inputs).compile(), *inputs)
      jax.block_until_ready(runs[name]())
    except Exception as error:  # each library has errors of its own; go on with the others
      results[name] = " ".join(f"{type(error).__name__}: {error}".split())[:80]

  times = programs.time_rounds(runs, args.rounds, args.calls)
  return results | {name: statistics.median(seconds) for name, seconds in times.items()}


def main(argv: list[str] | None = None) -> None:
  """Measures and prints a Markdown table."""
  parser = programs.make_parser(__doc__, shapes=list(SHAPES), rounds=9, batch=0, calls=1, implementations=[""])
  parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
  args = parser.parse_args(argv)
  asked = set(filter(None, args.implementations))
  if args.calls < 1 or asked - candidates(SHAPES["gpt_small"]).keys():
    parser.error(f"--calls: at least 1; --implementations: choose from {', '.join(candidates(SHAPES['gpt_small']))}")
  unknown = [name for name in args.shapes if name not in SHAPES]
  if unknown:
    parser.error(f"--shapes: no shape {unknown[0]!r}; choose from {', '.join(SHAPES)}")
  peak, source = device_peak_tflops(args.dtype)
  print(
    f"{jax.devices()[0].device_kind} ({jax.default_backend()}), {args.dtype}, jax {jax.__version__}, median of "
    f"{args.rounds} interleaved rounds; peak {peak:.3g} TFLOP/s ({source})\n"
  )
  print(tables.markdown(["shape", "pass", "implementation", "ms", "TFLOP/s", "of peak"], []))
  for name in args.shapes:
    shape = SHAPES[name]
    shape = dataclasses.replace(shape, batch=args.batch or shape.batch)
    # pairs of a query and a key that it attends to: the work needed
    pairs = int(np.minimum(np.arange(shape.length) + 1, shape.window or shape.length).sum())
    forward = 4.0 * shape.head_dim * shape.batch * shape.heads * pairs
    for backward in (False, True):
      for who, result in measure(shape, args, asked, backward).items():
        prefix = f"| {name} | {'forward+backward' if backward else 'forward'} | {who} |"
        if isinstance(result, str):
          print(f"{prefix} {result} | | |", flush=True)
        else:
          rate = forward * (3.5 if backward else 1.0) / result / 1e12
          print(f"{prefix} {1e3 * result:.3f} | {rate:.3g} | {rate / peak:.1%} |", flush=True)


if __name__ == "__main__":
  main()
