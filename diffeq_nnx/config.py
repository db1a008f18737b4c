"""Every key of an experiment: its type, its default and its rule, and the checks of keys against each other.

A config file returns an `ml_collections.ConfigDict` made by `default()`; `from_config_dict` checks it and turns it into
the frozen dataclasses below, which the rest of the package reads.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import numbers
import os
import runpy
from typing import Any

import ml_collections
from ml_collections import config_dict

from diffeq_nnx import config_fields
from diffeq_nnx.config_fields import Section, check_divides, number, one_of
from diffeq_nnx.config_fields import find_near as find_near
from diffeq_nnx.config_fields import nearest as nearest
from diffeq_nnx.config_model import LoraConfig as LoraConfig
from diffeq_nnx.config_model import ModelConfig as ModelConfig
from diffeq_nnx.config_model import RopeConfig as RopeConfig
from diffeq_nnx.config_model import TimeConfig as TimeConfig
from diffeq_nnx.errors import UserError

RANDOM_BITS = "threefry2x32"  # JAX's generator of all runs, since the shape of a saved key depends on it
NO_TEXT = "none"  # the data.source of an imported run until its text is named
KEYS_OF_TOKENIZER = ("tokenizer", "begin_mark", "begin_token", "end_token", "unknown_bytes")  # of data
KEYS_OF_ROWS = ("attend_across_documents", "rows", "too_long")  # of data, for prepared text too
RUN_FILE = "run.json"  # of a work directory, as the folders below
CHECKPOINT_FOLDER = "checkpoints"
DAMAGED_FOLDER = "checkpoints_damaged"
FROZEN_FOLDER = "frozen"
METRICS_FILE = "metrics.jsonl"
REPORT_FOLDER = "report"
TENSORBOARD_FOLDER = "tensorboard"
RUN_FOLDERS = (CHECKPOINT_FOLDER, DAMAGED_FOLDER, FROZEN_FOLDER, REPORT_FOLDER, TENSORBOARD_FOLDER)


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
  """Which text, and how it becomes tokens.

  With prepared shards only source, validation, attend_across_documents, rows and too_long choose anything; tokenizer
  and marks are checked against the shards, and the other keys are ignored.
  """

  # builtin | text:GLOB | jsonl:GLOB | parquet:GLOB (paths or URLs) | tfds:NAME/CONFIG:SPLIT | hf:NAME:CONFIG:SPLIT |
  # shards:DIR | several of the last with weights, 0.7*shards:DIR + 0.3*shards:DIR | none, for an imported run that gets
  # its text later.
  source: str = "builtin"
  # text: a document under text_key; completion: a prompt and a completion, which alone counts in the loss; chat:
  # messages, of which the assistant's count.
  records: str = one_of("text", "completion", "chat")
  text_key: str = "text"  # The key of a JSON object, the feature or the column that holds the text.
  prompt_key: str = "prompt"  # The key of the prompt, with records=completion.
  completion_key: str = "completion"  # The key of the completion, with records=completion.
  messages_key: str = "messages"  # The key of the messages, with records=chat.
  chat_template: str | None = None  # The path of a Jinja file. None: the tokenizer's own template.
  # What happens at a record that can't be used: the job stops, or skips and counts it.
  bad_records: str = one_of("error", "skip")
  tfds_dir: str | None = None  # Where TFDS data sets lie. None: TFDS' own choice, ~/tensorflow_datasets.
  download: bool = False  # Whether a TFDS data set that is not there is downloaded and prepared.
  # A source of validation text, or other shards. None: documents held out of `source`, or the shards' validation part.
  validation: str | None = None
  # Share of the documents that is held out where `validation` is None.
  validation_fraction: float = number(0.05, above=0, below=1)
  # Chooses the documents that are held out, by a hash of seed and document. None: `seed`.
  validation_seed: int | None = number(None, at_least=0, below=1 << 64)
  # train: a sentencepiece model is trained on the training part (for shards: their own) | bytes | a path.
  tokenizer: str = "train"
  begin_mark: bool | None = None  # Whether documents begin with the tokenizer's begin mark. None: as its files say.
  # The token of the begin mark, e.g. <s>; documents begin with it unless begin_mark is False.
  begin_token: str | None = None
  end_token: str | None = None  # The token of the end mark. None: as the tokenizer's files say, else <|endoftext|>.
  # What a byte that a byte-level vocabulary lacks becomes: an error with document and byte, or the unknown token.
  # None: as the tokenizer file of a run or of shards says, else error.
  unknown_bytes: str | None = one_of(None, "error", "unknown")
  num_processes: int | None = number(None, above=0)  # Processes that turn text into tokens. None: one for each core.
  # True, as in the paper: attention crosses documents. False: attention and positions stay within one.
  attend_across_documents: bool = True
  # packed: rows are windows of all tokens in order; padded: each row is one document.
  rows: str = one_of("packed", "padded")
  too_long: str = one_of("cut", "drop")  # What happens to a document that is longer than a padded row.
  cache_dir: str = "~/.cache/diffeq_nnx"  # Where tokenizers and tokens are kept between runs.

  def _check_together(self) -> None:
    uses = {"text_key": "text", "prompt_key": "completion", "completion_key": "completion", "messages_key": "chat"}
    for key, records in uses.items():
      if getattr(self, key) != getattr(DataConfig, key) and self.records != records:
        raise UserError(
          f"data.{key}={getattr(self, key)}: is for data.records={records}, not {self.records}; leave it out, or set "
          "data.records"
        )
    if self.too_long != "cut" and self.rows != "padded":
      raise UserError(f"data.too_long={self.too_long}: is for data.rows=padded; leave it out, or set data.rows=padded")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section, prefix="optimizer."):
  """The optimizer, with a linear warm-up and a cosine decay."""

  # The optimizer; docs/own_text.md says when to take which.
  name: str = one_of("adamw", "muon", "muon_weights", "lion")
  peak_rate: float = number(3e-4, above=0)  # The learning rate after the warm-up.
  final_fraction: float = number(0.1, at_least=0, at_most=1)  # The rate at the last train step, as a share of the peak.
  # Share of the train steps in which the rate rises; at least the first.
  warmup_fraction: float = number(0.01, at_least=0, below=1)
  schedule_steps: int | None = number(None, above=0)  # Length of the schedule in train steps. None: train.steps.
  b1: float = number(0.9, at_least=0, below=1)  # Decay of the mean of gradients; of Lion, its share in an update.
  # Decay of the mean of squared gradients; of Lion, of the mean of gradients, for which its authors take 0.99.
  b2: float = number(0.999, at_least=0, below=1)
  eps: float = number(1e-8, above=0)  # Added to the root of that mean.
  muon_by_head: bool = False  # Whether Muon updates each head's part of the q, k and v kernels by itself.
  # Share of tables, head, and stored or shared kernels that is taken off in each train step, times the rate.
  weight_decay: float = number(0.1, at_least=0)
  # Whether F of generated kernels decays as stored kernels do. None: only with muon_weights.
  decay_generated: bool | None = None
  # The largest norm of the gradients of all parameters; larger ones are scaled to it.
  clip_norm: float = number(1.0, above=0)
  # The learning rate of e(t)'s parameters over that of the others. None: 0 with muon_weights, else 1.
  time_rate: float | None = number(None, at_least=0)


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
  """The train loop."""

  steps: int = number(1000, above=0, below=2**31)  # Train steps.
  batch_size: int = number(32, above=0)  # Rows of a train step, over all devices and micro-batches.
  # Most rows of a micro-batch on a device; the largest divisor of the device's rows is taken. None: all; -1: the
  # fastest number, which is measured.
  device_batch_size: int | None = number(None, above=0, minus_one="the fastest")
  step_counts: tuple[int, ...] = ()  # Numbers of solver steps, of which each train step draws one. (): model.num_steps.
  # Share of the train steps, or of optimizer.schedule_steps, before which model.num_steps is used.
  draw_from: float = number(0.0, at_least=0, below=1)
  # Train steps from which the second of step_counts is used, the third, and so on: depth grows. (): they are drawn.
  step_schedule: tuple[int, ...] = ()
  adjoint: str = one_of("checkpointed", "reversible")  # reversible: no states are stored, for solver=leapfrog.
  # What is computed again for gradients, with adjoint=checkpointed. dots: all but matrix products; auto: the fastest of
  # these, which is measured.
  remat: str = one_of("full", "none", "dots", "auto")
  remat_every: int = number(1, above=0)  # Solver steps between two stored states; unused with remat=none.
  # Slices of the row in which the loss is computed one at a time. None: by memory.
  loss_chunks: int | None = number(None, above=0)
  # The work directory of a run, also an imported one, whose predictions are learned beside the text.
  teacher: str | None = None
  teacher_weight: float = number(0.5, at_least=0, at_most=1)  # Share of the divergence from the teacher in the loss.
  # Whether, in a train step of fewer solver steps than the most of the run, the same model at the most is trained too
  # and teaches it.
  self_distillation: bool = False
  log_every: int = number(10, above=0)  # Train steps between two lines of metrics.
  # The peak of one device, for utilization. None: from its kind, or measured.
  peak_tflops: float | None = number(None, above=0)


_size = functools.partial(number, at_least=1, minus_one="all remaining devices")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, prefix="mesh."):
  """The device mesh of a TPU slice, or of the whole job elsewhere; several slices split the batch."""

  data: int = _size(1)  # Groups of devices that each hold all parameters; -1: what the others leave.
  fsdp: int = _size(-1)  # Devices over which parameters and rows are split.
  context: int = _size(1)  # Devices over which the positions of each row are split, and parameters.
  tensor: int = _size(1)  # Devices over which heads and the feed-forward branch are split.

  def _check_together(self) -> None:
    sizes = {f"mesh.{name}": size for name, size in dataclasses.asdict(self).items()}
    if list(sizes.values()).count(-1) > 1:
      raise UserError(f"{', '.join(sizes)}: only one may be -1; give the others their sizes")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section, prefix="eval."):
  """Validation, while training and as a job."""

  every: int = number(500, above=0)  # Train steps between two validations.
  batch_size: int = number(32, above=0)  # Rows of a batch.
  max_batches: int | None = number(None, above=0)  # Batches of a validation. None: the whole validation part.
  num_steps: int | None = number(None, above=0)  # Solver steps. None: model.num_steps.


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, prefix="checkpoint."):
  """When checkpoints are saved, and which stay: the last `keep` and the best by validation loss.

  At least two stay, since the newest may turn out to be one of a run that diverged, or damaged.
  """

  every: int = number(500, above=0)  # Train steps between two checkpoints.
  # A checkpoint is also saved when so many minutes have passed; this is looked at when a train step is logged.
  minutes: float | None = number(None, above=0)
  keep: int = number(2, above=0)  # How many of the last stay; 1 counts as 2.


@dataclasses.dataclass(frozen=True)
class ReportConfig(Section, prefix="report."):
  """Where metrics go beside the work directory."""

  wandb: str | None = None  # A project of Weights & Biases; WANDB_MODE=offline keeps its files in the work directory.


@dataclasses.dataclass(frozen=True)
class HarnessConfig(Section, prefix="harness."):
  """Downstream evaluation with lm_eval, as a job; no part of a run's identity."""

  # Names of tasks, groups or tags, separated by commas, with * and ?; paper: the paper's list; none: only `text`.
  tasks: str = "paper"
  # Examples before each question, once for each number. (): 0 and 5 for the paper's list, else as the tasks say.
  num_fewshot: tuple[int, ...] = ()
  limit: int | None = number(None, above=0)  # Questions of each task, and documents of `text`. None: all.
  include_path: str | None = None  # A folder of task files of your own.
  default_tasks: bool = True  # Whether lm_eval's own tasks are there too; reading their files takes seconds.
  # Rows of model.seq_len tokens on a device, more where they are shorter. A CPU takes one row or 1,024 tokens.
  batch_size: int = number(8, above=0)
  dtype: str = one_of("model", "bfloat16", "float32")  # Type of the computation. model: as the model says.
  apply_chat_template: bool = False  # Whether the tokenizer's chat template writes contexts as messages of a user.
  # Whether examples are turns of the conversation; otherwise they are in the last message.
  fewshot_as_multiturn: bool = True
  # What stands before contexts. auto: the tokenizer's begin mark if it has one; always: that, or else the end mark.
  begin_mark: str = one_of("auto", "none", "always")
  window: str = one_of("disjoint", "sliding")  # How long texts are cut into windows.
  stride: int | None = number(None, above=0)  # Tokens that a sliding window predicts. None: half of model.seq_len.
  text: str | None = None  # A source as in data.source, whose perplexity is measured.
  folder: str = "harness"  # The folder for the results, in the work directory.

  @property
  def names(self) -> tuple[str, ...]:
    """The parts of `tasks`."""
    names = tuple(filter(None, (name.strip() for name in self.tasks.split(","))))
    return () if names == ("none",) else names

  def _check_together(self) -> None:
    for i, count in enumerate(self.num_fewshot):
      if count < 0:
        raise UserError(f"harness.num_fewshot[{i}]={count}: must be 0 or above")
    if self.stride is not None and self.window != "sliding":
      raise UserError(
        f"harness.stride={self.stride}: applies to sliding windows only; leave it out, or set harness.window=sliding"
      )
    # The folder must not be one that another part of a run writes.
    first = os.path.normpath(self.folder).split(os.sep)[0]
    if os.path.isabs(self.folder) or first in ("..", ".", *RUN_FOLDERS) or "::" in self.folder or "://" in self.folder:
      raise UserError(
        f"harness.folder={self.folder!r}: must be a folder of its own within the work directory, e.g. harness"
      )
    if self.text is None and not self.names:
      raise UserError(f"harness.tasks={self.tasks!r}: there is nothing to do; name tasks, or a harness.text")


