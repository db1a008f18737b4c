"""What the kinds of source share: options, records that can't be used, and counts of all records."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import json
from typing import Any

from absl import logging

from diffeq_nnx.config import DataConfig
from diffeq_nnx.data.documents import TEMPLATE_ARGUMENTS, Document, Piece
from diffeq_nnx.data.sources import compressed
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import is_url

# How the records of a source are read. But `chat_template` is the template itself, not its path.
Options = DataConfig


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
    return f"{self.num_bad} of {self.records} records skipped as bad: {'; '.join(reasons)}"

  def warn_of_bad(self, prefix: str) -> None:
    """Logs in one line, which begins with `prefix`, how many records were skipped, if any were."""
    if self.num_bad:
      logging.warning("%s %s", prefix, self.describe())


@dataclasses.dataclass(frozen=True)
class BadRecord:
  """Takes the place of the text of a record that can't be used."""

  reason: str  # the kind of problem, worded to follow a number, as in "3 not UTF-8"
  detail: str  # the problem of this record, the rule, and the way to repair it
  where: str = ""  # file and line, or data set and index


def make_not_utf8(error: UnicodeDecodeError, where: str = "") -> BadRecord:
  """Returns the bad record whose text is not UTF-8."""
  return BadRecord("not UTF-8", f"not UTF-8 ({error.reason}); convert it, for example with iconv", where)


def name_columns(options: Options) -> dict[str, str]:
  """Returns the fields of a record that `read_document` reads, by the configuration keys that name them."""
  if options.records == "completion":
    return {"prompt_key": options.prompt_key, "completion_key": options.completion_key}
  return {"messages_key": options.messages_key} if options.records == "chat" else {"text_key": options.text_key}


def choose_columns(names: Iterable[str], options: Options) -> list[str]:
  """Returns which columns of a table `read_document` reads: beside conversations also arguments for the template."""
  wanted = {*name_columns(options).values(), *(TEMPLATE_ARGUMENTS if options.records == "chat" else [])}
  return [name for name in names if name in wanted]


def read_document(record: Mapping[str, Any], options: Options) -> Document | BadRecord:
  """Returns the document that a record of named fields holds, or a `BadRecord` whose place the source fills in."""
  rule = make_rule(options)
  for name, field in name_columns(options).items():
    key = json.dumps(field)
    if field not in record:
      names = ", ".join(map(repr, list(record)[:10])) or "none"
      return BadRecord(f"without key {key}", f"no key {key} (its keys: {names}); {rule}; data.{name} names the key")
    text = record[field]
    if options.records == "chat":
      break
    if not isinstance(text, str):
      return BadRecord(f"where {key} is not a string", f"{key} is of type {type(text).__name__}, not a string; {rule}")
    try:
      text.encode()  # JSON escapes can spell half a surrogate pair, which UTF-8 can't hold
    except UnicodeEncodeError as error:
      return BadRecord("with a lone surrogate", f"{key} holds a lone surrogate at character {error.start}; remove it")
  if options.records == "text":
    return text
  if options.records == "completion":
    if not text:
      return BadRecord("with an empty completion", f"{key} is empty, so nothing would count; remove the record")
    return Piece(record[options.prompt_key], False), Piece(text, True)
  assert options.chat_template is not None  # which `make_recipe` checks
  from diffeq_nnx.data import chat  # Jinja, which training on plain text doesn't need

  try:
    chat.refuse_arguments(record)
    return chat.compile_template(options.chat_template).divide(text)
  except chat.BadConversation as error:
    return BadRecord(error.reason, str(error))


def make_rule(options: Options) -> str:
  """Returns the rule for a record's fields, as a part of messages."""
  value = '[{"role": "user", "content": "..."}, ...]' if options.records == "chat" else '"..."'
  fields = ", ".join(f"{json.dumps(field)}: {value}" for field in name_columns(options).values())
  return f"each record must be like {{{fields}}}"


@dataclasses.dataclass(frozen=True)
class Part:
  """A piece of a source that any process can read on its own: it can be pickled, and holds no open files.

  `read(prefix, options)` yields the document of each record in order, or a `BadRecord`, and holds one record in memory.
  It raises any error if the rest can't be read, so that the number of lost records is unknown. The message of a
  UserError begins with `prefix`.
  """

  name: str  # a readable one
  size: int  # the bytes that store it, about; small parts are prepared together
  read: Callable[[str, Options], Iterator[Document | BadRecord]]


def read_checked(part: Part, prefix: str, options: Options, counts: Counts) -> Iterator[Document]:
  """Yields one document for each record of a part, "" for an empty or bad one, and adds the records to `counts`.

  Raises UserError for a bad record, unless the options say that they are skipped, and where the part can't be read.
  The message begins with `prefix`, the key and the source.
  """
  with reading(prefix, part.name):
    for document in part.read(prefix, options):
      counts.records += 1
      if isinstance(document, BadRecord):
        if options.bad_records == "error":
          way_out = "or set data.bad_records=skip to skip and count such records"
          raise UserError(f"{prefix} {document.where}: {document.detail}; {way_out}")
        counts.bad[document.reason] = counts.bad.get(document.reason, 0) + 1
        counts.examples.setdefault(document.reason, document.where)
        document = ""
      elif document:
        counts.documents += 1
      else:
        counts.empty += 1
      yield document


def reason(error: BaseException) -> str:
  """Returns what an error says in one line, or its type if it says nothing."""
  return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def reading(prefix: str, name: str) -> Iterator[None]:
  """A context of code that reads a file or part, whose errors become UserErrors that begin with `prefix`."""
  try:
    yield
  except UserError:
    raise
  except IsADirectoryError as error:
    remedy = f"name files in it, as in {name.rstrip('/')}/*"
    raise UserError(f"{prefix} {name} is a directory, not a file; {remedy}") from error
  except Exception as error:  # each file system and format has errors of its own
    problem = reason(error)
    if isinstance(error, OSError) and error.strerror:
      problem, remedy = error.strerror, "make it readable or narrow the glob"
    elif isinstance(error, compressed.zstd.ZstdError) and "too much memory" in str(error):
      problem = "its zstd window is larger than 2 GiB"
      remedy = "compress it again with a smaller window, as --long=27"
    elif is_url(name):
      remedy = "check the network, or restore the file"
    else:
      remedy = "it is damaged or truncated: restore it"
    raise UserError(f"{prefix} {name} can't be read ({problem}); {remedy}") from error
