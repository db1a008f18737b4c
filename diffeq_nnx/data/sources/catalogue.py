"""The source `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`: TFDS data sets on disk, read without TensorFlow.

They are read through TFDS' data sources, which need files in the array_record format. A part is a run of
records.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import difflib
import os
import re
import sys
from typing import Any

from absl import logging

from diffeq_nnx.data.sources.records import BadRecord, Options
from diffeq_nnx.errors import UserError, first_line

RECORDS_PER_PART = 1 << 14  # enough that opening the files doesn't count, few enough to share out
_RECORDS_PER_READ = 64  # held in memory at a time
_VERSION = re.compile(r"[\d*]+\.[\d*]+\.[\d*]+")
_BUILD = "tfds build {name} --file_format=array_record --data_dir={directory}"


@dataclasses.dataclass(frozen=True)
class Records:
  """A run of records of a data set as a part of a source.

  Attributes:
    directory: Where the prepared data set lies.
    dataset: Its name, configuration and version.
    split: TFDS' split expression.
    start: The first record's index in the split.
    stop: One more than the last record's.
    prefix: How an error line begins.
    text_key: The feature that holds the text.
  """

  directory: str
  dataset: str
  split: str
  start: int
  stop: int
  prefix: str
  text_key: str = "text"

  @property
  def name(self) -> str:
    """See `records.Part`."""
    return f"{self.dataset}:{self.split} records {self.start} to {self.stop - 1}"

  def read(self) -> Iterator[str | BadRecord]:
    """See `records.Part.read`."""
    for start in range(self.start, self.stop, _RECORDS_PER_READ):
      indices = list(range(start, min(start + _RECORDS_PER_READ, self.stop)))
      try:
        if start == self.start:
          import tensorflow_datasets as tfds

          data_source = tfds.builder_from_directory(self.directory).as_data_source(self.split)
        examples = data_source.__getitems__(indices)
      except Exception as error:  # array_record and protobuf have errors of their own
        raise UserError(
          f"{self.prefix} {self.dataset}:{self.split} records {indices[0]} to {indices[-1]} can't be read "
          f"({_first_line(error)}): damaged or gone; prepare {self.directory} again"
        ) from error
      for index, example in zip(indices, examples):
        yield self._text(index, example[self.text_key])

  def _text(self, index: int, data: bytes) -> str | BadRecord:
    try:
      return data.decode("utf-8")
    except UnicodeDecodeError as error:
      where = f"{self.dataset}:{self.split} record {index}"
      detail = f"{self.text_key!r} is not UTF-8 ({error.reason}); mend the data set"
      return BadRecord("not UTF-8", where, detail)


@dataclasses.dataclass(frozen=True)
class Opened:
  """A data set's parts, and what changes when it does."""

  parts: list[Records]
  state: list


def resolve(name: str, prefix: str, options: Options) -> Opened:
  """Finds a data set on disk, downloading and preparing it first where the options allow that.

  Args:
    name: `NAME[/CONFIG][:VERSION][:SPLIT]`; SPLIT is any of TFDS' expressions, like `train[:1%]`; by default
      `train`. Without VERSION it is the newest on disk.
    prefix: How an error line begins.
    options: Where data sets lie, whether to download, and which feature holds the text.

  Raises:
    UserError: If TFDS isn't installed, there is no such data set, split or feature, its files have another
      format, or it can't be downloaded.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise UserError(
      f"{prefix} needs {error.name}, which is not installed; run pip install 'diffeq-nnx[tfds]'"
    ) from error
  dataset, _, split = name.partition(":")
  if _VERSION.fullmatch(split.partition(":")[0]):
    version, _, split = split.partition(":")
    dataset = f"{dataset}:{version}"
  split = split or "train"
  directory = os.path.abspath(os.path.expanduser(options.tfds_dir or tfds.core.constants.DATA_DIR))
  if "://" in (options.tfds_dir or ""):
    raise UserError(
      f"data.tfds_dir={options.tfds_dir}: array_record files are read from a file system, not from a URL; "
      "mount the bucket, for example with gcsfuse, or copy the data set"
    )
  builder = _find(tfds, dataset, directory, prefix)
  if builder is None:
    builder = _prepare(tfds, dataset, directory, prefix, options)
  _check_feature(tfds, builder, prefix, options)
  return _open(builder, dataset, split, prefix, options)


def _find(tfds: Any, dataset: str, directory: str, prefix: str) -> Any | None:
  """The data set as it lies on disk, whether or not TFDS knows how to make it; None if it doesn't."""
  try:
    return tfds.core.read_only_builder.builder_from_files(dataset, data_dir=directory)
  except tfds.core.DatasetNotFoundError:
    return None
  except Exception as error:
    raise UserError(
      f"{prefix} {dataset!r} can't be opened in {directory} ({_first_line(error)}); write "
      "tfds:NAME/CONFIG:SPLIT, as in tfds:wiki40b/en:train"
    ) from error


