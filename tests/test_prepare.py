"""What prepared shards promise: the same bytes however they were made, every document once, damage told in one line."""

import collections
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, jobs
from diffeq_nnx.data import batches as batches_lib
from diffeq_nnx.data import preparation, shards, tokenizers
from diffeq_nnx.data.preparation import preparing, tokenising, workers
from diffeq_nnx.data.shards import Tokens
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.training.loop import train
from tests.conftest import small_model, told
from tests.test_data import prose, write_jsonl

SMALL = preparation.Sizes(stretch=4000, run=3000, shard=10_000)
NUM_DOCUMENTS = 400


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """Three files of different lengths, and one for validation."""
  folder = tmp_path_factory.mktemp("text")
  texts = prose(NUM_DOCUMENTS) + ["\u00e9t\u00e9 \U0001f642" * 2000]  # the last longer than a shard
  for name, part in (("a", texts[:250]), ("b", texts[250:253]), ("c", texts[253:])):
    write_jsonl(folder / f"{name}.jsonl", part)
  write_jsonl(folder / "held.json", prose(30, seed=1))
  return folder, texts


def config_of(text, **changes):
  settings = {"source": f"jsonl:{text[0]}/*.jsonl", "validation_fraction": 0.1, "tokenizer": "bytes"}
  return config_lib.DataConfig(**settings | changes)


def prepare(directory, config, num_processes=1, sizes=SMALL, vocab_size=300, seed=0):
  return preparation.prepare(str(directory), preparation.recipe(config, vocab_size, seed), num_processes, sizes)


def load(directory, vocab_size=300, **changes):
  return data.load(config_lib.DataConfig(source=f"shards:{directory}", **changes), vocab_size, seed=0)


def digest(directory):
  found = {name: (directory / name).read_bytes() for name in sorted(os.listdir(directory))}
  return hashlib.sha256(repr(found).encode()).hexdigest()


def documents_of(split, tokenizer):
  tokens = split.tokens[:]
  ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
  return [tokenizer.decode(run) for run in np.split(tokens, ends)[:-1]]


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
  """A directory with shards; not to be changed."""
  directory = tmp_path_factory.mktemp("prepared") / "shards"
  prepare(directory, config_of(text))
  return directory


def shard_file(directory, start):
  (found,) = directory.glob(f"{start}-of-*.array_record")
  return found


@pytest.fixture
def impatient(monkeypatch):
  monkeypatch.setattr(workers, "PATIENCE", 0)


