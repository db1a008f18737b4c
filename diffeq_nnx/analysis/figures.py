"""Findings as figures, texts and tables, in sections.

L positions, S times, H query heads, r exponents.
"""

import numpy as np

from diffeq_nnx.analysis import clustering
from diffeq_nnx.analysis.findings import ORDERS, SEEDS, Findings
from diffeq_nnx.analysis.pages.charts import ColouredText, Figure, Heatmap, Line, Panel, Points, Section, Table
from diffeq_nnx.analysis.spectra import PAIRS, Spectra, copying_score, positive_share

PAIR_NAMES = {"qk": "query-key, W_q W_kᵀ", "ov": "output-value, W_v W_o", "ff": "feed-forward, W_up W_down"}
TIME = "depth t"
POINTS_OF_A_LINE = 50  # of a simulated trajectory


def sections(found: Findings) -> list[Section]:
  """The whole report."""
  return [
      ("Spectra over depth",
       "Eigenvalues of the products of weights that move the state. A head compares tokens by the query-key pair and "
       "writes what it found through the output-value pair; positive eigenvalues mean that like attends to like, and "
       "that what is attended to is copied. Norms, biases, rotary positions, gates and dt are not in these products.",
       [real_parts(found), magnitudes(found), positive_shares(found), induction(found), spectra_table(found)]),
      ("Sensitivity to each token",
       "Finite-time Lyapunov exponents, logarithms of singular values, of the framed token's state at the end of depth "
       "with respect to each token's at the start. Of the exact form 0 is a change that keeps its size, and no influence "
       "is minus infinity; of the paper's form no influence is 0, so the two can't be compared in size. The likeliest"
       f" next token is {found.next_token[0]!r}, with probability {found.next_token[1]:.3f}.",
       [*coloured_texts(found), exponent_spectra(found), token_table(found)]),
      ("Clustering",
       "Whether tokens gather. First attention alone, moved by random weights that are constant (order 0) or grow as a "
       "power of depth; then the states of this model.",
       [trajectories(found), simulated_clustering(found), clustering_table(found),
        *([depth(found)] if found.depth else [])]),
  ]


def real_parts(found: Findings) -> Figure:
  """Real parts of all eigenvalues by time, as in the paper's figure 2."""
  panels = []
  for pair in PAIRS:
    values_SxHxN = found.spectra.of(pair)
    S, H, N = values_SxHxN.shape
    values, times = values_SxHxN.reshape(-1), np.repeat(found.spectra.times, H * N)
    heads = np.tile(np.repeat(np.arange(H), N), S)
    whose = [f"head {head}" for head in heads] if H > 1 else None
    panels.append(Panel(PAIR_NAMES[pair], TIME, "real part", [
        Points(times, values.real, hover=whose, colour=np.abs(values.imag), size=4)], colour_label="|imaginary part|"))
  return Figure("spectra_real", "Real parts of the eigenvalues",
                "Every head's eigenvalues at each time, coloured by the size of the imaginary part: these products are "
                "not symmetric.", panels, columns=2)


def magnitudes(found: Findings) -> Figure:
  """Median, 90 % and largest magnitude by time."""
  panels = []
  for pair in PAIRS:
    marks = [Line(found.spectra.times, values, label=name)
             for name, values in _quantiles(found.spectra, pair).items()]
    if found.between is not None and pair != "ff":
      marks += [Line(found.between.times, values, label=f"{name}, between", dashed=True, width=1)
                for name, values in _quantiles(found.between, pair).items() if name != "90 %"]
    panels.append(Panel(PAIR_NAMES[pair], TIME, "|eigenvalue|", marks))
  return Figure("spectra_magnitude", "Magnitude over depth",
                "Dashed, where weights are generated: at times between those that the solver visits, where nothing in "
                "training looked.", panels, columns=2)


def _quantiles(found: Spectra, pair: str) -> dict[str, np.ndarray]:
  sizes_SxN = np.abs(found.of(pair)).reshape(len(found.times), -1)
  return {"largest": sizes_SxN.max(1), "90 %": np.quantile(sizes_SxN, 0.9, axis=1),
          "median": np.median(sizes_SxN, axis=1)}


