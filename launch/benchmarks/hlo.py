"""Parses a compiled program: its communication between devices, the compiler's estimates of cycles, and source lines.

The text is that of `jax.stages.Compiled.as_text()`. Instructions in a loop count once per iteration.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np

FUSIONS = ("fusion", "fusion-start")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "send")
ITEM_BYTES = {"pred": 1, "bf16": 2, **{f"{kind}{8 * size}": size for kind in "suf" for size in (1, 2, 4, 8)}}

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an instruction's result."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def bytes(self) -> int:
    """Without padding."""
    return ITEM_BYTES.get(self.dtype, 4) * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of the program."""

  kind: str  # one of `KINDS`
  arrays: tuple[Array, ...]  # its results on a device (for an all-gather, complete)
  members: tuple[int, ...]  # the first group of devices that participate together, as places in the mesh
  times: int  # executions in a run of the program

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in all executions, by a ring: (g - 1) / g of the arrays, twice for an all-reduce."""
    size = sum(array.bytes for array in self.arrays)
    group = len(self.members)
    share = (group - 1) / group
    factors = {"all-gather": share, "all-reduce": 2 * share, "reduce-scatter": group - 1, "all-to-all": share}
    return round(self.times * factors.get(self.kind, 1) * size)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A hand-written kernel that the program calls, without an estimate by the compiler."""

  name: str  # JAX's name of the call in the source, which contains the kernel's
  times: int  # executions in a run of the program
  bytes: int  # of the arrays that one execution reads and writes
  results: tuple[Array, ...]  # the arrays that it writes


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction."""

  name: str  # unique in the program
  opcode: str  # `fusion` if it does the work of several
  arrays: tuple[Array, ...]  # its results
  rest: str  # operands and attributes, as text
  operands: tuple[str, ...]  # names of the instructions that it reads
  called: tuple[str, ...]  # names of the computations that it calls

  @property
  def op_name(self) -> str:
    """JAX's name of the operation in the source; empty for what the compiler inserted."""
    found = re.search(r'op_name="([^"]*)"', self.rest)
    return found[1] if found else ""


