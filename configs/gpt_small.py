"""GPT-small (124M parameters) and its DiffEqFormer, with the paper's hyper-parameters (Tong et al. 2025).

  python -m diffeq_nnx.main --config=configs/gpt_small.py:openwebtext,diffeq --workdir=runs/gpt_small
  python -m diffeq_nnx.main --config=configs/gpt_small.py:wikitext103,gpt --workdir=runs/gpt_small_gpt

Expected time and score: not run at this size yet.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  model = config.model
  model.field = "gpt"
  model.num_steps = 12
  model.embed_dim = 768
  model.num_heads = 12
  model.vocab_size = 50257
  model.seq_len = 1024
  model.dropout = 0.1
  model.time.sinusoidal_dim = 128
  model.time.time_embed_dim = 20
  config.optimizer.peak_rate = 0.0006
  config.optimizer.b2 = 0.999
  config.optimizer.eps = 1e-08
  config.optimizer.weight_decay = 0.1
  config.train.device_batch_size = 32
  corpus, _ = presets.select(config, choice, default_corpus="openwebtext")
  config.train.batch_size = 512 if corpus == "openwebtext" else 256
  config.train.steps = 10_001 if corpus == "wikitext103" else 20_000
  return config
