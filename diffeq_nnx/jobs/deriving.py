"""Parts of the jobs that make a run from another model: its config, its text, its stored parameters."""

from collections.abc import Sequence
import dataclasses
import math
import operator
import os
from typing import Any

import jax
from jax.sharding import Mesh

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, files
from diffeq_nnx.config import NO_TEXT, Config, DataConfig, LoraConfig, ModelConfig
from diffeq_nnx.data import Corpus, Tokenizer
from diffeq_nnx.depth import fitting
from diffeq_nnx.depth.discretization import discretized_params, leaves_out_steps
from diffeq_nnx.errors import UserError
from diffeq_nnx.model import parameter_dtype, vector_fields
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, load_corpus
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.step import all_params, init_state, state_shardings

PARTS = 8  # batches of the text that `make_batches` makes
SEQ_LEN = 512  # tokens in a packed row of these, at most
_KEYS_OF_RECORDS = ("text_key", "prompt_key", "completion_key", "messages_key")


def start_from(config: Config, settings: Sequence[str]) -> Config:
  """Returns the config of a new run that is made from one with this config; raises what `config.load` raises.

  That is the run's with `key=value` settings on top, a schedule of the new run's own length, and no teacher but one
  that the settings name. If the settings name another text, the run's `data.validation` is left out. So are its keys of
  records if they name another kind of these, `data.too_long` if they name other rows, and all keys of adapters if they
  have `model.lora.rank=0`.
  """
  named = {key: text for key, _, text in (setting.partition("=") for setting in settings)}
  left_out = ["validation"] if named.get("data.source", config.data.source) != config.data.source else []
  left_out += _KEYS_OF_RECORDS if named.get("data.records", config.data.records) != config.data.records else []
  left_out += ["too_long"] if named.get("data.rows", config.data.rows) != config.data.rows else []
  kept = dataclasses.replace(config.data, **{key: getattr(DataConfig, key) for key in left_out})
  lora = LoraConfig() if named.get("model.lora.rank") == "0" else config.model.lora
  model = dataclasses.replace(config.model, lora=lora)
  optimizer = dataclasses.replace(config.optimizer, schedule_steps=None)
  train = dataclasses.replace(config.train, teacher=None)
  made = dataclasses.replace(config, model=model, data=kept, optimizer=optimizer, train=train)
  return config_lib.apply_settings(made, settings)


def derive_config(config: Config, model: ModelConfig, known: Config | None = None) -> Config:
  """Returns the config with a model of stored weights, and with other keys changed where they must fit the model.

  Of `train.step_counts`, those stay for which a model with a `depth_order` has weights, and its own number of steps
  takes the place of larger ones. It says which keys about depth are left out, unless they are those of `known`, the run
  that the new one is made from. Raises as `config.from_dict`.
  """
  train = config.train
  counts = tuple(count for count in train.step_counts if model.depth_order and count <= model.num_steps)
  if counts and counts != train.step_counts and model.num_steps not in counts:
    counts = (*counts, model.num_steps)  # else the model's own depth may be trained at no step
  validated = config.eval.num_steps if model.depth_order and (config.eval.num_steps or 0) <= model.num_steps else None
  made = dataclasses.replace(
    config,
    model=model,
    train=dataclasses.replace(
      train,
      step_counts=counts,
      step_schedule=train.step_schedule if counts == train.step_counts else (),
      draw_from=train.draw_from if counts else 0.0,
      self_distillation=train.self_distillation and len(counts) > 1,
      loss_chunks=train.loss_chunks and math.gcd(train.loss_chunks, model.seq_len),
      remat_every=train.remat_every if math.gcd(model.num_steps, *counts) % train.remat_every == 0 else 1,
    ),
    eval=dataclasses.replace(config.eval, num_steps=validated),
  )
  if known is not None:
    _say_left_out(known, config, made)
  return config_lib.from_dict(config_lib.to_dict(made))


def _say_left_out(known: Config, given: Config, made: Config) -> None:
  """Says which keys about depth a run can't keep, unless they are those of the run that it is made from."""
  for key in ("train.step_counts", "train.step_schedule", "train.self_distillation", "eval.num_steps"):
    before, wanted, value = map(operator.attrgetter(key), (known, given, made))
    if value != wanted != before:
      say(f"{key}={wanted}: becomes {value}, which the stored weights of {made.model.num_steps} steps allow")


def check_model(model: ModelConfig, expected: ModelConfig, *keys: str) -> None:
  """Raises UserError unless a model is the expected one but for its dropout, its attention and `keys`."""
  free = (*keys, "dropout", "attention")
  if dataclasses.replace(model, **{key: getattr(expected, key) for key in free}) != expected:
    names = ", ".join(f"model.{key}" for key in free)
    raise UserError(
      f"of the model keys, only {names} may differ from the model that this run is made from; leave out the others"
    )


def convert(params: Params, model: ModelConfig) -> Params:
  """Returns parameters in the type of those of a model, which float64 makes wider."""
  dtype = parameter_dtype(model.dtype)
  return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def name_own_tokenizer(config: Config, tokenizer: Tokenizer, workdir: str) -> Config:
  """Returns a config that names a run's own copy of its tokenizer, which `workdir.clear` writes."""
  path, begin_mark = os.path.join(files.absolute(workdir), tokenizer.file_name), tokenizer.bos_id is not None
  return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=path, begin_mark=begin_mark))


