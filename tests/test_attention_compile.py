"""The kernels through the real compilers, for chips that are not here: forward and backward, at the named shapes.

TPU: needs the libtpu wheel, which holds the compiler; .ci/run installs it. GPU: needs jax 0.11.2 or later and the
wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version.
"""

import functools
import importlib.util
import os
import shutil

import pytest

from diffeq_nnx.kernels.attention import gpu_one_pass
from diffeq_nnx.kernels.attention.blocks import TPUBlocks
from diffeq_nnx.kernels.attention.shapes import SHAPES, Shape
from launch import gpus
from launch.benchmarks import kernel_schedule
from tests import hopper_code

pytestmark = pytest.mark.usefixtures("optimizations")


@functools.cache
def tpu(topology: str):
  """One device of a TPU."""
  from jax.experimental import topologies

  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]


# compiled by default: each chip once, both dtypes, and documents, a window and a wide head with a soft cap
TPUS = {
  ("odd_length", "float32", "v4:2x2x2"),
  ("packed_documents", "bfloat16", "v5e:2x4"),
  ("mistral_window", "bfloat16", "v5p:2x2x2"),
  ("gemma_head_256", "bfloat16", "v6e:2x4"),
}
CHIPS = [
  *((name, "bfloat16", topology) for name in SHAPES for topology in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")),
  *(("odd_length", "float32", topology) for topology in ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4")),
  *((name, "bfloat16", "v4:2x2x2") for name in ("gpt_small", "llama1b", "llama_8k", "packed_documents")),
]
slow = pytest.mark.slow(reason="the TPU compiler takes seconds for each shape and chip; four of them run by default")


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the TPU compiler: pip install libtpu")
@pytest.mark.parametrize(
  "name,dtype,topology", [pytest.param(*case, marks=() if case in TPUS else slow) for case in CHIPS]
)
def test_forward_and_backward_compile_for_tpus(name, dtype, topology):
  shape = SHAPES[name]
  compiled = hopper_code.lower_gradients(shape, dtype, tpu(topology), "pallas_tpu").compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2  # forward and backward
  if shape.length >= 2048:  # the scores are nowhere whole
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shape.batch * shape.heads * shape.length**2


SCHEDULE = """\
LB: loop body

     0   :  { %1 = smov 0 } /* Start region 1 */
   0x1 LB: > { %2 = sld } /* Start region 3 */
   0x2   : > { %3 = sbr.rel (%p1) target = $region9 }
   0x3   : > { %4 = vst /* of a window
that fills two lines */ } /* Start region 8 :: End region 8 */
   0x4 PF: > { %5 = sld } /* Start/End empty region 9 */
   0x5   : > { %6 = sbr.rel (%p2) target = $region11 }
   0x6   : > { %7 = sld }
   0x7 LB: >> { %8 = vmatmul } /* Start region 10 */
   0x8   : >> { %9 = sbr.rel (!%p3) target = $region10 }
   0x9 PF: > { %10 = sld } /* Start/End empty region 11 */
   0xa   : > { %11 = sbr.rel (!%p4) target = $region3 }
   0xb   :  { %12 = vsyncpa }
"""


def test_cycles_are_bundles_times_trips_and_no_fewer_than_the_products_take():
  kernel = kernel_schedule.read_schedule(SCHEDULE)
  regions = [(region.loop, region.first, region.end, region.bundles) for region in kernel.walk()]
  # the kernel, the loop over the grid, a branch, the guard of the inner loop, the inner loop
  assert regions == [(False, 0, 12, 2), (True, 1, 11, 6), (False, 3, 4, 1), (False, 6, 9, 1), (True, 7, 9, 2)]
  trips = lambda operations: kernel_schedule.Trips(steps=100, once=10, visits=((1000, operations),))
  assert trips(0).cycles(kernel, peak=8) == 100 * (6 + 1) + 10 * 1 + 1000 * 2
  assert trips(24).cycles(kernel, peak=8) == 100 * (6 + 1) + 10 * 1 + 1000 * 3


def test_trips_are_those_of_a_causal_sequence():
  forward, backward = kernel_schedule.our_trips(2048, 64, TPUBlocks(block_q_back=256))  # two heads at a time
  assert (forward.steps, forward.once) == (4 / 2, 4 / 2)
  assert [2 * runs for runs, _ in forward.visits] == [1, 6, 3]  # masked, unmasked, masked
  assert [2 * runs for runs, _ in backward.visits] == [8, 8, 12, 0]  # delta's first
  assert forward.visits[0][1] == 2 * 4 * 512 * 512 * 128
  forward, backward = kernel_schedule.splash_trips(2048, 64, 512, tokamax=False)
  assert (forward.steps, backward.steps, [runs for runs, _ in forward.visits]) == (16, 16, [10])


# of the named shapes one of each width and each feature: the GPU kernel's tiles depend on the head's width alone
H100_SHAPES = {
  **{name: (shape, {}) for name, shape in SHAPES.items() if name not in ("gpt_large", "llama_4k", "llama_8k")},
  "not_causal": (Shape(2, 300, 4, 2, 64), {"causal": False}),
  "documents_not_causal": (Shape(2, 300, 4, 2, 64, documents=5), {"causal": False}),
  "head_40": (Shape(2, 300, 4, 2, 40), {}),
  "head_112": (Shape(2, 300, 4, 2, 112), {}),
}


@hopper_code.compiles_for_gpus
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_gpu_deterministic"])
@pytest.mark.parametrize("name", H100_SHAPES)
def test_forward_and_backward_compile_for_an_h100(name, implementation):
  shape, more = H100_SHAPES[name]
  lowered = hopper_code.lower_gradients(shape, "bfloat16", gpus.devices_of("h100:1")[0], implementation, **more)
  assert "nvshmem" not in lowered.as_text()
  one_pass = implementation == "pallas_gpu" and gpu_one_pass.takes(shape.head_dim)
  kernels = 4 if shape.head_dim > 128 else 2 if one_pass else 3  # forward, dQ, dK and dV: in wide heads apart
  assert lowered.compile().as_text().count('custom_call_target="mosaic_gpu') == kernels


def reads_machine_code(test):
  """Marks of a test of an H100's machine code."""
  missing = "needs nvdisasm, from CUDA's toolkit or the wheel of triton"
  test = pytest.mark.skipif(not shutil.which("nvdisasm"), reason=missing)(hopper_code.compiles_for_gpus(test))
  return pytest.mark.slow(reason="compiles forward and backward in a process of its own")(test)


@reads_machine_code
@pytest.mark.parametrize(
  "width,products",
  [
    (64, ["4 x 64x128x16", "8 x 64x64x16"]),  # q k^T, weights times v
    (80, ["5 x 64x128x16", "8 x 64x80x16"]),  # not padded to 128
    (128, ["16 x 64x128x16"]),  # 8 of each
  ],
)
def test_forward_machine_code_for_an_h100(width, products):
  """Both products of a turn are started without a wait, and the turn is given before one has ended."""
  forward, *_ = hopper_code.machine_code(width)
  masked, unmasked = forward.loops
  for loop in (masked, unmasked):
    events = forward.events(loop)
    # the keys, the values, the turn; products; the other's turn; q k^T is there: the keys' buffer is free
    start = ["wait"] * 3 + products + ["arrive", "until 1", "arrive"]
    assert events[: len(start)] == start
    # then the softmax, and at its side the end of weights times v: the values' buffer is free
    assert sorted(events[len(start) :])[:2] == ["arrive", "exponentials"] and events.count("until 0") == 1
    assert events.count("arrive") == 3
  assert len(unmasked) < len(masked) < 1.6 * len(unmasked)  # one comparison for each score
  assert len(unmasked) < 500


@reads_machine_code
@pytest.mark.parametrize("width", [64, 128])
def test_backward_machine_code_for_an_h100(width):
  """The softmax runs under the product of the output's gradient and the values; in one pass, no product is waited for
  before the next one has started, but where the warpgroups exchange the scores' gradient."""
  _, one_pass = hopper_code.machine_code(width)
  dv = dk = f"4 x 64x{width}x16"
  dq = f"8 x 64x{width // 2}x16"  # half of the columns, from the keys of both
  for loop in one_pass.loops:
    events = one_pass.events(loop)
    expected = ["wait", f"{width // 8} x 64x64x16", "until 1", "exponentials", dv, "until 1", "arrive", "wait", dq, dk]
    assert events[:10] == expected and events[10] == "until 1" and set(events[11:]) == {"until 0", "arrive"}
  _, *two_passes = hopper_code.machine_code(width, "pallas_gpu_deterministic")
  assert len(two_passes) == 2
  for code in two_passes:
    for loop in code.loops:
      assert code.events(loop)[:5] == ["wait", f"{width // 8} x 64x64x16", "until 1", "exponentials", "until 0"]


@reads_machine_code
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_gpu_deterministic"])
@pytest.mark.parametrize(
  "width,changes", [(64, {}), (80, {}), (128, {}), (128, {"documents": 2}), (256, {"logits_soft_cap": 50.0})]
)
def test_no_register_is_spilled_and_no_product_is_waited_for_alone(width, changes, implementation):
  for code in hopper_code.machine_code(width, implementation, **changes):
    assert not code.spills and not code.complaints


SASS = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads

\t.target\tsm_90a
   -:-:-:Y:04        /*0000*/                   MOV R1, R2 ;
.L_x_1:
   -:-:-:Y:05        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
   -:-:-:Y:05        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
   -:-:-:Y:01        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT ;
   -:-:-:Y:01        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;
   -:-:-:Y:15        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR20], R88, gsb0 ;
   -:-:-:Y:02        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
   -:-:-:Y:03        /*0070*/                   MUFU.EX2 R4, R5 ;
   -:-:-:Y:03        /*0080*/                   MUFU.EX2 R6, R7 ;
   -:-:-:Y:02        /*0090*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ ;
   -:-:-:Y:05        /*00a0*/               @P1 BRA `(.L_x_1) ;
   -:-:-:Y:05        /*00b0*/                   EXIT ;
.L_x_2:
   -:-:-:Y:05        /*00c0*/                   BRA `(.L_x_3) ;
"""


def test_machine_code_is_read_in_order():
  (code,) = hopper_code.parse(SASS)
  assert code.spills == 16 and not code.complaints
  assert code.loops == (range(1, 11),)  # the jump back from behind the exit is no loop
  assert code.events(code.loops[0]) == ["wait", "2 x 64x128x16", "1 x 64x64x16", "until 1", "exponentials", "arrive"]
