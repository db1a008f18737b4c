"""The train step: accumulation, decay, step counts, and that it learns."""

import dataclasses
import functools
import itertools

from flax.traverse_util import flatten_dict
import jax
import numpy as np
import pytest

from diffeq_nnx.config import OptimizerConfig, TimeConfig
from diffeq_nnx.model import grids
from diffeq_nnx.model.parameters import abstract_model, params_of
from diffeq_nnx.model.vector_fields import make_field
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training import step as step_lib
from diffeq_nnx.training.optimizer import MUON_RMS, make_optimizer, schedule
from diffeq_nnx.training.step import init_state, known_options, loss_and_gradients, make_train_step
from tests.conftest import PRESETS, masked_batch, moved_instance, packed_batch, random_batch, small_config, small_model


@functools.cache
def compiled(config):
  """Loss and gradients as a function of parameters and a batch."""
  grid = grids.uniform_grid(config.model.num_steps, config.model.total_time)
  return jax.jit(lambda p, b: loss_and_gradients(config, grid, p, b, jax.random.key(0)))


def gradients_of(config, batch):
  """Loss and gradients at moved parameters."""
  return compiled(config)(params_of(moved_instance(config.model)), batch)


@pytest.mark.parametrize("changes", [{}, {"field": "llama", "weights": "stored", "qkv_bias": True}])
def test_gradients_in_bfloat16_are_near_those_in_float32_also_of_what_all_tokens_share(changes):
  """Of the row of a frequent token and of biases a sum in bfloat16 would no longer grow."""
  wide = small_config(small_model(**changes), batch_size=1024)
  batch, params = random_batch(wide), params_of(moved_instance(wide.model))
  batch["inputs"] = np.where(np.arange(12) % 2, batch["inputs"], 3)
  narrow = small_config(small_model(**changes, dtype="bfloat16"), batch_size=1024)
  gradients = jax.device_get([compiled(config)(params, batch)[1] for config in (wide, narrow)])
  expected, found = (flatten_dict(of, sep="/") for of in gradients)
  size = lambda of: {path: np.linalg.norm(leaf) for path, leaf in of.items()}
  errors, sizes = size({path: found[path] - leaf for path, leaf in expected.items()}), size(expected)
  assert sum(errors.values()) < 0.1 * sum(sizes.values())
  row = expected["embedding"][3]
  assert np.linalg.norm(found["embedding"][3] - row) < 0.02 * np.linalg.norm(row)
  biases = {path: errors[path] / sizes[path] for path in errors if path.endswith("bias")}
  assert biases and max(biases.values()) < 0.03, biases


def test_micro_batches_have_the_losses_and_gradients_of_the_large_batch(x64):
  """With dropout and documents apart, however unevenly the counted targets lie."""
  config = small_config(small_model(dtype="float64", dropout=0.2), batch_size=8)
  in_parts = small_config(config.model, batch_size=8, device_batch_size=2)  # one of 4 has no counted target
  batch = {**packed_batch(config), "mask": masked_batch(config)["mask"]}
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
  jax.tree.map(near, gradients_of(in_parts, batch), gradients_of(config, batch))


def test_training_and_validation_keep_documents_apart_and_count_what_the_mask_says(x64):
  """Against the model's logits, which tests/test_model.py compares with those of each document alone."""
  config = small_config(small_model(field="llama", dtype="float64"), batch_size=2)
  model, batch = moved_instance(config.model), packed_batch(config)
  batch["mask"] = (np.random.default_rng(1).random((2, 12)) < 0.3).astype(np.float32)
  logits = jax.jit(lambda *of: model(of[0], segment_ids_BxL=of[1], positions_BxL=of[2]))
  log_q = jax.nn.log_softmax(logits(*(batch[name] for name in ("inputs", "segment_ids", "positions"))))
  picked = np.take_along_axis(np.asarray(log_q), batch["targets"][..., None], axis=-1)[..., 0]
  expected, params = -(batch["mask"] * picked).sum(), params_of(model)
  total, count = step_lib.make_eval_step(config)(params, step_lib.make_generate(config, 3)(params), batch)
  assert count == batch["mask"].sum()
  np.testing.assert_allclose(total, expected, rtol=1e-10)
  losses, _ = gradients_of(config, batch)
  np.testing.assert_allclose(losses["loss"], expected / count, rtol=1e-6)  # a float32 mask


def test_under_accumulation_the_generator_runs_once():
  """Its products stand outside the loop over micro-batches, however many there are."""

  def uses_of_basis(held):
    config = small_config(device_batch_size=held)
    params = jax.eval_shape(lambda: init_state(config))["params"]
    step = lambda p, b, k: loss_and_gradients(config, grids.uniform_grid(3, 3.0), p, b, k)
    equations = jax.make_jaxpr(step)(params, random_batch(config), jax.random.key(0)).jaxpr.eqns
    basis = (6, 24, 40)  # F of `up`: [T + 1, D, F]
    return [e.primitive.name for e in equations if any(v.aval.shape == basis for v in e.invars)]

  in_parts = uses_of_basis(1)
  assert uses_of_basis(4) == in_parts and in_parts and "scan" not in in_parts


