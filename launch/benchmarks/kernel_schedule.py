"""Estimates the cycles of our TPU attention, splash attention and tokamax's, from compiled schedules; needs no TPU.

  python -m launch.benchmarks.kernel_schedule [--chips=v5e:2x4,v5p:2x2x2,v6e:2x4] [--widths=64,128,256]
    [--lengths=2048,8192,32768]

Needs the libtpu wheel, which holds the compiler, and for its column tokamax. A TPU core issues one bundle of
instructions per cycle. For each region of a kernel's schedule (the body of the grid's loop, each branch in it, each
inner loop), its bundles, or what its matrix products take at peak if that is more, are multiplied by how often it runs
for one head of a causal sequence, bfloat16. Not counted: waiting for memory, the start of the pipeline, and what XLA
does around a kernel (transposes, sums of partial gradients). The numbers are deterministic.
"""

import argparse
from collections.abc import Callable, Iterator
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import tempfile

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.errors import UserError
from diffeq_nnx.kernels.attention.blocks import TPUBlocks
from diffeq_nnx.kernels.attention.mask import Mask, block_ranges
from diffeq_nnx.kernels.attention.shapes import Shape
from diffeq_nnx.kernels.attention.tpu import attention_tpu
from launch import programs
from launch.benchmarks.attention import splash
from launch.experiments import tables

PEAK = {"v5e": 131_072, "v5p": 131_072, "v6e": 524_288}  # operations of the matrix units in a cycle
HEADS = 2  # compiled, and divided by
DUMP = (
  "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true --xla_jf_debug_level=2 "
  "--xla_jf_dump_llo_pass_label_regex=final_bundles"
)


@dataclasses.dataclass
class Region:
  """A range of bundles that runs as a whole: the kernel, a loop's body, or what a branch may jump over."""

  loop: bool
  first: int
  end: int
  inner: list["Region"] = dataclasses.field(default_factory=list)

  @property
  def bundles(self) -> int:
    """Without those of the regions in it."""
    return self.end - self.first - sum(region.end - region.first for region in self.inner)

  def walk(self) -> Iterator["Region"]:
    """All regions in it, in order, itself first."""
    yield self
    for region in self.inner:
      yield from region.walk()


def read_schedule(text: str) -> Region:
  """The regions of a dump of final bundles.

  A line is a bundle if it starts with an address; the number of `>` before its first brace is the depth of loops, and
  `LB` there marks the first of a loop. Comments name the starts of regions, at which forward branches aim.
  """
  bundles: list[list[str]] = []
  for line in text.splitlines():
    if re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
      bundles.append(line.split("{", 1))
    elif bundles:
      bundles[-1][-1] += line
  depths = [head.count(">") for head, _ in bundles]
  starts = [i for i, (head, _) in enumerate(bundles) if " LB" in head]
  found = [Region(False, 0, len(bundles))]
  for start in starts:
    after = next((i for i in starts if i > start and depths[i] <= depths[start]), len(bundles))
    found.append(Region(True, start, 1 + max(i for i in range(start, after) if depths[i] >= depths[start])))
  targets: dict[str, int] = {}
  for i, (_, body) in enumerate(bundles):
    for name in re.findall(r"Start(?:/End empty)? region (\d+)", body):
      targets.setdefault(name, i)
  for i, (_, body) in enumerate(bundles):
    for name in re.findall(r"sbr\.rel[^=]*target = \$region(\d+)", body):
      if targets.get(name, 0) > i + 1:
        found.append(Region(False, i + 1, targets[name]))
  root, *others = sorted(found, key=lambda region: (region.first, -region.end))
  stack = [root]
  for region in others:
    while region.first >= stack[-1].end:
      stack.pop()
    if region.end <= stack[-1].end:  # else a jump out of a loop
      stack[-1].inner.append(region)
      stack.append(region)
  return root


@dataclasses.dataclass(frozen=True)
class Trips:
  """How often the parts of a kernel run for one head."""

  steps: float  # of the grid
  once: float  # what is done at the start and at the end of a row of blocks
  visits: tuple[tuple[float, float], ...]  # runs of each visiting region, in order, and operations of a run's products

  def cycles(self, kernel: Region, peak: int) -> float:
    """Of all regions in the loop over the grid; those that visit blocks are its inner loops or its largest branches."""
    grid = next(region for region in kernel.walk() if region.loop)
    inside = list(grid.walk())[1:]
    found = [region for region in inside if region.loop]
    if not found:
      leaves = sorted((region for region in inside if not region.inner), key=lambda region: -region.bundles)
      found = sorted(leaves[: len(self.visits)], key=lambda region: region.first)
    visiting = dict(zip((id(region) for region in found), self.visits, strict=True))
    total = self.steps * grid.bundles
    for region in inside:
      if id(region) in visiting:
        runs, operations = visiting[id(region)]
        total += runs * max(region.bundles, operations / peak)
      else:
        around = any(id(other) in visiting for other in region.walk())
        total += (self.steps if around else self.once) * region.bundles
    return total


