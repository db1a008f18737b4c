"""What the data pipeline promises: nothing lost or repeated, the same batches every time, one-line errors."""

import concurrent.futures
import dataclasses
import errno
import itertools
import json
import os
import random
import shutil
from unittest import mock

import grain
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, jobs
from diffeq_nnx.data import batches, preparation, shards, tokenizers
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.training.loop import train
from tests.conftest import change, told

READ = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
WORDS = "the cat and a dog sat on mat while rain fell over old towns by rivers of green hills".split()


def prose(num_documents, seed=0):
  rng = random.Random(seed)
  return [" ".join(rng.choices(WORDS, k=rng.randint(5, 80))) + "\n" for _ in range(num_documents)]


def write_jsonl(path, records):
  """Writes texts, or whole records, as JSON lines, and returns the source."""
  records = [{"text": one} if isinstance(one, str) else one for one in records]
  path.write_text("".join(json.dumps(one) + "\n" for one in records))
  return f"jsonl:{path}"


def config_of(tmp_path, **changes):
  settings = {"validation_fraction": 0.1, "cache_dir": str(tmp_path / "cache")}
  return config_lib.DataConfig(**settings | changes)


class Tokens:
  """`shards.Tokens` of an array, which remembers where it was read."""

  def __init__(self, array):
    self.array, self.starts = array, set()

  def __len__(self):
    return len(self.array)

  def __getitem__(self, part):
    return self.array[part]

  def read(self, parts):
    self.starts |= {part.start for part in parts if part.start < len(self)}
    return [self.array[part] for part in parts]


def split_of(num_tokens):
  return data.Split(Tokens(np.arange(num_tokens, dtype=np.uint16)), num_bytes=0, num_documents=1)


def train_of(num_tokens):
  return data.Mixture((split_of(num_tokens),))


def documents_of(split, tokenizer):
  """The documents of a split, of which each ends with the end mark."""
  tokens = split.tokens[:]
  *documents, rest = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)
  assert len(rest) == 0
  return [tokenizer.decode(ids) for ids in documents]


def train_tokens(corpus):
  return corpus.train.splits[0].tokens[:]


def test_each_document_is_on_one_side_which_depends_on_the_seed(tmp_path):
  texts, sides = prose(200), []
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", texts), validation_fraction=0.2)
  for seed in (0, 1):
    corpus = data.load(config, 320, seed)
    splits = corpus.train.splits[0], corpus.validation
    assert all(split.tokens.dtype == split.tokens[:].dtype == np.uint16 for split in splits)
    sides.append([documents_of(split, corpus.tokenizer) for split in splits])
    trained, held = sides[-1]
    assert sorted(trained + held) == sorted(texts) and 20 < len(held) < 60
  assert sides[0] != sides[1]


def test_the_second_load_reads_the_cache_and_a_damaged_one_is_made_anew(tmp_path, monkeypatch, capfd):
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(30)))
  first = data.load(config, 320, seed=0)
  assert capfd.readouterr() == ("", "")
  expected = train_tokens(first)

  def refuse(*_, **__):
    raise AssertionError("the cache was not used")

  with monkeypatch.context() as patched:
    patched.setattr(tokenizers, "train", refuse)
    patched.setattr(preparation, "prepare", refuse)
    second = data.load(config, 320, seed=0)
    for vocab_size, seed, fraction in ((321, 0, 0.1), (320, 1, 0.1), (320, 0, 0.2)):
      with pytest.raises(AssertionError):
        data.load(dataclasses.replace(config, validation_fraction=fraction), vocab_size, seed)
  np.testing.assert_array_equal(train_tokens(second), expected)
  assert second.train.bytes_per_token == first.train.bytes_per_token
  assert second.tokenizer.hash == first.tokenizer.hash
  (directory,) = (tmp_path / "cache").iterdir()
  for damaged in ("train", "tokenizer.model", "manifest.json"):
    (path,) = directory.glob(f"{damaged}*")
    os.truncate(path, os.path.getsize(path) // 2)
    np.testing.assert_array_equal(train_tokens(data.load(config, 320, 0)), expected, damaged)
    assert list((tmp_path / "cache").iterdir()) == [directory], damaged
  corpus, (path,) = data.load(config, 320, 0), directory.glob("train*")
  path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])  # which its size does not tell
  other = data.load(config, 320, 0)  # of another process, which reads beside it
  for one in (corpus, other, corpus):
    assert "run the same command again" in told(lambda one=one: train_tokens(one), RunError)
  np.testing.assert_array_equal(train_tokens(data.load(config, 320, 0)), expected)


