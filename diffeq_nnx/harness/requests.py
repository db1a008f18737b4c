"""Texts to requests, as lm_eval's own backends do it; and what is said of the begin mark."""

import dataclasses
from typing import Iterator, Sequence

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.harness.packing import Request


@dataclasses.dataclass
class Encoder:
  """How texts become tokens.

  Attributes:
    tokenizer: the run's.
    begin_mark: auto (contexts begin with the tokenizer's begin mark where it has one), none, or always (its begin mark,
      or else its end mark).
    max_length: tokens that the model reads at a time.
    stride: tokens that each window after the first predicts where long texts are scored; None: windows side by side,
      `max_length` each.
    truncated: how many requests lost the beginning of their context, so far.
    merged: how many continuations shared a token with the end of their context, so far; see `pairs`.
  """
  tokenizer: Tokenizer
  begin_mark: str
  max_length: int
  stride: int | None = None
  truncated: int = 0
  merged: int = 0

  @property
  def prefix(self) -> int:
    """The context of a text's first token where there is no other: the begin mark, or else the end mark."""
    return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

  @property
  def before_contexts(self) -> int | None:
    """The mark that each context begins with; None: none."""
    return {"auto": self.tokenizer.bos_id, "none": None, "always": self.prefix}[self.begin_mark]

  def describe(self) -> dict[str, object]:
    """What of this decides a result, for the results."""
    windows = ("disjoint: side by side, the last moved back to be full" if self.stride is None else
               f"sliding: each after the first predicts {self.stride} tokens")
    return {"begin_mark": self.begin_mark, "mark_before_contexts": self.before_contexts,
            "mark_before_texts_without_context": self.prefix, "max_length": self.max_length, "rolling_windows": windows,
            "truncated_requests": self.truncated, "merged_requests": self.merged}

  def ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Ids without marks.

    Raises:
      UserError: a text that is no Unicode.
    """
    try:
      return [tuple(one.tolist()) for one in self.tokenizer.encode_batch(texts)]
    except UnicodeEncodeError as error:
      raise UserError(f"a request's text: not Unicode ({error.reason}); mend the task's data") from error

  def contexts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Ids of contexts, with the mark before them if there is to be one."""
    mark = () if self.before_contexts is None else (self.before_contexts,)
    return [mark + one for one in self.ids(texts)]

  def pairs(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Request | None]:
    """A request for each context and continuation; None where the continuation is empty.

    Both are encoded together and cut where the context's tokens end. Where that leaves nothing, since the continuation
    merged into the context's last tokens, the cut is where the two begin to differ, so that the merged token is scored.
    Spaces at the end of a context go to the continuation. An empty context is the mark `prefix`. Too long a context
    loses its beginning.

    Raises:
      UserError: a continuation longer than `max_length`.
    """
    moved = [(context.rstrip(), context[len(context.rstrip()):] + continuation) for context, continuation in pairs]
    wholes = self.contexts([context + continuation for context, continuation in moved])
    known = list(dict.fromkeys(context for context, _ in moved))
    encoded = dict(zip(known, self.contexts(known)))
    marks = len(self.contexts([""])[0])
    for (context, _), whole in zip(moved, wholes):
      before = encoded[context]
      cut = len(before) if context else marks
      if len(whole) <= cut and whole != before:
        cut = next(i for i, pair in enumerate(zip(before, whole)) if pair[0] != pair[1])
        self.merged += 1
      continuation, before = whole[cut:], whole[:cut] if context and cut else (self.prefix,)
      yield self._fitted(before, continuation) if continuation else None

  def windows(self, text: str) -> list[Request]:
    """Requests that together predict each token of a text once, the first after the mark `prefix`."""
    (ids,) = self.ids([text])
    least = 1 if self.stride is None else self.max_length - self.stride + 1
    windows = get_rolling_token_windows(list(ids), self.prefix, self.max_length, least)
    return [Request(*map(tuple, make_disjoint_window(window))) for window in windows]

  def _fitted(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> Request:
    if len(continuation) > self.max_length:
      raise UserError(f"a continuation of {len(continuation)} tokens: the model reads {self.max_length} at a time; "
                      "leave the task out, or raise max_length where positions aren't learned")
    room = self.max_length + 1 - len(continuation)
    self.truncated += len(context) > room
    return Request(context[-room:], continuation)
