"""Continuous batching: the row of a text that has ended goes to the next prompt."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from diffeq_nnx.inference.decoding import Decoder, pad_slots, replace_row
from diffeq_nnx.inference.sampling import GenerationOptions

MAX_ROWS = 64  # of a batch, unless the caller says otherwise

TakeToken = Callable[[int, int], str | None]


class Texts:
  """Hands the tokens of each prompt to the caller until its text ends."""

  def __init__(self, room: Sequence[int], take: TakeToken):
    """`room` is the number of tokens that each text may have."""
    self._room, self._take = list(room), take

  def add(self, n: int, token: int) -> str | None:
    """Hands over a token of prompt n; returns why its text ends there, or None. After the end, tokens are dropped."""
    if self.has_ended(n):
      return None
    self._room[n] -= 1
    reason = self._take(n, token) or (None if self._room[n] else "length")
    if reason is not None:
      self._room[n] = 0
    return reason

  def has_ended(self, n: int) -> bool:
    """Whether the text of prompt n has all its tokens."""
    return not self._room[n]


def continue_prompts(
  decoder: Decoder,
  prompts: Sequence[Sequence[int]],
  options: GenerationOptions,
  take: TakeToken,
  *,
  row_numbers: Sequence[int] | None = None,
) -> Iterator[tuple[int, str]]:
  """Continues prompts; yields (prompt's number, why it ended) as they end.

  Args:
    decoder: the model.
    prompts: token ids, at least one each.
    options: of all of them. Each row has slots for the longest prompt and its text.
    take: called with (prompt's number, token) for each new token, in order; returns the reason to end that text there,
      or None. A text that has as many tokens as it may ends with the reason "length".
    row_numbers: what the random numbers of each prompt depend on, beside the seed, below 2^32; None: 0, 1, ...

  The next tokens are computed while the caller handles those before. The chunks of a prompt that comes later are read
  between them. Raises as `Decoder.limit_texts`.
  """
  room = decoder.limit_texts(prompts, options.max_tokens)
  numbers = range(len(prompts)) if row_numbers is None else row_numbers
  texts, waiting = Texts(room, take), deque(range(len(prompts)))
  held: dict[int, int] = {}  # the prompt of each row in use
  left = list(room)  # tokens that are not computed yet
  computed: list[tuple[jax.Array, dict[int, int]]] = []  # next tokens, and the prompts of their rows
  coming = None  # the row, number and chunks of the prompt that is being read

  def note(tokens_B: jax.Array, prompt_of_row: dict[int, int]) -> None:
    computed.append((tokens_B, prompt_of_row))
    for n in prompt_of_row.values():
      left[n] -= 1
    for row, n in list(held.items()):
      if not left[n]:
        del held[row]

  first = [waiting.popleft() for _ in range(min(len(prompts), options.rows or MAX_ROWS))]
  held.update(enumerate(first))
  B = decoder.count_rows(len(first))
  filled = first + [first[0]] * (B - len(first))
  num_slots = pad_slots(max(len(prompt) + more for prompt, more in zip(prompts, room, strict=True)))
  chunks = decoder.read([prompts[n] for n in filled], options, [numbers[n] for n in filled], num_slots)
  state, tokens_B = next(filter(None, chunks))
  note(tokens_B, dict(held))
  while held or waiting or coming or computed:
    unseen = computed
    computed = []
    # texts of one token leave their rows at once, and are yielded before more prompts are read
    while coming or (waiting and len(held) < len(first) and len(computed) <= len(first)):
      if coming is None:
        n = waiting.popleft()
        free = next(row for row in range(B) if row not in held)
        coming = free, n, decoder.read([prompts[n]], options, [numbers[n]])
      row, n, chunks = coming
      read = next(chunks)
      if read is None:  # the rest of it after a token of the others
        break
      with jax.set_mesh(decoder.ready.mesh):
        state, tokens_B = replace_row(state, tokens_B, np.int32(row), *read)
      held[row], coming = n, None
      note(read[1], {0: n})
    if held:
      state, tokens_B = decoder.advance(state, tokens_B)
      note(tokens_B, dict(held))
    for tokens, prompt_of_row in unseen:
      drawn = np.asarray(tokens).tolist()
      for row, n in prompt_of_row.items():
        if (reason := texts.add(n, drawn[row])) is not None:
          held = {row: other for row, other in held.items() if other != n}
          yield n, reason