def positive_shares(found: Findings) -> Figure:
  """The share of eigenvalues with a positive real part, by head and time."""
  times = [f"{t:.3g}" for t in found.spectra.times]
  panels = []
  for pair in ("qk", "ov"):
    shares_SxH = positive_share(found.spectra.of(pair))
    panels.append(Panel(PAIR_NAMES[pair], TIME, "head", [
        Heatmap(times, [str(h) for h in range(shares_SxH.shape[1])], shares_SxH.T, low=0, high=1)],
                        colour_label="share"))
  return Figure("spectra_positive_share", "Share of positive eigenvalues, by head",
                "Of each head's eigenvalues, the share with a real part above 0; of random weights about one half.",
                panels, columns=2)


def induction(found: Findings) -> Figure:
  """Both pairs' copying scores, one against the other, and what the heads do on repeated tokens."""
  qk_SxH, ov_SxH = copying_score(found.spectra.qk), copying_score(found.spectra.ov)
  S, H = qk_SxH.shape
  whose = [f"t = {t:.3g}, head {h}" for t in found.spectra.times for h in range(H)]
  own = len(found.grid[0]) == S and np.array_equal(found.spectra.times, found.grid[0])
  measured = found.prefix_matching.reshape(-1) if own and found.prefix_matching is not None else None
  caption = ("Each dot is a head at a time: the sum of its eigenvalues over the sum of their sizes, of both pairs. A head "
             "at the upper right attends to what is like its own token and copies it, which the paper reads as a sign of "
             "induction.")
  if measured is not None:
    caption += (" The colour is measured, not read off the weights: on random tokens that are repeated, the attention to "
                "the token after the first occurrence, which is what an induction head does. Attention to all tokens "
                f"alike would give {found.prefix_chance:.3f}; a perfect head 1.")
  points = Points(qk_SxH.reshape(-1), ov_SxH.reshape(-1), hover=whose, colour=measured, size=8)
  panel = Panel("", "query-key score", "output-value score", [points], colour_label="prefix matching")
  return Figure("spectra_induction", "Heads that may do induction", caption, [panel], columns=1)


def coloured_texts(found: Findings) -> list[ColouredText]:
  """The text coloured by the leading exponents of both forms, by attention rollout and by gradient times input.

  The output token itself has no colour: its own value is far above the others'.
  """
  n = found.position
  exact, per_token = (found.exact.exponents[:, 0], found.per_token.exponents[:, 0])
  texts = [
      ("sensitivity_exact", "Leading exponent, through all tokens",
       "The exact form: the whole forward pass, with what passes through other tokens.", exact,
       "leading exponent", False),
      ("sensitivity_per_token", "Leading exponent, token by token",
       "The paper's form: what token k does to the framed one directly, step after step. 0: nothing.", per_token,
       "leading exponent", False),
      ("attention_rollout", "Attention rollout", "Where attention leads back to, for comparison; shares add up to 1.",
       found.rollout, "share", False),
      ("gradient_times_input", "Gradient times input",
       f"Of the logit of {found.next_token[0]!r}, token and position together, for comparison.", found.gradient,
       "logit", True)]
  own = lambda values: f"The framed token's own, which has no colour: {values[n]:.3g}."
  return [ColouredText(name, title, f"{caption} {own(values)}", found.pieces[:n + 1], values, label, diverging, marked=n,
                       marked_coloured=n == 0)
          for name, title, caption, values, label, diverging in texts]


def exponent_spectra(found: Findings) -> Figure:
  """All computed exponents of each token, by rank."""
  panels = []
  for title, of in (("Through all tokens", found.exact), ("Token by token", found.per_token)):
    n, r = of.exponents.shape
    ranks, positions = np.tile(np.arange(1, r + 1), n), np.repeat(np.arange(n), r)
    values = np.where(np.isfinite(of.exponents), of.exponents, np.nan).reshape(-1)
    hover = [f"{found.pieces[k]!r}, token {k}" for k in positions]
    panels.append(Panel(title, "rank", "exponent", [Points(ranks, values, hover=hover, colour=positions, size=5)],
                        colour_label="token"))
  note = (f" Iterated until none changed by more than {max(found.exact.residual, found.per_token.residual):.1e}."
          if found.exact.residual or found.per_token.residual else "")
  return Figure("sensitivity_spectra", "Exponents of each token",
                f"The leading exponents, largest first, coloured by the token's position.{note}", panels, columns=2)