def _prepare(tfds: Any, dataset: str, directory: str, prefix: str, options: Options) -> Any:
  """Downloads and prepares a data set of the catalogue, and says so first."""

  build = _BUILD.format(name=dataset, directory=directory)
  try:
    builder = tfds.builder(dataset, data_dir=directory)
  except Exception as error:
    known = tfds.list_builders(with_community_datasets=False)  # those would be asked for over the network
    names = difflib.get_close_matches(dataset.partition("/")[0], known, n=1)
    nearest = f"; nearest in the catalogue: {names[0]}" if names else ""
    raise UserError(
      f"{prefix} {dataset} is not in {directory}, and TFDS has no way to make it ({_first_line(error)}); "
      f"name the directory that holds it in data.tfds_dir{nearest}"
    ) from error
  full_name, size = builder.info.full_name, builder.info.download_size
  what = f"{full_name} ({size if size else 'of a size that TFDS does not tell'})"
  if not options.download:
    # The command knows no data sets but TFDS' own.
    run = f" run {build}," if type(builder).__module__.startswith("tensorflow_datasets.") else ""
    raise UserError(
      f"{prefix} {full_name} is not in {directory}; set data.download=True to download {what} and prepare it "
      f"there,{run} or name the directory that holds it in data.tfds_dir"
    )
  logging.warning("%s downloading %s and preparing it in %s", prefix, what, directory)
  try:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is kept for results
      builder.download_and_prepare(file_format="array_record")
  except ImportError as error:
    raise UserError(
      f"{prefix} {full_name} can't be prepared without {error.name}; prepare it once where that is "
      f"installed, with {build}: reading it needs no such package"
    ) from error
  except Exception as error:
    raise UserError(
      f"{prefix} {full_name} can't be downloaded to {directory} ({type(error).__name__}: "
      f"{_first_line(error)}); look at the network and the disk, or name a directory that holds it in "
      "data.tfds_dir"
    ) from error
  return builder


def _check_feature(tfds: Any, builder: Any, prefix: str, options: Options) -> None:
  """Sees that the text is where `data.text_key` says."""
  features = builder.info.features
  features = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
  if not isinstance(features.get(options.text_key), tfds.features.Text):
    texts = ", ".join(sorted(name for name in features if isinstance(features[name], tfds.features.Text)))
    raise UserError(
      f"data.text_key={options.text_key}: {prefix} {builder.info.full_name} has no text feature of that name"
      f"; {f'use one of {texts}' if texts else 'it has no text at all: choose another data set'}"
    )


def _open(builder: Any, dataset: str, split: str, prefix: str, options: Options) -> Opened:
  """Cuts a split into parts."""
  info, directory = builder.info, os.fspath(builder.data_path)
  try:
    data_source = builder.as_data_source(split)
    num_records = len(data_source)
    shards = [
      (os.path.basename(shard.filename), shard.skip, shard.take, stat.st_size, stat.st_mtime_ns)
      for shard in info.splits[split].file_instructions
      for stat in [os.stat(shard.filename)]
    ]
  except NotImplementedError as error:
    found = info.file_format.value if info.file_format else "an unknown format"
    raise UserError(
      f"{prefix} {info.full_name} lies in {directory} as {found}, which needs TensorFlow; prepare it again "
      f"with {_BUILD.format(name=dataset, directory='ANOTHER_DIRECTORY')}"
    ) from error
  except OSError as error:
    raise UserError(
      f"{prefix} {info.full_name} in {directory} can't be read ({error.strerror or _first_line(error)}); "
      "remove it and prepare it again"
    ) from error
  except ValueError as error:
    if not _holds_none(info, split):
      raise UserError(
        f"{prefix} {info.full_name} has no split {split!r} ({_first_line(error)}); use one of "
        f"{', '.join(info.splits)}, or parts of them like train[:1%]"
      ) from error
    num_records = 0
  if not num_records:
    raise UserError(f"{prefix} split {split!r} of {info.full_name} holds no records; name a larger one")
  parts = [
    Records(directory, info.full_name, split, start, min(start + RECORDS_PER_PART, num_records), prefix,
            options.text_key)
    for start in range(0, num_records, RECORDS_PER_PART)
  ]  # fmt: skip
  return Opened(parts, [info.full_name, directory, split, shards])


def _holds_none(info: Any, split: str) -> bool:
  """Whether a split is there and empty, which TFDS refuses in words about paths."""
  try:
    return info.splits[split].num_examples == 0
  except (ValueError, KeyError):
    return False


def _first_line(error: BaseException) -> str:
  """TFDS adds paragraphs of advice to its errors."""
  return first_line(error).rstrip(".:")
