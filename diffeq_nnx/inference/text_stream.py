"""Decoding of text token by token: no piece ends within a character, or within a possible stop string."""

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 3  # of an incomplete character in UTF-8
_MOST_IDS = 64  # that are decoded again with each token


class TextStream:
  """A text decoded as it grows.

  Attributes:
    text: all pieces returned so far; complete after `finish`.
    stopped: whether a stop string ended the text.
  """

  def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[str] = (), leading: str = ""):
    """Begins an empty text.

    Args:
      decode: a tokenizer's `decode_within`.
      stop: strings that end the text and are not part of it.
      leading: what is dropped if the text begins with it, such as a tokenizer's `leading`.
    """
    self.text, self.stopped = "", False
    self._leading = leading
    self._decode, self._stop = decode, tuple(stop)
    self._ids: list[int] = []  # since the last complete character
    self._decoded = 0  # characters of these that were decoded before
    self._held_back = ""  # decoded, but may be the beginning of a stop string

  def add(self, token: int) -> str:
    """The text that became certain with this token; "" where none did, and after a stop string."""
    self._ids.append(token)
    decoded = self._decode(self._ids)
    # the bytes of an incomplete character decode to one or more replacement characters at the end
    complete = max(len(decoded.rstrip(_REPLACEMENT)), len(decoded) - _MOST_BYTES)
    piece = self._release(decoded[self._decoded : complete])
    self._decoded = max(self._decoded, complete)
    if complete == len(decoded):
      self._ids, self._decoded = [], 0
    elif len(self._ids) > _MOST_IDS:  # of a model that repeats bytes which are no text
      kept = self._ids[-_MOST_IDS // 4 :]
      self._ids, self._decoded = kept, max(0, len(self._decode(kept)) - (len(decoded) - self._decoded))
    return piece

  def finish(self) -> str:
    """The rest of the text. It is called once, and no token is added afterwards."""
    return self._release(self._decode(self._ids)[self._decoded :], last=True)

  def _release(self, new: str, last: bool = False) -> str:
    """Appends decoded text, and returns the part of it that no stop string can take back."""
    if self.stopped:
      return ""
    if new:
      new, self._leading = new.removeprefix(self._leading), ""
    self._held_back += new
    found = [at for at in map(self._held_back.find, self._stop) if at >= 0]
    self.stopped = bool(found)
    cut = min(found) if found else len(self._held_back) - (0 if last else self._possible_stop())
    piece, self._held_back = self._held_back[:cut], self._held_back[cut:]
    self.text += piece
    return piece

  def _possible_stop(self) -> int:
    """Length of the longest end of the text held back that is the beginning of a stop string."""
    lengths = (
      length
      for stop in self._stop
      for length in range(1, min(len(stop), len(self._held_back) + 1))
      if self._held_back.endswith(stop[:length])
    )
    return max(lengths, default=0)
