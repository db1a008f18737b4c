"""Continuous batching: the row of a text that has ended goes to the next prompt."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.decoding import Decoder, padded
from diffeq_nnx.inference.sampling import Sampling

ROWS = 64  # of a batch, at most, unless the caller says otherwise


def check_rows(rows: int | None) -> None:
  """Raises UserError for a number of rows below 1."""
  if rows is not None and rows < 1:
    raise UserError(f"rows={rows}: must be 1 or above")


def continued(
  decoder: Decoder,
  prompts: Sequence[Sequence[int]],
  sampling: Sampling,
  take: Callable[[int, int], str | None],
  *,
  rows: int | None = None,
  row_numbers: Sequence[int] | None = None,
) -> Iterator[tuple[int, str]]:
  """Continues prompts; yields (prompt's number, why it ended) as they end.

  Args:
    decoder: the model.
    prompts: token ids, at least one each.
    sampling: of all of them; `max_tokens` limits each.
    take: called with (prompt's number, token) for each new token, in order; returns the reason to end that text there,
      or None. A text that has as many tokens as it may ends with the reason "length".
    rows: texts that are continued at a time; None: all, up to 64. Each has slots for the longest prompt and its text.
    row_numbers: what the random numbers of each prompt depend on, beside the seed, below 2^32; None: 0, 1, ...

  The next tokens are computed while the caller handles those before. The chunks of a prompt that comes later are read
  between them. Raises as `Decoder.room`, or UserError for rows below 1.
  """
  check_rows(rows)
  room = decoder.room(prompts, sampling.max_tokens)
  numbers = range(len(prompts)) if row_numbers is None else row_numbers
  values = decoder.values(sampling)
  waiting, ended = deque(range(len(prompts))), set()
  held: dict[int, int] = {}  # the prompt of each row in use
  left, taken = list(room), [0] * len(prompts)  # tokens that are not computed yet, and tokens given to the caller
  computed: list[tuple[jax.Array, dict[int, int]]] = []  # next tokens, and the prompts of their rows
  coming = None  # the row, number and chunks of the prompt that is being read

  def note(tokens_B: jax.Array, of: dict[int, int]) -> None:
    computed.append((tokens_B, of))
    for n in of.values():
      left[n] -= 1
    for row, n in list(held.items()):
      if not left[n]:
        del held[row]

  first = [waiting.popleft() for _ in range(min(len(prompts), rows or ROWS))]
  held.update(enumerate(first))
  B = decoder.num_rows(len(first))
  filled = first + [first[0]] * (B - len(first))
  num_slots = padded(max(len(prompt) + more for prompt, more in zip(prompts, room, strict=True)))
  chunks = decoder.read([prompts[n] for n in filled], sampling, [numbers[n] for n in filled], num_slots)
  state, tokens_B = next(filter(None, chunks))
  note(tokens_B, dict(held))
  while held or waiting or coming or computed:
    unseen = computed
    computed = []
    while coming or (waiting and len(held) < len(first)):
      if coming is None:
        n = waiting.popleft()
        free = next(row for row in range(B) if row not in held)
        coming = free, n, decoder.read([prompts[n]], sampling, [numbers[n]])
      row, n, chunks = coming
      read = next(chunks)
      if read is None:  # the rest of it after a token of the others
        break
      state, tokens_B = decoder.replaced(state, tokens_B, row, *read)
      held[row], coming = n, None
      note(read[1], {0: n})
    if held:
      state, tokens_B = decoder.next_tokens(sampling.filters, values, state, tokens_B)
      note(tokens_B, dict(held))
    for tokens, of in unseen:
      drawn = np.asarray(tokens).tolist()
      for row, n in of.items():
        if n in ended:
          continue
        taken[n] += 1
        reason = take(n, drawn[row]) or ("length" if taken[n] == room[n] else None)
        if reason is not None:
          ended.add(n)
          held = {row: other for row, other in held.items() if other != n}
          yield n, reason
