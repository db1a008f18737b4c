"""Reading prepared shards: slices, damage reported in one line, mixtures, positions."""

import itertools
import os
import random
import shutil

import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.data import batches as batches_lib
from diffeq_nnx.data import shards
from diffeq_nnx.data.preparation import preparing
from diffeq_nnx.data.shards import Tokens
from tests.conftest import told
from tests.prepared_text import config_of, load, prepare, prepared, shard_file, small_tasks, text  # noqa: F401
from tests.test_data import prose, write_jsonl


def test_slices_reach_over_records_and_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, "RECORD_TOKENS", 7)
  expected = np.random.default_rng(0).integers(60_000, size=100).astype(np.uint16)
  sizes = [30, 0, 1, 14, 0, 55]
  pieces = np.split(expected, np.cumsum(sizes)[:-1])
  for number, piece in enumerate(pieces):
    shards.write_shard(str(tmp_path / str(number)), piece)
  tokens = Tokens([str(tmp_path / str(number)) for number in range(6)], sizes, np.uint16)
  assert len(tokens) == 100
  for start, stop in itertools.product(range(0, 102, 5), repeat=2):
    np.testing.assert_array_equal(tokens[start:stop], expected[start:stop])
  assert tokens[:].dtype == tokens[5:5].dtype == np.uint16
  np.testing.assert_array_equal(tokens[:], expected)
  with pytest.raises(IndexError):
    tokens[3]


def test_a_changed_byte_is_told_with_file_and_record(prepared, tmp_path):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  path = shard_file(directory, "train", 0)
  content = path.read_bytes()
  for place in (0, *random.Random(0).sample(range(len(content)), 20), len(content) - 1):  # the last is of a checksum
    damaged = bytearray(content)
    damaged[place] ^= 1 << place % 8
    path.write_bytes(damaged)
    message = told(lambda: load(directory).train.splits[0].tokens[:])
    assert message.startswith(f"{path}: damaged in records 0 to 0; "), place


@pytest.fixture(scope="module")
def model():
  """The bytes of a tokenizer that was trained here."""
  return data.train(prose(50), 300)


def test_damage_to_a_directory_is_one_line(prepared, model, tmp_path):
  directory = tmp_path / "shards"
  names = shard_file(prepared, "train", 0).name, "manifest.json", "tokenizer.json"
  first, manifest, tokenizer = (directory / name for name in names)
  for damage, part in (
    (first.unlink, ".tokens is not there"),
    (lambda: os.truncate(first, 700), ".tokens has 700 bytes, expected"),
    (manifest.unlink, "holds no manifest.json; make the shards with --job=prepare --workdir="),
    (lambda: os.truncate(manifest, 300), "manifest.json is damaged"),
    (lambda: manifest.write_text('{"version": 99}'), "manifest.json has version 99"),
    (lambda: tokenizer.write_bytes(model), "is another tokenizer"),
    (tokenizer.unlink, "can't be read"),
  ):
    shutil.copytree(prepared, directory)
    damage()
    message = told(lambda: load(directory))
    assert message.startswith(f"data.source=shards:{directory}: ") and part in message, part
    shutil.rmtree(directory)


def test_what_the_config_says_must_fit_the_shards(text, prepared, model, tmp_path):
  (tmp_path / "given.model").write_bytes(model)
  for changes, part in (
    ({"vocab_size": 256}, f"model.vocab_size=256: smaller than the 257 ids of shards:{prepared}; set it to 257"),
    ({"begin_mark": True}, "data.begin_mark=True: shards:"),
    ({"records": "chat"}, f"data.records=chat: shards:{prepared} has no masks"),
    ({"validation": "builtin"}, "was prepared with documents held out of its source; set it to"),
    ({"tokenizer": f"{tmp_path}/given.model"}, f"data.tokenizer={tmp_path}/given.model: is another tokenizer"),
  ):
    assert part in told(lambda: load(prepared, **changes))
  assert load(prepared, tokenizer="bytes", begin_mark=False).tokenizer.vocab_size == 257
  message = told(lambda: data.load(config_of(text, validation=f"shards:{prepared}"), 300, 0))
  assert "shards need a data.source of shards" in message


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
  """Two directories with shards, of 240 and 90 windows of 8 tokens or a few more, and one of another tokenizer."""
  folder = tmp_path_factory.mktemp("sources")
  for name, count, tokenizer in (("a", 30, "bytes"), ("b", 12, "bytes"), ("other", 12, "train")):
    source = write_jsonl(folder / f"{name}.jsonl", [f"{name}{text[:60]}" for text in prose(count, seed=count)])
    with pytest.MonkeyPatch.context() as patched:
      patched.setattr(preparing, "SHARD_BYTES", 500)
      prepare(folder / name, config_lib.DataConfig(source=source, tokenizer=tokenizer, validation_fraction=0.2))
  return folder


def mixture_of(sources, first, second, **changes):
  source = f"{first}*shards:{sources}/a + {second} * shards:{sources}/b"
  return data.load(config_lib.DataConfig(source=source, **changes), 300, seed=0)


