"""All results of analyzing one model and one text, as numbers.

L positions, D embed_dim, S solver steps, H query heads, r exponents.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import math
import sys

import numpy as np
from tqdm import tqdm

from diffeq_nnx.analysis import attention, clustering, sensitivity
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, Progress
from diffeq_nnx.analysis.spectra import PAIRS, Spectra, copying_score, positive_share, spectra
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel import distributed

BETWEEN = 4  # times for each step of the solver at which spectra are also computed


@dataclasses.dataclass(frozen=True)
class Findings:
  """The results of analyzing one model with one text, whose output token has the position n."""

  pieces: tuple[str, ...]  # the tokens' texts, [L]
  tokens: np.ndarray  # [L]
  position: int  # n
  times_S: np.ndarray  # of the weights at the first node of each step
  dts_S: np.ndarray
  ends_S: np.ndarray  # times at which the steps end
  spectra: Spectra  # at the model's times, or at the requested ones
  between: Spectra | None  # of the heads at the steps and at times between; None where weights are stored or shared
  prefix_matching: np.ndarray | None  # [S, H], `attention.prefix_matching`; None where there are too few positions
  prefix_chance: float  # its value under uniform attention
  exact: np.ndarray  # exponents of the tokens up to n, [n + 1, r]
  per_token: np.ndarray  # exponents in the paper's form, [n + 1, r]
  rollout: np.ndarray  # shares of the tokens in n's attention rollout, [n + 1]
  gradient: np.ndarray  # gradient times input of n's likeliest next token, [n + 1]
  next_token: tuple[str, float, int]  # that token's text, its probability and its id
  # label -> (spread, clustered share) over depth, [S + 1] each; None where the text has one token
  depth: dict[str, tuple[np.ndarray, np.ndarray]] | None

  def arrays(self) -> dict[str, np.ndarray]:
    """All arrays of numbers.npz, by name."""
    made = {
      "tokens": self.tokens,
      "position": np.array(self.position),
      "times": self.times_S,
      "dts": self.dts_S,
      "ends": self.ends_S,
      "spectra_times": self.spectra.times,
      "exponents_exact": self.exact,
      "exponents_per_token": self.per_token,
      "rollout": self.rollout,
      "gradient_times_input": self.gradient,
      "next_token_probability": np.array(self.next_token[1]),
      "next_token": np.array(self.next_token[2]),
    }
    for pair in PAIRS:
      values = self.spectra.of(pair)
      made[f"eigenvalues_{pair}"] = values
      made[f"positive_share_{pair}"], made[f"copying_score_{pair}"] = positive_share(values), copying_score(values)
    if (between := self.between) is not None:
      made |= {
        "between_times": between.times,
        "between_eigenvalues_qk": between.qk,
        "between_eigenvalues_ov": between.ov,
      }
    if self.prefix_matching is not None:
      made["prefix_matching"] = self.prefix_matching
    for label, (spread, share) in (self.depth or {}).items():
      name = label.replace(" ", "_")
      made |= {f"depth_spread_{name}": spread, f"depth_clustered_share_{name}": share}
    return made


def find(
  analyzed: AnalyzedModel,
  tokens_L: Sequence[int],
  pieces: Sequence[str],
  decode: Callable[[int], str],
  *,
  position: int = -1,
  leading: int = 16,
  times: Sequence[float] | None = None,
) -> Findings:
  """Analyzes a model with one text; shows progress on stderr.

  Args:
    tokens_L: the text's tokens.
    pieces: their texts, [L].
    position: of the output token; negative ones count from the end.
    leading: how many exponents, at most embed_dim.
    times: of the spectra, from 0 to 1, which pictures show in rising order; None: the model's own.

  Raises:
    UserError: no tokens, ids outside the vocabulary, a position out of range, times at which the model has no
      weights, a number of exponents below 1.
  """
  tokens_L = analyzed.check_tokens(tokens_L)
  position = analyzed.check_position(position, len(tokens_L))
  if leading < 1:
    raise UserError(f"leading={leading}: must be 1 or above")
  times = None if times is None else sorted(set(times))
  # first, since it says where a state is not finite, and NumPy's eigenvalues do not
  passed = analyzed.observe(tokens_L[: position + 1], attention=True)
  with show_progress("spectra", len(analyzed.times.times_U) if times is None else len(times)) as progress:
    found = spectra(analyzed, times, progress=progress)
  between = None
  if analyzed.config.weights == "generated":
    count = BETWEEN * analyzed.grid.num_steps
    fine = np.arange(1, count + 1) / count
    with show_progress("spectra between", len(fine)) as progress:
      between = spectra(analyzed, np.union1d(fine, analyzed.times.times_U), feedforward=False, progress=progress)
  exponents = {}
  for form in sensitivity.FORMS:
    with show_progress(f"exponents, {form}", position + 1) as progress:
      exponents[form] = sensitivity.exponents(
        analyzed, tokens_L, position, leading=min(leading, analyzed.config.embed_dim), form=form, progress=progress
      )
  token, probability = attention.likeliest(analyzed, passed)
  half = min(attention.HALF, analyzed.config.seq_len // 2)
  return Findings(
    pieces=tuple(pieces),
    tokens=tokens_L,
    position=position,
    times_S=analyzed.times.times_U[analyzed.times.index_SxN[:, 0]],
    dts_S=np.asarray(analyzed.grid.dts),
    ends_S=np.asarray(analyzed.grid.edges)[np.asarray(analyzed.grid.kept_S) + 1],
    spectra=found,
    between=between,
    prefix_matching=attention.prefix_matching(analyzed, half) if half >= 2 else None,
    prefix_chance=float(np.mean(1 / np.arange(half + 1, 2 * half))) if half >= 2 else math.nan,
    exact=exponents["exact"],
    per_token=exponents["per_token"],
    rollout=attention.rollout(np.asarray(passed.attention[:, 0]))[-1],
    gradient=attention.gradient_times_input(analyzed, passed, token),
    next_token=(decode(token), probability, token),
    depth=_depth(analyzed, tokens_L) if len(tokens_L) > 1 else None,
  )


def _depth(analyzed: AnalyzedModel, tokens_L: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """The spread of states with the model's weights, and with those of the first, middle or last step at all steps."""
  S, kept = analyzed.grid.num_steps, analyzed.grid.kept_S  # of all steps, from 0, as in model.depth_order
  held = {f"held at step {kept[step]}": step for step in dict.fromkeys((0, S // 2, S - 1))}
  return {label: clustering.depth_spread(analyzed, tokens_L, step) for label, step in {"own": None, **held}.items()}


@contextlib.contextmanager
def show_progress(what: str, total: int) -> Iterator[Progress]:
  """A progress bar on stderr (a line every few seconds if it is no terminal); yields the function that reports work."""
  terminal = sys.stderr.isatty()
  with tqdm(
    total=total,
    desc=what,
    file=sys.stderr,
    dynamic_ncols=True,
    disable=not distributed.is_main_process(),
    leave=False,
    mininterval=0.1 if terminal else 5,
    miniters=0,
    maxinterval=math.inf,
    bar_format="{desc}: {percentage:3.0f} % |{bar}| {elapsed}",
  ) as bar:
    yield bar.update
