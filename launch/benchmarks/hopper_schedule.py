"""Estimates the speed of the forward attention kernel on an H100 from its machine code; needs no GPU, measures nothing.

  python -m launch.benchmarks.hopper_schedule [--widths=128,64] [--lengths=1024,2048,8192]

Needs jax 0.11.2 or later, the wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version, and `nvdisasm`, which CUDA's
toolkit and the wheel of triton hold, on the PATH. From the loop over blocks of keys it counts cycles of the tensor
cores, instructions, exponentials and the stalls that the compiler scheduled. With the two computing warpgroups in turns
a pair of blocks takes the largest of: both warpgroups' products, both warpgroups' instructions, both warpgroups'
exponentials, one warpgroup's products and softmax one after the other. Not in the model: waiting for memory, the clock
under load, conflicts of shared memory. Batch times length is 16,384 positions and heads times width 2,048, as in
FlashAttention-3's measurements (Shah et al. 2024, section 4.1), causal.
"""

import argparse
import dataclasses
import heapq
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MULTIPROCESSORS = 132
FLOPS_PER_CYCLE = 4096  # of a multiprocessor, bfloat16 products
PEAK = 989  # TFLOP/s of all at the data sheet's clock
EXPONENTIAL_CYCLES = 8  # of a warp: 32 threads on the 4 special function units of its scheduler
# assumed, not measured
HANDOVER = 100  # cycles from the last product of a turn to the first of the next, if that one was waiting for it
TILE_LATENCY = 2000  # cycles: a block of threads starts, waits for its first loads, and stores its results
POSITIONS, MODEL_WIDTH = 16384, 2048
PUBLISHED = {1024: 364, 2048: 560, 8192: 685}  # TFLOP/s: FlashAttention-3, forward, causal, 128 wide, on an H100


@dataclasses.dataclass(frozen=True)
class Instruction:
  """Of the machine code; `stall` is how many cycles its warp waits before the next one."""

  stall: int
  text: str

  @property
  def name(self) -> str:
    """With its modifiers, without predicate and operands."""
    return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

  @property
  def product_cycles(self) -> int:
    """Cycles of the tensor cores; 0 if it is no matrix product."""
    size = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", self.name)
    m, n, k = map(int, size.groups()) if size else (0, 0, 0)
    return 2 * m * n * k // FLOPS_PER_CYCLE


@dataclasses.dataclass(frozen=True)
class MachineCode:
  """A kernel as the compiler left it: its instructions, and its innermost loops with matrix products as ranges."""

  instructions: tuple[Instruction, ...]
  loops: tuple[range, ...]
  spills: int  # bytes stored and loaded
  complaints: tuple[str, ...]  # of the compiler about matrix products that it had to keep apart

  def of(self, loop: range) -> list[Instruction]:
    """The instructions of a loop."""
    return [self.instructions[i] for i in loop]

  def events(self, loop: range) -> list[str]:
    """What a loop does in order: wait, arrive, `N x SIZE` products, `until N` groups of them are left, exponentials."""
    found: list[str] = []
    for instruction in self.of(loop):
      name = instruction.name
      if name.startswith("HGMMA"):
        event = name.split(".")[1]
      elif name.startswith("WARPGROUP.DEPBAR"):
        event = f"until {int(instruction.text.split(',')[-1], 16)}"
      elif "TRYWAIT" in name:
        event = "wait"
      elif name.startswith("SYNCS.ARRIVE"):
        event = "arrive"
      elif name.startswith("MUFU.EX2"):
        event = "exponentials"
      else:
        continue
      if event[0].isdigit() and found and found[-1].endswith(event):
        event = f"{int(found.pop().split(' x ')[0]) + 1} x {event}"
      elif event[0].isdigit():
        event = f"1 x {event}"
      if event != "exponentials" or found[-1:] != ["exponentials"]:
        found.append(event)
    return found