def trajectories(found: Findings) -> Figure:
  """The simulation's tokens on their way, one panel an order."""
  panels = []
  for one in found.simulations:
    states, clustered = one.states[:, 0], one.clustering[-1, 0]
    _, _, axes = np.linalg.svd(states[-1], full_matrices=False)
    flat = states @ axes[:2].T / np.sqrt(np.square(states[-1]).sum(-1).mean())
    every = max(1, len(flat) // POINTS_OF_A_LINE)
    ways = [Line(flat[::every, token, 0], flat[::every, token, 1], width=0.8, opacity=0.4, colour="#56b4e9")
            for token in range(flat.shape[1])]
    ends = [Points(flat[0, :, 0], flat[0, :, 1], label="start", size=4, opacity=0.5),
            Points(flat[-1, :, 0], flat[-1, :, 1], label="end", size=6)]
    panels.append(Panel(f"order {one.order}, clustering {clustered:.2f}", "", "", [*ways, *ends], equal=True))
  tokens, dim = found.simulations[0].states.shape[2:]
  return Figure("clustering_trajectories", "Tokens moved by attention alone",
                f"{tokens} tokens in {dim} dimensions, with weights that grow as (t / T)^order; flattened to the two "
                "main directions of where they end, and scaled to the size they have there. One world, of the "
                f"{SEEDS} that the figures below are means of.", panels, columns=3)


def simulated_clustering(found: Findings) -> Figure:
  """The simulation's clustering over time, by order and scale."""
  titles = {"same_end": "(t / T)^k: the same at the end", "same_mean": "(k + 1)(t / T)^k: the same on average",
            "plain": "t^k"}
  times = found.simulations[0].times
  panels = [Panel(titles[scale], "time", "share of pairs together",
                  [Line(times, values, label=f"order {order}") for order, values in zip(ORDERS, rows)])
            for scale, rows in found.clustering.items()]
  return Figure("clustering_simulated", "Clustering over time",
                f"The share of pairs of tokens that point the same way (within {clustering.NEAR:g} as unit vectors), "
                f"mean of {SEEDS} worlds.", panels, columns=3)


def clustering_table(found: Findings) -> Table:
  """Clustering at the end, with standard errors."""
  rows = [[scale, *(f"{mean:.3f} ± {error:.3f}" for mean, error in zip(values[:, -1], found.clustering_errors[scale]))]
          for scale, values in found.clustering.items()]
  return Table("Clustering at the end", f"Means of {SEEDS} worlds and their standard errors. same_end: (t / T)^k; "
               "same_mean: (k + 1)(t / T)^k; plain: t^k. Weights of the same size at the end move tokens the less the "
               "higher the order, which same_mean makes good.", ["scale", *(f"order {order}" for order in ORDERS)], rows)


def token_table(found: Findings) -> Table:
  """What each token up to the output token has."""
  rows = [[str(k), found.pieces[k], f"{found.exact.exponents[k, 0]:.4f}", f"{found.per_token.exponents[k, 0]:.4f}",
           f"{found.rollout[k]:.4f}", f"{found.gradient[k]:.3g}"] for k in range(found.position + 1)]
  return Table("By token", "Leading exponents of both forms; shares of attention rollout; gradient times input, in logits.",
               ["token", "text", "exact", "per token", "rollout", "gradient"], rows)


def spectra_table(found: Findings) -> Table:
  """Magnitudes and shares of positive eigenvalues by time."""
  rows = []
  for s, t in enumerate(found.spectra.times):
    for pair in PAIRS:
      sizes = {name: values[s] for name, values in _quantiles(found.spectra, pair).items()}
      rows.append([f"{t:.3g}", pair, *(f"{sizes[name]:.4g}" for name in ("median", "90 %", "largest")),
                   f"{positive_share(found.spectra.of(pair)[s]).mean():.3f}"])
  return Table("By time", "Magnitudes of the eigenvalues, and the share of those with a positive real part.",
               ["t", "pair", "median", "90 %", "largest", "positive"], rows)


def depth(found: Findings) -> Figure:
  """The spread of the model's states over depth, with its weights and with weights held."""
  at = np.concatenate([[0.0], np.cumsum(found.grid[1]) / found.grid[1].sum()])
  own = lambda label: {"dashed": label != "own", "width": 3.0 if label == "own" else 1.5}
  lines = lambda index: [Line(at, of[index], label=label, **own(label)) for label, of in found.depth.items()]
  panels = [Panel(title, TIME, title, lines(index))
            for index, title in enumerate(("mean distance of directions", "share of pairs together"))]
  return Figure("clustering_model", "This model's states over depth",
                "The text's tokens as unit vectors: how far apart they are on average (random directions: 1.41), and how "
                "many pairs are together; as trained, and with one step's weights held at all steps.", panels, columns=2)