def test_what_decays():
  def shrunk(preset, **more):
    optimizer = make_optimizer(OptimizerConfig(peak_rate=1.0, weight_decay=0.5, warmup_fraction=0.0, **more), 10)
    shapes = params_of(abstract_model(small_model(**PRESETS[preset])))
    for source, groups in shapes["weight_source"].items():
      if source in ("generator", "stored"):  # fewer of them take less time to compile
        shapes["weight_source"][source] = {name: groups[name] for name in ("up", "mlp_norm")}
    params = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(lambda params: optimizer.update(zeros, optimizer.init(params), params))(params)
    return {path for path, update in flatten_dict(updates, sep="/").items() if (update != 0).any()}

  assert shrunk("diffeq") == shrunk("diffeq", name="lion") == {"embedding", "positions"}
  assert shrunk("baseline") == {"embedding", "positions", "weight_source/stored/up/kernel"}
  for choice in ({"decay_generated": True}, {"name": "muon_weights"}):
    assert shrunk("diffeq", **choice) == {"embedding", "positions", "weight_source/generator/up/kernel"}


def test_the_learning_rate_warms_up_from_the_first_step_and_falls_to_a_tenth_at_the_last():
  """Of the run, or of the schedule if that has a length of its own; the first step of a short run has the peak."""
  rate = schedule(OptimizerConfig(peak_rate=2.0, warmup_fraction=0.1), 100)
  assert [float(rate(count)) for count in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
  assert float(rate(98)) > float(rate(99)) == pytest.approx(0.2)
  for steps, warmup in itertools.product((1, 2, 20), (0.0, 0.01)):
    assert schedule(OptimizerConfig(peak_rate=2.0, warmup_fraction=warmup), steps)(0) == pytest.approx(2.0)
  late = schedule(OptimizerConfig(peak_rate=2.0, warmup_fraction=0.99), 10)
  assert [float(late(count)) for count in (8, 9)] == pytest.approx([2.0, 0.2])
  fixed = OptimizerConfig(schedule_steps=20)
  for count in (0, 10, 19):
    assert schedule(fixed, 40)(count) == schedule(OptimizerConfig(), 20)(count)
  assert schedule(fixed, 40)(39) == pytest.approx(fixed.peak_rate * fixed.final_fraction)


def test_the_gradient_is_clipped_before_adam():
  optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0, weight_decay=0.0), 10)
  params, gradients = ({"embedding": np.full(4, value, np.float32)} for value in (0.0, 50.0))
  _, state = jax.jit(lambda params: optimizer.update(gradients, optimizer.init(params), params))(params)
  first_moment = next(s.mu for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
  assert np.linalg.norm(first_moment["embedding"]) == pytest.approx(0.1, rel=1e-3)  # (1 - b1) of a unit vector


def check_orthogonal(matrices):
  """Every matrix has singular values of like size, of which the smallest may stay so, and the size of an update."""
  values = np.linalg.svd(matrices, compute_uv=False)
  assert (values[..., 0] < 2 * values[..., values.shape[-1] * 3 // 4]).all()
  np.testing.assert_allclose(np.sqrt(np.square(matrices).mean((-2, -1))), MUON_RMS, rtol=0.2)


@pytest.mark.parametrize("field,preset,by_head", [("gpt", "baseline", True), ("llama", "diffeq", False)])
def test_muon_makes_each_matrix_of_a_block_orthogonal_and_leaves_the_rest_to_adam(field, preset, by_head):
  """Queries, keys and values apart, as the block reads them, with grouped heads."""
  model = small_model(field=field, num_heads=4, num_kv_heads=2, embed_dim=32, **PRESETS[preset])
  block, source = make_field(model), "generator" if preset == "diffeq" else "stored"
  rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: init_state(small_config(model)))["params"]
  gradients = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), shapes)
  updates = {}
  for name in ("muon", "adamw"):
    config = OptimizerConfig(name=name, peak_rate=1.0, weight_decay=0.0, clip_norm=1e9, muon_by_head=by_head)
    optimizer = make_optimizer(config, 1, block.specs(model))
    update = lambda gradients, optimizer=optimizer: optimizer.update(gradients, optimizer.init(gradients), gradients)
    updates[name], _ = jax.jit(update)(gradients)
  updates = jax.device_get(updates)
  weights = updates["muon"]["weight_source"][source]
  kernels = block.head_kernels(weights)
  for update in map(np.asarray, (kernels.query, kernels.key, kernels.value)):
    check_orthogonal(np.moveaxis(update, -2, -3) if by_head else update.reshape(*update.shape[:-2], -1))
  for name in ("out", "up", "down"):
    check_orthogonal(weights[name]["kernel"])
  muon, adam = (flatten_dict(updates[name], sep="/") for name in ("muon", "adamw"))
  assert muon.keys() == adam.keys()
  for path, update in muon.items():
    if not (f"/{source}/" in path and path.endswith("kernel")):
      np.testing.assert_allclose(update, adam[path], err_msg=path)


