"""Attention: one contract for every implementation that this machine can run, over named shapes and features.

The TPU and the GPU kernel run in Pallas's interpreters here (the GPU's needs jax 0.11.2 or later);
tests/test_attention_compile.py gives them to the real compilers. On a machine with a Hopper GPU, which tests do not see
unless asked, the GPU kernel itself runs, on the whole of each named shape:

  DIFFEQ_NNX_IN_TESTS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -n 4 tests/test_attention.py -k gpu
"""

import dataclasses
import functools

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
from diffeq_nnx.training.step import init_state, loss_and_gradients
from tests.conftest import packed_batch, small_config, small_model

SMALL_BLOCKS = TPUBlocks(128, 128, 128, 128, chunk_bytes=300_000)  # several blocks and chunks at short lengths
PLAIN = Shape(2, 300, 2, 2, 64)
FEATURES = {
  "plain": (PLAIN, {}),
  "not_causal": (PLAIN, {"causal": False}),
  "one_position": (dataclasses.replace(PLAIN, length=1), {}),
  "whole_blocks": (dataclasses.replace(PLAIN, length=256), {}),
  "grouped": (dataclasses.replace(PLAIN, heads=6), {}),
  "one_kv_head": (dataclasses.replace(PLAIN, heads=4, kv_heads=1), {}),
  "window": (dataclasses.replace(PLAIN, window=100), {}),
  "window_of_one": (dataclasses.replace(PLAIN, window=1), {}),
  "window_over_a_chunk_before": (dataclasses.replace(PLAIN, window=-40), {"causal": False}),
  "documents": (dataclasses.replace(PLAIN, documents=5), {}),
  "documents_in_a_window": (dataclasses.replace(PLAIN, documents=3, window=70), {}),
  "documents_not_causal": (dataclasses.replace(PLAIN, documents=5), {"causal": False}),
  "soft_cap_and_scale": (dataclasses.replace(PLAIN, logits_soft_cap=2.0), {"scale": 0.3}),
  "head_32": (dataclasses.replace(PLAIN, heads=4, kv_heads=4, head_dim=32), {}),
  "head_64_alone": (dataclasses.replace(PLAIN, heads=3, kv_heads=3), {}),
  "head_64_grouped_by_four": (dataclasses.replace(PLAIN, heads=8), {}),
  "head_80": (dataclasses.replace(PLAIN, head_dim=80), {}),
  "head_96": (dataclasses.replace(PLAIN, head_dim=96), {}),
  "head_128": (dataclasses.replace(PLAIN, head_dim=128), {}),
  "head_256": (dataclasses.replace(PLAIN, head_dim=256), {}),
}


GPU_KERNELS = ["gpu", "gpu_deterministic"]  # backward in one pass, and in two
KERNELS = ["tpu", *GPU_KERNELS]
ON_GPU = jax.default_backend() == "gpu"


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


def value_and_gradients(function, q, k, v):
  """(out, lse, dq, dk, dv) for fixed random gradients of out and lse."""
  (out, lse), pull_back = jax.vjp(function, q, k, v)
  rng = np.random.default_rng(7)
  dout, dlse = (rng.normal(size=array.shape).astype("float32") for array in (out, lse))
  seen = jnp.isfinite(lse)
  dout, dlse = jnp.asarray(dout, out.dtype), jnp.where(seen, dlse, 0).astype(lse.dtype)
  return (out, jnp.where(seen, lse, -1e3), *pull_back((dout, dlse)))


def check(shape: Shape, dtype: str, kernel, segment_ids=None, inputs=None, **options):
  """An interpreted kernel against the reference in float64."""
  q, k, v = inputs or shape.inputs(dtype)
  segment_ids = shape.segment_ids() if segment_ids is None else segment_ids
  pair = dispatch._segments(segment_ids)
  options = {"window": shape.window, "logits_soft_cap": shape.logits_soft_cap, **options}
  mask = Mask(options.get("causal", True), options["window"])
  scale = options.get("scale") or shape.head_dim**-0.5
  ours = jax.jit(
    functools.partial(
      value_and_gradients,
      lambda *qkv: kernel(*qkv, *pair, mask=mask, scale=scale, logits_soft_cap=options["logits_soft_cap"]),
    )
  )(q, k, v)
  assert ours[0].dtype == ours[2].dtype == ours[3].dtype == jnp.dtype(dtype) and ours[1].dtype == jnp.float32
  with jax.enable_x64(True):
    reference = jax.jit(
      functools.partial(
        value_and_gradients,
        functools.partial(
          public.attention, segment_ids=segment_ids, return_lse=True, implementation="reference", **options
        ),
      )
    )
    exact = reference(*(jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v)))
  limit = {"float32": 5e-6, "bfloat16": 1e-2}[dtype]  # of the norm: some tens of roundings of float32, two of bfloat16
  for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, exact):
    a, b = np.asarray(a, np.float64), np.asarray(b)
    error = np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-2 * np.sqrt(b.size))
    assert error < limit, f"{name}: {error:.2g}"
    assert np.abs(a - b).max() < 30 * limit * max(1.0, np.abs(b).max()), name


