"""What config files share: the rows of the model table, and the corpora.

A config file's argument is `CORPUS,ROW`, either part left out for its default:
`--config=configs/gpt_small.py:wikitext103,gpt`. A row of a fine-tuning config is `full` or `lora`.
"""

from collections.abc import Callable

import ml_collections

from diffeq_nnx.config import nearest
from diffeq_nnx.errors import UserError

Change = Callable[[ml_collections.ConfigDict], None]


def _diffeq(config: ml_collections.ConfigDict) -> None:
  """Generated weights, Euler, a plain model's spread at the start, dt = 1."""


def _published(config: ml_collections.ConfigDict) -> None:
  """Generated weights, Euler, as in the published code: initial spreads, horizon, a shift in a Llama's norms, AdamW.

  One thing is the paper's rather than the code's: both norms of a Llama's block read the state. In the published code
  the second reads what the first one gives.
  """
  config.model.initialization = "published"
  config.model.horizon = 1.0
  config.optimizer.name = "adamw"


def around(num_steps: int) -> tuple[int, ...]:
  """The numbers of steps that an elastic run draws from: half to twice `num_steps`."""
  return tuple(dict.fromkeys(max(1, round(num_steps * part)) for part in (1 / 2, 2 / 3, 1, 4 / 3, 2)))


def _elastic(config: ml_collections.ConfigDict) -> None:
  """As diffeq, for half to twice its number of steps: W(t) is smooth, and the last train steps draw their depth."""
  n = config.model.num_steps
  if config.optimizer.name == "muon_weights":  # which trains one number of steps
    config.optimizer.name = "muon"
  config.model.time.embedding = "uniform"
  config.model.time.sinusoidal_dim = 2 * n
  config.model.time.weights_at = "mean"
  config.train.step_counts = around(n)
  config.train.draw_from = 0.7
  config.train.remat_every = 1


def _baseline(config: ml_collections.ConfigDict) -> None:
  """An ordinary transformer: stored weights, attention then feed-forward, dt = 1."""
  config.model.weights = "stored"
  config.model.solver = "sequential"


def _parallel(config: ml_collections.ConfigDict) -> None:
  """Stored weights, one set a step, Euler: what a discretized DiffEqFormer is."""
  config.model.weights = "stored"


def _shared(config: ml_collections.ConfigDict) -> None:
  """One constant set of weights for all steps."""
  config.model.weights = "shared"


def _constant(config: ml_collections.ConfigDict) -> None:
  """Generated weights with t held at 0."""
  config.model.time.constant = True


ROWS: dict[str, Change] = {
  "diffeq": _diffeq,
  "elastic": _elastic,
  "published": _published,
  "baseline": _baseline,
  "parallel": _parallel,
  "shared": _shared,
  "constant": _constant,
}


def _builtin(config: ml_collections.ConfigDict) -> None:
  """The prose of CPython's documentation topics: half a megabyte, no download."""
  config.data.source = "builtin"
  config.data.validation = None


def _files(name: str) -> Change:
  """Files put in data/NAME."""

  def change(config: ml_collections.ConfigDict) -> None:
    config.data.source = f"jsonl:data/{name}/*train*.jsonl*"
    config.data.validation = f"jsonl:data/{name}/*validation*.jsonl*"

  return change


def _tfds(name: str) -> Change:
  """A TFDS data set, downloaded and converted at first use."""

  def change(config: ml_collections.ConfigDict) -> None:
    config.data.source = f"tfds:{name}:train"
    config.data.validation = f"tfds:{name}:validation"
    config.data.download = True

  return change


def _openwebtext(config: ml_collections.ConfigDict) -> None:
  """OpenWebText's 8,013,769 documents, of which 0.05 % are held out, as many as in nanoGPT."""
  config.data.source = "jsonl:data/openwebtext/*.jsonl*"
  config.data.validation = None
  config.data.validation_fraction = 0.0005


def _c4(config: ml_collections.ConfigDict) -> None:
  """English C4, 156e9 tokens, as the 1024 + 8 files that Allen AI made of TFDS' c4/en; streamed, not kept."""
  config.data.source = "jsonl:hf://datasets/allenai/c4/en/c4-train.*.json.gz"
  config.data.validation = "jsonl:hf://datasets/allenai/c4/en/c4-validation.*.json.gz"


# wiki40b/en is English Wikipedia, whose text keeps its marks: _START_ARTICLE_, _START_SECTION_,
# _START_PARAGRAPH_ and _NEWLINE_. Preparing it, once, needs Apache Beam and TensorFlow; reading it neither.
CORPORA: dict[str, Change] = {
  "builtin": _builtin,
  "wikitext103": _tfds("wikitext103"),
  "openwebtext": _openwebtext,
  "c4": _c4,
  "wiki40b": _tfds("wiki40b/en"),
  "english": _files("english"),
  "rfc": _files("rfc"),
}


def _full(config: ml_collections.ConfigDict) -> None:
  """All parameters learn."""


def _lora(config: ml_collections.ConfigDict) -> None:
  """Adapters of rank 16 on every kernel learn, and the tables."""
  config.model.lora.rank = 16
  config.model.lora.alpha = 32.0


TUNING: dict[str, Change] = {"full": _full, "lora": _lora}  # the rows of a fine-tuning config


def select(
  config: ml_collections.ConfigDict, choice: str, default_corpus: str, rows: dict[str, Change] | None = None
) -> tuple[str, str]:
  """Applies `CORPUS,ROW` to a config, and returns the two names; the default row is the first.

  Without `rows` they are `ROWS`, and `gpt` and `llama` name the row `baseline` of a config whose field they are.

  Raises:
    UserError: a name that is neither a corpus nor a row, or two of one kind.
  """
  rows = rows or {**ROWS, config.model.field: ROWS["baseline"]}
  corpus = row = None
  for name in filter(None, choice.split(",")):
    if name in CORPORA and corpus is None:
      corpus = name
    elif name in rows and row is None:
      row = name
    else:
      raise UserError(
        f"config argument {name!r}: names no further corpus or row; write CORPUS,ROW; "
        f"{nearest(name, [*CORPORA, *rows])}"
      )
  corpus, row = corpus or default_corpus, row or next(iter(rows))
  CORPORA[corpus](config)
  rows[row](config)
  return corpus, row
