"""Attention: one contract for every implementation that this machine can run, over named shapes and features.

The TPU and the GPU kernel run in Pallas's interpreters here (the GPU's needs jax 0.11.2 or later);
tests/test_attention_compile.py gives them to the real compilers. On a machine with a Hopper GPU, which tests do not see
unless asked, the GPU kernel itself runs, on the whole of each named shape:

  DIFFEQ_NNX_IN_TESTS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -n 4 tests/test_attention.py -k gpu
"""

import dataclasses
import functools
import sys

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.kernels import attention as public
from diffeq_nnx.kernels.attention import dispatch
from diffeq_nnx.kernels.attention.blocks import TPUBlocks
from diffeq_nnx.kernels.attention.mask import Mask, block_ranges
from diffeq_nnx.kernels.attention.shapes import SHAPES, Shape
from diffeq_nnx.kernels.attention.tpu import attention_tpu
from diffeq_nnx.model.grids import uniform_grid
from diffeq_nnx.model.parameters import params_of
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training.step import loss_and_gradients
from tests.conftest import equal, moved_instance, packed_batch, small_config, small_model, told

SMALL_BLOCKS = TPUBlocks(128, 128, 128, 128, chunk_bytes=300_000)  # several blocks and chunks at short lengths
PLAIN = Shape(2, 300, 2, 2, 64)
with_shape = functools.partial(dataclasses.replace, PLAIN)
# every way in which heads lie in lanes, each with another mask
FEATURES = {
  "whole_blocks_in_a_window_of_one": (with_shape(length=256, window=1), {}),
  "one_position": (with_shape(length=1), {}),
  "head_64_alone_not_causal": (with_shape(heads=3, kv_heads=3), {"causal": False}),
  "grouped_by_three_in_a_window": (with_shape(heads=6, window=100), {}),
  "grouped_by_four_documents": (with_shape(heads=8, documents=5), {}),
  "window_over_a_chunk_before": (with_shape(window=-40), {"causal": False}),
  "head_32_documents_not_causal": (with_shape(heads=4, kv_heads=4, head_dim=32, documents=5), {"causal": False}),
  "head_80_soft_cap_and_scale": (with_shape(head_dim=80, logits_soft_cap=2.0), {"scale": 0.3}),
  "head_96": (with_shape(head_dim=96), {}),
}


KERNELS = ["tpu", "gpu", "gpu_deterministic"]  # the GPU's backward in one pass, and in two
ON_GPU = jax.default_backend() == "gpu"
# What other features and shapes say of the same code: a TPU's lanes are padded to 128 for heads of 96 as for those of
# 80, and heads wider than 128 take two passes always. Of two passes the interpreter runs each way to mask a block once.
# Cut to what it runs, `odd_length` is a plain shape.
SAID_BY_OTHERS = {"tpu": {"head_96"}, "gpu": set(), "gpu_deterministic": {"gemma_head_256"}}
if not ON_GPU:
  SAID_BY_OTHERS["gpu"] = {"odd_length"}
  own = {"one_position", "grouped_by_four_documents", "window_over_a_chunk_before", "head_80_soft_cap_and_scale"}
  SAID_BY_OTHERS["gpu_deterministic"] |= {"odd_length", *FEATURES} - own


def cases(names):
  """Each of these features or shapes with each kernel that it says something of."""
  return [(name, kernel) for name in names for kernel in KERNELS if name not in SAID_BY_OTHERS[kernel]]


def kernel_of(name: str):
  """An interpreted kernel, or the GPU's own on a GPU, with the reference's arguments."""
  if name == "tpu":
    return functools.partial(attention_tpu, interpret=True)
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(f"jax {jax.__version__} has no interpreter for GPU kernels; 0.11.2 has")
  from diffeq_nnx.kernels.attention.gpu import attention_gpu

  interpret = None if ON_GPU else plgpu.InterpretGPUParams()
  return functools.partial(attention_gpu, interpret=interpret, deterministic=name == "gpu_deterministic")


UNSEEN = -1e3  # in place of a log-sum-exp of -inf


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, q, k, v):
  """(out, lse, dq, dk, dv) for fixed random gradients of out and lse."""
  (out, lse), pull_back = jax.vjp(function, q, k, v)
  rng, seen = np.random.default_rng(7), jnp.isfinite(lse)
  dout, dlse = (rng.normal(size=array.shape).astype("float32") for array in (out, lse))
  dout, dlse = jnp.asarray(dout, out.dtype), jnp.where(seen, dlse, 0).astype(lse.dtype)
  return (out, jnp.where(seen, lse, UNSEEN), *pull_back((dout, dlse)))


