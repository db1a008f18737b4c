"""embed -> integrate -> unembed: the one forward pass.

B batch, L positions, D embed_dim, V vocab_size, U weight sets (distinct times of a pass).
"""

from collections.abc import Callable
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import grids, integration, solvers, vector_fields, weight_sources
from diffeq_nnx.model.attention_context import AttentionContext, Packing, pack, unpack
from diffeq_nnx.model.lora import LoraWeights
from diffeq_nnx.parallel import sharding


def parameter_dtype(dtype: str) -> jnp.dtype:
  """float32, or wider where the computation is wider."""
  return jnp.promote_types(dtype, jnp.float32)


class Model(nnx.Module):
  """A language model: token embedding, a weight source, a vector field, a solver, an output head.

  Every model of the project is this class; the config chooses the three parts. Parameters are float32
  (float64 if `config.dtype` is); the hidden state is `config.dtype`.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    if not isinstance(config, ModelConfig):
      raise UserError(f"config: a {type(config).__name__}; pass a ModelConfig, as the `model` of a Config")
    self.config = config
    self.field = nnx.static(vector_fields.make_field(config))
    dtype = parameter_dtype(config.dtype)
    D, V = config.embed_dim, config.vocab_size

    tied = vector_fields.has_tied_head(config)
    token_std = position_std = vector_fields.STD
    if config.initialization == "published":
      token_std, position_std = vector_fields.STD if tied else 1.0, vector_fields.STD / 2

    def table(rows: int, name: str, std: float) -> nnx.Param:
      return nnx.Param(std * jax.random.normal(rngs.params(), (rows, D), dtype), axes=(name, "embed"))

    self.embedding = table(V, "vocab", token_std)
    self.positions = table(config.seq_len, "position", position_std) if self.field.learned_positions else None
    self.head = None if tied else table(V, "vocab", vector_fields.STD)
    norm_specs = self.field.norm_specs(D)
    self.final_norm = nnx.data(
      {name: weight_sources.initial_leaf(leaf, (), rngs, dtype) for name, leaf in norm_specs.items()}
    )
    specs = self.field.specs(config)
    self.block_axes = nnx.static(jax.tree.map(lambda leaf: leaf.axes, specs))
    self.weight_source = _make_source(config, specs, self.times(), dtype, rngs)

  @property
  def solver(self) -> solvers.Solver:
    """The solver that the config names."""
    return solvers.SOLVERS[self.config.solver]

  def times(self, grid: grids.Grid | None = None) -> grids.Times:
    """The times whose weights the solver uses on a grid; None: on the config's own."""
    return solvers.weight_times(self.config, grid)

  def grid(self, num_steps: int | None = None) -> grids.Grid:
    """The config's own grid, or that of another number of steps, as `grids.make_grid`.

    Raises:
      UserError: a number below 1, or one that the model has no weights for.
    """
    config_lib.check_num_steps(self.config, "num_steps", num_steps)
    return grids.make_grid(self.config, num_steps)

  def block_weights(
    self, grid: grids.Grid | None = None, dropout_key: jax.Array | None = None
  ) -> weight_sources.GridWeights:
    """The weights at all times of a pass over the grid, None: the config's own, in one batched call.

    Each device computes its own part of them from its own part of the parameters. With a key, adapters have dropout.
    """
    grid = grid or self.grid()
    weights = self.weight_source(self.times(grid), jnp.dtype(self.config.dtype), dropout_key)
    weights = jax.tree.map(lambda leaf, axes: sharding.constrain(leaf, None, *axes), weights, self.block_axes)
    return weight_sources.GridWeights(weights, grid)

  def gather(self, weights: weight_sources.BlockWeights) -> weight_sources.BlockWeights:
    """The weights at one time, from the devices that hold parts of them."""
    return jax.tree.map(sharding.gather, weights, self.block_axes)

  def hidden(
    self,
    tokens_BxL: jax.Array,
    weights: weight_sources.GridWeights,
    *,
    segment_ids_BxL: jax.Array | None = None,
    positions_BxL: jax.Array | None = None,
    context: AttentionContext | None = None,
    dropout_key: jax.Array | None = None,
    rows_B: jax.Array | None = None,
    adjoint: integration.Adjoint = integration.Checkpointed(),
    prepare: integration.Gather = lambda weights: weights,
  ) -> jax.Array:
    """The state after the last step of the weights' grid and the final norm, [B, L, D].

    Args:
      tokens_BxL: token ids; L is at most `config.seq_len` where positions are learned.
      weights: from `block_weights(grid)`, or unrolled, as they are used: gathered and prepared.
      segment_ids_BxL: the document of each token, to which its attention is limited; None: one document per row.
      positions_BxL: each token's place in its document, below L; None: 0 to L-1.
      context: the attention context, in place of these two; rows may then be longer than `config.seq_len`, as long
        as no position is.
      dropout_key: None: no dropout.
      rows_B: index of each sequence in the batch, which seeds its dropout, so that micro-batches draw the masks of the
        batch; None: 0 to B-1.
      adjoint: how the backward pass gets the states.
      prepare: applied to the weights of a step, gathered, before the block reads them.

    Raises:
      ValueError: L is larger than the number of learned positions.
    """
    L = tokens_BxL.shape[1]
    if self.positions is not None and context is None and L > self.config.seq_len:
      raise ValueError(f"{L} tokens: the model has {self.config.seq_len} learned positions; pass at most that many")
    if context is None:
      tokens_BxL, context = pack(tokens_BxL, segment_ids_BxL, positions_BxL)
    x_BxLxD = self.embed(tokens_BxL, context.positions_BxL)
    dropout = vector_fields.Dropout()
    if dropout_key is not None and self.config.dropout:
      rows_B = jnp.arange(len(tokens_BxL)) if rows_B is None else rows_B
      dropout = vector_fields.Dropout(self.config.dropout, sharding.constrain(rows_B, "batch"))
    embed_key, solve_key = jax.random.split(jax.random.key(0) if dropout_key is None else dropout_key)
    x_BxLxD = integration.solve(
      self.solver,
      vector_fields.BoundField(self.field, context, dropout),
      dropout(embed_key, x_BxLxD),
      weights,
      key=solve_key,
      adjoint=adjoint,
      gather=lambda weights: prepare(self.gather(weights)),
    )
    return self.normalize(unpack(x_BxLxD, context))

  def make_step(
    self, grid: grids.Grid, context: AttentionContext = Packing()
  ) -> Callable[[solvers.Carry, integration.Links], solvers.Carry]:
    """Makes the function of one step on a grid, without dropout, for programs that loop over the steps themselves.

    It maps a carry of the solver, and what the step reads as `links_of` gives it, to the next carry.
    """
    field = vector_fields.BoundField(self.field, context)
    return functools.partial(integration.advance_of(self.solver, grid, self.gather), field)

  def links_of(self, weights: weight_sources.GridWeights) -> integration.Links:
    """What each step reads of the weights, with leading axes S, to scan over."""
    return integration.links_of(self.solver, weights, jnp.dtype(self.config.dtype), jax.random.key(0))

  def unembedding(self) -> jax.Array:
    """The output head [V, D] in the compute dtype: the token embedding where it is tied."""
    return self._table(self.embedding if self.head is None else self.head)

  def __call__(
    self,
    tokens_BxL: jax.Array,
    num_steps: int | None = None,
    *,
    segment_ids_BxL: jax.Array | None = None,
    positions_BxL: jax.Array | None = None,
  ) -> jax.Array:
    """Logits [B, L, V] in float32 or wider.

    @public

    Args:
      tokens_BxL: integers from 0 to config.vocab_size - 1, a range that is not checked; L is at most config.seq_len
        where positions are learned.
      num_steps: of the solver; None: the config's own.
      segment_ids_BxL: as for `hidden`.
      positions_BxL: as for `hidden`.

    Raises:
      UserError: there are no weights for that many steps, or the tokens are not integers [B, L], one or more.
      ValueError: L is larger than the number of learned positions.
    """
    tokens_BxL = jnp.asarray(tokens_BxL)
    if tokens_BxL.ndim != 2 or not tokens_BxL.size or not jnp.issubdtype(tokens_BxL.dtype, jnp.integer):
      problem = f"{tokens_BxL.dtype} of the shape {tokens_BxL.shape}"
      raise UserError(f"tokens: {problem}; must be integers [batch, length], one or more")
    weights = self.block_weights(self.grid(num_steps))
    hidden_BxLxD = self.hidden(tokens_BxL, weights, segment_ids_BxL=segment_ids_BxL, positions_BxL=positions_BxL)
    return self.logits(hidden_BxLxD)

  def logits(self, hidden_BxLxD: jax.Array) -> jax.Array:
    """The output head's logits of a last hidden state, [B, L, V] in float32 or wider."""
    return jnp.einsum(
      "bld,vd->blv", hidden_BxLxD, self.unembedding(), preferred_element_type=parameter_dtype(self.config.dtype)
    )

  def embed(self, tokens_BxL: jax.Array, positions_BxL: jax.Array | None = None) -> jax.Array:
    """The state at time 0, [B, L, D]; positions None: 0 to L-1."""
    wide = parameter_dtype(self.config.dtype)  # in which gradients of a row add up
    x_BxLxD = self._table(self.embedding).astype(wide)[tokens_BxL]
    if self.positions is not None:
      table_PxD = self._table(self.positions).astype(wide)
      x_BxLxD += table_PxD[None, : tokens_BxL.shape[1]] if positions_BxL is None else table_PxD[positions_BxL]
    return x_BxLxD.astype(self.config.dtype)

  def normalize(self, x_BxLxD: jax.Array) -> jax.Array:
    """The final norm, [B, L, D] -> [B, L, D]."""
    norm = {name: sharding.gather(leaf[...], ("embed",)) for name, leaf in self.final_norm.items()}
    return self.field.final_norm(x_BxLxD, norm)

  def _table(self, table: nnx.Param) -> jax.Array:
    """A table of rows in the compute dtype, gathered."""
    return sharding.gather(table[...].astype(self.config.dtype), table.get_metadata("axes"))


def _make_source(
  config: ModelConfig, specs: weight_sources.BlockSpecs, times: grids.Times, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Module:
  """The weight source that `model.weights` names."""
  if config.lora.rank:
    if config.weights != "stored":
      raise UserError(
        f"model.lora.rank={config.lora.rank}: adapters need model.weights=stored, not {config.weights}; use "
        "--job=finetune, which discretizes the model of a run, or set it to 0"
      )
    return LoraWeights(specs, config.lora, len(times.points_UxQ), dtype, rngs)
  if config.weights == "stored":
    return weight_sources.StoredWeights(specs, len(times.points_UxQ), dtype, rngs)
  if config.weights == "shared":
    return weight_sources.SharedWeights(specs, dtype, rngs)
  return weight_sources.GeneratedWeights(specs, config.time, config.initialization, times, dtype, rngs)
