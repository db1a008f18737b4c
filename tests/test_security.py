"""Folders, runs and checkpoints of a stranger run no code, and neither read nor write where they should not.

Each test attacks; values of other types in the config of a Hugging Face folder are in tests/test_import.py. A marker is
a file that code of the stranger's would make.
"""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, files, jobs
from diffeq_nnx.config import Config, DataConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import importing
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.report import _wandb_run
from tests.attacks import ROOT, bomb, give_run, marker, program, write_json  # noqa: F401  a fixture
from tests.conftest import leaves_coroutines, mistake, run_config, small_config, told, write_documents, write_run

pytestmark = leaves_coroutines  # orbax, where it can't read
# ---- code that is part of this package


def test_the_package_reads_no_pickle_and_runs_no_text():
  """A config file is the one thing that is run, by `config.load`."""
  risky = ("pickle", "torch.load", "np.load(", "allow_pickle", "eval(", "exec(", "yaml.", "marshal", "run_path")
  found = set()
  for path in [*ROOT.glob("diffeq_nnx/**/*.py"), *ROOT.glob("launch/**/*.py")]:
    text = path.read_text()
    for harmless in ("literal_eval(", "yaml.safe_load(", "yaml.compose(", "yaml.YAMLError", "can be pickled"):
      text = text.replace(harmless, "")
    found |= {(path.relative_to(ROOT).as_posix(), word) for word in risky if word in text}
  assert found == {("diffeq_nnx/config.py", "run_path")}


# ---- Hugging Face folders

SIZES = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 12, "n_embd": 24, "n_layer": 1, "n_head": 4}


@pytest.fixture
def folder(tmp_path, marker):
  """A Hugging Face folder whose every file that could be run is a bomb."""
  folder = tmp_path / "theirs"
  folder.mkdir()
  for name in ("modeling_theirs.py", "configuration_theirs.py", "tokenization_theirs.py", "setup.py", "__init__.py"):
    (folder / name).write_text(program(marker))
  for name in ("pytorch_model.bin", "training_args.bin", "model.pkl", "optimizer.pt", "tokenizer.pkl"):
    (folder / name).write_bytes(bomb(marker))
  code = {"AutoConfig": "configuration_theirs.C", "AutoModelForCausalLM": "modeling_theirs.M"}
  write_json(folder / "config.json", {**SIZES, "auto_map": code, "trust_remote_code": True})
  tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_theirs.T", None]}, "tokenizer_class": "T"}
  write_json(folder / "tokenizer_config.json", tokenizer)
  return folder


def import_job(folder, capsys):
  """The line that --job=import ends with."""
  workdir = folder.parent / "imported"
  code, line = mistake(["--job=import", f"--from_hf={folder}", f"--workdir={workdir}", "--num_processes=1"], capsys)
  assert code == 2 and not (workdir / "run.json").exists()
  return line


def test_pickled_weights_are_not_read_under_any_name(folder, marker, capsys):
  assert "holds pytorch_model.bin, which can run code when it is read" in import_job(folder, capsys)
  (folder / "model.safetensors").write_bytes(bomb(marker))
  assert "model.safetensors can't be read" in import_job(folder, capsys)


def test_an_index_names_files_of_its_folder_alone(folder, capsys):
  """The file outside is one that would fit, were it read; an index of another shape is one line, too."""
  secret = folder.parent / "secret.safetensors"
  safetensors.numpy.save_file({"wte.weight": np.zeros((31, 24), np.float32)}, secret)
  for outside in ("../secret.safetensors", str(secret), "", ".", "..", "memory://x/w", 5, ["a"], None):
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"wte.weight": outside}})
    line = import_job(folder, capsys)
    assert f"model.safetensors.index.json names {outside!r}, which is no file of the folder" in line
  for weight_map in (None, 5, [], "x", {}, [["a", "b"]]):
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    assert import_job(folder, capsys).startswith("error: from_hf=")


def test_the_tokenizer_that_names_code_is_read_as_data(folder):
  """With the folder's tokenizer in place, the names of code are not followed, and the folder is not imported from."""
  (folder / "tokenizer.json").write_bytes(data.load_tokenizer("bytes").model_bytes)
  assert importing.read_tokenizer(str(folder)).vocab_size == 257


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "config.json", "tokenizer_config.json"])
def test_a_pickle_in_place_of_a_tokenizer_file_is_one_line(folder, marker, name):
  (folder / "tokenizer.json").write_bytes(data.load_tokenizer("bytes").model_bytes)
  if name == "tokenizer.model":
    (folder / "tokenizer.json").unlink()  # which would be taken, and the other not read
  (folder / name).write_bytes(bomb(marker))
  told(lambda: importing.read_tokenizer(str(folder)))


# ---- work directories


@pytest.mark.filterwarnings("default")  # of lm_eval
def test_task_files_that_a_run_names_are_not_run(tmp_path, marker, capsys):
  """Task files of lm_eval may name Python functions; only the user's command line or config names a folder of them."""
  pytest.importorskip("lm_eval")
  (tmp_path / "theirs.py").write_text(program(marker) + "def shown(doc):\n  return 'x'\n")
  (tmp_path / "data.jsonl").write_text('{"question": "x"}\n')
  (tmp_path / "theirs.yaml").write_text(
    f"task: theirs\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/data.jsonl\n"
    "test_split: test\noutput_type: loglikelihood\ndoc_to_text: !function theirs.shown\ndoc_to_target: x\n"
  )
  harness = {"tasks": "theirs", "include_path": str(tmp_path), "default_tasks": False}
  give_run(tmp_path / "run", harness=harness)
  code, line = mistake(["--job=harness", f"--workdir={tmp_path}/run", "--num_processes=1"], capsys)
  assert code == 2 and "there is no such task" in line


