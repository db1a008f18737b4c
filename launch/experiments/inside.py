"""What is inside trained models: eigenvalues over depth, clusters, exponents; a Markdown table, presets by seeds.

  python -m launch.experiments.inside --runs='runs/small/diffeq_rate0.001_seed*,runs/small/gpt_rate0.001_seed*' \
      [--texts=8] [--tokens=32] [--plot=FILE.png]

Of each preset, means over seeds with standard errors:

- mean |eigenvalue| of W_q W_k^T and of W_v W_o in the last third of depth over that in the first, and Spearman's
  correlation of that mean with depth;
- mean distance of two tokens' directions at the end of depth (0 to 2; random directions: 1.41), with the model's own
  weights and with those of the first or the last step at all steps;
- Spearman's correlation, over a text's tokens, of three measures with the effect that replacing a token by another has
  on the prediction after the last one: the leading exact exponent, the leading exponent in the paper's per-token form,
  and attention rollout. The effect is the mean Kullback-Leibler divergence over 8 random replacements.

Texts are windows of the runs' validation part, the same for all runs. `--plot` draws mean |eigenvalue| over depth:
means over seeds, and the range.
"""

import jax
from matplotlib.figure import Figure
import numpy as np
from scipy import stats

import diffeq_nnx
from diffeq_nnx.analysis import attention, clustering, sensitivity
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, logits_of, observe
from diffeq_nnx.analysis.spectra import spectra
from diffeq_nnx.data.documents import read_ids
from launch import programs
from launch.experiments import tables

REPLACEMENTS = 8
PAIRS = {"qk": "W_q W_k^T", "ov": "W_v W_o"}


# of a run: its figures by name, and mean |eigenvalue| over its steps by pair, [S]
Measured = tuple[dict[str, float], dict[str, np.ndarray]]


def growth(magnitudes_S: np.ndarray) -> tuple[float, float]:
  """(mean of the last third over that of the first, Spearman's correlation with depth; nan where all are equal)."""
  third = max(1, len(magnitudes_S) // 3)
  ratio = magnitudes_S[-third:].mean() / magnitudes_S[:third].mean()
  if np.ptp(magnitudes_S) == 0:
    return float(ratio), float("nan")
  return float(ratio), float(stats.spearmanr(np.arange(len(magnitudes_S)), magnitudes_S).statistic)


def replacement_effects(analyzed: AnalyzedModel, tokens_L: np.ndarray) -> np.ndarray:
  """KL(p || p') in nats of the prediction after the last token, for each token before it replaced, [L - 1]."""
  L = len(tokens_L)
  texts_RxL = np.tile(tokens_L, (1 + (L - 1) * REPLACEMENTS, 1))
  others = np.random.default_rng(0).integers(analyzed.config.vocab_size, size=(L - 1) * REPLACEMENTS)
  texts_RxL[1 + np.arange(len(others)), np.arange(len(others)) // REPLACEMENTS] = others
  with analyzed.use_device():
    passed = observe(analyzed.ready, texts_RxL)
    logits_RxV = logits_of(analyzed.ready, passed.states[-1][:, -1:])[:, 0]
    logs_RxV = np.asarray(jax.nn.log_softmax(logits_RxV), np.float64)
  divergences = (np.exp(logs_RxV[0]) * (logs_RxV[0] - logs_RxV[1:])).sum(-1)
  return divergences.reshape(L - 1, REPLACEMENTS).mean(-1)


def measure(workdir: str, num_texts: int, num_tokens: int) -> Measured:
  """Measures one run."""
  run = diffeq_nnx.load(workdir)
  with jax.set_mesh(run.mesh):
    analyzed = AnalyzedModel(run.model)
  validation = run.corpus.validation.tokens
  texts = [
    read_ids(validation[start : start + num_tokens])
    for start in np.linspace(0, len(validation) - num_tokens, num_texts, dtype=int)
  ]
  found: dict[str, list[float]] = {}
  add = lambda name, value: found.setdefault(name, []).append(float(value))
  eigen = spectra(analyzed, feedforward=False)
  magnitudes = {pair: np.abs(eigen.of(pair)).mean((1, 2)) for pair in PAIRS}
  for pair in PAIRS:
    ratio, correlation = growth(magnitudes[pair])
    add(f"{pair.upper()}, last third / first", ratio)
    add(f"{pair.upper()}, correlation with depth", correlation)
  for tokens_L in texts:
    for label, held in (("own", None), ("of the first step", 0), ("of the last step", analyzed.grid.num_steps - 1)):
      add(f"distance at the end, weights {label}", clustering.depth_spread(analyzed, tokens_L, held)[0][-1])
    effects = replacement_effects(analyzed, tokens_L)
    for form in sensitivity.FORMS:
      exponents = sensitivity.exponents(analyzed, tokens_L, leading=1, form=form)[:, 0]
      add(f"effect of a token: {form.replace('_', '-')} exponent", stats.spearmanr(exponents[:-1], effects).statistic)
    recorded = analyzed.observe(tokens_L, attention=True).attention
    shares = attention.rollout(np.asarray(recorded[:, 0]))[-1]
    add("effect of a token: attention rollout", stats.spearmanr(shares[:-1], effects).statistic)
  return {name: float(np.mean(values)) for name, values in found.items()}, magnitudes


def table(presets: dict[str, list[Measured]]) -> str:
  """Figures downwards, presets of the comparison across."""
  cell = lambda seeds, name: tables.mean_and_error([figures[name] for figures, _ in seeds], ".2f")
  names = next(iter(presets.values()))[0][0]
  return tables.markdown(["", *presets], [[name, *(cell(seeds, name) for seeds in presets.values())] for name in names])


def plot(presets: dict[str, list[Measured]], path: str) -> None:
  """Mean |eigenvalue| over depth."""
  figure = Figure(figsize=(9.6, 3.4), layout="constrained")
  panels = figure.subplots(1, len(PAIRS))
  for axes, (pair, name) in zip(panels, PAIRS.items()):
    for preset, seeds in presets.items():
      values = np.array([magnitudes[pair] for _, magnitudes in seeds])
      depth = (np.arange(values.shape[1]) + 1) / values.shape[1]
      tables.draw_range(axes, depth, values, preset)
    axes.set(xlabel="depth t", ylabel=f"mean |eigenvalue| of {name}", ylim=(0, None))
    axes.grid(alpha=0.25)
  panels[0].legend(fontsize=8)
  figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
  """Measures every run and prints the table."""
  args = programs.make_parser(__doc__, runs=str, texts=8, tokens=32, plot=None).parse_args(argv)
  found = tables.runs_by_preset(args.runs)
  presets = {
    preset: [measure(workdir, args.texts, args.tokens) for workdir in seeds] for preset, seeds in found.items()
  }
  print(table(presets))
  if args.plot:
    plot(presets, args.plot)


if __name__ == "__main__":
  programs.start(main)
