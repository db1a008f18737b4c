"""Self-speculation across depth: the model at few solver steps drafts tokens, and at many steps verifies them at once.

B rows, N drafted tokens, V vocab_size. An elastic model (docs/every_depth.md) serves both with one set of parameters. A
token of the draft is kept if the deep model would draw it; the first that is not is drawn again so that all tokens have
the deep model's distribution (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding").

Each row advances by the tokens that it keeps, and so has slots of its own: its text does not depend on other rows. A
row whose text has ended goes on until all have; nobody reads what it writes.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.batching import MAX_ROWS, TakeToken, Texts
from diffeq_nnx.inference.decoding import Decoder, DecodeState, draw_next, next_logits, pad_slots
from diffeq_nnx.inference.sampling import GenerationOptions, Sampler
from diffeq_nnx.model.ready import ReadyModel
from diffeq_nnx.parallel import sharding


def speculate(
  decoder: Decoder,
  draft: Decoder,
  prompts: Sequence[Sequence[int]],
  options: GenerationOptions,
  take: TakeToken,
  *,
  row_numbers: Sequence[int] | None = None,
  on_round: Callable[[int], None] = lambda kept: None,
) -> Iterator[tuple[int, str]]:
  """As `batching.continue_prompts`, with the same tokens if greedy, and tokens of the same distribution otherwise.

  Prompts that are continued together all end before the next ones are read. The arguments that are not listed are as
  for `continue_prompts`.

  Args:
    decoder: the model at many steps.
    draft: the same model at fewer steps.
    on_round: called with the number of drafted tokens that a row kept, for each round of drafting and unfinished text.

  Raises:
    UserError: the draft is not a Decoder of the same vocabulary; or as `Decoder.limit_texts`.
  """
  if not isinstance(draft, Decoder) or draft.ready.config.vocab_size != decoder.ready.config.vocab_size:
    raise UserError("draft: must be a Decoder of the same model at fewer steps")
  room = decoder.limit_texts(prompts, options.max_tokens)
  numbers = range(len(prompts)) if row_numbers is None else row_numbers
  texts, rows = Texts(room, take), options.rows or MAX_ROWS
  for start in range(0, len(prompts), rows):
    group = list(range(start, min(start + rows, len(prompts))))
    filled = group + group[:1] * (decoder.count_rows(len(group)) - len(group))
    longest = pad_slots(max(len(prompts[n]) for n in group))  # which `read` fills with prompts and padding
    # No round may go around the ring.
    num_slots = pad_slots(longest + max(room[n] for n in group) + options.draft_tokens)
    arguments = [prompts[n] for n in filled], options, [numbers[n] for n in filled], num_slots
    (state, tokens_B), (draft_state, _) = (next(filter(None, one.read(*arguments))) for one in (decoder, draft))
    with jax.set_mesh(decoder.ready.mesh):
      state, draft_state = (
        dataclasses.replace(one, slot=_by_row(one.slot, one.next_B)) for one in (state, draft_state)
      )
    new, counts = np.asarray(tokens_B)[:, None], np.ones(len(filled), int)
    while True:
      for row, n in enumerate(group):
        for token in new[row, : counts[row]].tolist():
          if (reason := texts.add(n, token)) is not None:
            yield n, reason
      unfinished = [row for row, n in enumerate(group) if not texts.has_ended(n)]
      if not unfinished:
        del state, draft_state  # the next group's need the memory
        break
      with jax.set_mesh(decoder.ready.mesh):
        state, draft_state, tokens_B, new_BxN1, count_B = run_round(
          decoder.ready, draft.ready, state, draft_state, tokens_B, options.draft_tokens
        )
      new, counts = np.asarray(new_BxN1), np.asarray(count_B)
      for row in unfinished:
        on_round(int(counts[row]) - 1)


@jax.jit
def _by_row(slot: jax.Array, next_B: jax.Array) -> jax.Array:
  return sharding.constrain(jnp.broadcast_to(slot, next_B.shape), "batch")  # placed as `run_round` leaves it


@functools.partial(jax.jit, static_argnames="N", donate_argnames=("state", "draft_state"))
def run_round(
  ready: ReadyModel, draft_ready: ReadyModel, state: DecodeState, draft_state: DecodeState, tokens_B: jax.Array, N: int
) -> tuple[DecodeState, DecodeState, jax.Array, jax.Array, jax.Array]:
  """One round: (both states, newest tokens [B], new tokens [B, N + 1], how many of them count [B]).

  Both states, whose slots are by row, hold all tokens but the newest; the last of the new tokens that count is that.
  """
  read, drafted_logits = [tokens_B], []
  for _ in range(N):
    draft_state, logits_BxV = next_logits(draft_ready, draft_state, read[-1][:, None])
    drafted_logits.append(logits_BxV)
    read.append(draw_next(draft_state, logits_BxV))
  draft_state, _ = next_logits(draft_ready, draft_state, read[-1][:, None])  # it may be kept
  first_B = state.next_B + 1  # positions of the first new tokens
  state, logits_BxN1xV = next_logits(ready, state, jnp.stack(read, 1), after_each=True)
  new_BxN1, kept_B = verify_drafts(
    state.sampler, jnp.stack(read[1:], 1), jnp.stack(drafted_logits, 1), logits_BxN1xV, first_B
  )
  new_BxN1, kept_B = (sharding.constrain(x, *[None] * x.ndim) for x in (new_BxN1, kept_B))  # every device has them
  newest_B = sharding.constrain(jnp.take_along_axis(new_BxN1, kept_B[:, None], 1)[:, 0], None)

  def go_back(after: DecodeState) -> DecodeState:
    dropped_B = N - kept_B
    slot_B, next_B = (after.slot - dropped_B) % after.num_slots, after.next_B - dropped_B
    slot_B, next_B = (sharding.constrain(x_B, "batch") for x_B in (slot_B, next_B))
    return dataclasses.replace(after, slot=slot_B, next_B=next_B)

  return go_back(state), go_back(draft_state), newest_B, new_BxN1, kept_B + 1


def verify_drafts(
  sampler: Sampler, drafts_BxN: jax.Array, draft_logits_BxNxV: jax.Array, logits_BxN1xV: jax.Array, first_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(new tokens [B, N + 1], number of drafted tokens that are kept [B]).

  New tokens after the first that is not kept are unused. The deep model's logits are those at the places of the draft's
  logits, and after the last drafted token; `first_B` is the position of the first drafted token in each row.
  """
  B, N = drafts_BxN.shape
  accepted, instead = [], []
  for i in range(N):
    deep_BxV, draft_BxV = (sampler.compute_shares(logits[:, i]) for logits in (logits_BxN1xV, draft_logits_BxNxV))
    if sampler.greedy:
      instead.append(deep_BxV.argmax(-1))
      accepted.append(drafts_BxN[:, i] == instead[-1])
      continue
    key_B = sampler.make_keys(first_B + i)
    redraw_key_B, accept_key_B = (jax.vmap(jax.random.fold_in, (0, None))(key_B, n) for n in (1, 2))
    rest_BxV = jnp.maximum(deep_BxV - draft_BxV, 0)
    instead.append(jax.vmap(jax.random.categorical)(redraw_key_B, jnp.log(rest_BxV)))
    pick = lambda x, i=i: jnp.take_along_axis(x, drafts_BxN[:, i : i + 1], 1)[:, 0]
    accepted.append(jax.vmap(jax.random.uniform)(accept_key_B) * pick(draft_BxV) < pick(deep_BxV))
  instead.append(sampler.draw(logits_BxN1xV[:, N], first_B + N))
  accepted_BxN = jnp.cumprod(jnp.stack(accepted, 1).astype(jnp.int32), axis=1)
  last_BxN1 = jnp.concatenate([accepted_BxN, jnp.zeros((B, 1), jnp.int32)], 1)
  padded_BxN1 = jnp.concatenate([drafts_BxN, jnp.zeros((B, 1), drafts_BxN.dtype)], 1)
  return jnp.where(last_BxN1 == 1, padded_BxN1, jnp.stack(instead, 1)).astype(jnp.int32), accepted_BxN.sum(1)
