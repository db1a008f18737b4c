"""Fine-tuning of configs/english.py's run on technical text, small enough for a CPU (docs/evidence/any_depth.md).

  python -m diffeq_nnx.main --config=configs/english.py --workdir=runs/english --config.optimizer.name=adamw \\
      --config.optimizer.peak_rate=2e-3
  python -m launch.experiments.finetune_depths --config=configs/finetune_small.py --from_workdir=runs/english \\
      --workdir=runs/rfc

The text is read from data/rfc/*train*.jsonl* and data/rfc/*validation*.jsonl*, key `text`. The model is that of
--from_workdir; of this config only model.dropout, model.dtype, model.attention, model.lora and a model.seq_len that is
shorter apply.
"""

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,PRESET, the presets full and lora (diffeq_nnx/presets.py)."""
  config = config_lib.default()
  config.model.dtype = "float32"
  config.optimizer.peak_rate = 1e-3
  config.train.steps = 200
  config.train.batch_size = 16
  config.train.remat = "none"
  config.train.loss_chunks = 16
  config.eval.every = 200
  config.eval.max_batches = 64
  config.checkpoint.every = 200
  presets.select(config, choice, default_corpus="rfc", presets=presets.TUNING)
  return config
