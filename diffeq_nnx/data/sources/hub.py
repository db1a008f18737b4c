"""The source `hf:NAME[@REVISION][:CONFIG][:SPLIT]`: data sets of the Hugging Face hub, streamed, or in local folders.

They are read through the package `datasets`, whose releases from 4.0 on run no code of a data set. Their Parquet files
are read by `parquet`.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import os
import posixpath
from typing import Any

from absl import logging

from diffeq_nnx.data.documents import Document
from diffeq_nnx.data.sources.files import PART_BYTES
from diffeq_nnx.data.sources.parquet import BATCH_ROWS, read_file, read_rows
from diffeq_nnx.data.sources.records import BadRecord, Options, Part, reason
from diffeq_nnx.errors import UserError
from diffeq_nnx.files import absolute

ROWS_PER_SHARD = 1 << 14  # of a folder that `save_to_disk` wrote


def _read_shard(
  name: str, place: tuple[str, str | None, str | None], split: str, num: int, index: int, prefix: str, options: Options
) -> Iterator[Document | BadRecord]:
  """Reads one of `num` shards of a data set, mostly one of its files; see `records.Part`.

  `place` is a folder, or hf://datasets/ and a name; a commit, or None for a folder; and the configuration.
  """
  splits, _ = _open(*place, prefix)
  try:
    shard = splits[split].shard(num, index)
    yield from read_rows(shard.with_format("arrow").iter(BATCH_ROWS), name, 0, prefix, options)
  except UserError:
    raise
  except Exception as error:
    problem = f"{prefix} {name} can't be read ({reason(error)[:500]})"
    remedy = "check the network, restore it if it is damaged, or name its files with jsonl:GLOB or parquet:GLOB"
    raise UserError(f"{problem}; {remedy}, which read records of different keys and types") from error


def _list_files(folder: str) -> list[str]:
  """The files in a folder and in those that it links to, each folder once."""
  found, seen = [], set()
  for top, folders, names in os.walk(folder, followlinks=True):
    folders.sort()
    if (real := os.path.realpath(top)) in seen:  # a link back
      folders.clear()
      continue
    seen.add(real)
    found += [os.path.join(top, name) for name in names if os.path.isfile(os.path.join(top, name))]
  return sorted(found)


def resolve(rest: str, prefix: str, options: Options) -> tuple[Sequence[Part], list]:
  """Finds a data set in a local folder, or else on the hub; see `sources.RESOLVERS`.

  `rest` is `NAME[@REVISION][:CONFIG][:SPLIT]`. One field after NAME is a configuration if there is one of that name,
  and else a split. The split is `train` by default, or the only one. The state holds the names of the split's files on
  the hub and hashes of what they hold, or name, size and time of each file in a folder.

  Raises:
    ImportError: If `datasets` isn't installed.
    UserError: If the data set, its configuration or its split isn't there.
  """
  import datasets
  import huggingface_hub

  _open.cache_clear()  # it would hide changes of a folder
  name, *fields = rest.split(":")
  path, revision = absolute(name), None
  if os.path.isdir(path):
    state = [[one, os.stat(one).st_size, os.stat(one).st_mtime_ns] for one in _list_files(path)]
  elif name.startswith((".", "~", "/")):
    raise UserError(f"{prefix} there is no folder {path}; name a folder, or a data set on the hub as in hf:org/name")
  else:
    repository, _, asked = name.partition("@")
    try:
      api = huggingface_hub.HfApi()
      info = api.dataset_info(repository, revision=asked or None)
      if info.gated:
        api.auth_check(repository, repo_type="dataset")
    except Exception as error:
      raise UserError(f"{prefix} {explain(error, 'data set')}") from error
    path, revision, state = f"hf://datasets/{info.id}", info.sha, [info.sha]
    if not asked:
      advice = "name it, as in hf:ORG/NAME@COMMIT, to read the same text when the data set changes"
      logging.warning("%s is read at the commit %s; %s", prefix.removesuffix(":"), info.sha, advice)
  try:
    configs = [] if _is_saved(path) else datasets.get_dataset_config_names(path, revision=revision)
    split = fields.pop() if fields and (len(fields) > 1 or fields[0] not in configs) else None
    config = ":".join(fields) or None
    if config not in (None, *configs):
      raise UserError(f"{prefix} {path} has no configuration {config!r}; it has: {', '.join(configs) or 'none'}")
    splits, names = _open(path, revision, config, prefix)
    split = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if split not in splits:
      also = f", or a configuration: {', '.join(configs)}" if len(configs) > 1 and not config else ""
      raise UserError(f"{prefix} {path} has no split {split!r}; use one of {', '.join(splits)}{also}")
    if revision and names.get(split):
      state = _identify(names[split], f"datasets/{info.id}@{revision}/")
  except UserError:
    raise
  except Exception as error:
    remedy = "correct the source" + (", or check the network" if revision else "")
    raise UserError(f"{prefix} {path} can't be opened ({reason(error)[:500]}); {remedy}") from error
  data = splits[split]
  size = PART_BYTES  # an assumption, since `datasets` does not tell
  if isinstance(data, list):
    parts = [Part(file, size, functools.partial(read_file, file, None, 0)) for file in data]
    return parts, [path, config, split, state]
  num_shards = len(data) // ROWS_PER_SHARD + 1 if _is_saved(path) else data.num_shards
  parts = []
  for index in range(num_shards):
    name = f"{path}:{split} shard {index}"
    read = functools.partial(_read_shard, name, (path, revision, config), split, num_shards, index)
    parts.append(Part(name, size, read))
  return parts, [path, config, split, state]


@functools.lru_cache(2)
def _open(
  path: str, revision: str | None, config: str | None, prefix: str
) -> tuple[Mapping[str, Any], Mapping[str, list[str]]]:
  """Returns the splits by name, data sets of `datasets` or lists of Parquet files, and the files of each split."""
  import datasets
  from datasets.packaged_modules.parquet.parquet import Parquet

  if _is_saved(path):
    found = datasets.load_from_disk(path)
    return found if isinstance(found, dict) else {str(found.split or "train"): found}, {}
  builder = datasets.load_dataset_builder(path, config, revision=revision)
  # `datasets` follows links to a folder
  base = posixpath.normpath(f"{path}@{revision}" if revision else os.path.realpath(path)) + "/"
  names = {str(split): list(found) for split, found in (builder.config.data_files or {}).items()}
  for file in (file for some in names.values() for file in some):
    if not posixpath.normpath(file).startswith(base):  # a README.md can name any file of this machine
      raise UserError(f"{prefix} its README.md names {file}, which is outside of {base}; name files of the data set")
  return names if isinstance(builder, Parquet) else builder.as_streaming_dataset(), names


def _identify(files: Sequence[str], base: str) -> list[list[str]]:
  """Returns the names of a data set's files, which begin with `base`, and hashes of what they hold.

  A commit that leaves these files as they are leaves prepared text valid.
  """
  import huggingface_hub

  system: Any = huggingface_hub.HfFileSystem()
  names = [posixpath.normpath(file.removeprefix("hf://")) for file in files]
  folders = sorted({posixpath.dirname(name) for name in names})
  hashes = {one["name"]: one["blob_id"] for folder in folders for one in system.ls(folder) if one["type"] == "file"}
  return [[name.removeprefix(base), hashes[name]] for name in names]


def _is_saved(path: str) -> bool:
  """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
  return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def explain(error: Exception, what: str) -> str:
  """Returns why the hub did not give `what`, a model or a data set, and what to do, by huggingface_hub's error."""
  from huggingface_hub import errors

  login = "log in with `hf auth login` or set HF_TOKEN"
  if isinstance(error, errors.GatedRepoError):
    return f"this {what} is behind a gate on the hub; ask for access on its page, and {login}"
  if isinstance(error, errors.RepositoryNotFoundError):
    return f"the hub has no such {what}; correct the name; for a private {what}, {login}"
  if isinstance(error, errors.RevisionNotFoundError):
    return f"the hub has no such revision of the {what}; correct it"
  return f"it can't be fetched from the hub ({reason(error)[:200]}); connect to the network, or name a folder"