def check(shape: Shape, dtype: str, kernel, segment_ids=None, inputs=None, **options):
  """`value_and_gradients` of an interpreted kernel, and of the reference in float64, which must agree."""
  q, k, v = inputs or shape.inputs(dtype)
  segment_ids = shape.segment_ids() if segment_ids is None else segment_ids
  options = {"causal": True, "window": shape.window, "logits_soft_cap": shape.logits_soft_cap, **options}
  mask, scale = Mask(options["causal"], options["window"]), options.get("scale") or shape.head_dim**-0.5
  settings = {"mask": mask, "scale": scale, "logits_soft_cap": options["logits_soft_cap"]}
  ours = value_and_gradients(lambda *qkv: kernel(*qkv, *dispatch._segments(segment_ids), **settings), q, k, v)
  assert ours[0].dtype == ours[2].dtype == ours[3].dtype == jnp.dtype(dtype) and ours[1].dtype == jnp.float32
  options |= {"segment_ids": segment_ids, "return_lse": True, "implementation": "reference"}
  with jax.enable_x64(True):
    wide = (jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v))
    exact = value_and_gradients(functools.partial(public.attention, **options), *wide)
  limit = {"float32": 5e-6, "bfloat16": 1e-2}[dtype]  # of the norm: some tens of roundings of float32, two of bfloat16
  for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, exact):
    a, b = np.asarray(a, np.float64), np.asarray(b)
    error = np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-2 * np.sqrt(b.size))
    assert error < limit, f"{name}: {error:.2g}"
    assert np.abs(a - b).max() < 30 * limit * max(1.0, np.abs(b).max()), name
  return ours, exact


@pytest.mark.parametrize("feature,kernel", cases(FEATURES))
def test_every_feature_agrees_with_the_reference(feature, kernel):
  """On a GPU's kernel of one group of heads."""
  (shape, options), function = FEATURES[feature], kernel_of(kernel)
  if kernel == "tpu":
    check(shape, "float32", functools.partial(function, blocks=SMALL_BLOCKS), **options)
  else:
    one_group = dataclasses.replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    check(one_group, "bfloat16", function, **options)


