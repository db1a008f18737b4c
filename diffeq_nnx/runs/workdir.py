"""Which run owns a work directory: the config, the tokenizer and the tokens that it was started with.

run.json and the tokenizer's file (tokenizer.model or tokenizer.json) in the directory record them; a job with another
model, tokenizer or text is rejected. A run that was imported without text takes the first text that it is trained on.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import re
from typing import Any
import uuid

from absl import logging
from flax import traverse_util

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.config import (
  CHECKPOINT_FOLDER,
  FROZEN_FOLDER,
  KEYS_OF_ROWS,
  METRICS_FILE,
  NO_TEXT,
  RUN_FILE,
  Config,
  DataConfig,
)
from diffeq_nnx.data import Corpus, Tokenizer, load_tokenizer, save_tokenizer
from diffeq_nnx.data.tokenizers.files import find_other, read_template_file
from diffeq_nnx.errors import RunError, UserError, printable
from diffeq_nnx.parallel import distributed

STARTING = ".starting"  # marks a directory whose run.json is not written yet


def identity(config: Config) -> dict[str, Any]:
  """What must stay the same for a run to go on: model, data, seed, kind of optimizer; flat, by dotted key.

  Prepared shards are identified by `Corpus.fingerprint` of their tokens instead; they may be moved.
  """
  whole = config_lib.to_dict(config)
  flat = traverse_util.flatten_dict({name: whole[name] for name in ("model", "data", "seed")}, sep=".")
  flat["optimizer.name"] = config.optimizer.name  # of which checkpoints hold moments
  # the tokenizer is identified by its hash, and the others say where and how, not what
  of_place = ("chat_template", "cache_dir", "tfds_dir", "download", "num_processes")
  ignored = {f"data.{key}" for key in (*config_lib.KEYS_OF_TOKENIZER, *of_place)}
  ignored |= {"model.attention", "model.depth_order"}
  for key in ("data.source", "data.validation"):  # of which commit of the hub the text is, its fingerprint tells
    flat[key] = flat[key] and re.sub(r"^(hf:[^:@]+)@[^:]+", r"\1", flat[key])
  if "shards:" in config.data.source:
    ignored |= {key for key in flat if key.startswith("data.")} - {f"data.{key}" for key in KEYS_OF_ROWS}
  return {key: value for key, value in flat.items() if key not in ignored}


def require_writable(folder: str) -> None:
  """Raises UserError or RunError, as `files.writing`, before long work, if its results can't be written to a folder."""
  with files.writing(folder, "copy the run to a place of yours"):
    files.check_writable(folder)


def claim(workdir: str, config: Config, tokenizer: Tokenizer, corpus: Corpus | None, source: str | None = None) -> None:
  """Makes the work directory this run's, or checks that it already is, as all processes see it.

  `corpus` None: the run has no text yet. `source`: the hash of the run that it starts from.

  Raises:
    UserError: the directory can't be written, or belongs to another model, tokenizer or text; the line names the
      keys that differ.
    RunError: the disk is full.
  """
  distributed.on_main_process(_write, workdir, config, tokenizer, corpus, source)
  with distributed.sync_errors():
    require(workdir, config, corpus)


def _write(workdir: str, config: Config, tokenizer: Tokenizer, corpus: Corpus | None, source: str | None) -> None:
  """Writes the tokenizer, and then run.json, where there is none, or one without text for a run that has it now."""
  known = _read(workdir)
  if known and not _is_begun(workdir):  # it failed before it trained, since its keys had to be others
    known = {}
  identifier = uuid.uuid4().hex  # one for each start: two runs of one command are two runs of Weights & Biases
  claimed = bool(known) and (corpus is None or config_lib.from_dict(known["config"]).data.source != NO_TEXT)
  if known and not claimed:
    require(workdir, config, corpus)
    source, identifier = known.get("source"), known["hash"]
  with files.writing(f"workdir={workdir}", "choose another directory"):
    files.make_folder(workdir)
    if claimed:
      files.check_writable(workdir)
      return
    _save_tokenizer(tokenizer, workdir)
    record = {
      "config": config_lib.to_dict(config),
      "tokenizer_hash": tokenizer.hash,
      "corpus": "" if corpus is None else corpus.fingerprint,
      "source": source,
      "hash": identifier,
    }
    files.write(os.path.join(workdir, RUN_FILE), json.dumps(record, indent=2).encode())
    files.remove(os.path.join(workdir, STARTING))


