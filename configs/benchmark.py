"""The cost of generated weights relative to stored ones: width 256, 12 layers, 4 x 256 tokens, float32.

  python -m launch.benchmarks.step_time --what=loss_and_gradients \
      --configs=configs/benchmark.py:parallel,configs/benchmark.py:diffeq,configs/benchmark.py:gpt

The preset `parallel` is the same model with stored weights; every layer is rematerialized.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  model = config.model
  model.num_steps = 12
  model.embed_dim = 256
  model.num_heads = 8
  model.vocab_size = 1024
  model.seq_len = 256
  model.dtype = "float32"
  model.time.sinusoidal_dim = 128
  model.time.time_embed_dim = 48
  config.train.batch_size = 4
  config.train.remat = "full"
  config.train.remat_every = 1
  presets.select(config, choice, default_corpus="builtin")
  return config
