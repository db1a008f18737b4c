"""Which tokens count, from records over shards to batches: each counted target once, in windows and in padded rows."""

import itertools
import logging

import numpy as np
import pytest

from diffeq_nnx import data
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data import Options, batches, preparation
from diffeq_nnx.data.documents import Piece, count_bytes, encode, read_ids
from diffeq_nnx.parallel.sharding import make_mesh
from diffeq_nnx.training.evaluate import Evaluator
from tests.conftest import change, small_config, small_model, told
from tests.prepared_text import digest
from tests.test_data import prose, write_jsonl

END = 256  # of the tokenizer bytes
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
COMPLETIONS = [{"prompt": "ask " * (n % 4), "completion": f"answer {n} \u00e9" * (n % 5 + 1)} for n in range(60)]
ROLES = ("system", "user", "assistant")
TURNS = [[{"role": role, "content": f"{role} {n}" * (n % 6 + 1)} for role in ROLES * (n % 3 + 1)] for n in range(60)]
CHATS = [{"messages": messages} for messages in TURNS]
RECORDS = {"completion": COMPLETIONS, "chat": CHATS, "text": prose(40)}


def config_of(folder, kind, records=None, name=None, **changes):
  (folder / "chat.jinja").write_text(TEMPLATE)
  source = write_jsonl(folder / f"{name or kind}.jsonl", records or RECORDS[kind])
  given = {"chat_template": str(folder / "chat.jinja")} if kind == "chat" else {}
  settings = {"source": source, "records": kind, "tokenizer": "bytes", "cache_dir": str(folder / "cache")} | given
  return DataConfig(**settings | {"validation_fraction": 0.3} | changes)


def load(config):
  return data.load(config, vocab_size=257, seed=0)


def targets_of(kind, record):
  """The targets of a record that count, in order; of a chat the assistant's turns, with the template's line ends."""
  if kind == "chat":
    return [*"".join(one["content"] + "\n" for one in record["messages"] if one["role"] == "assistant").encode()]
  first = 0 if record["prompt"] else 1  # the first token of a document has nothing before it
  return [*record["completion"].encode()[first:], END]


def counted(batches):
  """The targets that count, row by row."""
  return [list(t[m > 0]) for batch in batches for t, m in zip(batch["targets"], batch["mask"])]


