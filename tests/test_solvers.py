"""Solvers: orders against an adaptive reference, tables against formulas, inverses, and what a pass asks for."""

import dataclasses
import functools

import diffrax
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.model import grids, integration, solvers, vector_fields
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build
from diffeq_nnx.model.solvers import SOLVERS, RungeKutta, Splitting
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.training import flops
from tests.conftest import moved_instance, small_config, small_model, weights_of

TOKENS_2x12 = np.random.default_rng(0).integers(31, size=(2, 12))
TABLE = {  # order, nodes, and the weight sets of six steps
  "euler": (1, (1,), 6),
  "sequential": (1, (1,), 6),
  "strang": (1, (0.5,), 6),
  "strang_mirrored": (1, (0.5,), 6),
  "midpoint": (2, (0.5,), 6),
  "heun": (2, (0, 1), 7),
  "ralston": (2, (0, 2 / 3), 12),
  "rk4": (4, (0, 0.5, 1), 13),
  "leapfrog": (2, (0.5,), 6),
}


def state(dtype: str) -> np.ndarray:
  """Some state, without compiling."""
  return np.random.default_rng(0).normal(size=(2, 12, 24)).astype(jnp.dtype(dtype))


def smooth(weights_at: str = "nodes", scale: float = 3.0, **changes):
  """A small model whose weights change slowly over depth."""
  time = dataclasses.replace(small_model().time, scale=scale, weights_at=weights_at)
  return small_model(**{"time": time, "horizon": 1.0, **changes})


def end(model: Model, solver: solvers.Solver, num_steps: int, x_BxLxD: jax.Array) -> jax.Array:
  """The state at the end of `num_steps` steps of a solver."""
  grid = model.grid(num_steps)
  weights = model.weight_source(grid.times(solver.nodes), jnp.dtype(model.config.dtype))
  field = vector_fields.BoundField(model.field)
  return integration.solve(solver, field, x_BxLxD, GridWeights(weights, grid), key=jax.random.key(0))


@functools.cache
def reference() -> tuple[Model, np.ndarray, np.ndarray]:
  """(a model in float64, a state, where diffrax takes it from t = 0 to 1 at a tolerance of 1e-12)."""
  model = moved_instance(smooth(dtype="float64"), seed=1)
  bound, x_BxLxD = vector_fields.BoundField(model.field), state("float64")

  def slope(t, x_BxLxD, _):
    times = grids.Times(t[None, None], np.ones((1, 1)), np.zeros((1, 1), int))
    weights = jax.tree.map(lambda leaf: leaf[0], model.weight_source(times, jnp.dtype("float64")))
    return bound(x_BxLxD, weights, jax.random.key(0))

  controller = diffrax.PIDController(rtol=1e-12, atol=1e-12)
  solve = lambda x: diffrax.diffeqsolve(
    diffrax.ODETerm(slope), diffrax.Dopri8(), 0.0, 1.0, 0.01, x, stepsize_controller=controller
  )
  return model, x_BxLxD, np.asarray(jax.jit(solve)(x_BxLxD).ys[0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_error_falls_with_the_solvers_order(solver, x64):
  """From 32 to 128 steps."""
  model, x_BxLxD, exact_BxLxD = reference()
  run = jax.jit(lambda x, n: end(model, SOLVERS[solver], n, x), static_argnums=1)
  coarse, fine = (np.abs(run(x_BxLxD, n) - exact_BxLxD).max() for n in (32, 128))
  assert np.log2(coarse / fine) / 2 == pytest.approx(TABLE[solver][0], abs=0.15)


def by_hand(name, f, x, w, h):
  """The formulas of the methods, `w` the weights at their nodes."""
  if name == "euler":
    return x + h * f(x, w[0])
  if name == "midpoint":
    return x + h * f(x + h / 2 * f(x, w[0]), w[0])
  if name == "heun":
    k = f(x, w[0])
    return x + h / 2 * (k + f(x + h * k, w[1]))
  if name == "ralston":
    k = f(x, w[0])
    return x + h * (k / 4 + 3 / 4 * f(x + 2 / 3 * h * k, w[1]))
  if name == "rk4":
    k1 = f(x, w[0])
    k2 = f(x + h / 2 * k1, w[1])
    k3 = f(x + h / 2 * k2, w[1])
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3, w[2]))
  a, m = (lambda x: f.attention(x, w[0], KEY)), (lambda x: f.feedforward(x, w[0], KEY))
  if name == "sequential":
    x = x + h * a(x)
    return x + h * m(x)
  first, second = (a, m) if name == "strang" else (m, a)
  x = x + h / 2 * first(x)
  x = x + h * second(x)
  return x + h / 2 * first(x)