def test_a_full_disk_is_no_mistake_of_the_user_s(tmp_path, monkeypatch):
  """The exit code decides whether a launcher starts the command again."""
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(30)))
  for error, kind in ((errno.ENOSPC, RunError), (errno.EROFS, UserError), (errno.EACCES, UserError)):
    monkeypatch.setattr(shards, "write_shard", mock.Mock(side_effect=OSError(error, os.strerror(error))))
    assert f"cache: can't be written ({os.strerror(error)}); " in told(lambda: data.load(config, 320, 0), kind)


def test_concurrent_loads_agree_on_one_cache(tmp_path):
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(40)))
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda _: data.load(config, 320, 0), range(4)))
  assert len(list((tmp_path / "cache").iterdir())) == 1
  for corpus in results[1:]:
    np.testing.assert_array_equal(train_tokens(corpus), train_tokens(results[0]))


def test_corpus_errors_name_key_and_value(tmp_path):
  for key, value, part in (("tokenizer", "/none", "can't be read"), ("cache_dir", "/dev/null", "can't be written")):
    message = told(lambda: data.load(config_of(tmp_path, **{key: value}), 512, seed=0))
    assert message.startswith(f"data.{key}={value}:") and part in message


def test_text_that_changes_while_it_is_read_is_told_and_leaves_nothing(tmp_path, monkeypatch):
  config = config_of(tmp_path, source=write_jsonl(tmp_path / "a.jsonl", prose(30)))
  run = workers.run

  def change_and_run(*args):
    write_jsonl(tmp_path / "a.jsonl", prose(31))
    return run(*args)

  monkeypatch.setattr(workers, "run", change_and_run)
  assert "files changed while they were read; start again" in told(lambda: data.load(config, 320, seed=0))
  assert list((tmp_path / "cache").iterdir()) == []


def test_millions_of_windows_are_in_random_order_too(monkeypatch):
  """The mean place of 512 windows varies as that of 512 random numbers does, and few windows come twice in an epoch."""
  order = batches._make_order(12 << 20, 0)
  places = np.array([order(n) for n in range(1 << 22, (1 << 22) + 64 * 512)]) / (12 << 20)
  assert 0.7 < places.reshape(64, 512).mean(1).std() * (12 * 512) ** 0.5 < 1.3
  monkeypatch.setattr(batches, "LARGE", 0)
  order = batches._make_order(97, 5)
  epochs = [[order(n) for n in range(97 * epoch, 97 * epoch + 97)] for epoch in range(2)]
  assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(97)] and epochs[0] != epochs[1]


def test_batches_depend_on_seed_and_step_alone_and_need_a_window():
  def batch(seed, step):
    return data.train_batches(train_of(500), seq_len=8, batch_size=4, seed=seed)[step]["inputs"].tolist()

  stream = data.train_batches(train_of(500), seq_len=8, batch_size=4, seed=1).to_iter_dataset(READ)
  in_order = [item["inputs"].tolist() for item in itertools.islice(stream, 40)]
  assert [batch(1, step) for step in reversed(range(40))] == in_order[::-1]
  assert batch(1, 0) != batch(2, 0) and batch(1, 0) != batch(1, 1)
  assert batch(-1, 3) == batch(2**32 - 1, 3)
  data.train_batches(train_of(9), seq_len=8, batch_size=4, seed=0)[100]
  message = told(lambda: data.train_batches(train_of(8), seq_len=8, batch_size=4, seed=0))
  assert message.startswith("model.seq_len=8:") and "at most 7" in message


