"""--job=import: a published checkpoint as a run."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from absl import logging
import jax

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import NO_TEXT, Config
from diffeq_nnx.exporting import importing
from diffeq_nnx.exporting.hub import open_folder
from diffeq_nnx.jobs.deriving import check_model, convert, derive_config, name_own_tokenizer
from diffeq_nnx.parallel.console import print_result, say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run, checked_mesh, load_corpus
from diffeq_nnx.training.step import place_state


def remove_text(config: Config) -> Config:
  """Returns the config of a run whose text is named when training starts."""
  return dataclasses.replace(config, data=dataclasses.replace(config.data, source=NO_TEXT))


def import_run(config: Config, workdir: str, *, from_hf: str, model_settings: Sequence[str] = ()) -> dict[str, Any]:
  """Writes a published checkpoint as a run at step 0 and prints one JSON line on stdout.

  Args:
    config: what the run is to be but for its model and tokenizer, which are the checkpoint's. That of `remove_text`
      makes a run that has no text until a job names it.
    model_settings: `key=value` that change the checkpoint's model: model.dropout, model.dtype, model.attention, and
      model.seq_len where it becomes shorter.

  Raises:
    UserError: a checkpoint that can't be held (see `importing.import_hf`), other settings of the model, or a directory
      that holds a run.
  """
  workdir_lib.require_none(workdir)
  shorter = [setting for setting in model_settings if setting.startswith("model.seq_len=")]
  seq_len = config_lib.apply_settings(Config(), shorter).model.seq_len if shorter else None
  with open_folder(from_hf) as folder:
    model, params = importing.read(folder, seq_len)
    tokenizer = importing.read_tokenizer(folder, config.data)
  if beyond := [tokenizer.name_token(number) for number in range(model.vocab_size, tokenizer.vocab_size)]:
    logging.warning(
      "from_hf=%s: the model has no embedding for %d tokens of its tokenizer (%s); jobs that need text will "
      "refuse the run; import a folder whose tokenizer's files lack these tokens",
      *(from_hf, len(beyond), ", ".join(beyond[:3])),
    )
  model = dataclasses.replace(model, attention=config.model.attention)
  if config.data.tokenizer != "train":
    say(f"data.tokenizer={config.data.tokenizer}: becomes the checkpoint's")
  config = derive_config(name_own_tokenizer(config, tokenizer, workdir), model, known=Config())
  config = config_lib.apply_settings(config, model_settings)
  check_model(config.model, model, "seq_len", "dtype")
  mesh = checked_mesh(config, trains=False)
  with jax.set_mesh(mesh):
    workdir_lib.clear(workdir, tokenizer)  # the run's own from the start: the folder may go
    corpus = None if config.data.source == NO_TEXT else load_corpus(config)
    Run.create(config, workdir, tokenizer, corpus, place_state(config, convert(params, config.model), mesh))
  facts = {key: getattr(config.model, key) for key in ("field", "num_steps", "seq_len", "dtype")}
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  return print_result("import", workdir, from_hf=from_hf, **facts, parameters=size)
