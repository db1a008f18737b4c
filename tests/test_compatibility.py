"""What version 0.1.0 wrote is read as it was meant: exported folders, prepared shards (tests/data/v0_1)."""

import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import data

WRITTEN = pathlib.Path(__file__).parent / "data" / "v0_1"
TOKENS = jnp.asarray([[1, 5, 9, 3, 100, 7, 2, 255]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A copy of what was written."""
  return shutil.copytree(WRITTEN, tmp_path_factory.mktemp("v0_1") / "v0_1")


@pytest.fixture
def inside(folder, monkeypatch):
  """The copy as the working directory, since the configs name text by relative paths."""
  monkeypatch.chdir(folder)
  return folder


def expected(name: str) -> np.ndarray:
  """The logits that version 0.1.0 gave, to be reached to 1e-6: tests compile with most optimizations off."""
  with np.load(WRITTEN / "logits.npz") as logits:
    return logits[name]


def test_an_exported_folder_has_the_logits_that_it_had(inside):
  np.testing.assert_allclose(diffeq_nnx.import_hf("exported")(TOKENS), expected("exported"), rtol=0, atol=1e-6)


def test_shards_are_read(inside):
  config = config_lib.load("config.py", ["data.source=shards:shards", "data.tokenizer=train", "data.validation=None"])
  corpus = data.load(config.data, config.model.vocab_size, config.seed)
  text = pathlib.Path("text/words.txt").read_text(encoding="utf-8")
  for split in (*corpus.train.splits, corpus.validation):
    tokens = np.asarray(split.tokens)
    assert corpus.tokenizer.decode(tokens[:-1].tolist()) == text and tokens[-1] == corpus.tokenizer.eos_id
