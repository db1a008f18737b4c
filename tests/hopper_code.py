"""Attention for devices that are not here, and what the compiler for an H100 remarks on its machine code.

The latter needs jax 0.11.2 or later, the wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version, and `nvdisasm`,
which CUDA's toolkit and the wheel of triton hold, on the PATH.
"""

import dataclasses
import importlib.util
import json
import pathlib
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

needs_libtpu = pytest.mark.skipif(
  not importlib.util.find_spec("libtpu"), reason="needs the TPU compiler: pip install 'jax[tpu]'"
)
compiles_for_gpus = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2) or not importlib.util.find_spec("jax_cuda13_plugin"),
  reason="needs jax 0.11.2 and the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)


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


def remarks(width: int, implementation: str, **changes: Any) -> str:
  """What ptxas says of the kernels of causal attention at 2048 positions and four heads, two of keys, and their dumps.

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
    return programs.compile_in_child(__file__, words, variables, f"attention at {shape} for an H100")


# in the process that dumps machine code
if __name__ == "__main__":
  lower_gradients(Shape(**json.loads(sys.argv[2])), "bfloat16", gpus.devices_of("h100:1")[0], sys.argv[1]).compile()
