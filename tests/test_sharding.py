"""Where arrays live: the table of rules, meshes that can't be, and that the mesh changes no figure."""

import json
import types

import jax
import numpy as np
import pytest

from diffeq_nnx.config import MeshConfig
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training.step import init_state, state_shardings
from tests.conftest import on_eight_devices, small_config, small_model, told

MESH = {"slice": 1, "data": 2, "fsdp": 2, "context": 2, "tensor": 2}


@pytest.mark.parametrize(
  "axes,shape,expected",
  [
    (("embed", "mlp"), (32, 64), (("fsdp", "context"), "tensor")),
    (("mlp", "embed"), (64, 32), (("tensor", "fsdp", "context"), None)),  # the first axis takes both
    ((None, "heads", "embed"), (9, 64, 32), (None, ("tensor", "fsdp", "context"), None)),  # never over T
    (("vocab", "embed"), (50257, 32), (None, ("fsdp", "context"))),  # what doesn't divide stays whole
    (("batch", None, None), (16, 5, 32), (("slice", "data", "fsdp"), None, None)),
    (("position", "embed"), (7, 32), (None, ("fsdp", "context"))),
    (("batch", "context", None), (16, 12, 32), (("slice", "data", "fsdp"), "context", None)),
  ],
)
def test_the_rules(axes, shape, expected):
  assert tuple(sharding.partition(axes, shape, MESH)) == expected
  in_use = tuple(sharding.partition(axes, shape, MESH, sharding.SPLIT_IN_USE))
  assert "fsdp" not in str(in_use)


@pytest.mark.parametrize("field,weights", [("llama", "generated"), ("gpt", "stored"), ("llama", "shared")])
def test_every_large_parameter_and_its_moments_are_split_over_all_devices(field, weights):
  config = small_config(small_model(field=field, weights=weights, embed_dim=32, num_heads=4, mlp_dim=64, vocab_size=64))
  mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * 5)
  state, shapes = state_shardings(config, mesh), jax.eval_shape(lambda: init_state(config))
  moments = [part for part in state["opt_state"] if hasattr(part, "mu")]
  assert moments[0].mu == state["params"] == moments[0].nu
  leaves = jax.tree_util.tree_leaves_with_path(shapes["params"])
  for (path, leaf), place in zip(leaves, jax.tree.leaves(state["params"]), strict=True):
    name = jax.tree_util.keystr(path)
    if "kernel'" in name or name in ("['embedding']", "['head']"):
      assert np.prod(place.shard_shape(leaf.shape)) == leaf.size / 8, name
    if "generator" in name:
      assert place.shard_shape(leaf.shape)[0] == leaf.shape[0], name  # T is whole


def test_what_can_t_be_split_is_one_line():
  """Each mistake is mended before the next one is made."""
  mesh = types.SimpleNamespace(shape={"slice": 1, "data": 1, "fsdp": 5, "context": 5, "tensor": 3})
  model, train = {}, {}
  for mended, part in (
    ({}, "train.batch_size=4: must be a multiple of the 5 devices"),
    ({"batch_size": 5}, "mesh.tensor=3: must divide model.num_kv_heads=2"),
    ({"num_kv_heads": 3, "num_heads": 3}, "mesh.tensor=3: must divide model.mlp_dim=40"),
    ({"mlp_dim": 42}, "mesh.fsdp=5: must divide model.embed_dim=24"),
    ({"embed_dim": 30}, "mesh.context=5: twice this must divide model.seq_len=12"),
    (
      {"seq_len": 30, "loss_chunks": 4},
      "train.loss_chunks=4: must divide the 6 positions of a sequence that a device holds (mesh.context=5)",
    ),
  ):
    for key, value in mended.items():
      (train if key in ("batch_size", "loss_chunks") else model)[key] = value
    assert part in told(lambda: sharding.check(small_config(small_model(**model), **train), mesh))
  keys = "mesh.data=3, mesh.fsdp=-1, mesh.context=1, mesh.tensor=1: "
  for sizes, start in ((MeshConfig(data=3), keys), (MeshConfig(data=2, fsdp=1, tensor=1), "")):
    assert f"{start}don't multiply to the 1 devices of a slice" in told(lambda: sharding.make_mesh(sizes))