def _save_tokenizer(tokenizer: Tokenizer, workdir: str) -> None:
  """Saves a run's tokenizer. Raises UserError where the directory holds another one that is no run's."""
  mark = os.path.join(workdir, STARTING)
  if not (holds_run(workdir) or files.exists(mark)):
    if other := find_other(tokenizer, workdir):
      raise UserError(f"workdir={workdir}: holds {other} and no {RUN_FILE}; name another directory")
    files.write(mark, b"")
  save_tokenizer(tokenizer, workdir)


def _is_begun(workdir: str) -> bool:
  """Whether a work directory holds a checkpoint, or one that is being written, or records of training."""
  records = files.list_sizes(workdir).get(METRICS_FILE, 0)
  return bool(
    records or any(files.list_sizes(os.path.join(workdir, one)) for one in (CHECKPOINT_FOLDER, FROZEN_FOLDER))
  )


def clear(workdir: str, tokenizer: Tokenizer) -> None:
  """Clears a directory for a run that is about to be written: only its tokenizer stays, and no unfinished run.

  Raises:
    UserError: the directory can't be written, or holds a run, or checkpoints or a tokenizer of something else.
    RunError: the disk is full.
  """
  require_none(workdir)
  mark = os.path.join(workdir, STARTING)
  folders = [os.path.join(workdir, name) for name in (CHECKPOINT_FOLDER, FROZEN_FOLDER)]
  if not files.exists(mark) and any(map(files.exists, folders)):
    raise UserError(
      f"workdir={workdir}: holds checkpoints and no {RUN_FILE}; name another directory, or remove this one"
    )
  with files.writing(f"workdir={workdir}", "choose another directory"):
    files.make_folder(workdir)
    _save_tokenizer(tokenizer, workdir)
    for folder in folders:
      files.remove(folder)


def set_depth_order(workdir: str, order: Sequence[int]) -> None:
  """Saves an order of a run's steps as its model.depth_order; the run's hash stays. Raises as `files.writing`."""
  known = _read_run(workdir)
  known["config"]["model"]["depth_order"] = list(order)
  with files.writing(f"workdir={workdir}", "make it writable"):
    files.write(os.path.join(workdir, RUN_FILE), json.dumps(known, indent=2).encode())


def run_hash(workdir: str) -> str:
  """What identifies a run wherever its directory is, in hex; it stays when an imported run gets its text."""
  return _read_run(workdir)["hash"]


def check_source(workdir: str, from_workdir: str) -> None:
  """Raises UserError unless a run was started from the run in `from_workdir`, if that still exists."""
  theirs = _read(workdir).get("source")
  if holds_run(from_workdir) and theirs != run_hash(from_workdir):
    raise UserError(
      f"workdir={workdir}: holds a run that was not started from --from_workdir={from_workdir}; name "
      "another directory, or that run"
    )


def require(workdir: str, config: Config, corpus: Corpus | None = None, flag: str = "workdir") -> None:
  """Raises UserError unless a work directory holds a run of this config and corpus (None: any), without writing."""
  hashes = () if corpus is None else (corpus.tokenizer.hash, corpus.fingerprint)
  check_config(workdir, _read_run(workdir, flag), config, *hashes)


def require_none(workdir: str) -> None:
  """Raises UserError if a work directory holds a run already."""
  if holds_run(workdir):
    raise UserError(f"workdir={workdir}: holds a run already; name another directory, or remove this one")


def holds_run(workdir: str) -> bool:
  """Whether a work directory holds a run."""
  return files.exists(os.path.join(workdir, RUN_FILE))


