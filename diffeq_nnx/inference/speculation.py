"""Self-speculation across depth: the model at few solver steps drafts tokens, and at many steps verifies them at once.

B rows, N drafted tokens, V vocab_size. An elastic model (docs/depth.md) serves both with one set of parameters. A token
of the draft is kept if the deep model would draw it; the first that is not is drawn again so that all tokens have the
deep model's distribution (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding").

Each row advances by the tokens that it keeps, and so has slots of its own: its text does not depend on other rows. A
row whose text has ended goes on until all have; nobody reads what it writes.
"""

from collections.abc import Callable, Iterator, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.batching import ROWS, check_rows
from diffeq_nnx.inference.decoding import Decoder, State, Weights, all_logits, more_logits, padded, sampled
from diffeq_nnx.inference.sampling import Filters, Sampling, keys_of, sample, shares
from diffeq_nnx.parallel import sharding


def speculated(
  decoder: Decoder,
  draft: Decoder,
  prompts: Sequence[Sequence[int]],
  sampling: Sampling,
  take: Callable[[int, int], str | None],
  *,
  draft_tokens: int = 4,
  rows: int | None = None,
  row_numbers: Sequence[int] | None = None,
  on_round: Callable[[int], None] = lambda kept: None,
) -> Iterator[tuple[int, str]]:
  """As `batching.continued`, with the same tokens if greedy, and tokens of the same distribution otherwise.

  Args:
    decoder: the model at many steps.
    draft: the same model at fewer steps.
    prompts: as for `continued`, as are the next two.
    sampling: of all prompts.
    take: called for each token.
    draft_tokens: N, tokens drafted at a time.
    rows: prompts that are continued together; the next ones follow when all of them have ended.
    row_numbers: as for `continued`.
    on_round: called with the number of drafted tokens that a row kept, for each round of drafting and unfinished text.

  Raises:
    UserError: as `Decoder.room`, or draft_tokens below 1.
  """
  if draft_tokens < 1:
    raise UserError(f"draft_tokens={draft_tokens}: must be 1 or above")
  check_rows(rows)
  room = decoder.room(prompts, sampling.max_tokens)
  numbers = range(len(prompts)) if row_numbers is None else row_numbers
  values = decoder.values(sampling)
  for start in range(0, len(prompts), rows or ROWS):
    group = list(range(start, min(start + (rows or ROWS), len(prompts))))
    filled = group + group[:1] * (decoder.num_rows(len(group)) - len(group))
    longest = padded(max(len(prompts[n]) for n in group))  # which `read` fills with prompts and padding
    num_slots = padded(longest + max(room[n] for n in group) + draft_tokens)  # so that no round goes around the ring
    texts, seeds = [prompts[n] for n in filled], [numbers[n] for n in filled]
    (state, tokens_B), (draft_state, _) = (
      next(filter(None, one.read(texts, sampling, seeds, num_slots))) for one in (decoder, draft)
    )
    with jax.set_mesh(decoder.mesh):
      state, draft_state = ({**one, "slot": _by_row(one["slot"], one["next_B"])} for one in (state, draft_state))
    taken, ended = dict.fromkeys(group, 0), set()
    new, counts = np.asarray(tokens_B)[:, None], np.ones(len(filled), int)
    while True:
      for row, n in enumerate(group):
        for token in new[row, : counts[row]].tolist():
          if n in ended:
            break
          taken[n] += 1
          reason = take(n, token) or ("length" if taken[n] == room[n] else None)
          if reason is not None:
            ended.add(n)
            yield n, reason
      if len(ended) == len(group):
        del state, draft_state  # the next group's need the memory
        break
      with jax.set_mesh(decoder.mesh):
        state, draft_state, tokens_B, new_BxN1, count_B = next_several(
          decoder.config,
          sampling.filters,
          draft_tokens,
          decoder.weights,
          draft.weights,
          values,
          state,
          draft_state,
          tokens_B,
        )
      new, counts = np.asarray(new_BxN1), np.asarray(count_B)
      for row, n in enumerate(group):
        if n not in ended:
          on_round(int(counts[row]) - 1)


@jax.jit
def _by_row(slot: jax.Array, next_B: jax.Array) -> jax.Array:
  return jnp.broadcast_to(slot, next_B.shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("state", "draft_state"))
