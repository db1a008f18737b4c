"""GPUs that are not here: what the compiler asks of them, and what they can do."""

import dataclasses
import importlib.metadata
import os
import re

import jax
from jax.experimental import topologies

from diffeq_nnx.errors import UserError, first_line


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU on an HGX board, from NVIDIA's data sheets of the H100 SXM and the H200 SXM unless noted."""

  kind: str  # JAX's name of it
  memory: float  # GiB, as CUDA reports it (the H200's rounded down)
  bandwidth: float  # GB/s that it reads and writes of its memory
  nvlink: float = 450  # GB/s that it sends to GPUs of its node: half of the sheet's 900, which counts both directions
  network: float = 50  # GB/s to other nodes: a 400 Gb/s InfiniBand adapter, from the DGX H100's data sheet
  lanes: float = 33.5e12  # operations a second: half of the sheet's 67 TFLOP/s in float32, a multiply and an add each

  @property
  def hbm(self) -> float:
    """GiB that JAX gives to a program: a share of the memory, from the variable that JAX reads, or 0.75."""
    return self.memory * memory_share()

  @property
  def target(self) -> str:
    """What the compiler asks of the device; it chooses tiles by it."""
    return f"""
platform_name: "CUDA"
device_description_str: "{self.kind}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: {round(self.memory * 2**30)} memory_bandwidth: {round(1e9 * self.bandwidth)}
  l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
}}
"""


GPUS = {"h100": Gpu("NVIDIA H100 80GB HBM3", 79.1, 3352), "h200": Gpu("NVIDIA H200", 139.0, 4800)}


def memory_share() -> float:
  """The part of a GPU's memory that JAX gives to a program; raises UserError if the variable is not a number."""
  for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
    if text := os.environ.get(name):
      try:
        return float(text)
      except ValueError:
        raise UserError(f"{name}={text}: must be a number, as 0.75") from None
  return 0.75


def is_gpu(topology: str) -> bool:
  """Whether a topology is one of GPUs: VERSION:GPUS, or VERSION:NODESxGPUS."""
  return topology.partition(":")[0] in GPUS


def devices_of(topology: str) -> list:
  """The devices of nodes of GPUs, node by node, e.g. h100:8 or h100:2x8; a node is a process.

  Raises:
    UserError: no such topology, or no compiler.
  """
  sizes = re.fullmatch(r"(\w+):(?:([1-9]\d*)x)?([1-9]\d*)", topology)
  if not sizes or sizes[1] not in GPUS:
    raise UserError(f"--topology={topology}: write VERSION:GPUS or VERSION:NODESxGPUS, e.g. h100:8 or h200:2x8")
  installed = {wheel.name.replace("_", "-") for wheel in importlib.metadata.distributions()}
  if jax.__version_info__ < (0, 11, 2) or not {"jax-cuda13-plugin", "jax-cuda13-pjrt"} <= installed:
    raise UserError(
      f"--topology={topology}: compiling for GPUs needs jax 0.11.2 or later, with Python 3.12, and the wheels "
      f"jax-cuda13-plugin and jax-cuda13-pjrt of its version; this is jax {jax.__version__}"
    )
  try:
    shape = f"1x{sizes[2] or 1}x{sizes[3]}"  # slices x nodes x GPUs
    target = GPUS[sizes[1]].target
    found = topologies.get_topology_desc(topology_name=shape, platform="cuda", topology=shape, target_config=target)
    return list(found.devices)
  except Exception as error:  # the plugin raises bare RuntimeErrors
    raise UserError(f"--topology={topology}: {first_line(error, 200)}") from error
