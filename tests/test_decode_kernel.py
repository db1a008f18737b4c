"""Attention of one new token: the TPU kernel, in Pallas's interpreter, against NumPy; and through the TPU compiler."""

import dataclasses
import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx.kernels.attention import attention, decode_attention, tpu_decode
from diffeq_nnx.kernels.attention.decode import decode_reference
from diffeq_nnx.kernels.attention.tpu_decode import block_of, decode_tpu
from tests.conftest import moved_instance, small_model
from tests.hopper_code import needs_libtpu
from tests.test_attention import tpu_races_found
from tests.test_attention_compile import tpu
from tests.test_generation import PROMPTS

# rows, key heads, query heads for each, slots, new tokens, slots of a block
CASES = [(4, 2, 1, 64, 1, None), (4, 2, 3, 64, 1, 16), (5, 4, 2, 96, 3, 48)]


def inputs(B: int, K: int, G: int, P: int, Q: int = 1, D: int = 128, dtype: str = "float32"):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, K * G, Q, D), (B, K, P, D), (B, K, P, D))]


def expected(q, keys, values, slot, next_B) -> np.ndarray:
  """Row by row in float64: the tokens of a row are those in the slots up to `slot`, one or [B], going around.

  Each of the new tokens that follow it sees one more, and does not see what they have overwritten.
  """
  q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
  G, P, Q = q.shape[1] // keys.shape[1], keys.shape[2], q.shape[2]
  out, slot = np.zeros(q.shape), np.broadcast_to(slot, len(q))
  for b, h, n in np.ndindex(*q.shape[:3]):
    kept = P - (Q - 1 - n)
    slots = [(slot[b] + n - age) % P for age in range(min(int(next_B[b]) + n + 1, kept))]
    scores = keys[b, h // G, slots] @ q[b, h, n] / np.sqrt(q.shape[3])
    shares = np.exp(scores - scores.max())
    out[b, h, n] = shares @ values[b, h // G, slots] / shares.sum()
  return out


@pytest.mark.parametrize("case,dtype", [*zip(CASES, ["float32", "bfloat16", "float32"])])
def test_both_implementations_agree_with_numpy(case, dtype):
  """At the ends of the ring and of blocks, with rows that hold nothing before, all slots, and more than there are."""
  *shape, block = case
  tolerance = {"float32": 3e-6, "bfloat16": 1e-2}[dtype]  # some roundings
  arrays, P = inputs(*shape, dtype=dtype), shape[3]
  next_B = jnp.array([0, P - 1, P // 2, 3 * P, 17][: shape[0]])
  kernel = jax.jit(functools.partial(decode_tpu, block=block, interpret=True))
  implementations = kernel, jax.jit(decode_reference)
  for slot in (0, 15, 16, P - 1, np.array([3, 16, 0, P - 1, 40])[: shape[0]]):
    right = expected(*arrays, slot, next_B)
    for implementation in implementations:
      found = implementation(*arrays, jnp.asarray(slot, jnp.int32), next_B)
      np.testing.assert_allclose(np.asarray(found, np.float64), right, rtol=tolerance, atol=tolerance)


def test_blocks_that_hold_no_token_are_not_read_and_no_race_is_found():
  q, keys, values = inputs(3, 2, 1, 128)
  next_B = jnp.array([5, 40, 3])
  slot, S, N = jnp.int32(36), 32, 4  # the newest token is the fifth of block 1
  visited = [[int(block_of(i, slot, position, S, N)[0]) for i in range(N)] for position in next_B]
  assert visited == [[1, 0, 0, 0], [1, 0, 3, 3], [1, 1, 1, 1]]
  right = expected(q, keys, values, 36, next_B)
  for b, blocks in enumerate(visited):
    for block in {0, 1, 2, 3} - {*blocks}:
      keys, values = (x.at[b, :, block * S : (block + 1) * S].set(jnp.nan) for x in (keys, values))
  found = decode_tpu(q, keys, values, slot, next_B, block=S, interpret=pltpu.InterpretParams(detect_races=True))
  np.testing.assert_allclose(found, right, rtol=0, atol=3e-6)
  assert not tpu_races_found()


def test_a_model_generates_the_same_tokens_with_the_kernel(monkeypatch):
  """Heads 128 wide, and a prompt that takes another's row, so that its tokens go around the ring."""
  model = moved_instance(small_model(field="llama", num_steps=1, head_dim=128, num_heads=2, num_kv_heads=1), scale=0.2)
  how = {"max_tokens": 30, "temperature": 0, "rows": 2}
  right = diffeq_nnx.generate(diffeq_nnx.Decoder(model), PROMPTS, **how)
  calls = []
  kernel = lambda *arguments: calls.append(arguments) or decode_tpu(*arguments, block=16, interpret=True)
  plain = lambda *arguments, implementation, **options: attention(*arguments, implementation="reference", **options)
  monkeypatch.setattr(tpu_decode, "decode_tpu", kernel)
  monkeypatch.setattr("diffeq_nnx.model.attention_context.attention", plain)  # prompts are read in plain JAX
  config = dataclasses.replace(model.config, attention="pallas_tpu")
  assert diffeq_nnx.generate(diffeq_nnx.Decoder(model, config=config), PROMPTS, **how) == right and calls


def test_other_widths_numbers_and_backends_take_plain_jax(monkeypatch):
  monkeypatch.setattr(tpu_decode, "decode_tpu", None)
  for how, shape in (("pallas_tpu", (2, 2, 1, 64, 1, 64)), ("pallas_tpu", (2, 2, 1, 40)), ("auto", (2, 2, 1, 64))):
    arrays = inputs(*shape)
    found = decode_attention(*arrays, jnp.int32(7), jnp.array([7, 3]), implementation=how)
    np.testing.assert_allclose(found, expected(*arrays, 7, [7, 3]), rtol=0, atol=3e-6)


@pytest.mark.usefixtures("optimizations")
@needs_libtpu
@pytest.mark.parametrize(
  "topology,shape,dtype",
  [
    ("v5e:2x2", (64, 16, 1, 256), "bfloat16"),
    ("v5p:2x2x1", (2, 4, 4, 2048, 5), "bfloat16"),
    ("v6e:2x2", (8, 2, 1, 320, 3, 256), "float32"),
  ],
)
def test_the_kernel_compiles_for_tpus(topology, shape, dtype):
  place = jax.sharding.SingleDeviceSharding(tpu(topology))
  arrays = jax.eval_shape(functools.partial(inputs, *shape, dtype=dtype))
  arrays = [*arrays, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)]
  arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays]
  function = functools.partial(decode_attention, implementation="pallas_tpu")
  compiled = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
