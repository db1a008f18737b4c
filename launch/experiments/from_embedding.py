"""configs/english.py with a residual from the embedding, dx/dt = f(x, W(t)) + lambda(t) x(0): config, block and solver.

  python -m launch.experiments.compare --config=launch/experiments/from_embedding.py --rows=diffeq,parallel \
      --workdir=runs/from_embedding

Rows use Euler's method: the sequential GPT becomes `parallel`. What it did: docs/results.md#muon.
"""

import dataclasses

import ml_collections

from diffeq_nnx import config as config_lib
from diffeq_nnx import config_fields
from diffeq_nnx.model import solvers, vector_fields
from diffeq_nnx.model.weight_sources import LeafSpec


@dataclasses.dataclass(frozen=True)
class FieldWithShare(vector_fields.GPTField):
  """GPT-2's block, with lambda [D] among its weights, which is 0 at first."""

  @staticmethod
  def specs(model):
    """See `GPTField.specs`."""
    share = {"share": LeafSpec((model.embed_dim,), ("embed",))}
    return {**vector_fields.GPTField.specs(model), "from_embedding": share}


@dataclasses.dataclass(frozen=True)
class FromEmbedding(solvers.Solver):
  """Euler's method for f + lambda(t) x(0)."""

  def init(self, x_BxLxD):
    """The state and the embedding."""
    return x_BxLxD, x_BxLxD

  def step(self, field, carry, weights, dt, key):
    """See `Solver.step`."""
    x_BxLxD, embedded_BxLxD = carry
    share_D = weights[0]["from_embedding"]["share"]
    slopes = field(x_BxLxD, weights[0], key), share_D[None, None] * embedded_BxLxD
    return solvers.add_increment(x_BxLxD, dt, (1.0, 1.0), slopes), embedded_BxLxD

  def read(self, carry):
    """The state."""
    return carry[0]


if "from_embedding" not in solvers.SOLVERS:  # a config file is executed each time that it is loaded
  solvers.register("from_embedding", FromEmbedding())
  vector_fields.register("gpt_from_embedding", FieldWithShare)


def get_config(choice: str = "") -> ml_collections.ConfigDict:
  """The experiment; `choice` is CORPUS,ROW (diffeq_nnx/presets.py)."""
  english = config_lib.load(f"configs/english.py:{choice}")
  config = config_fields.merge(config_lib.default(), config_lib.to_dict(english))
  config.model.solver, config.model.field = "from_embedding", "gpt_from_embedding"
  return config
