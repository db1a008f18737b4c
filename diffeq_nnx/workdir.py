"""Whose a work directory is: the config and the tokenizer that it was started with.

run.json and the tokenizer's own file (tokenizer.model or tokenizer.json) in the directory say so; another model or
tokenizer is turned away.
"""

import json
import os
from typing import Any

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError

RUN_FILE = "run.json"


def identity(config: Config) -> dict[str, Any]:
  """What must stay the same for a run to go on: the model, the data, the seed; flat, by dotted key."""
  whole = config_lib.to_dict(config)
  flat = config_lib.flatten({name: whole[name] for name in ("model", "data", "seed")})
  for key in ("data.cache_dir", "data.tfds_dir", "data.download", "data.num_processes", "model.attention"):
    # where and how, not what
    del flat[key]
  return flat


def claim(workdir: str, config: Config, tokenizer: Tokenizer) -> None:
  """Makes the work directory ours, or checks that it already is.

  Raises:
    UserError: the directory can't be written, or belongs to another model or tokenizer; the line names the
      keys that differ.
  """
  try:
    os.makedirs(workdir, exist_ok=True)
    known = _read(workdir)
    if known is None:
      _write(os.path.join(workdir, tokenizer.file_name), tokenizer.model_bytes)
      record = {"config": config_lib.to_dict(config), "tokenizer_hash": tokenizer.hash}
      _write(os.path.join(workdir, RUN_FILE), json.dumps(record, indent=2).encode())
    else:
      _write(os.path.join(workdir, ".writable"), b"")
      os.remove(os.path.join(workdir, ".writable"))
  except OSError as error:
    raise UserError(f"workdir={workdir}: can't be written ({error.strerror}); choose another directory") from error
  if known is not None:
    _check(workdir, known, config, tokenizer.hash)


def write_tokenizer(workdir: str, tokenizer: Tokenizer) -> None:
  """Puts a tokenizer's own file into a directory that is to be a run's.

  Raises:
    UserError: the directory can't be written.
  """
  try:
    os.makedirs(workdir, exist_ok=True)
    _write(os.path.join(workdir, tokenizer.file_name), tokenizer.model_bytes)
  except OSError as error:
    raise UserError(f"workdir={workdir}: can't be written ({error.strerror}); choose another directory") from error


def require(workdir: str, config: Config, tokenizer_hash: str | None = None) -> None:
  """Sees that a work directory holds a run of this config and tokenizer (None: any); writes nothing.

  Raises:
    UserError: it holds none, or one of another model.
  """
  known = _read(workdir)
  if known is None:
    raise UserError(f"workdir={workdir}: holds no run; train with --workdir={workdir} first, or name another")
  _check(workdir, known, config, tokenizer_hash)


def require_none(workdir: str) -> None:
  """Sees that a work directory holds no run yet.

  Raises:
    UserError: it holds one.
  """
  if os.path.exists(os.path.join(workdir, RUN_FILE)):
    raise UserError(f"workdir={workdir}: holds a run already; name another directory, or remove this one")


def config_of(workdir: str, flag: str = "workdir") -> Config:
  """The config that a run was started with.

  Raises:
    UserError: the directory holds no run, or one of another version of this program; the line names `flag`.
  """
  known = _read(workdir)
  if known is None:
    raise UserError(f"--{flag}={workdir}: holds no run; name the directory of one")
  return config_lib.from_dict(known["config"])


def _check(workdir: str, known: dict[str, Any], config: Config, tokenizer_hash: str | None) -> None:
  """Raises UserError, naming the keys that differ, unless `known` (a run.json) fits; None: any tokenizer."""
  ours = identity(config)
  flat = config_lib.flatten(known["config"])
  defaults = identity(Config())  # for keys that there were not yet when the run began
  theirs = {key: flat.get(key, defaults[key]) for key in ours}
  differing = [f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in ours if ours[key] != theirs[key]]
  if tokenizer_hash not in (None, known["tokenizer_hash"]):
    differing.append(f"the tokenizer is {known['tokenizer_hash'][:12]} there and {tokenizer_hash[:12]} here")
  if differing:
    raise UserError(f"workdir={workdir}: belongs to another run: {'; '.join(differing)}; choose another directory, "
                    "or the config that it was started with")


def _read(workdir: str) -> dict[str, Any] | None:
  path = os.path.join(workdir, RUN_FILE)
  if not os.path.exists(path):
    return None
  try:
    with open(path, encoding="utf-8") as file:
      known = json.load(file)
    known["config"], known["tokenizer_hash"]
    return known
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise UserError(f"{path}: damaged; remove it if the directory is this run's, or choose another workdir") from error


def _write(path: str, content: bytes) -> None:
  with open(path + ".new", "wb") as file:
    file.write(content)
  os.replace(path + ".new", path)