KEY = 0.3


class Waves:
  """A field of sines, of which nothing is compiled; weights are numbers, and so is the key."""

  def attention(self, x, w, key=KEY):
    return jnp.sin(w * x + key)

  def feedforward(self, x, w, key=KEY):
    return jnp.cos(w * x - 2 * key)

  def __call__(self, x, w, key=KEY):
    return self.attention(x, w, key) + self.feedforward(x, w, key)


WEIGHTS = (0.4, 0.9, 1.7)


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "leapfrog"])
def test_a_step_is_the_formula_written_out(name, x64):
  solver, x, field = SOLVERS[name], jnp.asarray(state("float64")), Waves()
  weights = WEIGHTS[: len(solver.nodes)]
  stepped = solver.step(field, x, weights, jnp.float64(0.7), KEY)
  np.testing.assert_allclose(stepped, by_hand(name, field, x, weights, 0.7), rtol=0, atol=1e-13)
  assert np.abs(stepped - solver.step(field, x, weights, jnp.float64(0.7), KEY + 1)).max() > 0.1


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_takes_its_size_as_any_number(name):
  solver, x = SOLVERS[name], jnp.asarray(state("bfloat16"))
  weights = WEIGHTS[: len(solver.nodes)]
  stepped = lambda dt: solver.step(Waves(), solver.init(x), weights, dt, KEY)
  expected = stepped(jnp.float32(0.5))
  for dt in (0.5, np.float64(0.5), np.float32(0.5)):
    found = stepped(dt)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]


def test_leapfrog_is_the_two_step_midpoint_rule(x64):
  model, x, _ = reference()
  grid = model.grid(5)
  field = vector_fields.BoundField(model.field)

  def by_hand(x):
    weights = model.weight_source(grid.times((0.5,)), jnp.dtype("float64"))
    before, middle = x, x
    for i, dt in enumerate(grid.dts):
      one = jax.tree.map(lambda leaf: leaf[i], weights)
      before, middle = middle, before + 2 * dt * field(middle, one, jax.random.key(0))
    return (before + middle) / 2

  found = jax.jit(lambda x: end(model, SOLVERS["leapfrog"], 5, x))(x)
  np.testing.assert_allclose(found, jax.jit(by_hand)(x), rtol=0, atol=1e-13)


# what a pass asks for


@pytest.mark.parametrize("solver", SOLVERS)
def test_times_are_distinct_and_each_node_finds_its_own(solver):
  _, nodes, sets = TABLE[solver]
  sizes = (0.5, 1.0, 0.25, 0.75, 2.0, 1.5)
  assert SOLVERS[solver].nodes == nodes
  for grid in (grids.uniform_grid(6, 1.0), grids.uniform_grid(6, 4.0), grids.uneven_grid(sizes)):
    times = grid.times(nodes)
    assert len(times.times_U) == len(set(times.times_U)) == sets and (np.diff(times.times_U) > 0).all()
    starts, widths = np.asarray(grid.edges[:-1]), np.diff(grid.edges)
    expected_SxN = starts[:, None] + np.asarray(nodes) * widths[:, None]
    np.testing.assert_allclose(times.times_U[times.index_SxN], expected_SxN, rtol=0, atol=1e-15)
  np.testing.assert_allclose(np.diff(grids.uneven_grid(sizes).edges), np.asarray(sizes) / 6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_generator_runs_once_whatever_the_solver(solver):
  """One product with each F, for all times of all steps: as many as there are leaves."""
  config = smooth(solver=solver)
  model = jax.eval_shape(lambda: moved_instance(config))
  jaxpr = jax.make_jaxpr(lambda m: m.block_weights(m.grid(9)))(model).jaxpr
  combined = [equation for equation in jaxpr.eqns if equation.primitive.name.startswith("custom_vjp_call")]
  specs = jax.eval_shape(lambda m: m.block_weights(m.grid(9)), model)
  U = len(model.times(model.grid(9)).times_U)
  assert len(combined) == len(jax.tree.leaves(specs)) and {len(leaf) for leaf in jax.tree.leaves(specs)} == {U}
  assert sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns) == 2  # the MLPs' layers


