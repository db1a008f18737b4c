"""What the kinds of source share: how to read, what becomes of a bad record, and the count of them all."""

from collections.abc import Iterator
import dataclasses
from typing import Protocol

from diffeq_nnx.errors import UserError

# Printed with errors in records, where there are two ways out: mending the data, and doing without.
_SKIP = "or set data.bad_records=skip to pass over such records and count them"


@dataclasses.dataclass(frozen=True)
class Options:
  """How the records of a source are read.

  Attributes:
    text_key: The key of a JSON object, or the feature of a TFDS data set, that holds the text.
    bad_records: "error": stop at the first record that can't be used; "skip": pass over it and count it.
    tfds_dir: Where TFDS data sets lie; None for TFDS's own default, ~/tensorflow_datasets.
    download: Whether a TFDS data set that isn't there may be downloaded and prepared.
  """

  text_key: str = "text"
  bad_records: str = "error"
  tfds_dir: str | None = None
  download: bool = False


@dataclasses.dataclass
class Counts:
  """What became of the records that were read: `records` is the sum of the three others.

  Attributes:
    records: All records met. A blank line between JSON records is none.
    documents: Records with text.
    empty: Records whose text is the empty string, which are passed over.
    bad: Records passed over because they can't be used, by reason.
    examples: For each reason in `bad`, where the first such record is.
  """

  records: int = 0
  documents: int = 0
  empty: int = 0
  bad: dict[str, int] = dataclasses.field(default_factory=dict)
  examples: dict[str, str] = dataclasses.field(default_factory=dict)

  def add(self, other: "Counts") -> None:
    """Adds the counts of a later part."""
    self.records += other.records
    self.documents += other.documents
    self.empty += other.empty
    for reason, number in other.bad.items():
      self.bad[reason] = self.bad.get(reason, 0) + number
      self.examples.setdefault(reason, other.examples[reason])

  @property
  def num_bad(self) -> int:
    """Records passed over because they can't be used, for any reason."""
    return sum(self.bad.values())

  def line(self) -> str:
    """The counts as part of a line of a report."""
    reasons = [f"{number} {reason} (first: {self.examples[reason]})" for reason, number in self.bad.items()]
    return f"{self.num_bad} of {self.records} records passed over as bad: {'; '.join(reasons) or 'none'}"


@dataclasses.dataclass(frozen=True)
class BadRecord:
  """What stands in place of the text of a record that can't be used.

  Attributes:
    reason: What is wrong, in words that many records can share; goes after a number, as in "3 not UTF-8".
    where: File and line, or data set and index.
    detail: What is wrong with this one, the rule, and how to mend it.
  """

  reason: str
  where: str
  detail: str


class Part(Protocol):
  """A piece of a source that can be read by itself, in any process: it holds names, no open files.

  Attributes:
    name: What it is, for people.
  """

  name: str

  def read(self) -> Iterator[str | BadRecord]:
    """Yields each record's text, or what is wrong with it, in order; one record is held in memory.

    Raises:
      UserError: When the rest can't be read at all, so that nobody can tell how much is lost.
    """


def checked(part: Part, prefix: str, options: Options, counts: Counts) -> Iterator[str]:
  """Yields one string for each record of a part, "" for an empty or bad one, and counts them.

  Args:
    part: What to read.
    prefix: How an error line begins: the key and the source.
    options: Whether bad records are errors.
    counts: Grows with each record.

  Raises:
    UserError: For a bad record, unless they are to be skipped; and what `part.read` raises.
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
