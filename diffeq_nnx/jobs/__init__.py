"""The jobs that `--job` names: what runs each, which flags it takes, and an example of its command line."""

import dataclasses
import pkgutil
from typing import Any

from diffeq_nnx.errors import UserError


@dataclasses.dataclass(frozen=True)
class Job:
  """One job.

  Attributes:
    summary: one line for --help that says what it does.
    home: module and name of its function, imported when it is called. Its first arguments are a config and a work
      directory, of the run or, where it makes a run, of the new one. The others are its flags, as --help explains them.
    flags: names of the flags that it takes beside those that every job takes.
    required: those of which one must be given, if there are any.
    example: what to write after --job=NAME.
    config: where its config comes from: file (--config is needed), run (of --workdir, unless --config is given and
      the run was not made from another one), file_or_run (--config is needed unless --workdir holds a run), source (of
      --from_workdir; --config is an error), file_or_source (--config, or that of the run in --workdir, or of
      --from_workdir), or optional (--config, or else the defaults). In the last two the `model.` settings of the
      command line are passed on as model_settings.
    prepare: module and name of a function of that config, whose result is then changed by --config.KEY=VALUE.
    one_process: whether it is an error to start it in several processes.
  """

  summary: str
  home: str
  flags: tuple[str, ...] = ()
  required: tuple[str, ...] = ()
  example: str = "--config=configs/tiny.py --workdir=runs/tiny"
  config: str = "run"
  prepare: str = ""
  one_process: bool = False

  def prepared(self, config: Any) -> Any:
    """The config as `prepare` makes it."""
    return pkgutil.resolve_name(f"diffeq_nnx.{self.prepare}")(config) if self.prepare else config


JOBS = {
  "train": Job(
    "trains a model; run again, it continues from the last checkpoint", "training.loop:train", config="file_or_run"
  ),
  "evaluate": Job(
    "measures the validation loss, at one number of solver steps or several",
    "jobs.evaluate:evaluate",
    ("num_steps",),
    example="--workdir=runs/tiny",
  ),
  "prepare": Job(
    "turns text into shards of tokens, once for any number of runs",
    "jobs.prepare:prepare_shards",
    example="--config=configs/tiny.py --workdir=shards/tiny",
    config="file",
    one_process=True,
  ),
  "discretize": Job(
    "turns W(t) into an ordinary transformer with stored weights for each step",
    "jobs.discretize:discretize",
    ("from_workdir", "num_steps", "step_sizes", "tolerance", "fit_tokens"),
    ("from_workdir",),
    "--from_workdir=runs/tiny --workdir=runs/tiny_stored",
    "source",
  ),
  "rank_steps": Job(
    "finds the order in which steps matter, so that the least of them can be left out",
    "jobs.rank_steps:rank_steps",
    ("num_steps", "tokens", "by"),
    example="--workdir=runs/tiny",
    one_process=True,
  ),
  "continuous": Job(
    "turns an ordinary transformer into W(t), which has the same layers at its own steps",
    "jobs.continuous:continuous",
    ("from_workdir",),
    ("from_workdir",),
    "--from_workdir=runs/gpt --workdir=runs/gpt_any",
    "source",
    "jobs.continuous:config_from",
    one_process=True,
  ),
  "finetune": Job(
    "trains a run on as an ordinary transformer: all weights or adapters, at any number of steps",
    "jobs.finetune:finetune",
    ("from_workdir", "num_steps", "step_sizes", "fit_tokens"),
    ("from_workdir",),
    "--from_workdir=runs/tiny --workdir=runs/tiny_tuned",
    "file_or_source",
  ),
  "generate": Job(
    "continues prompts or conversations",
    "jobs.generate:generate",
    (
      *("prompt", "prompts", "out", "rows", "max_tokens", "temperature", "top_k", "top_p", "seed"),
      *("num_steps", "draft_steps", "draft_tokens", "chat"),
    ),
    ("prompt", "prompts"),
    "--workdir=runs/tiny --prompt='The river'",
    prepare="runs.run:portable",
  ),
  "export": Job(
    "writes a folder that transformers or peft loads, or a StableHLO program",
    "jobs.export:export_run",
    ("out", "format", "num_steps", "base"),
    ("out",),
    "--workdir=runs/tiny --out=exported/tiny",
    prepare="runs.run:portable",
    one_process=True,
  ),
  "import": Job(
    "makes a run of a published checkpoint: a folder, a name on the hub, or a GGUF file",
    "jobs.import_hf:import_run",
    ("from_hf",),
    ("from_hf",),
    "--from_hf=openai-community/gpt2 --workdir=runs/gpt2",
    "optional",
    "jobs.import_hf:remove_text",
    one_process=True,
  ),
  "analyze": Job(
    "measures spectra, Lyapunov exponents and clusters over depth, and draws a page of them",
    "jobs.analyze:analyze",
    ("text", "position", "leading", "times", "num_steps"),
    example="--workdir=runs/tiny",
    prepare="runs.run:portable",
    one_process=True,
  ),
  "harness": Job(
    "evaluates on tasks of lm_eval, and measures the perplexity of texts",
    "jobs.harness:evaluate_downstream",
    ("baseline", "num_steps"),
    example="--workdir=runs/tiny",
    prepare="runs.run:portable",
  ),
}
ALIASES = {"analyse": "analyze"}  # other spellings


def run(name: str, config: Any, workdir: str, **options: Any) -> Any:
  """Runs a job in this process, as `--job=NAME` does; the options are its flags.

  Raises:
    UserError: no job has this name; it runs in one process, and this is one of several; or what its function raises.
  """
  job = JOBS.get(ALIASES.get(name, name))
  if job is None:
    from diffeq_nnx.config_fields import nearest  # not for --help, as below

    raise UserError(f"{name}: no such job; {nearest(name, JOBS)}")
  if job.one_process:
    import jax  # takes seconds, and `JOBS` is read for --help

    if jax.process_count() > 1:
      raise UserError(f"--job={name}: runs in one process; start it on one host")
  return pkgutil.resolve_name(f"diffeq_nnx.{job.home}")(config, workdir, **options)
