"""Neural ODE Transformers (DiffEqFormer): a transformer whose depth is time, in Flax NNX.

The package itself offers `Model` (of `model.model`), `Config` and `load_config` (`config`), `load` (`runs.run`),
`discretize` (`depth.discretization`), `Decoder` (`inference.decoding`), `generate` and `generate_texts`
(`inference.generation`), `export_hf` (`exporting.huggingface`), `export_stablehlo` (`exporting.stablehlo`) and
`import_hf` (`exporting.importing`). Training is `training.loop.train`.
"""

import importlib
from typing import Any

_HOMES = {  # where each public name is defined
  "Model": "model.model",
  "Config": "config",
  "load_config": "config",
  "load": "runs.run",
  "discretize": "depth.discretization",
  "generate": "inference.generation",
  "generate_texts": "inference.generation",
  "Decoder": "inference.decoding",
  "export_hf": "exporting.huggingface",
  "export_stablehlo": "exporting.stablehlo",
  "import_hf": "exporting.importing",
}
_NAMES = {"load_config": "load"}  # what they are called there


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use, since importing JAX takes seconds."""
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), _NAMES.get(name, name))


def __dir__() -> list[str]:
  """Public names and modules."""
  return sorted([*globals(), *_HOMES])
