"""Spectra, exponents, attribution and clustering: against dense float64 computations and systems that are known."""

import dataclasses
import functools
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from diffeq_nnx.analysis import attention, clustering, figures, flow, sensitivity
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, attention_probabilities, logits_of
from diffeq_nnx.analysis.findings import find
from diffeq_nnx.analysis.sensitivity import exponents
from diffeq_nnx.analysis.spectra import copying_score, positive_share, spectra
from diffeq_nnx.depth.discretization import discretize
from diffeq_nnx.errors import RunError
from diffeq_nnx.model import vector_fields
from launch.experiments import clusters
from tests.conftest import PRESETS, moved_instance, small_model, told
from tests.test_solvers import smooth

TOKENS = np.random.default_rng(0).integers(31, size=9)


@functools.cache
def analyzed(field="gpt", preset="diffeq", dtype="float64", **changes) -> AnalyzedModel:
  with jax.enable_x64(dtype == "float64"):
    return AnalyzedModel(moved_instance(small_model(dtype=dtype, field=field, **PRESETS[preset], **changes), scale=0.3))


@nnx.jit(static_argnums=1)
def forward(model, num_steps=None):
  """The model's own logits, compiled as one program."""
  return model(TOKENS[None], num_steps)


def same_set(found, expected, tolerance):
  """Whether two sets of complex numbers are the same, in any order."""
  distances = np.abs(np.subtract.outer(found, expected))
  return len(found) == len(expected) and distances[linear_sum_assignment(distances)].max() < tolerance


# what is looked at is what was trained


def end_of(one: AnalyzedModel):
  """The forward pass from the states at the start to those at the end, [L, D] -> [L, D], jitted."""

  model = one.ready.make_model()
  step, solver = model.make_step(one.grid), model.solver

  def end(x_LxD):
    carry = solver.init(x_LxD[None])
    carry, _ = jax.lax.scan(lambda carry, link: (step(carry, link), None), carry, model.links_of(one.ready.weights))
    return solver.read(carry)[0]

  return jax.jit(end)


def dense_jacobian(one: AnalyzedModel, tokens) -> np.ndarray:
  """d x_n(1) / d x_k(0), [L, D, D], by forward derivatives of the whole pass at once."""
  x_LxD = one.observe(tokens).states[0, 0]
  return np.asarray(jax.jit(jax.jacfwd(lambda x: end_of(one)(x)[-1]))(x_LxD)).swapaxes(0, 1)


def dense_per_token(one: AnalyzedModel, tokens) -> np.ndarray:
  """product over steps of (I + d (what a step adds to token n) / d x_k), [L, D, D]."""

  model = one.ready.make_model()
  step, solver = model.make_step(one.grid), model.solver

  def added(x_LxD, link):
    return (solver.read(step(solver.init(x_LxD[None]), link))[0] - x_LxD)[-1]

  states, links = one.observe(tokens).states[:-1, 0], model.links_of(one.ready.weights)
  j_SxDxLxD = np.asarray(jax.jit(jax.vmap(jax.jacfwd(added)))(states, links))
  products = np.stack([np.eye(24)] * len(tokens))
  for j_DxLxD in j_SxDxLxD:
    products = (np.eye(24) + j_DxLxD.swapaxes(0, 1)) @ products
  return products


# each field and form, with weights that steps share, and with a solver that carries more than the state
@pytest.mark.parametrize("field, preset, form", [("gpt", "heun", "exact"), ("llama", "leapfrog", "per_token")])
def test_the_last_state_gives_the_models_logits_and_exponents_are_those_of_the_dense_product(x64, field, preset, form):
  one = analyzed(field, preset)
  model = moved_instance(small_model(dtype="float64", field=field, **PRESETS[preset]), scale=0.3)
  passed = one.observe(TOKENS, attention=True)
  np.testing.assert_allclose(logits_of(one.ready, passed.states[-1]), forward(model), atol=1e-12)
  assert passed.states.shape == (4, 1, 9, 24)
  np.testing.assert_allclose(passed.attention.sum(-1), 1)
  assert not np.triu(passed.attention, 1).any()
  expected = np.linalg.svd({"exact": dense_jacobian, "per_token": dense_per_token}[form](one, TOKENS), compute_uv=False)
  np.testing.assert_allclose(np.exp(exponents(one, TOKENS, form=form)), expected, rtol=1e-9, atol=1e-9)
  found = exponents(one, TOKENS, leading=5, form=form)
  np.testing.assert_allclose(found, np.log(expected[:, :5]), atol=1e-6)