def test_every_document_is_there_once_and_counted(text, prepared):
  texts, corpus = text[1], load(prepared)
  manifest = json.loads((prepared / "manifest.json").read_text())
  (train,), validation = corpus.train.splits, corpus.validation
  trained, held = documents_of(train, corpus.tokenizer), documents_of(validation, corpus.tokenizer)
  assert collections.Counter(trained + held) == collections.Counter(texts)
  assert 10 < len(held) < 100 and len(manifest["splits"]["train"]["shards"]) > 3
  for split, documents, name in ((train, trained, "train"), (validation, held, "validation")):
    info = manifest["splits"][name]
    assert split.num_documents == info["documents"] == len(documents)
    assert split.num_bytes == info["bytes"] == sum(len(document.encode()) for document in documents)
    assert len(split.tokens) == info["tokens"] == info["bytes"] + info["documents"]
    for shard in info["shards"]:
      content = (prepared / shard["file"]).read_bytes()
      assert (shard["size"], shard["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
  assert manifest["recipe"]["source"].startswith("jsonl:") and manifest["recipe"]["validation_seed"] == 0
  assert manifest["tokenizer"]["hash"] == corpus.tokenizer.hash and manifest["version"] == shards.VERSION
  assert manifest["records"]["data.source"]["documents"] == len(texts)
  files = [shard["file"] for info in manifest["splits"].values() for shard in info["shards"]]
  assert sorted(os.listdir(prepared)) == sorted(["manifest.json", "tokenizer.json", *files])


def test_training_documents_are_shuffled_by_the_seed_and_validation_keeps_its_order(text, prepared, tmp_path):
  orders = []
  for seed in (0, 1):
    prepare(tmp_path / str(seed), config_of(text, shuffle_seed=seed))
    corpus = load(tmp_path / str(seed))
    orders.append(documents_of(corpus.train.splits[0], corpus.tokenizer))
    held = documents_of(corpus.validation, corpus.tokenizer)
    assert held == [document for document in text[1] if document in set(held)]
  assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
  places = [text[1].index(document) for document in orders[0]]
  assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.2
  assert digest(tmp_path / "0") == digest(prepared)


def test_keys_are_those_of_splitmix64():
  """Its definition, on Python's integers; distinct places have distinct keys but for the bit that is dropped."""
  def key(place, seed):
    mask = 2**64 - 1
    start = int.from_bytes(np.random.SeedSequence(seed).generate_state(2).tobytes(), "little")
    z = (start + (place + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 1

  places = np.array([0, 1, 2, 10**12], np.uint64)
  assert tokenising.shuffled(places, 5).tolist() == [key(int(place), 5) for place in places]
  assert len(np.unique(tokenising.shuffled(np.arange(10**5, dtype=np.uint64), 0))) == 10**5


@pytest.mark.parametrize("sizes", [{}, {"stretch": 10**9, "run": 10**9}, {"stretch": 100, "run": 10}])
def test_processes_and_memory_change_no_byte(text, prepared, tmp_path, impatient, sizes):
  prepare(tmp_path / "again", config_of(text), 2 if not sizes else 1, dataclasses.replace(SMALL, **sizes))
  assert digest(tmp_path / "again") == digest(prepared)


@pytest.mark.parametrize("tokenizer", ["train", "bytes"])
def test_a_validation_source_of_its_own(text, tmp_path, tokenizer):
  config = config_of(text, validation=f"jsonl:{text[0]}/held.json", tokenizer=tokenizer)
  prepare(tmp_path / "shards", config)
  corpus = load(tmp_path / "shards", validation=config.validation, tokenizer=tokenizer)
  assert documents_of(corpus.validation, corpus.tokenizer) == prose(30, seed=1)
  assert sorted(documents_of(corpus.train.splits[0], corpus.tokenizer)) == sorted(text[1])


SLOW = """
import os, sys, time
from diffeq_nnx import config
from diffeq_nnx.data import preparation
from diffeq_nnx.data.preparation import workers
from tests import test_prepare

if __name__ == "__main__":
  workers.PATIENCE = 0
  source, directory = sys.argv[1:]
  test_prepare.prepare(directory, test_prepare.config_of((source,)), 2)
"""


def test_killed_again_and_again_it_ends_with_the_same_bytes(text, prepared, tmp_path):
  directory, program = tmp_path / "shards", tmp_path / "slow.py"
  program.write_text(SLOW)
  environment = os.environ | {"PYTHONPATH": os.getcwd()}
  rng, kills = random.Random(0), 0
  for wanted in (1, 6, 30, 10**9):  # finished tasks at which it is killed
    process = subprocess.Popen([sys.executable, str(program), str(text[0]), str(directory)], env=environment,
                               start_new_session=True)  # fmt: skip
    while process.poll() is None:
      done = [name for _, _, names in os.walk(directory / preparation.UNFINISHED) for name in names]
      if sum(name.endswith((".npz", ".done", ".json")) for name in done) > wanted:
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        break
      time.sleep(0.002)
    if not (directory / "manifest.json").exists():
      assert "is not finished" in told(lambda: load(directory))
    deadline = time.monotonic() + 20
    while _session(process.pid) and time.monotonic() < deadline:
      time.sleep(0.02)
    assert not _session(process.pid)  # its workers are gone too
  assert kills >= 2 and process.returncode == 0
  assert digest(directory) == digest(prepared)


def _session(leader):
  """The living processes of a session."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/stat") as file:
        state, _, _, session = file.read().rpartition(")")[2].split()[:4]
    except OSError:
      continue
    if int(session) == leader and state != "Z":
      found.append(int(pid))
  return found


def test_a_whole_directory_is_left_as_it_is_and_a_damaged_one_made_again(text, prepared, tmp_path, monkeypatch):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  with monkeypatch.context() as patched:
    patched.setattr(preparing, "tokenise", None)
    prepare(directory, config_of(text))
  shard_file(directory, "train-00001").unlink()
  assert "is not there" in told(lambda: load(directory))
  prepare(directory, config_of(text))
  assert digest(directory) == digest(prepared)


def test_a_directory_may_have_any_name(text, prepared, tmp_path):
  directory = tmp_path / "[a-z]* 100%"
  prepare(directory, config_of(text))
  assert digest(directory) == digest(prepared)


def test_several_processes_of_a_job_are_turned_away(text, tmp_path, monkeypatch):
  monkeypatch.setattr("jax.process_count", lambda: 2)
  message = told(lambda: jobs.run("prepare", config_lib.Config(data=config_of(text)), str(tmp_path / "out")))
  assert message.startswith("--job=prepare: runs on one host") and not (tmp_path / "out").exists()


def test_another_recipe_or_foreign_files_are_turned_away(text, prepared, tmp_path):
  message = told(lambda: prepare(prepared, config_of(text, shuffle_seed=3)))
  assert f"workdir={prepared}: is prepared from something else: data.shuffle_seed is 0 there and 3 here;" in message
  shutil.copytree(text[0], tmp_path / "text")
  config = config_of((tmp_path / "text",))
  prepare(tmp_path / "out", config)
  os.utime(tmp_path / "text" / "a.jsonl", (1, 1))
  assert f"the files of data.source={config.source} have changed since" in told(lambda: prepare(tmp_path / "out", config))
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("x")
  assert "holds thesis.tex, which is no part" in told(lambda: prepare(tmp_path / "mine", config))
  (tmp_path / "begun").mkdir()
  descriptor = os.open(tmp_path / "begun", os.O_RDONLY)
  fcntl.flock(descriptor, fcntl.LOCK_EX)
  assert "another process is preparing it" in told(lambda: prepare(tmp_path / "begun", config))
  os.close(descriptor)


@pytest.mark.parametrize("trouble", ["a bit", "no manifest", "half a manifest", "version", "a marked shard"])
def test_preparing_again_mends_what_is_damaged(text, prepared, tmp_path, trouble, monkeypatch, caplog):
  out = tmp_path / "out"
  shutil.copytree(prepared, out)
  manifest = out / "manifest.json"
  if trouble == "a bit":
    content = bytearray(shard_file(out, "train-00002").read_bytes())
    content[len(content) // 3] ^= 4
    shard_file(out, "train-00002").write_bytes(content)
  elif trouble == "no manifest":
    manifest.unlink()
  elif trouble == "half a manifest":
    os.truncate(manifest, 300)
  elif trouble == "version":
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
  else:  # killed just before the end, and a finished shard lost then
    shutil.rmtree(out)
    with monkeypatch.context() as patched:
      patched.setattr(preparing, "finish", lambda *_: os.close(-1))
      with pytest.raises(OSError):
        prepare(out, config_of(text))
    shard_file(out, "train-00002").unlink()
  prepare(out, config_of(text))
  assert digest(out) == digest(prepared)
  assert ("made again" in caplog.text) == (trouble in ("a bit", "half a manifest", "version"))


@pytest.mark.parametrize("stage", ["rename", "rmtree"])
def test_a_kill_at_the_very_end_leaves_nothing_that_is_taken_for_work(text, prepared, tmp_path, monkeypatch, stage):
  out, killed = tmp_path / "out", KeyboardInterrupt
  function, calls = getattr(os if stage == "rename" else shutil, stage), []

  def die(*arguments, **options):
    if (out / "manifest.json").exists():
      calls.append(arguments)
      raise killed
    return function(*arguments, **options)

  with monkeypatch.context() as patched:
    patched.setattr(os if stage == "rename" else shutil, stage, die)
    with pytest.raises(killed):
      prepare(out, config_of(text))
  assert calls and load(out).train.splits[0].num_documents > 300
  shard_file(out, "train-00001").unlink()
  prepare(out, config_of(text))
  assert digest(out) == digest(prepared)


def test_after_a_mistake_is_mended_it_starts_anew(text, tmp_path, caplog):
  (tmp_path / "a.jsonl").write_text('{"text": 7}\n' + "".join(json.dumps({"text": one}) + "\n" for one in prose(30)))
  config = config_lib.DataConfig(source=f"jsonl:{tmp_path}/a.jsonl", tokenizer="bytes")
  assert "line 1" in told(lambda: prepare(tmp_path / "out", config))
  prepare(tmp_path / "out", dataclasses.replace(config, bad_records="skip"))
  assert "starting anew" in caplog.text and load(tmp_path / "out").tokenizer.vocab_size == 257
  trained = config_of(text, tokenizer="train")
  assert "use at most" in told(lambda: prepare(tmp_path / "large", trained, vocab_size=60_000))
  prepare(tmp_path / "large", trained)


def test_files_that_change_meanwhile_are_noticed(tmp_path, monkeypatch):
  source = write_jsonl(tmp_path / "a.jsonl", prose(30))
  gather = preparing.gather

  def gather_late(*args):
    write_jsonl(tmp_path / "a.jsonl", prose(31))
    return gather(*args)

  monkeypatch.setattr(preparing, "gather", gather_late)
  config = config_lib.DataConfig(source=source)
  assert "files changed while they were read" in told(lambda: prepare(tmp_path / "out", config))
  monkeypatch.undo()
  prepare(tmp_path / "out", config)
  prepare(tmp_path / "fresh", config)
  assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_bad_records_are_told_with_file_and_record_or_counted(text, tmp_path, impatient, caplog, num_processes):
  for name in ("a", "b", "c"):
    shutil.copy(text[0] / f"{name}.jsonl", tmp_path)
  with open(tmp_path / "b.jsonl", "ab") as file:
    file.write(b'{"text": 7}\n{"text": "caf\xe9"}\n')
  config = config_of((tmp_path,))
  message = told(lambda: prepare(tmp_path / "out", config, num_processes))
  assert message.startswith(f'data.source={config.source}: {tmp_path}/b.jsonl line 4: "text" is of type int')
  manifest = prepare(tmp_path / "skip", dataclasses.replace(config, bad_records="skip"), num_processes)
  counts = manifest["records"]["data.source"]
  assert counts["bad"] == {'where "text" is not a string': 1, "not UTF-8": 1}
  assert (counts["records"], counts["documents"]) == (NUM_DOCUMENTS + 3, NUM_DOCUMENTS + 1)
  assert sum(split["documents"] for split in manifest["splits"].values()) == NUM_DOCUMENTS + 1
  assert len(caplog.messages) == 1 and "2 of 403 records skipped as bad" in caplog.text


@dataclasses.dataclass(frozen=True)
class Deadly:
  """A task that its process does not survive."""

  done: str
  size: int = 0


def die(task, progress):
  os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_ends_the_preparation(tmp_path, impatient):
  with pytest.raises(RunError, match="a worker process ended"), workers.Workers(2) as pool:
    pool.run(die, [Deadly(str(tmp_path / str(number))) for number in range(3)], "dying")


def test_a_log_gets_lines_where_there_is_no_terminal(monkeypatch, capsys):
  monkeypatch.setattr(workers, "_LINE_SECONDS", 0)
  with workers.bar("tokenising", 4_000_000_000, 1_000_000_000) as bar:
    bar.update(500_000_000)
  assert capsys.readouterr().err == "tokenising: 1.50 of 4.00 GB of text after 0 min\n"


UNGUARDED = """
import sys
from diffeq_nnx import config, data
from diffeq_nnx.data.preparation import workers
print("once", flush=True)
workers.PATIENCE = 0
corpus = data.load(config.DataConfig(source=sys.argv[1], tokenizer="bytes", cache_dir=sys.argv[2], num_processes=2), 300, 0)
print(corpus.validation.num_documents > 0)
"""


def test_a_script_needs_no_guard(text, tmp_path):
  (tmp_path / "script.py").write_text(UNGUARDED)
  done = subprocess.run(
    [sys.executable, str(tmp_path / "script.py"), config_of(text).source, str(tmp_path / "cache")], text=True,
    capture_output=True, env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
  assert done.stdout.split() == ["once", "True"] and done.stderr == ""


FULL = """
import resource, sys
from diffeq_nnx import config
from diffeq_nnx import jobs
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # a write beyond fails, as on a full disk
try:
  jobs.run("prepare", config.Config(data=config.DataConfig(source=sys.argv[1], tokenizer="bytes")), sys.argv[2])
except RuntimeError as error:
  print(error)
"""


def test_a_full_disk_is_one_line_and_later_it_goes_on(text, tmp_path):
  config = config_of(text, validation_fraction=0.05)
  done = subprocess.run([sys.executable, "-c", FULL, config.source, str(tmp_path / "out")], text=True,
                        capture_output=True, env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
  assert done.stdout.startswith(f"workdir={tmp_path}/out: can't be written (") and done.stdout.count("\n") == 1
  for name in ("out", "fresh"):
    prepare(tmp_path / name, config, sizes=preparation.Sizes())
  assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_memory_does_not_grow_with_the_text(tmp_path):
  peaks = []
  for count in (2000, 8000):
    source = write_jsonl(tmp_path / f"{count}.jsonl", prose(count))
    recipe = preparation.recipe(config_lib.DataConfig(source=source, tokenizer="bytes"), 300, 0)
    tracemalloc.start()
    preparation.prepare(str(tmp_path / str(count)), recipe, 1, preparation.Sizes(50_000, 50_000, 50_000))
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  text_size = os.path.getsize(tmp_path / "8000.jsonl")
  assert peaks[1] < 1.3 * peaks[0] + 0.1 * text_size


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
  np.testing.assert_array_equal(np.asarray(tokens), expected)
  with pytest.raises(IndexError):
    tokens[3]


def test_a_changed_byte_never_changes_a_token_and_is_told_with_file_and_record(prepared, tmp_path):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  path = shard_file(directory, "train-00000")
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
    ("gone", ".array_record is not there"),
    ("short", ".array_record has 70000 bytes where"),
    ("no manifest", "holds no manifest.json; make the shards with --job=prepare --workdir="),
    ("half a manifest", "manifest.json is damaged"),
    ("a key less", "manifest.json is damaged"),
    ("version", "manifest.json is of version 99"),
    ("tokenizer", "is another tokenizer"),
    ("no tokenizer", "can't be read"),
  ],
)
def test_damage_to_a_directory_is_one_line(prepared, tmp_path, damage, part):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  first, manifest = shard_file(directory, "train-00000"), directory / "manifest.json"
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


def test_too_many_open_files_are_not_taken_for_damage(prepared):
  program = "import resource, sys\nfrom tests.test_prepare import load\ncorpus = load(sys.argv[1])\nimport os\n" \
            "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 3,) * 2)\n" \
            "try: corpus.train.splits[0].tokens[:]\nexcept ValueError as error: print(error)"  # fmt: skip
  done = subprocess.run([sys.executable, "-c", program, str(prepared)], text=True, capture_output=True)
  assert "too many open files" in done.stdout and "ulimit" in done.stdout, done


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
    prepare(folder / name, config_lib.DataConfig(source=source, tokenizer=tokenizer, validation_fraction=0.2),
            sizes=preparation.Sizes(shard=500))  # fmt: skip
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
  shares = batches_lib._integer_shares(weights)
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
    row for step in range(count)
    for row in data.train_batches(corpus.train, seq_len=16, batch_size=batch_size, seed=1, start=start)[step]["inputs"].tolist()
  ]  # fmt: skip
  assert rows(4, 0, 5) + rows(6, 20, 4) + rows(3, 44, 4) == rows(8, 0, 7)


def test_a_mixture_validates_on_all_of_it_or_on_what_is_named(sources):
  corpus, alone = mixture_of(sources, 1, 1), [load(sources / name) for name in "ab"]
  expected = np.concatenate([one.validation.tokens[:] for one in alone])
  np.testing.assert_array_equal(corpus.validation.tokens[:], expected)
  assert corpus.validation.num_documents == sum(one.validation.num_documents for one in alone)
  named = mixture_of(sources, 1, 1, validation=f"shards:{sources}/b")
  np.testing.assert_array_equal(named.validation.tokens[:], alone[1].validation.tokens[:])
  assert corpus.train.bytes_per_token == pytest.approx(
    np.mean([one.train.splits[0].num_bytes / len(one.train.splits[0].tokens) for one in alone]))


@pytest.mark.parametrize(
  ("source", "part"),
  [
    ("0*shards:{}/a + 1*shards:{}/b", "'0*shards:{}/a' must be a weight above 0"),
    ("1*shards:{}/a + shards:{}/b", "must be a weight above 0"),
    ("shards:{}/a + 1*shards:{}/b", "'shards:{}/a' must be a weight"),
    ("0.7*shards:{}/a,0.3*shards:{}/b", "must be a weight"),
    ("1*shards:{}/a + 1*shards:{}/a", "each with another directory"),
    ("1*shards:{}/a+1*shards:{}/../" + "{}".replace("{}", "sources0") + "/a/", "must be a weight"),
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


@pytest.mark.parametrize("form", ["0.7*shards:{}/a+0.3*shards:{}/b", " 7e-1 * shards:{}/a  + .3*shards:{}/b/ "])
def test_spaces_in_a_mixture_don_t_matter(sources, form):
  if " ." in form:
    form = form.replace(" .3", " 0.3")
  corpus = data.load(config_lib.DataConfig(source=form.replace("{}", str(sources))), 300, seed=0)
  assert corpus.train.weights == pytest.approx((0.7, 0.3)) and corpus.fingerprint == mixture_of(sources, 0.7, 0.3).fingerprint


def test_the_position_holds_for_another_number_of_processes(sources):
  corpus, batch_size = mixture_of(sources, 0.7, 0.3), 4
  batches = lambda rows: iter(data.train_batches(
    corpus.train, seq_len=16, batch_size=batch_size, seed=1, rows=np.array(rows)).to_iter_dataset())  # fmt: skip
  whole = [batch["inputs"].tolist() for batch in itertools.islice(batches(range(4)), 40)]
  for step in (0, 7, 39):
    before = batches(range(4))
    for _ in range(step):
      next(before)
    parts = [batches(rows) for rows in ([0, 1], [2], [3])]
    for part in parts:
      part.set_state(json.loads(json.dumps(before.get_state())))
    after = [sum((next(part)["inputs"].tolist() for part in parts), []) for _ in range(40 - step)]
    assert after == whole[step:]


def test_training_from_shards_is_training_from_the_text(text, tmp_path, capfd):
  source = config_of(text, cache_dir=str(tmp_path / "cache"))
  config = config_lib.Config(
    model=small_model(vocab_size=300, num_steps=2, embed_dim=16), data=source,
    train=config_lib.TrainConfig(steps=3, batch_size=4, remat="none", loss_chunks=4, log_every=1, peak_tflops=0.1),
    eval=config_lib.EvalConfig(every=3, max_batches=2),
  )  # fmt: skip
  values = train(config, str(tmp_path / "text"))
  result = jobs.run("prepare", config, str(tmp_path / "shards"))
  line = json.loads(capfd.readouterr().out)
  assert line == result and line["train"]["documents"] + line["validation"]["documents"] == len(text[1])
  moved = tmp_path / "moved"
  shutil.move(tmp_path / "shards", moved)
  shards_config = lambda directory, **changes: dataclasses.replace(
    config, data=config_lib.DataConfig(source=f"shards:{directory}"), **changes)  # fmt: skip
  again = train(shards_config(moved), str(tmp_path / "b"))
  assert again["loss"] == values["loss"] and again["bits_per_byte"] == values["bits_per_byte"]
  shutil.move(moved, tmp_path / "elsewhere")  # the run knows its tokens wherever they are, and no others
  longer = dataclasses.replace(config.train, steps=4, batch_size=2)
  train(shards_config(tmp_path / "elsewhere", train=longer), str(tmp_path / "b"))
  prepare(tmp_path / "other", dataclasses.replace(source, shuffle_seed=1))
  message = told(lambda: train(shards_config(tmp_path / "other", train=longer), str(tmp_path / "b")))
  assert "belongs to another run: the text is " in message
