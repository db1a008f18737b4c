"""Small texts and prepared shards for tests."""

import dataclasses
import hashlib
import os

import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.data import preparation
from diffeq_nnx.data.preparation import preparing
from diffeq_nnx.data.sources import files
from tests.test_data import prose, write_jsonl

NUM_DOCUMENTS = 200


@pytest.fixture(autouse=True, scope="module")
def small_tasks():
  """Many tasks and shards of few documents; nothing waits for the disk, since no test cuts the power."""
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(preparing, "TASK_BYTES", 4000)
    patched.setattr(files, "PART_BYTES", 4000)
    patched.setattr(preparing, "SHARD_BYTES", 10_000)
    patched.setattr(os, "fsync", lambda descriptor: None)
    yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """Three files of different lengths, in which each document but the last is there twice."""
  folder = tmp_path_factory.mktemp("text")
  texts = 2 * prose(NUM_DOCUMENTS // 2) + ["\u00e9t\u00e9 \U0001f642" * 2000]  # the last longer than a shard
  for name, part in (("a", texts[:120]), ("b", texts[120:123]), ("c", texts[123:])):
    write_jsonl(folder / f"{name}.jsonl", part)
  return folder, texts


def config_of(text, **changes):
  settings = {"source": f"jsonl:{text[0]}/*.jsonl", "validation_fraction": 0.1, "tokenizer": "bytes"}
  return config_lib.DataConfig(**settings | changes)


def prepare(directory, config, num_processes=1, vocab_size=300, seed=0):
  config = dataclasses.replace(config, num_processes=num_processes)
  return preparation.prepare(str(directory), preparation.make_recipe(config, vocab_size, seed))


def load(directory, vocab_size=300, **changes):
  return data.load(config_lib.DataConfig(source=f"shards:{directory}", **changes), vocab_size, seed=0)


def digest(directory):
  found = {name: (directory / name).read_bytes() for name in sorted(os.listdir(directory))}
  return hashlib.sha256(repr(found).encode()).hexdigest()


@pytest.fixture(scope="module")
def prepared(text, small_tasks, tmp_path_factory):
  """A directory with shards; not to be changed."""
  directory = tmp_path_factory.mktemp("prepared") / "shards"
  prepare(directory, config_of(text))
  return directory


def shard_file(directory, split, number):
  """One shard of a split."""
  return sorted(directory.glob(f"{split}-*.tokens"))[number]
