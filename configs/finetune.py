"""Fine-tuning of a GPT-medium-sized run on the other corpus of the paper (Tong et al. 2025, section 5), both ways.

  python -m diffeq_nnx.main --job=finetune --config=configs/finetune.py:openwebtext,lora --from_workdir=runs/wikitext \\
      --num_steps=18 --workdir=runs/wikitext_openwebtext_18

from a run like --config=configs/gpt_medium.py:wikitext103,diffeq --config.model.num_steps=18, or from openwebtext to
wikitext103; the numbers of steps are 9, 12, 18 and 24, and the GPT baseline's own. The model is that of --from_workdir;
of this config only model.dropout, model.dtype, model.attention, model.lora and a model.seq_len that is shorter apply.

Expected time and score: not run at this size yet.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET, the presets full and lora (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  config.model.dropout = 0.1
  config.optimizer.peak_rate = 1e-4
  config.optimizer.weight_decay = 0.1
  config.train.batch_size = 256
  config.train.device_batch_size = 32
  config.train.steps = 2_000
  config.eval.every = 200
  config.checkpoint.every = 200
  presets.select(config, choice, default_corpus="openwebtext", presets=presets.TUNING)
  return config
