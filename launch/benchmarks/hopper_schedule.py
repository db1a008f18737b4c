"""Estimates the speed of the attention kernels on an H100 from their machine code; needs no GPU, measures nothing.

  python -m launch.benchmarks.hopper_schedule [--widths=128,64] [--lengths=1024,2048,8192]

From the loop over blocks of keys or queries it counts cycles of the tensor cores, instructions, exponentials, traffic
of shared memory and the stalls that the compiler scheduled; what that needs: launch/benchmarks/hopper_code.py. A block
takes both computing warpgroups the largest of these sums and of one more: forward, where they take turns, one
warpgroup's products and softmax one after the other; backward, what a simulation of both gives, whose products the
tensor cores take in the order in which they are started. Backward, what XLA does before and after is added, by the
memory that it reads and writes. Not in the model: waiting for memory, sums in memory, the clock under load, conflicts
of shared memory. Batch times length is 16,384 positions and heads times width 2,048, as in FlashAttention-3's
measurements (Shah et al. 2024, section 4.1), causal.
"""

import argparse
import dataclasses
import heapq

from launch.benchmarks.hopper_code import FLOPS_PER_CYCLE, SHARED_BYTES, MachineCode, machine_code

MULTIPROCESSORS = 132
PEAK = 989  # TFLOP/s of all at the data sheet's clock
CLOCK = PEAK * 1e12 / (MULTIPROCESSORS * FLOPS_PER_CYCLE)  # Hz
BANDWIDTH = 3.35e12  # bytes/s of the GPU's memory
EXPONENTIAL_CYCLES = 8  # of a warp: 32 threads on the 4 special function units of its scheduler
# assumed, not measured
HANDOVER = 100  # cycles from the last product of a turn to the first of the next, if that one was waiting for it
TILE_LATENCY = 2000  # cycles: a block of threads starts, waits for its first loads, and stores its results
POSITIONS, MODEL_WIDTH = 16384, 2048
# TFLOP/s: FlashAttention-3, forward and backward, causal, 128 wide, on an H100
PUBLISHED = {1024: (364, 182), 2048: (560, 316), 8192: (685, 539)}


@dataclasses.dataclass(frozen=True)
class Loop:
  """What a warpgroup does with one block, in cycles."""

  products: int  # on the tensor cores
  issue: int  # instructions of one warp
  exponentials: int  # of one warp on the special function units
  softmax: int  # of one warp from the end of its products to its next turn
  shared: int  # of shared memory

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
      shared=sum(instruction.shared_bytes for instruction in body) // SHARED_BYTES,
    )

  def bounds(self, copied: int) -> dict[str, int]:
    """Cycles that both warpgroups take for a block each, by what bounds them; `copied` bytes from and to the memory."""
    return {
      "products": 2 * self.products,
      "shared memory": 2 * self.shared + copied // SHARED_BYTES,
      "instructions": 2 * self.issue,
      "exponentials": 2 * self.exponentials,
    }


def side_by_side(steps: list[tuple[str, int]], blocks: int = 64) -> float:
  """Cycles of a block for two warpgroups that go through `steps` at the same time, with one queue of products."""
  now, place, met, ends = [0.0, 0.0], [0, 0], [0, 0], [[0.0], [0.0]]
  meetings: dict[int, float] = {}
  free = 0.0
  while min(place) < blocks * len(steps):
    w = min(range(2), key=lambda w: (place[w] == blocks * len(steps), now[w]))
    kind, value = steps[place[w] % len(steps)]
    if kind == "meet":
      if met[w] not in meetings:  # the first one to come waits: it is moved on when the other one comes
        meetings[met[w]] = now[w]
        now[w] = float("inf")
      else:
        now = [max(meetings[met[w]], now[w])] * 2
        place[1 - w] += 1
        met[1 - w] += 1
        place[w] += 1
        met[w] += 1
      continue
    if kind == "run":
      now[w] += value
    elif kind == "product":
      free = max(free, now[w]) + value
      ends[w].append(free)
    else:
      now[w] = max(now[w], ends[w][-1 - value] if len(ends[w]) > value else 0.0)
    place[w] += 1
  return max(now) / blocks


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


@dataclasses.dataclass(frozen=True)
class Kernel:
  """What a kernel's blocks and tiles take, in cycles.

  Attributes:
    bounds: of a block, by what bounds both warpgroups.
    products: of a block, on the tensor cores.
    tile: what belongs to no block.
    spills: bytes of a thread's registers, stored and loaded.
  """

  bounds: dict[str, int]
  products: int
  tile: int
  spills: int

  @classmethod
  def read(cls, code: MachineCode, copied: int, forward: bool) -> "Kernel":
    """Of machine code; `copied` as for `Loop.bounds`."""
    loop = Loop.read(code, code.loops[-1])
    alone = loop.products + loop.softmax + HANDOVER
    together = alone if forward else round(side_by_side(code.steps(code.loops[-1])))
    outside = sum(i.stall for n, i in enumerate(code.instructions) if not any(n in l for l in code.loops))
    bounds = loop.bounds(copied) | {"together": together}
    return cls(bounds, 2 * loop.products, TILE_LATENCY + outside, code.spills)

  @property
  def block(self) -> int:
    """Cycles of a block."""
    return max(self.bounds.values())

  def row(self, name: str, width: int) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join(map(str, (name, width, *self.bounds.values(), self.tile, self.spills))) + " |"


