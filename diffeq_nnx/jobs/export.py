"""--job=export: a run's newest model for other libraries."""

from typing import Any

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.depth.trained import say_untrained
from diffeq_nnx.exporting import folders, huggingface, stablehlo
from diffeq_nnx.model.parameters import params_of
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs.run import Run


def export_run(
  config: Config,
  workdir: str,
  *,
  out: str,
  format: str = "hf",  # pylint: disable=redefined-builtin
  num_steps: int | None = None,
) -> dict[str, Any]:
  """Writes the newest model of a run for other libraries, with stored weights, and prints one JSON line on stdout.

  Args:
    config: of the run.
    workdir: the run's directory.
    out: the folder to make.
    format: hf (GPT-2 or Llama where they hold the model, else our modeling file), hf_code (our modeling file always) or
      stablehlo.
    num_steps: as for `discretization.discretize`.

  Raises:
    UserError: a model that the format can't hold, a folder that holds something, no checkpoint.
  """
  model = discretized_config(config.model, num_steps)
  folders.check_new(out)
  if format != "stablehlo":
    huggingface.choose_architecture(model, format)
  run = Run.open(workdir, config)
  say_untrained(config, run.step, num_steps)
  with jax.set_mesh(run.mesh):
    params = jax.device_get(discretized_params(run.config.model, model, params_of(run.model)))
  if format == "stablehlo":
    result = stablehlo.write(model, params, out, run.tokenizer)
  else:
    result = huggingface.write(model, params, out, run.tokenizer, format)
  return print_result({"job": "export", "workdir": workdir, "step": run.step, "format": format, **result})
