"""Models on the hub: a server on this machine speaks its protocol."""

import os

import pytest

from diffeq_nnx.exporting.hub import find_folder
from tests.conftest import told
from tests.hub_server import COMMIT, serving

FETCHED = ["config.json", "model-00001-of-00001.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(tmp_path):
  for model in ("org/open", "org/private", "org/gated"):
    folder = tmp_path / "models" / model
    folder.mkdir(parents=True)
    for name in (*FETCHED, "modeling.py", "pytorch_model.bin"):
      (folder / name).write_text(f"{model} {name}")
  with serving(tmp_path / "models", tmp_path / "cache") as server:
    yield server


def test_a_name_is_fetched_without_code_once_and_with_a_token_where_one_is_needed(hub, monkeypatch):
  folder = find_folder("org/open")
  assert sorted(os.listdir(folder)) == FETCHED
  with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
    assert file.read() == "org/open config.json"
  assert sorted(hub.fetched) == sorted(os.listdir(folder))
  assert find_folder("org/open@main") == find_folder(f"org/open@{COMMIT}") == folder
  monkeypatch.setenv("HF_TOKEN", "secret")
  for model in ("org/private", "org/gated"):
    assert len(os.listdir(find_folder(model))) == 3
  assert len(hub.fetched) == 9  # each file once
  hub.shutdown()
  hub.server_close()
  assert find_folder("org/open") == folder  # without the network


def test_what_the_hub_refuses_is_said_with_a_remedy_also_without_a_network_and_paths_stay_paths(hub, tmp_path):
  for name, parts in (
    ("org/private", ["the hub has no such model", "for a private model", "hf auth login"]),
    ("org/gated", ["behind a gate", "ask for access", "HF_TOKEN"]),
    ("org/open@v9", ["no such revision"]),
  ):
    message = told(lambda name=name: find_folder(name))
    assert all(part in message for part in (f"from_hf={name}:", *parts)), message
  assert "from_hf=./none: is no folder, and can't be a name on the hub" in told(lambda: find_folder("./none"))
  hub.shutdown()
  hub.server_close()
  message = told(lambda: find_folder("org/open"))
  assert "can't be fetched from the hub " in message and "; connect to the network, or name a folder" in message
  for path in (str(tmp_path), "/none/of/these", "none", "gs://bucket/model", "a/b/c"):
    assert find_folder(path) == path
