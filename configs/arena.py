"""A small Llama on the bytes of English text, in which loss falls with depth: recipes for several depths compared.

  python -m launch.experiments.elastic --config=configs/arena.py --workdir=runs/elastic

The text is read from data/english/*train*.jsonl* and data/english/*validation*.jsonl*, key `text`.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  model = config.model
  model.field = "llama"
  model.num_steps = 6
  model.embed_dim = 64
  model.num_heads = 2
  model.mlp_dim = 128
  model.vocab_size = 257
  model.seq_len = 128
  model.dtype = "float32"
  model.time.sinusoidal_dim = 32
  model.time.time_embed_dim = 16
  config.data.tokenizer = "bytes"
  config.optimizer.peak_rate = 1e-3
  config.optimizer.b2 = 0.99
  config.train.steps = 1500
  config.train.batch_size = 8
  config.train.remat = "none"
  config.train.loss_chunks = 16
  config.train.log_every = 500
  config.eval.every = 1500
  config.eval.max_batches = 24
  config.checkpoint.every = 1500
  presets.select(config, choice, default_corpus="english")
  return config
