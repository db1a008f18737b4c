"""Starting a run from existing parameters: discretized, fine-tuned and imported models."""

import dataclasses
import math

import jax
from jax.sharding import Mesh

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.config import Config, LoraConfig, ModelConfig
from diffeq_nnx.model import parameters
from diffeq_nnx.model.discretization import discretized_params
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.training.setup import claim_workdir
from diffeq_nnx.training.step import all_params, init_state, state_of, state_shardings


def derived(config: Config, model: ModelConfig, data_config: config_lib.DataConfig | None = None) -> Config:
  """The config with a model of stored weights, and with other keys changed where they must fit the model.

  Raises:
    UserError: two keys that don't fit.
  """
  train = config.train
  return config_lib.from_dict(
    config_lib.to_dict(
      dataclasses.replace(
        config,
        model=model,
        data=data_config or config.data,
        train=dataclasses.replace(
          train,
          step_counts=(),
          draw_from=0.0,
          loss_chunks=train.loss_chunks and math.gcd(train.loss_chunks, model.seq_len),
          remat_every=train.remat_every if model.num_steps % train.remat_every == 0 else 1,
        ),
        eval=dataclasses.replace(config.eval, num_steps=None),
      )
    )
  )


def start(
  config: Config,
  workdir: str,
  corpus: data.Corpus,
  params: Params,
  mesh: Mesh,
  loss: float | None,
  source: str | None = None,
) -> None:
  """Writes a run at step 0 with these parameters; run.json is written last, so that a run is complete or absent.

  Args:
    config: the run's.
    workdir: its directory, which holds no run.
    corpus: what `config.data` gives.
    params: all of the model's, with any placement.
    mesh: of the devices.
    loss: of the validation, nats per token; None: unknown.
    source: `workdir.run_hash` of the run that they come from.

  Raises:
    UserError: the directory can't be written.
    RunError: the checkpoint can't be written.
  """
  with distributed.together():
    if distributed.leads():
      workdir_lib.clear(workdir, corpus.tokenizer)
  places = state_shardings(config, mesh)
  learning, frozen = parameters.split(config.model, params)
  params = jax.device_put(parameters.join(learning, frozen), all_params(places))
  state = jax.jit(state_of, static_argnums=0, out_shardings=places)(config, params)
  checkpoints = Checkpoints(workdir, config, corpus.tokenizer.hash)
  checkpoints.save_frozen(state["frozen"])
  checkpoints.save(state, {"windows": 0, "validate": False}, loss)
  checkpoints.close()
  claim_workdir(config, workdir, corpus, source)


def stored_params(source: Config, stored: Config, params: Params, mesh: Mesh) -> Params:
  """Parameters of the discretized model `stored`, from those of `source`; adapters, where it has them, are new."""
  without_adapters = dataclasses.replace(stored.model, lora=LoraConfig())
  made = discretized_params(source.model, without_adapters, params)
  if not stored.model.lora.rank:
    return made
  fresh = jax.jit(
    lambda: all_params(init_state(stored))["weight_source"]["lora"],
    out_shardings=all_params(state_shardings(stored, mesh))["weight_source"]["lora"],
  )()
  return {**made, "weight_source": {**made["weight_source"], "lora": fresh}}
