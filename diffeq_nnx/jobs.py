"""What `--job` can be: each a function of a config and a work directory."""

import dataclasses
import json
import os
import sys
from typing import Any, Sequence

from flax import nnx
import jax
from jax.sharding import Mesh

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx import distributed
from diffeq_nnx import sharding
from diffeq_nnx import trainable
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.checkpoint import Checkpoints
from diffeq_nnx.config import Config, LoraConfig, MeshConfig, ModelConfig
from diffeq_nnx.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.evaluate import Evaluator
from diffeq_nnx.exporting.jobs import export_run, import_run
from diffeq_nnx.generation import Decoder, generate_texts, prompt_ids
from diffeq_nnx.report import print_result, reporter
from diffeq_nnx.sampling import Sampling
from diffeq_nnx.train import claim, load_corpus, prepare, say_attention, train
from diffeq_nnx.train_step import Params, State, abstract_state, all_params, graph, init_state, state_shardings


def evaluate(config: Config, workdir: str) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, or a mesh that the devices don't make.
  """
  distributed.end_on_sigterm()
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    corpus, state = _open_run(config, workdir, mesh)
    evaluator = Evaluator(config, corpus, mesh)
    return print_result({"job": "evaluate", "workdir": workdir, "step": int(state["step"]),
                   "num_steps": evaluator.num_steps, **evaluator(all_params(state))})


def _open_run(config: Config, workdir: str, mesh: Mesh, key: str = "workdir") -> tuple[data.Corpus, State]:
  """The corpus and the newest state of a run; errors name `key`."""
  with distributed.together():
    workdir_lib.require(workdir, config)  # before the text is read
  corpus = load_corpus(config)
  with distributed.together():
    workdir_lib.require(workdir, config, corpus)
  restored = Checkpoints(workdir, config, corpus.tokenizer.hash).restore(abstract_state(config, mesh))
  if restored is None:
    raise UserError(f"{key}={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every", everywhere=True)
  return corpus, restored[0]


def discretize(config: Config, workdir: str, *, from_workdir: str, num_steps: int | None = None,
               step_sizes: Sequence[float] | None = None) -> dict:
  """Writes the newest model of a run with stored weights, as a run of its own at step 0, and prints one JSON line.

  The line has the validation values of the model before, at its own number of steps, and after. Adapters become part
  of the weights.

  Args:
    config: of the run in `from_workdir`.
    workdir: the new run's directory.
    from_workdir: the run's.
    num_steps: as for `discretization.discretize`.
    step_sizes: likewise.

  Raises:
    UserError: a number of steps or step sizes that can't be, no checkpoint, or a directory that holds a run.
  """
  distributed.end_on_sigterm()
  stored = _derived(config, _discretized(config, num_steps, step_sizes))
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    with distributed.together():
      workdir_lib.require_none(workdir)
    corpus, state = _open_run(config, from_workdir, mesh, "from_workdir")
    params = _stored_params(config, stored, all_params(state), mesh)
    before = Evaluator(config, corpus, mesh, config.model.num_steps)(all_params(state))
    after = Evaluator(stored, corpus, mesh)(params)
    _start_run(stored, workdir, corpus, params, mesh, after["loss"])
    return print_result({"job": "discretize", "workdir": workdir, "from_workdir": from_workdir,
                   "before": {"num_steps": config.model.num_steps, **before},
                   "after": {"num_steps": stored.model.num_steps, **after}})


def finetune(config: Config, workdir: str, *, from_workdir: str, num_steps: int | None = None,
             step_sizes: Sequence[float] | None = None) -> dict[str, float]:
  """Trains the newest model of a run, with stored weights at any steps, on the text of `config`; run again, it goes on.

  With `config.model.lora.rank` only adapters learn, and the tables if `config.model.lora.embeddings`.

  Args:
    config: what to train on and how; of `config.model` only dropout, attention and lora are read, the rest is the
      run's.
    workdir: the new run's directory.
    from_workdir: the run's; its tokenizer is used.
    num_steps: as for `discretization.discretize`.
    step_sizes: likewise.

  Returns:
    The last validation values, as `train`.

  Raises:
    UserError: as `discretize` and `train`, and a pattern of targets that matches nothing.
    RunError: as `train`.
  """
  source = workdir_lib.config_of(from_workdir, "from_workdir")
  model = dataclasses.replace(
      _discretized(source, num_steps, step_sizes), dropout=config.model.dropout, attention=config.model.attention,
      lora=config.model.lora)
  tokenizer = workdir_lib.tokenizer_of(from_workdir, source)
  own = os.path.join(os.path.abspath(from_workdir), tokenizer.file_name)
  data_config = config.data
  if data_config.tokenizer == "train" and "shards:" not in data_config.source:
    data_config = dataclasses.replace(data_config, tokenizer=own, begin_mark=tokenizer.bos_id is not None)
  config = _derived(dataclasses.replace(config, data=data_config), model)
  if not workdir_lib.holds_run(workdir):
    mesh = prepare(config)
    with jax.set_mesh(mesh):
      with distributed.together():
        workdir_lib.require(from_workdir, source)
      corpus = load_corpus(config)
      if corpus.tokenizer.hash != tokenizer.hash:
        raise UserError(f"from_workdir={from_workdir}: was trained with another tokenizer ({tokenizer.hash[:12]}) than "
                        f"that of the text ({corpus.tokenizer.hash[:12]}); prepare the text with data.tokenizer={own}",
                        everywhere=True)
      restored = Checkpoints(from_workdir, source, corpus.tokenizer.hash).restore(abstract_state(source, mesh))
      if restored is None:
        raise UserError(f"from_workdir={from_workdir}: holds no checkpoint yet; train first", everywhere=True)
      params = _stored_params(source, config, all_params(restored[0]), mesh)
      before = Evaluator(config, corpus, mesh)(params)
      _start_run(config, workdir, corpus, params, mesh, before["loss"])
      with reporter(workdir, 0, config.train.steps) as report:
        report.validation(0, before)
  return train(config, workdir)


def _discretized(config: Config, num_steps: int | None, step_sizes: Sequence[float] | None) -> ModelConfig:
  """`discretized_config`, its ValueError told in one line."""
  try:
    return discretized_config(config.model, num_steps, step_sizes)
  except ValueError as error:
    raise UserError(f"--num_steps, --step_sizes: {error}", everywhere=True) from error


def _derived(config: Config, model: ModelConfig) -> Config:
  """The config with a model of stored weights, and without what doesn't go with its steps; checked."""
  every = config.train.remat_every if model.num_steps % config.train.remat_every == 0 else 1
  return config_lib.from_dict(config_lib.to_dict(dataclasses.replace(
      config, model=model, train=dataclasses.replace(config.train, step_counts=(), remat_every=every),
      eval=dataclasses.replace(config.eval, num_steps=None))))


