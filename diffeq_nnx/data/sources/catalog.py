"""The source `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`: TFDS data sets on disk, read without TensorFlow.

They are read through TFDS's data sources, which need files in the array_record format. A part is a range of records.
"""

from collections.abc import Iterator
import contextlib
import difflib
import functools
import os
import re
import sys
from typing import Any

from absl import logging

from diffeq_nnx.data.sources.records import BadRecord, Options, Part, make_not_utf8
from diffeq_nnx.errors import UserError, first_line

RECORDS_PER_PART = 1 << 14  # large enough to make opening the files cheap, small enough to distribute parts
_RECORDS_PER_READ = 64  # held in memory at a time
_VERSION = re.compile(r"[\d*]+\.[\d*]+\.[\d*]+")
_BUILD = "tfds build {name} --file_format=array_record --data_dir={directory}"


def _read(
  directory: str, dataset: str, split: str, indices: range, prefix: str, options: Options
) -> Iterator[str | BadRecord]:
  """Reads records of a split of the data set that was prepared in a directory; see `records.Part`."""
  data_source = _tfds().builder_from_directory(directory).as_data_source(split)
  for at in range(0, len(indices), _RECORDS_PER_READ):
    some = list(indices[at : at + _RECORDS_PER_READ])
    for index, example in zip(some, data_source.__getitems__(some)):
      try:
        text = example[options.text_key].decode()
      except UnicodeDecodeError as error:
        text = make_not_utf8(error, f"{dataset}:{split} record {index}")
      yield text


@functools.cache
def _tfds() -> Any:
  """Returns TFDS, which then refuses to import whatever module the features.json of a data set names."""
  import tensorflow_datasets as tfds

  connector = tfds.features.FeatureConnector
  class_of = connector.cls_from_name

  def find_class(cls: Any, name: str) -> Any:
    if name not in cls._registered_features and not name.startswith("tensorflow_datasets."):
      raise ValueError(f"features.json names the class {name!r}, which is none of TFDS")
    return class_of(name)

  connector.cls_from_name = classmethod(find_class)
  return tfds


def resolve(name: str, prefix: str, options: Options) -> tuple[list[Part], list]:
  """Finds a data set on disk, or downloads and prepares it where the options allow that; see `sources.RESOLVERS`.

  `name` is `NAME[/CONFIG][:VERSION][:SPLIT]`, by default the newest version on disk, and the split `train`. SPLIT is
  any of TFDS's expressions, like `train[:1%]`.

  Raises:
    ImportError: If TFDS isn't installed.
    UserError: If there is no such data set, split or feature, its files have another format, or it can't be downloaded.
  """
  tfds = _tfds()
  dataset, _, split = name.partition(":")
  if _VERSION.fullmatch(split.partition(":")[0]):
    version, _, split = split.partition(":")
    dataset = f"{dataset}:{version}"
  if "://" in (options.tfds_dir or ""):
    raise UserError(
      f"data.tfds_dir={options.tfds_dir}: array_record files are read from a file system, not from a URL; "
      "mount the bucket, for example with gcsfuse, or copy the data set"
    )
  directory = os.path.abspath(os.path.expanduser(options.tfds_dir or tfds.core.constants.DATA_DIR))
  try:
    builder = tfds.core.read_only_builder.builder_from_files(dataset, data_dir=directory)
  except tfds.core.DatasetNotFoundError:
    builder = _prepare(tfds, dataset, directory, prefix, options)
  except Exception as error:
    raise UserError(
      f"{prefix} {dataset!r} can't be opened in {directory} ({_reason(error)}); write tfds:NAME/CONFIG:SPLIT, as in "
      "tfds:wiki40b/en:train"
    ) from error
  _check_feature(tfds, builder.info, prefix, options)
  if not builder.info.available_file_formats() & tfds.core.FileFormat.with_random_access():
    found = builder.info.file_format.value if builder.info.file_format else "an unknown format"
    raise UserError(
      f"{prefix} {builder.info.full_name} is stored in {os.fspath(builder.data_path)} as {found}, which needs "
      f"TensorFlow; prepare it again with {_BUILD.format(name=dataset, directory='ANOTHER_DIRECTORY')}"
    )
  return _divide(builder, split or "train", prefix)