class Program:
  """A compiled program, parsed from its text."""

  def __init__(self, text: str):
    self.instructions: dict[str, Instruction] = {}  # by name
    self._computations: dict[str, list[Instruction]] = {}  # of each the instructions, the root last
    self._users: dict[str, Instruction] = {}  # the first of each
    self._stacks = _stacks(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    self.devices = int(partitions[1]) if partitions else 1
    for line in text.splitlines():
      if found := _COMPUTATION.match(line):
        current = found[2]
        self._computations[current] = []
        if found[1]:
          self._entry = current
      elif found := _INSTRUCTION.match(line):
        instruction = _parse(found[1], found[2])
        self._computations[current].append(instruction)
        self.instructions[instruction.name] = instruction
        for operand in instruction.operands:
          self._users.setdefault(operand, instruction)

  @functools.cached_property
  def collectives(self) -> list[Collective]:
    """All collectives, except those of a single device; `send` goes to another slice.

    The TPU compiler may split a collective over several fusions to overlap it with computation: they share its channel.
    So may separate permutes, of which none is split.
    """
    found: dict[Any, Collective] = {}
    for instruction, times in self.executed(inside_fusions=True):
      kind = instruction.opcode.removesuffix("-start")
      if kind in KINDS:
        channel = None if kind == "collective-permute" else re.search(r"channel_id=(\d+)", instruction.rest)
        arrays = _result(instruction) if instruction.opcode.endswith("-start") else instruction.arrays
        arrays = arrays[:1] if kind == "send" else arrays
        key = kind, channel[1] if channel else len(found)
        found.setdefault(key, Collective(kind, arrays, self._members(instruction), times))
    return [one for one in found.values() if len(one.members) > 1]

  @functools.cached_property
  def estimates(self) -> list[tuple[Instruction, int, int]]:
    """(instruction, executions in a run, the compiler's estimate of the cycles of all of them).

    The compiler has none for hand-written kernels and for waiting for other devices.
    """
    found = []
    for instruction, times in self.executed():
      cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d{1,15})"', instruction.rest)))
      if cycles and instruction.opcode != "while":
        found.append((instruction, times, times * cycles))
    return found

  @property
  def cycles(self) -> int:
    """The sum of the estimates."""
    return sum(cycles for _, _, cycles in self.estimates)

  def executed(self, inside_fusions: bool = False) -> Iterator[tuple[Instruction, int]]:
    """(instruction, executions in a run) of all instructions; a fusion is one, or else also those inside it."""
    return self._executed(self._entry, 1, inside_fusions)

  def parts(self, instruction: Instruction) -> list[Instruction]:
    """The instructions of a fusion; any other instruction alone."""
    fused = instruction.opcode in FUSIONS
    return self._computations[instruction.called[0]] if fused else [instruction]

  def arguments(self, instruction: Instruction) -> list[Array]:
    """The arrays that an instruction reads."""
    return [array for name in instruction.operands for array in self.instructions[name].arrays]

  def stack(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
    """(file, line) of the operation in the source and of its callers; empty for what the compiler inserted."""
    found = re.search(r"\bstack_frame_id=(\d+)", instruction.rest)
    return self._stacks.get(int(found[1]), ()) if found else ()

  def origin(self, instruction: Instruction) -> tuple[str, Instruction]:
    """An instruction with a source line, if any: ("", itself), ("of", what it reads) or ("for", what reads it)."""
    made: Instruction | None = instruction
    while made and not self.stack(made):
      made = self.instructions.get(made.operands[0]) if made.operands else None
    if made:
      return "" if made is instruction else "of", made
    used: Instruction | None = instruction
    while used and not self.stack(used):
      used = self._users.get(used.name)
    return ("for", used) if used else ("", instruction)

  @functools.cached_property
  def kernels(self) -> list[Kernel]:
    """The hand-written kernels."""
    size = lambda call: sum(array.bytes for array in (*self.arguments(call), *call.arrays))
    return [
      Kernel(call.op_name, times, size(call), call.arrays)
      for call, times in self.executed()
      if call.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in call.rest
    ]

  def _executed(self, computation: str, times: int, inside_fusions: bool) -> Iterator[tuple[Instruction, int]]:
    """(instruction, number of executions) in this computation and those that it calls."""
    for instruction in self._computations[computation]:
      yield instruction, times
      if instruction.opcode in FUSIONS and not inside_fusions:
        continue
      trips = self._trips(instruction) if instruction.opcode == "while" else 1
      for called in instruction.called:
        yield from self._executed(called, times * trips, inside_fusions)

  def _trips(self, loop: Instruction) -> int:
    """The iterations of a loop that counts up to a constant; 1 for any other."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, body = (re.search(rf"{part}=%?([\w.\-]+)", loop.rest)[1] for part in ("condition", "body"))
    operands = self._computations[condition][-1].operands
    limits = [limit for name in operands if (limit := self._constant(name)) is not None]
    counters = [index for name in operands if (index := self._index(name)) is not None]
    if not counters or not limits:
      return 1
    start = self._start(loop.operands[0], counters[0])
    return max(1, -(-(limits[0] - start) // self._step(body, counters[0])))

  def _follow(self, name: str) -> Instruction | None:
    """The instruction of that name, followed through copies."""
    instruction = self.instructions.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
      instruction = self.instructions.get(instruction.operands[0])
    return instruction

  def _constant(self, name: str) -> int | None:
    instruction = self._follow(name)
    found = instruction and instruction.opcode == "constant" and re.match(r"(-?\d+)\)", instruction.rest)
    return int(found[1]) if found else None

  def _index(self, name: str) -> int | None:
    """The index of an element of the loop's state."""
    instruction = self._follow(name)
    found = instruction and re.search(r"index=(\d+)", instruction.rest)
    return int(found[1]) if found and instruction.opcode == "get-tuple-element" else None

  def _start(self, name: str, index: int) -> int:
    """The loop's counter before the first iteration; 0 if unknown."""
    state = self._follow(name)
    known = state is not None and state.opcode == "tuple"
    return (self._constant(state.operands[index]) or 0) if known else 0

  def _step(self, body: str, index: int) -> int:
    """The increment of the loop's counter in an iteration."""
    after = self._follow(self._computations[body][-1].operands[index])
    if after is not None and after.opcode == "fusion":
      after = self._computations[after.called[0]][-1]
    steps = [self._constant(name) for name in after.operands] if after is not None else []
    return next((step for step in steps if step), 1)

  def _members(self, instruction: Instruction) -> tuple[int, ...]:
    if instruction.opcode.startswith(("collective-permute", "send")):
      return tuple(range(self.devices))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest):
      sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
      axes = re.findall(r"'(\w+)'", found[2])
      first = tuple(slice(None) if axis in axes else 0 for axis in sizes)
      return tuple(np.arange(math.prod(sizes.values())).reshape(*sizes.values())[first].ravel().tolist())
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.rest):
      shape = [int(size) for size in found[3].split(",")]
      order = [int(axis) for axis in found[4].split(",")] if found[4] else range(len(shape))
      places = np.arange(math.prod(shape)).reshape(shape).transpose(order)
      return tuple(places.reshape(int(found[1]), int(found[2]))[0].tolist())
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.rest)
    return tuple(map(int, found[1].split(","))) if found else tuple(range(self.devices))


