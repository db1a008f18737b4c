"""The weight sources: the spread they start with, their times, and the generator's gradient."""

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.config import ModelConfig, TimeConfig
from diffeq_nnx.model.time_embedding import frequencies, sinusoidal_features
from tests.conftest import perturb, small_instance, small_model, weights_of

WIDE = dict(
  num_steps=6,
  embed_dim=64,
  num_heads=4,
  vocab_size=32,
  seq_len=8,
  dtype="float32",
  time=TimeConfig(sinusoidal_dim=32, time_embed_dim=16),
)


def spreads(model_config: ModelConfig) -> dict[str, float]:
  """Standard deviation of each kernel over all of the model's times."""
  weights = nnx.jit(lambda model: model.block_weights().sets)(small_instance(model_config))
  return {group: float(np.std(leaves["kernel"])) for group, leaves in weights.items() if "kernel" in leaves}


@pytest.mark.parametrize("field,embedding", [("gpt", "shared_mlp"), ("llama", "learned")])
def test_generated_weights_start_with_the_spread_of_a_plain_model(field, embedding):
  time = TimeConfig(sinusoidal_dim=32, time_embed_dim=16, embedding=embedding)
  plain = spreads(ModelConfig(**{**WIDE, "field": field, "weights": "stored"}))
  generated = spreads(ModelConfig(**{**WIDE, "field": field, "time": time}))
  assert plain.keys() == generated.keys()
  for group in plain:
    assert generated[group] == pytest.approx(plain[group], rel=0.05), group


@pytest.mark.parametrize(
  "field,tables", [("gpt", {"embedding": 0.02, "positions": 0.01}), ("llama", {"embedding": 1.0, "head": 0.02})]
)
def test_every_parameter_starts_with_the_spread_of_the_published_code(field, tables):
  model = small_instance(
    ModelConfig(
      **{**WIDE, "field": field, "initialization": "published", "vocab_size": 256, "seq_len": 128, "embed_dim": 32}
    )
  )
  params = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model)))
  constants = {("final_norm", "scale"): 1.0, ("final_norm", "shift"): 0.0}
  T = model.config.time.time_embed_dim
  for path, leaf in params.items():
    leaf, name = np.asarray(leaf), path[-1]
    if len(path) == 1:
      expected = tables.pop(name)
    elif path in constants or path[1] == "time_mlp" and "bias" in name or name in ("scale", "shift"):
      np.testing.assert_array_equal(leaf, constants.get(path, 0.0))
      continue
    elif name == "bias":
      expected = 1e-4
    else:
      expected = 0.02
      if path[1] == "generator":
        np.testing.assert_array_equal(leaf[T], 0.0)  # F_0
        leaf = leaf[:T]
    assert leaf.std() == pytest.approx(expected, rel=0.1) and abs(leaf.mean()) < expected / 10, path
  assert not tables


def test_a_plain_model_s_tables_norms_and_biases_start_alike():
  for field, names in (("gpt", ("embedding", "positions")), ("llama", ("embedding", "head"))):
    model = small_instance(ModelConfig(**{**WIDE, "field": field, "vocab_size": 256, "seq_len": 128}))
    for name in names:
      assert np.std(getattr(model, name)[...]) == pytest.approx(0.02, rel=0.05)
  weights = jax.tree.map(np.asarray, weights_of(small_instance(small_model())).sets)
  assert (weights["mlp_norm"]["scale"] == 1).all() and (weights["mlp_norm"]["shift"] == 0).all()
  assert (weights["up"]["bias"] == 0).all()


def test_features_are_float32_whatever_the_model_computes_in():
  """In bfloat16 neighboring times would share features: 1000 t is distinguished by 4 radians at best."""
  times = (np.arange(24) + 1) / 24
  features = jax.jit(sinusoidal_features)(times, frequencies(TimeConfig(sinusoidal_dim=128)), 1000.0)
  exact = np.sin(1000.0 * times[:, None] * 10000.0 ** (-np.arange(128) / 128)[None])
  assert features.dtype == jnp.float32 and features.shape == (24, 257)
  np.testing.assert_allclose(features[:, 1:129], exact, atol=2e-4)
  source = small_instance(small_model(dtype="bfloat16")).weight_source
  assert jax.eval_shape(source.time_vectors, times).dtype == jnp.float32


def test_learned_frequencies_start_at_the_fixed_ones_and_get_a_gradient():
  fixed = small_instance(small_model())
  learned = small_instance(small_model(time=TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="learned")))
  np.testing.assert_array_equal(learned.weight_source.frequencies_M[...], frequencies(TimeConfig(sinusoidal_dim=6)))
  for a, b in zip(jax.tree.leaves(weights_of(learned)), jax.tree.leaves(weights_of(fixed))):
    np.testing.assert_array_equal(a, b)
  graph, state = nnx.split(learned)
  size = lambda p: jnp.square(nnx.merge(graph, p).block_weights().sets["up"]["kernel"]).sum()
  gradient = jax.jit(jax.grad(size))(nnx.to_pure_dict(state))
  assert np.any(gradient["weight_source"]["frequencies_M"])


@pytest.mark.parametrize("embedding", ["learned", "shared_mlp"])
def test_the_generators_gradient_agrees_with_finite_differences(embedding, x64):
  time = TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding=embedding, scale=10.0)
  graph, state = nnx.split(small_instance(small_model(dtype="float64", time=time)))
  params = perturb(nnx.to_pure_dict(state))
  shapes = jax.eval_shape(lambda p: nnx.merge(graph, p).block_weights(), params)
  cotangents = perturb(jax.tree.map(lambda a: np.zeros(a.shape), shapes), seed=7, scale=1.0)

  def pairing(params):
    made = nnx.merge(graph, params).block_weights().sets
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(cotangents)))

  gradient = jax.jit(jax.grad(pairing))(params)
  paired = jax.jit(pairing)
  for seed in range(3):
    direction = perturb(jax.tree.map(np.zeros_like, params), seed=seed, scale=1.0)
    moved = lambda h: paired(jax.tree.map(lambda p, d: p + h * d, params, direction))
    numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5
    exact = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    np.testing.assert_allclose(exact, numeric, rtol=1e-6)