def _prepare(tfds: Any, dataset: str, directory: str, prefix: str, options: Options) -> Any:
  """Logs that a data set will be downloaded, downloads and prepares it."""
  import tensorflow_datasets.text  # noqa: F401  registers data sets that tfds alone does not

  from diffeq_nnx.data.sources import wikitext103  # noqa: F401  registers itself

  build = _BUILD.format(name=dataset, directory=directory)
  try:
    builder = tfds.builder(dataset, data_dir=directory)
  except Exception as error:
    known = tfds.list_builders(with_community_datasets=False)  # community data sets would need the network
    names = difflib.get_close_matches(dataset.partition("/")[0], known, n=1)
    nearest = f"; nearest in the catalog: {names[0]}" if names else ""
    raise UserError(
      f"{prefix} {dataset} is not in {directory}, and TFDS can't make it ({_reason(error)}); set data.tfds_dir to the "
      f"directory that holds it{nearest}"
    ) from error
  full_name, size = builder.info.full_name, builder.info.download_size
  what = f"{full_name} ({size if size else 'of unknown size'})"
  if not options.download:
    # the command knows TFDS's own data sets only
    run = f" run {build}," if type(builder).__module__.startswith("tensorflow_datasets.") else ""
    raise UserError(
      f"{prefix} {full_name} is not in {directory}; set data.download=True to download {what} and prepare it "
      f"there,{run} or set data.tfds_dir to the directory that holds it"
    )
  logging.warning("%s downloading %s and preparing it in %s", prefix, what, directory)
  try:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for results
      builder.download_and_prepare(file_format="array_record")
  except ImportError as error:
    raise UserError(
      f"{prefix} {full_name} can't be prepared without {error.name}; prepare it once on a machine that has it, with "
      f"{build}: reading the result does not need it"
    ) from error
  except Exception as error:
    raise UserError(
      f"{prefix} {full_name} can't be downloaded to {directory} ({type(error).__name__}: {_reason(error)}); check the "
      "network and the disk, or set data.tfds_dir to a directory that holds it"
    ) from error
  return builder


def _check_feature(tfds: Any, info: Any, prefix: str, options: Options) -> None:
  """Raises UserError unless `data.text_key` names a text feature."""
  features = info.features
  features = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
  texts = sorted(name for name, feature in features.items() if isinstance(feature, tfds.features.Text))
  if options.text_key not in texts:
    raise UserError(
      f"data.text_key={options.text_key}: {prefix} {info.full_name} has no text feature of that name; "
      + (f"use one of {', '.join(texts)}" if texts else "it has none at all: choose another data set")
    )


def _divide(builder: Any, split: str, prefix: str) -> tuple[list[Part], list]:
  """Divides a split into parts. Returns them, and name, directory, split and files with their sizes and times."""
  info, directory = builder.info, os.fspath(builder.data_path)
  try:
    num_records = info.splits[split].num_examples
  except (ValueError, KeyError) as error:
    raise UserError(
      f"{prefix} {info.full_name} has no split {split!r} ({_reason(error)}); use one of {', '.join(info.splits)}, or "
      "parts of them like train[:1%]"
    ) from error
  if not num_records:
    raise UserError(f"{prefix} split {split!r} of {info.full_name} holds no records; name a larger one")
  try:
    shards = [
      (os.path.basename(shard.filename), shard.skip, shard.take, stat.st_size, stat.st_mtime_ns)
      for shard in info.splits[split].file_instructions
      for stat in [os.stat(shard.filename)]
    ]
  except OSError as error:
    raise UserError(
      f"{prefix} {info.full_name} in {directory} can't be read ({error.strerror or _reason(error)}); remove it and "
      "prepare it again"
    ) from error
  parts = []
  for start in range(0, num_records, RECORDS_PER_PART):
    indices = range(num_records)[start : start + RECORDS_PER_PART]
    name = f"{info.full_name}:{split} records {indices[0]} to {indices[-1]}"
    read = functools.partial(_read, directory, info.full_name, split, indices)
    parts.append(Part(name, len(indices) << 11, read))  # as if a record had 2 KiB
  return parts, [info.full_name, directory, split, shards]


def _reason(error: BaseException) -> str:
  """Returns what an error says, without the paragraphs of advice that TFDS appends."""
  return first_line(error).rstrip(".:")
