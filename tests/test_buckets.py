"""Runs, shards, caches and exports in a bucket: the same as on a disk, whole or not at all, and through faults."""

import itertools
import os
import shutil
import signal
import urllib.parse

import jax
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, files, jobs
from diffeq_nnx.data import shards
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import read_metrics
from launch.object_store import ObjectStore
from tests.conftest import change, leaves_coroutines, mistake, run_config, told, write_documents
from tests.test_data import prose, write_jsonl
from tests.test_distributed import job

pytestmark = leaves_coroutines  # gcsfs, s3fs and orbax


@pytest.fixture(scope="module", params=["gs"])
def server(request):
  """One store of each kind for the file, since gcsfs and s3fs keep their connections."""
  with ObjectStore(kind=request.param) as store, pytest.MonkeyPatch.context() as patch:
    for name, value in store.environment.items():
      patch.setenv(name, value)
    yield store


@pytest.fixture
def store(server, request):
  """The store without faults, and the URL of a folder of its own."""
  server.fault = lambda method, path: None
  server.requests.clear()
  yield server, f"{server.root}/{request.node.name.replace('[', '_').rstrip(']')}"
  server.fault = lambda method, path: None


def every(count, *faults):
  """Fails each `count`-th request, by these faults in turn."""
  numbers, kinds = itertools.count(1), itertools.cycle(faults)
  return lambda method, path: next(kinds) if next(numbers) % count == 0 else None


@pytest.mark.parametrize("server", ["gs", "s3"], indirect=True)
def test_files_and_folders(store):
  _, root = store
  path = f"{root}/a/b.json"
  assert not files.exists(path) and files.list_sizes(f"{root}/a") == {}
  files.write_json(path, {"x": 1})
  assert files.read_json(path) == {"x": 1} and files.exists(path) and files.is_folder(f"{root}/a")
  assert files.list_sizes(f"{root}/a") == {"b.json": len(files.read(path))}
  assert files.read_ranges([(path, 1, 4), (path, 0, 2)]) == [files.read(path)[1:4], files.read(path)[:2]]
  with files.replacing_folder(f"{root}/a", "last") as place:
    for name in ("last", "first"):
      with open(os.path.join(place, name), "w") as file:
        file.write(name)
  assert set(files.list_sizes(f"{root}/a")) == {"first", "last"}  # what was there is gone
  files.move_folder(f"{root}/a", f"{root}/b")
  with files.local(f"{root}/b") as place:
    assert sorted(os.listdir(place)) == ["first", "last"]
  files.remove(f"{root}/b")
  files.remove(f"{root}/b")
  assert not files.exists(f"{root}/a") and not files.exists(f"{root}/b")
  with pytest.raises(FileNotFoundError, match="no such bucket or object"):
    files.read(path)
  assert "this kind of URL can't be used" in told(lambda: files.exists("xyz://bucket/a"))


def test_a_folder_is_whole_or_lacks_its_last_file(store):
  """However many requests go through before the bucket refuses."""
  server, root = store

  def make(content):
    with files.replacing_folder(root, "last") as folder:
      for name in ("first", "second", "last"):
        with open(os.path.join(folder, name), "w") as file:
          file.write(content)

  for limit in range(20):
    make("old")
    numbers = itertools.count()
    server.fault = lambda method, path, numbers=numbers, limit=limit: "403" if next(numbers) >= limit else None
    try:
      make("new")
      break
    except OSError:
      server.fault = lambda method, path: None
    if files.exists(f"{root}/last"):
      assert {files.read(f"{root}/{name}") for name in ("first", "second", "last")} == {b"old"}
  server.fault = lambda method, path: None
  assert 4 < limit < 19 and files.read(f"{root}/last") == b"new"


@pytest.mark.slow(reason="trains and resumes over the network of this machine, and gcsfs waits before a repetition")
def test_a_run_in_a_bucket_outlives_faults_and_is_the_run_on_a_disk(store, finished, capsys):
  server, root = store
  config, local = finished
  config = change(config, checkpoint=dict(keep=5))
  server.fault = every(61, "503", "reset")
  train(config, root)
  assert len(server.requests) > 4 * 61
  server.fault = lambda method, path: None
  files.remove(f"{root}/checkpoints/16")
  files.remove(f"{root}/checkpoints/20/commit_success.txt")  # as if it was killed while it saved
  capsys.readouterr()
  train(config, root)
  assert "continuing from the checkpoint of step 12" in capsys.readouterr().err
  for split in ("train", "validation"):
    here, there = ([(r["step"], r["loss"]) for r in read_metrics(place, split)] for place in (root, str(local)))
    assert here == there
  ours, theirs = (Run.open(place) for place in (root, str(local)))
  assert ours.step == theirs.step == 20
  jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(one.model) for one in (ours, theirs)))
  assert files.read(f"{root}/loss.png").startswith(b"\x89PNG")
  events = files.list_sizes(f"{root}/tensorboard")
  assert len(events) == 2 and min(events.values()) > 0
  before = {name for name in server.objects() if "/checkpoints/20/" in name}
  server.fault = lambda method, path: "403" if method in ("POST", "PUT", "DELETE") else None
  with pytest.raises((RunError, UserError), match="can't be written|could not"):
    train(change(config, train=dict(steps=28)), root)
  server.fault = lambda method, path: None
  assert before and before <= set(server.objects())  # a bucket that refuses loses nothing
  train(change(config, train=dict(steps=24)), root)
  assert Run.open(root).step == 24


