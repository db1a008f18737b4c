"""What the kinds of source share: options, records that can't be used, and counts of all records."""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import json
from typing import Any, Protocol

from diffeq_nnx.errors import UserError

# Added to errors in records, which have two ways out: repair the data, or do without the record.
_SKIP = "or set data.bad_records=skip to skip and count such records"


@dataclasses.dataclass(frozen=True)
class Options:
  """How the records of a source are read; the fields are the keys of `config.DataConfig` with these names."""

  text_key: str = "text"
  bad_records: str = "error"
  tfds_dir: str | None = None
  download: bool = False


@dataclasses.dataclass
class Counts:
  """Numbers of records read: `records` is the sum of `documents`, `empty` and `num_bad`."""

  records: int = 0  # blank lines between JSON records don't count
  documents: int = 0  # records with text
  empty: int = 0  # records whose text is the empty string
  bad: dict[str, int] = dataclasses.field(default_factory=dict)  # skipped records, by reason
  examples: dict[str, str] = dataclasses.field(default_factory=dict)  # the place of the first one, by reason

  def add(self, other: "Counts") -> None:
    """Adds the counts of a later part."""
    self.records += other.records
    self.documents += other.documents
    self.empty += other.empty
    self.bad = dict(collections.Counter(self.bad) + collections.Counter(other.bad))
    self.examples = other.examples | self.examples

  @property
  def num_bad(self) -> int:
    """Records that can't be used, for any reason."""
    return sum(self.bad.values())

  def describe(self) -> str:
    """Words the counts as part of a message."""
    reasons = [f"{number} {reason} (first: {self.examples[reason]})" for reason, number in self.bad.items()]
    return f"{self.num_bad} of {self.records} records skipped as bad: {'; '.join(reasons) or 'none'}"


@dataclasses.dataclass(frozen=True)
class BadRecord:
  """Takes the place of the text of a record that can't be used."""

  reason: str  # the kind of problem, worded to follow a number, as in "3 not UTF-8"
  where: str  # file and line, or data set and index
  detail: str  # the problem of this record, the rule, and the way to repair it


@dataclasses.dataclass(frozen=True)
class Problem:
  """Why the fields of a record give no document; the parts of a `BadRecord` without the place."""

  reason: str
  detail: str


def columns(options: Options) -> list[str]:
  """Returns the fields that `read_document` looks at, which are the columns that a table needs to have."""
  return [options.text_key]


def read_document(record: Mapping[str, Any], options: Options) -> str | Problem:
  """Returns the document that a record of named fields holds, as every kind of source with such records does."""
  key = json.dumps(options.text_key)
  rule = make_rule(options)
  if options.text_key not in record:
    names = ", ".join(map(repr, list(record)[:10])) or "none"
    return Problem(f"without key {key}", f"no key {key} (its keys: {names}); {rule}; data.text_key names the key")
  text = record[options.text_key]
  if not isinstance(text, str):
    return Problem(f"where {key} is not a string", f"{key} is of type {type(text).__name__}, not a string; {rule}")
  try:
    text.encode()  # JSON escapes can spell half a surrogate pair, which UTF-8 can't hold
  except UnicodeEncodeError as error:
    return Problem("with a lone surrogate", f"{key} holds a lone surrogate at character {error.start}; remove it")
  return text


def make_rule(options: Options) -> str:
  """Returns the rule for a record's fields, as a part of messages."""
  return f'each record must be like {{{json.dumps(options.text_key)}: "..."}}'


class Part(Protocol):
  """A piece of a source that any process can read on its own: it holds names, no open files."""

  @property
  def name(self) -> str:
    """A readable name."""

  @property
  def size(self) -> int:
    """The bytes that store it, about; small parts are prepared together."""

  def read(self) -> Iterator[str | BadRecord]:
    """Yields the text of each record in order, or a `BadRecord`; holds one record in memory.

    Raises:
      UserError: If the rest can't be read, so that the number of lost records is unknown.
    """


def read_checked(part: Part, prefix: str, options: Options, counts: Counts) -> Iterator[str]:
  """Yields one string for each record of a part, "" for an empty or bad one, and adds the records to `counts`.

  Raises:
    UserError: For a bad record, unless the options say that they are skipped, and what `part.read` raises. The message
      begins with `prefix`, the key and the source.
  """
  for text in part.read():
    counts.records += 1
    if isinstance(text, BadRecord):
      if options.bad_records == "error":
        raise UserError(f"{prefix} {text.where}: {text.detail}; {_SKIP}")
      counts.bad[text.reason] = counts.bad.get(text.reason, 0) + 1
      counts.examples.setdefault(text.reason, text.where)
      text = ""
    elif text:
      counts.documents += 1
    else:
      counts.empty += 1
    yield text
