"""What config files share: the rows of the model table, and the corpora.

A config file's argument is `CORPUS,ROW`, either part left out for its default:
`--config=configs/gpt_small.py:wikitext103,gpt`.
"""

from typing import Callable

import ml_collections

from diffeq_nnx.config import nearest
from diffeq_nnx.errors import UserError

Change = Callable[[ml_collections.ConfigDict], None]


def _diffeq(config: ml_collections.ConfigDict) -> None:
  """Generated weights, Euler, with the choices that measured best (RESULTS.md)."""


def _published(config: ml_collections.ConfigDict) -> None:
  """Generated weights, Euler, with the paper's own choices."""
  config.model.initialization = "published"
  config.model.horizon = 1.0


def _baseline(config: ml_collections.ConfigDict) -> None:
  """An ordinary transformer: stored weights, attention then feed-forward, dt = 1."""
  config.model.weights = "stored"
  config.model.solver = "sequential"


def _parallel(config: ml_collections.ConfigDict) -> None:
  """Stored weights, one set a step, Euler: what a discretised DiffEqFormer is."""
  config.model.weights = "stored"


def _shared(config: ml_collections.ConfigDict) -> None:
  """One constant set of weights for all steps."""
  config.model.weights = "shared"


def _constant(config: ml_collections.ConfigDict) -> None:
  """Generated weights with t held at 0."""
  config.model.time.constant = True


ROWS: dict[str, Change] = {"diffeq": _diffeq, "published": _published, "baseline": _baseline,
                           "parallel": _parallel, "shared": _shared, "constant": _constant}


def _builtin(config: ml_collections.ConfigDict) -> None:
  """The prose of CPython's documentation topics: half a megabyte, no download."""
  config.data.source = "builtin"
  config.data.validation = None


def _files(name: str) -> Change:
  def change(config: ml_collections.ConfigDict) -> None:
    config.data.source = f"jsonl:data/{name}/*train*.jsonl*"
    config.data.validation = f"jsonl:data/{name}/*validation*.jsonl*"

  return change


CORPORA: dict[str, Change] = {"builtin": _builtin, "wikitext103": _files("wikitext103"),
                              "openwebtext": _files("openwebtext"), "english": _files("english")}


def select(config: ml_collections.ConfigDict, choice: str, default_corpus: str) -> tuple[str, str]:
  """Applies `CORPUS,ROW` to a config, and returns the two names.

  `gpt` and `llama` name the row `baseline` of a config whose field they are.

  Raises:
    UserError: a name that is neither a corpus nor a row, or two of one kind.
  """
  field = config.model.field
  rows = {**ROWS, field: ROWS["baseline"]}
  corpus = row = None
  for name in filter(None, choice.split(",")):
    if name in CORPORA and corpus is None:
      corpus = name
    elif name in rows and row is None:
      row = name
    else:
      raise UserError(f"config argument {name!r}: names no further corpus or row; write CORPUS,ROW; "
                      f"{nearest(name, [*CORPORA, *rows])}")
  corpus, row = corpus or default_corpus, row or "diffeq"
  CORPORA[corpus](config)
  rows[row](config)
  return corpus, row
