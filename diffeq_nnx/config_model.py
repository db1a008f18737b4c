"""The keys of `model`: three independent choices, their sizes, and what generated weights are made from."""

import dataclasses
import math
import re

from diffeq_nnx.config_fields import Section, check_divides, number, one_of
from diffeq_nnx.errors import UserError

SMALLEST_STEP = 1e-9  # of the horizon: the times of a grid must rise
SOLVER_NAMES = "euler sequential strang strang_mirrored midpoint heun ralston rk4 leapfrog".split()


@dataclasses.dataclass(frozen=True)
class TimeConfig(Section, prefix="model.time."):
  """Which times a step has weights of, and how a time becomes the features that generated weights are made from."""

  # How e(t) is made from t; docs/evidence/any_depth.md compares the four.
  embedding: str = one_of("fixed", "learned", "shared_mlp", "uniform")
  sinusoidal_dim: int = number(128, above=0)  # m: the number of frequencies.
  time_embed_dim: int = number(48, above=0)  # T: the size of e(t).
  # Radians that the fastest wave turns from t = 0 to t = 1; unused where the embedding is uniform.
  scale: float = number(1000.0, above=0)
  common: float = number(0.0, at_least=0)  # Size of a feature that is the same at all t, beside waves of size 1.
  # The times of a step's weights. nodes: those that the solver evaluates; otherwise one time, or the mean, for all.
  weights_at: str = one_of("nodes", "end", "middle", "mean")
  constant: bool = False  # Holds t at 0. This is the control that has the parameters but not the time.

  @property
  def radians(self) -> float:
    """The angle that the fastest wave turns from t = 0 to t = 1."""
    return math.pi * self.sinusoidal_dim if self.embedding == "uniform" else self.scale


FAMILIES: dict[str, str] = {}  # the field of this package, gpt or llama, that a registered one inherits


@dataclasses.dataclass(frozen=True)
class LoraConfig(Section, prefix="model.lora."):
  """Low-rank adapters on stored weights (Hu et al. 2021): a kernel is W + alpha / rank A B, and only A and B learn."""

  rank: int = number(0, at_least=0)  # Columns of A; 0: no adapters, and all parameters learn.
  alpha: float = number(16.0, above=0)  # The product A B is scaled by alpha / rank.
  # A regular expression that is found in names like qkv.kernel, out.kernel, up.kernel, down.kernel.
  targets: str = "kernel"
  dropout: float = number(0.0, at_least=0, below=1)  # Share of a kernel's inputs that is dropped before A.
  embeddings: bool = True  # Whether the token embedding, learned positions and the head learn too.

  def _check_together(self) -> None:
    try:
      re.compile(self.targets)
    except re.error as error:
      raise UserError(f"model.lora.targets={self.targets!r}: is no regular expression ({error})") from error
    for key in ("alpha", "targets", "dropout", "embeddings") if not self.rank else ():
      if getattr(self, key) != getattr(LoraConfig, key):
        raise UserError(f"model.lora.{key}={getattr(self, key)}: is for adapters; set model.lora.rank, or leave it out")