@pytest.mark.parametrize("kind,layout", [("completion", "packed"), ("chat", "padded")])
def test_each_counted_target_is_validated_once(tmp_path, kind, layout):
  corpus = load(config_of(tmp_path, kind, validation=f"jsonl:{tmp_path}/{kind}.jsonl", rows=layout))
  split = corpus.validation
  seq_len = {"packed": 200, "padded": 1000}[layout]
  batches = list(data.eval_batches(split, seq_len=seq_len, batch_size=3))
  wanted = [target for record in RECORDS[kind] for target in targets_of(kind, record)]
  assert list(itertools.chain(*counted(batches))) == wanted
  assert len(batches) == -(-len(data.Rows(split, seq_len, "validation")) // 3)
  assert all(batch["mask"].shape == batch["inputs"].shape == (3, seq_len) for batch in batches)
  bare = sum(kind == "completion" and not record["prompt"] for record in RECORDS[kind])
  assert split.num_counted == len(wanted)
  assert split.num_bytes == len(wanted) + bare - (len(COMPLETIONS) if kind == "completion" else 0)
  assert split.bytes_per_token == split.num_bytes / len(wanted)


def test_windows_hold_the_targets_of_the_text_and_keep_documents_apart(tmp_path):
  corpus = load(config_of(tmp_path, "completion"))
  (split,) = corpus.train.splits
  tokens = split.tokens[:]
  starts = np.flatnonzero(tokens >> 30 & 1)
  assert len(starts) == split.num_documents and starts[0] == 0
  batches = data.train_batches(corpus.train, seq_len=16, batch_size=1, seed=3, eos_id=END)
  names = ("inputs", "targets", "mask", "segment_ids", "positions")
  wanted = []
  for at in range(0, len(tokens) - 16, 16):
    row = tokens[at : at + 17]
    documents = np.searchsorted(starts, np.arange(at, at + 16), side="right") - 1
    mask = row[1:] >> 31 == 0
    assert not mask[np.isin(np.arange(at + 1, at + 17), starts)].any()  # nothing in a document tells its first token
    positions = np.arange(at, at + 16) - np.maximum(starts[documents], at)
    ids = read_ids(row)
    arrays = ids[:-1], ids[1:], mask, documents - documents[0], positions
    wanted.append([array.tolist() for array in arrays])
  found = [[batches[number][name][0].tolist() for name in names] for number in range(len(wanted))]
  assert sorted(found) == sorted(wanted)
  dtypes = [batches[0][name].dtype.name for name in names]
  assert dtypes == ["int32", "int32", "float32", "int32", "int32"]
  plain = data.train_batches(corpus.train, seq_len=16, batch_size=4, seed=3)[0]
  assert plain.keys() == {"inputs", "targets", "mask"}


@pytest.mark.parametrize("kind", ["completion", "text"])
def test_padded_rows_hold_each_document_once_an_epoch_and_resume(tmp_path, kind, monkeypatch):
  monkeypatch.setattr(batches, "_CHUNK", 50)  # tokens that are read at a time, fewer than a document has
  corpus = load(config_of(tmp_path, kind, rows="padded", validation_fraction=0.1))
  (split,) = corpus.train.splits
  make = lambda **more: data.train_batches(corpus.train, seq_len=600, batch_size=1, seed=5, eos_id=END, **more)
  epochs = [[make()[epoch * split.num_documents + n] for n in range(split.num_documents)] for epoch in range(2)]
  rows_of = lambda batches: [batch["inputs"].tobytes() + batch["mask"].tobytes() for batch in batches]
  first, second = map(rows_of, epochs)
  assert sorted(first) == sorted(second) and first != second and len(set(first)) == split.num_documents
  assert rows_of(make(start=7)[n] for n in range(20)) == rows_of(make()[n + 7] for n in range(20))
  total = sum(batch["mask"].sum() for batch in epochs[0])
  assert total == (len(split.tokens) - split.num_documents if kind == "text" else split.num_counted)
  for batch in epochs[0]:
    assert batch.keys() == {"inputs", "targets", "mask"}
    length = np.flatnonzero(batch["targets"][0])[-1] + 1
    assert not batch["mask"][0, length:].any() and not batch["inputs"][0, length:].any()
    assert (batch["inputs"][0, 1:length] == batch["targets"][0, : length - 1]).all()


@pytest.mark.parametrize("too_long,chunk", [("cut", 7), ("drop", 1 << 20)])
def test_documents_longer_than_a_row_are_cut_or_dropped_and_counted(tmp_path, caplog, monkeypatch, too_long, chunk):
  monkeypatch.setattr(batches, "_CHUNK", chunk)
  lengths = [(3, 4), (30, 4), (5, 30), (9, 0), (2, 16)]  # bytes of prompts and completions
  records = [{"prompt": "p" * p, "completion": "c" * (c or 10)} for p, c in lengths]
  held = write_jsonl(tmp_path / "held.jsonl", records)
  corpus = load(config_of(tmp_path, "completion", records, validation=held, rows="padded", too_long=too_long))
  with caplog.at_level(logging.WARNING):
    found = [len(one) for one in counted(data.eval_batches(corpus.validation, seq_len=20, batch_size=1))]
  cut = {"cut": [5, 16, 11, 17], "drop": [5, 11, 17]}[too_long]  # of the completions and their end marks
  assert found == cut
  (line,) = [one.getMessage() for one in caplog.records]
  assert "2 of 5 documents of the validation part have more than model.seq_len + 1 = 21 tokens" in line
  assert {"cut": "cut", "drop": "dropped"}[too_long] in line
  assert ("1 are left out, since no token of their rows counts" in line) == (too_long == "cut")
  config = change(small_config(small_model(seq_len=1)), data=dict(rows="padded"))
  message = told(lambda: Evaluator(config, corpus, make_mesh(config.mesh)))  # before any train step
  assert message.startswith("data.rows=padded: no document is left (5 of 5 documents of the validation part")


def test_a_token_across_the_border_counts():
  """The whole is encoded at once; a token that holds a character of the completion counts."""
  model = data.tokenizers.SentencePieceTokenizer(data.train(["the answer is yes\n"] * 50, 280))
  prompt, completion = "the answer is ", "yes"
  tokens = encode((Piece(prompt, False), Piece(completion, True)), model, rendered=False)
  assert read_ids(tokens)[:-1].tolist() == model.encode(prompt + completion).tolist()
  pieces = [model.decode_within([number]) for number, token in zip(read_ids(tokens), tokens) if not token >> 31]
  assert "".join(pieces).strip() == "yes" and len(pieces[0]) > 1 and tokens[-1] == model.eos_id
  assert count_bytes((Piece(prompt, False), Piece("\u00e9", True))) == 2 and count_bytes("\u00e9a") == 3
  marked = data.load_tokenizer("bytes", DataConfig(begin_token="<|endoftext|>"))
  tokens = encode((Piece("a", False), Piece("b", True)), marked, rendered=False)
  assert read_ids(tokens).tolist() == [END, 97, 98, END]
  assert (tokens >> 30).tolist() == [3, 2, 0, 0]  # neither begin mark nor prompt, but the end mark


def test_prepared_shards_keep_masks_template_and_recipe(tmp_path):
  config = config_of(tmp_path, "chat")
  directory = tmp_path / "shards"
  prepare = lambda config: preparation.prepare(str(directory), preparation.make_recipe(config, 257, 0))
  manifest = prepare(config)
  assert (manifest["dtype"], manifest["masked"]) == ("uint32", True)
  before = digest(directory)
  prepare(config)
  assert digest(directory) == before
  for layout in ("packed", "padded"):
    direct = load(config_of(tmp_path, "chat", rows=layout))
    opened = load(DataConfig(source=f"shards:{directory}", rows=layout))
    assert opened.fingerprint == direct.fingerprint
    assert opened.tokenizer.chat_template == direct.tokenizer.chat_template
    one, two = (data.train_batches(corpus.train, seq_len=400, batch_size=4, seed=0)[9] for corpus in (direct, opened))
    assert all((one[name] == two[name]).all() for name in one)
  other = config_of(tmp_path, "chat", [{"x": messages} for messages in TURNS], "renamed", messages_key="x")
  assert "data.messages_key is " in told(lambda: prepare(other))
  assert load(other).fingerprint == load(config).fingerprint  # the same tokens
  (tmp_path / "chat.jinja").write_text(TEMPLATE + " ")
  assert "data.chat_template is " in told(lambda: prepare(config))
  (directory / "chat_template.jinja").write_text("other")
  line = told(lambda: load(DataConfig(source=f"shards:{directory}")))
  assert "chat_template.jinja there is not that of manifest.json; restore it" in line


def test_plain_text_keeps_its_recipe_and_bytes(tmp_path):
  recipe = preparation.make_recipe(config_of(tmp_path, "text"), 257, 0)
  keys = "source source_fingerprint text_key bad_records tokenizer libraries validation_fraction validation_seed"
  assert recipe.record.keys() == set(keys.split())
  manifest = preparation.prepare(str(tmp_path / "shards"), recipe)
  assert manifest["dtype"] == "uint16" and "masked" not in manifest
  corpus = load(DataConfig(source=f"shards:{tmp_path}/shards"))
  assert data.train_batches(corpus.train, seq_len=8, batch_size=2, seed=0)[0].keys() == {"inputs", "targets"}


def test_masked_shards_mix_with_masked_ones_alone(tmp_path):
  made = {}
  for name, kind in (("a", "completion"), ("b", "chat"), ("c", "text")):
    made[name] = tmp_path / name
    preparation.prepare(str(made[name]), preparation.make_recipe(config_of(tmp_path, kind), 257, 0))
  mix = lambda *names, **more: load(DataConfig(source=" + ".join(f"0.5*shards:{made[one]}" for one in names), **more))
  for layout in ("packed", "padded"):
    corpus = mix("a", "b", rows=layout)
    batch = data.train_batches(corpus.train, seq_len=64, batch_size=8, seed=0)[0]
    assert 0 < batch["mask"].sum() < batch["mask"].size
    total = sum(batch["mask"].sum() for batch in data.eval_batches(corpus.validation, seq_len=2000, batch_size=2))
    assert total == corpus.validation.num_counted
  message = told(lambda: mix("a", "c"))
  assert f"shards:{made['c']} has no masks (data.records=text), and others do" in message


def test_what_has_no_effect_or_no_meaning_is_one_line(tmp_path):
  """Keys of other records; records with keys of a source that has none; documents that begin as they end."""
  same = config_of(tmp_path, "text", rows="padded", begin_token="<|endoftext|>")
  for call, part in (
    (lambda: DataConfig(prompt_key="q"), "data.prompt_key=q: is for data.records=completion, not text"),
    (lambda: DataConfig(too_long="drop"), "data.too_long=drop: is for data.rows=padded"),
    (lambda: data.open_source("text:*.md", options=Options(records="completion")), "or set data.records=text"),
    (lambda: load(same), "data.rows=padded: the tokenizer's begin and end marks are the same"),
  ):
    assert part in told(call)
