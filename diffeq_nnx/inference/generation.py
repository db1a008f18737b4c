"""Text generation: prompts are read in one call, then each token of all rows is one call of a compiled program.

B rows, L slots of the prompts, P slots in all, S solver steps, K key/value heads, C head_dim, V vocab_size.

Rows of different lengths are padded on the left, so that their next tokens have the same slot. Padding is never
attended to, and positions count from a row's first token.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.sampling import Filters, Sampling, sample
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.model import grids, vector_fields
from diffeq_nnx.model.attention_context import DecodeCache, Packing, PrefillCache
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import partial_model
from diffeq_nnx.model.ready import make_ready

BUCKET = 64  # slots are padded to multiples of it, so that few shapes are compiled

Weights = dict[str, Any]  # "sets": a list of BlockWeights, one for each time; "rest": the other parameters


@dataclasses.dataclass(frozen=True)
class Continuation:
  """The continuation of a prompt.

  Attributes:
    prompt: the prompt.
    text: the text after it, without end mark or stop string.
    ids: its tokens, without the end mark, but with those of a stop string.
    stopped: eos (the tokenizer's end mark), stop (a stop string), or length.
  """

  prompt: str
  text: str
  ids: list[int]
  stopped: str


class Decoder:
  """A model with generated weights, on one device, in the dtype of the computation.

  Attributes:
    config: of the model.
    grid: the steps.
    weights: "sets", BlockWeights at each of its times; "rest", the other parameters.
    platform: of the device: cpu, gpu or tpu.
  """

  def __init__(self, model: Model, num_steps: int | None = None, config: ModelConfig | None = None):
    """Generates the weights on the devices of the model's parameters, and moves them to one device.

    Args:
      model: the model.
      num_steps: of the solver; None: the model's own.
      config: the model's, with another dtype of the computation; None: unchanged.

    Raises:
      UserError: a number of steps that the model has no weights for.
    """
    ready = make_ready(model, num_steps, config=config, unrolled=True)
    self.config, self.grid, self._mesh = ready.config, ready.grid, ready.mesh
    self.weights: Weights = {"sets": ready.weights, "rest": ready.rest}
    self.platform = self._mesh.devices.flat[0].platform

  def room(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """The number of tokens that can follow each prompt: learned positions limit the tokens that are read.

    Raises:
      UserError: no prompts, or one that is empty, too long, or has ids that the model lacks.
    """
    V, seq_len = self.config.vocab_size, self.config.seq_len
    if not prompts:
      raise UserError("prompts: none given; give one or more")
    for n, prompt in enumerate(prompts):
      if not len(prompt):
        raise UserError(f"prompts[{n}]: has no tokens; give at least one")
      wrong = [token for token in (min(prompt), max(prompt)) if not 0 <= token < V]
      if wrong:
        raise UserError(f"prompts[{n}]: holds the id {wrong[0]}; the model's ids are 0 to {V - 1}")
      if self._learned and len(prompt) > seq_len:
        raise UserError(
          f"prompts[{n}]: {len(prompt)} tokens; the model has {seq_len} positions (model.seq_len); give a shorter one"
        )
    return [min(max_tokens, seq_len + 1 - len(prompt)) if self._learned else max_tokens for prompt in prompts]

  def num_rows(self, prompts: int) -> int:
    """Rows computed for so many prompts: a single one is computed twice on a TPU.

    The compiler runs products with a single row on the vector unit, which is slower than the memory.
    """
    return 2 if prompts == 1 and self.platform == "tpu" else prompts

  @property
  def _learned(self) -> bool:
    return vector_fields.FIELDS[self.config.field].learned_positions

  def stream(
    self, prompts: Sequence[Sequence[int]], sampling: Sampling, row_numbers: Sequence[int] | None = None
  ) -> Iterator[np.ndarray]:
    """Yields the next tokens of all prompts, [B] at a time, while any has room; others are continued nevertheless.

    Each token is computed while the caller handles the one before. The random numbers of a row depend on the seed and
    its number in `row_numbers`, below 2^32, so that they need not depend on the batch; None: 0 to B-1. Raises as
    `room`.
    """
    most = max(self.room(prompts, sampling.max_tokens))
    B = len(prompts)
    rows = [*prompts, *[prompts[0]] * (self.num_rows(B) - B)]
    L = _padded(max(map(len, rows)))
    tokens_BxL = np.zeros((len(rows), L), np.int32)
    for row, prompt in zip(tokens_BxL, rows):
      row[L - len(prompt) :] = prompt
    first_B = np.array([L - len(prompt) for prompt in rows], np.int32)
    with jax.set_mesh(self._mesh):  # in place of the caller's mesh
      values = sampling.values()
      if row_numbers is not None and not sampling.filters.greedy:
        values["rows"] = jnp.asarray(np.array([*row_numbers, *[0] * (len(rows) - B)], np.uint32))
      state, tokens_B = read_prompts(
        self.config, self.grid, _padded(L + most), sampling.filters, self.weights, values, tokens_BxL, first_B
      )
    for count in range(1, most + 1):
      current_B = tokens_B
      if count < most:
        with jax.set_mesh(self._mesh):
          state, tokens_B = next_tokens(self.config, self.grid, sampling.filters, self.weights, values, state, tokens_B)
      yield np.asarray(current_B)[:B]


def _padded(slots: int) -> int:
  return -(-slots // BUCKET) * BUCKET


def prompt_logits(
  config: ModelConfig, grid: grids.Grid, num_slots: int, weights: Weights, tokens_BxL: jax.Array, first_B: jax.Array
) -> tuple[dict, jax.Array]:
  """The state after the prompts, with P = `num_slots` slots, and the logits [B, V] of the next tokens.

  The state: cache, keys and values [B, K, P, C] of each evaluation of attention; slot [] of the next token; first_B,
  slots of the rows' first tokens.
  """
  L = tokens_BxL.shape[1]
  positions_BxL = jnp.arange(L, dtype=jnp.int32)[None] - first_B[:, None]
  packing = Packing((positions_BxL >= 0).astype(jnp.int32), jnp.maximum(positions_BxL, 0))
  context = PrefillCache(packing)
  model = partial_model(config, weights["rest"])
  hidden_BxLxD = model.hidden_unrolled(tokens_BxL, weights["sets"], context, grid)
  room = ((0, 0), (0, 0), (0, num_slots - L), (0, 0))
  cache = [(jnp.pad(keys, room), jnp.pad(values, room)) for keys, values in context.stored]
  return {"cache": cache, "slot": jnp.int32(L), "first_B": first_B}, model.logits(hidden_BxLxD[:, -1:])[:, 0]


def next_logits(
  config: ModelConfig, grid: grids.Grid, weights: Weights, state: dict, tokens_B: jax.Array
) -> tuple[dict, jax.Array]:
  """The state after one more token in each row, [B], and the logits [B, V] of the next tokens."""
  slot, first_B = state["slot"], state["first_B"]
  positions_B = slot - first_B
  if vector_fields.FIELDS[config.field].learned_positions:
    positions_B = jnp.minimum(positions_B, config.seq_len - 1)  # a row beyond the last position has ended
  context = DecodeCache(state["cache"], slot, first_B, positions_B[:, None])
  model = partial_model(config, weights["rest"])
  hidden_Bx1xD = model.hidden_unrolled(tokens_B[:, None], weights["sets"], context, grid)
  state = {"cache": context.stored, "slot": slot + 1, "first_B": first_B}
  return state, model.logits(hidden_Bx1xD)[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def read_prompts(
  config: ModelConfig,
  grid: grids.Grid,
  num_slots: int,
  filters: Filters,
  weights: Weights,
  values: dict[str, jax.Array],
  tokens_BxL: jax.Array,
  first_B: jax.Array,
) -> tuple[dict, jax.Array]:
  """The state after the prompts, and the next tokens [B]."""
  state, logits_BxV = prompt_logits(config, grid, num_slots, weights, tokens_BxL, first_B)
  return state, sample(filters, values, logits_BxV, state["slot"] - first_B)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="state")
def next_tokens(
  config: ModelConfig,
  grid: grids.Grid,
  filters: Filters,
  weights: Weights,
  values: dict[str, jax.Array],
  state: dict,
  tokens_B: jax.Array,
) -> tuple[dict, jax.Array]:
  """The state after the newest tokens [B], and the next tokens [B].

  The old state's buffers are donated, so that keys and values are updated in place.
  """
  state, logits_BxV = next_logits(config, grid, weights, state, tokens_B)
  return state, sample(filters, values, logits_BxV, state["slot"] - state["first_B"])


def _run(
  decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, take: Callable[[int, int], str | None]
) -> list[str]:
  """Calls take(row, token) for each token until it returns the reason to end the row; returns these, or length."""
  room = decoder.room(prompts, sampling.max_tokens)
  reasons: list[str | None] = [None] * len(prompts)
  for count, tokens_B in enumerate(decoder.stream(prompts, sampling), 1):
    for row, token in enumerate(tokens_B.tolist()):
      if reasons[row] is None:
        reasons[row] = take(row, token) or ("length" if count == room[row] else None)
    if None not in reasons:
      break
  return [reason or "length" for reason in reasons]


def generate(
  model: Model | Decoder,
  prompts: Sequence[Sequence[int]],
  *,
  stop_ids: Sequence[int] = (),
  num_steps: int | None = None,
  **sampling: Any,
) -> list[list[int]]:
  """Continues prompts of token ids, of any lengths, in one batch.

  Args:
    model: the model, whose weights are generated for this call; or a `Decoder`, for several calls.
    prompts: token ids, at least one each; begin with the tokenizer's `bos_id` where it has one.
    stop_ids: tokens that end a row; they are left out.
    num_steps: of the solver; None: the model's own.
    **sampling: max_tokens, temperature, top_k, top_p, seed; see `sampling.Sampling`.

  Returns:
    The new tokens of each prompt. With learned positions a row also ends at the last position.

  Raises:
    UserError: no prompts, an empty one, one longer than the positions, unknown ids, or values out of range.
  """
  ids: list[list[int]] = [[] for _ in prompts]

  def take(row: int, token: int) -> str | None:
    if token in stop_ids:
      return "stop"
    ids[row].append(token)
    return None

  settings = Sampling(**sampling)
  _run(_decoder(model, num_steps), prompts, settings, take)
  return ids


def generate_texts(
  model: Model | Decoder,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  *,
  stop: Sequence[str] = (),
  num_steps: int | None = None,
  on_text: Callable[[int, str], None] | None = None,
  **sampling: Any,
) -> list[Continuation]:
  """Continues texts, as beginnings of documents, up to the end of the document.

  Args:
    model: as for `generate`.
    tokenizer: the model's.
    prompts: texts.
    stop: strings that end a text; they are left out.
    num_steps: as for `generate`.
    on_text: called with (row, piece) as text is generated; the pieces of a row add up to its text.
    **sampling: as for `generate`.

  Raises:
    UserError: as `generate`; or a prompt without tokens, or with invalid Unicode.
  """
  settings = Sampling(**sampling)
  if not all(stop):
    raise UserError("stop: holds an empty string, which every text contains; leave it out")
  prompts_ids = prompt_ids(tokenizer, prompts)
  ids: list[list[int]] = [[] for _ in prompts]
  texts = [TextStream(tokenizer.decode, stop) for _ in prompts]

  def emit(row: int, piece: str) -> None:
    if piece and on_text is not None:
      on_text(row, piece)

  def take(row: int, token: int) -> str | None:
    if token == tokenizer.eos_id:
      return "eos"
    ids[row].append(token)
    emit(row, texts[row].add(token))
    return "stop" if texts[row].stopped else None

  reasons = _run(_decoder(model, num_steps), prompts_ids, settings, take)
  for row, text in enumerate(texts):
    emit(row, text.finish())
    reasons[row] = "stop" if text.stopped else reasons[row]
  return [Continuation(*one) for one in zip(prompts, (text.text for text in texts), ids, reasons)]


def encoded(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> list[list[int]]:
  """The ids of texts, without marks; raises UserError, beginning with `name`, for invalid Unicode."""
  try:
    return [ids.tolist() for ids in tokenizer.encode_batch(list(texts))]
  except UnicodeEncodeError as error:
    raise UserError(f"{name}: not Unicode text ({error.reason}); give valid UTF-8") from error


def prompt_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
  """The ids of documents that begin with these texts.

  Raises:
    UserError: no prompts, or one without tokens or with invalid Unicode.
  """
  if not prompts:
    raise UserError("prompts: none given; give one or more")
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  ids = [begin + one for one in encoded(tokenizer, prompts, "prompts")]
  if [] in ids:
    raise UserError(
      f"prompts[{ids.index([])}]={prompts[ids.index([])]!r}: gives no tokens, and this tokenizer has no "
      "begin mark; give some text"
    )
  return ids


def _decoder(model: Model | Decoder, num_steps: int | None) -> Decoder:
  if not isinstance(model, Decoder):
    return Decoder(model, num_steps)
  if num_steps not in (None, model.grid.num_steps):
    raise UserError(f"num_steps={num_steps}: this Decoder was made for {model.grid.num_steps}; leave it out")
  return model
