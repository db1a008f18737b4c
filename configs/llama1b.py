"""Llama-1B (1.2B parameters) and its DiffEqFormer, with the paper's hyper-parameters (Tong et al. 2025).

  python -m diffeq_nnx.main --config=configs/llama1b.py:openwebtext,diffeq --workdir=runs/llama1b
  python -m diffeq_nnx.main --config=configs/llama1b.py:wikitext103,llama --workdir=runs/llama1b_llama

Expected time and score: not run at this size yet.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  model = config.model
  model.field = "llama"
  model.num_steps = 16
  model.embed_dim = 2048
  model.num_heads = 16
  model.mlp_dim = 8192
  model.vocab_size = 32000
  model.seq_len = 2048
  model.dropout = 0.0
  model.time.sinusoidal_dim = 256
  model.time.time_embed_dim = 96
  config.optimizer.peak_rate = 0.0003
  config.optimizer.b2 = 0.95
  config.optimizer.eps = 1e-08
  config.optimizer.weight_decay = 1e-05
  config.train.device_batch_size = 8
  corpus, _ = presets.select(config, choice, default_corpus="openwebtext")
  config.train.batch_size = 256
  config.train.steps = 10_001 if corpus == "wikitext103" else 40_001
  return config