NAMED = ("head_80", "head_96", "head_128", "head_256", "one_kv_head")  # which the named shapes, below, have


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature not in NAMED])
def test_every_feature_of_the_tpu_kernel_agrees_with_the_reference(feature):
  shape, options = FEATURES[feature]
  check(shape, "float32", functools.partial(kernel_of("tpu"), blocks=SMALL_BLOCKS), **options)


# one group of heads: of one head the first of these is "plain", and the second "one_kv_head"
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize(
  "feature", [feature for feature in FEATURES if feature not in ("head_64_alone", "head_64_grouped_by_four")]
)
def test_every_feature_of_the_gpu_kernel_agrees_with_the_reference(feature, kernel):
  shape, options = FEATURES[feature]
  check(
    dataclasses.replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1),
    "bfloat16",
    kernel_of(kernel),
    **options,
  )


# Of the TPU kernel all but those that are gpt_small and llama1b at this size; of the GPU's, whose tiles depend on the
# head's width alone, those with features that no test above has together.
@pytest.mark.parametrize(
  "name,kernel",
  [
    *((name, "tpu") for name in SHAPES if name not in ("gpt_large", "llama_4k", "llama_8k")),
    *(
      (name, kernel)
      for kernel in GPU_KERNELS
      for name in (SHAPES if ON_GPU else ("llama_grouped", "gemma_head_256", "mistral_window", "packed_documents"))
    ),
  ],
)
def test_every_named_shape_agrees_with_the_reference(name, kernel):
  """With the tuned blocks; one sequence, one group of heads, and at most 1024 positions (512 for the slower one).

  On a GPU: up to two sequences and two groups of heads, at the whole length.
  """
  shape, whole = SHAPES[name], ON_GPU and kernel != "tpu"
  length = shape.length if whole else min(shape.length, 1024 if kernel == "tpu" else 512)
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
@pytest.mark.parametrize("S,T,causal", [(100, 300, True), (100, 300, False)])  # more queries: below
def test_queries_and_keys_of_different_lengths(S, T, causal, kernel):
  check(PLAIN, "bfloat16", kernel_of(kernel), inputs=lengths_differ(S, T), causal=causal)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing_are_zero(kernel):
  """Segment 9 has no keys; behind a window, late queries have none left."""
  q, k, v = lengths_differ(300, 100)
  kernel = kernel_of(kernel)
  segments = np.tile(np.where(np.arange(300) < 40, 9, 1)[None], (2, 1)).astype("int32"), np.ones((2, 100), np.int32)
  segments = tuple(map(jnp.asarray, segments))
  check(PLAIN, "bfloat16", kernel, inputs=(q, k, v), segment_ids=segments, window=50)
  for function in (
    functools.partial(public.attention, implementation="reference", return_lse=True),
    lambda *x, segment_ids, window: kernel(
      *x, *segment_ids, mask=Mask(True, window), scale=0.125, logits_soft_cap=None
    ),
  ):
    run = jax.jit(lambda *qkv: function(*qkv, segment_ids=segments, window=50))
    out, lse = map(np.asarray, run(q, k, v))
    unseen = np.r_[0:40, 149:300]
    assert (out[:, unseen] == 0).all() and (lse[:, unseen] == -np.inf).all()
    assert (out[:, 40:149] != 0).any(-1).all() and np.isfinite(lse[:, 40:149]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_segment_ids_in_any_order(kernel):
  ids = jnp.asarray(np.random.default_rng(3).integers(4, size=(2, 300)), jnp.int32)
  check(PLAIN, "bfloat16", kernel_of(kernel), segment_ids=ids)


MASKS = [(True, None), (True, 1), (True, 90), (False, None)]
BEFORE = [
  (length, length, None, False, window, by_key) for length, window, by_key in ((200, -40, False), (210, -7, True))
]
LENGTHS = [(200, 200, None), (100, 210, None), (210, 100, None), (200, 200, 1), (200, 200, 4), (200, 200, 20)]


# every pair of lengths and mask once, and both ways to go with each of them
@pytest.mark.parametrize(
  "S,T,documents,causal,window,by_key",
  [
    *((*lengths, *mask, (i + j) % 2 == 1) for i, lengths in enumerate(LENGTHS) for j, mask in enumerate(MASKS)),
    *BEFORE,
  ],
)
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


def small_attention(q, k, v):
  """The interpreted kernel."""
  return attention_tpu(
    q, k, v, None, None, mask=Mask(True, None), scale=0.125, logits_soft_cap=None, blocks=SMALL_BLOCKS, interpret=True
  )[0]


def test_it_works_under_the_transformations_of_jax():
  """And under shard_map over batch and heads."""
  q, k, v = dataclasses.replace(PLAIN, length=150).inputs("float32")
  plain = jax.jit(small_attention)(q, k, v)
  stacked = tuple(np.stack([x, 30 * np.asarray(x)]) for x in (q, k, v))
  usual, large = jax.jit(jax.vmap(small_attention))(*stacked)
  np.testing.assert_allclose(usual, plain, atol=1e-6)
  assert np.isfinite(large).all()  # large scores do not overflow
  loss = lambda f: lambda q: jnp.square(f(q, k, v)).sum()
  slope = lambda f: jax.jit(jax.grad(loss(f)))(q)
  gradient = slope(small_attention)
  kept = jax.checkpoint(small_attention)
  scanned = lambda q, k, v: jax.lax.scan(lambda c, _: (c, kept(c, k, v)), q, None, length=2)[1][1]
  np.testing.assert_allclose(slope(scanned), gradient, atol=1e-5)
  mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = jax.sharding.PartitionSpec("data", None, "model", None)
  mapped = jax.shard_map(small_attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  np.testing.assert_allclose(slope(mapped), gradient, atol=1e-5)


def test_a_model_has_the_same_gradients_with_the_kernel(monkeypatch):
  """The whole loss, in the solver's scan and rematerialized, with the kernel that a config on a TPU would name."""

  def gradients(implementation):
    config = small_config(small_model(attention=implementation), remat="full")
    params = jax.jit(init_state, static_argnums=0)(config)["params"]
    function = lambda p, b: loss_and_gradients(config, uniform_grid(3, 3.0), p, b, jax.random.key(0))
    return jax.jit(function)(params, packed_batch(config))

  with monkeypatch.context() as patch:
    patch.setattr(dispatch, "_function", lambda chosen, _: {"pallas_tpu": kernel_of("tpu")}[chosen])
    ours = gradients("pallas_tpu")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), ours, gradients("reference"))