@pytest.mark.parametrize("embedding, scale", [("fixed", 1000.0), ("learned", 3.0)])
def test_the_weights_of_a_coarse_step_are_the_mean_of_its_fine_steps(scale, embedding, x64):
  config = smooth("mean", scale, dtype="float64")
  model = moved_instance(
    dataclasses.replace(config, time=dataclasses.replace(config.time, embedding=embedding)), seed=1
  )
  sets_of = lambda grid: jax.tree.map(np.asarray, weights_of(model, grid).sets)
  coarse = sets_of(model.grid(3))
  for parts in (2, 5):
    fine = sets_of(model.grid(3 * parts))
    mean = jax.tree.map(lambda leaf: leaf.reshape(3, parts, *leaf.shape[1:]).mean(1), fine)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), mean, coarse)
  uneven = dataclasses.replace(grids.uneven_grid((2.0, 1.0)), weights_at="mean", radians=scale)
  wide = jax.tree.map(lambda leaf: leaf[0], sets_of(uneven))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:2].mean(0), rtol=0, atol=1e-6), wide, coarse)


@pytest.mark.parametrize("solver, place, time", [("euler", "end", 1.0), ("heun", "middle", 0.5), ("rk4", "end", 1.0)])
def test_weights_at_a_place_are_the_same_at_all_nodes(solver, place, time):
  times = moved_instance(smooth(place, solver=solver)).times()
  np.testing.assert_allclose(times.times_U, (np.arange(3) + time) / 3)
  assert (times.index_SxN == np.arange(3)[:, None]).all() and times.index_SxN.shape == (3, len(SOLVERS[solver].nodes))


def logits(model: Model, num_steps=None):
  return nnx.jit(lambda model: model(jnp.asarray(TOKENS_2x12), num_steps))(model)


@pytest.mark.parametrize("solver, weights_at", [("heun", "nodes"), ("leapfrog", "nodes"), ("euler", "mean")])
def test_discretized_equals_continuous(solver, weights_at):
  scale = 3000.0 if weights_at == "mean" else 3.0  # above the default, which a stored model's config has
  model = moved_instance(smooth(weights_at, scale, solver=solver, horizon=2.0), seed=3, scale=0.05)
  stored = diffeq_nnx.discretize(model, 5)
  np.testing.assert_allclose(logits(stored), logits(model, 5), rtol=0, atol=1e-5)
  uneven = diffeq_nnx.discretize(model, step_sizes=(0.5, 0.9, 0.6))
  generated = dataclasses.replace(model.config, step_sizes=(0.5, 0.9, 0.6), num_steps=3, horizon=None)
  again = build(generated, nnx.to_pure_dict(nnx.state(model)))
  np.testing.assert_allclose(logits(uneven), logits(again), rtol=0, atol=1e-5)


def test_held_time_equals_one_shared_set():
  held = dataclasses.replace(small_model().time, constant=True)
  model = moved_instance(small_model(solver="heun", time=held))
  one = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), weights_of(model).sets)
  shared = build(
    small_model(solver="heun", weights="shared"),
    nnx.to_pure_dict(nnx.state(model)) | {"weight_source": {"stored": one}},
  )
  np.testing.assert_allclose(logits(shared), logits(model), rtol=0, atol=1e-5)


def test_adapters_are_on_every_weight_set():
  stored = diffeq_nnx.discretize(moved_instance(smooth(solver="heun")))
  config = dataclasses.replace(stored.config, lora=config_lib.LoraConfig(rank=2))
  tuned = moved_instance(config)
  assert {len(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(tuned))["weight_source"])} == {4}
  merged = diffeq_nnx.discretize(tuned)
  assert merged.config == stored.config and set(nnx.to_pure_dict(nnx.state(merged))["weight_source"]) == {"stored"}
  np.testing.assert_allclose(logits(merged), logits(tuned), rtol=0, atol=1e-5)


def test_flops_count_the_evaluations():
  count = lambda solver: flops.model_flops(small_config(small_model(solver=solver)), 4) - head
  head = 3.0 * 2 * 31 * 24 * 4 * 12
  one = count("euler")
  assert one == count("sequential") == count("leapfrog") and count("heun") == 2 * one and count("rk4") == 4 * one
  assert count("strang") + count("strang_mirrored") == pytest.approx(3 * one)
  block = 2 * (24 * 8 * 6 + 24 * 24 + 2 * 24 * 40) + 4 * 12 * 24
  assert one == 3.0 * 4 * block * 4 * 12
  assert flops.generator_flops(small_model(solver="heun"), 4) == 5 / 4 * flops.generator_flops(small_model(), 4)


