"""train.remat=auto and train.device_batch_size=-1: what is measured, taken and kept."""

import dataclasses
import json

import jax
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx.model.ready import make_ready
from diffeq_nnx.parallel import sharding
from diffeq_nnx.training import fastest
from tests.conftest import moved_instance, told

SIZES = ["model.num_steps=2", "model.embed_dim=16", "model.num_heads=2", "model.vocab_size=32", "model.seq_len=8"]
SIZES += ["train.batch_size=8", "train.loss_chunks=None"]


def tiny(*settings: str) -> config_lib.Config:
  return config_lib.load("configs/tiny.py", [*SIZES, *settings])


def mesh_of(config):
  return sharding.make_mesh(config.mesh, jax.devices()[:1])


@pytest.fixture
def clock(monkeypatch):
  """Seconds by choice, None where it does not fit, and the choices that were asked for."""
  times, asked = {}, []

  def time_step(config, mesh, teacher):
    choice = config.train.remat, config.train.device_batch_size
    asked.append(choice)
    return times.get(choice, 1.0)

  monkeypatch.setattr(fastest, "time_step", time_step)
  return times, asked


def test_a_step_is_timed_unless_it_takes_more_memory_than_there_is(monkeypatch):
  """With a teacher."""
  config = tiny("train.device_batch_size=4", "data.attend_across_documents=False")
  mesh, model = mesh_of(config), dataclasses.replace(config.model, weights="stored", num_steps=1)
  with jax.set_mesh(mesh):
    teacher = make_ready(moved_instance(model), mesh=mesh)
    assert 0 < fastest.time_step(config, mesh, teacher) < 60
    monkeypatch.setattr(fastest, "memory_limit", lambda device: 1e5)  # bytes
    assert fastest.time_step(config, mesh, teacher) is None
  assert fastest._describe(config, mesh, teacher) != fastest._describe(config, mesh, None)


@pytest.mark.parametrize("held,sizes", [(16, [2, 4, 8, 16]), (9, [1, 3, 9]), (12, [1, 3, 6, 12]), (1, [1])])
def test_about_all_rows_of_a_device_a_half_a_quarter_and_an_eighth_are_measured(held, sizes):
  config = tiny("train.remat=none", "train.device_batch_size=-1")
  assert [size for _, size in fastest.list_candidates(config, held)] == sizes


def test_the_fastest_that_fits_is_taken_and_nothing_larger_than_what_does_not_fit_is_tried(tmp_path, clock, capsys):
  times, asked = clock
  times |= {("full", 4): 0.9, ("none", 2): 0.8, ("none", 4): None, ("dots", 1): None}
  config = tiny("train.remat=auto", "train.device_batch_size=-1")
  chosen = fastest.autotune(config, str(tmp_path), mesh_of(config))
  assert (chosen.train.remat, chosen.train.device_batch_size) == ("none", 2)
  assert asked == [*(("full", n) for n in (1, 2, 4, 8)), ("dots", 1), *(("none", n) for n in (1, 2, 4))]
  said = capsys.readouterr().err.splitlines()[-1]
  assert said == "train.remat=none, train.device_batch_size=2: the fastest of 6 that fit, 0.8 s a step"
  asked.clear()
  for config in (tiny(), tiny("train.device_batch_size=2")):  # nothing is left open
    assert fastest.autotune(config, str(tmp_path), mesh_of(config)) is config and not asked
  times |= {(remat, 8): None for remat in ("full", "dots", "none")}
  config = tiny("train.remat=auto", "train.device_batch_size=8")
  assert "no choice fits these devices" in told(lambda: fastest.autotune(config, str(tmp_path), mesh_of(config)))


def test_a_run_keeps_what_was_measured_until_its_devices_or_its_step_change(tmp_path, clock, capsys, monkeypatch):
  """And measures again where the file holds no choice."""
  times, asked = clock
  times |= {("none", 2): 0.8}
  file = tmp_path / fastest.FILE

  def measured(*settings: str) -> int:
    asked.clear()
    config = tiny("train.device_batch_size=-1", *settings)
    chosen = fastest.autotune(config, str(tmp_path), mesh_of(config)).train
    assert (chosen.remat, chosen.device_batch_size) == ("none", 2)
    return len(asked)

  assert measured() == 4
  assert measured("train.steps=1000000") == 0
  assert "was the fastest on these devices" in capsys.readouterr().err.splitlines()[-1]
  for content in ("{", "[]", '{"asked": "%s", "remat": "os", "device_batch_size": 8}'):
    file.write_text(content.replace("%s", json.loads(file.read_text())["asked"]))
    assert measured() == 4, content
  assert measured("model.num_steps=4") == 4
  assert measured("model.num_steps=4", "optimizer.name=lion") == 4  # which has another state
  monkeypatch.setattr(sharding, "describe", lambda mesh: "data 2")
  assert measured("model.num_steps=4", "optimizer.name=lion") == 4
