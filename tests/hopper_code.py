"""Machine code of the attention kernels for an H100, compiled without one, and what it does in order.

Needs jax 0.11.2 or later, the wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version, and `nvdisasm`, which CUDA's
toolkit and the wheel of triton hold, on the PATH.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.kernels.attention import attention
from launch import gpus, programs


@dataclasses.dataclass(frozen=True)
class MachineCode:
  """A kernel as the compiler left it: its instructions, and its innermost loops with matrix products as ranges."""

  instructions: tuple[str, ...]
  loops: tuple[range, ...]
  spills: int  # bytes stored and loaded
  complaints: tuple[str, ...]  # of the compiler about matrix products that it had to keep apart

  def events(self, loop: range) -> list[str]:
    """What a loop does in order: wait, arrive, `N x SIZE` products, `until N` groups of them are left, exponentials."""
    events = filter(None, (_event(self.instructions[i]) for i in loop))
    found: list[str] = []
    for event, same in itertools.groupby(events):
      count = len(list(same))
      if event[0].isdigit():
        found.append(f"{count} x {event}")
      else:
        found += [event] * (1 if event == "exponentials" else count)
    return found


def _event(instruction: str) -> str:
  """What an instruction is to `MachineCode.events`, one product without a number; "" for all others."""
  name = _name(instruction)
  if name.startswith("HGMMA"):
    return name.split(".")[1]
  if name.startswith("WARPGROUP.DEPBAR"):
    return f"until {int(instruction.split(',')[-1], 16)}"
  if "TRYWAIT" in name:
    return "wait"
  known = {"SYNCS.ARRIVE": "arrive", "MUFU.EX2": "exponentials"}
  return next((event for start, event in known.items() if name.startswith(start)), "")


def _name(instruction: str) -> str:
  """The name of an instruction with its modifiers, without predicate and operands."""
  return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def _instructions(lines: list[str]) -> tuple[tuple[str, ...], tuple[range, ...]]:
  """The instructions of a dump with control codes, and the innermost loops with products."""
  instructions: list[str] = []
  labels: dict[str, int] = {}
  for line in lines:
    if label := re.match(r"(\.L_x_\d+):", line):
      labels[label[1]] = len(instructions)
    elif found := re.match(r"\s*\S+:\S+:\S+:\S+:\d+\s+/\*[0-9a-f]+\*/\s+(\S.*)", line):
      instructions.append(found[1].strip(" ;"))
  loops = []
  for i, instruction in enumerate(instructions):
    if target := re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction):
      body = range(labels.get(target[1], i + 1), i + 1)
      names = {_name(instructions[j]).split(".")[0] for j in body}
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


def compile_here(shape: list[int], gradients: bool, documents: bool, **options) -> None:
  """Compiles attention, or its gradients, for an H100, in a process that dumps machine code."""
  batch, length, heads, kv_heads, width = shape
  (device,) = gpus.devices_of("h100:1")
  mesh = jax.sharding.Mesh(np.array([device]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  everywhere = jax.sharding.PartitionSpec()
  array = lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype, sharding=jax.sharding.NamedSharding(mesh, everywhere))
  q, k = (array(batch, length, count, width, dtype=jnp.bfloat16) for count in (heads, kv_heads))
  segments = (array(batch, length, dtype=jnp.int32),) if documents else ()

  def function(q, k, v, *segments):
    return attention(q, k, v, segment_ids=(*segments, None)[0], implementation="pallas_gpu", **options)

  if gradients:
    forward = function
    function = jax.grad(lambda *arrays: forward(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
  # under shard_map, so that the kernel knows which device it is for
  function = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.jit(function).trace(q, k, k, *segments).lower(lowering_platforms=("cuda",)).compile()


def machine_code(
  shape: list[int], gradients: bool = False, documents: bool = False, **options: Any
) -> list[MachineCode]:
  """The kernels of causal attention at [batch, length, heads, key/value heads, width]; with gradients all of them.

  Args:
    documents: rows hold several.
    options: of `attention`.

  Raises:
    SystemExit: something is missing, or doesn't compile.
  """
  disassembler = shutil.which("nvdisasm")
  if disassembler is None:
    raise SystemExit("error: no nvdisasm on the PATH; CUDA's toolkit has it, and the wheel of triton")
  with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "bin").mkdir()
    (pathlib.Path(folder) / "bin" / "nvdisasm").symlink_to(disassembler)
    variables = {
      "CUDA_ROOT": folder,  # where Mosaic GPU looks for nvdisasm
      "MOSAIC_GPU_DUMP_SASS_CTRL": "1",
      "MOSAIC_GPU_DUMP_PTXAS": "1",
      "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is taken from a cache is not dumped
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    words = [json.dumps({"shape": shape, "gradients": gradients, "documents": documents, **options})]
    return parse(programs.compile_in_child(__file__, words, variables, f"attention at {shape} for an H100"))


if __name__ == "__main__":
  compile_here(**json.loads(sys.argv[1]))
