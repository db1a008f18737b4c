"""The estimate for GPUs: what a compiled program computes, reads and sends, on programs written by hand."""

import pytest

from launch import gpus
from launch.benchmarks import hlo, roofline

GPU_STEP = """HloModule step, is_scheduled=true, num_partitions=8

%max (u: f32[], v: f32[]) -> f32[] {
  %u = f32[] parameter(0)
  %v = f32[] parameter(1)
  ROOT %larger = f32[] maximum(%u, %v)
}

%gemm (a: bf16[8,4], b: bf16[4,16]) -> bf16[8,16] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%read (stack: f32[10,8], i: s32[]) -> f32[1,8] {
  %stack = f32[10,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
}

%write (stack.1: f32[10,8], i.1: s32[], row.1: f32[1,8]) -> f32[10,8] {
  %stack.1 = f32[10,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %row.1 = f32[1,8]{1,0} parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %written = f32[10,8]{1,0} dynamic-update-slice(%stack.1, %row.1, %i.1, %zero.1)
}

%sum (x: f32[10,8]) -> f32[8] {
  %x = f32[10,8]{1,0} parameter(0)
  %none = f32[] constant(0)
  %powers = f32[10,8]{1,0} exponential(%x)
  ROOT %sums = f32[8]{0} reduce(%powers, %none), dimensions={0}, to_apply=%max
}

%body (s: (s32[], f32[10,8], bf16[8,4], bf16[4,16])) -> (s32[], f32[10,8], bf16[8,4], bf16[4,16]) {
  %s = (s32[], f32[10,8]{1,0}, bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%s), index=0
  %rows = f32[10,8]{1,0} get-tuple-element(%s), index=1
  %left = bf16[8,4]{1,0} get-tuple-element(%s), index=2
  %right = bf16[4,16]{1,0} get-tuple-element(%s), index=3
  %product = bf16[8,16]{1,0} fusion(%left, %right), kind=kCustom, calls=%gemm
  %one-row = f32[1,8]{1,0} fusion(%rows, %at), kind=kLoop, calls=%read
  %start = ((f32[10,8]{1,0}, s32[], f32[1,8]{1,0}), f32[10,8]{1,0}, u32[]) fusion-start(%rows, %at, %one-row), \
kind=kLoop, calls=%write
  %done = f32[10,8]{1,0} fusion-done(%start)
  ROOT %out = (s32[], f32[10,8]{1,0}, bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%at, %done, %left, %right)
}

%c (s.1: (s32[], f32[10,8], bf16[8,4], bf16[4,16])) -> pred[] {
  %s.1 = (s32[], f32[10,8]{1,0}, bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (y: f32[10,8], l: bf16[8,4], r: bf16[4,16], q: bf16[2,8,4,16], f: f32[2,2]) -> f32[8] {
  %y = f32[10,8]{1,0} parameter(0)
  %l = bf16[8,4]{1,0} parameter(1)
  %r = bf16[4,16]{1,0} parameter(2)
  %q = bf16[2,8,4,16]{3,2,1,0} parameter(3)
  %f = f32[2,2]{1,0} parameter(4)
  %zero.2 = s32[] constant(0)
  %state = (s32[], f32[10,8]{1,0}, bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%zero.2, %y, %l, %r)
  %loop = (s32[], f32[10,8]{1,0}, bf16[8,4]{1,0}, bf16[4,16]{1,0}) while(%state), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %rounded = f32[2,2]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %exact = f32[2,2]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
operand_precision={highest,highest}
  %cublas = (bf16[8,16]{1,0}, s8[4096]{0}) custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %ours = (bf16[2,8,4,16]{3,2,1,0}, f32[2,4,8]{2,1,0}) custom-call(%q, %q, %q), custom_call_target="mosaic_gpu_v2"
  %d = (bf16[2,8,4,16]{3,2,1,0}, bf16[2,8,4,16]{3,2,1,0}) custom-call(%q, %q, %q), custom_call_target="mosaic_gpu_v2"
  %gathered = f32[80,8]{1,0} all-gather(%y), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %after = f32[10,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %result = f32[8]{0} fusion(%after), kind=kInput, calls=%sum
}
"""


def gpu_with(bandwidth: float = 1e30, lanes: float = 1e30) -> gpus.Gpu:
  """A GPU that does everything else in no time."""
  return gpus.Gpu("GPU", 1.0, bandwidth, lanes=lanes)


def test_a_gpus_products_are_counted_with_their_loops_and_dtypes():
  found = roofline.seconds(hlo.Program(GPU_STEP), gpu_with(), peak=1.0)
  assert found["products"] == pytest.approx(4 * 2 * 8 * 16 * 4 + 16 / 0.5 + 16 * 989 / 67)  # 3 turns, and cuBLAS
  a_product = 2 * (8 * 8 / 2) * (2 * 4) * 16  # over half of all pairs, of batch x heads
  assert found["attention"] == (2 + 4) * a_product
  wide = GPU_STEP.replace("2,8,4,16", "2,8,4,256").replace(
    "(bf16[2,8,4,256]{3,2,1,0}, bf16[2,8,4,256]{3,2,1,0}) c", "bf16[2,8,4,256]{3,2,1,0} c"
  )
  found = roofline.seconds(hlo.Program(wide), gpu_with(), peak=1.0)
  assert found["attention"] == pytest.approx((2 + (3 + 3 + 2) / 3) * 16 * a_product)


def test_a_gpu_reads_the_part_of_an_array_that_a_fusion_uses():
  """A slice, an update in place; not the loops' states, the scratch memory of a library, or what is communicated."""
  found = roofline.seconds(hlo.Program(GPU_STEP), gpu_with(bandwidth=1e-9), peak=1e30)
  gemm, row = 64 + 128 + 256, 32 + 4 + 32
  assert found["memory"] == pytest.approx(3 * (gemm + 2 * row) + gemm + 2 * 3 * 16 + (320 + 32))
  q, lse = 2048, 256
  assert found["attention"] == pytest.approx(2 * 3 * q + (q + lse) + 2 * q)


def test_a_gpus_lanes_compute_each_element():
  assert roofline.seconds(hlo.Program(GPU_STEP), gpu_with(lanes=1.0), peak=1e30)["elementwise"] == 2 * 80


@pytest.mark.parametrize(
  "groups,members",
  [("mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)), ("[4,2]<=[2,4]T(1,0)", (0, 4)), ("{{0,2},{1,3}}", (0, 2))],
)
def test_the_devices_of_a_collective(groups, members):
  (one,) = hlo.Program(GPU_STEP.replace("[1,8]<=[8]", groups)).collectives
  assert one.members == members


def test_a_ring_over_nodes_takes_the_time_of_its_adapters():
  """Eight GPUs a node: 450 GB/s within it; out of it 50 for each GPU of the ring in the node."""
  gpu = gpus.GPUS["h100"]
  for members, speed in ((range(8), 450), ((0, 8), 50), (range(16), 400), (range(0, 16, 2), 200)):
    one = hlo.Collective("all-gather", (hlo.Array("bf16", (10**9,)),), tuple(members), 3)
    assert roofline.communication_seconds([one], gpu, 8) == pytest.approx(one.sent_bytes / (1e9 * speed))