def _stored_params(source: Config, stored: Config, params: Params, mesh: Mesh) -> Params:
  """All parameters of a model as those of its discretised one, adapters new where `stored` has them."""
  whole = dataclasses.replace(stored.model, lora=LoraConfig())
  made = jax.jit(discretized_params, static_argnums=(0, 1))(source.model, whole, params)
  if not stored.model.lora.rank:
    return made
  state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(stored, mesh))(stored)
  made["weight_source"] = {**made["weight_source"], "lora": all_params(state)["weight_source"]["lora"]}
  return made


def _start_run(config: Config, workdir: str, corpus: data.Corpus, params: Params, mesh: Mesh, loss: float) -> None:
  """Writes a run at step 0 that has these parameters, all of the model's."""
  places = state_shardings(config, mesh)
  state = jax.jit(init_state, static_argnums=0, out_shardings=places)(config)
  learning, frozen = trainable.split(config.model, jax.device_put(params, all_params(places)))
  checkpoints = Checkpoints(workdir, config, corpus.tokenizer.hash)
  checkpoints.save_frozen(frozen)
  claim(config, workdir, corpus)
  checkpoints.save({**state, "params": learning, "frozen": frozen}, {"windows": 0}, loss)
  checkpoints.close()


def prepare_shards(config: Config, workdir: str) -> dict:
  """Turns data.source into prepared shards in the work directory and prints one JSON line on stdout.

  Run again after it was killed, it goes on.

  Raises:
    UserError: text, a tokenizer or a directory that can't be used; more than one process of the job (this one starts
      data.num_processes of its own).
    RunError: one of those dies, or the disk is full.
  """
  if jax.process_count() > 1:
    raise UserError("--job=prepare: runs on one host, with data.num_processes processes; start it on one",
                    everywhere=True)
  distributed.end_on_sigterm()
  recipe = data.recipe(config.data, config.model.vocab_size, config.seed)
  try:
    manifest = data.prepare(workdir, recipe, config.data.num_processes or data.num_cores())
  except (PermissionError, NotADirectoryError, FileExistsError) as error:
    raise UserError(f"workdir={workdir}: can't be written ({error.strerror}); choose another directory") from error
  except OSError as error:
    raise RunError(f"workdir={workdir}: can't be written ({error.strerror or error}); make room, and run the same "
                   "command to go on from what is finished") from error
  counts = {name: {key: split[key] for key in ("tokens", "bytes", "documents")} | {"shards": len(split["shards"])}
            for name, split in manifest["splits"].items()}
  return print_result({"job": "prepare", "workdir": workdir, "tokenizer": manifest["tokenizer"]["hash"],
                 "records": manifest["records"], **counts})


