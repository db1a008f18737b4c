"""--job=export: a run's newest model for other libraries."""

from typing import Any

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.depth.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import adapters, folders, huggingface, stablehlo
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
  base: str | None = None,
) -> dict[str, Any]:
  """Writes the newest model of a run for other libraries, with stored weights, and prints one JSON line on stdout.

  Raises:
    UserError: a model that the format can't hold, a folder that holds something, no checkpoint.
  """
  model, of_adapters = discretized_config(config.model, num_steps), format in ("peft", "hf_base")
  if base is not None and format != "peft":
    raise UserError(f"--base={base}: is for --format=peft, and this is --format={format}; leave it out")
  if of_adapters and not config.model.lora.rank:
    raise UserError(
      f"format={format}: this run has no adapters (model.lora.rank=0); fine-tune it with --config.model.lora.rank=8, "
      "or use --format=hf"
    )
  if of_adapters and num_steps not in (None, config.model.num_steps):
    raise UserError(
      f"--num_steps={num_steps}: --format={format} writes all {config.model.num_steps} steps of the run; leave it out, "
      "or use --format=hf, in which the adapters are a part of the weights"
    )
  folders.check_new(out)
  if format != "stablehlo":
    huggingface.choose_architecture(model, "hf" if of_adapters else format)
  run = Run.open(workdir, config)
  run.say_untrained(num_steps)
  with jax.set_mesh(run.mesh):
    params = params_of(run.model)
    params = jax.device_get(params if of_adapters else discretized_params(run.config.model, model, params))
  if format == "stablehlo":
    result = stablehlo.write(model, params, out, run.tokenizer)
  elif format == "peft":
    result = adapters.write(run.config.model, params, out, base)
  else:
    params["weight_source"].pop("lora", None)  # of hf_base
    result = huggingface.write(model, params, out, run.tokenizer, "hf" if of_adapters else format)
  return print_result("export", workdir, step=run.step, format=format, **result)