def tpu_races_found() -> bool:
  """Whether the TPU interpreter has found races; later versions raise by themselves."""
  try:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    return interpreter.races.races_found
  except (ImportError, AttributeError):
    return False


def test_the_tpu_interpreter_finds_no_race():
  q, k, v = Shape(1, 200, 2, 1, 64, documents=2).inputs("float32")
  function = functools.partial(
    attention_tpu,
    mask=Mask(True, None),
    scale=0.125,
    logits_soft_cap=None,
    blocks=SMALL_BLOCKS,
    interpret=pltpu.InterpretParams(detect_races=True),
  )
  jax.block_until_ready(jax.jit(jax.grad(lambda q: function(q, k, v, None, None)[0].sum()))(q))
  assert not tpu_races_found()


def test_a_program_with_64_bit_integers_can_trace_the_gpu_kernel():
  kernel_of("gpu")  # skips without it
  q, k, v = (jax.ShapeDtypeStruct((2, 300, 2, 64), jnp.bfloat16) for _ in "qkv")
  loss = lambda q, k, v: public.attention(q, k, v, implementation="pallas_gpu").astype(jnp.float32).sum()
  with jax.enable_x64(True):
    assert jax.eval_shape(jax.grad(loss), q, k, v) == q


@pytest.mark.skipif(ON_GPU, reason="the GPU's own kernel runs")
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_the_gpu_interpreter_finds_no_race(kernel):
  kernel = kernel_of(kernel)
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  q, k, v = Shape(1, 300, 2, 1, 64).inputs("bfloat16")
  function = functools.partial(
    kernel,
    mask=Mask(True, None),
    scale=0.125,
    logits_soft_cap=None,
    interpret=dataclasses.replace(kernel.keywords["interpret"], detect_races=True),
  )
  gradients = jax.grad(lambda *qkv: function(*qkv, None, None)[0].sum().astype(jnp.float32), (0, 1, 2))
  jax.block_until_ready(jax.jit(gradients)(q, k, v))
  assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
  "changes,part",
  [
    ({"q": np.zeros((2, 8, 64), "float32")}, "q: shape (2, 8, 64); must have 4 axes"),
    ({"k": jnp.zeros((2, 8, 3, 64)), "v": jnp.zeros((2, 8, 3, 64))}, "k: 3 heads; must divide the 4 heads of q"),
    ({"v": jnp.zeros((2, 9, 2, 64))}, "v: shape (2, 9, 2, 64); with q"),
    ({"k": jnp.zeros((2, 8, 2, 64), jnp.bfloat16)}, "k: dtype bfloat16; must be that of q, float32"),
    ({"q": jnp.zeros((2, 8, 4, 64), jnp.float16)}, "q: dtype float16; must be float32 or bfloat16"),
    ({"window": 0.5, "causal": False}, "window=0.5: must be an integer"),
    ({"window": 0}, "window=0: must be an integer, with causal=True of at least 1"),
    ({"scale": 0.0}, "scale=0.0: must be above 0"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0: must be above 0"),
    ({"segment_ids": jnp.zeros((2, 8))}, "segment_ids of queries: float32 (2, 8); must be integers (2, 8)"),
    ({"segment_ids": jnp.zeros((2, 7), int)}, "segment_ids of queries: int32 (2, 7); must be integers (2, 8)"),
    ({"segment_ids": (jnp.zeros((2, 8), int), None)}, "segment_ids: one of the pair is None"),
    ({"implementation": "flash"}, "implementation='flash': must be one of auto, reference, pallas, pallas_"),
    (
      {"implementation": "pallas"},
      "implementation='pallas': the backend is 'cpu', this implementation needs 'tpu' or 'gpu'",
    ),
    (
      {"implementation": "pallas_gpu"},
      "implementation='pallas_gpu': has no dtype float32 on a GPU"
      if jax.__version_info__ >= (0, 11, 2)
      else "implementation='pallas_gpu': needs jax 0.11.2 on a GPU",
    ),
    ({"implementation": "cudnn"}, "implementation='cudnn': the backend is 'cpu', this implementation needs 'gpu'"),
  ],
)
@pytest.mark.skipif(ON_GPU, reason="some lines name the CPU")
def test_arguments_that_do_not_fit_are_told(changes, part):
  arguments = {"q": jnp.zeros((2, 8, 4, 64)), "k": jnp.zeros((2, 8, 2, 64)), "v": jnp.zeros((2, 8, 2, 64)), **changes}
  q, k, v = (arguments.pop(name) for name in "qkv")
  with pytest.raises(ValueError) as told:
    public.attention(q, k, v, **arguments)
  assert part in str(told.value)