@dataclasses.dataclass(frozen=True)
class RopeConfig(Section, prefix="model.rope."):
  """Rotary positions of llama (Su et al. 2021), and Llama 3's scaling of them for longer sequences (Dubey et al. 2024).

  Channel pair i turns by base^(-2 i / C) radians for each position. With a factor, a pair whose wavelength is above
  original_len / low_freq_factor positions turns `factor` times slower, one below original_len / high_freq_factor turns
  as before, and those between are interpolated.
  """

  base: float = number(10000.0, above=0)  # Sets the longest wavelength, about 2 pi base positions.
  factor: float = number(1.0, at_least=1)  # How much slower the slowest pairs turn; 1: no scaling.
  low_freq_factor: float = number(1.0, above=0)  # Sets the wavelength above which a pair is scaled.
  high_freq_factor: float = number(4.0, above=0)  # Sets the wavelength below which a pair is not scaled.
  original_len: int = number(8192, above=0)  # Positions that the model was trained at before it was scaled.


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section, prefix="model."):
  """Three independent choices (weights, field, solver) and their sizes."""

  # generated: W(t) from hypernetworks; stored: a set of weights for each step; shared: one set for all steps.
  weights: str = one_of("generated", "stored", "shared")
  field: str = one_of("gpt", "llama")  # The block: GPT-2's or Llama's.
  # euler: both branches see the same state; sequential: attention first; the others: docs/reference/solvers.md.
  solver: str = one_of(*SOLVER_NAMES)
  # plain: W(t) starts with the spread of GPT-2's weights; published: as in the published code.
  initialization: str = one_of("plain", "published")
  # Whether the norms of llama's block have a shift, as gpt's do. None: only if initialization=published.
  norm_shift: bool | None = None
  num_steps: int = number(12, above=0)  # Solver steps, which are the layers.
  # The time that the solver integrates over: dt = horizon / num_steps. None: num_steps, so that dt = 1.
  horizon: float | None = number(None, above=0)
  step_sizes: tuple[float, ...] = ()  # dt of each of the num_steps steps; (): all alike.
  # The steps 0 to num_steps - 1, the one that matters most first, as --job=rank_steps writes them. Fewer steps are then
  # the first of these in the order of time, and the others are left out. (): they are of one size over the horizon.
  depth_order: tuple[int, ...] = ()
  embed_dim: int = number(768, above=0)  # Width of the state.
  num_heads: int = number(12, above=0)  # Heads of the queries.
  num_kv_heads: int | None = number(None, above=0)  # Heads of the keys and values. None: num_heads.
  head_dim: int | None = number(None, above=0)  # Channels of a head. None: embed_dim / num_heads.
  qkv_bias: bool = False  # Whether llama's queries, keys and values have biases, as gpt's and Qwen 2's do.
  # Whether llama normalizes the queries and keys of each head before it rotates them, as Qwen 3 does.
  qk_norm: bool = False
  tied_head: bool | None = None  # Whether the output head is the token embedding. None: only if field=gpt.
  mlp_dim: int | None = number(None, above=0)  # Width inside the feed-forward branch. None: 4 embed_dim.
  vocab_size: int = number(50257, above=0)  # Ids of the model; a tokenizer that is trained for it uses all of them.
  seq_len: int = number(1024, above=0)  # Tokens of a row.
  # Added to the variance in the norms of the block. None: 1e-5 for gpt, 1e-6 for llama.
  norm_eps: float | None = number(None, above=0)
  # Added to the variance in the norm after the last step. None: 1e-5.
  final_norm_eps: float | None = number(None, above=0)
  # Share that is dropped of the embeddings and of both residual branches.
  dropout: float = number(0.0, at_least=0, below=1)
  # Type of the computation. Parameters are float32, or float64 if it is.
  dtype: str = one_of("bfloat16", "float32", "float64")
  # The implementation, as docs/reference/kernels.md describes; programs may name a kernel for a device that they
  # compile for.
  attention: str = one_of(
    *("auto", "reference", "pallas", "pallas_deterministic", "cudnn"),
    programs=("pallas_tpu", "pallas_gpu", "pallas_gpu_deterministic"),
  )
  rope: RopeConfig = RopeConfig()
  time: TimeConfig = TimeConfig()
  lora: LoraConfig = LoraConfig()

  @property
  def kv_heads(self) -> int:
    """Key and value heads, the default filled in."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  @property
  def head_size(self) -> int:
    """Channels of a head, the default filled in."""
    return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

  @property
  def hidden_dim(self) -> int:
    """Width inside the feed-forward branch, the default filled in."""
    return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

  @property
  def family(self) -> str:
    """The field of this package whose rules hold: the field itself, or what a registered one inherits, if anything."""
    return FAMILIES.get(self.field, self.field)

  @property
  def block_eps(self) -> float:
    """eps of the block's norms, the default filled in."""
    return {"llama": 1e-6}.get(self.family, 1e-5) if self.norm_eps is None else self.norm_eps

  @property
  def block_shift(self) -> bool:
    """Whether the block's norms have a shift, the default filled in."""
    by_default = self.family == "gpt" or self.initialization == "published"
    return by_default if self.norm_shift is None else self.norm_shift

  @property
  def final_eps(self) -> float:
    """eps of the norm after the last step, the default filled in."""
    return 1e-5 if self.final_norm_eps is None else self.final_norm_eps

  @property
  def total_time(self) -> float:
    """The horizon, the default filled in."""
    if self.step_sizes:
      return math.fsum(self.step_sizes)
    return float(self.num_steps) if self.horizon is None else self.horizon

  def _check_together(self) -> None:
    if self.head_dim is None:
      check_divides("model.num_heads", self.num_heads, "model.embed_dim", self.embed_dim)
    check_divides("model.num_kv_heads", self.kv_heads, "model.num_heads", self.num_heads)
    if self.family == "llama" and self.head_size % 2:
      raise UserError(
        f"model.num_heads={self.num_heads}: a llama head must have an even width to be rotated, "
        f"not {self.head_size}; change model.num_heads or model.embed_dim={self.embed_dim}, or set model.head_dim"
      )
    for key in ("qkv_bias", "qk_norm"):
      if self.family == "gpt" and getattr(self, key):
        raise UserError(f"model.{key}=True: is a choice for llama's block; set it to False, or set model.field=llama")
    if self.family == "gpt" and self.norm_shift is False:
      raise UserError("model.norm_shift=False: gpt's norms have a shift; leave it at None, or set model.field=llama")
    if self.family == "gpt" and self.rope != RopeConfig():
      raise UserError("model.rope: gpt's positions are learned; leave these keys out, or set model.field=llama")
    if self.rope.low_freq_factor >= self.rope.high_freq_factor:
      raise UserError(
        f"model.rope.low_freq_factor={self.rope.low_freq_factor}: must be below "
        f"model.rope.high_freq_factor={self.rope.high_freq_factor}"
      )
    if self.step_sizes:
      if self.horizon is not None:
        raise UserError("model.step_sizes: they add up to the horizon; leave model.horizon at None, or this at ()")
      least = SMALLEST_STEP * sum(self.step_sizes)
      if len(self.step_sizes) != self.num_steps or not all(least < size < math.inf for size in self.step_sizes):
        raise UserError(
          f"model.step_sizes={self.step_sizes}: must be model.num_steps={self.num_steps} numbers, each above "
          f"{SMALLEST_STEP:g} of their sum"
        )
    if self.depth_order and sorted(self.depth_order) != list(range(self.num_steps)):
      raise UserError(
        f"model.depth_order={self.depth_order}: must be the numbers 0 to {self.num_steps - 1} in another order, for "
        f"model.num_steps={self.num_steps}; leave it out, and run --job=rank_steps"
      )
    if self.time.constant and self.weights != "generated":
      raise UserError("model.time.constant=True: only weights that are generated have a time; set it to False")
