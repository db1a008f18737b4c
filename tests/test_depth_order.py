"""Models with model.depth_order: fewer steps are the first of it, also discretized and exported."""

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.analysis import ranking
from diffeq_nnx.config import LoraConfig, TimeConfig
from diffeq_nnx.depth.discretization import discretized_config
from diffeq_nnx.depth.trained import list_num_steps
from diffeq_nnx.exporting import importing
from diffeq_nnx.jobs import rank_steps
from diffeq_nnx.jobs.deriving import derive_config
from diffeq_nnx.model import grids, integration, vector_fields
from diffeq_nnx.model.attention_context import pack
from diffeq_nnx.model.parameters import params_of, path_names
from diffeq_nnx.model.solvers import weight_times
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.training.loss import chunked_cross_entropy
from diffeq_nnx.training.step import init_state, loss_and_gradients, make_train_step
from tests.conftest import change, equal, moved_instance, random_batch, small_config, small_model, told, weights_of
from tests.test_discretize import TOKENS_2x12, logits
from tests.test_export import ONE_EPS, load, make
from tests.test_import import torch_logits

ORDER, UNEVEN = (2, 0, 3, 1), (0.3, 1.7, 0.9, 0.6)
MEAN = TimeConfig(sinusoidal_dim=6, time_embed_dim=5, weights_at="mean", scale=6.0)
MIDDLE = dataclasses.replace(MEAN, weights_at="middle")
STORED = {"weights": "stored", "step_sizes": UNEVEN}


def ordered(**changes):
  return small_model(**{"num_steps": 4, "depth_order": ORDER, **changes})


def read(folder, name):
  return json.loads((pathlib.Path(folder) / name).read_text())


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("changes", [{"lora": LoraConfig(2)}, {"solver": "heun", "step_sizes": UNEVEN}])
def test_a_train_step_leaves_weights_of_which_it_has_no_gradient_as_they_are(name, changes):
  """And their moments, though earlier steps gave them momentum, and decay applies to the others."""
  config = small_config(ordered(weights="stored", **changes))
  config = change(config, optimizer=dict(name=name, weight_decay=0.1))
  batch, step = random_batch(config), make_train_step(config)
  state, _ = step(init_state(config), batch, 4)
  state, _ = step(state, batch, 4)  # adapters have gradients after the first step
  grid, learned = grids.make_grid(config.model, 2), lambda state: {**state["params"], "moments": state["opt_state"]}
  _, gradients = loss_and_gradients(config, grid, state["params"], batch, state["key"], state["frozen"])
  sets = zip(*(abs(leaf).reshape(len(leaf), -1).max(1) for leaf in jax.tree.leaves(gradients["weight_source"])))
  unused = [number for number, largest in enumerate(sets) if max(largest) == 0]
  before, after = jax.device_get(learned(state)), jax.device_get(learned(step(state, batch, 2)[0]))
  assert unused
  for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
    if "weight_source" in (names := path_names(path)):
      moved = {number for number in range(len(old)) if not np.array_equal(old[number], new[number])}
      assert moved and moved.isdisjoint(unused), names


def test_what_an_order_or_stored_weights_change_about_depths_is_told(capsys):
  given = small_config(small_model(num_steps=4), step_counts=(2, 3), draw_from=0.5, self_distillation=True)
  rank_steps._warn_of_even_steps(given)
  rank_steps._warn_of_even_steps(small_config(ordered(), step_counts=(2, 3)))
  made = derive_config(given, discretized_config(given.model), known=small_config(given.model))
  assert list_num_steps(made) == [4]  # nothing is drawn
  derive_config(given, discretized_config(given.model), known=given)  # nobody asked for these
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 3 and "was trained at 2, 3 even steps" in lines[0]
  assert "train.step_counts=(2, 3): becomes ()" in lines[1] and "self_distillation=True: becomes False" in lines[2]
  for model, kept in ((small_model(num_steps=4), ((), (), None)), (ordered(), ((2, 4), (5,), 2))):
    grows = change(small_config(model, step_counts=(2, 4), step_schedule=(5,)), eval=dict(num_steps=2))
    made = derive_config(grows, discretized_config(model))
    assert (made.train.step_counts, made.train.step_schedule, made.eval.num_steps) == kept
  shorter = derive_config(grows, discretized_config(ordered(), 3))
  assert shorter.train.step_counts == (2, 3) and not shorter.train.step_schedule  # its own depth is trained too


