"""What config files share: presets of models, and corpora.

A config file's argument is `CORPUS,PRESET`, either part left out for its default:
`--config=configs/gpt_small.py:wikitext103,gpt`. A preset of a fine-tuning config is `full` or `lora`.
"""

from collections.abc import Callable
from typing import Any

import ml_collections

from diffeq_nnx.config import nearest
from diffeq_nnx.errors import UserError

Settings = dict[str, Any]  # values by dotted key
Change = Settings | Callable[[ml_collections.ConfigDict], Settings]  # settings, or what makes them from a config


def around(num_steps: int) -> tuple[int, ...]:
  """The numbers of steps that an elastic run draws from: half to twice `num_steps`."""
  return tuple(dict.fromkeys(max(1, round(num_steps * part)) for part in (1 / 2, 2 / 3, 1, 4 / 3, 2)))


def _elastic(config: ml_collections.ConfigDict) -> Settings:
  """As diffeq, for half to twice its number of steps: W(t) is smooth, and the last train steps draw their depth."""
  n, optimizer = config.model.num_steps, config.optimizer.name
  return {
    # Muon is better at outer depths: docs/evidence/any_depth.md.
    "optimizer.name": "muon" if optimizer == "muon_weights" else optimizer,
    "model.time.embedding": "uniform",
    "model.time.sinusoidal_dim": 2 * n,
    "model.time.weights_at": "mean",
    "train.step_counts": around(n),
    "train.draw_from": 0.7,
    "train.remat_every": 1,
  }


def _distilled(config: ml_collections.ConfigDict) -> Settings:
  """As elastic, for long runs: the train steps draw their depth from the start, and the deepest one teaches it."""
  return {
    # Slow waves are good at numbers of steps between those that are drawn: docs/evidence/any_depth.md.
    "model.time.scale": 20.0,
    "model.time.weights_at": "mean",
    "train.step_counts": around(config.model.num_steps),
    "train.self_distillation": True,
    "train.remat_every": 1,
  }


PRESETS: dict[str, Change] = {
  # Generated weights, Euler, a plain model's spread at the start, dt = 1.
  "diffeq": {},
  "elastic": _elastic,
  "distilled": _distilled,
  # Generated weights, Euler, as in the published code: initial spreads, horizon, a shift in a Llama's norms, AdamW. One
  # thing is the paper's rather than the code's: both norms of a Llama's block read the state. In the published code the
  # second reads what the first one gives.
  "published": {"model.initialization": "published", "model.horizon": 1.0, "optimizer.name": "adamw"},
  # An ordinary transformer: stored weights, attention then feed-forward, dt = 1.
  "baseline": {"model.weights": "stored", "model.solver": "sequential"},
  # Stored weights, one set a step, Euler: what a discretized DiffEqFormer is.
  "parallel": {"model.weights": "stored"},
  # One constant set of weights for all steps.
  "shared": {"model.weights": "shared"},
  # Generated weights with t held at 0.
  "constant": {"model.time.constant": True},
}


def _put_in_folder(name: str) -> Settings:
  """Files put in data/NAME."""
  source = "jsonl:data/{}/*{}*.jsonl*".format
  return {"data.source": source(name, "train"), "data.validation": source(name, "validation")}


def _download(name: str) -> Settings:
  """A TFDS data set, downloaded and converted at first use."""
  return {"data.source": f"tfds:{name}:train", "data.validation": f"tfds:{name}:validation", "data.download": True}


CORPORA: dict[str, Change] = {
  # The prose of CPython's documentation topics: half a megabyte, no download.
  "builtin": {"data.source": "builtin", "data.validation": None},
  "wikitext103": _download("wikitext103"),
  # OpenWebText's 8,013,769 documents, of which 0.05 % are held out, as many as in nanoGPT.
  "openwebtext": {
    "data.source": "jsonl:data/openwebtext/*.jsonl*",
    "data.validation": None,
    "data.validation_fraction": 0.0005,
  },
  # English C4, 156e9 tokens, as the 1024 + 8 files that Allen AI made of TFDS' c4/en; streamed, not kept.
  "c4": {
    "data.source": "jsonl:hf://datasets/allenai/c4/en/c4-train.*.json.gz",
    "data.validation": "jsonl:hf://datasets/allenai/c4/en/c4-validation.*.json.gz",
  },
  # English Wikipedia, whose text keeps its marks: _START_ARTICLE_, _START_SECTION_, _START_PARAGRAPH_ and _NEWLINE_.
  # Preparing it, once, needs Apache Beam and TensorFlow; reading it neither.
  "wiki40b": _download("wiki40b/en"),
  "english": _put_in_folder("english"),
  "rfc": _put_in_folder("rfc"),
}

TUNING: dict[str, Change] = {  # the presets of a fine-tuning config
  # All parameters learn.
  "full": {},
  # Adapters of rank 16 on every kernel learn, and the tables.
  "lora": {"model.lora.rank": 16, "model.lora.alpha": 32.0},
}


def apply(config: ml_collections.ConfigDict, change: Change) -> None:
  """Puts the settings of a preset or of a corpus into a config."""
  config.update_from_flattened_dict(change(config) if callable(change) else change)


def select(
  config: ml_collections.ConfigDict, choice: str, default_corpus: str, presets: dict[str, Change] | None = None
) -> tuple[str, str]:
  """Applies `CORPUS,PRESET` to a config, and returns the two names; the default preset is the first.

  Without `presets` they are `PRESETS`, and `gpt` and `llama` name `baseline` for a config whose field they are.

  Raises:
    UserError: a name that is neither a corpus nor a preset, or two of one kind.
  """
  presets = presets or {**PRESETS, config.model.field: PRESETS["baseline"]}
  corpus = preset = None
  for name in filter(None, choice.split(",")):
    if name in CORPORA and corpus is None:
      corpus = name
    elif name in presets and preset is None:
      preset = name
    else:
      kind = "preset" if name in presets else "corpus"
      if name in presets or name in CORPORA:
        raise UserError(f"config argument {choice!r}: names a second {kind}, {name}; write CORPUS,PRESET, one of each")
      raise UserError(
        f"config argument {name!r}: is neither a corpus nor a preset; write CORPUS,PRESET; "
        f"{nearest(name, [*CORPORA, *presets])}"
      )
  corpus, preset = corpus or default_corpus, preset or next(iter(presets))
  apply(config, CORPORA[corpus])
  apply(config, presets[preset])
  return corpus, preset
