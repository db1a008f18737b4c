"""Where the cycles of a compiled train step go, by the compiler's estimates: kinds of work, and the largest items.

An item is all instructions with the same kind, shapes, pass and source line. The pass is forward, backward, recomputed
(forward again, in the backward pass) or `-`: neither, as the optimizer. An instruction that the compiler inserted, such
as a copy to another layout, has the source line of the array that it reads, after `of`, or else of the first
instruction that uses its result, after `for`. A fusion of several kinds counts as one: products before random numbers
before the others, in the order of `OPCODES`, and elementwise last.
"""

import collections
import math
import os
import re
from typing import NamedTuple

import diffeq_nnx
from launch.benchmarks import hlo

PACKAGE = os.path.join(os.path.dirname(diffeq_nnx.__file__), "")
PRODUCTS = "model/cpu_kernels.py"  # where products are computed for those that ask for them
SLICES = "slices, gathers, scatters"
OPCODES = {
  "products": {"convolution", "dot"},
  "reductions": {"reduce", "reduce-window", "sort"},
  SLICES: {"slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "scatter"},
  "other": {"custom-call", *hlo.KINDS},
}
RANDOM = re.compile(r"_bernoulli|threefry|\brandom_|\brng_")  # in JAX's names
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
MOVES = {"copy", "transpose", "reshape"}


class Item(NamedTuple):
  """What instructions are grouped by, as printed; `what` holds opcode and shapes, `phase` the pass."""

  kind: str
  what: str
  phase: str
  source: str


def items(program: hlo.Program) -> dict[Item, collections.Counter]:
  """`cycles`, `times` (executions) and `flops` of each item in a step; the cycles sum to `program.cycles`."""
  found: dict[Item, collections.Counter] = collections.defaultdict(collections.Counter)
  for instruction, times, cycles in program.estimates:
    parts = program.parts(instruction)
    main = next((part for part in parts if part.opcode in OPCODES["products"]), instruction)
    kind, (word, origin) = _kind(parts), program.origin(main)
    item = Item(kind, _what(program, main, kind), _phase(origin), f"{word} {_line(program, origin)}".strip())
    found[item].update(cycles=cycles, times=times, flops=times * _flops(program, main) if kind == "products" else 0)
  return found


def lines(program: hlo.Program, clock: float, peak: float, kernels: float, largest: int) -> list[str]:
  """Both tables.

  Args:
    clock: cycles per second.
    peak: operations per second.
    kernels: seconds of our kernels, which the compiler has no estimate for.
    largest: number of items to show.
  """
  found = items(program)
  kinds = collections.defaultdict(
    collections.Counter, {"our kernels": collections.Counter(cycles=round(kernels * clock))}
  )
  for item, total in found.items():
    kinds[item.kind].update(total)
  step = sum(total["cycles"] for total in kinds.values())

  def figures(total: collections.Counter) -> str:
    share = f"{100 * total['flops'] * clock / total['cycles'] / peak:.0f}" if total["flops"] else ""
    return f"{100 * total['cycles'] / step:6.2f} {share:>9} {total['cycles'] / 1e6:9.1f} {total['times'] or '':>6} "

  shown = sorted(found.items(), key=lambda pair: -pair[1]["cycles"])[:largest]
  width = max((len(item.what) for item, _ in shown), default=0)
  heads = f"{'%':>6} {'% of peak':>9} {'Mcycles':>9} {'times':>6} "
  return [
    f"{heads} kind, of {step / 1e6:,.1f} million cycles in a step",
    *(f"{figures(kinds[kind])} {kind}" for kind in sorted(kinds, key=lambda kind: -kinds[kind]["cycles"])),
    f"{heads} largest, without our kernels",
    *(f"{figures(total)} {item.phase:<10} {item.what:<{width}} {item.source}" for item, total in shown),
  ]


def _kind(parts: list[hlo.Instruction]) -> str:
  opcodes = {part.opcode.removesuffix("-start") for part in parts} - FREE
  if not opcodes & OPCODES["products"] and any(RANDOM.search(part.op_name) for part in parts):
    return "random numbers"
  if kind := next((kind for kind, decisive in OPCODES.items() if opcodes & decisive), ""):
    return kind
  if opcodes <= {"convert", *MOVES}:
    return "casts" if "convert" in opcodes else "layout copies"
  return "elementwise"


def _what(program: hlo.Program, instruction: hlo.Instruction, kind: str) -> str:
  """`[8,64] x [64,32] -> bf16[8,32]` without axes of size 1, or `copy bf16[8,64]`, the largest result."""

  def text(shape: tuple[int, ...]) -> str:
    return f"[{','.join(str(size) for size in shape if size > 1)}]"

  result = max(instruction.arrays, key=lambda array: array.bytes)
  before = f"fusion ({kind})" if instruction.opcode == "fusion" else instruction.opcode
  if kind == "products":
    before = f"{' x '.join(text(array.shape) for array in program.arguments(instruction))} ->"
  return f"{before} {result.dtype}{text(result.shape)}"


def _flops(program: hlo.Program, product: hlo.Instruction) -> int:
  """2 sqrt(|A| |B| |C|) for A, B -> C: the 2 m n k of [m, k] x [k, n]; sqrt(b) times too many for b such products."""
  arrays = *program.arguments(product), product.arrays[0]
  return 2 * math.isqrt(math.prod(math.prod(array.shape) for array in arrays))


def _phase(instruction: hlo.Instruction) -> str:
  marks = {"rematted_computation": "recomputed", "transpose(jvp": "backward", "jvp(": "forward"}
  return next((phase for mark, phase in marks.items() if mark in instruction.op_name), "-")


def _line(program: hlo.Program, instruction: hlo.Instruction) -> str:
  """`model/model.py:12`: the innermost line in this package that asks for work, else the innermost of all."""
  stack = program.stack(instruction) or (("unknown", 0),)
  own = (
    (file.removeprefix(PACKAGE), line)
    for file, line in stack
    if file.startswith(PACKAGE) and not file.endswith(PRODUCTS)
  )
  file, line = next(own, (os.path.basename(stack[0][0]), stack[0][1]))
  return f"{file}:{line}" if line else file
