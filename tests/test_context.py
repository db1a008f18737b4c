"""Sequences split over devices: the order of their chunks, ring attention, and a train step that it doesn't change."""

from tests.conftest import on_eight_devices

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.kernels.attention import attention, ring_attention
from diffeq_nnx.model.grids import make_grid
from diffeq_nnx.parallel import context, sharding
from diffeq_nnx.training.step import init_state, loss_and_gradients, make_eval_step, make_generate, state_shardings
from tests.conftest import packed_batch, small_config, small_model

# a train step of Llama's block in float32, with documents and micro-batches; of GPT-2's, with masks: test_sharding.py

def found(config, devices, **sizes):
  mesh = sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:devices])
  sharding.check(config, mesh)
  with jax.set_mesh(mesh):
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    batch = sharding.Share(mesh, config.train.batch_size).place(packed_batch(config))
    grid = make_grid(config.model)
    step = jax.jit(lambda params, batch: loss_and_gradients(config, grid, params, batch, state["key"]))
    trained = step(state["params"], batch)
    masked = {**batch, "mask": jnp.ones(batch["inputs"].shape, "float32")}
    weights = make_generate(config, 3)(state["params"])
    total = make_eval_step(config, mesh)(state["params"], weights, masked)
    return jax.device_get((trained, total))

model = small_model(field="llama", embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, num_steps=2, seq_len=48,
                    vocab_size=40)
config = small_config(model, batch_size=4, remat="full", device_batch_size=1)
one, eight = found(config, 1), found(config, 8, data=2, context=4)
jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max()), one, eight)

# ring attention in float64: on three devices with documents in a window, and on four; each has an early and a late
# chunk, of 4 and of 3 positions
jax.config.update("jax_enable_x64", True)
L, rng = 24, np.random.default_rng(0)
q, k, v, cotangent = (jnp.asarray(rng.normal(size=(2, L, heads, 8))) for heads in (4, 2, 2, 4))
segments = jnp.asarray(np.sort(rng.integers(0, 4, size=(2, L)), 1))
for n, of, cap, window in ((3, segments, 3.0, 10), (4, None, None, None)):
  mesh = sharding.make_mesh(MeshConfig(context=n), jax.devices()[:n])
  split = PartitionSpec(None, "context")

  def around(q, k, v):
    ring = functools.partial(ring_attention, axis_name="context", window=window, logits_soft_cap=cap)
    arrays = (q, k, v) if of is None else (q, k, v, of)
    merge = lambda x: jax.vmap(context.zigzag, -1, -1)(x.reshape(2, L, -1)).reshape(x.shape)
    arrays = [merge(x) if x.ndim > 2 else context.zigzag(x) for x in arrays]
    function = lambda q, k, v, segments=None: ring(q, k, v, segments)
    out = jax.shard_map(function, in_specs=(split,) * len(arrays), out_specs=split, check_vma=False)(*arrays)
    return context.restore_order(out.reshape(2, L, -1)).reshape(q.shape)

  with jax.set_mesh(mesh):
    assert context.num_parts(L) == n and context.num_parts(L + 1) == 1
    tokens = jnp.arange(2 * L).reshape(2, L)
    moved = jax.jit(lambda x: (context.zigzag(x), context.restore_order(context.zigzag(x)[..., None])[..., 0]))(tokens)
    first = sorted([*np.asarray(moved[0])[0, : L // n]])
    assert first == [*range(L // (2 * n)), *range(L - L // (2 * n), L)] and (moved[1] == tokens).all()
    out, pull = jax.vjp(jax.jit(around), q, k, v)
    gradients = jax.jit(pull)(cotangent)
  alone = functools.partial(attention, segment_ids=of, window=window, logits_soft_cap=cap, implementation="reference")
  expected, pull = jax.vjp(alone, q, k, v)
  for one, other in zip((out, *gradients), (expected, *pull(cotangent))):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
"""


def test_a_sequence_over_devices_has_the_loss_and_gradients_of_one_device_to_1e_5_and_the_ring_to_1e_12():
  on_eight_devices(PROGRAM)
