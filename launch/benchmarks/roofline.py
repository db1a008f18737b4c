"""A roofline estimate of a compiled step on a GPU, whose compiler prints no estimates.

An instruction takes the longest of three times: its matrix products at peak, the arrays that it reads and writes at the
memory's bandwidth, and one operation of a lane for each element that it computes. Of an array that a fusion slices,
only the slice is read, and of one that it updates in place only the update is written. Attention's kernels do their
products over half of all pairs of positions, as if a row were one document. All of this is less than a GPU needs: not
included are starting kernels, waiting, what the tiles of a product read twice, and what an exponential costs beyond one
operation. Only arrays that stay in a cache make it too large.
"""

import collections
from collections.abc import Iterable
import math
import re

from launch.benchmarks import hlo, step_profile
from launch.gpus import Gpu

# matrix products of attention's kernels by what they return: output and sums; dK and dV, and dQ's sum in one pass; dK
# and dV; dQ. Of heads wider than 128, three kernels return dQ, dK and dV, with 3, 3 and 2 products
PRODUCTS = {("bf16", "f32"): 2, ("bf16", "bf16", "f32"): 5, ("bf16", "bf16"): 4, ("bf16",): 3}
ONE_OF_WIDE = 8 / 3
# share of the bfloat16 peak, from NVIDIA's data sheets; float32 is TensorFloat-32, except at the highest precision
SPEEDS = {"bf16": 1.0, "f16": 1.0, "f32": 0.5}
EXACT = 67 / 989
IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}  # the operand that holds what is written
SLICED = {"slice", "dynamic-slice", "gather"}
SCRATCH = {"s8", "u8"}  # of cuBLAS
CALLS = {"while", "call", "conditional"}
MOVES = step_profile.MOVES | step_profile.OPCODES[step_profile.SLICES] | {"broadcast", "iota", "convert"}
NOT_COMPUTED = step_profile.FREE | MOVES | step_profile.OPCODES["products"]
KERNELS = 'custom_call_target="mosaic_gpu'  # ours: compile_ahead takes them in place of cuDNN's


