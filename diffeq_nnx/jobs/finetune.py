"""--job=finetune: training a run's model, discretized at any steps, on other text."""

from collections.abc import Sequence
import dataclasses

import jax

from diffeq_nnx import config as config_lib
from diffeq_nnx import config_fields
from diffeq_nnx.config import KEYS_OF_TOKENIZER, Config, ModelConfig
from diffeq_nnx.data.preparation.preparing import choose_seed
from diffeq_nnx.depth.discretization import discretized_config
from diffeq_nnx.depth.trained import say_kept_steps, say_untrained
from diffeq_nnx.errors import UserError
from diffeq_nnx.jobs.deriving import check_fit, derive_config, load_text, store_params, use_tokenizer
from diffeq_nnx.model import grids
from diffeq_nnx.model.parameters import graph
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, checked_mesh, load_corpus
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.report import Reporter
from diffeq_nnx.training.step import place_state
from diffeq_nnx.training.teacher import find_teacher

READ = ("seq_len", "dtype", "dropout", "attention", "lora")  # keys of the model that a config changes


def finetune(
  config: Config,
  workdir: str,
  *,
  from_workdir: str,
  num_steps: int | None = None,
  step_sizes: Sequence[float] | None = None,
  fit_tokens: int | None = None,
  model_settings: Sequence[str] = (),
) -> dict[str, float]:
  """Discretizes the newest model of a run and trains it on the text of `config`, or resumes the run in `workdir`.

  With `config.model.lora.rank` only adapters learn, and the tables if `config.model.lora.embeddings`.

  Args:
    config: what to train on and how; of `config.model` only `READ` is read, seq_len where it is shorter than the run's;
      the rest is the run's.
    from_workdir: the run's; its tokenizer is used.
    fit_tokens: as for `jobs.discretize.discretize`; a run that is resumed keeps what it had.
    model_settings: those of `config.model` that the command line has, as `model.KEY=VALUE`. A `model.depth_order` among
      them replaces the run's.

  Returns:
    The last validation values, as `train`.

  Raises:
    UserError: as `discretize` and `train`, a pattern of targets that matches nothing, or a setting that is not read.
    RunError: as `train`.
  """
  for setting in model_settings:
    key = setting.partition("=")[0]
    if key.split(".")[1] not in (*READ, "depth_order"):
      names = ", ".join(f"model.{name}" for name in READ)
      advice = "give --num_steps" if key == "model.num_steps" else "leave it out"
      raise UserError(f"{key}: the model is that of from_workdir={from_workdir}, but for {names}; {advice}")
  orders = [setting for setting in model_settings if setting.startswith("model.depth_order=")]
  if workdir_lib.holds_run(workdir):
    return _resume(config, workdir, from_workdir, num_steps, step_sizes, orders)
  run = Run.open(from_workdir, flag="from_workdir")
  source, asked = config_lib.apply_settings(run.started, orders), config.model
  model = _change(discretized_config(source.model, num_steps, step_sizes), asked)
  config = derive_config(config, model, source)
  check_fit(source.model, model, config, fit_tokens)
  graph(config.model)  # a mistake in lora.targets is reported before the text is read
  mesh = run.mesh = checked_mesh(config)
  with jax.set_mesh(mesh):
    config = use_tokenizer(config, run, workdir)
    corpus = load_text(config, run) or load_corpus(config)  # which reports that there is none
    find_teacher(config, corpus.tokenizer, mesh)  # which reports a mistake before anything is written
    _say_changes(source, run.step, asked, config.model)
    _say_hold_out(source, config)
    params = store_params(source, config, run.params, mesh, corpus, fit_tokens)
    tokenizer, identity = run.tokenizer, run.hash
    if "positions" in params:
      params = {**params, "positions": params["positions"][: model.seq_len]}
    del run  # which would keep its parameters in memory
    before = Evaluator(config, corpus, mesh)(params)
    distributed.on_main_process(workdir_lib.clear, workdir, tokenizer)
    with Reporter(workdir, -1, config.train.steps) as report:
      report.validation(0, before)
    Run.create(config, workdir, tokenizer, corpus, place_state(config, params, mesh), before["loss"], identity)
    del params
  return train(config, workdir)


def _change(model: ModelConfig, asked: ModelConfig) -> ModelConfig:
  """Returns the model with the keys of `READ` as they are asked for, but no longer rows than it has."""
  changes = {key: getattr(asked, key) for key in READ}
  return dataclasses.replace(model, **changes | {"seq_len": min(asked.seq_len, model.seq_len)})


def _say_changes(source: Config, step: int, asked: ModelConfig, made: ModelConfig) -> None:
  """Says what the new model has otherwise than the run that it is made from, or than its own config asks for."""
  if not say_kept_steps(source.model, made):
    say_untrained(source, step, made.num_steps, made.step_sizes)
  if made.dtype != source.model.dtype:
    say(f"model.dtype={made.dtype}: is {source.model.dtype} in the run that this one is made from")
  if asked.seq_len > made.seq_len:
    say(f"model.seq_len={asked.seq_len}: becomes {made.seq_len}, that of the run that this one is made from")
  if made.seq_len < source.model.seq_len:
    say(f"model.seq_len={made.seq_len}: is {source.model.seq_len} in the run that this one is made from")


def _say_hold_out(source: Config, config: Config) -> None:
  """Warns if a run goes on with its own text, but holds out other documents."""
  seed = lambda one: choose_seed(one.data, one.seed)
  chosen = lambda one: (one.data.validation, one.data.validation_fraction, seed(one))
  own = config.data.source == source.data.source and config.data.validation is None
  if own and chosen(config) != chosen(source):
    say(
      "warning: the run that this one is made from held out other documents, and was trained on some that are held out "
      f"now; set data.validation={source.data.validation}, data.validation_fraction={source.data.validation_fraction} "
      f"and data.validation_seed={seed(source)}"
    )


def _resume(
  config: Config,
  workdir: str,
  from_workdir: str,
  num_steps: int | None,
  step_sizes: Sequence[float] | None,
  orders: Sequence[str],
) -> dict[str, float]:
  """Continues a fine-tuning run; the run that it started from need not exist anymore. Raises as `finetune`."""
  workdir_lib.check_source(workdir, from_workdir)
  known = Run.open(workdir).started
  for setting in orders:
    order = config_fields.parse(config_lib.key_types()["model.depth_order"], setting.partition("=")[2])
    if len(order) > known.model.num_steps and sorted(order) == list(range(len(order))):
      continue  # it is of the steps of the run that this one started from, whose command this is
    known = config_lib.apply_settings(known, [setting])
  if config.data.tokenizer == "train" and "shards:" not in config.data.source:
    own = {key: getattr(known.data, key) for key in KEYS_OF_TOKENIZER}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **own))
  model = _change(known.model, config.model)
  if config.model.seq_len > model.seq_len:
    say(f"model.seq_len={config.model.seq_len}: stays {model.seq_len}, that of the run in workdir={workdir}")
  if num_steps is not None and num_steps != model.num_steps:
    raise UserError(
      f"--num_steps={num_steps}: the run in workdir={workdir} has {model.num_steps}; name another "
      "directory, or leave it out"
    )
  if step_sizes is not None and tuple(step_sizes) != grids.make_grid(model).dts:
    raise UserError(
      f"step_sizes={tuple(step_sizes)}: the run in workdir={workdir} has {grids.make_grid(model).dts}; name another "
      "directory, or leave it out"
    )
  return train(derive_config(config, model, known), workdir)
