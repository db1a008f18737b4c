"""What is inside one run, layer by layer, made for the stored weights of a published checkpoint: a picture and tables.

  python -m launch.experiments.inside_stored --workdir=runs/imported --text=FILE.jsonl --out=FOLDER \
      [--rows=8] [--tokens=256] [--texts=8] [--short=24] [--ranks=30,29,28,24,20,15,10]

The text is JSON lines (`.jsonl`, key text) or one plain text; its rows are windows spread evenly over it. The parts:

- spectra: eigenvalues of each head's W_v W_o (OV) and W_q W_k^T (QK), as stored and with the scale of the attention's
  norm multiplied into W_v, W_q and W_k (folded), as the normalized state meets them; singular values of folded OV;
- states, of the rows: root mean squares of the state before each layer and of what the branches add to it (medians over
  tokens but the first of a row, whose norm is an outlier); cosines of two tokens; block influence (Men et al. 2024);
- clusters, of the first 32 tokens of each row: as `launch.experiments.inside`, and with one layer's weights everywhere;
- exponents, of the first --short tokens of --texts rows: of the last token for each token, and the effects of tokens;
- ranks: the share of a kernel's squared norm that T principal components over layers hold; the loss with kernels of
  T + 1 matrices: the mean over layers and T components (least error), or T + 1 components of the kernels at unit norm
  (least relative error).

--out gets a JSON file for each part, so that the same command continues after an interruption, inside.png, inside.md.

B rows, L positions, D embed_dim, S layers (solver steps), U weight sets, H heads, C head_dim.
"""

import copy
import dataclasses
import io
import os
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
from PIL import Image
from scipy import stats

from diffeq_nnx import files
from diffeq_nnx.analysis import clustering, sensitivity
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, logits_of, observe
from diffeq_nnx.analysis.spectra import eigenvalues, spectra
from diffeq_nnx.data import Tokenizer, sources
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.generation import encode_texts
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.runs.run import Run
from launch import programs
from launch.experiments import inside, tables

KINDS, BRANCHES, OPERATOR = ("stored", "folded"), ("attention", "feedforward"), "OV folded, operator norm"
COSINES = ("of a row", "of a row, without its first", "of different rows")  # of two tokens
OPENING = 2  # layers that make the state of the embedding, which the later layers are also looked at without
FOLLOWING = ("correlation with the state, logs", "slope, logs", "correlation without linear trends")
WAYS = ("least error", "least relative error")  # of approximations
Lists = dict[str, list[float]]  # by name, mostly with a number for each layer


def read_rows(path: str, tokenizer: Tokenizer, rows: int, length: int) -> np.ndarray:
  """Windows of the documents of a file, [rows, length + 1]; raises UserError if it has too few."""
  kind = "jsonl" if ".jsonl" in os.path.basename(path) else "text"
  documents = [str(one) for one in sources.open_source(f"{kind}:{path}", "--text").documents()]
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  size = length + 1 - len(begin)
  encoded = encode_texts(tokenizer, documents, "--text")
  windows = [begin + ids[at : at + size] for ids in encoded for at in range(0, len(ids) - size + 1, size)]
  if len(windows) < rows:
    raise UserError(f"--rows={rows}: the text has {len(windows)} windows of {size} tokens; ask for fewer or shorter")
  return np.array([windows[i] for i in np.linspace(0, len(windows) - 1, rows, dtype=int)], np.int32)


def fold(analyzed: AnalyzedModel) -> AnalyzedModel:
  """The same model with the scale of the attention norm in the kernels that read the normalized state."""
  sets = analyzed.ready.weights.sets
  scale_UxDx1, readers = sets["attention_norm"]["scale"][..., None], {"qkv", "query", "key", "value"} & sets.keys()
  scaled = {group: {**sets[group], "kernel": scale_UxDx1 * sets[group]["kernel"]} for group in readers}
  folded = copy.copy(analyzed)
  folded.ready = dataclasses.replace(analyzed.ready, weights=GridWeights({**sets, **scaled}, analyzed.grid))
  return folded


