"""The chunked cross-entropy: equal to the plain one. That it is small: tests/test_distillation.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.training import loss
from diffeq_nnx.training.loss import chunked_cross_entropy
from tests.conftest import equal


def plain_cross_entropy(hidden, head, targets, mask):
  """All logits at one time."""
  logits = jnp.einsum("bld,vd->blv", hidden, head)
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
  return -jnp.sum(mask * picked)


def example(dtype=jnp.float32, B=2, L=12, D=8, V=17):
  """Random arguments."""
  rng = np.random.default_rng(0)
  return (
    jnp.asarray(rng.normal(size=(B, L, D)), dtype),
    jnp.asarray(rng.normal(size=(V, D)), dtype),
    jnp.asarray(rng.integers(V, size=(B, L))),
    jnp.asarray(rng.random((B, L)), jnp.float32),
  )


def test_value_and_gradient_are_those_of_the_plain_loss(x64):
  arguments = example(jnp.float64)
  plain = jax.jit(jax.value_and_grad(plain_cross_entropy, (0, 1)))(*arguments)
  for num_chunks in (1, 4, 12):
    scaled = lambda *a: 3 * chunked_cross_entropy(*a, num_chunks) / 3
    chunked = jax.jit(jax.value_and_grad(scaled, (0, 1)))(*arguments)
    equal(chunked, plain, 1e-12, 1e-10)


def test_a_length_without_divisors_is_filled_up(x64, monkeypatch):
  """11 positions of which a chunk holds 4 are 3 chunks, not 11."""
  monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * (2 * 17 * 4))
  arguments = example(jnp.float64, L=11)
  assert [one.shape[0] for one in loss._chunks(arguments[:1], None, 17)] == [3]
  both = [jax.value_and_grad(one, (0, 1))(*arguments) for one in (chunked_cross_entropy, plain_cross_entropy)]
  equal(*both, 1e-12, 1e-10)


def test_bfloat16_accumulates_in_float32():
  hidden, head, targets, mask = example(jnp.bfloat16, D=64, V=400)
  chunked = jax.value_and_grad(lambda *a: chunked_cross_entropy(*a, 4), (0, 1))
  value, gradients = jax.jit(chunked)(hidden, head, targets, mask)
  wide = (np.asarray(array, np.float32) for array in (hidden, head))
  exact, exact_gradients = jax.jit(jax.value_and_grad(plain_cross_entropy, (0, 1)))(*wide, targets, mask)
  assert value.dtype == jnp.float32 and gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
  np.testing.assert_allclose(value, exact, rtol=1e-5)
  for ours, theirs in zip(gradients, exact_gradients):
    assert np.linalg.norm(np.asarray(ours, np.float32) - theirs) / np.linalg.norm(theirs) < 1e-2


def test_chunks_that_do_not_divide_are_an_error():
  with pytest.raises(ValueError, match="num_chunks=5: must divide the 12 positions of a sequence that a device holds"):
    chunked_cross_entropy(*example(), 5)
