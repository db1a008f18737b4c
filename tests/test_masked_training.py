"""Runs whose text counts in part: batches as compiled ahead, what is reported, the meaning of bits per byte."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from diffeq_nnx.config import DataConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs.devices import checked_mesh
from diffeq_nnx.runs.run import load_corpus
from diffeq_nnx.training import fastest
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import batch_iterator, train
from diffeq_nnx.training.report import read_metrics
from diffeq_nnx.training.step import abstract_batch, all_params, init_state
from tests.conftest import run_config

# what a mask comes from, and whether documents are apart
ROWS = [("text", "packed", False), ("text", "padded", True), ("completion", "packed", True)]
ROWS += [("completion", "packed", False), ("completion", "padded", False)]


def write_completions(path, count=60) -> None:
  """Prompts and completions of 3 to 40 bytes."""
  rng = np.random.default_rng(0)
  text = lambda: "".join(rng.choice(list("abc é"), rng.integers(2, 20))) + "."
  path.write_text("".join(json.dumps({"prompt": text(), "completion": text()}) + "\n" for _ in range(count)))


def masked_config(folder, records="completion", rows="packed", attend=True, seq_len=64):
  write_completions(folder / "all.jsonl")
  config = run_config(folder, steps=4)
  data_config = DataConfig(
    source=f"jsonl:{folder}/all.jsonl",
    records=records,
    text_key="text" if records == "completion" else "completion",
    rows=rows,
    attend_across_documents=attend,
    tokenizer="bytes",
    validation_fraction=0.3,
    cache_dir=f"{folder}/cache",
  )
  return dataclasses.replace(
    config,
    data=data_config,
    model=dataclasses.replace(config.model, seq_len=seq_len),
    train=dataclasses.replace(config.train, log_every=1),
    eval=dataclasses.replace(config.eval, every=4, max_batches=None),
  )


@pytest.mark.parametrize("records,rows,attend", ROWS)
def test_a_batch_is_what_is_compiled_ahead_and_measured(records, rows, attend, tmp_path):
  config = masked_config(tmp_path, records, rows, attend)
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    share = sharding.Share(mesh, config.train.batch_size)
    batch = share.place(next(batch_iterator(config, load_corpus(config), share)))
    shapes = lambda batch: {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    assert shapes(batch) == shapes(abstract_batch(config, mesh)) == shapes(fastest._random_batch(config))
    assert ("mask" in batch) == (records != "text" or rows == "padded")


@pytest.mark.parametrize("records,rows", [("text", "padded"), ("completion", "packed"), ("completion", "padded")])
def test_bits_per_byte_are_those_of_all_counted_targets(records, rows, tmp_path):
  """Their sum is the loss of all targets of the text; the training part's bytes per token are of the same kind."""
  config = masked_config(tmp_path, records, rows)
  mesh, corpus = checked_mesh(config), load_corpus(config)
  with jax.set_mesh(mesh):
    values = Evaluator(config, corpus, mesh)(all_params(jax.jit(init_state, static_argnums=0)(config)))
  split = corpus.validation
  bits = values["loss"] * values["tokens"] / math.log(2)
  assert values["bits_per_byte"] * split.num_bytes == pytest.approx(bits, rel=1e-6)
  assert values["tokens"] == split.num_targets < len(split.tokens)
  train_split = corpus.train.splits[0]
  assert corpus.train.bytes_per_token == pytest.approx(train_split.num_bytes / train_split.num_targets)
  halves = dataclasses.replace(corpus.train, splits=(train_split, train_split), weights=(0.75, 0.25))
  assert halves.bytes_per_token == pytest.approx(corpus.train.bytes_per_token)


def test_a_mixture_s_bytes_per_token_weigh_each_split_by_its_targets_in_a_row(tmp_path):
  corpus = load_corpus(masked_config(tmp_path))
  (split,) = corpus.train.splits
  sparse = dataclasses.replace(split, num_counted=1, num_bytes=100)  # hardly any target, of 100 bytes
  mixed = dataclasses.replace(corpus.train, splits=(split, sparse), weights=(0.5, 0.5))
  bytes_of_both = split.num_bytes + sparse.num_bytes  # rows are windows, as many of each
  assert mixed.bytes_per_token == pytest.approx(bytes_of_both / (split.num_counted + 1))


def test_a_masked_run_says_how_many_tokens_counted(tmp_path, capsys):
  config = masked_config(tmp_path, rows="padded", attend=False)
  last = train(config, str(tmp_path / "run"))
  told = capsys.readouterr().err
  share = sharding.Share(checked_mesh(config), config.train.batch_size)
  batches = batch_iterator(config, load_corpus(config), share)
  records = read_metrics(tmp_path / "run", "train")
  for record, batch in zip(records, batches):
    assert record["counted_tokens"] == batch["mask"].sum() < batch["mask"].size / 2
    assert re.search(rf"loss {record['loss']:.4f} \({record['counted_tokens']} counted tokens\), ", told)
  assert len(records) == 4 and records[-1]["loss"] < records[0]["loss"]
  assert f"bits per byte, {last['tokens']} tokens" in told


def test_validation_without_a_counted_target_is_one_line(tmp_path):
  """Here its first batch has none."""
  config = masked_config(tmp_path)
  mesh, corpus = checked_mesh(config), load_corpus(config)
  with jax.set_mesh(mesh):
    evaluator = Evaluator(
      dataclasses.replace(config, eval=dataclasses.replace(config.eval, max_batches=1)), corpus, mesh
    )
    batches = [{**batch, "mask": 0 * batch["mask"]} for batch in evaluator.batches()]
    evaluator.batches = lambda: iter(batches)
    with pytest.raises(UserError, match="eval.max_batches=1: no token of the validation text counts"):
      evaluator(all_params(jax.jit(init_state, static_argnums=0)(config)))
