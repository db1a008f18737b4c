"""The picture at the top of README.md: W(t) of a trained model, its spectra over depth, perplexity by number of steps.

  python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny
  python -m diffeq_nnx.main --config=configs/tiny.py:elastic --workdir=runs/any
  python -m launch.experiments.picture --workdirs=runs/any,runs/tiny

W(t) and its spectra are those of the first run; each run has a curve of perplexities on its validation text.
"""

import dataclasses

import jax
from matplotlib import colormaps
from matplotlib.figure import Figure
import numpy as np

import diffeq_nnx
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.analysis.spectra import spectra
from diffeq_nnx.training.evaluate import Evaluator
from launch import programs

TIMES = np.linspace(0, 1, 97)  # of the curves
ENTRIES = 5  # of W(t)
STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
PATH = "docs/depth.png"


def perplexities(workdir: str) -> tuple[AnalyzedModel, list[float], str]:
  """A run's newest model, its validation perplexity at each of STEPS, and the numbers that it was trained at."""
  run = diffeq_nnx.load(workdir)
  config = dataclasses.replace(run.config, eval=dataclasses.replace(run.config.eval, max_batches=None))
  with jax.set_mesh(run.mesh):
    found = [Evaluator(config, run.corpus, run.mesh, count)(run.params)["perplexity"] for count in STEPS]
  counts = config.train.step_counts or (config.model.num_steps,)
  return AnalyzedModel(run.model), found, ", ".join(map(str, counts))


def draw(analyzed: AnalyzedModel, curves: list[tuple[str, list[float]]]) -> None:
  """Writes the PNG."""
  figure = Figure(figsize=(12, 3.4), layout="constrained")
  weights, eigen, depth = figure.subplots(1, 3)
  entry = lambda leaves: np.asarray(leaves["up"]["kernel"])[:, 0, :ENTRIES]
  own, colors = analyzed.times.times_U, colormaps["viridis"](np.linspace(0, 0.85, ENTRIES))
  for curve, marks, color in zip(entry(analyzed.weights_at(TIMES)).T, entry(analyzed.ready.weights.sets).T, colors):
    weights.plot(TIMES, curve, color=color, linewidth=1.2)
    weights.plot(own, marks, "o", color=color, markersize=4)
  weights.set(title="weights are functions of depth", xlabel="depth t", ylabel=f"{ENTRIES} entries of W_up(t)")
  leading = np.sort(np.abs(spectra(analyzed, TIMES, feedforward=False).ov), axis=-1)[..., ::-1]
  for rank, alpha in ((0, 1.0), (1, 0.6), (3, 0.35), (7, 0.2)):
    eigen.plot(TIMES, leading[..., rank].mean(axis=1), color="C0", alpha=alpha, label=f"{rank + 1}")
  eigen.legend(title="rank", fontsize=8, title_fontsize=8, ncols=2)
  eigen.set(title="so are their spectra", xlabel="depth t", ylabel="|eigenvalue| of W_v W_o", ylim=(0, None))
  for (label, values), color in zip(curves, ("C0", "0.5", "C1", "C2")):
    depth.plot(STEPS, values, "o-", color=color, label=f"trained at {label} steps", markersize=4)
  depth.set(title="one checkpoint, any number of layers", xlabel="solver steps (layers)")
  depth.set(ylabel="validation perplexity", yscale="log", xticks=STEPS)
  depth.set_xticklabels(STEPS, fontsize=8)
  depth.legend(fontsize=8, loc="center", bbox_to_anchor=(0.68, 0.33))
  for axes in (weights, eigen, depth):
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(PATH, dpi=110)


def main() -> None:
  """Measures the runs and draws the figure."""
  workdirs = programs.make_parser(__doc__, workdirs=[str]).parse_args().workdirs
  measured = [perplexities(workdir) for workdir in workdirs]
  for workdir, (_, found, trained_at) in zip(workdirs, measured):
    values = ", ".join(f"{count}: {value:.1f}" for count, value in zip(STEPS, found))
    print(f"{workdir}, trained at {trained_at}: {values}")
  draw(measured[0][0], [(trained_at, found) for _, found, trained_at in measured])


if __name__ == "__main__":
  programs.start(main)
