"""How compiled programs are read: loops, communication, kernels, and where cycles go, by kind, shape, pass and line."""

import inspect
import re

import jax
import jax.numpy as jnp

from launch.benchmarks import hlo, step_profile
from launch.benchmarks.step_profile import Item

# a loop of 4 turns (1, 3, 5, 7) with a product between two copies, dropout's mask, a norm, a cast, a kernel and
# communication, of which a part is split over two fusions; then an optimizer
STEP = """HloModule step, is_scheduled=true, num_partitions=8

FileNames
1 "PACKAGE/training/step.py"
2 "PACKAGE/model/model.py"
3 "/elsewhere/optax/update.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=8 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=152 end_line=152 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=1}

%product (p.0: bf16[8,64], p.1: bf16[64,32]) -> bf16[8,32,1] {
  %p.0 = bf16[8,64]{1,0} parameter(0)
  %p.1 = bf16[64,32]{1,0} parameter(1)
  %y = bf16[8,32,1]{1,0,2} convolution(%p.0, %p.1), metadata={op_name="a/transpose(jvp())/dot" stack_frame_id=2}
  ROOT %sum.1 = f32[] reduce(%y, %y), metadata={op_name="a/norm" stack_frame_id=3}
}

%mask (p.2: bf16[8,64]) -> pred[8,64] {
  %p.2 = bf16[8,64]{1,0} parameter(0)
  ROOT %below = pred[8,64]{1,0} compare(%p.2, %p.2), metadata={op_name="jvp()/jit(_bernoulli)/lt" stack_frame_id=2}
}

%norm (p.3: bf16[8,64]) -> f32[] {
  %p.3 = bf16[8,64]{1,0} parameter(0)
  %wide = f32[8,64]{1,0} convert(%p.3)
  ROOT %sum = f32[] reduce(%wide, %wide)
}

%gather (p.6: bf16[4]) -> bf16[32] {
  %p.6 = bf16[4]{0} parameter(0)
  ROOT %all = bf16[32]{0} all-gather(%p.6), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}
}

%condition (s.0: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(9)
  %s.0 = (s32[]{:T(128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%s.0), index=0
  ROOT %go = pred[] compare(%at, %limit), direction=LT
}

%body (s.1: (s32[])) -> (s32[]) {
  %s.1 = (s32[]{:T(128)}) parameter(0)
  %at.1 = s32[] get-tuple-element(%s.1), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%at.1, %two)
  %x = bf16[8,64]{1,0} constant({...})
  %w = bf16[64,32]{1,0} constant({...})
  %before = bf16[8,64]{0,1} copy(%x), cycles=10
  %fusion.1 = f32[] fusion(%before, %w), calls=%product, metadata={op_name="a/norm" stack_frame_id=3}, cycles=100
  %same = f32[1]{0} bitcast(%fusion.1)
  %after = f32[1]{0} copy(%same), cycles=20
  %fusion.2 = pred[8,64]{1,0} fusion(%x), calls=%mask, metadata={op_name="jvp()/lt" stack_frame_id=2}, cycles=30
  %fusion.3 = f32[] fusion(%x), calls=%norm, metadata={op_name="rematted_computation" stack_frame_id=2}, cycles=40
  %fusion.4 = f32[] fusion(%x), calls=%norm, metadata={op_name="rematted_computation" stack_frame_id=2}, cycles=5
  %narrow = bf16[8,64]{1,0} convert(%x), metadata={op_name="jvp()/cast" stack_frame_id=2}, cycles=50
  %kernel = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="attention_forward"}
  %own = bf16[4]{0} constant({...})
  %fusion.5 = bf16[32]{0} fusion(%own), kind=kCustom, calls=%gather
  %fusion.6 = bf16[32]{0} fusion(%own), kind=kCustom, calls=%gather
  %sum-start = bf16[4]{0} all-reduce-start(%own), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %out = (s32[]) tuple(%next)
}

ENTRY %main (p.4: f32[16]) -> f32[16] {
  %p.4 = f32[16]{0} parameter(0)
  %one = s32[] constant(1)
  %start = (s32[]) tuple(%one)
  %loop = (s32[]) while(%start), condition=%condition, body=%body
  %moment = f32[16]{0} multiply(%p.4, %p.4), metadata={op_name="a/mul" stack_frame_id=4}, cycles=60
  %part = f32[4]{0} slice(%moment), metadata={op_name="a/slice" stack_frame_id=3}, cycles=70
  %sent = (f32[4]{0}, u32[], token[]) send(%part), channel_id=9, is_host_transfer=true
  %same.1 = f32[4]{0} all-reduce(%part), channel_id=4, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
  ROOT %alone = f32[16]{0} copy(%p.5), cycles=80
  %p.5 = f32[16]{0} parameter(1)
}
""".replace("PACKAGE/", step_profile.PACKAGE)
STEP = re.sub(r"\bcycles=(\d+)", r'backend_config={"estimated_cycles":"\1"}', STEP)

