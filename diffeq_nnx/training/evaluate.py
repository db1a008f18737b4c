"""Validation: the mean loss over a split, in training and as a job."""

from collections.abc import Callable, Iterator
import math
import time

import jax
from jax.sharding import Mesh

from diffeq_nnx import data
from diffeq_nnx.config import Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training.step import Batch, make_eval_step, make_generate


class Evaluator:
  """Evaluates parameters on the validation part, at one number of solver steps."""

  def __init__(self, config: Config, corpus: data.Corpus, mesh: Mesh, num_steps: int | None = None):
    """`num_steps` None: eval.num_steps, or else model.num_steps. Raises UserError if no row can be evaluated."""
    own = config.model.num_steps if config.eval.num_steps is None else config.eval.num_steps
    self.num_steps = own if num_steps is None else num_steps
    self._config, self._split = config, corpus.validation
    self._eos_id = data.choose_document_end(config.data, corpus)
    self._generate = make_generate(config, self.num_steps)
    self._step = make_eval_step(config, mesh)
    shards = sharding.num_shards("batch", mesh.shape)
    # padded to a multiple of the devices, so that the figures don't depend on the mesh
    self._share = sharding.Share(mesh, -(-config.eval.batch_size // shards) * shards)
    if not len(data.Rows(self._split, config.model.seq_len, "validation")):
      raise UserError("data.validation: the text has no token to predict; name a longer one")

  def batches(self) -> Iterator[Batch]:
    """The batches that it evaluates, on the devices."""
    settings = self._config.eval
    for batch in data.eval_batches(
      self._split,
      seq_len=self._config.model.seq_len,
      batch_size=settings.batch_size,
      max_batches=settings.max_batches,
      rows=self._share.rows,
      eos_id=self._eos_id,
    ):
      yield self._share.place(batch)

  def __call__(self, params: Params, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """loss (nats per token), perplexity (e^loss), bits_per_byte, tokens and seconds; {} if `stop` before a batch.

    Every token of the split that counts, but its first, is predicted once, in windows of seq_len that don't overlap, or
    in padded rows; eval.max_batches cuts that short. Bits per byte takes the whole split's bytes per token.

    Raises:
      UserError: no token counts.
    """
    start = time.perf_counter()
    weights = self._generate(params)
    found: list[tuple[jax.Array, jax.Array]] = []
    for batch in self.batches():
      if stop():
        return {}
      jax.block_until_ready(found[-2:-1])  # one batch is computed while the next waits: `stop` is called as they end
      found.append(self._step(params, weights, batch))
    total, tokens = (sum(map(float, column)) for column in zip(*jax.device_get(found)))  # float32 counts to 2^24
    if not tokens:
      raise UserError(
        f"eval.max_batches={self._config.eval.max_batches}: no token of the validation text counts here; raise it, or "
        "name another text with data.validation"
      )
    loss = total / tokens
    return {
      "loss": loss,
      "perplexity": perplexity(loss),
      "bits_per_byte": bits_per_byte(loss, self._split.bytes_per_token),
      "tokens": int(tokens),
      "seconds": time.perf_counter() - start,
    }


def perplexity(loss: float) -> float:
  """e^loss, infinite where that overflows."""
  return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
  """A loss in nats per token as bits per byte of UTF-8 text."""
  return loss / math.log(2) / bytes_per_token
