"""Solvers: orders against an adaptive reference, tables against formulas, inverses, and what a pass asks for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.model import grids, integration, solvers, vector_fields
from diffeq_nnx.model.solvers import SOLVERS, RungeKutta, Splitting
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.training import flops
from tests.conftest import Lazy, equal, moved_instance, small_config, small_model, told, weights_of

diffrax = Lazy("diffrax")

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


KEY = 0.3


class Waves:
  """A field of sines, of which hardly anything is compiled; weights are numbers, and so is the key of a test."""

  def attention(self, x, w, key=KEY):
    return jnp.sin(w * x + (key if isinstance(key, float) else KEY))

  def feedforward(self, x, w, key=KEY):
    return jnp.cos(w * x - 2 * (key if isinstance(key, float) else KEY))

  def __call__(self, x, w, key=KEY):
    return self.attention(x, w, key) + self.feedforward(x, w, key)


def weight(t):
  """That of the waves at a time."""
  return 0.5 + jnp.sin(3.0 * t)


@functools.cache
def exact() -> np.ndarray:
  """Where diffrax takes the state from t = 0 to 1 at a tolerance of 1e-12."""
  slope = diffrax.ODETerm(lambda t, x_BxLxD, _: Waves()(x_BxLxD, weight(t)))
  controller = diffrax.PIDController(rtol=1e-12, atol=1e-12)
  solve = lambda x: diffrax.diffeqsolve(slope, diffrax.Dopri8(), 0.0, 1.0, 0.01, x, stepsize_controller=controller)
  return np.asarray(jax.jit(solve)(state("float64")).ys[0])


@pytest.mark.parametrize("name", SOLVERS)
def test_the_error_falls_with_the_solvers_order(name, x64):
  """From 32 to 128 steps."""
  solver = SOLVERS[name]

  def error(num_steps):
    grid = grids.uniform_grid(num_steps, 1.0)
    weights = GridWeights(weight(grid.times(solver.nodes).times_U), grid)
    solve = lambda x_BxLxD: integration.solve(solver, Waves(), x_BxLxD, weights, key=jax.random.key(0))
    return np.abs(jax.jit(solve)(state("float64")) - exact()).max()

  assert np.log2(error(32) / error(128)) / 2 == pytest.approx(TABLE[name][0], abs=0.15)


def by_hand(name, f, x, w, h):
  """The formulas of the methods, `w` the weights at their nodes."""
  if name == "sequential":
    x = x + h * f.attention(x, w[0])
    return x + h * f.feedforward(x, w[0])
  if name in ("strang", "strang_mirrored"):
    outer, inner = (f.attention, f.feedforward) if name == "strang" else (f.feedforward, f.attention)
    x = x + h / 2 * outer(x, w[0])
    x = x + h * inner(x, w[0])
    return x + h / 2 * outer(x, w[0])
  k1 = f(x, w[0])
  if name == "midpoint":
    return x + h * f(x + h / 2 * k1, w[0])
  if name == "heun":
    return x + h / 2 * (k1 + f(x + h * k1, w[1]))
  if name == "ralston":
    return x + h * (k1 / 4 + 3 / 4 * f(x + 2 / 3 * h * k1, w[1]))
  if name == "rk4":
    k2 = f(x + h / 2 * k1, w[1])
    k3 = f(x + h / 2 * k2, w[1])
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3, w[2]))
  return x + h * k1  # euler, and the first step of leapfrog


WEIGHTS = (0.4, 0.9, 1.7)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_is_the_formula_written_out_and_takes_its_size_as_any_number(name, x64):
  solver, field, h = SOLVERS[name], Waves(), 0.5
  weights = WEIGHTS[: len(solver.nodes)]

  def stepped(dtype, dt, key=KEY):
    x = jnp.asarray(state(dtype))
    return solver.step(field, solver.init(x), weights, dt, key)

  x = jnp.asarray(state("float64"))
  found = solver.read(stepped("float64", jnp.float64(h)))
  np.testing.assert_allclose(found, by_hand(name, field, x, weights, h), rtol=0, atol=1e-13)
  assert np.abs(found - solver.read(stepped("float64", jnp.float64(h), KEY + 1))).max() > 0.1
  expected = stepped("bfloat16", jnp.float32(h))
  for dt in (h, np.float64(h), np.float32(h)):
    again = stepped("bfloat16", dt)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(again)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]


def test_leapfrog_is_the_two_step_midpoint_rule(x64):
  solver, field, x = SOLVERS["leapfrog"], Waves(), jnp.asarray(state("float64"))
  carry, before, middle = solver.init(x), x, x
  for weight, dt in zip(WEIGHTS, (0.7, 0.5, 1.1)):
    carry = solver.step(field, carry, [weight], dt, KEY)
    before, middle = middle, before + 2 * dt * field(middle, weight)
  np.testing.assert_allclose(solver.read(carry), (before + middle) / 2, rtol=0, atol=1e-13)


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


def test_the_generator_runs_once_for_all_times_of_all_steps():
  """One product with each F: as many as there are leaves."""
  model = moved_instance(smooth(solver="rk4"))
  jaxpr, specs = jax.make_jaxpr(lambda: model.block_weights(model.grid(9)), return_shape=True)()
  combined = [equation for equation in jaxpr.eqns if equation.primitive.name.startswith("custom_vjp_call")]
  U = len(model.times(model.grid(9)).times_U)
  assert len(combined) == len(jax.tree.leaves(specs)) and {len(leaf) for leaf in jax.tree.leaves(specs)} == {U}
  assert sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns) == 2  # the MLPs' layers


@pytest.mark.parametrize("embedding", ["fixed", "uniform"])
def test_the_weights_of_a_coarse_step_are_the_mean_of_its_fine_steps(embedding, x64):
  time = dataclasses.replace(small_model().time, embedding=embedding, scale=1000.0, weights_at="mean")
  model = moved_instance(small_model(time=time, dtype="float64", horizon=1.0), seed=1)
  sets_of = lambda grid: jax.tree.map(np.asarray, weights_of(model, grid).sets)
  coarse, fine = sets_of(model.grid(3)), sets_of(model.grid(15))
  equal(jax.tree.map(lambda leaf: leaf.reshape(3, 5, *leaf.shape[1:]).mean(1), fine), coarse, 1e-6)
  uneven = sets_of(dataclasses.replace(grids.uneven_grid((2.0, 1.0)), weights_at="mean", radians=model.grid().radians))
  equal(jax.tree.map(lambda leaf: leaf[:2].mean(0), coarse), jax.tree.map(lambda leaf: leaf[0], uneven), 1e-6)


@pytest.mark.parametrize("solver, place, time", [("euler", "end", 1.0), ("heun", "middle", 0.5), ("rk4", "end", 1.0)])
def test_weights_at_a_place_are_the_same_at_all_nodes(solver, place, time):
  times = solvers.weight_times(smooth(place, solver=solver))
  np.testing.assert_allclose(times.times_U, (np.arange(3) + time) / 3)
  assert (times.index_SxN == np.arange(3)[:, None]).all() and times.index_SxN.shape == (3, len(SOLVERS[solver].nodes))


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
    (lambda: RungeKutta(((),), (0.5,), (0.0,)), "b must add up to 1"),
    (
      lambda: integration.make_adjoint(config),
      "the steps of model.solver=euler can't be undone; those of leapfrog can",
    ),
  ):
    assert part in told(call, ValueError)


# with the compiler as users have it, from here on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WavesWithDropout(Waves):
  """As a model's field, it draws from the key of a step."""

  dropout: vector_fields.Dropout = vector_fields.Dropout(0.1, np.arange(2))

  def __call__(self, x, w, key):
    return self.dropout(key, super().__call__(x, w))