# grids, weights and states


def test_fewer_steps_are_among_more_and_each_keeps_its_size_and_the_times_of_its_weights():
  ways = config_lib.choices("model.time.weights_at")
  for solver, way, sizes in itertools.product(("euler", "leapfrog", "ralston", "rk4"), ways, ((), UNEVEN)):
    model = ordered(solver=solver, step_sizes=sizes, time=dataclasses.replace(MEAN, weights_at=way))
    whole, own, before = grids.make_grid(model), weight_times(model), set()
    assert whole == grids.make_grid(dataclasses.replace(model, depth_order=()))
    for n in range(1, 5):
      grid = grids.make_grid(model, n)
      kept, times = list(grid.kept_S), weight_times(model, grid)
      assert before < {*kept} == {*ORDER[:n]} and kept == sorted(kept) and grid.num_steps == n
      assert grid.dts == tuple(whole.sizes[step] for step in kept) and grid.edges == whole.edges
      for found, expected in ((times.points_UxQ, own.points_UxQ), (times.shares_UxQ, own.shares_UxQ)):
        np.testing.assert_array_equal(found[times.index_SxN], expected[own.index_SxN[kept]])
      assert len(times.points_UxQ) == len(np.unique(own.index_SxN[kept]))  # no set that no step uses
      before = {*kept}
    assert grids.make_grid(model, 6).dts == (model.total_time / 6,) * 6
  stored = discretized_config(ordered(horizon=4.0), step_sizes=(1.0, 3.0))  # of the whole model
  assert grids.make_grid(stored) == grids.Grid((0.0, 0.25, 1.0), (1.0, 3.0)) and stored.depth_order == ()


@jax.jit
def state_of(model, weights):
  """The state over the grid of the weights."""
  return model.hidden(jnp.asarray(TOKENS_2x12), weights)


@pytest.mark.parametrize("solver,changes", [("heun", {"time": MIDDLE, "horizon": 2.0}), ("leapfrog", STORED)])
def test_a_step_of_size_0_is_as_if_it_were_not_there(solver, changes):
  model = moved_instance(ordered(solver=solver, **changes))
  own, batch = weights_of(model), {"inputs": TOKENS_2x12, "targets": np.roll(TOKENS_2x12, -1, 1)}
  weights, stored = weights_of(model, model.grid(2)), diffeq_nnx.discretize(model, 2)
  state_BxLxD, sizes_S = state_of(model, weights), np.asarray(weights.grid.sizes)
  np.testing.assert_array_equal(state_BxLxD, state_of(stored, weights_of(stored)))
  loss = jax.jit(chunked_cross_entropy)(state_BxLxD, model.unembedding(), batch["targets"], np.ones((2, 12)))
  found = ranking.measure(model.config, params_of(model), own, batch, sizes_S, np.full(4, 4), 1)
  # another program, which skips steps of a traced size: a CPU may fuse a product and a sum in it, and then rounds once
  np.testing.assert_array_max_ulp(found.losses_S[0], loss, 4)
  assert found.num_tokens == 24 and ((np.asarray(found.turns_S) > 0) == (sizes_S > 0)).all()
  tokens_BxL, context = pack(jnp.asarray(TOKENS_2x12), None, None)
  of_set = lambda u: jax.tree.map(lambda leaf: leaf[u], weights.sets)
  unrolled = [of_set(u) for u in range(len(model.times(weights.grid).points_UxQ))]
  run = jax.jit(lambda sets: model.hidden(tokens_BxL, GridWeights(sets, weights.grid), context=context))
  equal(run(unrolled), state_BxLxD, 1e-5)  # as decoding computes it
  if solver == "leapfrog":  # which steps from two states
    return
  carry, field = model.embed(tokens_BxL), vector_fields.BoundField(model.field, context)
  sets, dts_S, keys_S = integration.links_of(model.solver, own, jnp.float32, jax.random.key(0))
  advance = integration.advance_of(model.solver, own.grid)
  step = jax.jit(lambda dts_S: advance(field, carry, jax.tree.map(lambda leaf: leaf[1], (sets, dts_S, keys_S))))
  np.testing.assert_array_equal(step(0 * dts_S), carry)  # computed, and of size 0
  assert np.any(step(dts_S) != carry)