def _parse(name: str, text: str) -> Instruction:
  """`TYPE OPCODE(OPERANDS), ATTRIBUTES`."""
  end = _end(text, " ")
  opcode, _, rest = text[end:].strip().partition("(")
  arrays = tuple(
    Array(dtype, tuple(map(int, filter(None, shape.split(","))))) for dtype, shape in _ARRAY.findall(text[:end])
  )
  branches = _BRANCHES.search(rest)
  called = _CALLED.findall(rest) + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])
  operands = re.findall(r"%([\w.\-]+)", rest[: _end(rest, ")")])
  return Instruction(name, opcode, arrays, rest, tuple(operands), tuple(called))


def _end(text: str, close: str) -> int:
  """The index of the first `close` outside all brackets."""
  depth = 0
  for place, letter in enumerate(text):
    if letter == close and depth == 0:
      return place
    depth += (letter in "({[") - (letter in ")}]")
  return len(text)


def _result(instruction: Instruction) -> tuple[Array, ...]:
  """The results of an asynchronous collective, whose type holds operands, results and counters."""
  arrays = [array for array in instruction.arrays if array.dtype != "u32" or array.shape]
  return tuple(arrays[len(arrays) // 2 :]) if instruction.opcode != "all-reduce-start" else tuple(arrays)


def _stacks(text: str) -> dict[int, tuple[tuple[str, int], ...]]:
  """(file, line) of each stack frame and its callers, from the tables before the computations.

  A caller stands before what it calls, and so the first has none: its `parent_frame_id` is 1 where, as with jax 0.10.2,
  all of them are 1 too high.
  """
  files, places, frames = (
    re.findall(pattern, text.partition(f"\n{table}\n")[2].partition("\n\n")[0], re.MULTILINE)
    for table, pattern in (
      ("FileNames", r'^(\d+) "(.*)"$'),
      ("FileLocations", r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"),
      ("StackFrames", r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"),
    )
  )
  names = dict(files)
  lines = {place: (names[file], int(line)) for place, file, line in places}
  stacks: dict[int, tuple[tuple[str, int], ...]] = {}
  for frame, place, parent in frames:
    stacks[int(frame)] = (lines[place], *stacks.get(int(parent or 0) - int(frames[0][2] or 0), ()))
  return stacks
