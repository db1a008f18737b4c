"""Compiles the real train step for TPUs or GPUs that are not here, and estimates its memory and time.

  python -m launch.compile_ahead --config=configs/llama1b.py --topology=v5p:2x2x2 [--num-slices=2] \
      [--set=mesh.tensor=2] [--save-hlo=step.txt] [--profile[=30]]
  python -m launch.compile_ahead --config=configs/llama1b.py --topology=h100:8

A topology of GPUs is h100 or h200 with the number of GPUs, or NODESxGPUS: h100:2x8. Nothing is run. TPUs need their
compiler: pip install 'jax[tpu]', which installs the libtpu that matches this jax. GPUs need jax 0.11.2 or later
(Python 3.12) and the wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version.

Prints, for one device: memory by kind and whether it fits, bytes sent to other devices in a step, and an estimate of
the step's time; with --profile, for TPUs, also where its cycles go: kinds of work, and the 30 (or so many) largest
items (launch/benchmarks/step_profile.py). Exit codes: 0 if it fits, 1 if it doesn't, 2 for an error in the command, 3
if the compiler or a disk fails.

On TPUs the estimate is the compiler's cycles for each part of the step, times the iterations of loops, at the chip's
clock, and for our kernels attention's matrix products at the chip's peak, as if a row were one document, and the time
to read and write the arrays of the others. GPUs' compiler has no such figures: there each instruction takes at least
its products at peak or its arrays at the memory's bandwidth (launch/benchmarks/roofline.py). Communication is bytes
divided by the links' bandwidth. Not included: waiting and other work of the kernels, latencies, contention for memory
and network, the host, reading data, evaluation and checkpoints; on GPUs also what cuBLAS, cuDNN and NCCL, which are
chosen or timed on the GPU itself, do differently, and the memory of CUDA and NCCL.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import os
import re
import sys
from typing import Any

os.environ |= {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TF_CPP_MIN_LOG_LEVEL": "3",  # of the compiler for GPUs
}

import jax
from jax.experimental import topologies

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.config import Config
from diffeq_nnx.depth.trained import find_costliest, list_computed
from diffeq_nnx.errors import RunError, UserError, first_line
from diffeq_nnx.kernels.attention import dispatch
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs.run import require_float64
from diffeq_nnx.training import flops
from diffeq_nnx.training.step import abstract_batch, abstract_state, make_train_step, num_microbatches
from launch import gpus, programs
from launch.benchmarks import hlo, roofline, step_profile


@dataclasses.dataclass(frozen=True)
class Chip:
  """Properties of a TPU chip, from Google's page of its version unless noted."""

  hbm: float  # GiB available to a program; from the compiler's message for a program that needs more
  clock: float  # GHz; the peak divided by the operations per cycle of its matrix units
  ici: float  # GB/s that it sends over all its links within a slice
  bandwidth: float  # GB/s that it reads and writes of its memory


CHIPS: dict[str, Any] = {
  "TPU v5 lite": Chip(15.75, 1.5, 200, 819),
  "TPU v5": Chip(95.74, 1.75, 600, 2765),
  "TPU v6 lite": Chip(31.25, 1.75, 400, 1640),
  **{gpu.kind: gpu for gpu in gpus.GPUS.values()},
}


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled train step, its config and its devices."""

  config: Config
  mesh: jax.sharding.Mesh
  compiled: jax.stages.Compiled

  @property
  def device_kind(self) -> str:
    """JAX's name of the device."""
    return self.mesh.devices.flat[0].device_kind

  @property
  def chip(self) -> Any:
    """The device: a `Chip` or a `gpus.Gpu`."""
    return CHIPS[self.device_kind]

  @property
  def on_gpu(self) -> bool:
    """Whether the devices are GPUs."""
    return isinstance(self.chip, gpus.Gpu)


class DoesNotFit(Exception):
  """The compiler's error for insufficient memory."""


def devices_of(topology: str, num_slices: int = 1) -> list:
  """The devices of a topology of GPUs, or of all slices of one of TPUs, e.g. v5p:2x2x2.

  Raises:
    UserError: no such topology, a version that `CHIPS` lacks, no compiler for it, or no slice.
  """
  if num_slices < 1:
    raise UserError(f"--num-slices={num_slices}: must be 1 or above")
  if gpus.is_gpu(topology):
    if num_slices > 1:
      raise UserError(f"--topology={topology}: slices are for TPUs; for nodes write h100:2x8")
    return gpus.devices_of(topology)
  try:
    slices = {"num_slices": num_slices} if num_slices > 1 else {}
    devices = list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **slices).devices)
  except Exception as error:  # libtpu raises bare RuntimeErrors
    raise UserError(
      f"--topology={topology}: {first_line(error, 200)}; write VERSION:SIZES, e.g. v5e:8x8 or "
      "v5p:2x2x2, and install the compiler with pip install 'jax[tpu]'"
    ) from error
  if devices[0].device_kind not in CHIPS:
    raise UserError(f"--topology={topology}: {devices[0].device_kind}; this program knows v5e, v5p, v6e, h100, h200")
  return devices