def seconds(program: hlo.Program, gpu: Gpu, peak: float) -> dict[str, float]:
  """Seconds of a step on one device by what bounds them: attention, products, memory or elementwise.

  Args:
    program: the compiled step.
    gpu: the device.
    peak: its operations per second in bfloat16.
  """
  found: dict[str, float] = collections.Counter(attention=0, products=0, memory=0, elementwise=0)
  for instruction, times in program.executed():
    opcode = instruction.opcode
    kind = opcode.removesuffix("-start")
    if opcode in step_profile.FREE | CALLS or kind in hlo.KINDS or opcode.endswith("-done"):
      continue
    bounds = {
      "products": _product_seconds(program, instruction, peak),
      "memory": _bytes(program, instruction) / (1e9 * gpu.bandwidth),
      "elementwise": _elements(program, instruction) / gpu.lanes,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    name = "attention" if KERNELS in instruction.rest else bound
    found[name] += times * bounds[bound]
  return dict(found)


def communication_seconds(collectives: Iterable[hlo.Collective], gpu: Gpu, per_node: int) -> float:
  """Seconds of all collectives at the bandwidth of NVLink; of a ring over several nodes, at that of the adapters of its
  GPUs in a node, which share what leaves it."""
  total = 0.0
  for one in collectives:
    nodes = len({place // per_node for place in one.members})
    speed = gpu.nvlink if nodes == 1 else min(gpu.nvlink, gpu.network * len(one.members) / nodes)
    total += one.sent_bytes / (1e9 * speed)
  return total


def _product_seconds(program: hlo.Program, instruction: hlo.Instruction, peak: float) -> float:
  """Of all matrix products of an instruction, each at the peak of its dtype."""
  if instruction.opcode == "custom-call":
    return _custom_flops(program, instruction) / peak
  total = 0.0
  for part in program.parts(instruction):
    if part.opcode == "dot":
      left = program.arguments(part)[0]
      exact = left.dtype not in SPEEDS or left.dtype == "f32" and "operand_precision={highest" in part.rest
      total += _flops(part, left, r"lhs_contracting_dims=\{([\d,]*)\}") / (EXACT if exact else SPEEDS[left.dtype])
  return total / peak


def _custom_flops(program: hlo.Program, call: hlo.Instruction) -> float:
  """Of attention's kernels, and of products by cuBLAS."""
  if KERNELS in call.rest:
    q = max(program.arguments(call), key=lambda array: array.bytes)  # [batch, length, heads, width]
    kinds = tuple(array.dtype for array in call.arrays)
    products = ONE_OF_WIDE if kinds == ("bf16",) and q.shape[-1] > 128 else PRODUCTS.get(kinds, 2)
    return products * math.prod(q.shape) * q.shape[1]
  if '"__cublas$' in call.rest:
    return _flops(call, program.arguments(call)[0], r'"lhs_contracting_dimensions":\[([\d",]*)\]')
  return 0


def _flops(product: hlo.Instruction, left: hlo.Array, contracted: str) -> int:
  """2 m n k: twice the elements of the result, times the sizes that the left operand is summed over."""
  axes = re.findall(r"\d+", re.search(contracted, product.rest)[1])
  return 2 * math.prod(product.arrays[0].shape) * math.prod(left.shape[int(axis)] for axis in axes)


def _bytes(program: hlo.Program, instruction: hlo.Instruction) -> float:
  """What an instruction reads and writes."""
  parts = program.parts(instruction)
  if parts == [instruction]:
    sliced = instruction.opcode in SLICED
    read = instruction.arrays if sliced else program.arguments(instruction)
    if instruction.opcode in IN_PLACE:
      read = _update(program, instruction)
    return sum(array.bytes for array in read) + _written(program, instruction)
  users = collections.defaultdict(list)
  for part in parts:
    for operand in part.operands:
      users[operand].append(part)
  read = sum(
    part.arrays[0].bytes * _share(part.name, math.prod(part.arrays[0].shape), users)
    for part in parts
    if part.opcode == "parameter" and part.arrays
  )
  return read + _written(program, parts[-1])


def _share(name: str, elements: int, users: dict[str, list[hlo.Instruction]]) -> float:
  """The part of a fusion's array that its users read, at most 1."""
  share = 0.0
  for user in users[name]:
    first = user.operands[0] == name
    if user.opcode in ("bitcast", "convert"):
      share += _share(user.name, elements, users)
    elif user.opcode in SLICED and first:
      share += math.prod(user.arrays[0].shape) / max(elements, 1)
    elif not (user.opcode in IN_PLACE and first):
      share += 1
  return min(share, 1.0)


def _written(program: hlo.Program, root: hlo.Instruction) -> int:
  """Bytes of an instruction's results."""
  if root.opcode == "tuple":
    return sum(_written(program, program.instructions[name]) for name in root.operands)
  source = root
  while source.opcode in ("bitcast", "convert"):
    source = program.instructions[source.operands[0]]
  arrays = _update(program, source) if source.opcode in IN_PLACE else root.arrays
  return sum(array.bytes for array in arrays if array.dtype not in SCRATCH)


def _update(program: hlo.Program, instruction: hlo.Instruction) -> tuple[hlo.Array, ...]:
  """What an instruction writes into its first operand."""
  return program.instructions[instruction.operands[IN_PLACE[instruction.opcode]]].arrays


def _elements(program: hlo.Program, instruction: hlo.Instruction) -> int:
  """Elements that an instruction computes; of a reduction those that it sums."""
  if instruction.opcode not in (*hlo.FUSIONS, "reduce"):
    return 0
  total = 0
  for part in program.parts(instruction):
    if part.opcode not in NOT_COMPUTED:
      arrays = program.arguments(part)[:1] if part.opcode.startswith("reduce") else part.arrays[:1]
      total += sum(math.prod(array.shape) for array in arrays)
  return total
