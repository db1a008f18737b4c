"""embed -> integrate -> unembed: the one forward pass.

B batch, L positions, D embed_dim, V vocab_size, S solver steps.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx import block
from diffeq_nnx import solvers
from diffeq_nnx import weights as weights_lib
from diffeq_nnx.config import ModelConfig


def parameter_dtype(dtype: str) -> jnp.dtype:
  """float32, or wider where the computation is wider."""
  return jnp.promote_types(dtype, jnp.float32)


class Model(nnx.Module):
  """A language model: token embedding, a weight source, a vector field, a solver, an output head.

  Every model of the project is this class; the config chooses the three parts. Parameters are float32;
  arrays that go from step to step are `config.dtype`.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.field = nnx.static(block.make_field(config))
    dtype = parameter_dtype(config.dtype)
    D, V = config.embed_dim, config.vocab_size

    def table(rows: int) -> nnx.Param:
      return nnx.Param(block.STD * jax.random.normal(rngs.params(), (rows, D), dtype))

    self.embedding = table(V)
    self.positions = table(config.seq_len) if self.field.learned_positions else None
    self.head = None if self.field.tied_head else table(V)
    self.final_norm = nnx.data({name: nnx.Param(jnp.full(leaf.shape, leaf.start, dtype))
                                for name, leaf in self.field.norm_specs(D).items()})
    self.weight_source = weights_lib.make_source(
        config, self.field.specs(config), np.asarray(self.grid().times_S), dtype, rngs)

  def grid(self, num_steps: int | None = None) -> solvers.Grid:
    """The uniform grid of `num_steps` steps (None: the config's) over the config's horizon."""
    return solvers.uniform_grid(num_steps or self.config.num_steps, self.config.total_time)

  def block_weights(self, grid: solvers.Grid | None = None) -> weights_lib.BlockWeights:
    """The weights at all times of the grid, in one batched call; every leaf has a leading axis S."""
    return self.weight_source(np.asarray((grid or self.grid()).times_S), jnp.dtype(self.config.dtype))

  def hidden(self, tokens_BxL: jax.Array, block_weights: weights_lib.BlockWeights, grid: solvers.Grid | None = None,
             *, dropout_key: jax.Array | None = None, remat: solvers.Remat = solvers.Remat()) -> jax.Array:
    """The state after the last step and the final norm, [B, L, D].

    Args:
      tokens_BxL: token ids; L is at most `config.seq_len` where positions are learned.
      block_weights: from `block_weights(grid)`.
      grid: times and step sizes; None: the config's own.
      dropout_key: None: no dropout.
      remat: what the backward pass recomputes.

    Raises:
      ValueError: L is larger than the number of learned positions.
    """
    L = tokens_BxL.shape[1]
    dtype = jnp.dtype(self.config.dtype)
    x_BxLxD = self.embedding[...].astype(dtype)[tokens_BxL]
    if self.positions is not None:
      if L > self.config.seq_len:
        raise ValueError(f"{L} tokens: the model has {self.config.seq_len} learned positions; pass at most that many")
      x_BxLxD = x_BxLxD + self.positions[...][None, :L].astype(dtype)
    dropout = _no_dropout if dropout_key is None or not self.config.dropout else self._dropout
    embed_key, solve_key = jax.random.split(jax.random.key(0) if dropout_key is None else dropout_key)
    x_BxLxD = solvers.solve(self.config.solver, self.field, dropout(embed_key, x_BxLxD), block_weights,
                            grid or self.grid(), dropout=dropout, key=solve_key, remat=remat)
    return self.field.final_norm(x_BxLxD, {name: leaf[...] for name, leaf in self.final_norm.items()})

  def unembedding(self) -> jax.Array:
    """The output head [V, D] in the compute dtype: the token embedding where it is tied."""
    table = self.embedding if self.head is None else self.head
    return table[...].astype(self.config.dtype)

  def __call__(self, tokens_BxL: jax.Array, num_steps: int | None = None) -> jax.Array:
    """Logits [B, L, V] in float32 or wider, at any number of steps that the weight source has."""
    grid = self.grid(num_steps)
    hidden_BxLxD = self.hidden(tokens_BxL, self.block_weights(grid), grid)
    return jnp.einsum("bld,vd->blv", hidden_BxLxD, self.unembedding(),
                      preferred_element_type=parameter_dtype(self.config.dtype))

  def _dropout(self, key: jax.Array, x: jax.Array) -> jax.Array:
    keep = 1.0 - self.config.dropout
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / jnp.asarray(keep, x.dtype), 0)


def _no_dropout(key: jax.Array, x: jax.Array) -> jax.Array:
  del key
  return x
