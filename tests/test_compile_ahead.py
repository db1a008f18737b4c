"""What the compilers make of the sharded train step, and how it is read.

Compiling needs libtpu (.ci/run installs it); for GPUs jax 0.11.2 and the wheels jax-cuda13-plugin and jax-cuda13-pjrt.
"""

import functools
import re

import jax
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx.parallel import sharding
from launch import compile_ahead, gpus
from launch.benchmarks import generation as benchmark_generation
from launch.benchmarks import hlo, roofline, step_choices
from tests import hopper_code
from tests.conftest import told
from tests.hopper_code import needs_libtpu

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("optimizations")]


def mesh_of(config, topology: str):
  """The config's mesh over the devices of a TPU."""
  return sharding.make_mesh(config.mesh, compile_ahead.devices_of(topology, 1))


# Compiling takes longer with the widths and with T, but hardly with the number of steps or the length of a row.
SIZES = ("num_steps=2", "embed_dim=256", "num_heads=2", "mlp_dim=512", "time.time_embed_dim=24", "vocab_size=512")
SMALL = (*(f"model.{size}" for size in SIZES), "model.seq_len=256", "train.batch_size=16")


@functools.cache
def train_step(preset: str) -> str:
  """The program of a compiled train step, weights generated (preset diffeq) or stored (llama), on eight v5p chips."""
  config = config_lib.load(f"configs/llama1b.py:{preset}", SMALL)
  return compile_ahead.compile_step(config, mesh_of(config, "v5p:2x2x2")).compiled.as_text()


@needs_libtpu
def test_no_generator_parameter_is_moved_cast_or_copied():
  """F is [T + 1, in, out] and is read as it is stored; attention reads what the projections wrote.

  All that crosses devices with T in it is the gradient of e(t), S (T + 1) numbers a weight.
  """
  model = config_lib.load("configs/llama1b.py", SMALL).model
  T, S, text = model.time.time_embed_dim, model.num_steps, train_step("diffeq")
  program = hlo.Program(text)
  assert f"f32[{T + 1},{model.embed_dim // 8},{model.hidden_dim}]" in text  # an eighth of F: so it would be seen
  moved = [array for one in program.collectives for array in one.arrays if T in array.shape or T + 1 in array.shape]
  assert len(moved) == 9  # weights and norms of the block
  assert all(sorted(array.shape)[-2:] in ([S, T], [S, T + 1]) and array.bytes <= 4 * S * (T + 1) for array in moved)
  assert not [one for one, _, _ in program.estimates if one.opcode == "convert" and one.arrays[0].shape[0] == T + 1]
  calls = re.findall(r"%(?:attention_\w+|rotary)[.\w]* = .* custom-call\((.*?)\), custom_call_target", text)
  assert len(calls) == 9  # forward, forward again and backward; rotary embedding of queries and keys in each
  assert not re.search(r"%(copy|transpose)\.\d", "".join(calls))
  assert not re.search(r" (copy|transpose)\(%(attention_|rotary)", text)
  # ranges of blocks, queries and keys: the scale is not applied in between
  assert len([call for call in calls if re.match(r"%[-\w.]+, %rotary[.\w]*, %rotary", call)]) == 3


@needs_libtpu
def test_generated_weights_cost_no_communication():
  """Bytes by kind within 5 % of the plain Llama's; both gather bfloat16 weights of a layer at a time."""
  ours, plain = (compile_ahead.communication(hlo.Program(train_step(preset))) for preset in ("diffeq", "llama"))
  assert ours.keys() == plain.keys() and sum(sent for sent, _ in plain.values()) > 1e7
  for kind, (sent, _) in plain.items():
    assert ours[kind][0] == pytest.approx(sent, rel=0.05), kind


TINY = ["--config=configs/llama1b.py", "--set=train.batch_size=16"]
TINY += [f"--set=model.{size}=512" for size in ("embed_dim", "mlp_dim", "vocab_size", "seq_len")]
TINY += ["--set=model.num_heads=4", "--set=model.num_steps=2"]