# On a CPU those with features that no other has together: tiles and blocks depend on the head's width alone.
@pytest.mark.parametrize(
  "name,kernel", cases(SHAPES if ON_GPU else ("odd_length", "gemma_head_256", "mistral_window", "packed_documents"))
)
def test_named_shapes_agree_with_the_reference(name, kernel):
  """With the tuned blocks; one sequence, one group of heads, and at most 1024 positions (384 for the slower one).

  On a GPU: up to two sequences and two groups of heads, at the whole length.
  """
  shape, whole = SHAPES[name], ON_GPU and kernel != "tpu"
  length = shape.length if whole else min(shape.length, 1024 if kernel == "tpu" else 384)
  window = shape.window and shape.window * length // shape.length
  groups = min(shape.kv_heads, 2 if whole else 1)
  sizes = {"batch": min(shape.batch, 2 if whole else 1), "length": length, "window": window}
  heads = {"kv_heads": groups, "heads": groups * shape.heads // shape.kv_heads}
  check(dataclasses.replace(shape, **sizes, **heads), "bfloat16", kernel_of(kernel))


def lengths_differ(S, T, dtype="bfloat16"):
  """q over S positions, k and v over T."""
  q, _, _ = Shape(2, S, 2, 1, 64).inputs(dtype)
  _, k, v = Shape(2, T, 2, 1, 64).inputs(dtype, seed=1)
  return q, k, v


@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_queries_than_keys_in_segments_in_any_order(kernel):
  rng, lengths = np.random.default_rng(3), (100, 300)
  segments = tuple(jnp.asarray(rng.integers(4, size=(2, n)), jnp.int32) for n in lengths)
  check(PLAIN, "bfloat16", kernel_of(kernel), segments, lengths_differ(*lengths))


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing_are_zero(kernel):
  """Segment 9 has no keys; behind a window, late queries have none left."""
  segments = np.tile(np.where(np.arange(300) < 40, 9, 1)[None], (2, 1)).astype("int32"), np.ones((2, 100), np.int32)
  segments = tuple(map(jnp.asarray, segments))
  unseen = np.r_[0:40, 149:300]
  for found in check(PLAIN, "bfloat16", kernel_of(kernel), segments, lengths_differ(300, 100), window=50):
    out, lse = map(np.asarray, found[:2])
    assert (out[:, unseen] == 0).all() and (lse[:, unseen] == UNSEEN).all()
    assert (out[:, 40:149] != 0).any(-1).all() and (lse[:, 40:149] > UNSEEN).all()


# queries, keys, documents; causal, window. Every pair of both once, in both ways to go
LENGTHS = [(200, 200, None), (100, 210, None), (210, 100, None), (200, 200, 4), (200, 200, 20)]
MASKS = [(True, None), (True, 1), (True, 90), (False, None)]
BLOCKS = [(*lengths, *mask, (i + j) % 2 == 1) for i, lengths in enumerate(LENGTHS) for j, mask in enumerate(MASKS)]
BLOCKS += [(200, 200, None, False, -40, False), (210, 210, None, False, -7, True)]  # windows before the queries


@pytest.mark.parametrize("S,T,documents,causal,window,by_key", BLOCKS)
def test_blocks_that_hold_nothing_are_not_visited(S, T, causal, window, documents, by_key):
  """The stretch holds every block with a seen pair and, documents being packed, no other; unmasked ones see all."""
  block_q, block_kv, mask = 16, 32, Mask(causal, window)
  segments = dataclasses.replace(PLAIN, batch=3, length=S, documents=documents).segment_ids()
  seen = np.broadcast_to(mask.visible(np.arange(S)[:, None], np.arange(T)[None]), (3, S, T)).copy()
  if segments is not None:
    seen &= np.asarray(segments[:, :, None] == segments[:, None, :])
  stretches = np.asarray(block_ranges(mask, S, T, block_q, block_kv, segments, segments, by_key=by_key))
  if by_key:
    seen, block_q, block_kv = seen.swapaxes(1, 2), block_kv, block_q
  for b in range(stretches.shape[1]):
    for i in range(stretches.shape[2]):
      rows = seen[b, i * block_q : (i + 1) * block_q]
      first, full_first, full_last, last = stretches[:, b, i]
      assert first <= full_first <= full_last <= last
      for j in range(-(-rows.shape[1] // block_kv)):
        block = rows[:, j * block_kv : (j + 1) * block_kv]
        assert (first <= j < last) == block.any(), (b, i, j)
        if full_first <= j < full_last:
          assert block.all()


def test_large_scores_do_not_overflow_and_batches_are_mapped():
  q, k, v = with_shape(length=150).inputs("float32")
  settings = {"mask": Mask(True, None), "scale": 0.125, "logits_soft_cap": None, "blocks": SMALL_BLOCKS}
  attention = lambda q, k, v: kernel_of("tpu")(q, k, v, None, None, **settings)[0]
  stacked = tuple(np.stack([x, 30 * np.asarray(x)]) for x in (q, k, v))
  usual, large = jax.jit(jax.vmap(attention))(*stacked)
  expected = jax.jit(functools.partial(public.attention, implementation="reference"))(q, k, v)
  np.testing.assert_allclose(usual, expected, atol=1e-6)
  assert np.isfinite(large).all()


def test_a_model_has_the_same_gradients_with_the_kernel(monkeypatch):
  """The whole loss, on a mesh, in the solver's scan and rematerialized, with the kernel of a config on a TPU."""
  sizes = {"num_steps": 2, "weights": "shared"}
  params = params_of(moved_instance(small_model(**sizes)))

  def gradients(implementation):
    config = small_config(small_model(**sizes, attention=implementation), remat="full", loss_chunks=1)
    function = lambda p, b: loss_and_gradients(config, uniform_grid(2, 2.0), p, b, jax.random.key(0))
    with jax.set_mesh(sharding.make_mesh(config.mesh, jax.devices()[:1])):  # so that it runs under shard_map
      return jax.jit(function)(params, packed_batch(config))

  with monkeypatch.context() as patch:
    patch.setattr(dispatch, "_function", lambda chosen, _: {"pallas_tpu": kernel_of("tpu")}[chosen])
    ours = gradients("pallas_tpu")
  equal(ours, gradients("reference"), 1e-6, 1e-3)


def tpu_races_found() -> bool:
  """Whether the TPU interpreter has found races; later versions raise by themselves."""
  try:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    return interpreter.races.races_found
  except (ImportError, AttributeError):
    return False


def gpu_races_found() -> bool:
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  return gpu_callbacks.get_races().races_found


@pytest.mark.skipif(ON_GPU, reason="the GPU's own kernel runs")
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_interpreters_find_no_race(kernel):
  function = kernel_of(kernel)
  if kernel == "tpu":
    shape, found, options = Shape(1, 200, 2, 1, 64), tpu_races_found, {"blocks": SMALL_BLOCKS}
    interpret = pltpu.InterpretParams(detect_races=True)
  else:
    shape, found, options = Shape(1, 300, 2, 1, 64), gpu_races_found, {}
    interpret = dataclasses.replace(function.keywords["interpret"], detect_races=True)
  options |= {"mask": Mask(True, None), "scale": 0.125, "logits_soft_cap": None, "interpret": interpret}
  loss = lambda *qkv: function(*qkv, None, None, **options)[0].astype(jnp.float32).sum()
  jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*shape.inputs("bfloat16")))
  assert not found()


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_a_program_with_64_bit_integers_can_trace_the_kernels_and_lower_those_for_tpus(kernel):
  kernel_of(kernel)  # skips without it
  q = jax.ShapeDtypeStruct((2, 300, 2, 64), jnp.bfloat16)
  loss = lambda q: public.attention(q, q, q, implementation=f"pallas_{kernel}").astype(jnp.float32).sum()
  with jax.enable_x64(True):
    assert jax.eval_shape(jax.grad(loss), q) == q
    if kernel == "tpu":
      jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(q)


@pytest.mark.skipif(ON_GPU, reason="some lines name the CPU")
@pytest.mark.parametrize(
  "changes,part",
  [
    ({"q": np.zeros((2, 8, 64), "float32")}, "q: shape (2, 8, 64); must have 4 axes"),
    ({"k": jnp.zeros((2, 8, 3, 64)), "v": jnp.zeros((2, 8, 3, 64))}, "k: 3 heads; must divide the 4 heads of q"),
    ({"v": jnp.zeros((2, 9, 2, 64))}, "v: shape (2, 9, 2, 64); with q"),
    ({"k": jnp.zeros((2, 8, 2, 64), jnp.bfloat16)}, "k: dtype bfloat16; must be that of q, float32"),
    ({"window": 0}, "window=0: must be an integer, with causal=True of at least 1"),
    ({"scale": 0.0}, "scale=0.0: must be above 0"),
    ({"segment_ids": jnp.zeros((2, 7), int)}, "segment_ids of queries: int32 (2, 7); must be integers (2, 8)"),
    ({"segment_ids": (jnp.zeros((2, 8), int), None)}, "segment_ids: one of the pair is None"),
    ({"implementation": "flash"}, "implementation='flash': must be one of auto, reference, pallas, pallas_"),
    ({"implementation": "pallas"}, "the backend is 'cpu', this implementation needs 'tpu' or 'gpu'; use 'auto'"),
    ({"implementation": "pallas_gpu"}, " on a GPU"),  # it has no dtype float32, or needs jax 0.11.2
  ],
)
def test_arguments_that_do_not_fit_are_told(changes, part):
  arguments = {"q": jnp.zeros((2, 8, 4, 64)), "k": jnp.zeros((2, 8, 2, 64)), "v": jnp.zeros((2, 8, 2, 64)), **changes}
  q, k, v = (arguments.pop(name) for name in "qkv")
  assert part in told(lambda: public.attention(q, k, v, **arguments), ValueError)


def test_a_model_on_the_cpu_of_an_accelerator_s_host_takes_no_kernel(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  with jax.default_device(jax.devices("cpu")[0]):
    assert public.choose(dtype=jnp.dtype("float32"), head_dim=64)[0] == "reference"


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_may_be_larger_than_any_integer_of_the_kernels(causal):
  q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 16)), jnp.float32)
  whole = public.attention(q, q, q, causal=causal)
  for window in (8, 2**31 - 1, sys.maxsize):
    np.testing.assert_array_equal(public.attention(q, q, q, causal=causal, window=window), whole)
  if not causal:
    assert not np.asarray(public.attention(q, q, q, causal=False, window=-sys.maxsize)).any()


@pytest.mark.parametrize(
  "asked,backend,dtype,head_dim,unsupported,chosen",
  [
    ("auto", "cpu", "bfloat16", 64, None, "reference"),
    (None, "tpu", "bfloat16", 64, None, "pallas"),
    ("auto", "tpu", "float64", 64, None, "reference"),
    ("auto", "hopper", "bfloat16", 256, "soft cap", "pallas"),
    ("auto", "hopper", "float32", 128, None, "reference"),
    ("auto", "gpu", "bfloat16", 128, None, "cudnn"),
    ("auto", "gpu", "bfloat16", 64, "soft cap", "reference"),
    ("pallas_deterministic", "tpu", "bfloat16", 64, None, "pallas_deterministic"),
  ],
)
def test_what_auto_chooses(asked, backend, dtype, head_dim, unsupported, chosen, monkeypatch):
  monkeypatch.setattr(dispatch, "_capability", lambda capability=9.0 if backend == "hopper" else 8.0: capability)
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
  backend = "gpu" if backend == "hopper" else backend
  name, why = public.choose(asked, dtype=jnp.dtype(dtype), head_dim=head_dim, unsupported=unsupported, backend=backend)
  assert name == chosen and why