def test_muon_weights_changes_the_weights_of_each_step_by_an_orthogonal_matrix():
  config = OptimizerConfig(name="muon_weights", peak_rate=1.0, weight_decay=0.0, warmup_fraction=0.0, clip_norm=1e9)
  made = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape).astype("float32")
  e_UxT1, of_weights = made(0, 3, 6), made(1, 3, 8, 16)
  tree = lambda kernel: {"weight_source": {"generator": {"up": {"kernel": kernel}}}}
  optimizer = make_optimizer(config, 10, vectors=lambda params: {"up": e_UxT1})
  kernel_of = lambda updates: updates["weight_source"]["generator"]["up"]["kernel"]
  plain = make_optimizer(dataclasses.replace(config, name="muon"), 10)
  params, weights = tree(made(2, 6, 8, 16)), tree(of_weights)
  state, expected_state = optimizer.init(params), plain.init(weights)
  update, expected_update = jax.jit(optimizer.update), jax.jit(plain.update)
  for number in (1, 4):  # the second with momentum
    of_weights = made(number, 3, 8, 16)
    updates, state = update(tree(np.tensordot(e_UxT1.T, of_weights, 1)), state, params)
    expected, expected_state = expected_update(tree(of_weights), expected_state, weights)
    np.testing.assert_allclose(np.tensordot(e_UxT1, kernel_of(updates), 1), kernel_of(expected), atol=1e-4)


def test_the_time_embedding_learns_at_its_own_rate():
  """With muon_weights it stays unless a rate is set."""
  params = params_of(moved_instance(small_model(time=TimeConfig(embedding="learned", sinusoidal_dim=6))))
  source = params["weight_source"]
  source["generator"] = {"mlp_norm": source["generator"]["mlp_norm"]}  # a kernel would take seconds to compile
  gradients = jax.tree.map(lambda leaf: np.sin(np.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), params)

  def updates(time_rate):
    optimizer = make_optimizer(OptimizerConfig(name="muon_weights", time_rate=time_rate, warmup_fraction=0.0), 10)
    made = jax.jit(lambda params: optimizer.update(gradients, optimizer.init(params), params)[0])(params)
    return {path: float(leaf.ravel()[1]) for path, leaf in flatten_dict(made, sep="/").items()}

  full, quarter, unset = updates(1.0), updates(0.25), updates(None)
  of_time = {path for path in full if "time_mlp" in path or "frequencies_M" in path}
  assert len(of_time) == 5 and all(full.values())
  for path, value in full.items():
    assert quarter[path] == pytest.approx(0.25 * value if path in of_time else value), path
    assert unset[path] == pytest.approx(0 if path in of_time else value), path


def test_a_batch_is_learnt_and_one_without_counted_targets_before_it_has_no_loss_and_no_gradient():
  optimizer = OptimizerConfig(name="muon_weights", peak_rate=1e-2, warmup_fraction=0.0, weight_decay=0.0)
  config = small_config(steps=62, device_batch_size=2)
  config = dataclasses.replace(config, optimizer=optimizer)
  step, batch, ones = make_train_step(config), random_batch(config), np.ones((4, 12), np.float32)
  state = jax.jit(init_state, static_argnums=0)(config)
  for _ in range(2):
    state, metrics = step(state, {**batch, "mask": 0 * ones}, 3)
    assert (metrics["loss"], metrics["gradient_norm"], metrics["counted_tokens"]) == (0, 0, 0)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))
  losses = []
  for _ in range(60):
    state, metrics = step(state, {**batch, "mask": ones}, 3)
    losses.append(float(metrics["loss"]))
  assert metrics["counted_tokens"] == 48
  assert losses[0] == pytest.approx(np.log(31), rel=0.05)
  assert losses[-1] < 0.3 * losses[0]
  assert int(state["step"]) == 62


def test_an_option_that_the_compiler_lacks_is_said_and_left_out(monkeypatch, capsys):
  mesh = sharding.make_mesh(small_config().mesh, jax.devices()[:1])
  known_options.cache_clear()
  monkeypatch.setattr(step_lib, "TPU_OPTIONS", {"xla_cpu_enable_fast_math": False})
  assert known_options(mesh) == step_lib.TPU_OPTIONS
  known_options.cache_clear()
  monkeypatch.setattr(step_lib, "TPU_OPTIONS", {"xla_of_another_version": "1"})
  assert known_options(mesh) is None and "xla_of_another_version" in capsys.readouterr().err
  known_options.cache_clear()