@dataclasses.dataclass(frozen=True)
class Config(Section):
  """One experiment. Keys of different sections are checked against each other by `from_config_dict` and `load`."""

  # Of the initial weights, the order of the text, dropout and the draw of step_counts.
  seed: int = number(0, at_least=0, below=2**32)
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  report: ReportConfig = ReportConfig()
  harness: HarnessConfig = HarnessConfig()


def key_types() -> dict[str, type]:
  """Returns the plain type of every dotted key: int for `int | None`, tuple for `tuple[int, ...]`."""
  return {key: config_fields.plain_type(field.type) for key, field in config_fields.list_fields(Config).items()}


def choices(key: str) -> tuple[str, ...]:
  """Returns the names that a dotted key may have, for example those of model.solver."""
  return tuple(config_fields.list_fields(Config)[key].metadata["choices"])


def add_choice(key: str, name: str) -> None:
  """Makes a name valid for a dotted key, as `solvers.register` and `vector_fields.register` do."""
  known = config_fields.list_fields(Config)[key].metadata["choices"]
  if name not in known:
    known.append(name)


def default() -> ml_collections.ConfigDict:
  """Returns every key with its default, optional ones as typed placeholders, for a config file to change."""
  made = ml_collections.ConfigDict(dataclasses.asdict(Config()))
  for key, field in config_fields.list_fields(Config).items():
    if field.default is None:
      made.update_from_flattened_dict({key: config_dict.placeholder(config_fields.plain_type(field.type))})
  return made