def _instructions(lines: list[str]) -> tuple[tuple[Instruction, ...], tuple[range, ...]]:
  """The instructions of a dump with control codes, and the innermost loops with products."""
  instructions: list[Instruction] = []
  labels: dict[str, int] = {}
  for line in lines:
    if label := re.match(r"(\.L_x_\d+):", line):
      labels[label[1]] = len(instructions)
    elif found := re.match(r"\s*\S+:\S+:\S+:\S+:(\d+)\s+/\*[0-9a-f]+\*/\s+(\S.*)", line):
      instructions.append(Instruction(int(found[1]), found[2].strip(" ;")))
  loops = []
  for i, instruction in enumerate(instructions):
    if target := re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction.text):
      body = range(labels.get(target[1], i + 1), i + 1)
      names = {instructions[j].name.split(".")[0] for j in body}
      if "HGMMA" in names and "EXIT" not in names:  # past the exits, waits jump back to where they came from
        loops.append(body)
  innermost = [a for a in loops if not any(b != a and b.start in a and b[-1] in a for b in loops)]
  return tuple(instructions), tuple(innermost)


def parse(text: str) -> list[MachineCode]:
  """The kernels in what the compiler printed: for each its remarks, then a dump with control codes."""
  kernels = []
  remarks: list[str] = []
  for dump in re.split(r"(?m)^(?=[ \t]*\.target\s)", text):
    lines = dump.splitlines()
    if remarks:
      spills = [re.findall(r"(\d+) bytes spill", line) for line in remarks if "bytes stack frame" in line]
      complaints = tuple(line for line in remarks if "(C75" in line)
      kernels.append(MachineCode(*_instructions(lines), sum(map(int, spills[0])), complaints))
    remarks = [line for line in lines if line.startswith("ptxas") or "bytes stack frame" in line]
  return kernels


def compile_here(shape: list[int], gradients: bool) -> None:
  """Compiles attention, or its gradients, for an H100, in a process that dumps machine code."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from diffeq_nnx.kernels.attention import attention
  from launch import gpus

  batch, length, heads, kv_heads, width = shape
  (device,) = gpus.devices_of("h100:1")
  mesh = jax.sharding.Mesh(np.array([device]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  everywhere = jax.sharding.PartitionSpec()
  q, k = (
    jax.ShapeDtypeStruct(
      (batch, length, count, width), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, everywhere)
    )
    for count in (heads, kv_heads)
  )
  function = lambda q, k, v: attention(q, k, v, implementation="pallas_gpu")
  if gradients:
    forward = function
    function = jax.grad(lambda q, k, v: forward(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
  # under shard_map, so that the kernel knows which device it is for
  function = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",)).compile()


def machine_code(shape: list[int], gradients: bool = False) -> list[MachineCode]:
  """The kernels of causal attention at [batch, length, heads, key/value heads, width]; with gradients all of them.

  Raises:
    SystemExit: something is missing, or doesn't compile.
  """
  disassembler = shutil.which("nvdisasm")
  if disassembler is None:
    raise SystemExit("error: no nvdisasm on the PATH; CUDA's toolkit has it, and the wheel of triton")
  with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "bin").mkdir()
    (pathlib.Path(folder) / "bin" / "nvdisasm").symlink_to(disassembler)
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(["."] + ([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])),
      "CUDA_ROOT": folder,  # where Mosaic GPU looks for nvdisasm
      "MOSAIC_GPU_DUMP_SASS_CTRL": "1",
      "MOSAIC_GPU_DUMP_PTXAS": "1",
      "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is taken from a cache is not dumped
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    command = [sys.executable, __file__, f"--child={','.join(map(str, [*shape, int(gradients)]))}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"error: attention at {shape} does not compile for an H100: {done.stderr[-2000:]}")
  return parse(done.stdout)


@dataclasses.dataclass(frozen=True)
class Loop:
  """What a warpgroup does with one block of keys, in cycles."""

  products: int  # on the tensor cores
  issue: int  # instructions of one warp
  exponentials: int  # of one warp on the special function units
  softmax: int  # of one warp from the end of its products to its next turn

  @classmethod
  def read(cls, code: MachineCode, loop: range) -> "Loop":
    """Counts the instructions of a loop."""
    body = code.of(loop)
    last = max(i for i, instruction in enumerate(body) if instruction.product_cycles)
    exponentials = EXPONENTIAL_CYCLES * sum(instruction.name.startswith("MUFU") for instruction in body)
    return cls(
      products=sum(instruction.product_cycles for instruction in body),
      issue=len(body),
      exponentials=exponentials,
      softmax=max(sum(instruction.stall for instruction in body[last + 1 :]), exponentials),
    )

  def bounds(self) -> dict[str, int]:
    """Cycles that both warpgroups take for a block each, by what bounds them."""
    return {
      "products": 2 * self.products,
      "instructions": 2 * self.issue,
      "exponentials": 2 * self.exponentials,
      "one warpgroup alone": self.products + self.softmax + HANDOVER,
    }


def makespan(tiles: list[float], workers: int = MULTIPROCESSORS) -> float:
  """When the last worker ends, if each takes the next tile as it becomes free."""
  ends = [0.0] * workers
  for tile in tiles:
    heapq.heapreplace(ends, ends[0] + tile)
  return max(ends)


def balance(tiles: list[float]) -> float:
  """Mean of the workers' time over the longest."""
  return sum(tiles) / MULTIPROCESSORS / makespan(tiles)


