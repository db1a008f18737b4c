"""The report: findings as charts, colored texts and tables, in sections.

L positions, S times, H query heads, r exponents.
"""

import numpy as np

from diffeq_nnx.analysis import clustering
from diffeq_nnx.analysis.findings import Findings
from diffeq_nnx.analysis.pages import palette
from diffeq_nnx.analysis.pages.charts import Chart, ColoredText, Heatmap, Line, Panel, Points, Section, Table
from diffeq_nnx.analysis.spectra import PAIRS, Spectra, copying_score, positive_share

PAIR_NAMES = {"qk": "query-key, W_q W_kᵀ", "ov": "output-value, W_v W_o", "ff": "feed-forward, W_up W_down"}
TIME = "depth t"


def sections(found: Findings) -> list[Section]:
  """The whole report."""
  made: list[Section] = [
    (
      "Spectra over depth",
      "Eigenvalues of the products of weight matrices that act on the state. The query-key product of a head scores "
      "pairs of tokens, and its output-value product is what an attended token adds to the state. Positive "
      "eigenvalues mean that tokens attend to similar tokens and that the attended token is copied. Normalization, "
      "biases, rotary positions, gates, the factor 1/sqrt(head width) and the step size dt are not included, nor the "
      "eigenvalues that are 0 since a head is narrower than the state. In small models that this project "
      "trained, output-value eigenvalues grew with depth in a GPT alone; in a DiffEqFormer they were largest in the "
      "first step, against the paper's claim (docs/evidence/claims.md).",
      [real_parts(found), magnitudes(found), positive_shares(found), induction(found), spectra_table(found)],
    ),
    (
      "Sensitivity to each token",
      "Finite-time Lyapunov exponents: logarithms of the singular values of the Jacobian of the framed token's final "
      "state with respect to each token's initial state. In the exact form an exponent of 0 is a change that keeps "
      "its size, and no influence is minus infinity. In the paper's form no influence is 0, so the two forms can't be "
      "compared in size; in small models they ranked tokens alike (docs/evidence/claims.md). "
      f"The most probable next token is {found.next_token[0]!r} (probability "
      f"{found.next_token[1]:.3f}).",
      [*colored_texts(found), exponent_spectra(found), token_table(found)],
    ),
  ]
  if found.depth is not None:
    made.append(("Clustering", "Whether the states of tokens gather in clusters over depth.", [depth(found)]))
  return made


def real_parts(found: Findings) -> Chart:
  """Real parts of all eigenvalues by time, as in the paper's figure 2."""
  panels = []
  for pair in PAIRS:
    values_SxHxN = found.spectra.of(pair)
    S, H, N = values_SxHxN.shape
    values, times = values_SxHxN.reshape(-1), np.repeat(found.spectra.times, H * N)
    heads = np.tile(np.repeat(np.arange(H), N), S)
    whose = [f"head {head}" for head in heads] if H > 1 else None
    points = Points(times, values.real, hover=whose, color=np.abs(values.imag), size=4)
    panels.append(Panel(PAIR_NAMES[pair], TIME, "real part", [points], color_label="|imaginary part|"))
  return Chart(
    "spectra_real",
    "Real parts of the eigenvalues",
    "The eigenvalues of all heads at each time. Color: magnitude of the imaginary part, which is not zero "
    "because the products are not symmetric.",
    panels,
  )


def magnitudes(found: Findings) -> Chart:
  """Median, 90th percentile and largest magnitude by time."""
  panels = []
  for pair in PAIRS:
    marks = [
      Line(found.spectra.times, values, label=name, color=color)
      for (name, values), color in zip(_quantiles(found.spectra, pair).items(), palette.LINES)
    ]
    if found.between is not None and pair != "ff":
      marks += [
        Line(found.between.times, values, label=f"{name}, between steps", dashed=True, width=1, color=color)
        for (name, values), color in zip(_quantiles(found.between, pair).items(), palette.LINES)
        if name != "90th percentile"
      ]
    panels.append(Panel(PAIR_NAMES[pair], TIME, "|eigenvalue|", marks))
  return Chart(
    "spectra_magnitude",
    "Magnitudes of the eigenvalues",
    "Over all heads. Dashed, where weights are generated: W(t), also at times between those that the solver visits. "
    "Where model.time.weights_at is mean, solid lines at the solver's times are of the means of W(t) over the steps.",
    panels,
  )


