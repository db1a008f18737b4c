"""A model's parameters as a pure dict: the model around them, where they are placed, and which of them learn."""

import functools
from typing import Any

from flax import nnx, traverse_util
import jax
from jax.sharding import Mesh

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.model.model import Model
from diffeq_nnx.parallel import sharding

Params = dict[str, Any]  # nested, an array at each leaf


def params_of(model: Model) -> Params:
  """The parameters of a model."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def abstract_model(config: ModelConfig) -> Model:
  """The model with shapes in place of arrays."""
  return nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))


@functools.lru_cache(maxsize=64)
def graph(config: ModelConfig) -> nnx.GraphDef:
  """The model without its arrays: `nnx.merge(graph(config), params)` is the model."""
  return nnx.split(abstract_model(config))[0]


def build(config: ModelConfig, params: Params) -> Model:
  """The model that has these parameters."""
  return nnx.merge(graph(config), params)


def partial_model(config: ModelConfig, params: Params) -> Model:
  """A model some of whose parameters are missing; only what needs none of the missing ones may be called.

  Args:
    config: of the model.
    params: complete top-level entries, e.g. all but "weight_source".
  """
  return nnx.merge(graph(config), {**params_of(abstract_model(config)), **params})


def learns(config: ModelConfig, path: tuple[str, ...]) -> bool:
  """Whether training updates the parameter at `path`: all of them, or with LoRA the adapters and the tables."""
  if not config.lora.rank:
    return True
  if path[0] in ("embedding", "positions", "head"):
    return config.lora.embeddings
  return path[:2] == ("weight_source", "lora")


def split(config: ModelConfig, params: Params) -> tuple[Params, Params]:
  """(parameters that learn, frozen ones), nested dicts without empty entries; leaves may be of any type."""
  flat = traverse_util.flatten_dict(params)
  part = lambda wanted: {path: leaf for path, leaf in flat.items() if learns(config, path) == wanted}
  return traverse_util.unflatten_dict(part(True)), traverse_util.unflatten_dict(part(False))


def join(learning: Params, frozen: Params) -> Params:
  """The inverse of `split`."""
  return traverse_util.unflatten_dict(traverse_util.flatten_dict(frozen) | traverse_util.flatten_dict(learning))


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
  """The sharding of each parameter, from the names of its axes."""
  axes = lambda variable: variable.get_metadata().get("axes", (None,) * len(variable.shape))
  place = lambda variable: variable.replace(sharding.named(mesh, axes(variable), variable.shape))
  state = nnx.state(abstract_model(config), nnx.Param)
  return nnx.to_pure_dict(jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def abstract_params(config: ModelConfig, mesh: Mesh) -> Params:
  """Shapes and shardings of the parameters, without their arrays."""
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    params_of(abstract_model(config)),
    param_shardings(config, mesh),
  )
