"""GPT-2's block with ReLU^2 in place of GELU (So et al. 2021): configs/tiny.py with a block of our own."""

import dataclasses
import runpy

import jax

from diffeq_nnx.model import vector_fields


@dataclasses.dataclass(frozen=True)
class SquaredReluField(vector_fields.GPTField):
  """All is inherited, except what the feed-forward branch computes."""

  def feedforward(self, x_BxLxD, w):
    """The feed-forward branch of a state [B, L, D] with the weights of one time."""
    normed_BxLxD = vector_fields.layer_norm(x_BxLxD, w["mlp_norm"]["scale"], w["mlp_norm"]["shift"], self.norm_eps)
    hidden_BxLxF = normed_BxLxD @ w["up"]["kernel"] + w["up"]["bias"][None, None]
    return jax.numpy.square(jax.nn.relu(hidden_BxLxF)) @ w["down"]["kernel"] + w["down"]["bias"][None, None]


vector_fields.register("gpt_relu2", SquaredReluField)


def get_config(choice=""):
  """The experiment of configs/tiny.py with this block."""
  config = runpy.run_path("configs/tiny.py")["get_config"](choice)
  config.model.field = "gpt_relu2"
  return config