# undoing steps

QUICK_KEY = jax.random.key(3, impl="unsafe_rbg")  # it compiles in half the time of the default


def gradients(adjoint: integration.Adjoint, num_steps: int):
  """(a compiled function, its arguments: weights and other parameters); it gives the loss and both gradients."""
  model = moved_instance(smooth(solver="leapfrog", num_steps=num_steps, horizon=None, dropout=0.1), scale=0.05)
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  source = params.pop("weight_source")

  def loss(weights, rest):
    whole = build(model.config, {**rest, "weight_source": source})
    hidden = whole.hidden(jnp.asarray(TOKENS_2x12), weights, dropout_key=QUICK_KEY, adjoint=adjoint)
    return jnp.square(hidden.astype(jnp.float32)).sum(-1).mean() + hidden[:, :, 0].astype(jnp.float32).sum()

  arguments = weights_of(model), params
  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile(), arguments


def relative(a, b) -> float:
  """The largest relative difference of two trees of gradients, over leaves, by norm."""
  a, b = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree) for tree in (a, b))
  difference = lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y)
  return max(float(difference(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_solvers_that_cannot_be_are_told():
  """A name can be registered again for the same solver only; no other solver than leapfrog can be undone."""
  solvers.register("heun", RungeKutta(((), (1.0,)), (0.5, 0.5), (0.0, 1.0)))
  other = Splitting((("feedforward", 1.0), ("attention", 1.0)))
  config = small_config(small_model(), adjoint="reversible")
  for call, part in (
    (lambda: solvers.register("heun", other), "heun: is the name of a solver"),
    (lambda: solvers.register("mine", solvers.Leapfrog), "is not a Solver; pass an instance"),
    (lambda: Splitting((("attention", 0.5), ("feedforward", 1.0))), "must each add up to 1"),
    (lambda: RungeKutta(((), (0.5, 0.5)), (0.5, 0.5), (0.0, 1.0)), "row i of a must have i numbers"),
    (
      lambda: integration.make_adjoint(config),
      "train.adjoint=reversible: the steps of model.solver=euler can't be undone; those of leapfrog can; or set "
      "train.adjoint=checkpointed",
    ),
  ):
    with pytest.raises(ValueError) as error:
      call()
    assert part in str(error.value)


# with the compiler as users have it, from here on


@pytest.mark.parametrize("dtype, even", [("float32", False), ("bfloat16", True)])
def test_undoing_all_steps_gives_the_carries_before_them(dtype, even, optimizations):
  """48 steps from a small state; what a state lacks in its dtype is carried beside it, so nearly all bits agree."""
  model = moved_instance(smooth(solver="leapfrog", dtype=dtype, num_steps=48, horizon=None, dropout=0.2), scale=0.05)
  grid = model.grid() if even else grids.uneven_grid(np.random.default_rng(0).uniform(0.3, 1.7, 48).tolist())
  x = jnp.asarray(0.02 * state("float32"), dtype)
  links = jax.jit(lambda: integration.links_of(model.solver, model.block_weights(grid), x.dtype, QUICK_KEY))()
  advance = integration.advance_of(model.solver, grid)
  field = vector_fields.BoundField(model.field, dropout=vector_fields.Dropout(0.2, jnp.arange(2)))

  @jax.jit
  def there_and_back(x):
    last, carries = jax.lax.scan(lambda carry, one: (advance(field, carry, one), carry), model.solver.init(x), links)
    undo = lambda carry, one: (advance.undo(field, carry, one),) * 2
    return carries, jax.lax.scan(undo, last, links, reverse=True)[1]

  carries, undone = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), there_and_back(x))
  for (high, low), (high_undone, low_undone) in zip(carries, undone, strict=True):
    assert (high != high_undone).mean() < 1e-3
    error = np.linalg.norm(high_undone - high + low_undone - low) / np.linalg.norm(high)
    assert error < 1e-7 if dtype == "float32" else error < 1e-4


def test_reversible_gradients_are_those_through_stored_states_in_memory_that_does_not_grow(optimizations):
  (undone, arguments), (few, _) = (gradients(integration.Reversible(), n) for n in (48, 4))
  stored, _ = gradients(integration.Checkpointed("full"), 48)
  assert relative(undone(*arguments), stored(*arguments)) < 1e-6
  size, size_of_few, size_stored = (run.memory_analysis().temp_size_in_bytes for run in (undone, few, stored))
  assert size < 1.05 * size_of_few and size_stored > 1.5 * size