def test_shards_in_a_bucket_are_read_by_ranges_and_give_the_same_batches(store, tmp_path, monkeypatch):
  monkeypatch.setattr(shards, "RECORD_TOKENS", 1000)
  server, root = store
  source = write_jsonl(tmp_path / "a.jsonl", prose(100))
  keys = dict(source=source, tokenizer="bytes", num_processes=1, cache_dir=str(tmp_path / "cache"))
  config = change(config_lib.Config(), model=dict(vocab_size=300), data=keys)
  for place in (f"{root}/shards", str(tmp_path / "shards")):
    jobs.run("prepare", config, place)
  assert os.listdir(tmp_path / "cache") == []  # where the bucket's were made
  jobs.run("prepare", config, f"{root}/shards")  # they are complete
  found = []
  for place in (f"{root}/shards", str(tmp_path / "shards")):
    corpus = data.load(config_lib.DataConfig(source=f"shards:{place}"), 300, seed=0)
    batches = data.train_batches(corpus.train, seq_len=64, batch_size=4, seed=0)
    server.requests.clear()
    server.fault = every(9, "503")
    found.append([batches[step]["inputs"] for step in range(3)])
    assert (len(server.requests) > 9) == place.startswith(root)
  np.testing.assert_array_equal(*found)
  server.fault = lambda method, path: None
  corpus = data.load(config_lib.DataConfig(source=f"shards:{root}/shards"), 300, seed=0)
  server.requests.clear()
  corpus.train.splits[0].tokens[10:20]
  ranges = [header for method, path, header in server.requests if method == "GET" and ".tokens" in path]
  assert ranges and all(header.startswith("bytes=") for header in ranges)
  sizes = [int(stop) + 1 - int(start) for start, stop in (one[6:].split("-") for one in ranges)]
  assert max(sizes) <= 2 * shards.RECORD_TOKENS


@pytest.mark.slow(reason="several jobs")
def test_jobs_make_what_they_make_on_a_disk(store, finished, tmp_path, capsys):
  server, root = store
  config, workdir = finished
  with files.replacing_folder(f"{root}/run", "run.json") as place:
    shutil.copytree(workdir, place, dirs_exist_ok=True)
  own = config.model.num_steps
  server.requests.clear()
  result = jobs.run("evaluate", config, f"{root}/run", num_steps=(own, own + 1))
  assert files.exists(f"{root}/run/depths.png")
  downloads = [path for method, path, _ in server.requests if method == "GET" and "list" not in path]
  arrays = lambda item: [path for path in downloads if "/d/" in urllib.parse.unquote(path) and item in path]
  assert arrays("params") and not arrays("optimizer")  # the larger part of a checkpoint
  made = jobs.run("discretize", config, f"{root}/stored", from_workdir=f"{root}/run")
  assert made["after"]["loss"] == pytest.approx(result["by_num_steps"][0]["loss"], abs=1e-5)
  jobs.run("export", Run.open(f"{root}/stored").started, f"{root}/stored", out=f"{root}/exported")
  jobs.run("export", Run.open(f"{root}/stored").started, f"{root}/stored", out=str(tmp_path / "exported"))
  assert set(files.list_sizes(f"{root}/exported")) == set(os.listdir(tmp_path / "exported"))
  for name in os.listdir(tmp_path / "exported"):
    assert files.read(f"{root}/exported/{name}") == (tmp_path / "exported" / name).read_bytes()
  assert "holds something already" in told(lambda: jobs.run("export", config, f"{root}/run", out=f"{root}/exported"))


@pytest.mark.parametrize(
  ("url", "fault", "part"), [("no-such-bucket/run", None, "no such bucket"), ("bucket/forbidden", "403", "Forbidden")]
)
def test_what_can_t_be_used_is_one_line(store, tmp_path, url, fault, part):
  server, url = store[0], f"gs://{url}"
  server.fault = lambda method, path: fault
  write_documents(tmp_path)
  message = told(lambda: train(run_config(tmp_path), url))
  assert url in message and part in message


def test_a_bucket_that_can_t_hold_checkpoints_is_refused_before_the_text_is_read(capsys):
  """Nor is the bucket asked, for which credentials may lack."""
  for arguments in (["--config=configs/tiny.py", "--config.data.source=text:missing/*.txt"], ["--job=evaluate"]):
    code, line = mistake([*arguments, "--workdir=s3://bucket/run"], capsys)
    assert code == 2
    assert line.startswith("error: workdir=s3://bucket/run: orbax keeps checkpoints on disks and at gs://")


@pytest.mark.slow(reason="three jobs of processes")
def test_of_two_processes_on_a_bucket_one_is_killed_and_another_mesh_goes_on(store, tmp_path):
  """With the losses of a run that was never interrupted, on a disk."""
  server, root = store
  more = ("--config.checkpoint.every=4", "--config.train.steps=20")
  with job(tmp_path / "cache", tmp_path / "whole", 1, more=more) as (alone,):
    assert alone.end() == 0, alone.lines[-20:]
  environment = lambda process: server.environment
  with job(tmp_path / "cache", root, 2, more=more, environment=environment) as (first, second):
    first.wait_for("step 10/20")  # the checkpoint of step 4 was written before that of step 8 began
    second.send(signal.SIGKILL)
    assert first.end() != 0
  with job(tmp_path / "cache", root, 1, devices=2, more=more, environment=environment) as (alone,):
    assert alone.end() == 0, alone.lines[-20:]
    assert any(line.startswith("continuing from the checkpoint of step ") for line in alone.lines)
  here, there = ([r["loss"] for r in read_metrics(place, "train")] for place in (root, str(tmp_path / "whole")))
  assert len(here) == len(there) == 20
  np.testing.assert_allclose(here, there, rtol=2e-6)
