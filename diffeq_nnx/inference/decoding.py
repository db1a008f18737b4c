"""The programs of generation: they read prompts, and compute the next token of all rows.

B rows, Q tokens read at a time, P slots, K key/value heads, C head_dim, V vocab_size.

Keys and values of a row lie in a ring of P slots, its newest token in the same slot as those of all other rows; so new
tokens are written in place, in one piece for all rows, and a row can be replaced at any time. Prompts that are read
together are padded on the left. Padding has positions below 0, and is never attended to.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.caches import DecodeCache, KeysValues, PrefillCache
from diffeq_nnx.inference.sampling import GenerationOptions, Sampler
from diffeq_nnx.model import grids, vector_fields
from diffeq_nnx.model.cpu_kernels import multiply_output_first, store_output_first
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.parameters import TABLES
from diffeq_nnx.model.ready import ReadyModel, make_ready
from diffeq_nnx.parallel import sharding

BUCKET = 64  # slots are padded to multiples of it, so that few shapes are compiled
CHUNK = 512  # tokens of a prompt that are read at a time, a multiple of BUCKET


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """What the next tokens of a batch depend on, beside the model.

  Attributes:
    cache: keys and values of each evaluation of attention, in order.
    slot: of the next token, [] in all rows, or [B] where rows advance by different numbers of tokens (`speculation`).
    next_B: the next token's position in each row.
    sampler: draws tokens.
  """

  cache: list[KeysValues]
  slot: jax.Array
  next_B: jax.Array
  sampler: Sampler

  @property
  def num_slots(self) -> int:
    """P."""
    return self.cache[0][0].shape[2]


class Decoder:
  """A model with generated weights, in the dtype of the computation, on one device or on a mesh.

  On a mesh, weights, keys and values are split over its tensor axis, and rows over all other axes.

  Attributes:
    ready: the model, its weights unrolled.
    platform: of the devices: cpu, gpu or tpu.
    parts: that rows are split into.
  """

  def __init__(
    self, model: Model, num_steps: int | None = None, config: ModelConfig | None = None, mesh: Mesh | None = None
  ):
    """Generates the weights on the devices of the model's parameters, and places them for decoding.

    Args:
      model: the model.
      num_steps: of the solver; None: the model's own.
      config: the model's, with another dtype of the computation; None: unchanged.
      mesh: the devices of the model; None: everything is moved to one of them.

    Raises:
      UserError: a number of steps that the model has no weights for, or heads that `mesh` would cut.
    """
    if mesh is not None:
      sharding.check_model(model.config, mesh)
    ready = make_ready(model, num_steps, config=config, mesh=mesh, unrolled=True)
    if mesh is not None:
      ready = _place(model, dataclasses.replace(ready, mesh=sharding.without_fsdp(mesh)))
    self.platform = ready.mesh.devices.flat[0].platform
    if self.platform == "cpu" and vector_fields.only_multiplies(ready.config):
      # A CPU reads kernels fastest as they are stored here.
      with jax.set_mesh(ready.mesh):  # and not in one of the caller's
        sets = jax.jit(lambda sets: [store_output_first(one) for one in sets])(ready.weights.sets)
      ready = dataclasses.replace(ready, weights=dataclasses.replace(ready.weights, sets=sets))
    self.ready = ready
    self.parts = ready.mesh.shape["data"]

  def limit_texts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """The number of tokens that can follow each prompt: learned positions limit the tokens that are read.

    Raises:
      UserError: no prompts, or one that is empty, too long, no list of ids, or has ids that the model lacks.
    """
    if not len(prompts):
      raise UserError("prompts: none given; give one or more")
    for n, prompt in enumerate(prompts):
      if problem := self.find_problem(prompt):
        raise UserError(f"prompts[{n}]: {problem}")
    seq_len = self.ready.config.seq_len
    return [min(max_tokens, seq_len + 1 - len(prompt)) if self._learned else max_tokens for prompt in prompts]

  def find_problem(self, prompt: Sequence[int]) -> str | None:
    """Why a prompt can't be continued; None if it can."""
    V, seq_len, ids = self.ready.config.vocab_size, self.ready.config.seq_len, np.asarray(prompt)
    if ids.ndim != 1 or ids.size and ids.dtype.kind not in "iu":
      return f"must be a list of token ids, not {prompt!r:.60}"
    if not ids.size:
      return "has no tokens; give at least one"
    if len(wrong := ids[(ids < 0) | (ids >= V)]):
      return f"holds the id {wrong[0]}; the model's ids are 0 to {V - 1}"
    if self._learned and len(ids) > seq_len:
      return f"{len(ids)} tokens; the model has {seq_len} positions (model.seq_len); give a shorter one"
    return None

  def count_rows(self, prompts: int) -> int:
    """Rows computed for so many prompts: a multiple of the parts that rows are split into, if there are that many.

    A single one on a device is computed twice, but for a CPU: a TPU's compiler runs products with a single row on the
    vector unit, which is slower than the memory, and a GPU's writes some of their factors to memory.
    """
    parts = self.parts if prompts >= self.parts else 1
    on_each = -(-prompts // parts)
    return parts * (2 if on_each == 1 and self.platform != "cpu" else on_each)

  @property
  def grid(self) -> grids.Grid:
    """The steps."""
    return self.ready.weights.grid

  @property
  def _learned(self) -> bool:
    return vector_fields.FIELDS[self.ready.config.field].learned_positions

  def read(
    self,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    row_numbers: Sequence[int],
    num_slots: int | None = None,
  ) -> Iterator[tuple[DecodeState, jax.Array] | None]:
    """Reads prompts together; yields None after each chunk of tokens but the last, and then (state, next tokens [B]).

    `num_slots` None: as many as the longest prompt needs.
    """
    L = pad_slots(max(map(len, prompts)))
    tokens_BxL = np.zeros((len(prompts), L), np.int32)
    for row, prompt in zip(tokens_BxL, prompts):
      row[L - len(prompt) :] = prompt
    first = L % CHUNK or CHUNK
    with jax.set_mesh(self.ready.mesh):
      next_B = jnp.array([len(prompt) - L for prompt in prompts], jnp.int32)
      state = DecodeState([], jnp.int32(0), next_B, options.make_sampler(row_numbers))
      state, tokens_B = read_tokens(self.ready, state, tokens_BxL[:, :first], num_slots or L)
    for start in range(first, L, CHUNK):
      yield None
      state, tokens_B = self.advance(state, tokens_BxL[:, start : start + CHUNK])
    yield state, tokens_B

  def advance(self, state: DecodeState, tokens: jax.Array | np.ndarray) -> tuple[DecodeState, jax.Array]:
    """The state after more tokens, [B] or [B, Q], and the next ones; the old state is used up."""
    with jax.set_mesh(self.ready.mesh):
      return read_tokens(self.ready, state, tokens)


def _place(model: Model, ready: ReadyModel) -> ReadyModel:
  """Weights as they are used on the mesh: split over its tensor axis alone.

  They are moved by one program: of several, each process could begin another one first, and wait for the others.
  """
  at = lambda leaf, axes: sharding.make_sharding(ready.mesh, axes, leaf.shape)
  sets = [jax.tree.map(at, one, model.block_axes) for one in ready.weights.sets]
  rest = dict.fromkeys(ready.rest, sharding.replicated(ready.mesh))
  for name in TABLES:
    if (table := ready.rest.get(name)) is not None:
      rest[name] = at(table, getattr(model, name).get_metadata("axes"))
  places = dataclasses.replace(ready, weights=dataclasses.replace(ready.weights, sets=sets), rest=rest)
  return jax.jit(lambda tree: tree, out_shardings=places)(ready)


def pad_slots(count: int) -> int:
  """The next multiple of BUCKET."""
  return -(-count // BUCKET) * BUCKET


def next_logits(
  ready: ReadyModel,
  state: DecodeState,
  tokens_BxQ: jax.Array,
  num_slots: int | None = None,
  *,
  after_each: bool = False,
) -> tuple[DecodeState, jax.Array]:
  """The state after Q more tokens in each row, and the logits [B, V] after the last; slot + Q is at most P.

  With `num_slots` these are the first tokens: the state before has no cache, the one after it has P = `num_slots`
  slots, and the first token goes to slot 0. If `after_each`, the logits are those [B, Q, V] after each of the tokens.
  """
  Q = tokens_BxQ.shape[1]
  positions_BxQ = state.next_B[:, None] + jnp.arange(Q, dtype=jnp.int32)[None]
  context: PrefillCache | DecodeCache
  if num_slots is not None:
    P, context = num_slots, PrefillCache((positions_BxQ >= 0).astype(jnp.int32), jnp.maximum(positions_BxQ, 0))
  else:
    if vector_fields.FIELDS[ready.config.field].learned_positions:
      positions_BxQ = jnp.minimum(positions_BxQ, ready.config.seq_len - 1)  # a row beyond the last position has ended
    P, context = state.num_slots, DecodeCache(state.cache, state.slot, state.next_B, jnp.maximum(positions_BxQ, 0))
  tokens_BxQ = sharding.constrain(tokens_BxQ, "batch", None)
  hidden_BxQxD = ready.make_model().hidden(tokens_BxQ, ready.weights, context=context)
  fill = lambda x_BxKxNxC: _split(jnp.pad(x_BxKxNxC, ((0, 0), (0, 0), (0, P - x_BxKxNxC.shape[2]), (0, 0))))
  cache = jax.tree.map(fill, context.stored)
  state = dataclasses.replace(state, cache=cache, slot=(state.slot + Q) % P, next_B=state.next_B + Q)
  if after_each:
    return state, _compute_logits(ready, hidden_BxQxD)
  return state, _compute_logits(ready, hidden_BxQxD[:, -1:])[:, 0]


def _compute_logits(ready: ReadyModel, hidden_BxQxD: jax.Array) -> jax.Array:
  """As `Model.logits`, as a CPU computes them fastest for few tokens."""
  model, wide = ready.make_model(), parameter_dtype(ready.config.dtype)
  on_cpu = lambda hidden: multiply_output_first(hidden, model.unembedding(), wide)
  return jax.lax.platform_dependent(hidden_BxQxD, cpu=on_cpu, default=model.logits)


def _split(cached_BxKxPxC: jax.Array) -> jax.Array:
  return sharding.constrain(cached_BxKxPxC, "batch", "whole_heads", None, None)


def draw_next(state: DecodeState, logits_BxV: jax.Array) -> jax.Array:
  """The next tokens [B], which every device has."""
  return sharding.constrain(state.sampler.draw(logits_BxV, state.next_B), None)


@functools.partial(jax.jit, static_argnames="num_slots", donate_argnames="state")
def read_tokens(
  ready: ReadyModel, state: DecodeState, tokens: jax.Array, num_slots: int | None = None
) -> tuple[DecodeState, jax.Array]:
  """As `next_logits`, for tokens [B, Q] or single ones [B], with the next tokens [B] drawn.

  The old state's buffers are donated, so that keys and values are updated in place.
  """
  state, logits_BxV = next_logits(ready, state, tokens.reshape(tokens.shape[0], -1), num_slots)
  return state, draw_next(state, logits_BxV)


@functools.partial(jax.jit, donate_argnames="state")
def replace_row(
  state: DecodeState, tokens_B: jax.Array, row: jax.Array, new: DecodeState, new_token: jax.Array
) -> tuple[DecodeState, jax.Array]:
  """The state and newest tokens of a batch of which row `row` [] is replaced by the only one of `new`.

  The N slots of `new` are all in use. The old state's buffers are donated.
  """

  def put(cached_BxKxPxC, new_1xKxNxC):
    P, N = cached_BxKxPxC.shape[2], new_1xKxNxC.shape[2]
    turned = jnp.roll(jnp.pad(new_1xKxNxC, ((0, 0), (0, 0), (0, P - N), (0, 0))), state.slot - N, axis=2)
    return _split(jax.lax.dynamic_update_slice_in_dim(cached_BxKxPxC, turned, row, axis=0))

  sampler = dataclasses.replace(state.sampler, key_B=state.sampler.key_B.at[row].set(new.sampler.key_B[0]))
  state = DecodeState(
    cache=jax.tree.map(put, state.cache, new.cache),
    slot=state.slot,
    next_B=state.next_B.at[row].set(new.next_B[0]),
    sampler=sampler,
  )
  return state, tokens_B.at[row].set(new_token[0])