def from_dict(nested: dict[str, Any] | ml_collections.ConfigDict) -> Config:
  """Makes a config of nested dicts, such as those of `to_dict`. A missing key has its default.

  Raises:
    UserError: an unknown key, a wrong type, a value outside its rule, or two keys that don't fit.
  """
  config = config_fields.freeze(Config, nested)
  _check_training(config)
  return config


from_config_dict = from_dict  # which takes the ConfigDict of a config file too


def load(name: str, settings: str | Sequence[str] = ()) -> Config:
  """Loads the experiment of a config file, `PATH.py` or `PATH.py:ARGUMENT`, with `key=value` settings on top.

  A single setting may be given without a list.

  Raises:
    UserError: no such file, one that raises something, or what `from_dict` raises.
  """
  path, argument = (name, "") if os.path.isfile(name) or ":" not in name else name.rsplit(":", 1)
  if not os.path.isfile(path):
    raise UserError(f"--config={name}: there is no file {path!r}; give the path of a config file, e.g. configs/tiny.py")
  try:
    return _from_dict_with(runpy.run_path(path)["get_config"](argument).to_dict(), settings)
  except UserError:
    raise
  except Exception as error:
    raise UserError(f"--config={name}: can't be used ({type(error).__name__}: {error}); correct the file") from error