# discretizing


@pytest.mark.parametrize(
  "solver,changes",
  [
    ("euler", {"weights": "stored", "lora": LoraConfig(2, targets="qkv|up")}),
    ("rk4", {"weights": "stored", "time": MIDDLE, "step_sizes": (*UNEVEN, 0.1)}),
    ("euler", {"time": MEAN, "horizon": 0.7}),
  ],
)
def test_discretizing_in_two_turns_is_discretizing_once(solver, changes):
  model = moved_instance(ordered(num_steps=5, depth_order=(2, 0, 4, 3, 1), solver=solver, **changes))
  four, once = (diffeq_nnx.discretize(model, n) for n in (4, 3))
  assert (four.config.depth_order, once.config.depth_order) == ((1, 0, 3, 2), (1, 0, 2))
  three = diffeq_nnx.discretize(four, 3)
  assert three.config == once.config and three.grid().dts == model.grid(3).dts
  equal(params_of(three), params_of(once))
  equal(weights_of(four, four.grid(3)).sets, weights_of(once).sets)
  equal(weights_of(model, model.grid(3)).sets, weights_of(once).sets, 1e-6)


def test_stored_weights_that_neighbors_share_are_told_and_those_in_the_middle_work():
  config = ordered(weights="stored", solver="heun")
  line = told(lambda: discretized_config(config, 5))
  assert "stored, for its own 4 steps" in line and "--job=rank_steps" not in line
  line = told(lambda: discretized_config(config, 2))
  assert line.startswith("num_steps=2: ") and line.endswith("train with model.time.weights_at=middle")
  assert discretized_config(dataclasses.replace(config, time=MIDDLE), 2).depth_order == (1, 0)
  assert discretized_config(dataclasses.replace(config, depth_order=(2, 1, 0, 3)), 2).depth_order == (1, 0)  # neighbors


# other libraries


@pytest.mark.parametrize(
  "changes,form", [({"solver": "sequential", **ONE_EPS, **STORED}, "hf"), ({"solver": "euler", **STORED}, "hf_code")]
)
def test_the_order_goes_with_an_exported_model_and_back_and_one_that_can_t_be_is_one_line(changes, form, tmp_path):
  model, out = make(ordered(field="llama", **changes)), tmp_path / "out"
  result = diffeq_nnx.export_hf(model, str(out), num_steps=3, form=form)
  order, known = discretized_config(model.config, 3).depth_order, read(out, "config.json")
  assert known["depth_order"] == list(order)
  if form == "hf_code":
    return
  assert result["architecture"] == "LlamaForCausalLM"
  equal(torch_logits(load(result)), logits(model, 3), 1e-5)
  back = diffeq_nnx.import_hf(str(out))
  assert back.config.depth_order == order
  equal(logits(back, 2), logits(model, 2), 1e-5)
  lists = [[0, 0, 1], [0, 0], [1, 2, 3], ["0", "1", "2"], [2.0, 1.0, 0.0], [[0, 1, 2]], [0, None]]
  for wrong in [*lists, "210", 2, True, {"0": 1}]:
    (out / "config.json").write_text(json.dumps({**known, "depth_order": wrong}))
    told(lambda: importing.read(str(out)))
  for of_others in (None, [1, 0], [3, 1, 0, 2]):  # the last two as programs leave it that add or remove layers
    (out / "config.json").write_text(json.dumps({**known, "depth_order": of_others}))
    assert importing.read(str(out))[0].depth_order == ()