def _quantiles(found: Spectra, pair: str) -> dict[str, np.ndarray]:
  sizes_SxN = np.abs(found.of(pair)).reshape(len(found.times), -1)
  return {
    "largest": sizes_SxN.max(1),
    "90th percentile": np.quantile(sizes_SxN, 0.9, axis=1),
    "median": np.median(sizes_SxN, axis=1),
  }


def positive_shares(found: Findings) -> Chart:
  """The fraction of eigenvalues with a positive real part, by head and time."""
  times = [f"{t:.3g}" for t in found.spectra.times]
  if len(set(times)) < len(times):
    times = [str(float(t)) for t in found.spectra.times]
  panels = []
  for pair in ("qk", "ov"):
    shares_SxH = positive_share(found.spectra.of(pair))
    cells = Heatmap(times, [str(h) for h in range(shares_SxH.shape[1])], shares_SxH.T)
    panels.append(Panel(PAIR_NAMES[pair], TIME, "head", heatmap=cells, color_label="fraction"))
  return Chart(
    "spectra_positive_share",
    "Fraction of positive eigenvalues by head",
    "The fraction of each head's eigenvalues with a positive real part; about one half for random weights.",
    panels,
  )


def induction(found: Findings) -> Chart:
  """The copying scores of both products of each head, and its prefix matching on repeated tokens."""
  qk_SxH, ov_SxH = copying_score(found.spectra.qk), copying_score(found.spectra.ov)
  whose = [f"t = {t:.3g}, head {h}" for t in found.spectra.times for h in range(qk_SxH.shape[1])]
  rows, steps = np.nonzero(found.spectra.times[:, None] == found.times_S)
  measured = None
  if found.prefix_matching is not None and 0 < len(rows) == len(set(rows)):  # shared weights are of no single step
    measured = np.full(qk_SxH.shape, np.nan)
    measured[rows] = found.prefix_matching[steps]
    measured = measured.reshape(-1)
  caption = (
    "Each point is one head at one time. A score is the sum of the eigenvalues over the sum of their "
    "magnitudes. A head at the upper right attends to tokens like its own and copies them, which the paper reads as "
    "a sign of induction."
  )
  if measured is not None:
    caption += (
      " Color: prefix matching, which is measured and not computed from the weights. On a sequence of random "
      "tokens that is repeated, it is the attention to the token after the first occurrence, where an "
      f"induction head attends. Uniform attention has {found.prefix_chance:.3f}, a perfect induction head 1."
    )
  points = Points(qk_SxH.reshape(-1), ov_SxH.reshape(-1), hover=whose, color=measured, size=8)
  panel = Panel("", "query-key score", "output-value score", [points], color_label="prefix matching")
  return Chart("spectra_induction", "Candidate induction heads", caption, [panel], columns=1)


