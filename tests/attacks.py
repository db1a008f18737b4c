"""What a stranger gives, for tests that attack: pickles and programs that make a file, runs, and texts; whole runs."""

import dataclasses
import json
import os
import pathlib
import pickle

import jax
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.model.parameters import params_of
from diffeq_nnx.parallel.sharding import make_mesh
from diffeq_nnx.runs.run import Run, load_corpus
from diffeq_nnx.training.step import place_state
from tests.conftest import moved_instance, run_config, small_config, write_documents

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
  record = {"config": config, "tokenizer_hash": tokenizer.hash, "corpus": "", "source": None}
  write_json(workdir / "run.json", record)
  return record


def write_run(folder, **changes):
  """Writes text and a run on it, at step 0 as `train` begins it, but with other parameters; (config, directory)."""
  write_documents(folder)
  config = run_config(folder)
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
  corpus, mesh, workdir = load_corpus(config), make_mesh(config.mesh), str(folder / "run")
  with jax.set_mesh(mesh):
    state = place_state(config, params_of(moved_instance(config.model)), mesh)
    Run.create(config, workdir, corpus.tokenizer, corpus, state)
  return config, workdir