def test_a_mixture_keeps_its_weights_at_every_step_and_each_window_once_an_epoch_in_a_new_order(sources):
  corpus = mixture_of(sources, 3, 1)
  assert corpus.train.weights == (0.75, 0.25)
  spaced = f" 7.5e-1 * shards:{sources}/a  + .25*shards:{sources}/b/ "
  found = data.load(config_lib.DataConfig(source=spaced), 300, seed=0)
  assert found.train.weights == corpus.train.weights
  assert found.fingerprint == mixture_of(sources, 0.75, 0.25).fingerprint
  batches = data.train_batches(corpus.train, seq_len=24, batch_size=4, seed=0)
  windows = [row for step in range(100) for row in batches[step]["inputs"].tolist()]
  known = {}  # for each window the number of its split, and of the window in it
  for number, split in enumerate(corpus.train.splits):
    tokens = split.tokens[:].tolist()
    for place in range((len(tokens) - 1) // 24):
      known.setdefault(tuple(tokens[place * 24 : (place + 1) * 24]), (number, place))
  found = [known[tuple(window)] for window in windows]
  for upto in range(1, len(found)):
    assert abs(sum(number for number, _ in found[:upto]) - upto / 4) < 1
  for number, split in enumerate(corpus.train.splits):
    places = [place for its, place in found if its == number]
    epoch = (len(split.tokens) - 1) // 24
    assert len(places) > epoch > 5 and places[:epoch] != places[epoch : 2 * epoch]
    for start in range(0, len(places) - epoch, epoch):
      assert sorted(places[start : start + epoch]) == list(range(epoch))


@pytest.mark.parametrize("weights", [(1e-9, 1.0), (0.1, 0.1099, 0.3), (5, 1, 1, 1, 1)])
def test_turns_are_as_the_weights_say_and_nobody_misses_one(weights):
  weights = [weight / sum(weights) for weight in weights]
  shares = batches_lib.make_integer_shares(weights)
  assert [share / sum(shares) for share in shares] == pytest.approx(weights, rel=1e-12)
  counts, bound = [0] * len(weights), max(1, len(weights) - 1)
  for place in range(5000):
    source, before = batches_lib.take_turns(place, shares)
    assert before == counts[source]
    counts[source] += 1
    assert all(abs(count - weight * (place + 1)) < bound for count, weight in zip(counts, weights))
  source, before = batches_lib.take_turns(10**15, shares)
  assert before == pytest.approx(weights[source] * 10**15, abs=bound + 2)


def test_windows_go_on_where_they_were_with_another_batch_size(sources):
  corpus = mixture_of(sources, 0.7, 0.3)

  def rows(batch_size, start, count):
    batches = data.train_batches(corpus.train, seq_len=16, batch_size=batch_size, seed=1, start=start)
    return [row for step in range(count) for row in batches[step]["inputs"].tolist()]

  assert rows(4, 0, 5) + rows(6, 20, 4) + rows(3, 44, 4) == rows(8, 0, 7)


def test_a_mixture_validates_on_all_of_it_or_on_what_is_named(sources):
  corpus, alone = mixture_of(sources, 1, 1), [load(sources / name) for name in "ab"]
  expected = np.concatenate([one.validation.tokens[:] for one in alone])
  np.testing.assert_array_equal(corpus.validation.tokens[:], expected)
  assert corpus.validation.num_documents == sum(one.validation.num_documents for one in alone)
  batches = lambda split, most: data.eval_batches(split, seq_len=8, batch_size=2, max_batches=most)
  read = lambda *arguments: [batch["inputs"].tolist() for batch in batches(*arguments)]
  for split, joined in ((corpus.validation, True), (alone[0].validation, False)):
    every = read(split, None)
    assert read(split, 2) == [every[place] for place in ((len(every) // 4, 3 * len(every) // 4) if joined else (0, 1))]
  named = mixture_of(sources, 1, 1, validation=f"shards:{sources}/b")
  np.testing.assert_array_equal(named.validation.tokens[:], alone[1].validation.tokens[:])
  splits = [one.train.splits[0] for one in alone]
  expected = np.mean([split.num_bytes / len(split.tokens) for split in splits])
  assert corpus.train.bytes_per_token == pytest.approx(expected)


@pytest.mark.parametrize(
  ("source", "part"),
  [
    ("0*shards:{}/a + 1*shards:{}/b", "'0*shards:{}/a' must be a weight above 0"),
    ("1*shards:{}/a + shards:{}/b", "must be a weight above 0"),
    ("1*shards:{}/a + 1*shards:{}/a", "each with another directory"),
    ("0.5*jsonl:x + 0.5*jsonl:y", "'0.5*jsonl:x' must be"),
    ("shards:", "data.source=shards:: must name one directory"),
    ("1*shards:{}/a + 1*shards:{}/other", "made with another tokenizer"),
  ],
)
def test_mistakes_in_a_mixture_are_one_line(sources, source, part):
  source, part = source.replace("{}", str(sources)), part.replace("{}", str(sources))
  assert part in told(lambda: data.load(config_lib.DataConfig(source=source), 300, seed=0))
