"""Attention for devices that are not here, and what its machine code for an H100 does in order.

That needs jax 0.11.2 or later, the wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version, and `nvdisasm`, which
CUDA's toolkit and the wheel of triton hold, on the PATH.
"""

import dataclasses
import functools
import importlib.util
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
import pytest

from diffeq_nnx.kernels.attention import attention
from diffeq_nnx.kernels.attention.shapes import Shape
from launch import gpus, programs

compiles_for_gpus = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2) or not importlib.util.find_spec("jax_cuda13_plugin"),
  reason="needs jax 0.11.2 and the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)


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


def lower_gradients(shape: Shape, dtype: str, device: Any, implementation: str, **options: Any) -> jax.stages.Lowered:
  """The gradients of q, k and v, for a device that is not here; under shard_map, so that the kernel knows which."""
  # an axis of the mesh that has a name of the grid's, as some programs have
  mesh = jax.sharding.Mesh(np.array([device]), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
  everywhere = jax.sharding.PartitionSpec()
  array = lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype, sharding=jax.sharding.NamedSharding(mesh, everywhere))
  q, k = (
    array(shape.batch, shape.length, heads, shape.head_dim, dtype=dtype) for heads in (shape.heads, shape.kv_heads)
  )
  segments = (array(shape.batch, shape.length, dtype=jnp.int32),) if shape.documents else ()
  options |= dict(window=shape.window, logits_soft_cap=shape.logits_soft_cap, implementation=implementation)

  def loss(q, k, v, segment_ids=None):
    return attention(q, k, v, segment_ids=segment_ids, **options).astype(jnp.float32).sum()

  gradients = jax.grad(loss, (0, 1, 2))
  function = jax.shard_map(gradients, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
  platform = "tpu" if device.platform == "tpu" else "cuda"
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(function).trace(q, k, k, *segments).lower(lowering_platforms=(platform,))


@functools.cache
def machine_code(width: int, implementation: str = "pallas_gpu", **changes: Any) -> list[MachineCode]:
  """The kernels of causal attention at 2048 positions and four heads, two of keys: forward, then backward.

  Raises:
    SystemExit: they don't compile.
  """
  shape = dataclasses.replace(Shape(1, 2048, 4, 2, width), **changes)
  with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "bin").mkdir()
    (pathlib.Path(folder) / "bin" / "nvdisasm").symlink_to(str(shutil.which("nvdisasm")))
    variables = {
      "CUDA_ROOT": folder,  # where Mosaic GPU looks for nvdisasm
      "MOSAIC_GPU_DUMP_SASS_CTRL": "1",
      "MOSAIC_GPU_DUMP_PTXAS": "1",
      "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is taken from a cache is not dumped
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    words = [implementation, json.dumps(dataclasses.asdict(shape))]
    return parse(programs.compile_in_child(__file__, words, variables, f"attention at {shape} for an H100"))


# in the process that dumps machine code
if __name__ == "__main__":
  lower_gradients(Shape(**json.loads(sys.argv[2])), "bfloat16", gpus.devices_of("h100:1")[0], sys.argv[1]).compile()
