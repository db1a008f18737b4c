"""The kernels through the real compilers, for chips that are not here: forward and backward, at the named shapes.

TPU: needs the libtpu wheel, which holds the compiler; .ci/run installs it. GPU: needs jax 0.11.2 or later and the
wheels jax-cuda13-plugin and jax-cuda13-pjrt of its version.
"""

import functools
import os
import re
import shutil

import pytest

from diffeq_nnx.kernels.attention import gpu_one_pass
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


@hopper_code.needs_libtpu
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


@pytest.mark.slow(reason="compiles forward and backward in a process of its own")
@hopper_code.compiles_for_gpus
@pytest.mark.skipif(not shutil.which("nvdisasm"), reason="needs nvdisasm, from CUDA's toolkit or the wheel of triton")
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_gpu_deterministic"])
@pytest.mark.parametrize(
  "width,changes", [(64, {}), (80, {}), (128, {}), (128, {"documents": 2}), (256, {"logits_soft_cap": 50.0})]
)
def test_no_register_is_spilled_and_no_product_is_waited_for_alone(width, changes, implementation):
  text = hopper_code.remarks(width, implementation, **changes)
  spilled = re.findall(r"(\d+) bytes spill", text)  # stores and loads of each kernel
  assert len(spilled) >= 4 and {*spilled} == {"0"}
  assert "(C75" not in text  # matrix products that the compiler kept apart
