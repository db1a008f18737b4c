"""Sequences split over devices: the order of their chunks, and ring attention. For train steps see test_sharding.py."""

from tests.conftest import on_eight_devices

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.kernels.attention import attention, ring_attention
from diffeq_nnx.model import attention_context as context
from diffeq_nnx.parallel import sharding

# on three devices with documents in a window, and on four; each has an early and a late chunk, of 4 and of 3 positions
jax.config.update("jax_enable_x64", True)
L, rng = 24, np.random.default_rng(0)
q, k, v, cotangent = (rng.normal(size=(2, L, heads, 8)) for heads in (4, 2, 2, 4))
segments = np.sort(rng.integers(0, 4, size=(2, L)), 1)

def with_gradients(function):
  def both(q, k, v, cotangent):
    out, pull = jax.vjp(function, q, k, v)
    return out, *pull(cotangent)

  return jax.jit(both)(q, k, v, cotangent)

for n, of, cap, window in ((3, segments, 3.0, 10), (4, None, None, None)):
  mesh = sharding.make_mesh(MeshConfig(context=n), jax.devices()[:n])
  split = PartitionSpec(None, "context")

  def around(q, k, v):
    ring = functools.partial(ring_attention, axis_name="context", window=window, logits_soft_cap=cap)
    arrays = (q, k, v) if of is None else (q, k, v, jnp.asarray(of))
    merge = lambda x: jax.vmap(context.zigzag, -1, -1)(x.reshape(2, L, -1)).reshape(x.shape)
    arrays = [merge(x) if x.ndim > 2 else context.zigzag(x) for x in arrays]
    function = lambda q, k, v, segments=None: ring(q, k, v, segments)
    out = jax.shard_map(function, in_specs=(split,) * len(arrays), out_specs=split, check_vma=False)(*arrays)
    return context.restore_order(out.reshape(2, L, -1)).reshape(q.shape)

  with jax.set_mesh(mesh):
    assert context.num_parts(L) == n and context.num_parts(L + 1) == 1
    tokens = np.arange(2 * L).reshape(2, L)
    moved = jax.jit(lambda x: (context.zigzag(x), context.restore_order(context.zigzag(x)[..., None])[..., 0]))(tokens)
    first = sorted(np.asarray(moved[0])[0, : L // n])
    assert first == [*range(L // (2 * n)), *range(L - L // (2 * n), L)] and (moved[1] == tokens).all()
    found = with_gradients(around)
  alone = functools.partial(attention, segment_ids=of, window=window, logits_soft_cap=cap, implementation="reference")
  for one, other in zip(found, with_gradients(alone), strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
"""


def test_ring_attention_has_the_values_and_gradients_of_one_device_to_1e_12():
  on_eight_devices(PROGRAM)
