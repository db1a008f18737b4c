"""Where text comes from: kinds of source, read lazily, by record, in parts that processes can share."""

from collections.abc import Callable, Iterator
import dataclasses
import difflib
import functools
import hashlib
import json
import os

from absl import logging

from diffeq_nnx.data.sources import catalogue, files, records
from diffeq_nnx.data.sources.records import BadRecord, Counts, Options, Part
from diffeq_nnx.errors import UserError

__all__ = ["BadRecord", "Counts", "Options", "Part", "Source", "documents", "fingerprint", "open_source"]

KINDS = ("builtin", "text:GLOB", "jsonl:GLOB", "tfds:NAME/CONFIG:SPLIT", "shards:DIR")
_NAMES = tuple(kind.partition(":")[0] for kind in KINDS)


class Source:
  """A source whose files are known but not read yet; see `open_source`.

  Attributes:
    source: As it was written.
    parts: Pieces that can be read one by one in any process; one after the other they are the whole. They and
      their order depend on the source alone. Parts hold names only and can be pickled.
    counts: What became of the records, as far as `records` or `documents` has come on its newest run.
    read: read(part, counts=Counts()) yields each record's text in one part, as `records` does, and counts them. It
      can be pickled.
  """

  def __init__(self, source: str, key: str, options: Options, parts: list[Part], state: list):
    self.source, self.parts, self.counts = source, parts, Counts()
    self._prefix, self._options, self._state, self._told = f"{key}={source}:", options, state, Counts()
    self.read = functools.partial(records.checked, prefix=self._prefix, options=options)

  def records(self) -> Iterator[str]:
    """Yields each record's text in order, "" for one that is empty or passed over as bad.

    A record's place in this order is its index, whatever is wrong with others. One record is held in memory
    (of a TFDS data set, 64). At the end one line on the log says what was passed over, once for each outcome.

    Raises:
      UserError: For a bad record, unless `options.bad_records` is "skip"; for a file that can't be read to
        its end; and for a source with no text at all.
    """
    counts = self.counts = Counts()
    for part in self.parts:
      yield from self.read(part, counts=counts)
    self.check(counts)

  def check(self, counts: Counts) -> None:
    """Tells what was passed over, once for each outcome, at the end of all parts.

    Raises:
      UserError: If there was no text at all.
    """
    if not counts.documents:
      told = f" ({counts.line()})" if counts.num_bad else ""
      raise UserError(
        f"{self._prefix} holds no text at all{told}; give a source with at least one non-empty document"
      )
    if counts.num_bad and counts != self._told:
      logging.warning("%s %s", self._prefix, counts.line())
      self._told = counts

  def documents(self) -> Iterator[str]:
    """Yields the texts of `records` that aren't empty; raises what it raises."""
    return filter(None, self.records())

  def fingerprint(self) -> str:
    """Tells one state of the source, and one way of reading it, from another without reading its files.

    Returns:
      The hex SHA-256 of the options that matter and of: for `text` and `jsonl`, each file's name, size
      (bytes) and modification time (ns), or what a bucket says of its version; for `tfds`, the name with its
      version, the directory, the split, and the size and time of each of its files; for `builtin`, the text.
    """
    state = [self._state, self._options.text_key, self._options.bad_records]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def open_source(source: str, key: str = "data.source", options: Options = Options()) -> Source:
  """Finds what a source names, without reading it.

  Args:
    source: One of
      `builtin`: the prose of Python's own help topics;
      `text:GLOB`: each file one document, UTF-8;
      `jsonl:GLOB`: one JSON object a line, its text under `options.text_key`; GLOB may be several paths or
        globs separated by commas, `~` expands, URLs like `gs://bucket/*.jsonl.gz` are read through fsspec,
        and `.gz`, `.xz` and `.zst` files directly;
      `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`: a TFDS data set, its text in the feature `options.text_key`.
    key: The configuration key that errors name.
    options: How to read it.

  Raises:
    UserError: For an unknown kind, a glob that matches nothing, or a data set that isn't on disk and can't
      be, or may not be, downloaded.
  """
  prefix = f"{key}={source}:"
  kind, colon, rest = source.partition(":")
  if kind in RESOLVERS and bool(colon) == (kind != "builtin") and source != "tfds:":
    parts, state = RESOLVERS[kind](rest, prefix, options)
    return Source(source, key, options, parts, [kind, *state])
  if "shards:" in source:
    kinds = ", ".join(KINDS[:-1])
    raise UserError(f"{prefix} prepared shards hold tokens, and here text is wanted; use one of {kinds}")
  raise UserError(
    f"{prefix} unknown kind of source; use one of {', '.join(KINDS)}; nearest: {_nearest(source)}"
  )


def documents(source: str, key: str = "data.source", options: Options = Options()) -> Iterator[str]:
  """Yields the documents of a source, one at a time, in an order that depends on the source alone.

  Args and what is raised are those of `open_source`, at the call, and of `Source.documents`, while iterating.
  """
  return open_source(source, key, options).documents()


def fingerprint(source: str, key: str = "data.source", options: Options = Options()) -> str:
  """`Source.fingerprint` of `open_source`; raises what that raises."""
  return open_source(source, key, options).fingerprint()


@dataclasses.dataclass(frozen=True)
class _Builtin:
  name: str = "Python's help topics"

  def read(self) -> Iterator[str]:
    return _topics()


def _topics() -> Iterator[str]:
  from pydoc_data.topics import topics  # half a megabyte, needed for this kind only

  return (topics[name] for name in sorted(topics))


def _resolve_builtin(rest: str, prefix: str, options: Options) -> tuple[list[Part], list]:
  del rest, prefix, options
  return [_Builtin()], [list(_topics())]


def _resolve_files(kind: str, rest: str, prefix: str, options: Options) -> tuple[list[Part], list]:
  parts = files.resolve(kind, rest, prefix, options)
  return parts, [file.state() for file in parts]


def _resolve_tfds(rest: str, prefix: str, options: Options) -> tuple[list[Part], list]:
  opened = catalogue.resolve(rest, prefix, options)
  return opened.parts, list(opened.state)


RESOLVERS: dict[str, Callable[[str, str, Options], tuple[list[Part], list]]] = {
  # kind: (what follows its colon, how an error line begins, options) -> parts, and what tells one state of the source
  # from another, as JSON
  "builtin": _resolve_builtin,
  "text": functools.partial(_resolve_files, "text"),
  "jsonl": functools.partial(_resolve_files, "jsonl"),
  "tfds": _resolve_tfds,
}


def _nearest(source: str) -> str:
  """The source that the writer most likely meant."""
  kind, colon, rest = source.partition(":")
  if not colon and (os.sep in source or "." in source) or rest.startswith("//"):
    return f"{'jsonl' if '.json' in source else 'text'}:{source}"
  name = difflib.get_close_matches(kind.lower(), _NAMES, n=1, cutoff=0.0)[0]
  return name if name == "builtin" else f"{name}:{rest or dict(zip(_NAMES, KINDS))[name].partition(':')[2]}"