def speed_of(work: float, seconds: float) -> float:
  """TFLOP/s."""
  return work / seconds / 1e12


def forward_row(kernel: Kernel, width: int, length: int) -> str:
  """Of a Markdown table."""
  heads, batch = MODEL_WIDTH // width, POSITIONS // length
  orders = [tiles_in_order(length, heads, batch, kernel.block, kernel.tile, longest) for longest in (False, True)]
  speed = speed_of(2 * length**2 * width * heads * batch, makespan(orders[1]) / CLOCK)
  published = PUBLISHED.get(length, ("", ""))[0] if width == 128 else ""
  return (
    f"| {width} | {length} | {kernel.products / kernel.block:.0%} | {balance(orders[0]):.3f} | "
    f"{balance(orders[1]):.3f} | {speed / PEAK:.0%} | {speed:.0f} | {published} |"
  )


def backward_row(one: Kernel, two: list[Kernel], width: int, length: int) -> str:
  """Of a Markdown table; the work is that of five products for one pass and two."""
  heads, batch = MODEL_WIDTH // width, POSITIONS // length
  work = 5 * length**2 * width * heads * batch
  speeds = []
  # XLA reads the output and its gradient for delta; in one pass, it writes zeros, reads dQ's sum, and writes dQ
  for kernels, bytes_around in (([one], 2 * 2 + 4 + 4 + 2), (two, 2 * 2)):
    tiles = [tiles_in_order(length, heads, batch, 2 * kernel.block, kernel.tile, True) for kernel in kernels]
    seconds = sum(map(makespan, tiles)) / CLOCK + POSITIONS * MODEL_WIDTH * bytes_around / BANDWIDTH
    speeds.append(speed_of(work, seconds))
  published = PUBLISHED.get(length, ("", ""))[1] if width == 128 else ""
  return f"| {width} | {length} | {speeds[0]:.0f} | {speeds[1]:.0f} | {speeds[0] / speeds[1]:.2f} | {published} |"


def print_table(titles: str, rows: list[str]) -> None:
  """In Markdown."""
  print(f"\n| {titles} |\n" + "| --- " * (titles.count("|") + 1) + "|", *rows, sep="\n")


def main() -> None:
  """Compiles, counts and prints Markdown tables."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  numbers = lambda text: [int(word) for word in text.split(",")]
  parser.add_argument("--widths", type=numbers, default=[128, 64])
  parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 8192])
  args = parser.parse_args()
  print("An estimate from machine code, not a measurement; the kernels were never run on a GPU.")
  cycles, forward, backward = [], [], []
  for width in args.widths:
    shape = [1, 2048, MODEL_WIDTH // width, MODEL_WIDTH // width, width]
    copied = 2 * 2 * 64 * width  # two arrays of 64 rows
    codes = machine_code(shape, gradients=True)
    ahead = Kernel.read(codes[0], 2 * copied, forward=True)
    one = Kernel.read(codes[1], copied + 4 * 64 * width, forward=False)  # and dQ's part back
    _, *codes = machine_code(shape, gradients=True, deterministic=True)
    two = sorted((Kernel.read(code, copied, forward=False) for code in codes), key=lambda kernel: kernel.products)
    forward += [forward_row(ahead, width, length) for length in args.lengths]
    backward += [backward_row(one, two, width, length) for length in args.lengths]
    names = ("forward, 128 by 128", "one pass, 128 by 64", "two passes: dQ", "two passes: dK and dV")
    cycles += [kernel.row(name, width) for name, kernel in zip(names, (ahead, one, *two), strict=True)]
    adding = 4 * 64 * width * MULTIPROCESSORS / (one.block / CLOCK) / 1e12
    print(f"Heads {width} wide: in one pass, all multiprocessors add {adding:.1f} TB/s to dQ.")
  titles = "kernel, block | width | products | shared memory | instructions | exponentials"
  print_table(titles + " | warpgroups together | a tile beyond its blocks | bytes spilled", cycles)
  titles = "width | length | tensor cores busy in the loop | balance, shortest tiles first | longest first (as it is)"
  print_table(titles + " | share of peak, estimated | TFLOP/s, estimated | FlashAttention-3, published", forward)
  titles = "width | length | one pass, TFLOP/s, estimated | two passes | one over two | FlashAttention-3, published"
  print_table(titles, backward)


if __name__ == "__main__":
  main()
