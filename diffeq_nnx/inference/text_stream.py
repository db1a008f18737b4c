"""Text as its tokens come: no piece ends within a character, or within what may be a stop string."""

from typing import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 3  # of a character of UTF-8 that has not ended


class TextStream:
  """One text, decoded as it grows.

  Attributes:
    text: what was given out; whole after `finish`.
    stopped: whether a stop string ended it.
  """

  def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[str] = ()):
    """`decode` is a tokenizer's; `stop` are strings that end the text and are not part of it."""
    self.text, self.stopped = "", False
    self._decode, self._stop = decode, tuple(stop)
    self._ids: list[int] = []  # since the last place where a character ended
    self._told = 0  # characters of these that are in `_held` or given out
    self._held = ""  # decoded, and held back since a stop string may begin there

  def add(self, token: int) -> str:
    """The text that is certain after this token and was not before; "" where none is, and after a stop string."""
    self._ids.append(token)
    decoded = self._decode(self._ids)
    # bytes of a character that has not ended are replacement characters at the end, one or one each
    open_at = max(len(decoded.rstrip(_REPLACEMENT)), len(decoded) - _MOST_BYTES)
    piece = self._give(decoded[self._told:open_at])
    self._told = max(self._told, open_at)
    if open_at == len(decoded):
      self._ids, self._told = [], 0
    return piece

  def finish(self) -> str:
    """The rest of the text."""
    piece = self._give(self._decode(self._ids)[self._told:], last=True)
    self._ids, self._told = [], 0
    return piece

  def _give(self, new: str, last: bool = False) -> str:
    if self.stopped:
      return ""
    self._held += new
    found = [at for at in (self._held.find(mark) for mark in self._stop) if at >= 0]
    self.stopped = bool(found)
    if found:
      piece, self._held = self._held[:min(found)], ""
    else:
      cut = len(self._held) - (0 if last else self._open_stop())
      piece, self._held = self._held[:cut], self._held[cut:]
    self.text += piece
    return piece

  def _open_stop(self) -> int:
    """Length of the longest end of what is held that a stop string begins with."""
    return max((length for mark in self._stop for length in range(1, min(len(mark), len(self._held) + 1))
                if self._held.endswith(mark[:length])), default=0)