def test_undoing_all_steps_gives_the_carries_before_them(optimizations):
  """48 steps from a small state; what a state lacks in its dtype is carried beside it, so nearly all bits agree.

  By a block in bfloat16, and over steps of many sizes in float32.
  """
  config = smooth(weights="stored", solver="leapfrog", dtype="bfloat16", num_steps=48, horizon=None, dropout=0.2)
  model = moved_instance(config, scale=0.05)
  block = vector_fields.BoundField(model.field, dropout=vector_fields.Dropout(0.2, jnp.arange(2)))
  uneven = grids.uneven_grid(np.random.default_rng(0).uniform(0.3, 1.7, 48).tolist())
  waves = GridWeights(0.05 * weight(uneven.times((0.5,)).times_U), uneven)
  cases = ("bfloat16", block, weights_of(model), 1e-4), ("float32", WavesWithDropout(), waves, 1e-7)
  for dtype, field, weights, most in cases:
    x = jnp.asarray(0.02 * state("float32"), dtype)
    links = jax.jit(functools.partial(integration.links_of, SOLVERS["leapfrog"], dtype=x.dtype, key=QUICK_KEY))(weights)
    advance = functools.partial(integration.advance_of, SOLVERS["leapfrog"], weights.grid)
    step, back = advance(backwards=False), advance(backwards=True)

    @jax.jit
    def there_and_back(carry, field=field, links=links, step=step, back=back):
      last, carries = jax.lax.scan(lambda carry, one: (step(field, carry, one), carry), carry, links)
      return carries, jax.lax.scan(lambda carry, one: (back(field, carry, one),) * 2, last, links, reverse=True)[1]

    found = there_and_back(SOLVERS["leapfrog"].init(x))
    carries, undone = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)
    for (high, low), (high_undone, low_undone) in zip(carries, undone, strict=True):
      assert (high != high_undone).mean() < 1e-3, dtype
      assert np.linalg.norm(high_undone - high + low_undone - low) / np.linalg.norm(high) < most, dtype


def test_reversible_gradients_are_those_through_stored_states_in_memory_that_does_not_grow(optimizations):
  """The memory of temporaries is less than half a state for each of 96 steps, whatever a step needs."""
  grid = grids.uniform_grid(96, 1.0)
  times_U = grid.times((0.5,)).times_U

  def compiled(adjoint):
    def loss(sets, x):
      weights = GridWeights(sets, grid)
      end = integration.solve(SOLVERS["leapfrog"], WavesWithDropout(), x, weights, key=QUICK_KEY, adjoint=adjoint)
      return jnp.square(end).sum(-1).mean() + end[:, :, 0].sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(weight(times_U), state("float32")).compile()

  undone, stored = compiled(integration.Reversible()), compiled(integration.Checkpointed("full"))
  distance = lambda a, b: np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)
  arrays = np.asarray(weight(times_U)), state("float32")
  assert max(jax.tree.leaves(jax.tree.map(distance, undone(*arrays), stored(*arrays)))) < 1e-6
  size, size_stored = (run.memory_analysis().temp_size_in_bytes for run in (undone, stored))
  assert size < 96 / 2 * state("float32").nbytes and size_stored > 1.5 * size