def read_report(report: str) -> tuple[str, list[str], dict[str, float]]:
  """The first line, the others and the figures of a report, of which the parts of the memory add up to the peak."""
  first, *lines = report.splitlines()
  figures = {line[:32].strip(): float(line[32:41].replace(",", "")) for line in lines if line.startswith("  ")}
  kinds = ("parameters", "optimizer", "padding of these, tokens", "activations and temporaries")
  assert figures["peak"] == pytest.approx(sum(figures[kind] for kind in kinds), abs=0.03)
  return first, lines, figures


@pytest.mark.slow(reason="compiles a train step for two slices of TPUs")
@needs_libtpu
def test_what_it_prints(capsys, tmp_path):
  mesh = ["--topology=v5e:2x2", "--num-slices=2", "--set=mesh.context=2", "--set=train.device_batch_size=4"]
  sizes = {"embed_dim": 256, "mlp_dim": 256, "num_heads": 2, "seq_len": 256}
  sizes = [f"--set=model.{name}={size}" for name, size in sizes.items()]
  arguments = [*mesh, *sizes, f"--save-hlo={tmp_path}/step.txt", "--profile"]
  assert compile_ahead.main(["--config=configs/llama1b.py:llama", *TINY[1:], *arguments]) == 0
  report, heads, profile = capsys.readouterr().out.partition("     % % of peak")
  first, _, figures = read_report(report)
  for part in ("8 x TPU v5 lite (2 x v5e:2x2), mesh slice 2 x data 1 x fsdp 2 x context 2", "16 x 256 tokens a step"):
    assert part in first
  assert figures["to another slice"] > 0 and figures["utilization, %"] > 0
  assert figures["step, s"] == pytest.approx(figures["compute, s"] + figures["our kernels, s"], abs=0.002)
  assert hlo.Program((tmp_path / "step.txt").read_text()).cycles > 0
  kinds, largest = (part.splitlines()[1:] for part in profile.split(heads))
  assert sum(float(line[:6]) for line in kinds) == pytest.approx(100, abs=0.1) and len(largest) == 30
  assert {"products", "our kernels"} < {line[35:] for line in kinds}
  assert any(re.search(r" backward .*\] x \[.* model/vector_fields.py:\d+$", line) for line in largest)
  # The ring of two sends keys and values once forward, forward again for the backward pass, and back; then once each
  # way to restore the order of positions.
  sent, times = re.search(r"collective-permute +([\d.]+)   in (\d+) operations", report).groups()
  held = 4 * 128 * 256 * 2  # bytes of the keys, the values, or the state: in two chunks
  assert int(times) == 2 * 3 * 2 + 2 * 2
  assert float(sent) == pytest.approx((2 * 3 * 2 * held + 2 * held) / 1e9, abs=6e-4)


@pytest.mark.slow(reason="compiles a small train step for GPUs, which takes half a minute")
@hopper_code.compiles_for_gpus
def test_what_it_prints_for_gpus(capsys, monkeypatch):
  """Two nodes of four; then the same step with little of the GPU's memory."""
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  steps, compile_step = [], compile_ahead.compile_step

  def compile_once(config, mesh):
    steps.extend([] if steps else [compile_step(config, mesh)])
    return steps[0]

  monkeypatch.setattr(compile_ahead, "compile_step", compile_once)
  arguments = [*TINY, "--topology=h100:2x4", "--set=mesh.data=2"]
  assert compile_ahead.main(arguments) == 0
  first, lines, figures = read_report(capsys.readouterr().out)
  assert "8 x NVIDIA H100 80GB HBM3 (h100:2x4), mesh data 2 x fsdp 4" in first and "16 x 512 tokens a step" in first
  assert any("of 59.32, 0.75 of the GPU's 79.1: fits, " in line for line in lines)
  assert figures["all-gather"] > 0 and 0 < figures["utilization, %"] < 100
  program = hlo.Program(steps[0].compiled.as_text())
  assert {one.members for one in program.collectives} >= {(0, 1, 2, 3), (0, 4)}  # in a node, and between both
  found = roofline.seconds(program, gpus.GPUS["h100"], 989e12)
  assert found["attention"] > 0 and found["memory"] > 0
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.001")
  assert compile_ahead.main(arguments) == 1
  assert capsys.readouterr().out.splitlines()[-1].startswith("change: JAX takes 0.001 of a GPU's memory; set XLA_")