def apply_settings(config: Config, settings: str | Sequence[str]) -> Config:
  """Returns a config with `key=value` settings on top; raises what `load` raises."""
  return _from_dict_with(dataclasses.asdict(config), settings) if settings else config


def _from_dict_with(nested: dict[str, Any], settings: str | Sequence[str]) -> Config:
  kinds = key_types()
  for setting in [settings] if isinstance(settings, str) else settings:
    key, _, text = setting.partition("=")
    if key not in kinds:
      raise UserError(f"{key}: unknown key; {nearest(key, kinds)}")
    section, (*parents, name) = nested, key.split(".")
    for parent in parents:
      section = section.setdefault(parent, {})
    section[name] = config_fields.parse(kinds[key], text)
  return from_dict(nested)


def to_dict(config: Any) -> dict[str, Any]:
  """Returns the dataclasses as nested dicts in JSON's types: tuples become lists."""
  return json.loads(json.dumps(dataclasses.asdict(config)))


def _check_training(config: Config) -> None:
  model, train = config.model, config.train
  if not train.step_counts and train.draw_from:
    raise UserError(f"train.draw_from={train.draw_from}: is for train.step_counts; set that too, or leave it at 0")
  changes = train.step_schedule
  if changes and (len(changes) != len(train.step_counts) - 1 or train.draw_from or train.self_distillation):
    raise UserError(
      f"train.step_schedule={changes}: must have one train step for each of train.step_counts but the first, without "
      "train.draw_from and train.self_distillation"
    )
  if list(changes) != sorted({*changes}) or changes and changes[0] < 1:
    raise UserError(f"train.step_schedule={changes}: must be train steps above 0 that increase")
  several = len({*train.step_counts, *((model.num_steps,) if train.draw_from else ())}) > 1
  if train.self_distillation and (train.teacher is not None or not several):
    raise UserError(
      "train.self_distillation=True: is for several numbers of train.step_counts, and without train.teacher; set the "
      "former and leave out the latter, or leave it at False"
    )
  if train.loss_chunks is not None:
    check_divides("train.loss_chunks", train.loss_chunks, "model.seq_len", model.seq_len)
  counts = {f"train.step_counts[{i}]": n for i, n in enumerate(train.step_counts)}
  if not counts or train.draw_from:
    counts["model.num_steps"] = model.num_steps
  for key, count in counts.items():
    if count <= 0:
      raise UserError(f"{key}={count}: must be above 0")
    if train.adjoint == "checkpointed" and train.remat != "none":
      check_divides("train.remat_every", train.remat_every, key, count)
    check_num_steps(model, key, count)
  check_num_steps(model, "eval.num_steps", config.eval.num_steps)


def check_num_steps(model: ModelConfig, key: str, num_steps: int | None) -> None:
  """Checks that a model has weights for a number of steps; None is its own.

  Raises:
    UserError: it is no integer or below 1, or the weights are stored, and for another number; the line begins with
      `key`.
  """
  own = model.num_steps
  if num_steps is not None and not isinstance(num_steps, numbers.Integral):
    raise UserError(f"{key}={num_steps!r}: must be an integer")
  if num_steps is not None and num_steps < 1:
    raise UserError(f"{key}={num_steps}: must be 1 or above")
  if model.weights != "stored" or num_steps in (None, own) or model.depth_order and num_steps < own:
    return
  fewer = "" if model.depth_order else ", for fewer run --job=rank_steps, which finds those that matter most"
  raise UserError(
    f"{key}={num_steps}: the weights of this model are stored, for its own {own} steps{fewer}; leave it out"
  )
