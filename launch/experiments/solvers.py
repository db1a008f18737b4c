"""Compares the solvers: errors by evaluations, reversible gradients, and losses after the same training.

  python -m launch.experiments.solvers --what=errors --workdir=runs/solvers [--plot=docs/evidence/solvers.png]
  python -m launch.experiments.solvers --what=gradients --workdir=runs/solvers
  python -m launch.experiments.solvers --what=losses --workdir=runs/solvers --config=configs/english.py:diffeq \
      --set=optimizer.name=adamw --set=optimizer.peak_rate=2e-3 \
      [--seeds=0,1,2] [--steps=6] [--evaluations=12] [--set=train.steps=300]

errors: of the logits of one model with random weights that are smooth in time, in float64, against 1,024 steps of rk4,
by numbers of steps; the order is the slope from 128 to 256 steps. Both for the GPT and the Llama block.

gradients: of a model of width 128 with initial weights at 48 steps of leapfrog, against those through stored states:
the largest relative difference of any array's gradient, for train.adjoint=reversible, for the same where the states are
carried in the dtype of the computation alone, and for train.remat=full, which shows the effect of rounding alone. And
the compiler's temporaries by number of steps, without the weights and their gradients.

losses: final validation loss of every solver with `--steps` solver steps, and with as many steps as make
`--evaluations` evaluations of the block (an evaluation of one branch is half of one). dt is that of the config: 1 by
default, so that the horizon is the number of steps. The work directory holds a file for the loss of each run, and
finished runs are not repeated, so the same command continues after an interruption.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import statistics

from flax import nnx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np

from diffeq_nnx.config import ModelConfig, TimeConfig
from diffeq_nnx.model import integration, solvers
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.model.solvers import SOLVERS
from launch import programs
from launch.experiments import tables
from launch.experiments.compare import find_loss

STEPS = (4, 8, 16, 32, 64, 128, 256)  # of the errors
REFERENCE = 1024  # steps of rk4


def evaluations_of(solver: str, num_steps: int) -> float:
  """Evaluations of the block in a pass, an evaluation of one branch counted half."""
  return num_steps * sum(SOLVERS[solver].evaluations) / 2


def model_of(field: str) -> Model:
  """A small model in float64 whose fastest time feature turns by 3 radians."""
  time = TimeConfig(sinusoidal_dim=8, time_embed_dim=8, scale=3.0)
  config = ModelConfig(field=field, horizon=1.0, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16, time=time)
  config = dataclasses.replace(config, dtype="float64")
  params = jax.jit(lambda: params_of(Model(config, rngs=nnx.Rngs(0))))()
  rng = np.random.default_rng(0)
  return build(config, jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), params))


def measure_errors(field: str) -> dict[str, list[float]]:
  """The largest error of the logits relative to their root mean square, by solver, at each of STEPS."""
  model = model_of(field)
  tokens_BxL = np.random.default_rng(1).integers(64, size=(2, 16))

  def logits(solver: str, num_steps: int) -> np.ndarray:
    config = dataclasses.replace(model.config, solver=solver)
    return np.asarray(jax.jit(lambda params: build(config, params)(tokens_BxL, num_steps))(params_of(model)))

  reference = logits("rk4", REFERENCE)
  size = np.sqrt(np.square(reference).mean())
  return {name: [float(np.abs(logits(name, n) - reference).max() / size) for n in STEPS] for name in SOLVERS}


def errors(args: argparse.Namespace) -> str:
  """A Markdown table of orders; draws the errors if asked to."""
  jax.config.update("jax_enable_x64", True)
  by_field = {field: measure_errors(field) for field in ("gpt", "llama")}
  if args.plot:
    plot(by_field, args.plot)
  order = lambda by_steps: f"{np.log2(by_steps[-2] / by_steps[-1]):.2f}"
  rows = [
    [name, *(order(found[name]) for found in by_field.values()), ", ".join(map(str, solver.evaluations))]
    for name, solver in SOLVERS.items()
  ]
  columns = ["solver", "order, gpt", "order, llama", "evaluations a step: attention, feed-forward"]
  return tables.markdown(columns, rows)


def plot(by_field: dict[str, dict[str, list[float]]], path: str) -> None:
  """Errors against evaluations, a panel for each block."""
  figure = Figure(figsize=(10, 4.2), layout="constrained")
  panels = figure.subplots(1, len(by_field), sharey=True)
  for axes, (field, by_solver) in zip(panels, by_field.items(), strict=True):
    for number, (solver, found) in enumerate(by_solver.items()):
      counts = [evaluations_of(solver, n) for n in STEPS]
      axes.loglog(counts, found, marker="osv^D*XPh"[number % 9], markersize=5, linewidth=1.3, label=solver)
    axes.set(title=f"{field} block", xlabel="evaluations of the block")
    axes.grid(alpha=0.3)
  panels[0].set_ylabel("largest error of the logits / their RMS")
  panels[-1].legend(fontsize=8)
  figure.savefig(path, dpi=120)


class Plain(solvers.Leapfrog):
  """Leapfrog whose states are carried in the dtype of the computation alone."""

  def init(self, x_BxLxD):
    """The state twice."""
    return x_BxLxD, x_BxLxD

  def step(self, field, carry, weights, dt, key):
    """See `Leapfrog`."""
    before, middle = carry
    return middle, solvers.add_increment(before, dt, (2.0,), (field(middle, weights[0], key),))

  def read(self, carry):
    """The mean of both."""
    return (carry[0] + carry[1]) / 2


def gradient_of(solver: str, dtype: str, num_steps: int, adjoint: integration.Adjoint) -> tuple[Callable, tuple]:
  """A function of (block weights, other parameters), jitted, that returns the gradients of a loss; and these."""
  config = ModelConfig(solver=solver, num_steps=num_steps, embed_dim=128, num_heads=4, vocab_size=256, dtype=dtype)
  config = dataclasses.replace(config, seq_len=128, time=TimeConfig(sinusoidal_dim=16, time_embed_dim=16))
  model = Model(config, rngs=nnx.Rngs(0))
  params, tokens_BxL = params_of(model), np.random.default_rng(0).integers(256, size=(4, 128))
  source = params.pop("weight_source")

  def loss(weights, rest):
    whole = build(config, {**rest, "weight_source": source})
    logits = whole.logits(whole.hidden(tokens_BxL, weights, adjoint=adjoint))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), np.roll(tokens_BxL, -1, 1)[..., None], -1).mean()

  return jax.jit(jax.grad(loss, argnums=(0, 1))), (model.block_weights(), params)


@functools.cache
def gradient_arrays(solver: str, dtype: str, adjoint: integration.Adjoint) -> list[np.ndarray]:
  """Those gradients at 48 steps, in float64."""
  run, arguments = gradient_of(solver, dtype, 48, adjoint)
  return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(run(*arguments))]


def gradients(args: argparse.Namespace) -> str:
  """Markdown tables of reversible gradients."""
  solvers.register("plain_leapfrog", Plain())
  rows = []
  for dtype in ("float32", "bfloat16"):
    cells = []
    for solver, adjoint in (
      ("leapfrog", integration.Reversible()),
      ("plain_leapfrog", integration.Reversible()),
      ("leapfrog", integration.Checkpointed("full")),
    ):
      stored, found = (gradient_arrays(solver, dtype, each) for each in (integration.Checkpointed(), adjoint))
      cells.append(max(np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(stored, found, strict=True)))
    rows.append([dtype, *(f"{cell:.2g}" for cell in cells)])
  differences = tables.markdown(["dtype", "reversible", "reversible, carried in this dtype alone", "remat=full"], rows)
  rows = []
  for num_steps in (4, 12, 48):
    sizes = []
    for adjoint in (integration.Reversible(), integration.Checkpointed("full")):
      run, arguments = gradient_of("leapfrog", "float32", num_steps, adjoint)
      sizes.append(run.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20)
    rows.append([str(num_steps), *(f"{size:.1f}" for size in sizes)])
  memory = tables.markdown(["steps", "temporaries, reversible, MiB", "checkpointed, remat=full, MiB"], rows)
  return f"{differences}\n\n{memory}"


def losses(args: argparse.Namespace) -> str:
  """Trains what is missing, and returns a Markdown table."""
  args.config, _, preset = args.config.partition(":")
  plan = {name: (args.steps, round(args.evaluations / evaluations_of(name, 1))) for name in SOLVERS}
  found: dict[tuple[str, int], list[float]] = {}
  for seed in args.seeds:  # seed by seed, so that an unfinished comparison has every solver
    for solver, counts in plan.items():
      for count in dict.fromkeys(counts):
        settings = [f"model.solver={solver}", f"model.num_steps={count}", f"seed={seed}"]
        name = f"{preset}_{solver}_{count}_seed{seed}"
        found.setdefault((solver, count), []).append(find_loss(args, name, preset, settings))
  first, rows = [found["euler", count] for count in plan["euler"]], []
  for solver, counts in plan.items():
    cells = []
    for values, base in zip((found[solver, count] for count in counts), first, strict=True):
      cells += [f"{statistics.mean(values):.3f}", "0" if values is base else tables.difference(values, base, "+.3f")]
    rows.append([solver, *cells[:2], str(counts[1]), *cells[2:]])
  columns = [f"loss at {args.steps} steps", "against euler", f"steps for {args.evaluations} evaluations", "loss there"]
  return tables.markdown(["solver", *columns, "against euler"], rows)


def main(argv: list[str] | None = None) -> None:
  """Runs one comparison and prints its table."""
  training = {"config": "configs/english.py:diffeq", "seeds": [0, 1, 2], "steps": 6, "evaluations": 12}
  parser = programs.make_parser(__doc__, workdir=str, plot=None, **training)
  comparisons = {"errors": errors, "gradients": gradients, "losses": losses}
  parser.add_argument("--what", choices=list(comparisons), required=True)
  args = parser.parse_args(argv)
  print(comparisons[args.what](args))


if __name__ == "__main__":
  programs.start(main)