def colored_texts(found: Findings) -> list[ColoredText]:
  """The text colored by the leading exponents of both forms, by attention rollout and by gradient times input.

  The output token itself has no color, because its own value is far above the others'.
  """
  n = found.position

  def color(name: str, title: str, caption: str, values: np.ndarray, label: str, diverging: bool = False):
    caption += f" The framed token itself has no color: {values[n]:.3g}." if n else ""
    return ColoredText(name, title, caption, found.pieces[: n + 1], values, label, diverging, n, n == 0)

  return [
    color(
      "sensitivity_exact",
      "Leading exponent, exact form",
      "The Jacobian of the whole forward pass, including influence that passes through other tokens.",
      found.exact[:, 0],
      "leading exponent",
    ),
    color(
      "sensitivity_per_token",
      "Leading exponent, the paper's form",
      "The direct influence of a token on the framed one, accumulated over the steps; 0 is none.",
      found.per_token[:, 0],
      "leading exponent",
    ),
    color(
      "attention_rollout",
      "Attention rollout",
      "For comparison: the shares of the framed token's attention that lead back to each token; they sum to 1. Of each "
      "step, the first attention counts.",
      found.rollout,
      "share",
    ),
    color(
      "gradient_times_input",
      "Gradient times input",
      f"For comparison: of the logit of {found.next_token[0]!r} with respect to token and position embedding together.",
      found.gradient,
      "logit",
      diverging=True,
    ),
  ]


def exponent_spectra(found: Findings) -> Chart:
  """All computed exponents of each token, by rank."""
  panels = []
  for title, exponents_Nxr in (("exact form", found.exact), ("the paper's form", found.per_token)):
    n, r = exponents_Nxr.shape
    ranks, positions = np.tile(np.arange(1, r + 1), n), np.repeat(np.arange(n), r)
    hover = [f"{found.pieces[k]!r}, token {k}" for k in positions]
    points = Points(ranks, exponents_Nxr.reshape(-1), hover=hover, color=positions, size=5)
    panels.append(Panel(title, "rank", "exponent", [points], color_label="position"))
  return Chart(
    "sensitivity_spectra",
    "Exponents of each token",
    "The largest exponents in descending order. Color: the token's position in the text.",
    panels,
  )


def token_table(found: Findings) -> Table:
  """The values of each token up to the output token."""
  columns = found.exact[:, 0], found.per_token[:, 0], found.rollout
  rows = [
    [str(k), found.pieces[k], *(f"{column[k]:.4f}" for column in columns), f"{gradient:.3g}"]
    for k, gradient in enumerate(found.gradient)
  ]
  return Table(
    "Values by token",
    "Leading exponents of both forms, attention rollout, and gradient times input in logits.",
    ["position", "token", "exact form", "paper's form", "rollout", "gradient times input"],
    rows,
  )


def spectra_table(found: Findings) -> Table:
  """Magnitudes and positive fractions of the eigenvalues by time."""
  rows = []
  for s, t in enumerate(found.spectra.times):
    for pair in PAIRS:
      sizes = [f"{values[s]:.4g}" for values in _quantiles(found.spectra, pair).values()]
      rows.append([f"{t:.3g}", pair, *reversed(sizes), f"{positive_share(found.spectra.of(pair)[s]).mean():.3f}"])
  return Table(
    "Spectra by time",
    "Magnitudes of the eigenvalues over all heads, and the fraction with a positive real "
    "part. qk: query-key, ov: output-value, ff: feed-forward.",
    ["t", "product", "median", "90th percentile", "largest", "positive fraction"],
    rows,
  )


def depth(found: Findings) -> Chart:
  """The distances between the model's states over depth, with its own weights and with those of one step."""
  at = np.concatenate([[0.0], found.ends_S])
  panels = []
  for index, title in enumerate(("mean distance of pairs", "fraction of clustered pairs")):
    curves = {label: values[index] for label, values in (found.depth or {}).items()}
    lines = [Line(at, curves.pop("own"), label="as trained", width=3.0)]
    lines += [Line(at, values, label=label, dashed=True, width=1.5) for label, values in curves.items()]
    panels.append(Panel("", TIME, title, lines))
  return Chart(
    "clustering_model",
    "This model's states over depth",
    "The states of the text's tokens as unit vectors: the mean distance between two (random directions: "
    f"1.41), and the fraction of pairs within {clustering.NEAR:g} of each other. Dashed: with the weights of one step, "
    "counted from 0, at all steps.",
    panels,
  )
