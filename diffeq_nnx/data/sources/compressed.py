"""Compressed files as a stream of what they hold: every member counts, and bytes that are no member are an error.

The standard library's readers of xz and bz2 end without an error where a later member is damaged, and those of zstd
allow windows of 128 MiB only. Its decompressors read one member each; this module goes from member to member.
"""

import bz2
from collections.abc import Callable
import io
import lzma
import os
import sys
from typing import Any, BinaryIO, Protocol

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd

CHUNK = 2**17  # compressed bytes that are read at a time
HEADER = 18  # bytes of the longest header of a zstd frame
MAX_WINDOW = 1 << zstd.DecompressionParameter.window_log_max.bounds()[1]  # 2 GiB where addresses have 64 bits


class WindowTooLarge(Exception):
  """A zstd frame needs more memory than the library allows.

  Attributes:
    gib: the size of its window.
  """

  def __init__(self, window: int):
    self.gib = window / 2**30
    super().__init__(f"its zstd window of {self.gib:g} GiB is larger than {MAX_WINDOW / 2**30:g} GiB")


ERRORS = (EOFError, OSError, lzma.LZMAError, zstd.ZstdError, WindowTooLarge)  # of what `members` returns


class _Decompressor(Protocol):
  """What the standard library's decompressors have in common."""

  @property
  def eof(self) -> bool: ...

  @property
  def needs_input(self) -> bool: ...

  @property
  def unused_data(self) -> bytes: ...

  def decompress(self, data: bytes, max_length: int) -> bytes: ...


def is_read(name: str) -> bool:
  """Whether a name ends in .xz, .lzma, .bz2 or .zst; .gz is left to `gzip`, which reads all members."""
  return _suffix(name) in _BEGIN


def members(file: BinaryIO, name: str) -> BinaryIO:
  """What all members of a file hold, one after the other; reading raises one of `ERRORS` for a damaged file.

  Args:
    file: the compressed bytes; stays open.
    name: says by its end how they are compressed; `is_read` holds for it.
  """
  return io.BufferedReader(_Members(file, *_BEGIN[_suffix(name)]), CHUNK)


def _suffix(name: str) -> str:
  return os.path.splitext(name)[1].lower()


class _Members(io.RawIOBase):
  def __init__(self, file: BinaryIO, begin: Callable[[bytes], _Decompressor], padding: int):
    """`begin` makes the decompressor of a member from its first bytes; zeros follow it in multiples of `padding`."""
    self._file, self._begin, self._padding = file, begin, padding
    self._member: _Decompressor | None = None
    self._waiting = b""  # read, but not yet given to the member

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    """See `io.RawIOBase`; 0 at the end of the last member."""
    made = b""
    while not made:
      if (self._member is None or self._member.eof) and not self._next():
        return 0
      assert self._member is not None
      data = b""
      if self._member.needs_input:
        data, self._waiting = self._waiting or self._file.read(CHUNK), b""
        if not data:
          raise EOFError("the file ends within compressed data")
      made = self._member.decompress(data, len(buffer))
    buffer[: len(made)] = made
    return len(made)

  def _next(self) -> bool:
    """Begins a member, if there is one more."""
    first = self._member is None
    rest, zeros = b"" if self._member is None else self._member.unused_data, 0
    while True:
      if self._padding and not first:
        kept = rest.lstrip(b"\0")
        zeros += len(rest) - len(kept)
        rest = kept
      if len(rest) >= HEADER or not (more := self._file.read(CHUNK)):
        break
      rest += more
    if self._padding and zeros % self._padding:
      raise lzma.LZMAError(f"{zeros} zero bytes after compressed data, which are not a multiple of {self._padding}")
    if not (rest or first):
      return False
    self._member, self._waiting = self._begin(rest), rest
    return True


def _zstd_frame(first: bytes) -> _Decompressor:
  window = _zstd_window(first)
  if window > MAX_WINDOW:
    raise WindowTooLarge(window)
  limit = MAX_WINDOW.bit_length() - 1
  return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: limit})


def _zstd_window(first: bytes) -> int:
  """The bytes of memory that a frame needs, from its header (RFC 8878, section 3.1.1.1); 0 for what is no frame."""
  if len(first) < 6 or not first.startswith(b"\x28\xb5\x2f\xfd"):
    return 0
  if first[4] & 0x20:  # a single segment: the window is the whole content
    return zstd.get_frame_info(first).decompressed_size or 0
  exponent, mantissa = first[5] >> 3, first[5] & 7
  return (1 << (10 + exponent)) * (8 + mantissa) // 8


_BEGIN: dict[str, tuple[Callable[[bytes], _Decompressor], int]] = {
  ".xz": (lambda first: lzma.LZMADecompressor(lzma.FORMAT_XZ), 4),
  ".lzma": (lambda first: lzma.LZMADecompressor(lzma.FORMAT_ALONE), 0),
  ".bz2": (lambda first: bz2.BZ2Decompressor(), 0),
  ".zst": (_zstd_frame, 0),
}
