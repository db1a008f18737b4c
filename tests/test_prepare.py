"""What a preparation promises: the same bytes however it ran, every document once, damage noticed and repaired."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.data import preparation, shards
from diffeq_nnx.data.preparation import passes, preparing, workers
from diffeq_nnx.errors import RunError
from tests.conftest import told
from tests.prepared_text import NUM_DOCUMENTS, config_of, digest, load, prepare, prepared, shard_file, small_tasks, text  # noqa: F401
from tests.test_data import prose, write_jsonl


def documents_of(split, tokenizer):
  tokens = split.tokens[:]
  ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
  return [tokenizer.decode(run) for run in np.split(tokens, ends)[:-1]]


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
  assert passes.shuffled(places, 5).tolist() == [key(int(place), 5) for place in places]
  assert len(np.unique(passes.shuffled(np.arange(10**5, dtype=np.uint64), 0))) == 10**5


@pytest.mark.parametrize(("num_processes", "task_bytes"), [(2, 4000), (1, 10**9), (1, 100)])
def test_processes_and_tasks_change_no_byte(
  text, prepared, tmp_path, impatient, monkeypatch, num_processes, task_bytes
):
  monkeypatch.setattr(preparing, "TASK_BYTES", task_bytes)
  prepare(tmp_path / "again", config_of(text), num_processes)
  assert digest(tmp_path / "again") == digest(prepared)


@pytest.mark.parametrize("tokenizer", ["train", "bytes"])
def test_a_validation_source_of_its_own(text, tmp_path, tokenizer):
  config = config_of(text, validation=f"jsonl:{text[0]}/held.json", tokenizer=tokenizer)
  prepare(tmp_path / "shards", config)
  corpus = load(tmp_path / "shards", validation=config.validation, tokenizer=tokenizer)
  assert documents_of(corpus.validation, corpus.tokenizer) == prose(30, seed=1)
  assert sorted(documents_of(corpus.train.splits[0], corpus.tokenizer)) == sorted(text[1])


PROGRAM = """
import sys
from diffeq_nnx import config, data
from diffeq_nnx.data.preparation import preparing, workers
source, directory, num_processes = sys.argv[1:]
workers.PATIENCE, preparing.TASK_BYTES, preparing.SHARD_BYTES = 0, 4000, 10_000
recipe = data.recipe(config.DataConfig(source=source, validation_fraction=0.1, tokenizer="bytes"), 300, 0)
try:
  data.prepare(directory, recipe, int(num_processes))
except RuntimeError as error:
  sys.exit(str(error))
assert "jax" not in sys.modules  # which takes a worker seconds to import
"""


def test_killed_again_and_again_it_ends_with_the_same_bytes(text, prepared, tmp_path):
  directory, source, environment = tmp_path / "shards", config_of(text).source, os.environ | {"PYTHONPATH": os.getcwd()}
  rng, kills = random.Random(0), 0
  # the finished tasks at which it is killed
  for victim, num_processes, wanted in (("job", 1, 2), ("worker", 2, 8), ("job", 2, 20), ("job", 2, 10**9)):
    process = subprocess.Popen(
      [sys.executable, "-c", PROGRAM, source, str(directory), str(num_processes)],
      text=True,
      env=environment,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )
    while process.poll() is None:
      done = list(directory.glob(f"{preparation.UNFINISHED}/*/*.json"))
      alive = [process.pid] if victim == "job" else _session(process.pid, "spawn_main")
      if len(done) >= wanted and alive:
        time.sleep(rng.random() * 0.02)
        with contextlib.suppress(ProcessLookupError):
          os.kill(rng.choice(alive), signal.SIGKILL)
        process.wait(20)
        break
      time.sleep(0.002)
    errors = process.communicate()[1]
    kills += process.returncode == -signal.SIGKILL or "a worker process ended" in errors
    assert process.returncode in (0, -signal.SIGKILL) or errors.startswith("a worker process ended"), errors
    if (directory / preparation.UNFINISHED).exists() and not (directory / "manifest.json").exists():
      assert "is not finished" in told(lambda: load(directory))
    deadline = time.monotonic() + 20
    while _session(process.pid) and time.monotonic() < deadline:
      time.sleep(0.02)
    assert not _session(process.pid)  # its workers are gone too
  assert kills >= 2 and process.returncode == 0
  assert digest(directory) == digest(prepared)


def _session(leader, part=""):
  """The living processes of a session whose command lines hold `part`."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/stat") as file:
        state, _, _, session = file.read().rpartition(")")[2].split()[:4]
      with open(f"/proc/{pid}/cmdline") as file:
        command = file.read()
    except OSError:
      continue
    if int(session) == leader and state != "Z" and part in command:
      found.append(int(pid))
  return found


def test_a_whole_directory_is_left_as_it_is_and_a_damaged_one_made_again(text, prepared, tmp_path, monkeypatch):
  directory = tmp_path / "shards"
  shutil.copytree(prepared, directory)
  with monkeypatch.context() as patched:
    patched.setattr(preparing, "tokenize", None)
    prepare(directory, config_of(text))
  shard_file(directory, "train-00001").unlink()
  assert "is not there" in told(lambda: load(directory))
  prepare(directory, config_of(text))
  assert digest(directory) == digest(prepared)


