"""Shapes of real models, for tests and benchmarks of attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """One problem: self-attention over `length` positions, causal."""

  batch: int
  length: int
  heads: int
  kv_heads: int
  head_dim: int
  window: int | None = None
  documents: int | None = None  # packed in each sequence, of random lengths
  logits_soft_cap: float | None = None

  def inputs(self, dtype: str, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, S, H, D], k and v [B, S, K, D], normal."""
    rng = np.random.default_rng(seed)  # NumPy's, since each shape would be compiled

    def draw(heads: int) -> jax.Array:
      return jnp.asarray(rng.standard_normal((self.batch, self.length, heads, self.head_dim), np.float32), dtype)

    return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads)

  def segment_ids(self, seed: int = 0) -> jax.Array | None:
    """Document numbers [B, S], from 0 upwards, or None."""
    if self.documents is None:
      return None
    rng = np.random.default_rng(seed)
    starts = [rng.choice(np.arange(1, self.length), self.documents - 1, replace=False) for _ in range(self.batch)]
    marks = np.zeros((self.batch, self.length), np.int32)
    for row, places in zip(marks, starts):
      row[places] = 1
    return jnp.asarray(np.cumsum(marks, 1, dtype=np.int32))


SHAPES = {
  "gpt_small": Shape(8, 1024, 12, 12, 64),
  "gpt_large": Shape(4, 1024, 20, 20, 64),
  "llama1b": Shape(4, 2048, 16, 16, 128),
  "llama_grouped": Shape(4, 2048, 32, 8, 128),
  "llama_4k": Shape(2, 4096, 16, 16, 128),
  "llama_8k": Shape(1, 8192, 16, 16, 128),
  "odd_length": Shape(4, 777, 12, 12, 64),
  "phi_head_80": Shape(4, 2048, 32, 32, 80),
  "phi3_head_96": Shape(4, 2048, 32, 32, 96),
  "gemma_head_256": Shape(4, 2048, 8, 4, 256, logits_soft_cap=50.0),
  "mistral_window": Shape(1, 8192, 32, 8, 128, window=4096),
  "packed_documents": Shape(4, 2048, 16, 16, 128, documents=6),
}