def attention_for(config: Config, platform: str) -> str:
  """The implementation of attention that compiles without the device; on GPUs our kernel also in place of cuDNN."""
  if config.model.attention == "reference" or config.model.dtype == "float64":
    return "reference"
  if platform == "tpu":
    if config.model.attention == "cudnn":
      raise UserError("model.attention=cudnn: is for GPUs; set it to auto")
    return "pallas_tpu"
  kernel = "pallas_gpu_deterministic" if config.model.attention == "pallas_deterministic" else "pallas_gpu"
  try:
    return dispatch.choose(kernel, dtype=jax.numpy.dtype(config.model.dtype), head_dim=config.model.head_size)[0]
  except ValueError:  # no such width or dtype
    return "reference"


def mesh_over(config: Config, topology: str, num_slices: int) -> jax.sharding.Mesh:
  """The config's mesh over the devices of a topology.

  Raises:
    UserError: as `devices_of`, a batch or model that can't be split over them, a teacher, or float64 without JAX's.
  """
  if config.train.teacher is not None:
    raise UserError("train.teacher: a teacher is not compiled here; set it to None, and leave room for its weights")
  require_float64(config.model)
  mesh = sharding.make_mesh(config.mesh, devices_of(topology, num_slices))
  sharding.check(config, mesh)
  return mesh


def compile_step(config: Config, mesh: jax.sharding.Mesh) -> Step:
  """Compiles the train step over all devices of the mesh.

  Raises:
    DoesNotFit: it needs more memory than a device has.
  """
  platform = "tpu" if mesh.devices.flat[0].platform == "tpu" else "cuda"
  attention = attention_for(config, platform)
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = make_train_step(config, mesh).trace(
      abstract_state(config, mesh), abstract_batch(config, mesh), find_costliest(config)
    )
    try:
      compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" in str(error):
        raise DoesNotFit(str(error)) from error
      raise
  return Step(config, mesh, compiled)


def state_bytes(config: Config, mesh: jax.sharding.Mesh) -> dict[str, int]:
  """Bytes of the state on one device, by kind, without padding."""
  state = abstract_state(config, mesh)
  size = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  kinds = {"parameters": state["params"], "optimizer": state["opt_state"]}
  return {kind: sum(map(size, jax.tree.leaves(arrays))) for kind, arrays in kinds.items()}


