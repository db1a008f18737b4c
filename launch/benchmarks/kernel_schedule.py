"""Counts the instruction bundles that the TPU compiler schedules for our attention and splash attention; needs no TPU.

  python -m launch.benchmarks.kernel_schedule [--chips=v5e:2x4,v5p:2x2x2,v6e:2x4] [--shapes=llama1b,gpt_small]

Needs the libtpu wheel, which holds the compiler. A TPU core issues one bundle per cycle, so a loop's bundles times its
iterations are the fewest cycles that it takes; waiting for memory adds to them. The numbers are deterministic. Printed
are bundles per iteration, divided by the number of 512 x 512 blocks of scores in an iteration. Our loops without and
with a mask differ; splash attention has one loop for both, and runs with blocks of 512 and of 1024.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = {"ours": ("attention_forward", "attention_backward"), "splash": ("splash_mha_fwd", "splash_mha_dkv")}
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true --xla_jf_debug_level=2"


def compile_here(chip: str, name: str, who: str, block: int) -> None:
  """Compiles the gradients at a named shape, in a process that dumps schedules."""
  import jax
  from jax.experimental import topologies
  import jax.numpy as jnp

  from diffeq_nnx.kernels.attention import attention
  from diffeq_nnx.kernels.attention.shapes import SHAPES
  from launch.benchmarks.attention import splash

  shape = SHAPES[name]
  device = topologies.get_topology_desc(topology_name=chip, platform="tpu").devices[0]
  sharding = jax.sharding.SingleDeviceSharding(device)
  q, k = (
    jax.ShapeDtypeStruct((shape.batch, shape.length, heads, shape.head_dim), jnp.bfloat16, sharding=sharding)
    for heads in (shape.heads, shape.kv_heads)
  )
  function = (
    splash(shape, None, block) if who == "splash" else (lambda q, k, v: attention(q, k, v, implementation="pallas_tpu"))
  )
  loss = lambda q, k, v: function(q, k, v).astype(jnp.float32).sum()
  jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("tpu",)).compile()


def innermost_loops(text: str) -> list[int]:
  """Bundles per iteration of each innermost loop in a dump of final bundles, in order.

  A line is a bundle if it starts with an address; the number of `>` before its first brace is its depth, and `LB` there
  marks the first of a loop.
  """
  lines = [line.split("{", 1)[0] for line in text.splitlines() if re.match(r"\s*(0x[0-9a-f]+|0)\s", line)]
  depths = [line.count(">") for line in lines]
  starts = [i for i, line in enumerate(lines) if " LB" in line]
  loops = []
  for start in starts:
    after = next((i for i in starts if i > start and depths[i] <= depths[start]), len(lines))
    end = 1 + max(i for i in range(start, after) if depths[i] >= depths[start])
    if not any(start < other < end for other in starts):
      loops.append(end - start)
  return loops


def schedule(chip: str, name: str, who: str, block: int) -> list[list[int]]:
  """Bundles of the innermost loops of the forward and the backward kernel."""
  with tempfile.TemporaryDirectory() as folder:
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "PYTHONPATH": os.pathsep.join(["."] + ([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])),
      "LIBTPU_INIT_ARGS": DUMP.format(folder),
    }
    command = [sys.executable, __file__, f"--child={chip},{name},{who},{block}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
      raise SystemExit(f"error: {who} does not compile for {chip} at {name}: {done.stderr[-2000:]}")
    found = []
    for kernel in KERNELS[who]:
      dumps = [
        path
        for path in pathlib.Path(folder).glob(f"*{kernel}*final_bundles.txt")
        if "schedule-analysis" not in path.name
      ]
      found.append(innermost_loops(dumps[0].read_text()) if dumps else [])
    return found


def main() -> None:
  """Compiles everything and prints a Markdown table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--chips", type=lambda text: text.split(","), default=["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
  parser.add_argument("--shapes", type=lambda text: text.split(","), default=["llama1b", "gpt_small"])
  parser.add_argument("--child", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    chip, name, who, block = args.child.split(",")
    compile_here(chip, name, who, int(block))
    return
  print(
    "| chip | shape | ours, forward: unmasked, masked | ours, backward | splash 512: forward, backward | "
    "splash 1024 |\n| --- | --- | --- | --- | --- | --- |"
  )
  for chip in args.chips:
    for name in args.shapes:
      forward, backward = schedule(chip, name, "ours", 512)  # loops: masked, unmasked, masked
      cells = [f"{loops[1]}, {max(loops[0], loops[2])}" for loops in (forward, backward)]
      for block in (512, 1024):
        # blocks have one compute iteration, which is unrolled, so the grid's loop is the innermost
        blocks = [round(max(loops) / (block // 512) ** 2) for loops in schedule(chip, name, "splash", block)]
        cells.append(", ".join(map(str, blocks)))
      print(f"| {chip.split(':')[0]} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
  main()
