"""What a preparation promises: the same bytes however it ran, every document once, damage noticed and repaired."""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
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

import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.data import preparation, shards
from diffeq_nnx.data.preparation import preparing, workers
from diffeq_nnx.data.sources import files
from diffeq_nnx.errors import RunError
from tests.conftest import told
from tests.prepared_text import NUM_DOCUMENTS, config_of, digest, load, prepare, prepared, shard_file, small_tasks, text  # noqa: F401
from tests.test_data import documents_of, prose, write_jsonl


def test_every_document_is_there_once_in_order_and_counted(text, prepared):
  texts, corpus = text[1], load(prepared)
  manifest = json.loads((prepared / "manifest.json").read_text())
  (train,), validation = corpus.train.splits, corpus.validation
  trained, held = documents_of(train, corpus.tokenizer), documents_of(validation, corpus.tokenizer)
  assert trained == [one for one in texts if one not in held] and held == [one for one in texts if one in held]
  assert 5 < len(held) < 50 and len(manifest["splits"]["train"]["shards"]) > 3
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
  assert sorted(os.listdir(prepared)) == sorted([".lock", "manifest.json", "tokenizer.json", *files])


def test_validation_may_be_text_that_is_also_trained_on(text, tmp_path):
  write_jsonl(tmp_path / "b.jsonl", text[1][::-1])
  named = config_of(text, validation=f"jsonl:{tmp_path}/b.jsonl")
  prepare(tmp_path / "named", named)
  corpus = load(tmp_path / "named", validation=named.validation, tokenizer="bytes")
  assert documents_of(corpus.validation, corpus.tokenizer) == text[1][::-1]
  assert documents_of(corpus.train.splits[0], corpus.tokenizer) == text[1]