def generate(config: Config, workdir: str, *, prompts: Sequence[str], num_steps: int | None = None,
             **sampling: Any) -> list[dict]:
  """Continues prompts with the newest model of a run, and prints on stdout.

  For one prompt its text, on a terminal as it comes; for several a JSON line each: prompt, text, tokens, stopped
  (eos or length).

  Args:
    config: of the run.
    workdir: the run's directory; the text that it was trained on need not be there.
    prompts: texts.
    num_steps: of the solver; None: eval.num_steps, or else the model's own.
    **sampling: max_tokens, temperature, top_k, top_p, seed; see `sampling.Sampling`.

  Returns:
    What the JSON lines say.

  Raises:
    UserError: several processes, prompts or values that can't be, no checkpoint, an attention that this backend lacks.
  """
  if jax.process_count() > 1:
    raise UserError("--job=generate: runs in one process; start it on one host", everywhere=True)
  Sampling(**sampling)  # a mistake is told before anything is read
  say_attention(config.model)
  workdir_lib.require(workdir, config)
  tokenizer = workdir_lib.tokenizer_of(workdir, config)
  prompt_ids(tokenizer, prompts)
  mesh = sharding.make_mesh(MeshConfig())  # whatever the run was trained on
  with jax.set_mesh(mesh):
    params = Checkpoints(workdir, config, tokenizer.hash).restore_params(abstract_state(config, mesh))
    if params is None:
      raise UserError(f"workdir={workdir}: holds no checkpoint yet; train first, or lower checkpoint.every")
    decoder = Decoder(nnx.merge(graph(config.model), params), config.eval.num_steps if num_steps is None else num_steps)
    del params  # the decoder has what it needs
  alone = len(prompts) == 1
  streams = alone and sys.stdout.isatty()
  show = (lambda _, piece: print(piece, end="", flush=True)) if streams else None
  try:
    found = generate_texts(decoder, tokenizer, prompts, on_text=show, **sampling)
  except KeyboardInterrupt:  # how a text that has been read far enough is ended
    print(file=sys.stderr)
    raise SystemExit(130) from None
  results = [{"prompt": one.prompt, "text": one.text, "tokens": len(one.ids), "stopped": one.stopped} for one in found]
  for result in results:
    print("" if streams else result["text"] if alone else json.dumps(result), flush=True)
  return results


JOBS = {"train": train, "evaluate": evaluate, "prepare": prepare_shards, "discretize": discretize,
        "finetune": finetune, "generate": generate, "export": export_run, "import": import_run}
