"""Reading prepared shards: slices, damage reported in one line, mixtures, positions, training."""

import dataclasses
import itertools
import json
import os
import random
import shutil

import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, jobs
from diffeq_nnx.data import batches as batches_lib
from diffeq_nnx.data import shards, tokenizers
from diffeq_nnx.data.preparation import preparing
from diffeq_nnx.data.shards import Tokens
from diffeq_nnx.errors import UserError
from diffeq_nnx.training.loop import train
from tests.conftest import small_model, told
from tests.prepared_text import config_of, load, prepare, prepared, shard_file, small_tasks, text  # noqa: F401
from tests.test_data import prose, write_jsonl


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_slices_reach_over_records_and_shards(tmp_path, dtype, monkeypatch):
  monkeypatch.setattr(shards, "RECORD_TOKENS", 7)
  expected = np.random.default_rng(0).integers(60_000, size=100).astype(dtype)
  sizes = [30, 0, 1, 14, 0, 55]
  pieces = np.split(expected, np.cumsum(sizes)[:-1])
  for number, piece in enumerate(pieces):
    shards.write_shard(str(tmp_path / str(number)), piece, "x")
  tokens = Tokens([str(tmp_path / str(number)) for number in range(6)], sizes, dtype)
  assert len(tokens) == 100
  for start, stop in itertools.product(range(0, 102, 3), repeat=2):
    np.testing.assert_array_equal(tokens[start:stop], expected[start:stop])
  assert tokens[:].dtype == tokens[5:5].dtype == dtype
  np.testing.assert_array_equal(tokens[:], expected)
  with pytest.raises(IndexError):
    tokens[3]


def test_a_changed_byte_never_changes_a_token_and_is_told_with_file_and_record(prepared, tmp_path):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  path = shard_file(directory, "train", 0)
  content, expected = path.read_bytes(), load(prepared).train.splits[0].tokens[:]
  at = content.index(expected[:20].tobytes())
  rng, noticed = random.Random(0), 0
  for place in (at, at + 100, len(content) - 1, *(rng.randrange(len(content)) for _ in range(40))):
    damaged = bytearray(content)
    damaged[place] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    split = load(directory).train.splits[0]
    try:
      np.testing.assert_array_equal(split.tokens[:], expected)
      assert place not in (at, at + 100)
    except UserError as error:
      message, noticed = str(error), noticed + 1
      assert message.startswith(f"{path}: ") and "record" in message and "damaged" in message and "\n" not in message
  assert noticed >= 2


@pytest.mark.parametrize(
  ("damage", "part"),
  [
    ("gone", ".tokens is not there"),
    ("short", ".tokens has 70000 bytes, expected"),
    ("no manifest", "holds no manifest.json; make the shards with --job=prepare --workdir="),
    ("half a manifest", "manifest.json is damaged"),
    ("a key less", "manifest.json is damaged"),
    ("version", "manifest.json has version 99"),
    ("tokenizer", "is another tokenizer"),
    ("no tokenizer", "can't be read"),
  ],
)
def test_damage_to_a_directory_is_one_line(prepared, tmp_path, damage, part):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  first, manifest = shard_file(directory, "train", 0), directory / "manifest.json"
  content = json.loads(manifest.read_text())
  if damage == "gone":
    first.unlink()
  elif damage == "short":
    os.truncate(first, 70_000)
  elif damage == "no manifest":
    manifest.unlink()
  elif damage == "half a manifest":
    os.truncate(manifest, 300)
  elif damage == "a key less":
    del content["splits"]["validation"]["bytes"]
    manifest.write_text(json.dumps(content))
  elif damage == "version":
    manifest.write_text(json.dumps(content | {"version": 99}))
  elif damage == "no tokenizer":
    (directory / "tokenizer.json").unlink()
  else:
    trained = tokenizers.SentencePieceTokenizer(data.train(data.documents("builtin"), 512))
    (directory / "tokenizer.json").write_bytes(trained.model_bytes)
  message = told(lambda: load(directory))
  assert message.startswith(f"data.source=shards:{directory}: ") and part in message