def use_tokenizer(config: Config, source: Run, workdir: str) -> Config:
  """Returns the config of a run that is made from `source`, or is `source`, with that run's tokenizer.

  Another run keeps a copy of it in its directory. A config with the text of `source`, with shards, or with another
  tokenizer than that of `source` stays as it is. What doesn't fit there is found by `load_text`.
  """
  started = source.started
  unchanged = (config.data, config.seed) == (started.data, started.seed)
  if unchanged or "shards:" in config.data.source or config.data.tokenizer not in (started.data.tokenizer, "train"):
    return config
  for key in ("begin_token", "end_token"):
    if (mark := getattr(config.data, key)) not in (None, own := getattr(started.data, key)):
      theirs = "chosen by its tokenizer's files" if own is None else own
      raise UserError(f"data.{key}={mark}: is {theirs} in the run in {source.workdir}; leave it out")
  begins = source.tokenizer.bos_id is not None
  if config.data.begin_mark not in (None, begins):
    raise UserError(
      f"data.begin_mark={config.data.begin_mark}: is {begins} in the run in {source.workdir}; leave it out"
    )
  if workdir != source.workdir:
    distributed.on_main_process(workdir_lib.clear, workdir, source.tokenizer)
  return name_own_tokenizer(config, source.tokenizer, workdir)


def load_text(config: Config, source: Run) -> Corpus | None:
  """Loads the text of a run that is made from `source`, or returns None if it has none yet.

  Raises UserError for text that can't be read, or that has the tokens of another tokenizer.
  """
  if config.data.source == NO_TEXT:
    return None
  if (config.data, config.seed) == (source.started.data, source.started.seed):
    return source.corpus  # which checks that the text is still the same
  corpus, tokenizer = load_corpus(config), source.tokenizer
  if corpus.tokenizer.hash != tokenizer.hash:
    own = os.path.join(files.absolute(source.workdir), tokenizer.file_name)
    raise UserError(
      f"the run in {source.workdir} was trained with another tokenizer ({tokenizer.hash[:12]}) than that of the text "
      f"({corpus.tokenizer.hash[:12]}); prepare the text with data.tokenizer={own} and "
      f"data.begin_mark={tokenizer.bos_id is not None}"
    )
  tokenizer.chat_template = corpus.tokenizer.chat_template or tokenizer.chat_template  # as data.chat_template says
  return corpus


def make_batches(config: Config, corpus: Corpus, tokens: int) -> list[dict[str, jax.Array]]:
  """Makes batches of the first `tokens` or more of the shuffled training part, on the devices."""
  whole = config.data.rows == "padded"  # a row is a document, which a shorter one would cut
  seq_len, shards = config.model.seq_len if whole else min(config.model.seq_len, SEQ_LEN), sharding.num_shards("batch")
  rows = shards * math.ceil(tokens / (PARTS * seq_len * shards))
  share = sharding.Share(jax.sharding.get_mesh(), rows)
  found = data.train_batches(
    corpus.train,
    seq_len=seq_len,
    batch_size=rows,
    seed=config.seed,
    rows=share.rows,
    eos_id=data.choose_document_end(config.data, corpus),
  )
  return [share.place(found[number]) for number in range(PARTS)]


def validate(config: Config, corpus: Corpus | None, mesh: Mesh, params: Params) -> dict[str, Any]:
  """Returns the model's own number of steps and, if there is text, its validation values at that number."""
  num_steps = config.model.num_steps
  return {"num_steps": num_steps, **(Evaluator(config, corpus, mesh, num_steps)(params) if corpus else {})}


def store_params(
  source: Config, stored: Config, params: Params, mesh: Mesh, corpus: Corpus | None, fit_tokens: int | None
) -> Params:
  """Makes the parameters of the discretized model `stored` from those of `source`. Adapters, if it has any, are new.

  With `fit_tokens`, which `check_fit` lets pass, the steps that stay are fitted on so many tokens of the corpus.
  """
  without_adapters = dataclasses.replace(stored.model, lora=LoraConfig(), dtype=source.model.dtype)
  made = discretized_params(source.model, without_adapters, params)
  if fit_tokens:
    assert corpus is not None  # as `check_fit` has found
    batches = make_batches(stored, corpus, fit_tokens)
    made = fitting.fit_kept_steps(source.model, without_adapters, params, made, batches)
  made = convert(made, stored.model)
  if not stored.model.lora.rank:
    return made
  fresh = jax.jit(
    lambda: all_params(init_state(stored))["weight_source"]["lora"],
    out_shardings=all_params(state_shardings(stored, mesh))["weight_source"]["lora"],
  )()
  return {**made, "weight_source": {**made["weight_source"], "lora": fresh}}


def check_fit(model: ModelConfig, stored: ModelConfig, config: Config, fit_tokens: int | None) -> None:
  """Raises UserError if a model's steps are to be fitted when only those of `stored` stay, and can't be."""
  if fit_tokens is None:
    return
  if fit_tokens < 1:
    raise UserError(f"fit_tokens={fit_tokens}: must be 1 or above")
  if config.data.source == NO_TEXT:
    raise UserError(f"fit_tokens={fit_tokens}: needs text; name it with --config.data.source")
  if not leaves_out_steps(model, stored):
    raise UserError(
      f"fit_tokens: none of the {model.num_steps} steps is left out; rank them (--job=rank_steps) and name fewer with "
      "--num_steps, or leave it out"
    )
  if model.solver not in fitting.LINEAR or not vector_fields.only_multiplies(model):
    raise UserError(
      f"fit_tokens: model.solver={model.solver}, model.field={model.field}: only the solvers "
      f"{' and '.join(fitting.LINEAR)} with a field of this package can be fitted; leave it out"
    )