def test_attention_probabilities_are_those_that_the_model_attends_with(x64):
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(1, 5, n, 6)) for n in (4, 2, 2))
  both = jax.jit(lambda: (attention_probabilities(q, k)[0], vector_fields.Packing().attend(q, k, v, "reference")[0]))
  shares_HxLxL, found = both()
  seen = np.einsum("hlm,mhc->lhc", shares_HxLxL, np.repeat(v[0], 2, axis=1))
  np.testing.assert_allclose(found, seen, atol=1e-12)


# spectra


@pytest.mark.parametrize("field, preset", [("gpt", "heun"), ("llama", "leapfrog")])
def test_eigenvalues_are_those_of_the_dense_products(x64, field, preset):
  one = analyzed(field, preset)
  found = spectra(one)
  D, H, K, C = 24, 4, 2, 6
  for s in range(len(found.times)):
    w = jax.tree.map(lambda leaf: np.asarray(leaf[s]), one.ready.weights.sets)
    if field == "gpt":
      parts = w["qkv"]["kernel"].reshape(D, K, H // K + 2, C)
      query = parts[:, :, :-2].reshape(D, H, C)
      key, value = parts[:, :, -2], parts[:, :, -1]
    else:
      query = w["query"]["kernel"].reshape(D, H, C)
      key, value = (w[name]["kernel"].reshape(D, K, C) for name in ("key", "value"))
    for h in range(H):
      out = w["out"]["kernel"][h * C : (h + 1) * C]
      for values, dense in ((found.qk[s, h], query[:, h] @ key[:, h // 2].T), (found.ov[s, h], value[:, h // 2] @ out)):
        assert same_set(np.concatenate([values, np.zeros(D - C)]), np.linalg.eigvals(dense), 1e-6)
    assert same_set(found.ff[s, 0], np.linalg.eigvals(w["up"]["kernel"] @ w["down"]["kernel"]), 1e-6)
  assert np.abs(found.qk.imag).max() > 1e-3  # kept


def test_spectra_at_any_times_in_any_order_and_after_discretizing():
  model = moved_instance(small_model())
  one = AnalyzedModel(model)
  times, own, stored = [1.0, 1 / 3, 0.25, 0.25], spectra(one), spectra(AnalyzedModel(discretize(model)))
  found = spectra(one, times, feedforward=False)
  assert found.times.tolist() == times and not np.array_equal(found.ov[1], found.ov[2])
  for values, expected in ((found.ov[:2], own.ov[[2, 0]]), (found.ov[2], found.ov[3]), (stored.ov, own.ov)):
    np.testing.assert_allclose(np.sort(np.abs(values)), np.sort(np.abs(expected)), atol=1e-5)


def test_scores_of_known_eigenvalues_and_states():
  values = np.array([[1, 2, 3], [-1, -2, -3], [1j, -1j, 2], [0, 0, 0]])
  np.testing.assert_allclose(positive_share(values), [1, 0, 1 / 3, 0])
  np.testing.assert_allclose(copying_score(values), [1, -1, 0.5, 0])
  together = np.array([[1.0, 0, 0], [2, 0, 0], [0, 3, 0], [0, 1, 0]])
  assert clustering.clustered_share(together) == pytest.approx(4 / 12)
  assert clustering.spread(together) == pytest.approx(8 * 2**0.5 / 12)
  assert clustering.clustered_share(together[:1].repeat(5, 0)) == 1
  assert clustering.spread(-together[[0, 0, 2]] * [[1], [-1], [1]]) == pytest.approx((2 + 2 * 2**0.5) / 3)


def test_a_model_in_bfloat16_is_looked_at_in_float32_also_at_another_number_of_steps():
  one = AnalyzedModel(moved_instance(small_model(dtype="bfloat16")), 6)
  found = one.observe(TOKENS).states
  assert found.shape == (7, 1, 9, 24)
  logits = forward(moved_instance(small_model()), 6)
  np.testing.assert_allclose(logits_of(one.ready, found[-1]), logits, atol=1e-4)


# exponents


def test_later_tokens_have_no_influence(x64):
  one = analyzed()
  found = exponents(one, TOKENS, 4, leading=3)
  assert found.shape == (5, 3)
  np.testing.assert_allclose(found, exponents(one, TOKENS[:5], leading=3), atol=1e-9)


@pytest.mark.parametrize("form", sensitivity.FORMS)
def test_float32_in_chunks_is_near_float64(monkeypatch, form):
  with jax.enable_x64(True):
    expected = exponents(analyzed(), TOKENS, form=form)
  monkeypatch.setattr(sensitivity, "CHUNK_BYTES", 5000)
  monkeypatch.setattr(sensitivity, "JACOBIAN_BYTES", 5000)  # two tokens at a time
  narrow = analyzed(dtype="float32")
  np.testing.assert_allclose(exponents(narrow, TOKENS, leading=4, form=form), expected[:, :4], atol=2e-3)
  if form == "exact":  # what float32 can't tell from zero is told as zero: a LayerNorm takes one direction out
    zeros = np.isneginf(exponents(narrow, TOKENS, form=form)[:, -1])
    assert zeros.sum() >= np.sum(expected[:, -1] < -25) > 0


def test_cotangents_pulled_back_together_are_those_pulled_back_alone():
  """With norms of queries and keys, which the CPU's compiler of jax 0.10 gets wrong at this size."""
  sizes = dict(embed_dim=48, num_heads=6, num_kv_heads=2, head_dim=16, mlp_dim=80, seq_len=30, num_steps=2)
  one = analyzed("llama", "baseline", "float32", qk_norm=True, **sizes)
  passed, eye = one.observe(np.arange(30)), jnp.eye(48)
  links = one.without_generator.links_of(one.ready.weights)
  with one.use_device():
    pull = lambda rows: sensitivity.pull_back(one.ready, passed.states[0], passed.carries, links, rows)
    together, alone = pull(eye), [pull(eye[n : n + 1])[0] for n in range(48)]
  np.testing.assert_allclose(together, alone, atol=1e-5 * np.abs(together).max())


# beside the exponents


def test_rollout_of_known_attention():
  even = np.tril(np.ones((3, 3))) / [[1], [2], [3]]
  attention_SxHxLxL = np.stack([[even, even], [np.eye(3)] * 2])
  np.testing.assert_allclose(attention.rollout(attention_SxHxLxL), (even + np.eye(3)) / 2)


def test_gradient_times_input_is_the_logits_slope(x64):
  one = analyzed()
  passed = one.observe(TOKENS)
  found = attention.gradient_times_input(one, passed, 5)
  eps, x_LxD, end = 1e-6, passed.states[0, 0], end_of(one)
  logit = lambda x_LxD: float(logits_of(one.ready, end(x_LxD)[None])[0, 8, 5])
  for k in (0, 4, 8):
    change = logit(x_LxD.at[k].multiply(1 + eps)) - logit(x_LxD.at[k].multiply(1 - eps))
    assert found[k] == pytest.approx(change / (2 * eps), abs=1e-6)


def test_prefix_matching_finds_a_head_that_matches():
  half, L = 4, 8
  attention_Sx1xHxLxL = np.zeros((1, 1, 2, L, L))
  attention_Sx1xHxLxL[..., 0] = 1  # both look at the first token
  for query in range(half, L - 1):
    attention_Sx1xHxLxL[0, 0, 1, query] = np.eye(L)[query - half + 1]  # the second at what came after, last time
  np.testing.assert_allclose(attention._after_first(attention_Sx1xHxLxL, half), [[0, 1]])
  scores = attention.prefix_matching(analyzed(dtype="float32"), 6)
  assert scores.shape == (3, 4) and (0 <= scores).all() and (scores <= 1).all()


# the adaptive reference


def gentle(solver: str = "euler"):
  """A model in float64 whose weights change little over depth."""
  return moved_instance(smooth(scale=1.0, dtype="float64", horizon=0.2, solver=solver))


def test_a_solver_approaches_the_adaptive_reference_at_its_order_and_it_says_what_it_took(x64):
  found = flow.integrate(AnalyzedModel(gentle()), TOKENS, rtol=1e-10, atol=1e-10)
  coarse, fine = flow.distances(gentle("rk4"), TOKENS, [32, 64], found)
  assert fine < 1e-7 and coarse / fine == pytest.approx(16, rel=0.15)
  assert found.state_1xLxD.shape == (1, 9, 24) and found.state_1xLxD.dtype == np.float64
  assert found.times[0] == 0 and found.times[-1] == 1 and (np.diff(found.times) > 0).all()
  assert found.evaluations >= 6 * (len(found.times) - 1)


# clustering


def test_the_first_step_that_moves_simulated_tokens_is_by_the_formula():
  found = clusters.simulate(3, clusters.SCALES["t^k"](3), [4, 7])[:, 1]
  rng = np.random.default_rng(7)
  a, v = rng.normal(size=(2, 3, 3))
  x = rng.uniform(-2, 2, (40, 3))
  np.testing.assert_array_equal(found[1], x)  # at t = 0 the weights are zero
  p = 0.1**3
  normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
  scores = np.exp(p**2 * normed @ a @ a.T @ normed.T)
  np.testing.assert_allclose(found[2], x + 0.1 * p * scores / scores.sum(1, keepdims=True) @ normed @ v, atol=1e-10)


def test_held_weights_are_those_of_one_step_at_all():
  one = analyzed(dtype="float32")
  spread, share = clustering.depth_spread(one, TOKENS)
  held, _ = clustering.depth_spread(one, TOKENS, 0)
  assert spread.shape == share.shape == (4,)
  np.testing.assert_allclose(spread[:2], held[:2], rtol=1e-6)  # the first step is the same
  assert abs(spread[-1] - held[-1]) > 1e-3
  kernel = lambda weights, s: np.asarray(weights.sets["up"]["kernel"][s])
  for s in range(3):
    np.testing.assert_array_equal(kernel(clustering.constant_weights(one, 2), s), kernel(one.ready.weights, 2))


# the report says what was found


def test_figures_show_the_findings():
  one = analyzed(dtype="float32")
  found = find(one, TOKENS, [f"piece {k}" for k in range(9)], str, leading=2)
  model = moved_instance(small_model(), scale=0.3)
  probabilities = np.exp(np.asarray(forward(model))[0, -1])
  probabilities /= probabilities.sum()
  likeliest = probabilities.argmax()
  assert found.next_token == (str(likeliest), pytest.approx(probabilities.max(), rel=1e-4), likeliest)
  texts = {text.name: text for text in figures.colored_texts(found)}
  np.testing.assert_array_equal(texts["sensitivity_exact"].values, found.exact[:, 0])
  np.testing.assert_array_equal(texts["sensitivity_per_token"].values, found.per_token[:, 0])
  np.testing.assert_array_equal(texts["attention_rollout"].values, found.rollout)
  assert found.rollout.sum() == pytest.approx(1)
  np.testing.assert_array_equal(texts["gradient_times_input"].values, found.gradient)
  assert np.abs(found.exact - found.per_token)[:-1].max() > 0.1
  scores = figures.induction(found).panels[0].marks[0]
  np.testing.assert_allclose(scores.x, copying_score(found.spectra.qk).reshape(-1))
  np.testing.assert_allclose(scores.y, copying_score(found.spectra.ov).reshape(-1))
  np.testing.assert_allclose(scores.color, found.prefix_matching.reshape(-1))
  at_others = dataclasses.replace(found, spectra=spectra(one, [0.5, 1.0]))  # no step has weights of the first
  (colored,) = figures.induction(at_others).panels[0].marks
  np.testing.assert_allclose(colored.color, np.append(np.full(4, np.nan), found.prefix_matching[-1]))
  assert [*found.depth] == ["own", "held at step 0", "held at step 1", "held at step 2"]
  for panel, pair in zip(figures.real_parts(found).panels, ("qk", "ov", "ff")):
    points, values = panel.marks[0], found.spectra.of(pair)
    for s, t in enumerate(found.spectra.times):
      np.testing.assert_allclose(np.sort(points.y[points.x == t]), np.sort(values[s].real.reshape(-1)))
  shares = figures.positive_shares(found).panels[1].heatmap
  np.testing.assert_allclose(shares.z, positive_share(found.spectra.ov).T)
  assert figures.token_table(found).rows[3][1:3] == ["piece 3", f"{found.exact[3, 0]:.4f}"]


# bad input


def test_what_can_t_be_is_told(monkeypatch):
  one, stored = analyzed(dtype="float32"), moved_instance(small_model(weights="stored"))
  for call, part in (
    (lambda: clustering.depth_spread(one, TOKENS[:1]), "tokens: there is one"),
    (lambda: exponents(one, []), "there are none"),
    (lambda: exponents(one, [3, 31]), "the id 31"),
    (lambda: exponents(one, [-1]), "the id -1"),
    (lambda: exponents(one, [1] * 13), "12 learned positions"),
    (lambda: exponents(one, [1.7]), "must be a list of ids"),
    (lambda: exponents(one, [1, 2], position=2), "position=2: the text has 2 tokens, 0 to 1"),
    (lambda: exponents(one, [1, 2], leading=25), "must be 1 to 24"),
    (lambda: exponents(one, [1, 2], form="other"), "exact, per_token"),
    (lambda: find(one, [1, 2], ["a", "b"], str, leading=0), "leading=0"),
    (lambda: spectra(AnalyzedModel(stored), [0.5]), "the weights of this model are stored"),
    (lambda: spectra(one, [0.5, 1.5]), "times from 0 to 1"),
    (lambda: flow.integrate(AnalyzedModel(stored), TOKENS), "the weights of this model are stored"),
    (lambda: flow.integrate(one, TOKENS, rtol=0), "rtol=0: must be above 0"),
    (lambda: flow.integrate(one, [31]), "the model's ids are 0 to 30"),
  ):
    assert part in told(call)
  broken = AnalyzedModel(jax.tree.map(lambda leaf: leaf * 1e30, moved_instance(small_model())))
  for call in (lambda: exponents(broken, TOKENS), lambda: find(broken, TOKENS, ["a"] * 9, str)):
    assert "the state after step 1 of 3 is not finite" in told(call, RunError)
  shared = analyzed(preset="shared", dtype="float32")
  line = told(lambda: flow.integrate(shared, TOKENS, rtol=1e-10, atol=1e-10, max_steps=3), RunError)
  assert line.startswith("integrate: 3 steps reach t = ") and "raise max_steps or the tolerances" in line
  monkeypatch.setitem(sys.modules, "diffrax", None)
  assert "pip install 'diffeq-nnx[analysis]'" in told(lambda: flow.integrate(one, TOKENS))


def test_everything_is_found_of_one_token_and_of_one_stored_step():
  one = AnalyzedModel(moved_instance(small_model(num_steps=1, seq_len=3, weights="stored")))
  found = find(one, [5], ["a"], str, leading=100)
  assert found.depth is None and found.prefix_matching is None
  assert found.exact.shape == (1, 24)
  arrays = found.arrays()
  assert "between_times" not in arrays and arrays["eigenvalues_ov"].shape == (1, 4, 6)
  assert all(np.asarray(array).dtype != object for array in arrays.values())