MODEL = "model/model.py:152"
ITEMS = {
  Item("products", "[8,64] x [64,32] -> bf16[8,32]", "backward", MODEL): (400, 4, 4 * 2 * 8 * 64 * 32),
  Item("layout copies", "copy bf16[8,64]", "-", "for training/step.py:7"): (40, 4, 0),
  Item("layout copies", "copy f32[]", "-", "of training/step.py:7"): (80, 4, 0),
  Item("random numbers", "fusion (random numbers) pred[8,64]", "forward", MODEL): (120, 4, 0),
  Item("reductions", "fusion (reductions) f32[]", "recomputed", MODEL): (180, 8, 0),
  Item("casts", "convert bf16[8,64]", "forward", MODEL): (200, 4, 0),
  Item("elementwise", "multiply f32[16]", "-", "update.py:9"): (60, 1, 0),
  Item("slices, gathers, scatters", "slice f32[4]", "-", "training/step.py:7"): (70, 1, 0),
  Item("layout copies", "copy f32[16]", "-", "unknown"): (80, 1, 0),
}


def test_a_program_is_counted_with_its_loops():
  """A channel counts once in a turn; what stays on a device does not."""
  program = hlo.Program(STEP)
  assert [(one.kind, len(one.members), one.times, one.sent_bytes) for one in program.collectives] == [
    ("all-gather", 8, 4, 4 * 64 * 7 // 8),
    ("all-reduce", 2, 4, 4 * 2 * 8 // 2),
    ("send", 8, 1, 16),
  ]
  assert program.kernels == [hlo.Kernel("attention_forward", 4, 2 * 8 * 64 + 16, (hlo.Array("bf16", (8,)),))]


def test_items_of_a_program():
  program = hlo.Program(STEP)
  found = step_profile.items(program)
  assert {item: (one["cycles"], one["times"], one["flops"]) for item, one in found.items()} == ITEMS
  assert sum(one["cycles"] for one in found.values()) == program.cycles


def test_the_tables():
  """Of 1,230 cycles and 270 of the kernels, the product has 400, at 131,072 / (400 * 1,000) of the peak."""
  lines = step_profile.lines(hlo.Program(STEP), clock=1e3, peak=1e6, kernels=0.27, largest=2)
  _, first, second, *_, largest, _ = lines
  assert first.split() == ["26.67", "33", "0.0", "4", "products"]
  assert second.split()[0] == "18.00" and second.endswith("our kernels")
  assert largest.split() == [*first.split()[:4], "backward", *"[8,64] x [64,32] -> bf16[8,32]".split(), MODEL]


def inner(x):
  return jnp.sin(x) @ x


def outer(x):
  return inner(x) + 1


def test_source_lines_of_a_real_program():
  """The innermost is the product's, then its callers'."""
  program = hlo.Program(jax.jit(outer).lower(jnp.ones((8, 8))).compile().as_text())
  (product,) = (one for one in program.instructions.values() if one.opcode == "dot")
  lines = [inspect.getsourcelines(function)[1] + 1 for function in (inner, outer)]
  assert program.stack(product)[:2] == ((__file__, lines[0]), (__file__, lines[1]))