@pytest.mark.parametrize(
  "asked,backend,dtype,head_dim,unsupported,chosen",
  [
    ("auto", "cpu", "bfloat16", 64, None, "reference"),
    (None, "tpu", "bfloat16", 64, None, "pallas"),
    ("auto", "tpu", "float64", 64, None, "reference"),
    ("auto", "hopper", "bfloat16", 256, "soft cap", "pallas"),
    ("auto", "hopper", "float32", 128, None, "reference"),
    ("auto", "gpu", "bfloat16", 128, None, "cudnn"),
    ("auto", "gpu", "float32", 128, None, "reference"),
    ("auto", "gpu", "bfloat16", 256, None, "reference"),
    ("auto", "gpu", "bfloat16", 64, "soft cap", "reference"),
    ("auto", "gpu", "bfloat16", 64, "deterministic gradients", "reference"),
    ("pallas_deterministic", "tpu", "bfloat16", 64, None, "pallas_deterministic"),
    ("reference", "tpu", "bfloat16", 64, None, "reference"),
    ("cudnn", "gpu", "bfloat16", 64, None, "cudnn"),
  ],
)
def test_what_auto_chooses(asked, backend, dtype, head_dim, unsupported, chosen, monkeypatch):
  monkeypatch.setattr(dispatch, "_capability", lambda capability=9.0 if backend == "hopper" else 8.0: capability)
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
  backend = "gpu" if backend == "hopper" else backend
  name, why = public.choose(asked, dtype=jnp.dtype(dtype), head_dim=head_dim, unsupported=unsupported, backend=backend)
  assert name == chosen and why
