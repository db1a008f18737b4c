"""Compressed files as a stream of what they hold. Every member counts, and bytes that are no member are an error.

The standard library's readers of xz and bz2 end without an error where a later member is damaged. Its decompressors
read one member each, and this module goes from member to member. Importing it makes fsspec read .xz, .lzma, .bz2 and
.zst files so, for `datasets` too, as streams that can't seek. A .gz file is left to `gzip`, which reads all members.
"""

import bz2
from collections.abc import Callable
import functools
import io
import lzma
import sys
from typing import Any, BinaryIO

import fsspec

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd

_CHUNK = 2**17  # compressed bytes that are read at a time
_WINDOW = zstd.DecompressionParameter.window_log_max
_MAX_WINDOW_LOG = _WINDOW.bounds()[1]  # 31, which is 2 GiB, where addresses have 64 bits
# By fsspec's name of a compression, the ends of files that have it, and what makes the decompressor of a member.
_DECOMPRESSORS: dict[str, tuple[str, Callable[[], Any]]] = {
  "xz": ("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
  "lzma": ("lzma", lzma.LZMADecompressor),  # of either format, since fsspec writes xz into such files
  "bz2": ("bz2", bz2.BZ2Decompressor),
  "zstd": ("zst", lambda: zstd.ZstdDecompressor(options={_WINDOW: _MAX_WINDOW_LOG})),
}


class _Members(io.RawIOBase):
  """The content of all members of a file, which closes with it.

  Zero bytes in multiples of four may follow a member if it is `padded`.
  """

  def __init__(self, file: BinaryIO, make_decompressor: Callable[[], Any], padded: bool):
    self._file, self._make_decompressor, self._padded = file, make_decompressor, padded
    self._member = make_decompressor()  # None after the last member

  def readable(self) -> bool:
    return True

  def close(self) -> None:
    self._file.close()
    super().close()

  def readinto(self, buffer: Any) -> int:
    made = b""
    while self._member is not None and not made:
      data = b""
      if self._member.eof:
        data = self._read_next_member()
        self._member = self._make_decompressor() if data else None
      elif self._member.needs_input:
        data = self._file.read(_CHUNK)
        if not data:
          raise EOFError("the file ends within compressed data")
      if self._member is not None:
        made = self._member.decompress(data, len(buffer))
    buffer[: len(made)] = made
    return len(made)

  def _read_next_member(self) -> bytes:
    """Returns bytes from the beginning of the next member, after any padding; b"" if there is none."""
    data, num_zeros = self._member.unused_data or self._file.read(_CHUNK), 0
    while self._padded and data.startswith(b"\0"):
      rest = data.lstrip(b"\0")
      num_zeros += len(data) - len(rest)
      data = rest or self._file.read(_CHUNK)
    if num_zeros % 4:
      raise lzma.LZMAError(f"{num_zeros} zero bytes after compressed data, which are not a multiple of 4")
    return data


def _open(name: str, write: Callable[..., Any] | None, file: BinaryIO, mode: str = "rb", **options: Any) -> Any:
  """Opens a file that has the compression `name` for reading, or with `write`, which is fsspec's own way."""
  if "r" not in mode:
    if write is None:
      raise ValueError(f"fsspec has no package to write files compressed with {name}")
    return write(file, mode=mode, **options)
  return io.BufferedReader(_Members(file, _DECOMPRESSORS[name][1], padded=name == "xz"), _CHUNK)


for _name, (_end, _) in _DECOMPRESSORS.items():
  _opens = functools.partial(_open, _name, fsspec.compression.compr.get(_name))
  fsspec.compression.register_compression(_name, _opens, _end, force=True)
