"""Log-likelihoods of continuations, many at a time, over all devices of a mesh.

B rows, L slots, M scored tokens of a row, D embed_dim, V vocab_size, H query heads, K key/value heads, G = H / K,
C head_dim.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.harness import packing
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.ready import ReadyModel, make_ready, one_device_mesh
from diffeq_nnx.parallel import distributed, sharding

LOGITS = 1 << 24  # limit of the logits that a device holds at a time
UNSEEN = -1e30  # finite: a slot that sees nothing must not give a NaN
# Slots of a batch on a CPU, whose caches hold no more: SmolLM2 scored PIQA 2.5 times as fast as with 16,384.
CPU_SLOTS = 1024
# Slots of a batch on another device, and of a row of several sequences. Checkpoints may have 131,072 positions, and
# most questions need few of them.
SLOTS, ROW_SLOTS = 1 << 16, 1 << 13
QUERIES = 256  # slots whose attention is computed at a time, so that later slots can be left out


@dataclasses.dataclass(frozen=True)
class Branched:
  """Attention context of rows with several sequences; see `packing`."""

  ends_BxL: jax.Array  # where the slots below each slot end
  positions_BxL: jax.Array  # the depth of each slot

  def attend(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, v_BxLxKxC: jax.Array, implementation: str) -> jax.Array:
    """Attends from each slot to its path, [B, L, H, C], in float32 or wider, since no kernel has trees as masks."""
    del implementation
    B, L, H, C = q_BxLxHxC.shape
    K = k_BxLxKxC.shape[2]
    wide = jnp.promote_types(q_BxLxHxC.dtype, jnp.float32)
    q_BxLxKxGxC = q_BxLxHxC.reshape(B, L, K, H // K, C) * jnp.asarray(C**-0.5, q_BxLxHxC.dtype)
    outputs = []
    for first in range(0, L, QUERIES):
      last = min(first + QUERIES, L)
      slots_1xlx1 = jnp.arange(first, last, dtype=jnp.int32)[None, :, None]
      before_1xlxm = jnp.arange(last, dtype=jnp.int32)[None, None] <= slots_1xlx1
      seen_Bxlxm = before_1xlxm & (slots_1xlx1 < self.ends_BxL[:, None, :last])
      scores_BxKxGxlxm = jnp.einsum(
        "blkgc,bmkc->bkglm", q_BxLxKxGxC[:, first:last], k_BxLxKxC[:, :last], preferred_element_type=wide
      )
      scores_BxKxGxlxm = jnp.where(seen_Bxlxm[:, None, None], scores_BxKxGxlxm, jnp.asarray(UNSEEN, wide))
      shares_BxKxGxlxm = jax.nn.softmax(scores_BxKxGxlxm, axis=-1).astype(v_BxLxKxC.dtype)
      outputs.append(jnp.einsum("bkglm,bmkc->blkgc", shares_BxKxGxlxm, v_BxLxKxC[:, :last]))
    return jnp.concatenate(outputs, axis=1).reshape(B, L, H, C)


class Score(NamedTuple):
  """The result for a continuation."""

  logprob: float  # its log-probability after its context, in nats
  greedy: bool  # whether no token is likelier than each of its tokens


class Scorer:
  """A model ready to score: the weights of all its steps are generated once.

  Everything stays split over the mesh as in training. All processes of a job must make the same calls.
  """

  def __init__(
    self,
    model: Model,
    num_steps: int | None = None,
    *,
    config: ModelConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    share: bool = True,
  ):
    """Generates the weights.

    Args:
      model: its parameters are on the devices of `mesh`.
      num_steps: of the solver; None: the model's own.
      config: the model's, with another dtype of the computation; None: unchanged.
      mesh: None: of the one device that the model is on.
      batch_size: sequences of `max_length` tokens that a device holds at a time; of shorter ones it holds more. It
        holds one sequence, or of shorter ones at most SLOTS slots, on a CPU CPU_SLOTS.
      max_length: tokens of the longest sequence; None: seq_len.
      share: whether sequences with a common beginning share a row; affects results only by rounding.

    Raises:
      UserError: a number of steps that the model has no weights for.
    """
    self.ready = make_ready(model, num_steps, config=config, mesh=mesh or one_device_mesh(model))
    max_length = self.ready.config.seq_len if max_length is None else max_length
    self._share, self._most_slots = share, min(packing.round_up(max_length), ROW_SLOTS)
    self._rows = sharding.num_shards("batch", self.ready.mesh.shape)
    most = CPU_SLOTS if self.ready.mesh.devices.flat[0].platform == "cpu" else SLOTS
    self._slots = min(batch_size * max_length, most) * self._rows

  def __call__(self, requests: Sequence[Request]) -> Iterator[tuple[int, Score]]:
    """Yields the index of each request and its score, in any order, as they are computed.

    The next batch is computed while the caller handles one; equal requests are computed once. Requests must fit the
    model's positions. Raises UserError for ids that the model lacks, as a tokenizer with added tokens may give.
    """
    numbers: dict[Request, list[int]] = {}
    for number, request in enumerate(requests):
      numbers.setdefault(request, []).append(number)
    highest, V = max((max(itertools.chain(*request)) for request in numbers), default=0), self.ready.config.vocab_size
    if highest >= V:  # JAX would take the embedding of another id
      raise UserError(f"a text has the id {highest}, and the model's ids are 0 to {V - 1}; leave out such texts")
    distributed.require_same(list(numbers), "the questions or texts")
    equal, previous = list(numbers.values()), None  # indices of equal requests
    rows = packing.make_rows(list(numbers), self._most_slots, self._share)
    for batch in packing.make_batches(rows, self._slots, self._rows):
      started = batch, self._score(batch)
      if previous is not None:
        yield from _read_scores(*previous, equal)
      previous = started
    if previous is not None:
      yield from _read_scores(*previous, equal)

  def _score(self, batch: packing.Batch) -> tuple[jax.Array, jax.Array]:
    B, M = batch.arrays["slots"].shape
    share = sharding.Share(self.ready.mesh, B)
    arrays = share.place({name: array[share.rows] for name, array in batch.arrays.items()})
    pieces = _count_pieces(B // self._rows, M, self.ready.config.vocab_size)
    with jax.set_mesh(self.ready.mesh):
      return score(batch.branches, pieces, self.ready, arrays)


def _read_scores(
  batch: packing.Batch, outputs: tuple[jax.Array, jax.Array], equal: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Score]]:
  """Yields index and score of all requests that are equal to one of a batch."""
  logprob_BxM, greedy_BxM = map(np.asarray, outputs)
  for row, parts in enumerate(batch.parts):
    for number, first, count in parts:
      here = slice(first, first + count)
      score = Score(float(logprob_BxM[row, here].sum(dtype=np.float64)), bool(greedy_BxM[row, here].all()))
      yield from ((i, score) for i in equal[number])


def _count_pieces(B: int, M: int, V: int) -> int:
  """Chooses the number of pieces for M = 2^n scored tokens, so that a device holds at most LOGITS logits at a time."""
  return min(M, 1 << max(-(-B * M * V // LOGITS) - 1, 0).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 1))
def score(branches: bool, pieces: int, ready: ReadyModel, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Computes the log-probability of each scored token in nats, and whether none is likelier, [B, M], replicated.

  Args:
    branches: whether rows may hold more than one path; otherwise the model's own attention is used.
    pieces: number of pieces in which the logits are computed; divides M.
    ready: the model.
    batch: `packing.Batch.arrays`.
  """
  model = ready.make_model()
  context = Branched(batch["ends"], batch["positions"]) if branches else Packing(None, batch["positions"])
  hidden_BxLxD = model.hidden(batch["tokens"], ready.weights, context=context)
  head_VxD = model.unembedding()
  B, M = batch["slots"].shape
  split = lambda array: array.reshape(B, pieces, M // pieces).swapaxes(0, 1)

  def piece(slots_targets: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    slots_Bxm, targets_Bxm = slots_targets
    picked_BxmxD = jnp.take_along_axis(hidden_BxLxD, slots_Bxm[..., None], axis=1)
    wide = jnp.promote_types(ready.config.dtype, jnp.float32)
    logits_BxmxV = jnp.einsum("bmd,vd->bmv", picked_BxmxD, head_VxD, preferred_element_type=wide)
    target_Bxm = jnp.take_along_axis(logits_BxmxV, targets_Bxm[..., None], axis=-1)[..., 0]
    most_Bxm = logits_BxmxV.max(-1)
    total_Bxm = jnp.exp(logits_BxmxV - most_Bxm[..., None]).sum(-1)
    return target_Bxm - most_Bxm - jnp.log(total_Bxm), target_Bxm >= most_Bxm

  outputs = tuple(
    array.swapaxes(0, 1).reshape(B, M) for array in jax.lax.map(piece, (split(batch["slots"]), split(batch["targets"])))
  )
  if jax.sharding.get_abstract_mesh().size == 1:
    return outputs
  return jax.lax.with_sharding_constraint(outputs, jax.sharding.PartitionSpec())  # every process reads them