def config_of(workdir: str, flag: str = "workdir") -> Config:
  """The config that a run was started with, without settings that are unsafe to take from an untrusted run.

  These are `harness.include_path`, since task files can run code, and a `data.cache_dir` in another bucket than the
  run's, to which text of this machine would be copied.

  Raises:
    UserError: the directory holds no run; the line names `flag`.
  """
  config = config_lib.from_dict(_read_run(workdir, flag)["config"])
  changes: dict[str, Any] = {}
  cache, bucket = config.data.cache_dir, files.absolute(workdir).split("/")[:3]
  if files.is_url(cache) and ("::" in cache or cache.split("/")[:3] != bucket):
    changes["cache_dir"] = DataConfig().cache_dir
    logging.warning("workdir=%s: its data.cache_dir=%s is not used; name it yourself", workdir, printable(cache))
  path = os.path.expanduser(config.data.tokenizer)
  own = os.path.join(files.absolute(workdir), os.path.basename(path))
  whole = path == files.absolute(path)
  if whole and not files.exists(path) and files.exists(own):  # the directory was moved
    changes["tokenizer"] = own
  return dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, **changes),
    harness=dataclasses.replace(config.harness, include_path=None),
  )


def tokenizer_of(workdir: str, config: Config) -> Tokenizer:
  """The tokenizer that a run was started with, from its directory alone; the text is not needed.

  Raises:
    UserError: the directory holds no run, or not its tokenizer, or `data.chat_template` can't be read.
  """
  known, problem, template = _read_run(workdir), "holds neither", config.data.chat_template
  if template == known["config"].get("data", {}).get("chat_template"):
    template = None  # of which the directory has a copy
  if template is not None:
    read_template_file(template)  # its mistakes are not those of the directory
  for path in (os.path.join(workdir, name) for name in ("tokenizer.model", "tokenizer.json")):
    for begin_mark in (config.data.begin_mark, False, True) if files.exists(path) else ():
      try:  # a sentencepiece file does not say whether documents begin with its mark
        marks = DataConfig(begin_mark=begin_mark, chat_template=template)
        tokenizer = load_tokenizer(path, marks, lossless=True)
        if tokenizer.hash == known["tokenizer_hash"]:
          return tokenizer
        problem = f"{path} is another ({tokenizer.hash[:12]}, not {known['tokenizer_hash'][:12]})"
      except UserError as error:
        problem = str(error)
  raise UserError(
    f"workdir={workdir}: lacks the tokenizer of its run, tokenizer.model or tokenizer.json ({problem}); "
    "restore the file"
  )


def check_config(
  workdir: str, known: dict[str, Any], config: Config, tokenizer_hash: str = "", fingerprint: str = ""
) -> None:
  """Raises UserError, naming the keys that differ, unless what a run notes of itself fits; "": any of these."""
  ours, started = identity(config), config_lib.from_dict(known["config"])
  if started.data.source == NO_TEXT:
    ours = {key: value for key, value in ours.items() if not key.startswith("data.")}
  theirs = traverse_util.flatten_dict(config_lib.to_dict(started), sep=".") | identity(started)
  differing = [f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in ours if ours[key] != theirs[key]]
  for what, there, here in (
    ("tokenizer", known["tokenizer_hash"], tokenizer_hash),
    ("text", known.get("corpus"), fingerprint),  # of a run without text it is empty
  ):
    if there and here and there != here:
      differing.append(f"the {what} is {there[-12:]} there and {here[-12:]} here")
  if differing:
    raise UserError(
      f"workdir={workdir}: belongs to another run: {'; '.join(differing)}; choose another directory, "
      "or the config and text that it was started with"
    )


def _read_run(workdir: str, flag: str = "workdir") -> dict[str, Any]:
  """run.json; raises UserError where a directory holds no run."""
  known = _read(workdir)
  if not known:
    raise UserError(f"--{flag}={workdir}: holds no run; name the directory of one, or train there first")
  return known


def _read(workdir: str) -> dict[str, Any]:
  """run.json, or {} where a directory holds no run; raises UserError if the file can't be used."""
  path = os.path.join(workdir, RUN_FILE)
  try:
    known = files.read_json(path)
    hashes = (known["tokenizer_hash"], known["corpus"], known["hash"])
    if not (isinstance(known["config"], dict) and all(type(one) is str for one in hashes)):
      raise ValueError
    return known
  except (FileNotFoundError, NotADirectoryError):
    return {}
  except UserError:  # of a URL that can't be used
    raise
  except OSError as error:
    if files.is_url(path) and not isinstance(error, PermissionError):
      raise RunError(f"{path}: can't be read ({error.strerror}); check the network, and try again") from error
    raise UserError(f"{path}: can't be read ({error.strerror}); check the name and the permissions") from error
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path}: damaged; if the directory is this run's, remove the file and run again, or choose another"
    ) from error