def measure_spectra(analyzed: AnalyzedModel) -> Lists:
  """The part `spectra`, over all heads of a layer."""
  first_S, found = analyzed.times.index_SxN[:, 0], {}
  for label, model in zip(KINDS, (analyzed, fold(analyzed))):
    eigen = spectra(model, feedforward=False)
    for pair in inside.PAIRS:
      sizes_SxN, name = np.abs(eigen.of(pair)[first_S]).reshape(len(first_S), -1), f"{pair.upper()} {label}"
      found |= {f"{name}, largest": sizes_SxN.max(1), f"{name}, 90 %": np.percentile(sizes_SxN, 90, axis=1)}
      found[f"{name}, mean"] = sizes_SxN.mean(1)
  kernels = vector_fields.make_field(analyzed.config).head_kernels(jax.device_get(fold(analyzed).ready.weights.sets))
  value_UxHxDxC = np.repeat(kernels.value, kernels.out.shape[1] // kernels.value.shape[2], axis=2).swapaxes(1, 2)
  back_UxHxCxD = kernels.out @ kernels.out.swapaxes(2, 3) @ value_UxHxDxC.swapaxes(2, 3)
  squares_SxHxC = eigenvalues(value_UxHxDxC, back_UxHxCxD).real[first_S]  # of the singular values of W_v W_o
  found[OPERATOR] = np.sqrt(squares_SxHxC.max((1, 2)))  # of the head that has the largest
  return {name: values_S.tolist() for name, values_S in found.items()}


def mean_cosines(u_BxLxD: np.ndarray) -> tuple[float, float, float]:
  """The mean cosine of two unit vectors, as `COSINES` says; those of different rows without the first tokens."""
  within = lambda u: float(((np.square(u.sum(1)).sum(-1) - u.shape[1]) / (u.shape[1] * (u.shape[1] - 1))).mean())
  sums_BxD, (B, L, _) = u_BxLxD[:, 1:].sum(1), u_BxLxD.shape
  across = (np.square(sums_BxD.sum(0)).sum() - np.square(sums_BxD).sum()) / (B * (B - 1) * (L - 1) ** 2)
  return within(u_BxLxD), within(u_BxLxD[:, 1:]), float(across)


def measure_loss(analyzed: AnalyzedModel, rows: np.ndarray, weights: GridWeights) -> float:
  """The loss with these weights, nats per token."""
  ready = dataclasses.replace(analyzed.ready, weights=weights)
  with analyzed.use_device():
    logs_BxLxV = jax.nn.log_softmax(logits_of(ready, observe(ready, rows[:, :-1]).states[-1]))
    return -float(jnp.take_along_axis(logs_BxLxV, rows[:, 1:, None], -1).mean())


def measure_states(analyzed: AnalyzedModel, rows: np.ndarray) -> Lists:
  """The part `states`; lists of states have one number more, that of the end."""
  field = vector_fields.BoundField(vector_fields.make_field(analyzed.config))
  attend = jax.jit(lambda x_BxLxD, weights: field.attention(x_BxLxD, weights, jax.random.key(0)))
  rms = lambda x_BxLxD: np.sqrt(np.square(x_BxLxD, dtype=np.float64).mean(-1))
  sizes: dict[str, list[np.ndarray]] = {name: [] for name in BRANCHES}
  with analyzed.use_device():
    states = jax.device_get(observe(analyzed.ready, rows[:, :-1]).states)
    for s, (dt, u) in enumerate(zip(analyzed.grid.dts, analyzed.times.index_SxN[:, 0])):
      attended_BxLxD = dt * attend(states[s], jax.tree.map(lambda leaf, u=u: leaf[u], analyzed.ready.weights.sets))
      sizes["attention"].append(rms(attended_BxLxD))
      sizes["feedforward"].append(rms(states[s + 1] - states[s] - attended_BxLxD))  # the rest of the step
  state_SxBxL = np.stack(list(map(rms, states)))
  median = lambda values_SxBxL: np.median(values_SxBxL[:, :, 1:], axis=(1, 2)).tolist()
  found = {"state": median(state_SxBxL)}
  for name, size in sizes.items():
    found |= {name: median(np.stack(size)), f"{name} / state": median(size / state_SxBxL[:-1])}
  u_SxBxLxD = states / np.linalg.norm(states.astype(np.float64), axis=-1, keepdims=True)
  found["influence"] = [float(1 - (u * v).sum(-1).mean()) for u, v in zip(u_SxBxLxD, u_SxBxLxD[1:])]
  return found | dict(zip(COSINES, map(list, zip(*map(mean_cosines, u_SxBxLxD)))))


def measure_clusters(analyzed: AnalyzedModel, rows: np.ndarray) -> Lists:
  """The part `clusters`: the mean distance of two tokens' directions at the end, a number for each text."""
  S = analyzed.grid.num_steps
  held = {"own": None} | {f"of layer {step + 1}": step for step in dict.fromkeys((0, S // 2, S - 1))}
  spread = lambda text_L, step: float(clustering.depth_spread(analyzed, text_L, step)[0][-1])
  return {label: [spread(text_L, step) for text_L in rows[:, :32]] for label, step in held.items()}


def measure_exponents(analyzed: AnalyzedModel, text_L: np.ndarray) -> Lists:
  """The leading exponent of the last token for each token, in both forms, and the effects of the earlier ones."""
  found = {form: sensitivity.exponents(analyzed, text_L, leading=1, form=form)[:, 0] for form in sensitivity.FORMS}
  found["effect"] = inside.replacement_effects(analyzed, text_L)
  return {name: values.tolist() for name, values in found.items()}


def center(size: int) -> np.ndarray:
  """The matrix that subtracts the mean over layers, [U, U]."""
  return np.eye(size) - 1 / size


def combine(gram_UxU: np.ndarray, rank: int, way: str) -> np.ndarray:
  """The matrix that maps the layers' kernels to the nearest that are combinations of rank + 1 matrices, [U, U]."""
  if way == WAYS[0]:
    rest_UxU = center(len(gram_UxU))
    basis_UxT = np.linalg.eigh(rest_UxU @ gram_UxU @ rest_UxU)[1][:, ::-1][:, :rank]
    return np.eye(len(gram_UxU)) - rest_UxU + basis_UxT @ basis_UxT.T @ rest_UxU
  sizes_U = np.sqrt(np.diag(gram_UxU)) + np.finfo(np.float64).tiny
  basis_UxT = np.linalg.eigh(gram_UxU / np.outer(sizes_U, sizes_U))[1][:, ::-1][:, : rank + 1]
  return sizes_U[:, None] * (basis_UxT @ basis_UxT.T) / sizes_U


def measure_ranks(analyzed: AnalyzedModel, rows: np.ndarray, ranks: list[int]) -> tuple[Lists, Lists]:
  """The part `ranks`: shares for T from 1 and mean cosines of neighbors, by kernel; losses by way."""
  sets, shares = jax.device_get(analyzed.ready.weights.sets), {}
  kernels = {group: leaves["kernel"] for group, leaves in sets.items() if "kernel" in leaves}
  wide = lambda kernel: kernel.reshape(len(kernel), -1).astype(np.float64)
  grams = {name: wide(kernel) @ wide(kernel).T for name, kernel in kernels.items()}
  for name, gram_UxU in grams.items():
    rest_UxU = center(len(gram_UxU))
    squares_T = np.linalg.eigvalsh(rest_UxU @ gram_UxU @ rest_UxU)[:0:-1]  # without the mean, whose square is zero
    shares[f"{name}, share"] = (np.cumsum(squares_T) / squares_T.sum()).tolist()
    sizes_U = np.sqrt(np.diag(gram_UxU))
    shares[f"{name}, neighbors"] = [float((np.diag(gram_UxU, 1) / (sizes_U[1:] * sizes_U[:-1])).mean())]
  losses: Lists = {way: [] for way in WAYS}
  for way, rank in [(way, rank) for way in WAYS for rank in ranks]:
    near = {name: np.tensordot(combine(grams[name], rank, way), kernel, 1) for name, kernel in kernels.items()}
    made = {name: {**sets[name], "kernel": jnp.asarray(one, kernels[name].dtype)} for name, one in near.items()}
    weights = GridWeights({**sets, **made}, analyzed.grid)
    losses[way].append(measure_loss(analyzed, rows, weights))
  return shares, losses


def follow(sizes_S: list[float], state_S: list[float]) -> list[float]:
  """How a size follows the state's over layers, as `FOLLOWING` says; nan for one that doesn't change, or few layers."""
  if len(sizes_S) < 4 or np.ptp(sizes_S) == 0:
    return [float("nan")] * len(FOLLOWING)
  logs_2xS, layers_S = np.log([sizes_S, state_S[: len(sizes_S)]]), np.arange(len(sizes_S))
  residuals_2xS = [logs_S - np.polyval(np.polyfit(layers_S, logs_S, 1), layers_S) for logs_S in logs_2xS]
  slope, correlation = np.polyfit(logs_2xS[1], logs_2xS[0], 1)[0], np.corrcoef(logs_2xS)[0, 1]
  return [correlation, slope, np.corrcoef(residuals_2xS)[0, 1]]


def columns(head: str, labels: Any, lists: Lists, word: str = "") -> str:
  """A Markdown table of the lists whose names hold a word, a column for each; lists may be shorter than the labels."""
  cell = lambda values, n: f"{values[n]:.4g}" if n < len(values) else ""
  chosen = {name: values for name, values in lists.items() if word in name}
  rows = [[str(label), *(cell(values, n) for values in chosen.values())] for n, label in enumerate(labels)]
  return tables.markdown([head, *chosen], rows)


def write_tables(eigen: Lists, states: Lists, clusters: Lists, exponents: list[Lists], shares, losses, ranks) -> str:
  """All numbers, as Markdown."""
  grown = lambda one: [*inside.growth(np.asarray(one)), *follow(one, state), *follow(one[OPENING:], state[OPENING:])]
  state, above = states["state"], {name: one for name, one in (eigen | states).items() if min(one) > 0}
  heads = ["last third / first", "correlation with depth", *FOLLOWING, *(f"later layers: {head}" for head in FOLLOWING)]
  placed = [{**one, "position": list(range(len(one["exact"])))} for one in exponents]  # to compare with the other two
  rho = lambda of, start: [stats.spearmanr(one[of][start:-1], one["effect"][start:]).statistic for one in placed]
  means = {f"distance at the end, weights {name}": values for name, values in clusters.items()}
  for of in (*sensitivity.FORMS, "position"):
    means |= {f"{of}, correlation with effects": rho(of, 0), f"{of}, the same without the first": rho(of, 1)}
  layers = range(1, len(states["state"]) + 1)
  parts = [
    tables.markdown(["of layers", *heads], [[name, *map("{:.3g}".format, grown(one))] for name, one in above.items()]),
    tables.markdown(["over texts", "mean"], [[name, tables.mean_and_error(one, ".2f")] for name, one in means.items()]),
    columns("T", ranks, losses),
    *(columns("layer", layers, eigen, pair.upper()) for pair in inside.PAIRS),
    columns("layer", layers, states),
    columns("T", layers, shares, "share"),
    columns("two layers", ["mean cosine"], shares, "neighbors"),
  ]
  return "\n\n".join(parts)


def draw(eigen: Lists, states: Lists, exponents: list[Lists], shares, losses, loss, ranks, path: str) -> None:
  """The picture."""
  figure = Figure(figsize=(13, 7), layout="constrained")
  kinds = [f"{pair} {kind}, {part}" for part in ("largest", "90 %") for pair in ("OV", "QK") for kind in KINDS]
  sizes = {name: states[name] for name in ("state", *BRANCHES)} | {OPERATOR: eigen[OPERATOR]}
  ratios = [f"{branch} / state" for branch in BRANCHES]
  panels = (
    ("(a) |eigenvalues| over all heads", "layer", "log", {name: eigen[name] for name in kinds}),
    ("(b) root mean squares, and the norm of OV", "layer", "log", sizes),
    ("(c) mean cosine of two tokens' states", "before layer", "linear", {name: states[name] for name in COSINES}),
    ("(d) leading exponents of the last token", "input token", "linear", {}),
    ("(e) what a layer changes", "layer", "log", {name: states[name] for name in ("influence", *ratios)}),
    ("(f) kernels from T components over layers", "T", "linear", {k: v for k, v in shares.items() if "share" in k}),
  )
  every = figure.subplots(2, 3).flat
  for axes, (title, label, scale, lists) in zip(every, panels):
    for n, (name, values) in enumerate(lists.items()):
      style = {"color": f"C{n % 4}", "linestyle": ":"} if "90 %" in name else {}
      axes.plot(np.arange(len(values)) + 1, values, label=name.removesuffix(", share"), **style)
    axes.set(title=title, xlabel=label, yscale=scale)
    axes.grid(alpha=0.25)
  for n, (one, form) in enumerate((one, form) for form in sensitivity.FORMS for one in exponents):
    first, color = n % len(exponents) == 0, f"C{n // len(exponents)}"
    every[3].plot(one[form], ".-", color=color, linewidth=0.8, label=form.replace("_", "-") if first else None)
  right = every[5].twinx()
  for (way, values), style in zip(losses.items(), ("ks", "k^")):
    every[5].plot([], [], style, markersize=4, label=way)
    right.plot(ranks, values, style, markersize=4)
  right.axhline(loss, color="0.5", linewidth=0.8)
  right.set(ylabel="loss, nats per token (marks)", ylim=(0, 1.5 * max(map(max, losses.values()))))
  every[5].set(ylabel="share of the squared norm (lines)", ylim=(0, 1.5), yticks=np.linspace(0, 1, 6))
  every[0].set_ylim(every[0].get_ylim()[0] / 100, None)
  for axes, count in zip(every, (2, 1, 1, 1, 1, 3)):
    axes.legend(fontsize=7, ncols=count)
  with io.BytesIO() as png:
    figure.savefig(png, dpi=95)
    Image.open(png).quantize(48).save(path, optimize=True)  # a third of the size


def main(argv: list[str] | None = None) -> None:
  """Measures what is missing, and writes the picture and the tables."""
  flags = {"rows": 8, "tokens": 256, "texts": 8, "short": 24, "ranks": [30, 29, 28, 24, 20, 15, 10]}
  args = programs.make_parser(__doc__, workdir=str, text=str, out=str, **flags).parse_args(argv)
  run = Run.open(args.workdir)
  remember = lambda name, measure, *given: tables.remember(f"{args.out}/{name}.json", lambda: measure(*given))
  rows = read_rows(args.text, run.tokenizer, args.rows, min(args.tokens, run.config.model.seq_len))
  # more texts may be added, and the folder may be moved
  settings = {**vars(args), "workdir": run.hash, "step": run.step, "texts": None, "out": None}
  tables.require_settings(args.out, settings)
  with jax.set_mesh(run.mesh):
    analyzed = AnalyzedModel(run.model)
  eigen = remember("spectra", measure_spectra, analyzed)
  loss = remember("loss", measure_loss, analyzed, rows, analyzed.ready.weights)
  states = remember("states", measure_states, analyzed, rows)
  clusters = remember("clusters", measure_clusters, analyzed, rows)
  shares, losses = remember("ranks", measure_ranks, analyzed, rows, args.ranks)
  texts = rows[: args.texts, : args.short]
  exponents = [remember(f"exponents{n}", measure_exponents, analyzed, text_L) for n, text_L in enumerate(texts)]
  text = write_tables(eigen, states, clusters, exponents, shares, losses, args.ranks)
  files.write(f"{args.out}/inside.md", f"Loss: {loss:.4f} nats per token\n\n{text}\n".encode())
  draw(eigen, states, exponents, shares, losses, loss, args.ranks, f"{args.out}/inside.png")
  print(text)


if __name__ == "__main__":
  programs.start(main)