def test_processes_and_names_change_no_byte_and_bad_records_are_told_or_counted(text, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(workers, "PATIENCE", 0)
  shutil.copytree(text[0], tmp_path / "text")
  with open(tmp_path / "text" / "b.jsonl", "ab") as file:
    file.write(b'{"text": 7}\n{"text": "caf\xe9"}\n')
  config = config_of((tmp_path / "text",))
  message = told(lambda: prepare(tmp_path / "out", config))
  assert message.startswith(f'data.source={config.source}: {tmp_path}/text/b.jsonl line 4: "text" is of type int')
  config = dataclasses.replace(config, bad_records="skip")
  manifest = prepare(tmp_path / "[a-z]* 100%", config, 2)
  counts = manifest["records"]["data.source"]
  assert counts["bad"] == {'where "text" is not a string': 1, "not UTF-8": 1}
  assert (counts["records"], counts["documents"]) == (NUM_DOCUMENTS + 3, NUM_DOCUMENTS + 1)
  assert sum(split["documents"] for split in manifest["splits"].values()) == NUM_DOCUMENTS + 1
  assert len(caplog.messages) == 1 and f"2 of {NUM_DOCUMENTS + 3} records skipped as bad" in caplog.text
  prepare(tmp_path / "out", config)  # which the mistake left unfinished
  assert "starting anew" in caplog.text and digest(tmp_path / "[a-z]* 100%") == digest(tmp_path / "out")


PROGRAM = """
import sys
from diffeq_nnx import config, data
from diffeq_nnx.data.preparation import preparing, workers
from diffeq_nnx.data.sources import files
source, directory, num_processes = sys.argv[1:]
workers.PATIENCE, preparing.TASK_BYTES, files.PART_BYTES, preparing.SHARD_BYTES = 0, 400, 400, 10_000
settings = {"validation_fraction": 0.1, "tokenizer": "bytes", "num_processes": int(num_processes)}
recipe = data.make_recipe(config.DataConfig(source=source, **settings), 300, 0)
try:
  data.prepare(directory, recipe)
except RuntimeError as error:
  assert "jax" not in sys.modules  # which takes a worker seconds to import
  sys.exit(str(error))
"""


def test_killed_again_and_again_it_ends_with_the_same_bytes(text, tmp_path, monkeypatch, caplog):
  directory = tmp_path / "shards"
  rng = random.Random(0)
  for victim, wanted in (("worker", 30), ("job", 120)):  # the finished tasks at which it is killed
    words = [sys.executable, "-c", PROGRAM, config_of(text).source, str(directory), "2"]
    process = subprocess.Popen(words, text=True, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None:
      done = glob.glob(f"{directory}/{preparation.UNFINISHED}/*/*.json")  # which outlives the folder's renaming
      if len(done) >= wanted:
        alive = [process.pid] if victim == "job" else _session(process.pid, "spawn_main")
        time.sleep(rng.random() * 0.02)
        with contextlib.suppress(ProcessLookupError):
          os.kill(rng.choice(alive), signal.SIGKILL)
        process.wait(20)
      time.sleep(0.005)
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL or errors.startswith("a worker process ended"), errors
    assert "is not finished" in told(lambda: load(directory))
    deadline = time.monotonic() + 20
    while _session(process.pid) and time.monotonic() < deadline:
      time.sleep(0.02)
    assert not _session(process.pid)  # its workers are gone too
  monkeypatch.setattr(preparing, "TASK_BYTES", 400)
  monkeypatch.setattr(files, "PART_BYTES", 400)
  for place in (directory, tmp_path / "whole"):
    prepare(place, config_of(text))
  assert "starting anew" not in caplog.text
  assert digest(directory) == digest(tmp_path / "whole")


def test_a_program_that_its_workers_would_start_again_ends(text, tmp_path):
  program = tmp_path / "program.py"
  program.write_text(PROGRAM.replace("(directory, recipe)", "(directory, recipe, wait=True)"))
  words = [sys.executable, str(program), config_of(text).source, str(tmp_path / "shards"), "2"]
  done = subprocess.run(words, capture_output=True, text=True, timeout=120)
  assert done.returncode == 1 and "under `if __name__ == '__main__':`" in done.stderr


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


def test_another_recipe_foreign_files_and_several_processes_are_rejected(text, prepared, tmp_path, monkeypatch):
  message = told(lambda: prepare(prepared, config_of(text, validation_seed=3)))
  assert f"workdir={prepared}: is prepared from something else: data.validation_seed is 0 there and 3 here;" in message
  shutil.copytree(text[0], tmp_path / "text")
  config = config_of((tmp_path / "text",))
  prepare(tmp_path / "out", config)
  os.utime(tmp_path / "text" / "a.jsonl", (1, 1))
  message = told(lambda: prepare(tmp_path / "out", config))
  assert f"the files of data.source={config.source} have changed since" in message
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("x")
  (tmp_path / "mine" / "manifest.json").write_text("{}")
  assert "holds thesis.tex, which is no part" in told(lambda: prepare(tmp_path / "mine", config))
  assert (tmp_path / "mine" / "manifest.json").exists()
  (tmp_path / "begun").mkdir()
  with open(tmp_path / "begun" / ".lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    assert "another process is preparing it" in told(lambda: prepare(tmp_path / "begun", config))
  monkeypatch.setattr("jax.process_count", lambda: 2)
  message = told(lambda: jobs.run("prepare", config_lib.Config(data=config_of(text)), str(tmp_path / "new")))
  assert message.startswith("--job=prepare: runs in one process") and not (tmp_path / "new").exists()


def test_preparing_again_mends_what_is_damaged_and_leaves_what_is_whole(text, prepared, tmp_path, monkeypatch, caplog):
  out = tmp_path / "out"
  manifest, shard = out / "manifest.json", out / shard_file(prepared, "train", 2).name

  def change_a_bit():
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)

  for name, damage, said in (
    ("a bit", change_a_bit, True),
    ("no shard", shard.unlink, True),
    ("no manifest", manifest.unlink, False),
    ("half a manifest", lambda: os.truncate(manifest, 300), True),
  ):
    shutil.copytree(prepared, out)
    caplog.clear()
    damage()
    prepare(out, config_of(text))
    assert digest(out) == digest(prepared) and ("preparing it again" in caplog.text) == said, name
    shutil.rmtree(out)
  shutil.copytree(prepared, out)
  monkeypatch.setattr(preparing, "tokenize", None)
  prepare(out, config_of(text))
  assert digest(out) == digest(prepared)


def test_a_manifest_that_can_not_be_read_now_stays(text, prepared, tmp_path, monkeypatch):
  out = shutil.copytree(prepared, tmp_path / "out")

  def refuse(path):
    raise PermissionError(13, "Permission denied")

  with monkeypatch.context() as patch:
    patch.setattr(shards.files, "read_json", refuse)
    assert "manifest.json can't be read (Permission denied)" in told(lambda: prepare(out, config_of(text)))
  assert digest(out) == digest(prepared)


def test_what_another_recipe_left_for_a_bucket_is_not_published(text, tmp_path, monkeypatch):
  config = dataclasses.replace(config_of(text), cache_dir=str(tmp_path / "cache"))
  with monkeypatch.context() as patch, pytest.raises(OSError):
    patch.setattr(shards.files, "publish", lambda *_: os.close(-1))
    prepare("memory://shards", config)
  assert len(os.listdir(tmp_path / "cache")) == 1
  prepare("memory://shards", dataclasses.replace(config, validation_fraction=0.4))
  assert shards.files.read_json("memory://shards/manifest.json")["recipe"]["validation_fraction"] == 0.4
  assert os.listdir(tmp_path / "cache") == []


def test_a_repository_and_notes_beside_shards_stay(text, prepared, tmp_path):
  for name in (".git", ".gitattributes"):
    (tmp_path / name).mkdir()
  prepare(tmp_path, config_of(text))
  (tmp_path / "README.md").write_text("x")
  shard_file(tmp_path, "train", 1).unlink()
  prepare(tmp_path, config_of(text))
  assert load(tmp_path).tokenizer.hash == load(prepared).tokenizer.hash
  assert {*os.listdir(tmp_path)} == {*os.listdir(prepared), ".git", ".gitattributes", "README.md"}


@pytest.mark.parametrize("module,stage", [(preparing, "finish"), (os, "rename"), (shutil, "rmtree")])
def test_a_kill_at_the_end_leaves_nothing_that_is_taken_for_work(text, prepared, tmp_path, monkeypatch, module, stage):
  """Before the manifest is written, and after; a finished shard is lost then."""
  out, function = tmp_path / "out", getattr(module, stage)

  def die(*arguments, **options):
    if stage == "finish" or (out / "manifest.json").exists():
      raise KeyboardInterrupt
    return function(*arguments, **options)

  with monkeypatch.context() as patched:
    patched.setattr(module, stage, die)
    with pytest.raises(KeyboardInterrupt):
      prepare(out, config_of(text))
  if stage != "finish":
    assert load(out).train.splits[0].num_documents > NUM_DOCUMENTS * 0.75
  shard_file(out, "train", 1).unlink()
  prepare(out, config_of(text))
  assert digest(out) == digest(prepared)


def test_a_full_disk_is_one_line_and_later_it_goes_on(text, tmp_path, monkeypatch):
  monkeypatch.setattr(preparing, "SHARD_BYTES", 10**9)
  config, (_, hard) = config_lib.Config(data=config_of(text)), resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # a write beyond fails, as on a full disk
  try:
    line = told(lambda: jobs.run("prepare", config, str(tmp_path / "out")), RunError)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  assert line.startswith(f"workdir={tmp_path}/out: can't be written (")
  assert len(list((tmp_path / "out").glob(f"{preparation.UNFINISHED}/*/*.json"))) > 3
  for name in ("out", "fresh"):
    jobs.run("prepare", config, str(tmp_path / name))
  assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
  for module, name in ((preparing, "TASK_BYTES"), (files, "PART_BYTES"), (preparing, "SHARD_BYTES")):
    monkeypatch.setattr(module, name, 30_000)
  peaks = []
  for count in (500, 2000):
    config = config_lib.DataConfig(source=write_jsonl(tmp_path / f"{count}.jsonl", prose(count)), tokenizer="bytes")
    tracemalloc.start()
    prepare(tmp_path / f"{len(peaks)}", config)
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  text_size = os.path.getsize(tmp_path / "2000.jsonl")
  assert peaks[1] < 1.3 * peaks[0] + 0.1 * text_size