def sequences_held(config: Config, mesh: jax.sharding.Mesh) -> int:
  """Sequences that a device processes at a time."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return config.train.batch_size // num_microbatches(config) // sharding.num_shards("batch")


def memory_lines(step: Step) -> list[str]:
  """Memory of one device by kind, and the rest."""
  found = step.compiled.memory_analysis()
  state = state_bytes(step.config, step.mesh)
  peak = found.peak_memory_in_bytes
  kinds = {
    **state,
    "padding of these, tokens": found.argument_size_in_bytes - sum(state.values()),
    "activations and temporaries": peak - found.argument_size_in_bytes,
  }
  lines = [f"  {kind:<30} {size / 2**30:8.2f}" for kind, size in kinds.items()]
  left = step.chip.hbm - peak / 2**30
  fits = f"fits, {left:.2f} left" if left >= 0 else "does not fit"
  share = f", {gpus.memory_share():g} of the GPU's {step.chip.memory:g}" if step.on_gpu else ""
  return [
    "memory of one device, GiB",
    *lines,
    f"  {'peak':<30} {peak / 2**30:8.2f}   of {step.chip.hbm:.4g}{share}: {fits}",
  ]


def communication(program: hlo.Program) -> dict[str, tuple[int, int]]:
  """Bytes that a device sends in a step, and the number of operations, by kind."""
  total: dict[str, tuple[int, int]] = {}
  for one in program.collectives:
    size, count = total.get(one.kind, (0, 0))
    total[one.kind] = size + one.sent_bytes, count + one.times
  return total


def communication_lines(program: hlo.Program) -> list[str]:
  """The bytes that one device sends in a step, by kind, the largest first."""
  lines = [
    f"  {'to another slice' if kind == 'send' else kind:<30} {size / 1e9:8.3f}   in {count:,} operations"
    for kind, (size, count) in sorted(communication(program).items(), key=lambda item: -item[1][0])
  ]
  return ["sent by one device in a step, GB", *(lines or ["  nothing"])]


def kernel_seconds(step: Step, program: hlo.Program) -> float:
  """Seconds of attention at the chip's peak, 2 products forward and 5 backward, and of other kernels (rotary embedding)
  at the bandwidth of its memory.

  A product is over half of all pairs of positions that a device holds; where they are split over devices, also over all
  pairs of two chunks, each half as long.
  """
  config = step.config
  heads = config.model.num_heads // step.mesh.shape["tensor"]
  length = config.model.seq_len // step.mesh.shape["context"]
  # 2 operations per multiply-add, half of all pairs
  product = sequences_held(config, step.mesh) * heads * config.model.head_size * length**2
  seconds = 0.0
  for kernel in program.kernels:
    if "attention_" in kernel.name:
      of_chunks = step.mesh.shape["context"] > 1 and kernel.results[0].shape[1] < length
      pairs = product / 2 if of_chunks else product
      each = (5 if "backward" in kernel.name else 2) * pairs / peak_flops(step.device_kind)
    else:
      each = kernel.bytes / (1e9 * step.chip.bandwidth)
    seconds += kernel.times * each
  return seconds


def peak_flops(device_kind: str) -> float:
  """Operations per second of one device in bfloat16."""
  return 1e12 * next(peak for part, peak in flops.PEAK_TFLOPS.items() if part in device_kind)


def time_lines(step: Step, program: hlo.Program) -> list[str]:
  """The estimate, from all communication hidden behind computation to none of it."""
  config, lines = step.config, ["estimated step"]
  parts, sent, links, missing = times(step, program)
  compute = sum(seconds for seconds, _ in parts.values())
  fast, slow = max(compute, sent), compute + sent
  tokens = config.train.batch_size * config.model.seq_len
  computed = list_computed(config, find_costliest(config))
  model = sum(flops.model_flops(config, count) for count in computed) / step.mesh.size / peak_flops(step.device_kind)
  for name, (seconds, meaning) in parts.items():
    lines.append(f"  {f'{name}, s':<30} {seconds:8.3f}   {meaning}")
  return [
    *lines,
    f"  {'communication, s':<30} {sent:8.3f}   {links}",
    f"  {'step, s':<30} {fast:8.3f}   to {slow:.3f}: all communication hidden, or none",
    f"  {'tokens/s':<30} {tokens / fast:8,.0f}   to {tokens / slow:,.0f}",
    f"  {'utilization, %':<30} {100 * model / fast:8.1f}   to {100 * model / slow:.1f}",
    f"not included: {missing}, latencies, host, data, evaluation",
  ]


def times(step: Step, program: hlo.Program) -> tuple[dict[str, tuple[float, str]], float, str, str]:
  """Seconds of each part with what they mean, seconds of communication, its links, and what is not included."""
  chip, peak = step.chip, peak_flops(step.device_kind)
  if not step.on_gpu:
    parts = {
      "compute": (program.cycles / (1e9 * chip.clock), f"the compiler's cycles at {chip.clock} GHz"),
      "our kernels": (kernel_seconds(step, program), "at least: attention's products at peak, the rest's memory"),
    }
    sent = sum(size for kind, (size, _) in communication(program).items() if kind != "send") / (1e9 * chip.ici)
    return parts, sent, f"within a slice at {chip.ici} GB/s a chip", "waiting and other work of kernels, between slices"
  found = roofline.seconds(program, chip, peak)
  attention = f"at least: its products at peak, of {step.config.model.attention}"
  if step.config.model.attention == "reference":
    attention = "no kernel has it: within the other rows"
  per_node = sum(device.process_index == 0 for device in step.mesh.devices.flat)
  rest = f"at least: what memory at {chip.bandwidth} GB/s or lanes bound"
  parts = {
    "products": (found["products"], f"at least: what they bound, bfloat16 at {peak / 1e12:.0f} TFLOP/s"),
    "attention": (found["attention"], attention),
    "the rest": (found["memory"] + found["elementwise"], rest),
  }
  sent = roofline.communication_seconds(program.collectives, chip, per_node)
  links = f"at {chip.nvlink} GB/s a GPU, between nodes {chip.network}"
  return parts, sent, links, "autotuning, cuBLAS, cuDNN, other work of kernels, memory of CUDA and NCCL"


def advice(config: Config, mesh: jax.sharding.Mesh, needed: float | None) -> list[str]:
  """The reason that it doesn't fit, and a change that may help; `needed`: GiB, if known."""
  chip, held = CHIPS[mesh.devices.flat[0].device_kind], sequences_held(config, mesh)
  params, moments = (size / 2**30 for size in state_bytes(config, mesh).values())
  needs = f"needs {needed:.2f} GiB of {chip.hbm:.4g}" if needed else f"needs more than {chip.hbm:.4g} GiB"
  if needed and isinstance(chip, gpus.Gpu) and needed < 0.9 * chip.memory:
    share = math.ceil(100 * needed / chip.memory) / 100
    change = f"JAX takes {gpus.memory_share():g} of a GPU's memory; set XLA_CLIENT_MEM_FRACTION={share:g}"
  elif (params + moments) * 4 / 3 > 0.9 * chip.hbm:  # gradients are a third of parameters and moments
    change = "the state alone fills the device: use more devices, with a larger mesh.fsdp, mesh.context or mesh.tensor"
  elif held > 1:
    change = f"a device holds {held} sequences at a time; set train.device_batch_size={held // 2}"
  elif config.train.remat != "full":
    change = f"train.remat={config.train.remat!r}; set it to full"
  else:
    change = "a device holds one sequence at a time; raise mesh.context or mesh.tensor, or lower model.seq_len"
  return [f"does not fit: {needs}; parameters are {params:.2f} of it, the optimizer {moments:.2f}", f"change: {change}"]