def tiles_in_order(length: int, heads: int, batch: int, block: float, tile: float, longest_first: bool) -> list[float]:
  """Cycles of each tile of 128 queries in the kernel's order; the n-th of a sequence has n blocks of 128 keys.

  Args:
    block: cycles of a block of keys.
    tile: cycles that each tile takes beyond that.
  """
  sizes = [tile + (n + 1) * block for n in range(-(-length // 128))]
  return [size for _ in range(batch) for size in (sizes[::-1] if longest_first else sizes) for _ in range(heads)]


def main() -> None:
  """Compiles, counts and prints Markdown tables."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  numbers = lambda text: [int(word) for word in text.split(",")]
  parser.add_argument("--widths", type=numbers, default=[128, 64])
  parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 8192])
  parser.add_argument("--child", type=numbers, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    compile_here(args.child[:-1], bool(args.child[-1]))
    return
  print("An estimate from machine code, not a measurement; the kernel was never run on a GPU.\n")
  rows = []
  for width in args.widths:
    heads = MODEL_WIDTH // width
    (code,) = machine_code([1, 2048, heads, heads, width])
    loop = Loop.read(code, code.loops[-1])
    bounds = loop.bounds()
    pair = max(bounds.values())
    outside = TILE_LATENCY + sum(
      i.stall for n, i in enumerate(code.instructions) if not any(n in l for l in code.loops)
    )
    print(f"{width} wide, cycles for a block of 128 keys: " + ", ".join(f"{k} {v}" for k, v in bounds.items()), end="")
    print(f"; bytes spilled: {code.spills}; outside the loop: {outside}")
    for length in args.lengths:
      batch = POSITIONS // length
      makespans = [
        tiles_in_order(length, heads, batch, pair, outside, longest_first) for longest_first in (False, True)
      ]
      work = 2 * length**2 * width * heads * batch
      share = work / (makespan(makespans[1]) * MULTIPROCESSORS * FLOPS_PER_CYCLE)
      published = PUBLISHED.get(length, "") if width == 128 else ""
      rows.append(
        f"| {width} | {length} | {2 * loop.products / pair:.0%} | {balance(makespans[0]):.3f} | "
        f"{balance(makespans[1]):.3f} | {share:.0%} | {share * PEAK:.0f} | {published} |"
      )
  print(
    "\n| width | length | tensor cores busy in the loop | balance, shortest tiles first | longest first (as it is) | "
    "share of peak, estimated | TFLOP/s, estimated | FlashAttention-3, published |\n" + "| --- " * 8 + "|"
  )
  print("\n".join(rows))


if __name__ == "__main__":
  main()
