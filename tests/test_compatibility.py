"""What version 0.1.0 wrote is read as it was meant: runs, exported folders, prepared shards (tests/data/v0_1).

config.py made the runs there with `text`: run (no argument), llama and plain (their arguments), published (llama with
model.initialization=published and horizon 1, from before there was model.norm_shift) and lora, fine-tuned from run.
Their logits of TOKENS are in logits.npz. The optimizer's part of a checkpoint is kept in `run` alone.
"""

import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import data, jobs
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training.loop import train
from tests.conftest import told

WRITTEN = pathlib.Path(__file__).parent / "data" / "v0_1"
TOKENS = jnp.asarray([[1, 5, 9, 3, 100, 7, 2, 255]])
# of `run`'s validation after these steps, as 0.1.0 measured it and as this version, whose rates come a step earlier
LOSSES = {4: 5.561589241027832, 6: 5.560819625854492}


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


@pytest.mark.parametrize("name", ["run", "llama", "plain", "lora", "published"])
def test_a_run_has_the_logits_that_it_had(name, inside):
  run = diffeq_nnx.load(name)
  np.testing.assert_allclose(run.model(TOKENS), expected(name), rtol=0, atol=1e-6)
  assert run.config.model.norm_shift is (False if name == "published" else None)
  assert not os.path.exists(os.path.join(name, config_lib.DAMAGED_FOLDER))


def test_an_exported_folder_has_the_logits_that_it_had(inside):
  np.testing.assert_allclose(diffeq_nnx.import_hf("exported")(TOKENS), expected("exported"), rtol=0, atol=1e-6)


def test_a_run_goes_on_and_is_evaluated(inside, tmp_path, capsys):
  workdir = str(shutil.copytree("run", tmp_path / "run"))
  config = workdir_lib.config_of(workdir)
  assert jobs.run("evaluate", config, workdir)["loss"] == pytest.approx(LOSSES[4], abs=1e-5)
  train(config_lib.load("config.py", ["train.steps=6"]), workdir)
  assert "continuing from the checkpoint of step 4" in capsys.readouterr().err
  with open(os.path.join(workdir, "metrics.jsonl"), encoding="utf-8") as file:
    records = [json.loads(line) for line in file]
  assert [record["step"] for record in records if record["split"] == "train"] == [1, 2, 3, 4, 5, 6]
  losses = {record["step"]: record["loss"] for record in records if record["split"] == "validation"}
  assert losses == pytest.approx(LOSSES, abs=1e-5)


def test_a_published_llama_without_a_shift_stays_one(inside):
  """The row's Llama has a shift now, whose checkpoint would hold more arrays: the run and the config don't fit."""
  now = config_lib.load("config.py:llama", ["model.initialization=published", "model.horizon=1.0"])
  assert now.model.block_shift
  line = told(lambda: workdir_lib.require("published", now))
  assert "model.norm_shift is False there and None here" in line
  workdir_lib.require("published", config_lib.changed(now, ["model.norm_shift=False"]))


def test_shards_are_read(inside):
  config = config_lib.load("config.py", ["data.source=shards:shards", "data.tokenizer=train", "data.validation=None"])
  corpus = data.load(config.data, config.model.vocab_size, config.seed)
  text = pathlib.Path("text/words.txt").read_text(encoding="utf-8")
  for split in (*corpus.train.splits, corpus.validation):
    tokens = np.asarray(split.tokens)
    assert corpus.tokenizer.decode(tokens[:-1].tolist()) == text and tokens[-1] == corpus.tokenizer.eos_id
