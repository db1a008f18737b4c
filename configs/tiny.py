"""A tiny DiffEqFormer on text that needs no download.

  python -m diffeq_nnx.main --config=configs/tiny.py --workdir=runs/tiny

Presets: tiny.py:gpt, tiny.py:published, ... (diffeq_nnx/presets.py).
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET."""
  config = config_lib.default()
  model = config.model
  model.num_steps = 6
  model.embed_dim = 128
  model.num_heads = 4
  model.vocab_size = 1024
  model.seq_len = 128
  model.dropout = 0.1
  model.dtype = "float32"
  model.time.sinusoidal_dim = 32
  model.time.time_embed_dim = 16
  config.data.validation_fraction = 0.1
  config.optimizer.name = "muon_weights"  # measured best: docs/evidence/quality.md
  config.train.steps = 300
  config.train.batch_size = 16
  config.train.remat = "none"
  config.train.loss_chunks = 16
  config.eval.every = 100
  config.checkpoint.every = 100
  presets.select(config, choice, default_corpus="builtin")  # of whose presets some choose adamw
  config.optimizer.peak_rate = 2e-3 if config.optimizer.name == "adamw" else 8e-3
  return config
