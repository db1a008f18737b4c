"""Which steps of a model matter: its loss without them, and how far each of them turns the state.

B batch, L positions, D embed_dim, S solver steps.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids
from diffeq_nnx.model.attention_context import pack, unpack
from diffeq_nnx.model.parameters import Params, build
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.training.loss import chunked_cross_entropy

# The batches, of as many as `Ranker` has, that candidates are measured on, and how many of them, the best, then go on.
ROUNDS = ((0, 1, 3), (1, 4, 2), (4, None, 1))
HEAD_CHUNK = 128  # positions whose logits are held at a time, in which a CPU is fastest


class Measured(NamedTuple):
  """Sums over the tokens of a batch that count."""

  losses_S: jax.Array  # nats, of each candidate; 0 beyond their number
  turns_S: jax.Array  # 1 - cos of the angle between the state before and after each step; 0 for a step of size 0
  num_tokens: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def measure(
  config: ModelConfig,
  params: Params,
  weights: GridWeights,
  batch: dict[str, jax.Array],
  sizes_S: jax.Array,
  candidates_S: jax.Array,
  num_candidates: jax.Array,
) -> Measured:
  """Measures a batch without one more step, for each of several steps, by one compiled program.

  The states before all steps are computed once and kept, so that a candidate costs the steps after it.

  Args:
    weights: at the times of the model's own grid.
    batch: as for a train step.
    sizes_S: the size of each step; 0: it is left out.
    candidates_S: the steps to leave out beside these, one at a time; S: none.
    num_candidates: how many entries of `candidates_S` there are; the others are not read.
  """
  model = build(config, params)
  tokens_BxL, context = pack(batch["inputs"], batch.get("segment_ids"), batch.get("positions"))
  mask_BxL = batch.get("mask", jnp.ones(batch["targets"].shape, jnp.float32))
  solver, S = model.solver, weights.grid.num_steps
  advance = model.make_step(weights.grid, context)
  sets, dts_S, keys_S = model.links_of(weights)
  links = sets, sizes_S.astype(dts_S.dtype), keys_S

  def step(number, carry):
    link = jax.tree.map(lambda leaf: leaf[number], links)
    return jax.lax.cond(sizes_S[number] > 0, lambda carry: advance(carry, link), lambda carry: carry, carry)

  def read(carry):
    return unpack(solver.read(carry), context)

  def turn(before, after):
    a, b = (read(carry).astype(dts_S.dtype) for carry in (before, after))
    norms_BxL = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    cosine_BxL = (a * b).sum(-1) / jnp.maximum(norms_BxL, jnp.finfo(a.dtype).tiny)  # the state of padding may be 0
    return (mask_BxL * (1 - cosine_BxL)).sum()

  def record(carry, number):
    after = step(number, carry)
    return after, (carry, jnp.where(sizes_S[number] > 0, turn(carry, after), 0))

  start = solver.init(model.embed(tokens_BxL, context.positions_BxL))
  last, (before_S, turns_S) = jax.lax.scan(record, start, jnp.arange(S))

  def loss_without(candidate):
    carry = jax.tree.map(lambda leaf, end: jnp.where(candidate < S, leaf[candidate], end), before_S, last)
    carry = jax.lax.fori_loop(candidate + 1, S, step, carry)
    L = tokens_BxL.shape[1]
    return chunked_cross_entropy(
      model.normalize(read(carry)),
      model.unembedding(),
      batch["targets"],
      mask_BxL,
      None if L % HEAD_CHUNK else L // HEAD_CHUNK,
    )

  put = lambda place, losses_S: losses_S.at[place].set(loss_without(candidates_S[place]))
  losses_S = jax.lax.fori_loop(0, num_candidates, put, jnp.zeros(S, dts_S.dtype))
  return Measured(losses_S, turns_S, mask_BxL.sum())


class Ranker:
  """A model and the text that its steps are ranked by."""

  def __init__(self, config: ModelConfig, params: Params, batches: Sequence[dict[str, jax.Array]]):
    """`batches`: of one shape."""
    self._config, self._params, self._batches = config, params, batches
    self._grid = grids.make_grid(config)
    self._weights = jax.jit(lambda params: build(config, params).block_weights(self._grid))(params)

  def losses(
    self, kept: Sequence[int], candidates: Sequence[int], start: int = 0, stop: int | None = None
  ) -> tuple[np.ndarray, float]:
    """Summed losses in nats with the steps `kept` but one, of each candidate, and the number of tokens.

    A candidate is the step to leave out; the number of steps: none. The batches are those from `start` to `stop` - 1,
    or to the last.
    """
    found = self._measure(kept, candidates, self._batches[start:stop])
    return np.asarray(found.losses_S)[: len(candidates)], float(found.num_tokens)

  def measure_whole(self) -> tuple[float, np.ndarray]:
    """The mean loss with all steps, nats per token, and the influence of each step, [S].

    The influence is the mean of 1 - cos of the angle by which a step turns a token's state, the block influence of Men
    et al. 2024 (ShortGPT, arXiv 2403.03853).
    """
    S = self._grid.num_steps
    found = self._measure(range(S), [S], self._batches)
    count = float(found.num_tokens)
    if not count:
      raise UserError("tokens: none of those that are read counts as a target; raise --tokens, or name another text")
    return float(found.losses_S[0]) / count, np.asarray(found.turns_S) / count

  def _measure(self, kept, candidates, batches) -> Measured:
    S = self._grid.num_steps
    sizes_S = np.asarray(self._grid.keep(kept).sizes)
    candidates_S = np.zeros(S, np.int32)
    candidates_S[: len(candidates)] = candidates
    measured = (
      measure(self._config, self._params, self._weights, batch, sizes_S, candidates_S, len(candidates))
      for batch in batches
    )
    return jax.device_get(functools.reduce(optax.tree.add, measured))


def leave_out(
  losses: Callable[..., tuple[np.ndarray, float]], kept: Sequence[int], fewest: int
) -> Iterator[tuple[int, float]]:
  """Leaves out the step whose absence costs least, again and again; yields each and the mean loss without it.

  It begins with the steps `kept` and ends when `fewest` are left. Candidates are compared by successive halving: all on
  a part of the text, and the best of them on more of it. `losses` is that of a `Ranker`.
  """
  kept = list(kept)
  while len(kept) > fewest:
    candidates, sums, count = kept, np.zeros(len(kept)), 0.0
    for start, stop, going_on in ROUNDS:
      found, tokens = losses(kept, candidates, start, stop)
      sums, count = sums + found, count + tokens
      if not count:  # nothing tells the candidates apart yet
        continue
      best = np.argsort(sums, kind="stable")[:going_on]
      candidates, sums = [candidates[place] for place in best], sums[best]
    kept = [step for step in kept if step != candidates[0]]
    yield candidates[0], float(sums[0]) / count
