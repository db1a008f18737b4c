"""Neural ODE Transformers (DiffEqFormer): a transformer whose depth is time, in Flax NNX.

The package itself offers `load` (of `runs`), `discretize` (`discretization`), `Decoder`, `generate` and
`generate_texts` (`generation`), `export_hf` (`exporting.huggingface`), `export_stablehlo` (`exporting.stablehlo`) and
`import_hf` (`exporting.importing`). Training is `train.train`, a model `model.Model`, its settings `config`.
"""

import importlib
from typing import Any

_HOMES = {  # what the package offers by itself, and where it is
    "load": "runs", "discretize": "discretization", "generate": "generation", "generate_texts": "generation",
    "Decoder": "generation", "export_hf": "exporting.huggingface", "export_stablehlo": "exporting.stablehlo",
    "import_hf": "exporting.importing"}


def __getattr__(name: str) -> Any:
  """Imports what is asked for when it is asked for: JAX takes seconds."""
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  """What is offered, beside the modules."""
  return sorted([*globals(), *_HOMES])
