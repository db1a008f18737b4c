"""What `--job` can be: each a function of a config and a work directory."""

import dataclasses
import json
import os
import sys
from typing import Any, Sequence

from flax import nnx
import jax
from jax.sharding import Mesh

from diffeq_nnx import data
from diffeq_nnx import distributed
from diffeq_nnx import runs
from diffeq_nnx import sharding
from diffeq_nnx import workdir as workdir_lib
from diffeq_nnx.analysis.jobs import analyse
from diffeq_nnx.config import Config, LoraConfig
from diffeq_nnx.discretization import discretized_config, discretized_params
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.evaluate import Evaluator
from diffeq_nnx.exporting.jobs import export_run, import_run
from diffeq_nnx.harness.jobs import evaluate_downstream
from diffeq_nnx.generation import Decoder, generate_texts, prompt_ids
from diffeq_nnx.report import print_result, reporter
from diffeq_nnx.sampling import Sampling
from diffeq_nnx.train import load_corpus, prepare, say_attention, train
from diffeq_nnx.train_step import Params, all_params, graph, init_state, state_shardings


def evaluate(config: Config, workdir: str, *, num_steps: int | None = None) -> dict:
  """Evaluates the newest checkpoint and prints one JSON line on stdout.

  Args:
    config: of the run.
    workdir: the run's directory.
    num_steps: of the solver; None: eval.num_steps, or else the model's own.

  Raises:
    UserError: an attention that this backend lacks, no checkpoint in the work directory, or one of another model or
      tokenizer, or a mesh that the devices don't make.
  """
  distributed.end_on_sigterm()
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    corpus = _corpus_of(config, workdir)
    params, step = runs.read(config, workdir, mesh, corpus.tokenizer.hash)
    evaluator = Evaluator(config, corpus, mesh, num_steps)
    return print_result({"job": "evaluate", "workdir": workdir, "step": step, "num_steps": evaluator.num_steps,
                         **evaluator(params)})


def _corpus_of(config: Config, workdir: str, flag: str = "workdir") -> data.Corpus:
  """The corpus of a run, which is found to be the run's; errors name `flag`."""
  with distributed.together():
    workdir_lib.require(workdir, config, flag=flag)  # before the text is read
  corpus = load_corpus(config)
  with distributed.together():
    workdir_lib.require(workdir, config, corpus, flag)
  return corpus


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
  stored = runs.derived(config, discretized_config(config.model, num_steps, step_sizes))
  here = runs.anywhere(config)
  with distributed.together():
    mesh = sharding.make_mesh(here.mesh)
  with jax.set_mesh(mesh):
    with distributed.together():
      workdir_lib.require_none(workdir)
    corpus = _corpus_of(config, from_workdir, "from_workdir")
    params, _ = runs.read(here, from_workdir, mesh, corpus.tokenizer.hash, "from_workdir")
    before = Evaluator(here, corpus, mesh, config.model.num_steps)(params)
    params = _stored_params(config, stored, params, mesh)
    after = Evaluator(runs.anywhere(stored), corpus, mesh)(params)
    runs.start(stored, workdir, corpus, params, mesh, after["loss"], workdir_lib.run_hash(from_workdir))
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
  if workdir_lib.holds_run(workdir):  # the run goes on; its source need not be there any more
    workdir_lib.check_source(workdir, from_workdir)
    known = workdir_lib.config_of(workdir)
    model, data_config = known.model, config.data
    if config.data.tokenizer == "train" and "shards:" not in config.data.source:
      data_config = dataclasses.replace(config.data, tokenizer=known.data.tokenizer, begin_mark=known.data.begin_mark,
                                        begin_token=known.data.begin_token, end_token=known.data.end_token)
    model = dataclasses.replace(model, dropout=config.model.dropout, attention=config.model.attention,
                                lora=config.model.lora)
    if num_steps is not None and num_steps != model.num_steps:
      raise UserError(f"--num_steps={num_steps}: the run in workdir={workdir} has {model.num_steps}; name another "
                      "directory, or leave it out", everywhere=True)
    return train(runs.derived(config, model, data_config), workdir)
  source = workdir_lib.config_of(from_workdir, "from_workdir")
  tokenizer = workdir_lib.tokenizer_of(from_workdir, source)
  model = dataclasses.replace(
      discretized_config(source.model, num_steps, step_sizes), dropout=config.model.dropout,
      attention=config.model.attention, lora=config.model.lora)
  data_config = config.data
  if data_config.tokenizer == "train" and "shards:" not in data_config.source:
    with distributed.together():
      if distributed.leads():
        workdir_lib.clear(workdir, tokenizer)  # the run's own from the start: its source may go
    own = os.path.join(os.path.abspath(workdir), tokenizer.file_name)
    data_config = dataclasses.replace(data_config, tokenizer=own, begin_mark=tokenizer.bos_id is not None)
  config = runs.derived(config, model, data_config)
  graph(config.model)  # a mistake in lora.targets is told before the text is read
  mesh = prepare(config)
  with jax.set_mesh(mesh):
    corpus = load_corpus(config)
    if corpus.tokenizer.hash != tokenizer.hash:
      own = os.path.join(os.path.abspath(from_workdir), tokenizer.file_name)
      raise UserError(f"from_workdir={from_workdir}: was trained with another tokenizer ({tokenizer.hash[:12]}) than "
                      f"that of the text ({corpus.tokenizer.hash[:12]}); prepare the text with data.tokenizer={own} and "
                      f"data.begin_mark={tokenizer.bos_id is not None}", everywhere=True)
    here = dataclasses.replace(source, mesh=config.mesh)
    params, _ = runs.read(here, from_workdir, mesh, tokenizer.hash, "from_workdir")
    params = _stored_params(source, config, params, mesh)
    before = Evaluator(config, corpus, mesh)(params)
    with distributed.together():
      if distributed.leads():
        os.makedirs(workdir, exist_ok=True)
    with reporter(workdir, -1, config.train.steps) as report:
      report.validation(0, before)
    runs.start(config, workdir, corpus, params, mesh, before["loss"], workdir_lib.run_hash(from_workdir))
    del params
  return train(config, workdir)


def _stored_params(source: Config, stored: Config, params: Params, mesh: Mesh) -> Params:
  """All parameters of a model as those of its discretised one, adapters new where `stored` has them."""
  whole = dataclasses.replace(stored.model, lora=LoraConfig())
  made = discretized_params(source.model, whole, params)
  if not stored.model.lora.rank:
    return made
  fresh = jax.jit(lambda: all_params(init_state(stored))["weight_source"]["lora"],
                  out_shardings=all_params(state_shardings(stored, mesh))["weight_source"]["lora"])()
  return {**made, "weight_source": {**made["weight_source"], "lora": fresh}}


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
  workdir_lib.require(workdir, config)
  config = runs.anywhere(config)
  say_attention(config.model)
  tokenizer = workdir_lib.tokenizer_of(workdir, config)
  prompt_ids(tokenizer, prompts)
  mesh = sharding.make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    params, _ = runs.read(config, workdir, mesh, tokenizer.hash)
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
        "finetune": finetune, "generate": generate, "export": export_run, "import": import_run,
        "analyse": analyse, "harness": evaluate_downstream}