def main(argv: list[str] | None = None) -> int:
  """Compiles, prints, and returns the exit code."""
  parser = programs.make_parser(__doc__, config=str, topology=str, num_slices=1, save_hlo=None)
  parser.add_argument("--profile", nargs="?", type=int, const=30, metavar="N")
  args = parser.parse_args(argv)
  if args.profile is not None and args.profile < 1:
    raise UserError(f"--profile={args.profile}: the number of items to print must be at least 1; 30 without a number")
  on_gpus = gpus.is_gpu(args.topology)
  if on_gpus and args.profile:
    raise UserError(f"--topology={args.topology}: profiles are for TPUs")
  config = config_lib.load(args.config, args.set)
  mesh = mesh_over(config, args.topology, args.num_slices)
  saving = functools.partial(files.writing, f"--save-hlo={args.save_hlo}", "name another file")
  if args.save_hlo:
    with saving():
      open(args.save_hlo, "a").close()  # a mistake is told before a compilation of minutes
  slices = "" if on_gpus else f"{args.num_slices} x "
  print(
    f"{args.config} on {mesh.size} x {mesh.devices.flat[0].device_kind} ({slices}{args.topology}), mesh "
    f"{sharding.describe(mesh)}, {config.train.batch_size} x {config.model.seq_len} tokens a step",
    flush=True,
  )
  try:
    step = compile_step(config, mesh)
  except DoesNotFit as error:
    sizes = re.search(r"Used ([\d.]+)G|temporaries \(([\d.]+)G\)", str(error))
    print("\n".join(advice(config, mesh, float(sizes[1] or sizes[2]) if sizes else None)))
    return 1
  text = step.compiled.as_text()
  program = hlo.Program(text)
  print("\n".join([*memory_lines(step), *communication_lines(program), *time_lines(step, program)]))
  if args.profile:
    clock, peak = 1e9 * step.chip.clock, peak_flops(step.device_kind)
    print("\n".join(step_profile.lines(program, clock, peak, kernel_seconds(step, program), args.profile)))
  if args.save_hlo:
    with saving(), open(args.save_hlo, "w", encoding="utf-8") as file:
      file.write(text)
  needed = step.compiled.memory_analysis().peak_memory_in_bytes / 2**30
  if step.on_gpu and needed > step.chip.hbm:  # this compiler does not refuse
    print("\n".join(advice(config, mesh, needed)))
    return 1
  return 0


def program(main: Callable[[], int]) -> None:
  """Ends the process with the exit code of `main`, or of its error, which is one line."""
  try:
    sys.exit(main())
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except RunError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(3)
  except jax.errors.JaxRuntimeError as error:
    print(f"error: the compiler failed: {first_line(error)}", file=sys.stderr)
    sys.exit(3)


if __name__ == "__main__":
  program(main)
