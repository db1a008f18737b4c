"""DiffEqFormer against GPT on English text, small enough for a CPU: the models of docs/evidence/quality.md.

  python -m launch.experiments.compare --config=configs/english.py --presets=diffeq,gpt --rates=4e-3,8e-3,16e-3 \\
      --workdir=runs/english

The text is read from data/english/*train*.jsonl* and data/english/*validation*.jsonl*, key `text`.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  model = config.model
  model.num_steps = 6
  model.embed_dim = 128
  model.num_heads = 2
  model.vocab_size = 1024
  model.seq_len = 128
  model.dtype = "float32"
  model.time.sinusoidal_dim = 32
  model.time.time_embed_dim = 16
  config.optimizer.name = "muon_weights"  # measured best at widths 64 and 128: docs/evidence/quality.md
  config.train.steps = 1500
  config.train.batch_size = 16
  config.train.remat = "none"
  config.train.loss_chunks = 4
  config.train.log_every = 50
  config.eval.every = 250
  config.eval.max_batches = 32
  config.checkpoint.every = 500
  presets.select(config, choice, default_corpus="english")  # of whose presets some choose adamw
  config.optimizer.peak_rate = 2e-3 if config.optimizer.name == "adamw" else 8e-3
  return config
