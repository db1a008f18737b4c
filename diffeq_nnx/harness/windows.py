"""What a model reads of texts that are longer than it can read at a time."""

from collections.abc import Sequence
import dataclasses

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.model import vector_fields


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows over texts.

  Attributes:
    max_length: tokens that the model reads at a time.
    stride: tokens that each window after the first predicts; None: windows lie side by side.
  """

  max_length: int
  stride: int | None

  def __str__(self) -> str:
    if self.stride is None:
      return "disjoint: side by side, the last moved back to be full"
    return f"sliding: each after the first predicts {self.stride} tokens"

  def split(self, ids: list[int], mark: int) -> list[tuple[list[int], list[int]]]:
    """Returns pairs (context, continuation) that together predict each token once, the first after `mark`."""
    context_length = 1 if self.stride is None else self.max_length - self.stride + 1
    windows = get_rolling_token_windows(ids, mark, self.max_length, context_length)
    return [make_disjoint_window(window) for window in windows]

  def fit(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
    """Makes a request that the model can read at a time. Too long a context loses its beginning.

    Raises:
      UserError: the continuation alone is too long.
    """
    if len(continuation) > self.max_length:
      raise UserError(
        f"a continuation of {len(continuation)} tokens: the model reads {self.max_length} at a time; "
        "leave the task out, or raise max_length where positions aren't learned"
      )
    return Request(tuple(context[-(self.max_length + 1 - len(continuation)) :]), tuple(continuation))


def choose_windows(model: ModelConfig, max_length: int | None, sliding: bool, stride: int | None) -> Windows:
  """Chooses the windows of a model; `max_length` None: seq_len; `stride` None: half of `max_length`.

  Raises:
    UserError: `max_length` above the number of learned positions, or `stride` above `max_length`.
  """
  length = model.seq_len if max_length is None else max_length
  if vector_fields.FIELDS[model.field].learned_positions and length > model.seq_len:
    raise UserError(f"max_length={length}: must be 1 to model.seq_len={model.seq_len}, the number of positions")
  if not sliding:
    return Windows(length, None)
  stride = max(length // 2, 1) if stride is None else stride
  if stride > length:
    raise UserError(f"stride={stride}: must be 1 to {length}, the tokens that the model reads at a time")
  return Windows(length, stride)