# Five steps on eight virtual devices; run apart, since a process has its number of devices for good.
PROGRAM = """
import json
import jax
from diffeq_nnx.parallel import sharding
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.training.step import init_state, make_train_step, state_shardings
from tests.conftest import packed_batch, random_batch, small_config, small_model

def losses(devices, make_batch, held=None, adjoint="checkpointed", model={}, **sizes):
  sizes_of_model = dict(num_steps=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=40)
  config = small_config(small_model(dropout=0.1, **sizes_of_model, **model),
                        batch_size=8, device_batch_size=held, remat="full", adjoint=adjoint)
  mesh = sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:devices])
  with jax.set_mesh(mesh):
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    step, found = make_train_step(config, mesh), []
    share = sharding.Share(mesh, config.train.batch_size)
    for number in range(5):
      state, metrics = step(state, share.place(make_batch(config, number)), 3)
      found.append(float(metrics["loss"]))
  return found

reversible = dict(make_batch=random_batch, adjoint="reversible", model=dict(field="gpt", solver="leapfrog"))
print(json.dumps([losses(1, **reversible), losses(8, **reversible)]))
apart = dict(make_batch=packed_batch, model=dict(field="llama"))  # documents apart; on eight devices in two parts
print(json.dumps([losses(1, **apart), losses(8, **apart, held=1, data=2, fsdp=2, tensor=2)]))
"""


def test_one_device_and_eight_in_two_meshes_give_the_same_losses():
  """Within 2e-6 of the loss in float32, dropout included: sums over devices are added in another order."""
  for line in on_eight_devices(PROGRAM).splitlines():
    one, eight = json.loads(line)
    assert one[-1] != one[0]
    np.testing.assert_allclose(eight, one, rtol=2e-6)


MASKED = """
import jax, numpy as np
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.model.grids import make_grid
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training.step import init_state, loss_and_gradients, state_shardings
from diffeq_nnx.training.teacher import make_teacher
from tests.conftest import masked_batch, moved_instance, small_config, small_model
from diffeq_nnx.model.parameters import param_shardings, params_of

SIZES = dict(num_heads=4, num_kv_heads=2, vocab_size=40)
teaching = small_model(field="llama", weights="stored", embed_dim=16, mlp_dim=32, num_steps=2, seq_len=16, **SIZES)

def found(held, taught, devices, **sizes):
  config = small_config(small_model(embed_dim=32, mlp_dim=64, num_steps=2, **SIZES), batch_size=8,
                        device_batch_size=held, remat="full")
  mesh = sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:devices])
  with jax.set_mesh(mesh):
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    batch = sharding.Share(mesh, config.train.batch_size).place(masked_batch(config))
    params = jax.device_put(params_of(moved_instance(teaching)), param_shardings(teaching, mesh))
    teacher = make_teacher(teaching, params) if taught else None
    if taught and devices > 1:
      assert all(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(teacher.weights) if leaf.ndim > 2)
    grid = make_grid(config.model)
    step = jax.jit(lambda params, batch, teacher: loss_and_gradients(config, grid, params, batch, state["key"], None,
                                                                     teacher))
    return jax.device_get(step(state["params"], batch, teacher))

for taught, split in ((False, "context"), (True, "tensor")):
  one, eight = found(None, taught, 1), found(1, taught, 8, data=2, fsdp=2, **{split: 2})
  assert eight[0].keys() == one[0].keys() and len(one[0]) == (3 if taught else 1)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max()), one, eight)
"""


def test_uneven_masks_have_the_same_loss_and_gradients_on_one_device_and_eight_with_a_teacher_or_without():
  """In float32, with micro-batches, a sequence over devices, and the teacher's weights split like a model's."""
  on_eight_devices(MASKED)