def test_documents_of_a_window_are_numbered_and_their_tokens_counted():
  split = data.Split(Tokens(np.array([2, 9, 9, 3, 4, 9, 5, 6, 7], np.uint16)), 0, 4)
  sizes = dict(seq_len=8, batch_size=1, eos_id=9)
  (evaluated,) = data.eval_batches(split, **sizes)
  for batch in (data.train_batches(data.Mixture((split,)), **sizes, seed=0)[0], evaluated):
    assert batch["targets"].tolist() == [[9, 9, 3, 4, 9, 5, 6, 7]]
    assert batch["segment_ids"].tolist() == [[0, 0, 1, 2, 2, 2, 3, 3]]
    assert batch["positions"].tolist() == [[0, 1, 0, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("kind", ["train", "evaluation"])
def test_processes_share_out_a_batch_and_read_their_own_rows_only(kind):
  shares, read = [np.array([0, 3]), np.array([1, 2])], []  # as a mesh may place them

  def batches(rows):
    split = split_of(500)
    read.append(split.tokens.starts)
    if kind == "train":
      dataset = data.train_batches(data.Mixture((split,)), seq_len=8, batch_size=4, seed=3, rows=rows, eos_id=50)
      return [dataset[step] for step in range(10)]  # most of an epoch
    return list(data.eval_batches(split, seq_len=8, batch_size=3, rows=rows))  # row 3 is padding

  whole, *parts = map(batches, (None, *shares))
  assert read[1].isdisjoint(read[2])
  for together, *apart in zip(whole, *parts):
    for name, array in together.items():
      padded = np.concatenate([array, np.zeros((4 - len(array), 8), array.dtype)])
      for rows, part in zip(shares, apart):
        np.testing.assert_array_equal(part[name], padded[rows])


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 100])
def test_evaluation_covers_every_target_once(num_tokens):
  split = split_of(num_tokens)
  batches = list(data.eval_batches(split, seq_len=5, batch_size=3))
  assert len(batches) == -(-len(data.Rows(split, 5, "validation")) // 3)
  targets = []
  for batch in batches:
    assert [batch[name].dtype for name in ("inputs", "targets", "mask")] == [np.int32, np.int32, np.float32]
    assert {array.shape for array in batch.values()} == {(3, 5)}
    counted = batch["mask"] == 1
    np.testing.assert_array_equal(batch["mask"], counted)
    np.testing.assert_array_equal(batch["inputs"][counted] + 1, batch["targets"][counted])
    targets.extend(batch["targets"][counted].tolist())
  assert targets == list(range(1, num_tokens))
  assert len(list(data.eval_batches(split, seq_len=5, batch_size=3, max_batches=2))) == min(2, len(batches))


def test_training_from_shards_is_training_from_the_text(finished, tmp_path, capfd):
  config, workdir = finished
  result = jobs.run("prepare", config, str(tmp_path / "shards"))
  line = json.loads(capfd.readouterr().out)
  assert line == result and line["train"]["documents"] + line["validation"]["documents"] == 12
  # a run knows its tokens wherever they are, and no others
  shutil.move(tmp_path / "shards", tmp_path / "moved")
  longer = change(config, train=dict(steps=21, batch_size=2))
  from_shards = lambda name: dataclasses.replace(longer, data=config_lib.DataConfig(source=f"shards:{tmp_path}/{name}"))
  corpora = [data.load(one.data, 300, config.seed) for one in (config, from_shards("moved"))]
  for split in (lambda corpus: corpus.train.splits[0], lambda corpus: corpus.validation):
    of_text, of_shards = map(split, corpora)
    np.testing.assert_array_equal(of_text.tokens[:], of_shards.tokens[:])
    assert dataclasses.replace(of_text, tokens=()) == dataclasses.replace(of_shards, tokens=())
  shutil.copytree(workdir, tmp_path / "run")
  train(from_shards("moved"), str(tmp_path / "run"))
  position = json.loads((tmp_path / "run" / "checkpoints" / "21" / "data" / "metadata").read_text())
  assert position["windows"] == 20 * 4 + 2
  jobs.run("prepare", dataclasses.replace(config, seed=1), str(tmp_path / "other"))
  message = told(lambda: train(from_shards("other"), str(tmp_path / "run")))
  assert "belongs to another run: " in message and "the text is " in message
