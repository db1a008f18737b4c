"""Models on the hub: a server on this machine speaks its protocol."""

import os

from huggingface_hub import constants
import pytest

from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting.hub import find_folder
from tests.hub_server import COMMIT, Hub

FETCHED = ["config.json", "model-00001-of-00001.safetensors", "tokenizer.json"]
MODELS = ("org/open", "org/private", "org/gated")


@pytest.fixture
def hub(tmp_path, monkeypatch):
  for model in MODELS:
    folder = tmp_path / "models" / model
    folder.mkdir(parents=True)
    for name in (*FETCHED, "modeling.py", "pytorch_model.bin"):
      (folder / name).write_text(f"{model} {name}")
  server = Hub(tmp_path / "models", "secret", private=("org/private",), gated=("org/gated",))
  template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
  monkeypatch.setattr(constants, "ENDPOINT", server.url)
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("HF_TOKEN", raising=False)
  yield server
  server.shutdown()
  server.server_close()


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


def test_what_the_hub_refuses_is_said_with_a_remedy(hub):
  for name, parts in (
    ("org/none", ["the hub has no such model", "correct the name", "HF_TOKEN"]),
    ("org/private", ["the hub has no such model", "for a private model", "hf auth login"]),
    ("org/gated", ["behind a gate", "ask for access", "HF_TOKEN"]),
    ("org/open@v9", ["no such revision"]),
  ):
    with pytest.raises(UserError) as caught:
      find_folder(name)
    for part in (f"from_hf={name}:", *parts):
      assert part in str(caught.value)


def test_without_a_network_one_line_says_so_and_paths_stay_paths(hub, tmp_path):
  hub.shutdown()
  hub.server_close()
  with pytest.raises(UserError, match="can't be fetched from the hub .*; connect to the network, or name a folder"):
    find_folder("org/open")
  for path in (str(tmp_path), "/none/of/these", "none", "gs://bucket/model", "a/b/c"):
    assert find_folder(path) == path
