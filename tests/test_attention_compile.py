"""The kernels through the real compilers, for chips that are not here: forward and backward, at the named shapes.

TPU: needs the libtpu wheel, which holds the compiler; .ci/run installs it. GPU: needs jax 0.11.2 or later and the
wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version.
"""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.kernels.attention import attention
from diffeq_nnx.kernels.attention.shapes import SHAPES

pytestmark = pytest.mark.usefixtures("optimizations")

# what the compiler asks of a GPU that is not there: an H100 SXM, from its data sheet and CUDA's device query
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
}
"""


@functools.cache
def tpu(topology: str):
  """One device of a TPU."""
  from jax.experimental import topologies

  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]


@functools.cache
def gpu():
  """An H100."""
  from jax.experimental import topologies

  return topologies.get_topology_desc(
    topology_name="1x1x1", platform="cuda", topology="1x1x1", target_config=H100
  ).devices[0]


def gradients_and_inputs(name: str, dtype: str, sharding, implementation: str):
  """A function for the gradients of q, k and v at a named shape, and the shapes of its arguments."""
  shape = SHAPES[name]
  array = lambda *size, dtype=dtype: jax.ShapeDtypeStruct(size, dtype, sharding=sharding)
  q = array(shape.batch, shape.length, shape.heads, shape.head_dim)
  k = array(shape.batch, shape.length, shape.kv_heads, shape.head_dim)
  segments = (array(shape.batch, shape.length, dtype=jnp.int32),) if shape.documents else ()

  def loss(q, k, v, *segments):
    return (
      attention(
        q,
        k,
        v,
        window=shape.window,
        segment_ids=segments[0] if segments else None,
        logits_soft_cap=shape.logits_soft_cap,
        implementation=implementation,
      )
      .astype(jnp.float32)
      .sum()
    )

  return jax.grad(loss, (0, 1, 2)), (q, k, k, *segments)


# compiled by default: each chip once, both dtypes, and documents, a window and a wide head with a soft cap
TPUS = {
  ("odd_length", "float32", "v4:2x2x2"),
  ("packed_documents", "bfloat16", "v5e:2x4"),
  ("mistral_window", "bfloat16", "v5p:2x2x2"),
  ("gemma_head_256", "bfloat16", "v6e:2x4"),
}
CHIPS = [
  *((name, "bfloat16", topology) for name in SHAPES for topology in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")),
  *(("odd_length", "float32", topology) for topology in ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4")),
  *((name, "bfloat16", "v4:2x2x2") for name in ("gpt_small", "llama1b", "packed_documents")),
]
slow = pytest.mark.slow(reason="the TPU compiler takes seconds for each shape and chip; four of them run by default")


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the TPU compiler: pip install libtpu")
@pytest.mark.parametrize(
  "name,dtype,topology", [pytest.param(*case, marks=() if case in TPUS else slow) for case in CHIPS]
)
def test_forward_and_backward_compile_for_tpus(name, dtype, topology):
  function, inputs = gradients_and_inputs(name, dtype, jax.sharding.SingleDeviceSharding(tpu(topology)), "pallas_tpu")
  compiled = jax.jit(function).trace(*inputs).lower(lowering_platforms=("tpu",)).compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2  # forward and backward
  shape = SHAPES[name]
  if shape.length >= 2048:  # the scores are nowhere whole
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shape.batch * shape.heads * shape.length**2


@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2) or not importlib.util.find_spec("jax_cuda13_plugin"),
  reason="needs jax 0.11.2 and the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)
@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_backward_compile_for_an_h100(name):
  mesh = jax.sharding.Mesh(np.array([gpu()]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  everywhere = jax.sharding.PartitionSpec()
  function, inputs = gradients_and_inputs(name, "bfloat16", jax.sharding.NamedSharding(mesh, everywhere), "pallas_gpu")
  # under shard_map, so that the kernel knows which device it is for
  function = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = jax.jit(function).trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
  kernels = 3 if SHAPES[name].head_dim <= 128 else 4  # forward, dQ, dK and dV, these two apart for wide heads
  assert compiled.as_text().count('custom_call_target="mosaic_gpu') == kernels