def test_what_the_config_says_must_fit_the_shards(text, prepared, tmp_path):
  for changes, part in (
    ({"vocab_size": 256}, f"model.vocab_size=256: smaller than the 257 ids of shards:{prepared}; set it to 257"),
    ({"begin_mark": True}, "data.begin_mark=True: shards:"),
    ({"validation": "builtin"}, "was prepared with documents held out of its source; set it to"),
    ({"validation": "shards:/none"}, "data.validation=shards:/none: holds no manifest.json"),
  ):
    message = told(lambda: load(prepared, **changes))
    assert part in message
  (tmp_path / "given.model").write_bytes(data.train(data.documents("builtin"), 512))
  message = told(lambda: load(prepared, tokenizer=str(tmp_path / "given.model")))
  assert message.startswith(f"data.tokenizer={tmp_path}/given.model: is another tokenizer")
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


def which(corpus, windows, seq_len):
  """For each window the number of its split, and of the window in it."""
  known = {}
  for number, split in enumerate(corpus.train.splits):
    tokens = split.tokens[:]
    for place in range((len(tokens) - 1) // seq_len):
      known.setdefault(tuple(tokens[place * seq_len : (place + 1) * seq_len].tolist()), (number, place))
  return [known[tuple(window)] for window in windows]


def test_a_mixture_keeps_its_weights_at_every_step_and_each_window_once_an_epoch(sources):
  corpus = mixture_of(sources, 3, 1)
  assert corpus.train.weights == (0.75, 0.25)
  spaced = f" 7.5e-1 * shards:{sources}/a  + 0.25*shards:{sources}/b/ "
  found = data.load(config_lib.DataConfig(source=spaced), 300, seed=0)
  assert found.train.weights == corpus.train.weights
  assert found.fingerprint == mixture_of(sources, 0.75, 0.25).fingerprint
  batches = data.train_batches(corpus.train, seq_len=24, batch_size=4, seed=0)
  windows = [row for step in range(100) for row in batches[step]["inputs"].tolist()]
  found = which(corpus, windows, 24)
  for upto in range(1, len(found)):
    assert abs(sum(number for number, _ in found[:upto]) - upto / 4) < 1
  for number, split in enumerate(corpus.train.splits):
    places = [place for its, place in found if its == number]
    epoch = (len(split.tokens) - 1) // 24
    assert len(places) > epoch > 5
    for start in range(0, len(places) - epoch, epoch):
      assert sorted(places[start : start + epoch]) == list(range(epoch))


@pytest.mark.parametrize("weights", [(0.503, 0.497), (1e-9, 1.0), (0.1, 0.1099, 0.3), (5, 1, 1, 1, 1), (1.0,)])
def test_turns_are_as_the_weights_say_and_nobody_misses_one(weights):
  weights = [weight / sum(weights) for weight in weights]
  shares = batches_lib.make_integer_shares(weights)
  assert [share / sum(shares) for share in shares] == pytest.approx(weights, rel=1e-12)
  counts, bound = [0] * len(weights), max(1, len(weights) - 1)
  for place in range(20_000):
    source, before = batches_lib.take_turns(place, shares)
    assert before == counts[source]
    counts[source] += 1
    assert all(abs(count - weight * (place + 1)) < bound for count, weight in zip(counts, weights))
  source, before = batches_lib.take_turns(10**15, shares)
  assert before == pytest.approx(weights[source] * 10**15, abs=bound + 2)


def test_windows_go_on_where_they_were_with_another_batch_size(sources):
  corpus = mixture_of(sources, 0.7, 0.3)
  rows = lambda batch_size, start, count: [
    row
    for step in range(count)
    for row in data.train_batches(corpus.train, seq_len=16, batch_size=batch_size, seed=1, start=start)[step][
      "inputs"
    ].tolist()
  ]
  assert rows(4, 0, 5) + rows(6, 20, 4) + rows(3, 44, 4) == rows(8, 0, 7)


def test_a_mixture_validates_on_all_of_it_or_on_what_is_named(sources):
  corpus, alone = mixture_of(sources, 1, 1), [load(sources / name) for name in "ab"]
  expected = np.concatenate([one.validation.tokens[:] for one in alone])
  np.testing.assert_array_equal(corpus.validation.tokens[:], expected)
  assert corpus.validation.num_documents == sum(one.validation.num_documents for one in alone)
  named = mixture_of(sources, 1, 1, validation=f"shards:{sources}/b")
  np.testing.assert_array_equal(named.validation.tokens[:], alone[1].validation.tokens[:])
  assert corpus.train.bytes_per_token == pytest.approx(
    np.mean([one.train.splits[0].num_bytes / len(one.train.splits[0].tokens) for one in alone])
  )


@pytest.mark.parametrize(
  ("source", "part"),
  [
    ("0*shards:{}/a + 1*shards:{}/b", "'0*shards:{}/a' must be a weight above 0"),
    ("1*shards:{}/a + shards:{}/b", "must be a weight above 0"),
    ("shards:{}/a + 1*shards:{}/b", "'shards:{}/a' must be a weight"),
    ("0.7*shards:{}/a,0.3*shards:{}/b", "must be a weight"),
    ("1*shards:{}/a + 1*shards:{}/a", "each with another directory"),
    ("1*shards:{}/a + 1*jsonl:x", "'1*jsonl:x' must be"),
    ("0.5*jsonl:x + 0.5*jsonl:y", "'0.5*jsonl:x' must be"),
    ("nan*shards:{}/a", "must be a weight"),
    ("1e308*shards:{}/a", "must be a weight"),
    ("shards:", "data.source=shards:: must name one directory"),
    ("1*shards:{}/a + 1*shards:{}/other", "made with another tokenizer"),
    ("1*shards:{}/a + 1*shards:/none", "data.source=shards:/none: holds no manifest.json"),
  ],
)
def test_mistakes_in_a_mixture_are_one_line(sources, source, part):
  source, part = source.replace("{}", str(sources)), part.replace("{}", str(sources))
  assert part in told(lambda: data.load(config_lib.DataConfig(source=source), 300, seed=0))


def test_the_position_holds_for_another_number_of_processes(sources):
  corpus, batch_size = mixture_of(sources, 0.7, 0.3), 4
  batches = lambda rows: iter(
    data.train_batches(corpus.train, seq_len=16, batch_size=batch_size, seed=1, rows=np.array(rows)).to_iter_dataset()
  )
  whole = [batch["inputs"].tolist() for batch in itertools.islice(batches(range(4)), 9)]
  for step in (0, 7):
    before = batches(range(4))
    for _ in range(step):
      next(before)
    parts = [batches(rows) for rows in ([0, 1], [2], [3])]
    for part in parts:
      part.set_state(json.loads(json.dumps(before.get_state())))
    after = [sum((next(part)["inputs"].tolist() for part in parts), []) for _ in range(9 - step)]
    assert after == whole[step:]


def test_training_from_shards_is_training_from_the_text(text, tmp_path, capfd):
  source = config_of(text, cache_dir=str(tmp_path / "cache"))
  config = config_lib.Config(
    model=small_model(vocab_size=300, num_steps=2, embed_dim=16),
    data=source,
    train=config_lib.TrainConfig(steps=3, batch_size=4, remat="none", loss_chunks=4, log_every=1, peak_tflops=0.1),
    eval=config_lib.EvalConfig(every=3, max_batches=2),
  )
  result = jobs.run("prepare", config, str(tmp_path / "shards"))
  line = json.loads(capfd.readouterr().out)
  assert line == result and line["train"]["documents"] + line["validation"]["documents"] == len(text[1])
  moved = tmp_path / "moved"
  shutil.move(tmp_path / "shards", moved)
  shards_config = lambda directory, **changes: dataclasses.replace(
    config, data=config_lib.DataConfig(source=f"shards:{directory}"), **changes
  )
  corpora = [data.load(one.data, 300, config.seed) for one in (config, shards_config(moved))]
  for split in (lambda corpus: corpus.train.splits[0], lambda corpus: corpus.validation):
    of_text, of_shards = map(split, corpora)
    np.testing.assert_array_equal(of_text.tokens[:], of_shards.tokens[:])
    assert dataclasses.replace(of_text, tokens=()) == dataclasses.replace(of_shards, tokens=())
  train(shards_config(moved), str(tmp_path / "b"))
  shutil.move(moved, tmp_path / "elsewhere")  # the run knows its tokens wherever they are, and no others
  longer = dataclasses.replace(config.train, steps=4, batch_size=2)
  train(shards_config(tmp_path / "elsewhere", train=longer), str(tmp_path / "b"))
  prepare(tmp_path / "other", dataclasses.replace(source, validation_seed=1))
  message = told(lambda: train(shards_config(tmp_path / "other", train=longer), str(tmp_path / "b")))
  assert "belongs to another run: the text is " in message