def next_several(
  config: ModelConfig,
  filters: Filters,
  N: int,
  weights: Weights,
  draft_weights: Weights,
  values: dict[str, jax.Array],
  state: State,
  draft_state: State,
  tokens_B: jax.Array,
) -> tuple[State, State, jax.Array, jax.Array, jax.Array]:
  """One round: (both states, newest tokens [B], new tokens [B, N + 1], how many of them count [B]).

  Both states, whose slots are by row, hold all tokens but the newest; the last of the new tokens that count is that.
  """
  P = state["cache"][0][0].shape[2]
  read, drafted_logits = [tokens_B], []
  for _ in range(N):
    draft_state, logits_BxV = more_logits(config, draft_weights, draft_state, read[-1][:, None])
    drafted_logits.append(logits_BxV)
    read.append(sampled(filters, values, draft_state, logits_BxV))
  draft_state, _ = more_logits(config, draft_weights, draft_state, read[-1][:, None])  # it may be kept
  first_B = state["next_B"] + 1  # positions of the first new tokens
  state, logits_BxN1xV = all_logits(config, weights, state, jnp.stack(read, 1))
  values = {**values, "rows": state["numbers_B"]}
  new_BxN1, kept_B = judged(
    filters, values, jnp.stack(read[1:], 1), jnp.stack(drafted_logits, 1), logits_BxN1xV, first_B
  )
  new_BxN1, kept_B = (sharding.constrain(x, *[None] * x.ndim) for x in (new_BxN1, kept_B))  # every device has them
  back = lambda s: {**s, "slot": (s["slot"] - (N - kept_B)) % P, "next_B": s["next_B"] - (N - kept_B)}
  newest_B = sharding.constrain(jnp.take_along_axis(new_BxN1, kept_B[:, None], 1)[:, 0], None)
  return back(state), back(draft_state), newest_B, new_BxN1, kept_B + 1


def judged(
  filters: Filters,
  values: dict[str, jax.Array],
  drafts_BxN: jax.Array,
  draft_logits_BxNxV: jax.Array,
  logits_BxN1xV: jax.Array,
  first_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """(new tokens [B, N + 1], number of drafted tokens that are kept [B]).

  New tokens after the first that is not kept are unused.

  Args:
    filters: of the sampling.
    values: of the sampling, perhaps with `rows`.
    drafts_BxN: drawn from the draft's logits.
    draft_logits_BxNxV: these logits.
    logits_BxN1xV: the deep model's at the same places, and after the last drafted token.
    first_B: position of the first drafted token in each row.
  """
  B, N = drafts_BxN.shape
  accepted, instead = [], []
  for i in range(N):
    deep_BxV, draft_BxV = (shares(filters, values, logits[:, i]) for logits in (logits_BxN1xV, draft_logits_BxNxV))
    if filters.greedy:
      instead.append(deep_BxV.argmax(-1))
      accepted.append(drafts_BxN[:, i] == instead[-1])
      continue
    key, other = (jax.vmap(jax.random.fold_in, (0, None))(keys_of(values, first_B + i), n) for n in (1, 2))
    rest_BxV = jnp.maximum(deep_BxV - draft_BxV, 0)
    instead.append(jax.vmap(jax.random.categorical)(key, jnp.log(rest_BxV)))
    of_draft = lambda x, i=i: jnp.take_along_axis(x, drafts_BxN[:, i : i + 1], 1)[:, 0]
    accepted.append(jax.vmap(jax.random.uniform)(other) * of_draft(draft_BxV) < of_draft(deep_BxV))
  instead.append(sample(filters, values, logits_BxN1xV[:, N], first_B + N))
  accepted_BxN = jnp.cumprod(jnp.stack(accepted, 1).astype(jnp.int32), axis=1)
  last_BxN1 = jnp.concatenate([accepted_BxN, jnp.zeros((B, 1), jnp.int32)], 1)
  padded_BxN1 = jnp.concatenate([drafts_BxN, jnp.zeros((B, 1), drafts_BxN.dtype)], 1)
  return jnp.where(last_BxN1 == 1, padded_BxN1, jnp.stack(instead, 1)).astype(jnp.int32), accepted_BxN.sum(1)
