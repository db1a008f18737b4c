"""Runs whose text counts in part: batches as compiled ahead, and the meaning of bits per byte."""

import math

import jax
import numpy as np
import pytest

from diffeq_nnx.model.parameters import params_of
from diffeq_nnx.parallel import sharding
from diffeq_nnx.runs.run import checked_mesh, load_corpus
from diffeq_nnx.training import fastest
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import batch_iterator
from diffeq_nnx.training.step import abstract_batch
from tests.conftest import change, moved_instance, run_config, told
from tests.test_data import write_jsonl


def masked_config(folder, records="completion", rows="packed", attend=True):
  """A run on prompts and completions of 3 to 40 bytes, or on the completions as plain text."""
  rng = np.random.default_rng(0)
  text = lambda: "".join(rng.choice(list("abc é"), rng.integers(2, 20))) + "."
  source = write_jsonl(folder / "all.jsonl", [{"prompt": text(), "completion": text()} for _ in range(60)])
  data = {"source": source, "tokenizer": "bytes", "rows": rows, "attend_across_documents": attend}
  data |= {"records": records, "text_key": "text" if records == "completion" else "completion"}
  return change(run_config(folder), data=data, model={"seq_len": 64}, eval={"max_batches": None})


@pytest.mark.parametrize(
  "records,rows,attend", [("text", "packed", False), ("text", "padded", False), ("completion", "packed", True)]
)
def test_a_batch_is_what_is_compiled_ahead_and_measured(records, rows, attend, tmp_path):
  config = masked_config(tmp_path, records, rows, attend)
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    share = sharding.Share(mesh, config.train.batch_size)
    batch = share.place(next(batch_iterator(config, load_corpus(config), share)))
    shapes = lambda batch: {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    assert shapes(batch) == shapes(abstract_batch(config, mesh)) == shapes(fastest._random_batch(config))
    assert ("mask" in batch) == (records != "text" or rows == "padded")


@pytest.mark.parametrize("records,rows", [("text", "padded"), ("completion", "packed")])
def test_bits_per_byte_are_those_of_all_counted_targets_and_of_none_is_one_line(records, rows, tmp_path):
  """Their sum is the loss of all targets of the text; the training part's bytes per token are of the same kind."""
  config = masked_config(tmp_path, records, rows)
  mesh, corpus, params = checked_mesh(config), load_corpus(config), params_of(moved_instance(config.model))
  with jax.set_mesh(mesh):
    evaluator = Evaluator(config, corpus, mesh)
    values = evaluator(params)
    uncounted = [{**batch, "mask": 0 * batch["mask"]} for batch in evaluator.batches()]
    evaluator.batches = lambda: iter(uncounted)
    assert "eval.max_batches=None: no token of the validation text counts" in told(lambda: evaluator(params))
  split = corpus.validation
  bits = values["loss"] * values["tokens"] / math.log(2)
  assert values["bits_per_byte"] * split.num_bytes == pytest.approx(bits, rel=1e-6)
  assert values["tokens"] == split.num_targets < len(split.tokens)
  train_split = corpus.train.splits[0]
  assert corpus.train.bytes_per_token == pytest.approx(train_split.num_bytes / train_split.num_targets)
