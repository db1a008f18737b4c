"""Attention rollout, gradient times input and prefix matching, for comparison with the exponents.

L positions, D embed_dim, S solver steps, H query heads.
"""

import jax
import numpy as np

from diffeq_nnx.analysis.analyzed_model import AnalyzedModel, Pass, logits_of
from diffeq_nnx.analysis.sensitivity import pull_back

HALF = 25  # repeated tokens, if there are positions for them
ROWS = 4  # texts of repeated tokens


def rollout(attention_SxHxLxL: np.ndarray) -> np.ndarray:
  """Attention rollout, [L, L]: the share of each earlier token in each token (Abnar & Zuidema 2020).

  The product over steps of (A + I) / 2, A the mean over heads; rows sum to 1.
  """
  L = attention_SxHxLxL.shape[-1]
  mixed_LxL = np.eye(L)
  for heads_HxLxL in np.asarray(attention_SxHxLxL, np.float64):
    mixed_LxL = (heads_HxLxL.mean(0) + np.eye(L)) / 2 @ mixed_LxL
  return mixed_LxL


def gradient_times_input(model: AnalyzedModel, passed: Pass, token: int) -> np.ndarray:
  """The gradient of the logit of `token` after a text times each token's initial state, summed over D: [L], signed."""
  ready, x_1xLxD = model.ready, passed.states[0]
  with model.use_device():
    links = model.without_generator.links_of(ready.weights)
    at_end_1xLxD = jax.grad(lambda x_1xLxD: logits_of(ready, x_1xLxD)[0, -1, token])(passed.states[-1])
    at_start_1xLxD = pull_back(ready, x_1xLxD, passed.carries, links, at_end_1xLxD[:, -1])  # 0 but for the last token
    return np.asarray((at_start_1xLxD * x_1xLxD).sum(-1)[0])


def likeliest(model: AnalyzedModel, passed: Pass) -> tuple[int, float]:
  """The likeliest token after a text, and its probability."""
  with model.use_device():
    logits_V = np.asarray(logits_of(model.ready, passed.states[-1])[0, -1], np.float64)
  token = int(np.argmax(logits_V))
  return token, float(1 / np.exp(logits_V - logits_V[token]).sum())


def prefix_matching(model: AnalyzedModel, half: int) -> np.ndarray:
  """A measure of each head as an induction head: [S, H], from 0 to 1 (Olsson et al. 2022).

  On texts of `half` random tokens, two or more, that are repeated once: the mean attention from each token of the
  second half to the token after its first occurrence.
  """
  first_BxL = np.random.default_rng(0).integers(model.config.vocab_size, size=(ROWS, half))
  scores = [_after_first(model.observe(np.tile(row_L, 2), attention=True).attention, half) for row_L in first_BxL]
  return np.mean(scores, axis=0)


def _after_first(attention_Sx1xHxLxL: jax.Array, half: int) -> np.ndarray:
  queries = np.arange(half, 2 * half - 1)
  return np.asarray(attention_Sx1xHxLxL)[:, 0, :, queries, queries - half + 1].mean(0)
