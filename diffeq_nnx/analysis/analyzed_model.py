"""A model under analysis, and its states and attention on a text, step by step.

B batch, L positions, D embed_dim, S solver steps, U weight sets (distinct times), H query heads, K key/value
heads, C head_dim.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.model import grids, solvers, vector_fields
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.model import Model, parameter_dtype
from diffeq_nnx.model.parameters import params_of, partial_model
from diffeq_nnx.model.ready import ReadyModel, make_ready
from diffeq_nnx.model.weight_sources import BlockWeights, GridWeights
from diffeq_nnx.parallel import sharding

Progress = Callable[[float], None]  # called after each piece of work with its amount


class AnalyzedModel:
  """A model with the weights of all its steps, generated once, in float32 or wider, with reference attention.

  It computes the same as the trained model up to rounding: tangents in bfloat16 would be noise, and fused attention has
  no forward derivative. Everything is on one device; a sharded model's weights are generated where its parameters are.

  Attributes:
    ready: the model with its weights, on one device.
    config: its config, in the wider dtype.
    grid: the steps.
    times: of its weights, and which of them each step uses.
    source: the parameters of its weight source, where the model has them.
  """

  def __init__(self, model: Model, num_steps: int | None = None):
    """`num_steps` of the solver; None: the model's own. Raises UserError if there are no weights for that number."""
    config = dataclasses.replace(
      model.config, dtype=str(parameter_dtype(model.config.dtype)), attention="reference", dropout=0.0
    )
    with jax.default_matmul_precision("highest"):
      self.ready = make_ready(model, num_steps, config=config)
    self.config, self.grid = config, self.ready.weights.grid
    self.times = solvers.weight_times(config, self.grid)
    self.source = params_of(model)["weight_source"]

  @functools.cached_property
  def without_generator(self) -> Model:
    """The model that `ready` makes, which takes tens of milliseconds each time."""
    return self.ready.make_model()

  @contextlib.contextmanager
  def use_device(self) -> Iterator[None]:
    """On the model's device, with products in full precision, which TPUs and GPUs don't use by default."""
    with jax.set_mesh(self.ready.mesh), jax.default_matmul_precision("highest"):
      yield

  def check_times(self, times_M: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """The times as numbers, in their order.

    Raises UserError for no times, times outside 0 to 1, or stored weights, which exist at the times of the model's own
    steps only.
    """
    if not len(times_M) or not all(0 <= t <= 1 for t in times_M):
      raise UserError(f"times={list(times_M)}: must be one or more times from 0 to 1")
    if self.config.weights == "stored":
      raise UserError(
        f"times={list(times_M)}: the weights of this model are stored, for the times of its own "
        f"{self.config.num_steps} steps only; leave it out"
      )
    return tuple(map(float, times_M))

  def weights_at(self, times_M: Sequence[float]) -> BlockWeights:
    """BlockWeights at any times between 0 and 1, in their order. Raises as `check_times`."""
    weights = _weights(self.config, self.check_times(times_M), self.source)
    return jax.device_put(weights, sharding.replicated(self.ready.mesh))

  def check_tokens(self, tokens_L: Sequence[int] | np.ndarray) -> np.ndarray:
    """The tokens as an array [L].

    Raises UserError for no tokens, ids that the model lacks, or more than it has positions.
    """
    tokens_L = np.asarray(tokens_L)
    if not len(tokens_L):
      raise UserError("tokens: there are none; give one or more")
    if tokens_L.ndim != 1 or tokens_L.dtype.kind not in "iu":
      raise UserError(f"tokens: {tokens_L.dtype} of the shape {tokens_L.shape}; must be a list of ids")
    V, seq_len = self.config.vocab_size, self.config.seq_len
    if len(wrong := tokens_L[(tokens_L < 0) | (tokens_L >= V)]):
      raise UserError(f"tokens: hold the id {wrong[0]}; the model's ids are 0 to {V - 1}")
    if vector_fields.FIELDS[self.config.field].learned_positions and len(tokens_L) > seq_len:
      raise UserError(
        f"tokens: {len(tokens_L)} of them; the model has {seq_len} learned positions; give at most that many"
      )
    return tokens_L.astype(np.int32)

  @staticmethod
  def check_position(position: int, length: int) -> int:
    """The position counted from 0, of one that may count from the end; raises UserError if it is out of range."""
    if not -length <= position < length:
      raise UserError(f"position={position}: the text has {length} tokens, 0 to {length - 1}")
    return position % length

  def observe(
    self, tokens_L: Sequence[int] | np.ndarray, weights: GridWeights | None = None, *, attention: bool = False
  ) -> "Pass":
    """Records one forward pass of a text, with `weights` in place of the model's own if they are given.

    With `attention` the attention probabilities are recorded too, S H L^2 numbers. Raises UserError as `check_tokens`,
    and RunError if a state is not finite.
    """
    tokens_1xL = self.check_tokens(tokens_L)[None]
    ready = self.ready if weights is None else dataclasses.replace(self.ready, weights=weights)
    with self.use_device():
      passed = observe(ready, tokens_1xL, attention=attention)
    finite_S = np.isfinite(np.asarray(passed.states)).all((1, 2, 3))
    if not finite_S.all():
      raise RunError(
        f"the state after step {int(np.argmin(finite_S))} of {ready.weights.grid.num_steps} is not finite; the "
        "model's weights are too large, or not numbers"
      )
    return passed


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(config: ModelConfig, times_M: tuple[float, ...], source: dict[str, Any]) -> BlockWeights:
  model = partial_model(config, {"weight_source": source})
  with jax.default_matmul_precision("highest"):
    return model.weight_source(grids.at_times(times_M), jnp.dtype(config.dtype))


class Pass(NamedTuple):
  """A recorded forward pass.

  `attention` has the attention probabilities of each token over the tokens up to it, at the first evaluation of each
  step, [S, B, H, L, L]; None if they were not requested.
  """

  states: jax.Array  # the hidden state before the first step and after each, [S + 1, B, L, D]
  carries: solvers.Carry  # what the solver carries into each step, every leaf with a leading axis S
  attention: Any


class _RecordedAttention:
  """Causal attention that records the probabilities of each evaluation, [B, H, L, L]."""

  positions_BxL = None

  def __init__(self):
    self.probabilities: list[jax.Array] = []

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """See `AttentionContext.attend`."""
    self.probabilities.append(attention_probabilities(q_BxLxHxC, k_BxLxKxC))
    return Packing().attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, implementation)


