"""Which parameters learn: all, or with adapters those and the tables."""

from typing import Any

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
  def part(node: Params, path: tuple[str, ...], wanted: bool) -> Params:
    kept = {}
    for name, value in node.items():
      if isinstance(value, dict):
        inner = part(value, (*path, name), wanted)
        kept |= {name: inner} if inner else {}
      elif learns(model, (*path, name)) == wanted:
        kept[name] = value
    return kept

  return part(params, (), True), part(params, (), False)


def join(learning: Params, staying: Params) -> Params:
  """The inverse of `split`."""
  joined = dict(staying)
  for name, value in learning.items():
    joined[name] = join(value, staying.get(name, {})) if isinstance(value, dict) else value
  return joined
