"""The choice of the next token from a model's logits.

B rows, V vocab_size, N tokens left by the filters.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.errors import UserError

SMALLEST = float(np.finfo(np.float32).smallest_normal)  # a temperature; devices take what is below it for 0


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn, and how many.

  Filters apply in this order: the temperature, then top_k, then top_p on the tokens that top_k leaves.

  Attributes:
    max_tokens: largest number of tokens.
    temperature: divides the logits; 0, or below 1.2e-38: always the likeliest token.
    top_k: draw from so many of the likeliest tokens; None: from all.
    top_p: draw from the fewest of the likeliest tokens that together have this probability.
    seed: of the random numbers, which depend on it, the row and the position in the row alone.

  Raises:
    UserError: a value out of range.
  """

  max_tokens: int = 128
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    if self.max_tokens < 1:
      raise UserError(f"max_tokens={self.max_tokens}: must be 1 or above")
    if not 0 <= self.temperature < math.inf:
      raise UserError(f"temperature={self.temperature}: must be 0 (always the likeliest token) or above, and finite")
    if self.top_k is not None and self.top_k < 1:
      raise UserError(f"top_k={self.top_k}: must be 1 or above; leave it out to draw from all tokens")
    if not 0 < self.top_p <= 1:
      raise UserError(f"top_p={self.top_p}: must lie between 0 (excluded) and 1 (included: draw from all tokens)")
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed}: must lie between 0 and 2^32 - 1")

  @property
  def filters(self) -> "Filters":
    """The part that is compiled into a program."""
    return Filters(greedy=self.temperature < SMALLEST, top_k=self.top_k, nucleus=self.top_p < 1)

  def values(self) -> dict[str, jax.Array]:
    """The arguments of a compiled program: temperature, top_p, key."""
    return {
      "temperature": jnp.float32(self.temperature),
      "top_p": jnp.float32(self.top_p),
      "key": jax.random.key(self.seed),
    }


@dataclasses.dataclass(frozen=True)
class Filters:
  """The settings of `Sampling` that need a program of their own; nucleus: whether top_p applies."""

  greedy: bool
  top_k: int | None
  nucleus: bool


def sample(filters: Filters, values: dict[str, jax.Array], logits_BxV: jax.Array, positions_B: jax.Array) -> jax.Array:
  """The next tokens [B], int32; `positions_B` are their positions in their rows.

  `values` are those of `Sampling.values`, and may have `rows` [B], uint32: numbers of the rows for the random numbers,
  in place of 0 to B-1.
  """
  if filters.greedy:
    return logits_BxV.argmax(-1).astype(jnp.int32)
  keys_B = keys_of(values, positions_B)
  logits_BxN, tokens_BxN = _filtered(filters, values, logits_BxV)
  chosen_B = jax.vmap(jax.random.categorical)(keys_B, logits_BxN).astype(jnp.int32)
  if tokens_BxN is None:
    return chosen_B
  return jnp.take_along_axis(tokens_BxN, chosen_B[:, None], axis=1)[:, 0].astype(jnp.int32)


def shares(filters: Filters, values: dict[str, jax.Array], logits_BxV: jax.Array) -> jax.Array:
  """The probabilities [B, V] with which `sample` draws tokens."""
  if filters.greedy:
    return jax.nn.one_hot(logits_BxV.argmax(-1), logits_BxV.shape[1], dtype=logits_BxV.dtype)
  logits_BxN, tokens_BxN = _filtered(filters, values, logits_BxV)
  shares_BxN = jax.nn.softmax(logits_BxN)
  if tokens_BxN is None:
    return shares_BxN
  return jax.vmap(lambda tokens, shares: jnp.zeros(logits_BxV.shape[1], shares.dtype).at[tokens].set(shares))(
    tokens_BxN, shares_BxN
  )


def keys_of(values: dict[str, jax.Array], positions_B: jax.Array) -> jax.Array:
  """Keys [B] that depend on the seed, the row's number and the position alone."""
  key = lambda row, position: jax.random.fold_in(jax.random.fold_in(values["key"], row), position)
  rows_B = values.get("rows", jnp.arange(len(positions_B), dtype=jnp.uint32))
  return jax.vmap(key)(rows_B, positions_B)


def _filtered(
  filters: Filters, values: dict[str, jax.Array], logits_BxV: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """Logits of the tokens that the filters leave, and these tokens, [B, N] each; None: all, in order."""
  # the largest becomes 0, so that a small temperature makes others minus infinity, and none infinity
  logits_BxV = (logits_BxV - logits_BxV.max(-1, keepdims=True)) / values["temperature"]
  if filters.top_k is None and not filters.nucleus:
    return logits_BxV, None
  V = logits_BxV.shape[1]
  logits_BxN, tokens_BxN = jax.lax.top_k(logits_BxV, min(filters.top_k or V, V))  # the likeliest first
  if filters.nucleus:
    shares_BxN = jax.nn.softmax(logits_BxN)
    before_BxN = shares_BxN.cumsum(-1) - shares_BxN
    included_BxN = (before_BxN < values["top_p"]).at[:, 0].set(True)
    logits_BxN = jnp.where(included_BxN, logits_BxN, -jnp.inf)
  return logits_BxN, tokens_BxN
