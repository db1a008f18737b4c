"""What a stranger gives, for tests that attack: pickles and programs that make a file, runs, and texts."""

import json
import os
import pathlib
import pickle

import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from tests.conftest import small_config

TAG = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"
ROOT = pathlib.Path(__file__).parents[1]


class Bomb:
  """Makes a file when it is unpickled."""

  def __init__(self, marker):
    self.marker = str(marker)

  def __reduce__(self):
    return open, (self.marker, "w")


@pytest.fixture
def marker(tmp_path):
  """A file that must not come to be."""
  path = tmp_path / "marker"
  pickle.loads(pickle.dumps(Bomb(path))).close()  # the weapon works
  path.unlink()
  yield path
  assert not path.exists()


def bomb(marker) -> bytes:
  return pickle.dumps(Bomb(marker))


def program(marker) -> str:
  return f"open({str(marker)!r}, 'w').close()\n"


def write_json(path, content):
  path.write_text(json.dumps(content))


def give_run(workdir, **sections):
  """A stranger's run.json, with these keys of its config changed; and the tokenizer."""
  os.makedirs(workdir, exist_ok=True)
  config = config_lib.to_dict(small_config())
  for section, values in sections.items():
    config[section] |= values
  tokenizer = data.load_tokenizer("bytes")
  (workdir / tokenizer.file_name).write_bytes(tokenizer.model_bytes)
  record = {"config": config, "tokenizer_hash": tokenizer.hash, "corpus": "", "source": None, "hash": "0"}
  write_json(workdir / "run.json", record)
  return record
