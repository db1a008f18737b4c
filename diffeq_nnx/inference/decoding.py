"""The programs of generation: they read prompts, and compute the next token of all rows.

B rows, Q tokens read at a time, P slots, K key/value heads, C head_dim, V vocab_size.

Keys and values of a row lie in a ring of P slots, its newest token in the same slot as those of all other rows; so new
tokens are written in place, in one piece for all rows, and a row can be replaced at any time. Prompts that are read
together are padded on the left. Padding has positions below 0, and is never attended to.

The state of a batch: cache, keys and values [B, K, P, C] of each evaluation of attention; slot [] of the next token, or
[B] where rows advance by different numbers of tokens (`speculation`); next_B, its position in each row; numbers_B,
uint32, what the random numbers of each row depend on.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.sampling import Filters, Sampling, sample
from diffeq_nnx.model import grids, vector_fields
from diffeq_nnx.model.attention_context import DecodeCache, Packing, PrefillCache
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.output_first import output_first, product
from diffeq_nnx.model.parameters import partial_model
from diffeq_nnx.model.ready import make_ready
from diffeq_nnx.parallel import sharding

BUCKET = 64  # slots are padded to multiples of it, so that few shapes are compiled
CHUNK = 512  # tokens of a prompt that are read at a time, a multiple of BUCKET

Weights = dict[str, Any]  # "blocks": GridWeights, unrolled; "rest": the other parameters
State = dict[str, Any]  # see above


class Decoder:
  """A model with generated weights, in the dtype of the computation, on one device or on a mesh.

  On a mesh, weights, keys and values are split over its tensor axis, and rows over all other axes.

  Attributes:
    config: of the model.
    weights: "blocks", unrolled GridWeights; "rest", the other parameters.
    platform: of the devices: cpu, gpu or tpu.
    parts: that rows are split into.
    mesh: of the devices.
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
    if mesh is not None and model.config.kv_heads % mesh.shape["tensor"]:
      raise UserError(f"mesh.tensor={mesh.shape['tensor']}: must divide model.num_kv_heads={model.config.kv_heads}")
    ready = make_ready(model, num_steps, config=config, mesh=mesh, unrolled=True)
    self.config, self.mesh = ready.config, ready.mesh
    self.weights: Weights = {"blocks": ready.weights, "rest": ready.rest}
    if mesh is not None:
      self.mesh = sharding.without_fsdp(mesh)
      self.weights = _placed(model, self.weights, self.mesh)
    self.platform = self.mesh.devices.flat[0].platform
    if self.platform == "cpu":
      self.weights = _for_cpu(self.config, self.weights)
    self.parts = self.mesh.shape["data"]

  def room(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """The number of tokens that can follow each prompt: learned positions limit the tokens that are read.

    Raises:
      UserError: no prompts, or one that is empty, too long, or has ids that the model lacks.
    """
    if not prompts:
      raise UserError("prompts: none given; give one or more")
    for n, prompt in enumerate(prompts):
      if problem := self.problem(prompt):
        raise UserError(f"prompts[{n}]: {problem}")
    seq_len = self.config.seq_len
    return [min(max_tokens, seq_len + 1 - len(prompt)) if self._learned else max_tokens for prompt in prompts]

  def problem(self, prompt: Sequence[int]) -> str | None:
    """Why a prompt can't be continued; None if it can."""
    V, seq_len = self.config.vocab_size, self.config.seq_len
    if not len(prompt):
      return "has no tokens; give at least one"
    wrong = [token for token in (min(prompt), max(prompt)) if not 0 <= token < V]
    if wrong:
      return f"holds the id {wrong[0]}; the model's ids are 0 to {V - 1}"
    if self._learned and len(prompt) > seq_len:
      return f"{len(prompt)} tokens; the model has {seq_len} positions (model.seq_len); give a shorter one"
    return None

  def num_rows(self, prompts: int) -> int:
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
    return self.weights["blocks"].grid

  @property
  def _learned(self) -> bool:
    return vector_fields.FIELDS[self.config.field].learned_positions

  def read(
    self, prompts: Sequence[Sequence[int]], sampling: Sampling, row_numbers: Sequence[int], num_slots: int | None = None
  ) -> Iterator[tuple[State, jax.Array] | None]:
    """Reads prompts together; yields None after each chunk of tokens but the last, and then (state, next tokens [B]).

    `num_slots` None: as many as the longest prompt needs.
    """
    L = padded(max(map(len, prompts)))
    tokens_BxL = np.zeros((len(prompts), L), np.int32)
    for row, prompt in zip(tokens_BxL, prompts):
      row[L - len(prompt) :] = prompt
    first = L % CHUNK or CHUNK
    with jax.set_mesh(self.mesh):
      state = {
        "next_B": np.array([len(prompt) - L for prompt in prompts], np.int32),
        "numbers_B": np.array(row_numbers, np.uint32),
      }
      values = sampling.values()
      state, tokens_B = read_first(
        self.config, num_slots or L, sampling.filters, self.weights, values, state, tokens_BxL[:, :first]
      )
    for start in range(first, L, CHUNK):
      yield None
      with jax.set_mesh(self.mesh):
        state, tokens_B = read_more(
          self.config, sampling.filters, self.weights, values, state, tokens_BxL[:, start : start + CHUNK]
        )
    yield state, tokens_B

  def values(self, sampling: Sampling) -> dict[str, jax.Array]:
    """The sampling's arguments of a program, on this decoder's devices; made once, and not for each token."""
    with jax.set_mesh(self.mesh):
      return sampling.values()

  def next_tokens(
    self, filters: Filters, values: dict[str, jax.Array], state: State, tokens_B: jax.Array
  ) -> tuple[State, jax.Array]:
    """The state after the newest tokens [B], and the next ones; the old state is used up."""
    with jax.set_mesh(self.mesh):
      return read_more(self.config, filters, self.weights, values, state, tokens_B)

  def replaced(
    self, state: State, tokens_B: jax.Array, row: int, new: State, new_token: jax.Array
  ) -> tuple[State, jax.Array]:
    """The state and newest tokens of a batch of which one row is now the only one of another; both are used up."""
    with jax.set_mesh(self.mesh):
      return with_row(state, tokens_B, np.int32(row), new, new_token)


def _placed(model: Model, weights: Weights, mesh: Mesh) -> Weights:
  """Weights as they are used on a mesh: split over its tensor axis alone.

  They are moved by one program: of several, each process could begin another one first, and wait for the others.
  """
  at = lambda leaf, axes: sharding.named(mesh, axes, leaf.shape)
  sets = [
    {
      group: {name: at(leaf, model.block_axes[group][name]) for name, leaf in one.items()}
      for group, one in set_.items()
    }
    for set_ in weights["blocks"].sets
  ]
  tables: dict[str, Any] = {"embedding": model.embedding, "positions": model.positions, "head": model.head}
  rest = dict.fromkeys(weights["rest"], sharding.replicated(mesh))
  for name, table in tables.items():
    if weights["rest"].get(name) is not None:
      rest[name] = at(weights["rest"][name], table.get_metadata("axes"))
  blocks = dataclasses.replace(weights["blocks"], sets=sets)
  return jax.jit(lambda tree: tree, out_shardings={"blocks": blocks, "rest": rest})(weights)


def _for_cpu(config: ModelConfig, weights: Weights) -> Weights:
  """Weights with kernels stored as a CPU reads them fastest, for blocks that are known to do nothing but multiply."""
  blocks = weights["blocks"]
  if vector_fields.FIELDS[config.field] not in (vector_fields.GPTField, vector_fields.LlamaField):
    return weights
  sets = jax.jit(lambda sets: [output_first(one) for one in sets])(blocks.sets)
  return {**weights, "blocks": dataclasses.replace(blocks, sets=sets)}


def padded(slots: int) -> int:
  """A number of slots that is a multiple of BUCKET."""
  return -(-slots // BUCKET) * BUCKET


def first_logits(
  config: ModelConfig, num_slots: int, weights: Weights, state: State, tokens_BxQ: jax.Array
) -> tuple[State, jax.Array]:
  """The state after the first Q tokens of each row, with P = `num_slots` slots, and logits [B, V] after the last.

  The state before has no cache and no slot yet.
  """
  Q = tokens_BxQ.shape[1]
  tokens_BxQ = sharding.constrain(tokens_BxQ, "batch", None)
  positions_BxQ = state["next_B"][:, None] + jnp.arange(Q, dtype=jnp.int32)[None]
  packing = Packing((positions_BxQ >= 0).astype(jnp.int32), jnp.maximum(positions_BxQ, 0))
  context = PrefillCache(packing)
  model = partial_model(config, weights["rest"])
  hidden_BxQxD = model.hidden_unrolled(tokens_BxQ, weights["blocks"], context)
  room = ((0, 0), (0, 0), (0, num_slots - Q), (0, 0))
  cache = [(_split(jnp.pad(keys, room)), _split(jnp.pad(values, room))) for keys, values in context.stored]
  state = {**state, "cache": cache, "slot": jnp.int32(Q % num_slots), "next_B": state["next_B"] + Q}
  return state, _logits(model, hidden_BxQxD[:, -1:])[:, 0]


def more_logits(config: ModelConfig, weights: Weights, state: State, tokens_BxQ: jax.Array) -> tuple[State, jax.Array]:
  """The state after Q more tokens in each row, and the logits [B, V] after the last; slot + Q is at most P."""
  state, hidden_BxQxD = _more(config, weights, state, tokens_BxQ)
  return state, _logits(partial_model(config, weights["rest"]), hidden_BxQxD[:, -1:])[:, 0]


def all_logits(config: ModelConfig, weights: Weights, state: State, tokens_BxQ: jax.Array) -> tuple[State, jax.Array]:
  """As `more_logits`, with the logits [B, Q, V] after each of the tokens."""
  state, hidden_BxQxD = _more(config, weights, state, tokens_BxQ)
  return state, _logits(partial_model(config, weights["rest"]), hidden_BxQxD)


def _logits(model: Model, hidden_BxQxD: jax.Array) -> jax.Array:
  """As `Model.logits`, as a CPU computes them fastest for few tokens."""
  wide = parameter_dtype(model.config.dtype)
  on_cpu = lambda hidden: product(hidden, model.unembedding(), wide)
  return jax.lax.platform_dependent(hidden_BxQxD, cpu=on_cpu, default=model.logits)


def _more(config, weights, state, tokens_BxQ) -> tuple[State, jax.Array]:
  """The state after Q more tokens, and their last hidden states [B, Q, D]."""
  Q, P = tokens_BxQ.shape[1], state["cache"][0][0].shape[2]
  tokens_BxQ = sharding.constrain(tokens_BxQ, "batch", None)
  positions_BxQ = state["next_B"][:, None] + jnp.arange(Q, dtype=jnp.int32)[None]
  if vector_fields.FIELDS[config.field].learned_positions:
    positions_BxQ = jnp.minimum(positions_BxQ, config.seq_len - 1)  # a row beyond the last position has ended
  context = DecodeCache(state["cache"], state["slot"], state["next_B"], jnp.maximum(positions_BxQ, 0))
  model = partial_model(config, weights["rest"])
  hidden_BxQxD = model.hidden_unrolled(tokens_BxQ, weights["blocks"], context)
  cache = [(_split(keys), _split(values)) for keys, values in context.stored]
  return {**state, "cache": cache, "slot": (state["slot"] + Q) % P, "next_B": state["next_B"] + Q}, hidden_BxQxD


def _split(cached_BxKxPxC: jax.Array) -> jax.Array:
  return sharding.constrain(cached_BxKxPxC, "batch", "whole_heads", None, None)


def sampled(filters: Filters, values: dict[str, jax.Array], state: State, logits_BxV: jax.Array) -> jax.Array:
  """The next tokens [B], which every device has."""
  values = {**values, "rows": state["numbers_B"]}
  return sharding.constrain(sample(filters, values, logits_BxV, state["next_B"]), None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def read_first(
  config: ModelConfig,
  num_slots: int,
  filters: Filters,
  weights: Weights,
  values: dict[str, jax.Array],
  state: State,
  tokens_BxQ: jax.Array,
) -> tuple[State, jax.Array]:
  """As `first_logits`, with the next tokens [B] drawn."""
  state, logits_BxV = first_logits(config, num_slots, weights, state, tokens_BxQ)
  return state, sampled(filters, values, state, logits_BxV)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="state")
def read_more(
  config: ModelConfig, filters: Filters, weights: Weights, values: dict[str, jax.Array], state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
  """As `more_logits`, for tokens [B, Q] or single ones [B], with the next tokens [B] drawn.

  The old state's buffers are donated, so that keys and values are updated in place.
  """
  state, logits_BxV = more_logits(config, weights, state, tokens.reshape(tokens.shape[0], -1))
  return state, sampled(filters, values, state, logits_BxV)


@functools.partial(jax.jit, donate_argnames="state")
def with_row(
  state: State, tokens_B: jax.Array, row: jax.Array, new: State, new_token: jax.Array
) -> tuple[State, jax.Array]:
  """A batch of which row `row` [] is replaced by the only one of `new`, whose N slots are all in use."""

  def put(cached_BxKxPxC, new_1xKxNxC):
    P, N = cached_BxKxPxC.shape[2], new_1xKxNxC.shape[2]
    turned = jnp.roll(jnp.pad(new_1xKxNxC, ((0, 0), (0, 0), (0, P - N), (0, 0))), state["slot"] - N, axis=2)
    return _split(jax.lax.dynamic_update_slice_in_dim(cached_BxKxPxC, turned, row, axis=0))

  state = {
    "cache": jax.tree.map(put, state["cache"], new["cache"]),
    "slot": state["slot"],
    "next_B": state["next_B"].at[row].set(new["next_B"][0]),
    "numbers_B": state["numbers_B"].at[row].set(new["numbers_B"][0]),
  }
  return state, tokens_B.at[row].set(new_token[0])