def attention_probabilities(q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(C)) over the tokens up to each, [B, H, L, L]; head h reads key head h // (H / K)."""
  L, H, C = q_BxLxHxC.shape[1:]
  k_BxLxHxC = jnp.repeat(k_BxLxKxC, H // k_BxLxKxC.shape[2], axis=2)
  scores_BxHxLxL = jnp.einsum("blhc,bmhc->bhlm", q_BxLxHxC, k_BxLxHxC) / np.sqrt(C).astype(q_BxLxHxC.dtype)
  causal_1x1xLxL = jnp.tril(jnp.ones((1, 1, L, L), bool))
  return jax.nn.softmax(jnp.where(causal_1x1xLxL, scores_BxHxLxL, -jnp.inf), axis=-1)


@functools.partial(jax.jit, static_argnames="attention")
def observe(ready: ReadyModel, tokens_BxL: jax.Array, *, attention: bool = False) -> Pass:
  """Records one forward pass of a batch, with the attention probabilities if `attention`."""
  model = ready.make_model()

  def step(carry, link):
    context = _RecordedAttention()
    after = model.make_step(ready.weights.grid, context)(carry, link)
    return after, (carry, model.solver.read(after), context.probabilities[0] if attention else None)

  x_BxLxD = model.embed(tokens_BxL)
  _, (carries, states, recorded) = jax.lax.scan(step, model.solver.init(x_BxLxD), model.links_of(ready.weights))
  return Pass(jnp.concatenate([x_BxLxD[None], states]), carries, recorded)


@jax.jit
def logits_of(ready: ReadyModel, x_BxLxD: jax.Array) -> jax.Array:
  """Logits [B, L, V] of a state after the last step."""
  model = ready.make_model()
  return model.logits(model.normalize(x_BxLxD))
