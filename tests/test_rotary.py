"""Rotary position embedding: late positions, and the TPU kernel in the interpreter against plain JAX.

Its definition: tests/test_model.py, by tests/reference.py; Llama 3's scaling: tests/test_import.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.kernels.rotary import frequencies, rotate
from diffeq_nnx.kernels.rotary.reference import rotate_reference
from diffeq_nnx.kernels.rotary.tpu import rotate_tpu


@pytest.mark.parametrize("dtype,atol,atol_of_slow", [("float32", 2**-6, 1e-5), ("bfloat16", 2**-4, 2**-5)])
def test_llama_3_s_scaling_holds_at_late_positions(dtype, atol, atol_of_slow):
  """Up to 131,071: the angle is a float32 of at most 2^17 radians, which is off by half a unit in its last place."""
  positions, turns = np.array([8191, 8192, 65_537, 131_071]), frequencies(64, base=5e5, factor=8.0, original_len=8192)
  x = np.random.default_rng(0).normal(size=(1, 4, 1, 64))
  as_complex = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * positions[:, None] * turns)[None, :, None]
  expected = np.concatenate([as_complex.real, as_complex.imag], -1)
  found = np.float32(rotate(jnp.asarray(x, dtype), jnp.asarray(positions), turns))
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
  slow = np.tile(turns < 1e-4, 2)  # these turn by less than 14 radians
  np.testing.assert_allclose(found[..., slow], expected[..., slow], rtol=0, atol=atol_of_slow)


def test_frequencies_that_are_learned_have_gradients_on_every_backend(monkeypatch):
  """Which the kernel has not."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 128, 2, 64)), jnp.float32)
  loss = lambda function, turns: (function(x, jnp.arange(128), turns) * x[..., ::-1]).sum()
  turns = jnp.asarray(frequencies(64, base=1e4), jnp.float32)
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  found, expected = (jax.grad(functools.partial(loss, one))(turns) for one in (rotate, rotate_reference))
  np.testing.assert_array_equal(found, expected)
  assert np.abs(expected).min() > 0


# heads narrower than the 128 lanes of a table, as wide, and wider; both kinds of positions and both dtypes
@pytest.mark.parametrize("C,shared,dtype", [(32, True, "float32"), (128, False, "float32"), (256, True, "bfloat16")])
def test_the_kernel_and_its_gradient_agree_with_plain_jax(C, shared, dtype):
  B, L, H = 2, 300, 4
  rng = np.random.default_rng(0)
  x, gradient = (jnp.asarray(rng.normal(size=(B, L, H, C)), dtype) for _ in range(2))
  positions = jnp.arange(L) if shared else jnp.asarray(rng.integers(L, size=(B, L)), jnp.int32)
  turns = frequencies(C, base=5e5, factor=8.0, original_len=64)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradient(function, x, gradient):
    value, pull = jax.vjp(function, x)
    return value, pull(gradient)[0]

  ours = value_and_gradient(lambda x: rotate_tpu(x, positions, turns, interpret=True), x, gradient)
  exact = value_and_gradient(lambda x: rotate_reference(x, positions, turns), x, gradient)
  tolerance = 1e-5 if dtype == "float32" else 2**-6  # a unit in the last place of values below 4
  for found, expected in zip(ours, exact):
    np.testing.assert_allclose(np.float32(found), np.float32(expected), atol=tolerance)
