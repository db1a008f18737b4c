"""What every test runs under: the CPU, no silent rank promotion, and a small model to build on."""

import functools
import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"

from absl import logging
from flax import nnx
import jax
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TimeConfig,
  TrainConfig,
)
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import graph
from diffeq_nnx.training.loop import train

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # tests compile more than they compute

# every row of the model table, as changes to a ModelConfig
ROWS = {
    "diffeq": {},
    "published": {"initialization": "published", "horizon": 1.0},
    "baseline": {"weights": "stored", "solver": "sequential"},
    "parallel": {"weights": "stored"},
    "shared": {"weights": "shared"},
    "shared_sequential": {"weights": "shared", "solver": "sequential"},
    "constant": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, constant=True)},
    "learned": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="learned")},
    "shared_mlp": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="shared_mlp")},
}


def small_model(**changes) -> ModelConfig:
  """A model that runs in milliseconds: 3 steps, width 24, 4 query and 2 key/value heads."""
  values = dict(num_steps=3, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40, vocab_size=31, seq_len=12,
                dtype="float32", time=TimeConfig(sinusoidal_dim=6, time_embed_dim=5))
  return ModelConfig(**{**values, **changes})


@functools.cache
def small_instance(config: ModelConfig) -> Model:
  """A model of this config; jitted, since making the arrays one by one compiles for seconds."""
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Model(config, rngs=nnx.Rngs(0)))))()
  return nnx.merge(graph(config), params)


def small_config(model: ModelConfig | None = None, **train) -> config_lib.Config:
  """A whole experiment around `small_model`."""
  values = dict(batch_size=4, loss_chunks=3, remat="none", steps=10)
  return config_lib.Config(model=model or small_model(), train=config_lib.TrainConfig(**{**values, **train}))


def random_batch(config: config_lib.Config, seed: int = 0) -> dict[str, np.ndarray]:
  """Random inputs and targets [batch_size, seq_len]."""
  tokens = np.random.default_rng(seed).integers(
      config.model.vocab_size, size=(2, config.train.batch_size, config.model.seq_len)).astype(np.int32)
  return {"inputs": tokens[0], "targets": tokens[1]}


def packed_batch(config: config_lib.Config, seed: int = 0) -> dict[str, np.ndarray]:
  """The same, with documents kept apart: token 0 ends each, at two random places of a row."""
  batch = random_batch(config, seed)
  ends_Bx2 = np.random.default_rng(seed).integers(config.model.seq_len, size=(config.train.batch_size, 2))
  np.put_along_axis(batch["inputs"], ends_Bx2, 0, axis=1)
  return {**batch, **data.packing(batch["inputs"], eos_id=0)}


def perturb(tree, seed: int = 0, scale: float = 0.1):
  """Every array moved by noise, so that no bias, norm or F_0 sits at its initial value."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda a: a + (scale * rng.normal(size=a.shape)).astype(a.dtype), tree)


def moved_instance(config: ModelConfig, seed: int = 0, scale: float = 0.1) -> Model:
  """A model of which no parameter sits at its initial value."""
  return nnx.merge(graph(config), perturb(nnx.to_pure_dict(nnx.state(small_instance(config))), seed, scale))


def told(call) -> str:
  """The one line of the UserError that a call raises."""
  with pytest.raises(UserError) as caught:
    call()
  message = str(caught.value)
  assert "\n" not in message and message
  return message


@pytest.fixture(scope="module")
def optimizations():
  """The compiler as users have it; other tests switch most optimizations off."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def released():
  """What a file of tests compiled is given back at its end: it adds up to gigabytes."""
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(autouse=True)
def verbosity():
  """How much absl logs is as before after each test: the main program changes it."""
  before = logging.get_verbosity()
  yield
  logging.set_verbosity(before)


@pytest.fixture
def x64():
  """float64 for one test."""
  with jax.enable_x64(True):
    yield


def run_config(folder, steps=20, **optimizer) -> Config:
  """A run of a second: 20 steps, validation and checkpoints every 4."""
  return Config(
      model=small_model(num_steps=2, embed_dim=16, vocab_size=300, seq_len=16),
      data=DataConfig(source=f"text:{folder}/*.txt", validation_fraction=0.3, cache_dir=f"{folder}/cache"),
      optimizer=OptimizerConfig(peak_rate=1e-2, **optimizer),
      train=TrainConfig(steps=steps, batch_size=4, remat="none", loss_chunks=4, log_every=5, peak_tflops=0.1),
      eval=EvalConfig(every=4, batch_size=4, max_batches=2),
      checkpoint=CheckpointConfig(every=4, keep=2))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(config, work directory) of a run of 20 steps; not to be changed."""
  folder = tmp_path_factory.mktemp("text")
  for i in range(12):
    (folder / f"{i}.txt").write_text(f"Document {i} tells of rivers, hills and rain. " * (20 + i))
  workdir = folder / "run"
  train(run_config(folder), str(workdir))
  return run_config(folder), workdir