def tree(folder):
  """Every file and folder in a folder, with contents."""
  return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_jobs_read_and_write_no_more_than_they_need_of_what_run_json_names(tmp_path):
  """A job on the text writes one folder of the cache beside the run; one on the model alone, nothing."""
  write_documents(tmp_path)
  config = run_config(tmp_path)
  theirs = write_run(config, tmp_path / "run")
  shutil.rmtree(tmp_path / "cache")
  before = tree(tmp_path)
  jobs.run("evaluate", config, theirs)
  new = tree(tmp_path).keys() - before.keys()
  assert {name.partition("/")[0] for name in new} == {"cache"}
  assert len(os.listdir(tmp_path / "cache")) == 1 and len(os.listdir(tmp_path / "cache")[0]) == 64
  shutil.rmtree(tmp_path / "cache")
  for path in tmp_path.glob("*.txt"):
    path.unlink()
  before = tree(tmp_path)
  jobs.run("generate", config, theirs, prompt=["It"], max_tokens=1)
  assert tree(tmp_path) == before


def test_a_run_names_no_account_of_weights_and_biases(tmp_path, monkeypatch):
  """A project is one of the user's own."""
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  give_run(tmp_path)
  assert "Invalid project name" in told(lambda: _wandb_run("theirs/open", str(tmp_path), str(tmp_path)))


def test_a_run_copies_no_text_to_another_bucket(tmp_path):
  """One in a bucket keeps its cache there."""
  for cache in ("gs://theirs/cache", "ftp://theirs/cache", "memory://cache", "file:///tmp/cache"):
    give_run(tmp_path, data={"cache_dir": cache})
    assert Run.open(str(tmp_path)).started.data.cache_dir == DataConfig().cache_dir
  own = Config(data=DataConfig(cache_dir="memory://bucket/cache"))
  record = {"config": config_lib.to_dict(own), "tokenizer_hash": "", "corpus": "", "source": None, "hash": "0"}
  files.write("memory://bucket/run/run.json", json.dumps(record).encode())
  assert Run.open("memory://bucket/run").started.data.cache_dir == "memory://bucket/cache"


def test_results_stay_in_the_work_directory(tmp_path):
  for outside in ("/tmp/x", "../x", "a/../../x", "..", ".", "", "checkpoints", "report/x", "gs://x/y", "a::gs://x"):
    give_run(tmp_path, harness={"folder": outside})
    assert "must be a folder of its own within the work directory" in told(lambda: Run.open(str(tmp_path)).started)


@pytest.mark.parametrize(
  "change",
  [
    {"config": []},
    {"config": {"__class__": 1}},
    {"config": {"\x1b[2J": 1}},
    {"config": {"model": {"num_steps": {"x": 1}}}},
    {"tokenizer_hash": 5},
    {"corpus": None},
    "[" * 100_000,
    b"\xff\xfe",
    "pickle",
  ],
)
def test_a_run_json_of_any_shape_is_one_line(tmp_path, marker, capsys, change):
  workdir = tmp_path / "run"
  record = give_run(workdir)
  content = json.dumps({**record, **change}) if isinstance(change, dict) else change
  content = bomb(marker) if content == "pickle" else content if isinstance(content, bytes) else content.encode()
  (workdir / "run.json").write_bytes(content)
  code, line = mistake(["--job=evaluate", f"--workdir={workdir}", "--num_processes=1"], capsys)
  assert code == 2 and line.isprintable()


# ---- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """(work directory, state) with a checkpoint and frozen parameters."""
  workdir = tmp_path_factory.mktemp("checkpoints")
  array = jnp.arange(6, dtype=jnp.float32)
  state = {"params": {"a": array}, "opt_state": {"m": array}, "step": jnp.asarray(4), "key": jax.random.key(0)}
  checkpoints = Checkpoints(str(workdir), small_config(), "")
  checkpoints.save_frozen({"b": array})
  checkpoints.save(state, {"windows": 4}, 1.0)
  checkpoints.close()
  return workdir, {**state, "frozen": {"b": array}}


def restored(workdir, state):
  """What a stranger's checkpoint gives: its state, or None with a line that says that it is damaged."""
  try:
    return Checkpoints(str(workdir), small_config(), "", read_only=True).restore(jax.eval_shape(lambda: state))
  except UserError as error:
    assert "can be read" in str(error) or "can't be read" in str(error)
    return None


def test_no_file_of_a_checkpoint_is_read_as_a_pickle(saved, tmp_path, marker, capsys):
  """Each file in turn is a bomb, then all; older formats' names too. What is read in spite of that is as it was.

  Those of the optimizer and the counters are read as those of the parameters are.
  """
  workdir, state = saved
  names = sorted(path.relative_to(workdir) for path in workdir.rglob("*") if path.is_file())
  assert len(names) > 20 and restored(workdir, state)
  items = ("checkpoints/4/params", "checkpoints/4/optimizer", "checkpoints/4/counters", "frozen")
  extra = [pathlib.Path(item, name) for item in items for name in ("aggregate", "checkpoint", "msgpack", "state.pkl")]
  unread, in_turn = 0, [[name] for name in names if not {"optimizer", "counters"} & set(name.parts)]
  for number, attacked in enumerate([*in_turn, names, extra, [*names, *extra]]):
    place = tmp_path / str(number)
    shutil.copytree(workdir, place)
    for name in attacked:
      (place / name).write_bytes(bomb(marker))
    found = restored(place, state)
    unread += found is None
    if found is not None:
      jax.tree.map(np.testing.assert_array_equal, found[0]["params"], state["params"])
    assert not marker.exists(), attacked
  assert unread > 5
