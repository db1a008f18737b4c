"""The source `parquet:GLOB`: Parquet files, local or by URL. A part is one row group of one file.

The package `datasets` reads Parquet too, but a process that stops reading before the end may then hang when it exits.

`read_rows` is for every source that holds tables of Arrow.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
from typing import Any

from diffeq_nnx.data.documents import Document
from diffeq_nnx.data.sources import files, records
from diffeq_nnx.data.sources.records import BadRecord, Options, Part
from diffeq_nnx.errors import UserError

BATCH_ROWS = 64  # rows that are decoded at a time


def read_file(
  path: str, index: int | None, start: int, prefix: str, options: Options
) -> Iterator[Document | BadRecord]:
  """Reads a row group of a file, before which there are `start` rows, or all of them; see `records.Part`."""
  with _open(path, prefix, options) as file:
    needed = records.choose_columns(file.schema_arrow.names, options)
    # threads of Arrow might still use the file when Python ends
    read = functools.partial(file.iter_batches, BATCH_ROWS, columns=needed, use_threads=False)
    groups = range(file.num_row_groups) if index is None else [index]
    batches = (batch for group in groups for batch in read(row_groups=[group]))
    yield from read_rows(batches, path, start, prefix, options)


def resolve(globs: str, prefix: str, options: Options) -> tuple[Callable[[], list[Part]], list]:
  """Finds the files that a source names, as `files.list_files` does. Their footers are read when the parts are needed.

  Raises:
    ImportError: If pyarrow isn't installed.
    UserError: For what `files.list_files` refuses.
  """
  import pyarrow.parquet  # noqa: F401  (its lack is told here, and not when the first file is read)

  found, state = files.list_files("parquet", globs, prefix)
  return functools.partial(_list_row_groups, [path for path, _ in found], prefix, options), state


def _list_row_groups(paths: list[str], prefix: str, options: Options) -> list[Part]:
  """Reads the footer of each file; raises UserError for one that isn't Parquet, is damaged, or lacks a column."""
  parts = []
  for path in paths:
    with _open(path, prefix, options) as file:
      start = 0
      for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        read = functools.partial(read_file, path, index, start)
        parts.append(Part(f"{path} row group {index}", group.total_byte_size, read))
        start += group.num_rows
  return parts


@contextlib.contextmanager
def _open(path: str, prefix: str, options: Options) -> Iterator[Any]:
  """Yields a `pyarrow.parquet.ParquetFile`; what goes wrong with it is a UserError."""
  import pyarrow.parquet

  with records.reading(prefix, path), files.open_bytes(path) as content:
    if content.read(4) != b"PAR1":
      raise UserError(f"{prefix} {path} is not a Parquet file; name Parquet files, or narrow the glob")
    with pyarrow.parquet.ParquetFile(content) as file:
      _check_columns(file.schema_arrow.names, path, prefix, options)
      yield file


def _check_columns(names: Sequence[str], where: str, prefix: str, options: Options) -> None:
  """Raises UserError if a table, that `where` names, lacks a column that a document is made of."""
  for key, column in records.name_columns(options).items():
    if column not in names:
      there = ", ".join(map(repr, names[:30])) or "none"
      problem = f"no column {json.dumps(column)} (its columns: {there}); {records.make_rule(options)}"
      raise UserError(f"{prefix} {where} has {problem}; data.{key} names the column")


def read_rows(
  tables: Iterator[Any], where: str, start: int, prefix: str, options: Options
) -> Iterator[Document | BadRecord]:
  """Yields the document, or a `BadRecord`, of each row of Arrow's tables, before which `where` has `start` rows.

  Raises UserError, which begins with `prefix`, if a table lacks a column.
  """
  for table in tables:
    _check_columns(table.schema.names, where, prefix, options)
    arrays = {column: table[column] for column in records.choose_columns(table.schema.names, options)}
    for row in range(table.num_rows):
      start += 1
      try:
        record = {name: _decode(array[row].as_py(), array.type) for name, array in arrays.items()}
        document = records.read_document(record, options)
      except UnicodeDecodeError as error:  # any bytes can be in a column of text
        document = records.make_not_utf8(error)
      if isinstance(document, BadRecord):
        document = dataclasses.replace(document, where=f"{where} row {start}")
      yield document


def _decode(value: Any, kind: Any) -> Any:
  """Returns a value of Arrow's type `kind` as the record had it, which was written to a column of this type.

  A field of a struct that is null is left out, since a column has each field in each row. Values of several types are
  in a column as JSON.
  """
  if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
    return json.loads(value)
  if isinstance(value, list) and hasattr(kind, "item_type"):  # of a map: pairs of a key and its value
    return {key: _decode(one, kind.item_type) for key, one in value}
  if isinstance(value, list) and hasattr(kind, "value_type"):
    return [_decode(one, kind.value_type) for one in value]
  if isinstance(value, dict):
    return {name: _decode(one, kind.field(name).type) for name, one in value.items() if one is not None}
  return value