def our_trips(length: int, width: int) -> tuple[Trips, Trips]:
  """Of the forward and the backward kernel."""
  heads, lanes = max(128 // width, 1), max(width, 128)
  blocks = TPUBlocks.tuned(length, length, lanes, 2)

  def trips(block_q: int, block_kv: int, chunk: int, by_key: bool) -> Trips:
    ranges = np.asarray(block_ranges(Mask(True, None), length, length, block_q, block_kv, None, None, by_key=by_key))
    first, full_first, full_last, last = ranges.astype(int).sum((1, 2))
    counts = (full_first - first, full_last - full_first, last - full_last)
    rows = ranges.shape[2]
    chunks = -(-length // chunk)
    visits = [(n / heads, (10 if by_key else 4) * heads * block_q * block_kv * lanes) for n in counts]
    if by_key:
      visits.insert(0, (-(-length // block_q) / heads, 0))  # what precedes the first block of keys
    return Trips(rows * chunks / heads, (chunks if by_key else rows) / heads, tuple(visits))

  return (
    trips(blocks.block_q, blocks.block_kv, blocks.forward_chunk(length, lanes, 2), False),
    trips(blocks.block_q_back, blocks.block_kv_back, blocks.backward_chunk(length, lanes, 2), True),
  )


def splash_trips(length: int, width: int, block: int, tokamax: bool) -> tuple[Trips, Trips]:
  """Of the forward and the backward kernel; tokamax's have a branch of their own for blocks without a mask."""
  some, every = (int(visible.sum()) for visible in Mask(True, None).blocks(length, length, block, block))
  rows = length // block
  product = block * block * max(width, 128)
  runs = (every, some - every) if tokamax else (some,)
  forward, backward = (tuple((n, size * product) for n in runs) for size in (4, 10))
  return Trips(some if tokamax else rows**2, rows, forward), Trips(rows**2, rows, backward)


def functions(who: str, width: int, length: int) -> Callable:
  """Attention of q, k and v [batch, length, HEADS, width] by the implementation, with its largest sensible blocks."""
  if who == "ours":
    options = dict(mask=Mask(True, None), scale=width**-0.5, logits_soft_cap=None)
    return lambda q, k, v: attention_tpu(q, k, v, None, None, **options)[0]
  if who.startswith("splash"):
    return splash(Shape(1, length, HEADS, HEADS, width), None, int(who.split()[1]))
  from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
  from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

  sizes = dict(block_q=1024, block_kv=1024, block_kv_compute=512)
  sizes |= dict(block_q_dkv=1024, block_kv_dkv=1024, block_kv_dkv_compute=512)
  kernel = kernels.make_splash_mha(
    masks.CausalMask((length, length)), config=kernels.SplashConfig(**sizes), q_seq_shards=1
  )

  def run(q, k, v):
    return jnp.swapaxes(jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in (q * width**-0.5, k, v))), 1, 2)

  return run


def compile_here(chip: str, who: str, width: int, length: int) -> None:
  """Compiles the gradients, in a process that dumps schedules."""
  device = topologies.get_topology_desc(topology_name=chip, platform="tpu").devices[0]
  batch = max(2**27 // (2 * length * HEADS * width), 1)  # so that no array fits into the chip's own memory
  sharding = jax.sharding.SingleDeviceSharding(device)
  x = jax.ShapeDtypeStruct((batch, length, HEADS, width), jnp.bfloat16, sharding=sharding)
  function = functions(who, width, length)
  loss = lambda q, k, v: function(q, k, v).astype(jnp.float32).sum()
  jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("tpu",)).compile()


def schedules(chip: str, who: str, width: int, length: int) -> list[Region]:
  """The forward and the backward kernel."""
  with tempfile.TemporaryDirectory() as folder:
    # wide heads: the others' kernels need more memory than the default, and as much as ours asks for itself
    options = DUMP.format(folder) + " --xla_tpu_scoped_vmem_limit_kib=65536" * (width > 128)
    variables = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": options}
    words = ["--child", json.dumps([chip, who, width, length])]
    programs.compile_in_child(__file__, words, variables, f"{who} of width {width} for {chip}")
    names = ("attention_forward", "attention_backward") if who == "ours" else ("splash_mha_fwd", "splash_mha_dkv")
    dumps = [path for path in pathlib.Path(folder).glob("*final_bundles.txt") if "schedule-analysis" not in path.name]
    return [read_schedule(next(path for path in dumps if name in path.name).read_text()) for name in names]


def estimates(chip: str, who: str, width: int, lengths: list[int]) -> list[list[float]]:
  """Cycles for a head, forward and backward, at each length.

  The kernels of the others are compiled once: what they do for a block does not depend on the length.
  """
  result = []
  compiled = functools.cache(functools.partial(schedules, chip, who, width))
  for length in lengths:
    if who == "ours":
      trips, kernels = our_trips(length, width), compiled(length)
    else:
      block = 1024 if who == "tokamax" else int(who.split()[1])
      trips, kernels = splash_trips(length, width, block, who == "tokamax"), compiled(4096)
    result.append([n.cycles(kernel, PEAK[chip.split(":")[0]]) for n, kernel in zip(trips, kernels)])
  return result


def main(argv: list[str] | None = None) -> None:
  """Compiles everything and prints a Markdown table."""
  chips, lengths = ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"], [2048, 8192, 32768]
  parser = programs.make_parser(__doc__, chips=chips, widths=[64, 128, 256], lengths=lengths)
  parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.child:
    compile_here(*args.child)
    return
  for chip in args.chips:
    if chip.split(":")[0] not in PEAK:
      raise UserError(f"--chips={chip}: must begin with {', '.join(PEAK)}; as in v5e:2x4")
  names = ["ours", "splash 512", "splash 1024"] + ["tokamax"] * bool(importlib.util.find_spec("tokamax"))
  print(tables.markdown(["chip", "width", "length", *names], []))
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for chip in args.chips:
      for width in args.widths:
        column = functools.partial(estimates, chip, width=width, lengths=args.lengths)
        columns = list(pool.map(column, names))
        for i, length in enumerate(args.lengths):
          cells = [", ".join(f"{cycles / 1000:,.0f}" for cycles in column[i]) for column in columns]
          print(f"| {chip.split(':')[0]} | {width} | {length:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
  programs.start(main)