@needs_libtpu
def test_what_does_not_fit_is_told_with_a_way_out(capsys):
  """By the compiler's refusal, and what follows from each config."""
  large = ["batch_size=4096", "device_batch_size=1024", "remat=none"]
  large = ["--topology=v5e:2x2", "--set=model.seq_len=2048", *(f"--set=train.{size}" for size in large)]
  assert compile_ahead.main([*TINY, *large]) == 1
  assert "set train.device_batch_size=512" in capsys.readouterr().out.splitlines()[-1]
  for settings, part in (
    ([], "use more devices"),
    ([*SMALL, "train.device_batch_size=1", "train.remat=none"], "set it to full"),
    ([*SMALL, "train.device_batch_size=1"], "raise mesh.context or mesh.tensor"),
  ):
    config = config_lib.load("configs/llama1b.py", settings)
    assert part in compile_ahead.advice(config, mesh_of(config, "v5e:2x2"), None)[-1]


@needs_libtpu
def test_the_fastest_choice_that_leaves_memory_is_named(monkeypatch, capsys):
  made = {("full", 2): (2.0, 10.0), ("full", 4): (1.8, 12.0), ("dots", 2): (1.0, 15.5), ("dots", 4): None}

  def compile_step(config, mesh):
    choice = config.train.remat, config.train.device_batch_size
    if made[choice] is None:
      raise compile_ahead.DoesNotFit("more than there is")
    return compile_ahead.Step(config, mesh, choice)

  monkeypatch.setattr(compile_ahead, "compile_step", compile_step)
  monkeypatch.setattr(step_choices, "estimate", lambda step: made[step.compiled])
  arguments = [*TINY, "--topology=v5e:2x2", "--remat=full,dots"]
  assert step_choices.main([*arguments, "--sequences=2,3,4"]) == 0  # 3 doesn't divide the 4 sequences of a device
  rows = capsys.readouterr().out.splitlines()
  assert rows[-1] == "fastest: --config.train.remat=full --config.train.device_batch_size=4" and len(rows) == 2 + 4 + 1
  assert "none divides the 4 sequences" in told(lambda: step_choices.main([*arguments, "--sequences=3,0"]))
  made["full", 2] = made["full", 4] = None
  assert step_choices.main([*arguments, "--sequences=2,4"]) == 1  # 15.5 of 15.75 GiB is too close


@needs_libtpu
@pytest.mark.parametrize(
  "arguments,part",
  [
    (["--topology=v9:2x2"], "--topology=v9:2x2: "),
    (["--topology=v5e:2x2", "--set=train.batch_size=6"], "must be a multiple of the 4 devices"),
    (["--topology=v5e:2x2", "--set=train.teacher=x"], "train.teacher: a teacher is not compiled here"),
    (["--topology=v5e:2x2", "--set=model.attention=cudnn"], "model.attention=cudnn: is for GPUs"),
    (["--topology=v5e:2x2", "--set=model.dtype=float64"], "JAX_ENABLE_X64=1"),
    (["--topology=v5e:2x2", "--num-slices=0"], "--num-slices=0: must be 1 or above"),
    (["--topology=v5e:2x2", "--save-hlo=/none/step.txt"], "--save-hlo=/none/step.txt: can't be written"),
    (["--topology=h200:2x2x2"], "write VERSION:GPUS or VERSION:NODESxGPUS"),
    (["--topology=h100:8", "--profile"], "are for TPUs"),
    (["--topology=h100:8"], "needs jax 0.11.2 or later, with Python 3.12, and the wheels jax-cuda13-plugin"),
  ],
)
def test_a_mistake_is_one_line(arguments, part, monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  assert part in told(lambda: compile_ahead.main([*TINY, *arguments]))


@needs_libtpu
@pytest.mark.slow(reason="compiles a token of a Llama of full width")
def test_a_token_takes_the_time_to_read_the_weights_by_the_compilers_estimate(capsys):
  """Of a Llama of 4 of the 16 steps, on one chip."""
  arguments = ["--config=configs/llama1b.py:builtin,llama", "--topology=v5e:2x2", "--set=model.num_steps=4"]
  benchmark_generation.main(arguments)
  cells = capsys.readouterr().out.splitlines()[-1].strip("|").split("|")
  _, weights, _, token, read, products, ratio = map(float, cells)
  assert weights > 600 and ratio == pytest.approx(token / read, abs=0.01) and products < read and ratio < 1.15
