"""A model's parameters as a pure dict: the model around them, where they are placed, and which of them learn."""

import functools
from typing import Any

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.parallel import sharding

Params = dict[str, Any]  # nested, an array at each leaf
SHOWN = 3  # differences that an error names
TABLES = ("embedding", "positions", "head")  # parameters whose rows are looked up


def params_of(model: Model) -> Params:
  """The parameters of a model."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
  """A path of `jax.tree_util` in a tree of dicts and tuples, as names."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def abstract_model(config: ModelConfig) -> Model:
  """The model with shapes in place of arrays."""
  return nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))


@functools.lru_cache(maxsize=64)
def graph(config: ModelConfig) -> nnx.GraphDef:
  """The model without its arrays: `nnx.merge(graph(config), params)` is the model."""
  return nnx.split(abstract_model(config))[0]


def build(config: ModelConfig, params: Params) -> Model:
  """The model that has these parameters.

  Raises:
    UserError: names, shapes or dtypes that are not the model's.
  """
  _check(config, params)
  return nnx.merge(graph(config), params)


def partial_model(config: ModelConfig, params: Params) -> Model:
  """A model some of whose parameters are missing; only what needs none of the missing ones may be called.

  `params` has complete top-level entries, e.g. all but "weight_source", of any dtype.

  Raises:
    UserError: names or shapes that are not the model's.
  """
  _check(config, params, partial=True)
  return nnx.merge(graph(config), {**params_of(abstract_model(config)), **params})


@functools.lru_cache(maxsize=64)
def _shapes(config: ModelConfig, widest: jnp.dtype) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
  """Shape and dtype of each parameter; the widest dtype that JAX now has limits them."""
  del widest
  return traverse_util.flatten_dict(params_of(abstract_model(config)))


def _check(config: ModelConfig, params: Params, partial: bool = False) -> None:
  if not isinstance(params, dict):
    raise UserError(f"params: {type(params).__name__}; must be a nested dict, as `params_of` gives")
  wanted = _shapes(config, jnp.result_type(float))
  if partial:
    wanted = {path: leaf for path, leaf in wanted.items() if path[0] in params}
  found = {path: leaf for path, leaf in traverse_util.flatten_dict(params).items() if leaf is not None}
  problems = [f"{'.'.join(path)} is missing" for path in wanted if path not in found]
  for path, leaf in found.items():
    name, model = ".".join(map(str, path)), wanted.get(path)
    if model is None:
      problems.append(f"the model has no {name}")
    elif not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      problems.append(f"{name} is no array but of type {type(leaf).__name__}")
    elif tuple(leaf.shape) != model.shape:
      problems.append(f"{name} has the shape {tuple(leaf.shape)}, in the model {model.shape}")
    elif leaf.dtype != model.dtype and not partial:
      problems.append(f"{name} is in {leaf.dtype}, in the model in {model.dtype}")
  if problems:
    more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    raise UserError(f"params: {'; '.join(problems[:SHOWN])}{more}; pass the parameters of a model with this config")


def learns(config: ModelConfig, path: tuple[str, ...]) -> bool:
  """Whether training updates the parameter at `path`: all of them, or with LoRA the adapters and the tables."""
  if not config.lora.rank:
    return True
  if path[0] in TABLES:
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
  place = lambda variable: variable.replace(sharding.make_sharding(mesh, axes(variable), variable.shape))
  state = nnx.state(abstract_model(config), nnx.Param)
  return nnx.to_pure_dict(jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def abstract_params(config: ModelConfig, mesh: Mesh) -> Params:
  """Shapes and shardings of the parameters, without their arrays."""
  shapes, places = params_of(abstract_model(config)), param_shardings(config, mesh)
  return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, places)
