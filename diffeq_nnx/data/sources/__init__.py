"""Sources of text: read lazily, by record, in parts that processes can share."""

from collections.abc import Callable, Iterator, Sequence
import difflib
import functools
import os
from typing import Any

from diffeq_nnx.data.documents import Document
from diffeq_nnx.data.sources import catalog, files, hub, parquet, records
from diffeq_nnx.data.sources.records import Counts, Options, Part, name_columns
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import hash_json

KINDS = ("builtin", "text:GLOB", "jsonl:GLOB", "parquet:GLOB", "tfds:NAME/CONFIG:SPLIT", "hf:NAME:SPLIT", "shards:DIR")
_NAMES = tuple(kind.partition(":")[0] for kind in KINDS)
_EXTRAS = {"parquet": "hf"}  # kinds whose packages an extra of another name installs


Parts = Sequence[Part] | Callable[[], Sequence[Part]]  # the second where files are read to know them


class Source:
  """A source whose files are known but not read yet; see `open_source`.

  Attributes:
    source: The source as given by the user.
    counts: Counts of the latest run of `records` or `documents`, updated as it goes.
    read: `read(part, counts=Counts())` yields each record's document in one part, as `records` does, and counts the
      records. It can be pickled.
  """

  def __init__(self, source: str, key: str, options: Options, parts: Parts, state: list):
    self.source, self.counts, self._key, self._parts = source, Counts(), key, parts
    self._prefix, self._options, self._state, self._reported = f"{key}={source}:", options, state, Counts()
    self.read = functools.partial(records.read_checked, prefix=self._prefix, options=options)

  @functools.cached_property
  def parts(self) -> Sequence[Part]:
    """Pieces that any process can read one by one, and that can be pickled. In order they make up the source.

    They and their order depend on the source alone. Raises UserError for a file that a part can't be made of.
    """
    return self._parts() if callable(self._parts) else self._parts

  def records(self) -> Iterator[Document]:
    """Yields each record's document in order, or "" for one that is empty or was skipped as bad.

    One record is held in memory, or 64 of a TFDS data set, or the needed columns of a row group of a Parquet file. At
    the end skipped records are logged in one line. Raises UserError for a bad record, unless `options.bad_records` is
    "skip"; for a file that can't be read to its end; and for a source without text.
    """
    counts = self.counts = Counts()
    for part in self.parts:
      yield from self.read(part, counts=counts)
    self.check(counts)

  def check(self, counts: Counts) -> None:
    """Logs the skipped records of the complete source, and the same counts only once.

    Raises UserError if there was no text.
    """
    if not counts.documents:
      skipped = f" ({counts.describe()})" if counts.num_bad else ""
      raise UserError(f"{self._prefix} holds no text{skipped}; give a source with at least one non-empty document")
    if counts != self._reported:
      counts.warn_of_bad(self._prefix)
      self._reported = counts

  def documents(self) -> Iterator[Document]:
    """Yields those of `records` that aren't empty; raises as `records`."""
    return filter(None, self.records())

  def has_changed(self) -> bool:
    """Whether the source is another one now. What is read at a commit of the hub is not."""
    kind, *state = self._state
    if kind == "hf" and state[0].startswith("hf://"):
      return False
    return open_source(self.source, self._key, self._options).fingerprint() != self.fingerprint()

  def fingerprint(self) -> str:
    """Returns a hash of the source's state, as its resolver gives it, and of reading options, in hex."""
    options = self._options
    state: list[Any] = [self._state, options.text_key, options.bad_records]
    if options.records != "text":
      state += [options.records, list(name_columns(options).values()), options.chat_template]
    return hash_json(state)


def open_source(source: str, key: str = "data.source", options: Options = Options()) -> Source:
  """Finds the files or records of a source without reading them.

  Args:
    source: One of `KINDS` but the last; docs/reference/text.md describes them.
    key: The configuration key that errors name.
    options: How to read it.

  Raises:
    UserError: For an unknown kind, a glob that matches nothing, or a data set that isn't on disk and can't be, or may
      not be, downloaded.
  """
  prefix = f"{key}={source}:"
  kind, colon, rest = source.partition(":")
  if kind in RESOLVERS and bool(colon) == (kind != "builtin") and (rest or kind not in ("tfds", "hf")):
    if options.records != "text" and kind in ("builtin", "text", "tfds"):
      problem = f"data.records={options.records} reads records with keys, which this kind of source does not have"
      raise UserError(f"{prefix} {problem}; use jsonl:GLOB, parquet:GLOB or hf:NAME, or set data.records=text")
    try:
      parts, state = RESOLVERS[kind](rest, prefix, options)
    except ImportError as error:
      problem = f"needs {error.name}, which is not installed; run pip install 'diffeq-nnx[{_EXTRAS.get(kind, kind)}]'"
      raise UserError(f"{prefix} {problem}") from error
    return Source(source, key, options, parts, [kind, *state])
  if "shards:" in source:
    kinds = ", ".join(KINDS[:-1])
    raise UserError(f"{prefix} prepared shards hold tokens, but text is needed here; use one of {kinds}")
  raise UserError(f"{prefix} unknown kind of source; use one of {', '.join(KINDS)}; nearest: {_find_nearest(source)}")


def documents(source: str, key: str = "data.source", options: Options = Options()) -> Iterator[Document]:
  """Yields the documents of a source in order. Arguments and errors are those of `open_source`, `Source.documents`."""
  return open_source(source, key, options).documents()


def _read_topics(prefix: str, options: Options) -> Iterator[str]:
  from pydoc_data.topics import topics  # half a megabyte, needed for this kind only

  return (topics[name] for name in sorted(topics))


RESOLVERS: dict[str, Callable[[str, str, Options], tuple[Parts, list]]] = {
  # kind: (text after the colon, start of error messages, options) -> (parts, JSON value that changes with the source)
  "builtin": lambda rest, prefix, options: (
    [Part("Python's help topics", 1 << 19, _read_topics)],
    [list(_read_topics(prefix, options))],
  ),
  "text": lambda rest, prefix, options: files.resolve("text", rest, prefix),
  "jsonl": lambda rest, prefix, options: files.resolve("jsonl", rest, prefix),
  "parquet": parquet.resolve,
  "tfds": catalog.resolve,
  "hf": hub.resolve,
}


def _find_nearest(source: str) -> str:
  """Returns the valid source that is most similar."""
  kind, colon, rest = source.partition(":")
  if not colon and (os.sep in source or "." in source) or rest.startswith("//"):
    return f"{'jsonl' if '.json' in source else 'parquet' if '.parquet' in source else 'text'}:{source}"
  name = difflib.get_close_matches(kind.lower(), _NAMES, n=1, cutoff=0.0)[0]
  return name if name == "builtin" else f"{name}:{rest or dict(zip(_NAMES, KINDS))[name].partition(':')[2]}"
