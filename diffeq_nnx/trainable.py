"""Which parameters learn: all, or with adapters those and the tables."""

from typing import Any

from flax import traverse_util

from diffeq_nnx.config import ModelConfig

Params = dict[str, Any]


def learns(model: ModelConfig, path: tuple[str, ...]) -> bool:
  """Whether the parameter at `path` in the pure dict of a model learns."""
  if not model.lora.rank:
    return True
  if path[0] in ("embedding", "positions", "head"):
    return model.lora.embeddings
  return path[:2] == ("weight_source", "lora")


def split(model: ModelConfig, params: Params) -> tuple[Params, Params]:
  """(what learns, what stays), each a nested dict without empty ones; `params` may hold anything at its leaves."""
  flat = traverse_util.flatten_dict(params)
  part = lambda wanted: {path: leaf for path, leaf in flat.items() if learns(model, path) == wanted}
  return traverse_util.unflatten_dict(part(True)), traverse_util.unflatten_dict(part(False))


def join(learning: Params, staying: Params) -> Params:
  """The inverse of `split`."""
  return traverse_util.unflatten_dict(traverse_util.flatten_dict(staying) | traverse_util.flatten_dict(learning))
