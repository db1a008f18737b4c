"""Text from a model: the prompts are read in one call, then each token of all rows is one call of a compiled program.

B rows, L slots of the prompts, P slots in all, S solver steps, K key/value heads, C head_dim, V vocab_size.

Rows of different lengths are padded on the left, so that their next tokens have the same slot. Padding is never seen,
and positions count from a row's first token.
"""

import dataclasses
import functools
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.sampling import Sampling, Way, sample
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.model import solvers, vector_fields
from diffeq_nnx.model.attention_context import DecodeCache, Packing, PrefillCache
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import partial_model
from diffeq_nnx.model.ready import make_ready

BUCKET = 64  # slots come in multiples of it, so that few shapes are compiled

Weights = dict[str, Any]  # "steps": BlockWeights of each time, S trees; "rest": the other parameters, as used


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What came after a prompt.

  Attributes:
    prompt: the prompt.
    text: what follows it, without a stop mark.
    ids: its tokens, without a stop mark; where a stop string ended it, with that string's.
    stopped: eos (the tokenizer's end mark), stop (a stop string), or length.
  """
  prompt: str
  text: str
  ids: list[int]
  stopped: str


class Decoder:
  """A model ready to generate, on one device, in the dtype of the computation.

  Attributes:
    config: of the model.
    grid: times and step sizes.
    weights: steps, BlockWeights of each step; rest, the other parameters.
    platform: of the device: cpu, gpu or tpu.
  """

  def __init__(self, model: Model, num_steps: int | None = None, config: ModelConfig | None = None):
    """Generates the weights where the model's parameters are, and moves them to one device.

    Args:
      model: the model.
      num_steps: of the solver; None: the model's own.
      config: the model's, with another dtype of the computation; None: unchanged.

    Raises:
      UserError: a number of steps that the model has no weights for.
    """
    ready = make_ready(model, num_steps, config=config, unrolled=True)
    self.config, self.grid, self._mesh = ready.config, ready.grid, ready.mesh
    self.weights: Weights = {"steps": ready.weights, "rest": ready.rest}
    self.platform = self._mesh.devices.flat[0].platform

  def room(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """How many tokens can follow each prompt: where positions are learned, each token that is read needs one.

    Raises:
      UserError: no prompts, or one that is empty, too long, or not of the model's ids.
    """
    V, seq_len = self.config.vocab_size, self.config.seq_len
    if not prompts:
      raise UserError("prompts: none given; give one or more")
    for n, prompt in enumerate(prompts):
      if not len(prompt):
        raise UserError(f"prompts[{n}]: has no tokens; give at least one")
      if min(prompt) < 0 or max(prompt) >= V:
        raise UserError(f"prompts[{n}]: holds the id {min(prompt) if min(prompt) < 0 else max(prompt)}; the model's ids "
                        f"are 0 to {V - 1}")
      if self._learned and len(prompt) > seq_len:
        raise UserError(f"prompts[{n}]: {len(prompt)} tokens; the model has {seq_len} positions (model.seq_len); give a "
                        "shorter one")
    return [min(max_tokens, seq_len + 1 - len(prompt)) if self._learned else max_tokens for prompt in prompts]

  def num_rows(self, prompts: int) -> int:
    """Rows that are computed for so many prompts: one alone is computed twice on a TPU.

    The compiler gives products with a single row to the vector unit, which is slower at them than the memory.
    """
    return 2 if prompts == 1 and self.platform == "tpu" else prompts

  @property
  def _learned(self) -> bool:
    return vector_fields.FIELDS[self.config.field].learned_positions

  def stream(self, prompts: Sequence[Sequence[int]], sampling: Sampling,
             row_numbers: Sequence[int] | None = None) -> Iterator[np.ndarray]:
    """The next tokens of all prompts, [B] at a time, while one has room; a row that has none gets more all the same.

    A token is computed while the one before is handed out. `row_numbers`, below 2^32, are what a row's random numbers
    depend on beside the seed, so that they don't depend on what shares a batch; None: 0 to B-1. Raises as `room`.
    """
    most = max(self.room(prompts, sampling.max_tokens))
    wanted = len(prompts)
    rows = [*prompts, *[prompts[0]] * (self.num_rows(wanted) - wanted)]
    L = _padded(max(map(len, rows)))
    tokens_BxL = np.zeros((len(rows), L), np.int32)
    for row, prompt in zip(tokens_BxL, rows):
      row[L - len(prompt):] = prompt
    first_B = np.array([L - len(prompt) for prompt in rows], np.int32)
    with jax.set_mesh(self._mesh):  # whatever mesh surrounds the caller
      numbers = sampling.numbers()
      if row_numbers is not None and not sampling.way.greedy:
        numbers["rows"] = np.array([*row_numbers, *[0] * (len(rows) - wanted)], np.uint32)
      state, tokens_B = read_prompts(self.config, self.grid, _padded(L + most), sampling.way, self.weights, numbers,
                                     tokens_BxL, first_B)
    for made in range(1, most + 1):
      ahead = (None, None)
      if made < most:
        with jax.set_mesh(self._mesh):
          ahead = next_tokens(self.config, self.grid, sampling.way, self.weights, numbers, state, tokens_B)
      yield np.asarray(tokens_B)[:wanted]
      state, tokens_B = ahead


def _padded(slots: int) -> int:
  return -(-slots // BUCKET) * BUCKET


def prompt_logits(config: ModelConfig, grid: solvers.Grid, num_slots: int, weights: Weights, tokens_BxL: jax.Array,
                  first_B: jax.Array) -> tuple[dict, jax.Array]:
  """The state after the prompts, with room for P = `num_slots`, and the logits [B, V] of what follows them.

  The state: kept, keys and values [B, K, P, C] of each step; slot [], of the next token; first_B, of each row's first.
  """
  L = tokens_BxL.shape[1]
  places_BxL = jnp.arange(L, dtype=jnp.int32)[None] - first_B[:, None]
  packing = Packing((places_BxL >= 0).astype(jnp.int32), jnp.maximum(places_BxL, 0))
  contexts_S = [PrefillCache(packing) for _ in range(grid.num_steps)]
  model = partial_model(config, weights["rest"])
  hidden_BxLxD = model.hidden_unrolled(tokens_BxL, weights["steps"], contexts_S, grid)
  room = ((0, 0), (0, 0), (0, num_slots - L), (0, 0))
  kept_S = [tuple(jnp.pad(one, room) for one in context.keys_values) for context in contexts_S]
  return {"kept": kept_S, "slot": jnp.int32(L), "first_B": first_B}, model.logits(hidden_BxLxD[:, -1:])[:, 0]


def next_logits(config: ModelConfig, grid: solvers.Grid, weights: Weights, state: dict,
                tokens_B: jax.Array) -> tuple[dict, jax.Array]:
  """The state after one token more in each row, [B], and the logits [B, V] of what follows."""
  slot, first_B = state["slot"], state["first_B"]
  places_B = slot - first_B
  if vector_fields.FIELDS[config.field].learned_positions:
    places_B = jnp.minimum(places_B, config.seq_len - 1)  # beyond them a row has ended, and others go on
  contexts_S = [DecodeCache(kept, slot, first_B, places_B[:, None]) for kept in state["kept"]]
  model = partial_model(config, weights["rest"])
  hidden_Bx1xD = model.hidden_unrolled(tokens_B[:, None], weights["steps"], contexts_S, grid)
  state = {"kept": [context.keys_values for context in contexts_S], "slot": slot + 1, "first_B": first_B}
  return state, model.logits(hidden_Bx1xD)[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def read_prompts(config: ModelConfig, grid: solvers.Grid, num_slots: int, way: Way, weights: Weights,
                 numbers: dict[str, jax.Array], tokens_BxL: jax.Array, first_B: jax.Array) -> tuple[dict, jax.Array]:
  """The state after the prompts, and the tokens [B] that follow them."""
  state, logits_BxV = prompt_logits(config, grid, num_slots, weights, tokens_BxL, first_B)
  return state, sample(way, numbers, logits_BxV, state["slot"] - first_B)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="state")
def next_tokens(config: ModelConfig, grid: solvers.Grid, way: Way, weights: Weights, numbers: dict[str, jax.Array],
                state: dict, tokens_B: jax.Array) -> tuple[dict, jax.Array]:
  """The state after the newest tokens [B], and the tokens [B] that follow them.

  The old state's buffers are given away, so that keys and values stay where they are.
  """
  state, logits_BxV = next_logits(config, grid, weights, state, tokens_B)
  return state, sample(way, numbers, logits_BxV, state["slot"] - state["first_B"])


def _follow(decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling,
            take: Callable[[int, int], str | None]) -> list[str]:
  """Calls take(row, token) for each token, until it says why the row ends, or its room does; why each row ended."""
  room = decoder.room(prompts, sampling.max_tokens)
  reasons: list[str | None] = [None] * len(prompts)
  for made, tokens_B in enumerate(decoder.stream(prompts, sampling), 1):
    for row, token in enumerate(tokens_B.tolist()):
      if reasons[row] is None:
        reasons[row] = take(row, token) or ("length" if made == room[row] else None)
    if None not in reasons:
      break
  return reasons


def generate(model: Model | Decoder, prompts: Sequence[Sequence[int]], *, stop_ids: Sequence[int] = (),
             num_steps: int | None = None, **sampling: Any) -> list[list[int]]:
  """The tokens that follow each prompt, of any lengths, in one batch.

  Args:
    model: the model, whose weights are made once for this call; or a `Decoder`, for several calls.
    prompts: token ids, at least one each; begin with the tokenizer's `bos_id` where it has one.
    stop_ids: marks that end a row; they are left out.
    num_steps: of the solver; None: the model's own.
    **sampling: max_tokens, temperature, top_k, top_p, seed; see `sampling.Sampling`.

  Returns:
    The new tokens of each prompt. Where positions are learned, a row also ends when there are no more.

  Raises:
    UserError: no prompts, an empty one, one longer than the positions, ids that the model lacks, or values outside
      their rules.
  """
  settings = Sampling(**sampling)
  decoder = _decoder(model, num_steps)
  made: list[list[int]] = [[] for _ in prompts]

  def take(row: int, token: int) -> str | None:
    if token in stop_ids:
      return "stop"
    made[row].append(token)
    return None

  _follow(decoder, prompts, settings, take)
  return made


def generate_texts(model: Model | Decoder, tokenizer: Tokenizer, prompts: Sequence[str], *, stop: Sequence[str] = (),
                   num_steps: int | None = None, on_text: Callable[[int, str], None] | None = None,
                   **sampling: Any) -> list[Continuation]:
  """The text that follows each prompt, as if the prompt began a document, up to the end of that.

  Args:
    model: as for `generate`.
    tokenizer: the one that the model was trained with.
    prompts: texts.
    stop: strings that end a text; they are left out.
    num_steps: as for `generate`.
    on_text: called with (row, piece) as text comes; the pieces of a row add up to its text.
    **sampling: as for `generate`.

  Raises:
    UserError: as `generate`; or a prompt that gives no tokens, or is no Unicode text.
  """
  settings = Sampling(**sampling)
  if not all(stop):
    raise UserError("stop: holds an empty string, which is everywhere; leave it out")
  ids = prompt_ids(tokenizer, prompts)
  decoder = _decoder(model, num_steps)
  made: list[list[int]] = [[] for _ in prompts]
  texts = [TextStream(tokenizer.decode, stop) for _ in prompts]
  tell = on_text or (lambda row, piece: None)

  def take(row: int, token: int) -> str | None:
    if token == tokenizer.eos_id:
      return "eos"
    made[row].append(token)
    piece = texts[row].add(token)
    if piece:
      tell(row, piece)
    return "stop" if texts[row].stopped else None

  reasons = _follow(decoder, ids, settings, take)
  for row, text in enumerate(texts):
    rest = text.finish()
    if rest:
      tell(row, rest)
    reasons[row] = "stop" if text.stopped else reasons[row]
  return [Continuation(*one) for one in zip(prompts, (text.text for text in texts), made, reasons)]


def encoded(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> list[list[int]]:
  """The ids of texts, without marks; raises UserError, which names `name`, where one is no Unicode text."""
  try:
    return [ids.tolist() for ids in tokenizer.encode_batch(list(texts))]
  except UnicodeEncodeError as error:
    raise UserError(f"{name}: not Unicode text ({error.reason}); give valid UTF-8") from error


def prompt_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
  """The ids of documents that begin with these texts.

  Raises:
    UserError: no prompts, or one that gives no tokens, or is no Unicode text.
  """
  if not prompts:
    raise UserError("prompts: none given; give one or more")
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  ids = [begin + one for one in encoded(tokenizer, prompts, "prompts")]
  if [] in ids:
    raise UserError(f"prompts[{ids.index([])}]={prompts[ids.index([])]!r}: gives no tokens, and documents have no begin "
                    "mark here; give some text")
  return ids


def _decoder(model: Model | Decoder, num_steps: int | None) -> Decoder:
  if not isinstance(model, Decoder):
    return Decoder(model, num_steps)
  if num_steps not in (None, model.grid.num_steps):
    raise UserError(f"num_steps={num_steps}: this Decoder was made for {model.grid.num_steps}; leave it out")
  return model
