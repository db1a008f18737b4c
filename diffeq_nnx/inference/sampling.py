"""The choice of the next token from a model's logits.

B rows, V vocab_size, N tokens left by the filters.
"""

from collections.abc import Sequence
import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import RANDOM_BITS
from diffeq_nnx.errors import UserError

SMALLEST = float(np.finfo(np.float32).smallest_normal)  # a temperature; devices take what is below it for 0


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
  """How tokens are drawn, how many, and how many texts are continued at a time.

  Filters apply in this order: the temperature, then top_k, then top_p on the tokens that top_k leaves.

  Attributes:
    max_tokens: largest number of tokens of a text.
    temperature: divides the logits; 0, or below 1.2e-38: always the likeliest token.
    top_k: draw from so many of the likeliest tokens; None: from all.
    top_p: draw from the fewest of the likeliest tokens that together have this probability.
    seed: of the random numbers, which depend on it, the row and the position in the row alone.
    rows: texts that are continued at a time; None: all, up to 64.
    draft_tokens: tokens that are drafted at a time, if there is a draft.

  Raises:
    UserError: a value out of range or of another type.
  """

  max_tokens: int = 128
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0
  seed: int = 0
  rows: int | None = None
  draft_tokens: int = 4

  def __post_init__(self):
    for name in ("max_tokens", "rows", "draft_tokens", "top_k", "seed"):
      value = getattr(self, name)
      if value is not None and not isinstance(value, numbers.Integral):
        raise UserError(f"{name}={value!r}: must be an integer")
    for name in ("temperature", "top_p"):
      if not isinstance(getattr(self, name), numbers.Real):
        raise UserError(f"{name}={getattr(self, name)!r}: must be a number")
    for name in ("max_tokens", "rows", "draft_tokens"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise UserError(f"{name}={value}: must be 1 or above")
    if not 0 <= self.temperature < math.inf:
      raise UserError(f"temperature={self.temperature}: must be 0 (always the likeliest token) or above, and finite")
    if self.top_k is not None and self.top_k < 1:
      raise UserError(f"top_k={self.top_k}: must be 1 or above; leave it out to draw from all tokens")
    if not 0 < self.top_p <= 1:
      raise UserError(f"top_p={self.top_p}: must lie between 0 (excluded) and 1 (included: draw from all tokens)")
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed}: must lie between 0 and 2^32 - 1")

  def make_sampler(self, row_numbers: Sequence[int]) -> "Sampler":
    """The sampler of a batch; `row_numbers`, below 2^32, give each row its random numbers."""
    return Sampler(
      key_B=_fold_in(jax.random.key(self.seed, impl=RANDOM_BITS), np.array(row_numbers, np.uint32)),
      temperature=jnp.float32(self.temperature),
      top_p=jnp.float32(self.top_p) if self.top_p < 1 else None,
      greedy=self.temperature < SMALLEST,
      top_k=self.top_k,
    )


_fold_in = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws the next tokens of a batch, in compiled programs, which depend on its static fields and on what is None.

  Attributes:
    key_B: the random key of each row.
    temperature: as in `GenerationOptions`, [].
    top_p: as in `GenerationOptions`, []; None: 1, which leaves all tokens.
    greedy: whether the likeliest token is always taken.
    top_k: as in `GenerationOptions`.
  """

  key_B: jax.Array
  temperature: jax.Array
  top_p: jax.Array | None
  greedy: bool = dataclasses.field(metadata={"static": True})
  top_k: int | None = dataclasses.field(metadata={"static": True})

  def draw(self, logits_BxV: jax.Array, positions_B: jax.Array) -> jax.Array:
    """The next tokens [B], int32; `positions_B` are their positions in their rows."""
    if self.greedy:
      return logits_BxV.argmax(-1).astype(jnp.int32)
    logits_BxN, tokens_BxN = self._filter(logits_BxV)
    chosen_B = jax.vmap(jax.random.categorical)(self.make_keys(positions_B), logits_BxN).astype(jnp.int32)
    if tokens_BxN is None:
      return chosen_B
    return jnp.take_along_axis(tokens_BxN, chosen_B[:, None], axis=1)[:, 0].astype(jnp.int32)

  def compute_shares(self, logits_BxV: jax.Array) -> jax.Array:
    """The probabilities [B, V] with which `draw` draws tokens."""
    if self.greedy:
      return jax.nn.one_hot(logits_BxV.argmax(-1), logits_BxV.shape[1], dtype=logits_BxV.dtype)
    logits_BxN, tokens_BxN = self._filter(logits_BxV)
    shares_BxN = jax.nn.softmax(logits_BxN)
    if tokens_BxN is None:
      return shares_BxN
    return jnp.put_along_axis(jnp.zeros_like(logits_BxV), tokens_BxN, shares_BxN, axis=1, inplace=False)

  def make_keys(self, positions_B: jax.Array) -> jax.Array:
    """Random keys [B] that depend on the seed, the row's number and the position alone."""
    return jax.vmap(jax.random.fold_in)(self.key_B, positions_B)

  def _filter(self, logits_BxV: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Logits of the tokens that the filters leave, and these tokens, [B, N] each; None: all, in order."""
    # The largest becomes 0, so that a small temperature makes others minus infinity, and none infinity.
    logits_BxV = (logits_BxV - logits_BxV.max(-1, keepdims=True)) / self.temperature
    if self.top_k is None and self.top_p is None:
      return logits_BxV, None
    V = logits_BxV.shape[1]
    logits_BxN, tokens_BxN = jax.lax.top_k(logits_BxV, min(self.top_k or V, V))  # the likeliest first
    if self.top_p is not None:
      shares_BxN = jax.nn.softmax(logits_BxN)
      before_BxN = shares_BxN.cumsum(-1) - shares_BxN
      included_BxN = (before_BxN < self.top_p).at[:, 0].set(True)
      logits_BxN = jnp.where(included_BxN, logits_BxN, -jnp.inf)
    return logits_BxN, tokens_BxN