def test_a_directory_may_have_any_name(text, prepared, tmp_path):
  directory = tmp_path / "[a-z]* 100%"
  prepare(directory, config_of(text))
  assert digest(directory) == digest(prepared)


def test_several_processes_of_a_job_are_rejected(text, tmp_path, monkeypatch):
  monkeypatch.setattr("jax.process_count", lambda: 2)
  message = told(lambda: jobs.run("prepare", config_lib.Config(data=config_of(text)), str(tmp_path / "out")))
  assert message.startswith("--job=prepare: runs in one process") and not (tmp_path / "out").exists()


def test_another_recipe_or_foreign_files_are_rejected(text, prepared, tmp_path):
  message = told(lambda: prepare(prepared, config_of(text, shuffle_seed=3)))
  assert f"workdir={prepared}: is prepared from something else: data.shuffle_seed is 0 there and 3 here;" in message
  shutil.copytree(text[0], tmp_path / "text")
  config = config_of((tmp_path / "text",))
  prepare(tmp_path / "out", config)
  os.utime(tmp_path / "text" / "a.jsonl", (1, 1))
  message = told(lambda: prepare(tmp_path / "out", config))
  assert f"the files of data.source={config.source} have changed since" in message
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
  assert ("preparing it again" in caplog.text) == (trouble in ("a bit", "half a manifest", "version"))


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
def test_bad_records_are_reported_with_file_and_record_or_counted(text, tmp_path, impatient, caplog, num_processes):
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


def test_a_worker_that_dies_ends_the_preparation(tmp_path, impatient, monkeypatch):
  (tmp_path / "deadly.py").write_text("import os, signal\ndef die(progress): os.kill(os.getpid(), signal.SIGKILL)\n")
  monkeypatch.syspath_prepend(tmp_path)
  task = importlib.import_module("deadly").die
  with pytest.raises(RunError, match="a worker process ended"):
    workers.run("dying", {str(tmp_path / str(number)): task for number in range(3)}, 2)


def test_a_log_gets_lines_where_there_is_no_terminal(monkeypatch, capsys):
  monkeypatch.setattr(workers, "_LINE_SECONDS", 0)
  with workers.bar("tokenizing", 4_000_000_000, 1_000_000_000) as bar:
    bar.update(500_000_000)
  lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
  assert lines[-1] == "tokenizing: 1.50G of 4.00G bytes of text after 00:00"


UNGUARDED = """
import sys
from diffeq_nnx import config, data
from diffeq_nnx.data.preparation import workers
print("once", flush=True)
workers.PATIENCE = 0
settings = config.DataConfig(source=sys.argv[1], tokenizer="bytes", cache_dir=sys.argv[2], num_processes=2)
corpus = data.load(settings, 300, 0)
print(corpus.validation.num_documents > 0)
"""


def test_a_script_needs_no_guard(text, tmp_path):
  (tmp_path / "script.py").write_text(UNGUARDED)
  done = subprocess.run(
    [sys.executable, str(tmp_path / "script.py"), config_of(text).source, str(tmp_path / "cache")],
    text=True,
    capture_output=True,
    env=os.environ | {"PYTHONPATH": os.getcwd()},
  )
  assert done.stdout.split() == ["once", "True"] and done.stderr == ""


@pytest.mark.parametrize("limit", [10_000, 45_000])  # a database fails, or a shard
def test_a_full_disk_is_one_line_and_later_it_goes_on(text, tmp_path, monkeypatch, capsys, limit):
  monkeypatch.setattr(preparing, "SHARD_BYTES", 10**9)
  config, (_, hard) = config_lib.Config(data=config_of(text)), resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # a write beyond fails, as on a full disk
  try:
    with pytest.raises(RunError) as caught:
      jobs.run("prepare", config, str(tmp_path / "out"))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  line = str(caught.value)
  assert line.startswith(f"workdir={tmp_path}/out: can't be written (") and "\n" not in line
  assert any((tmp_path / "out").glob(f"{preparation.UNFINISHED}/*/*.sqlite")) == (limit > 10_000)
  for name in ("out", "fresh"):
    jobs.run("prepare", config, str(tmp_path / name))
  assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_damaged_unfinished_work_is_one_line(text, prepared, tmp_path, monkeypatch):
  monkeypatch.setattr(preparing, "gather", None)
  with pytest.raises(TypeError):
    prepare(tmp_path / "out", config_of(text))
  monkeypatch.undo()
  database = sorted((tmp_path / "out").glob(f"{preparation.UNFINISHED}/*/*.sqlite"))[3]
  os.truncate(database, 5000)
  assert f"{database}: is damaged (" in told(lambda: prepare(tmp_path / "out", config_of(text)))
  shutil.rmtree(database.parent)
  prepare(tmp_path / "out", config_of(text))
  assert digest(tmp_path / "out") == digest(prepared)


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
  monkeypatch.setattr(preparing, "TASK_BYTES", 20_000)
  monkeypatch.setattr(preparing, "SHARD_BYTES", 20_000)
  peaks = []
  for count in (500, 2000):
    config = config_lib.DataConfig(source=write_jsonl(tmp_path / f"{count}.jsonl", prose(count)), tokenizer="bytes")
    tracemalloc.start()
    prepare(tmp_path / f"{len(peaks)}", config)
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  text_size = os.path.getsize(tmp_path / "2000.jsonl")
  assert peaks[1] < 1.3 * peaks[0] + 0.1 * text_size
