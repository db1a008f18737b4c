"""The TPU kernel through the real TPU compiler, for chips that are not here: forward and backward, named shapes.

Needs the libtpu wheel, which holds the compiler; .ci/run installs it.
"""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from diffeq_nnx.kernels.attention import attention
from diffeq_nnx.kernels.attention.shapes import SHAPES

pytest.importorskip("libtpu", reason="the TPU compiler is in the libtpu wheel: pip install libtpu")


@pytest.fixture(scope="module", autouse=True)
def optimizations():
  """The compiler as users have it; tests switch most optimizations off."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def device(topology: str):
  """One device of a chip that need not be there."""
  from jax.experimental import topologies
  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
@pytest.mark.parametrize("name,dtype", [*((name, "bfloat16") for name in SHAPES), ("odd_length", "float32")])
def test_forward_and_backward_compile(name, dtype, topology):
  shape, sharding = SHAPES[name], jax.sharding.SingleDeviceSharding(device(topology))
  array = lambda *size, dtype=dtype: jax.ShapeDtypeStruct(size, dtype, sharding=sharding)
  q = array(shape.batch, shape.length, shape.heads, shape.head_dim)
  k = array(shape.batch, shape.length, shape.kv_heads, shape.head_dim)
  segments = array(shape.batch, shape.length, dtype=jnp.int32) if shape.documents else None

  def loss(q, k, v, segments):
    return attention(q, k, v, window=shape.window, segment_ids=segments, logits_soft_cap=shape.logits_soft_cap,
                     implementation="pallas_tpu").astype(jnp.float32).sum()

  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, segments).lower(lowering_platforms=("tpu",)).compile()
  text = compiled.as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 2  # forward and backward, each one kernel
  if shape.length >= 2048:  # the scores are nowhere whole
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shape.batch * shape.heads * shape.length**2
