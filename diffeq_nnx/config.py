"""Every key of an experiment: its type, its default and its rule.

A config file returns an `ml_collections.ConfigDict` made by `default()`; `from_config_dict` turns it into
the frozen dataclasses below, which the rest of the package reads. All validation is here.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import os
import re
import types
import typing
from typing import Any, Sequence

import ml_collections
from ml_collections import config_dict

from diffeq_nnx.errors import UserError

CHECKPOINT_FOLDER = "checkpoints"  # folders of a work directory
DAMAGED_FOLDER = "checkpoints_damaged"
FROZEN_FOLDER = "frozen"
REPORT_FOLDER = "report"
TENSORBOARD_FOLDER = "tensorboard"
RUN_FOLDERS = (CHECKPOINT_FOLDER, DAMAGED_FOLDER, FROZEN_FOLDER, REPORT_FOLDER, TENSORBOARD_FOLDER)


@dataclasses.dataclass(frozen=True)
class TimeConfig:
  """How a time becomes the features that the weights are made from; read by generated weights only."""
  embedding: str = "fixed"  # fixed | learned (its frequencies are parameters) | shared_mlp (one MLP for all)
  sinusoidal_dim: int = 128  # m: the number of frequencies
  time_embed_dim: int = 48  # T: the size of e(t)
  scale: float = 1000.0  # radians that the fastest wave turns from t = 0 to t = 1
  constant: bool = False  # hold t at 0: the control that has the parameters but not the time


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters on stored weights (Hu et al. 2021): a kernel is W + alpha / rank A B, and only A and B learn."""
  rank: int = 0  # columns of A; 0: no adapters, all parameters learn
  alpha: float = 16.0
  targets: str = "kernel"  # a regular expression found in names like qkv.kernel, out.kernel, up.kernel, down.kernel
  dropout: float = 0.0  # share of a kernel's input features that A doesn't see in a train step
  embeddings: bool = True  # whether the token embedding, learned positions and the head learn too


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Three independent choices (weights, field, solver) and their sizes."""
  weights: str = "generated"  # generated | stored (one set a step) | shared (one set for all steps)
  field: str = "gpt"  # gpt | llama
  solver: str = "euler"  # euler (parallel branches) | sequential (attention, then feed-forward)
  initialization: str = "plain"  # plain (W(t) spreads like a plain model's weights) | published (the paper's code)
  norm_shift: bool | None = None  # whether llama's block norms have a shift (gpt's do); None: if published
  num_steps: int = 12
  horizon: float | None = None  # dt = horizon / num_steps; None: num_steps, so that dt = 1
  step_sizes: tuple[float, ...] = ()  # dt of each step, for stored weights; (): all alike
  embed_dim: int = 768
  num_heads: int = 12
  num_kv_heads: int | None = None  # None: num_heads
  mlp_dim: int | None = None  # None: 4 embed_dim
  vocab_size: int = 50257
  seq_len: int = 1024
  norm_eps: float | None = None  # of the norms in the block; None: 1e-5 for gpt, 1e-6 for llama
  final_norm_eps: float | None = None  # of the norm after the last step; None: 1e-5
  dropout: float = 0.0  # on the embeddings and on both residual branches
  dtype: str = "bfloat16"  # of the computation; parameters are float32
  attention: str = "auto"  # auto | reference | pallas | cudnn: how it is computed; kernels/README.md
  time: TimeConfig = TimeConfig()
  lora: LoraConfig = LoraConfig()

  @property
  def kv_heads(self) -> int:
    """Key and value heads, the default filled in."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  @property
  def head_dim(self) -> int:
    """Width of one head."""
    return self.embed_dim // self.num_heads

  @property
  def hidden_dim(self) -> int:
    """Width inside the feed-forward branch, the default filled in."""
    return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

  @property
  def block_eps(self) -> float:
    """eps of the block's norms, the default filled in."""
    return {"llama": 1e-6}.get(self.field, 1e-5) if self.norm_eps is None else self.norm_eps

  @property
  def block_shift(self) -> bool:
    """Whether the block's norms have a shift, the default filled in."""
    by_default = self.field == "gpt" or self.initialization == "published"
    return by_default if self.norm_shift is None else self.norm_shift

  @property
  def final_eps(self) -> float:
    """eps of the norm after the last step, the default filled in."""
    return 1e-5 if self.final_norm_eps is None else self.final_norm_eps

  @property
  def total_time(self) -> float:
    """The horizon, the default filled in."""
    if self.step_sizes:
      return math.fsum(self.step_sizes)
    return float(self.num_steps) if self.horizon is None else self.horizon


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Which text, and how it becomes tokens.

  Prepared shards have become so already: of them source, validation, tokenizer, begin_mark and
  attend_across_documents are read.
  """
  source: str = "builtin"  # builtin | text:GLOB | jsonl:GLOB (paths or URLs) | tfds:NAME/CONFIG:SPLIT | shards:DIR, or
  # several of the last with weights: 0.7*shards:DIR + 0.3*shards:DIR
  text_key: str = "text"  # the key of a JSON object, or the feature of a TFDS data set, that holds the text
  bad_records: str = "error"  # error (stop at a record that can't be used) | skip (pass over it and count it)
  tfds_dir: str | None = None  # where TFDS data sets lie; None: TFDS' own choice, ~/tensorflow_datasets
  download: bool = False  # download and prepare a TFDS data set that is not there
  validation: str | None = None  # a source; None: documents held out of `source`; for shards: other shards
  validation_fraction: float = 0.05  # of the documents, when `validation` is None
  validation_split: str = "hash"  # how they are chosen: hash (of seed and index) | permutation (HF datasets)
  validation_seed: int | None = None  # None: seed
  shuffle_seed: int = 0  # of the order of training documents
  tokenizer: str = "train"  # train (a sentencepiece model on the training part; for shards: their own) | bytes | a path
  begin_mark: bool | None = None  # whether documents begin with the tokenizer's begin mark; None: as its files say
  num_processes: int | None = None  # how many prepare text; None: one a core
  attend_across_documents: bool = True  # as in the paper; False: a token sees and counts within its own document
  cache_dir: str = "~/.cache/diffeq_nnx"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with a linear warm-up and a cosine decay."""
  peak_rate: float = 3e-4
  final_fraction: float = 0.1  # of the peak, at the last step
  warmup_fraction: float = 0.01  # of the steps
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The train loop."""
  steps: int = 1000
  batch_size: int = 32  # sequences an optimizer step, over all devices and micro-batches
  device_batch_size: int | None = None  # sequences a device holds at a time; None: all; fewer: micro-batches
  step_counts: tuple[int, ...] = ()  # solver steps drawn for each train step; (): always model.num_steps
  remat: str = "full"  # none | dots (keep matrix products) | full
  remat_every: int = 1  # solver steps between two kept states; read unless remat is none
  loss_chunks: int = 32  # slices of the sequence whose logits exist at one time
  log_every: int = 10
  peak_tflops: float | None = None  # of one device, for utilisation; None: from its kind, or measured


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How the devices of a TPU slice, or of the whole job elsewhere, are shared out; several slices split the batch."""
  data: int = 1  # groups of devices with all parameters each; -1: what is left
  fsdp: int = -1  # devices over which parameters and sequences are split
  tensor: int = 1  # devices over which heads and the feed-forward branch are split


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Validation, while training and as a job."""
  every: int = 500
  batch_size: int = 32
  max_batches: int | None = None  # None: the whole validation part
  num_steps: int | None = None  # None: model.num_steps


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What stays on disk: the last `keep` and the best by validation loss."""
  every: int = 500
  keep: int = 2


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
  """Downstream evaluation with lm_eval, as a job; no part of a run's identity."""
  tasks: str = "paper"  # names of tasks, groups or tags, separated by commas, with * and ?; the paper's list; or none
  num_fewshot: tuple[int, ...] = ()  # examples before each question, once for each number; (): for paper (0, 5), and
  # else as the tasks say
  limit: int | None = None  # questions of each task, and documents of `text`; None: all
  include_path: str | None = None  # a folder of task files of your own
  default_tasks: bool = True  # whether lm_eval's own tasks are there too; reading their files takes seconds
  batch_size: int = 8  # sequences of model.seq_len tokens that a device holds at a time; of shorter ones it holds more
  dtype: str = "model"  # of the computation: model (the model's) | bfloat16 | float32
  begin_mark: str = "auto"  # before contexts: auto (the tokenizer's begin mark if it has one) | none | always (that, or
  # else the end mark)
  window: str = "disjoint"  # over long texts: disjoint (side by side) | sliding
  stride: int | None = None  # of sliding windows: tokens that each predicts; None: half of model.seq_len
  text: str | None = None  # a source as in data.source, whose perplexity is measured
  folder: str = "harness"  # for the results, in the work directory

  @property
  def names(self) -> tuple[str, ...]:
    """The parts of `tasks`."""
    names = tuple(filter(None, (name.strip() for name in self.tasks.split(","))))
    return () if names == ("none",) else names


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment."""
  seed: int = 0
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  harness: HarnessConfig = HarnessConfig()


CHOICES = {
    "model.weights": ("generated", "stored", "shared"),
    "model.field": ("gpt", "llama"),
    "model.solver": ("euler", "sequential"),
    "model.initialization": ("plain", "published"),
    "model.attention": ("auto", "reference", "pallas", "cudnn"),
    "model.dtype": ("bfloat16", "float32", "float64"),
    "model.time.embedding": ("fixed", "learned", "shared_mlp"),
    "train.remat": ("none", "dots", "full"),
    "data.bad_records": ("error", "skip"),
    "data.validation_split": ("hash", "permutation"),
    "harness.dtype": ("model", "bfloat16", "float32"),
    "harness.begin_mark": ("auto", "none", "always"),
    "harness.window": ("disjoint", "sliding"),
}
POSITIVE = (
    "model.num_steps", "model.horizon", "model.embed_dim", "model.num_heads", "model.num_kv_heads",
    "model.mlp_dim", "model.vocab_size", "model.seq_len", "model.norm_eps", "model.final_norm_eps",
    "model.time.sinusoidal_dim", "model.time.time_embed_dim", "model.time.scale", "model.lora.alpha",
    "optimizer.peak_rate", "optimizer.eps",
    "optimizer.clip_norm", "train.steps", "train.batch_size", "train.device_batch_size", "train.remat_every",
    "train.loss_chunks", "train.log_every", "train.peak_tflops", "eval.every", "eval.batch_size",
    "eval.max_batches", "eval.num_steps", "checkpoint.every", "checkpoint.keep", "data.num_processes",
    "harness.limit", "harness.batch_size", "harness.stride")
FRACTIONS = {  # key: (may be 0, may be 1)
    "model.dropout": (True, False), "model.lora.dropout": (True, False), "data.validation_fraction": (False, False),
    "optimizer.final_fraction": (True, True), "optimizer.warmup_fraction": (True, False),
    "optimizer.b1": (True, False), "optimizer.b2": (True, False)}


def default() -> ml_collections.ConfigDict:
  """Every key with its default, optional ones as typed placeholders, ready for a config file to change."""
  return _to_config_dict(Config())


def from_config_dict(raw: ml_collections.ConfigDict) -> Config:
  """Checks a ConfigDict whole and freezes it.

  Raises:
    UserError: an unknown key, a wrong type, a value outside its rule, or two keys that don't fit.
  """
  config = _freeze(Config, raw, "")
  _check_values(config)
  _check_model(config.model)
  _check_training(config)
  _check_harness(config.harness)
  return config


def from_dict(nested: dict[str, Any]) -> Config:
  """The config that `to_dict` turned into plain dicts; a key that did not exist yet has its default or `completed`'s.

  Raises:
    UserError: as `from_config_dict`.
  """
  return from_config_dict(_merged(default(), completed(nested)))


def completed(nested: dict[str, Any]) -> dict[str, Any]:
  """A config that `to_dict` made, with the keys added since whose default is not what the program did before."""
  model = nested.get("model", {})
  if "norm_shift" in model or model.get("initialization") != "published" or model.get("field", "gpt") == "gpt":
    return nested
  return {**nested, "model": {**model, "norm_shift": False}}  # a published Llama had no shift before there was the key


def load(name: str, settings: Sequence[str] = ()) -> Config:
  """The experiment of a config file, `PATH.py` or `PATH.py:ARGUMENT`, with `key=value` settings on top.

  Raises:
    UserError: no such file, an unknown key, or what `from_config_dict` raises.
  """
  path, _, argument = name.partition(":")
  if not os.path.isfile(path):
    raise UserError(f"{name}: there is no file {path!r}; give the path of a config file, e.g. configs/tiny.py")
  spec = importlib.util.spec_from_file_location("experiment", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return from_config_dict(_set(module.get_config(argument), settings))


def changed(config: Config, settings: Sequence[str]) -> Config:
  """A config with `key=value` settings on top; raises what `load` raises."""
  return from_config_dict(_set(_merged(default(), to_dict(config)), settings)) if settings else config


def _set(raw: ml_collections.ConfigDict, settings: Sequence[str]) -> ml_collections.ConfigDict:
  for setting in settings:
    key, _, text = setting.partition("=")
    if key not in key_types():
      raise UserError(f"{key}: unknown key; {nearest(key, key_types())}")
    value = _parsed(key_types()[key], text)
    try:
      raw.update_from_flattened_dict({key: value})
    except TypeError:
      raise UserError(f"{key}={value!r}: must be of type {key_types()[key].__name__}, not "
                      f"{type(value).__name__}") from None
  return raw


def _parsed(kind: type, text: str) -> Any:
  """A value as it was written: true and false for flags, a number alone for a tuple of one, strings as they stand."""
  if kind is bool and text.lower() in ("true", "false"):
    return text.lower() == "true"
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
  if kind is str and not isinstance(value, (str, type(None))):
    return text
  return (value,) if kind is tuple and isinstance(value, (int, float)) else value


def to_dict(config: Any) -> dict[str, Any]:
  """The dataclasses as nested plain dicts that JSON can hold (tuples become lists)."""
  return _plain(dataclasses.asdict(config))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one dict of dotted keys."""
  flat = {}
  for name, value in nested.items():
    key = f"{prefix}{name}"
    flat |= flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
  return flat


def key_types(cls: type = Config, prefix: str = "") -> dict[str, type]:
  """The plain type of every dotted key: int for `int | None`, tuple for `tuple[int, ...]`."""
  found = {}
  for field in dataclasses.fields(cls):
    key = f"{prefix}{field.name}"
    found |= (key_types(field.type, f"{key}.") if dataclasses.is_dataclass(field.type)
              else {key: _plain_type(field.type)})
  return found


def nearest(name: str, names: typing.Iterable[str]) -> str:
  """What to write instead of `name`, as the end of an error line."""
  names = list(names)
  close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
  return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}"


def _merged(section: ml_collections.ConfigDict, values: dict[str, Any]) -> ml_collections.ConfigDict:
  with section.unlocked():
    for name, value in values.items():
      section[name] = _merged(section[name], value) if isinstance(value, dict) and name in section else value
  return section


def _plain(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _plain(inner) for name, inner in value.items()}
  return list(value) if isinstance(value, tuple) else value


def _to_config_dict(section: Any) -> ml_collections.ConfigDict:
  made = ml_collections.ConfigDict()
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      made[field.name] = _to_config_dict(value)
    elif value is None:
      made[field.name] = config_dict.placeholder(_plain_type(field.type))
    else:
      made[field.name] = value
  return made


def _plain_type(annotation: Any) -> type:
  """int for `int | None`, tuple for `tuple[int, ...]`, and so on."""
  if isinstance(annotation, types.UnionType):
    annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
  return typing.get_origin(annotation) or annotation


def _freeze(cls: type, raw: Any, prefix: str) -> Any:
  fields = {f.name: f for f in dataclasses.fields(cls)}
  for name in raw:
    if name not in fields:
      raise UserError(f"{prefix}{name}: unknown key; {nearest(name, fields)}")
  values = {}
  for name, field in fields.items():
    key = f"{prefix}{name}"
    if name not in raw:
      raise UserError(f"{key}: missing; start the config file from diffeq_nnx.config.default()")
    value = raw[name]
    values[name] = (_freeze(field.type, value, f"{key}.") if dataclasses.is_dataclass(field.type)
                    else _typed(key, value, field.type))
  return cls(**values)


def _typed(key: str, value: Any, annotation: Any) -> Any:
  if value is None and isinstance(annotation, types.UnionType):
    return None
  wanted = _plain_type(annotation)
  if wanted is tuple:
    element = typing.get_args(annotation)[0]
    if isinstance(value, (tuple, list)) and all(type(v) in (int, element) for v in value):
      return tuple(map(element, value))
    example = "whole numbers; write it as '(4, 6, 8)'" if element is int else "numbers; write it as '(0.5, 0.25)'"
    raise UserError(f"{key}={value!r}: must be a tuple of {example}")
  if wanted is float and type(value) is int:
    return float(value)
  if type(value) is not wanted:
    raise UserError(f"{key}={value!r}: must be of type {wanted.__name__}, not {type(value).__name__}")
  return value


def _check_values(config: Config) -> None:
  flat = flatten(dataclasses.asdict(config))
  for key, choices in CHOICES.items():
    if flat[key] not in choices:
      raise UserError(f"{key}={flat[key]!r}: must be one of {', '.join(choices)}; {nearest(flat[key], choices)}")
  for key in POSITIVE:
    if flat[key] is not None and not flat[key] > 0:
      raise UserError(f"{key}={flat[key]}: must be above 0")
  for key, (zero, one) in FRACTIONS.items():
    value = flat[key]
    if not (0 < value < 1 or (zero and value == 0) or (one and value == 1)):
      raise UserError(f"{key}={value}: must lie between 0 ({'included' if zero else 'excluded'}) "
                      f"and 1 ({'included' if one else 'excluded'})")
  for key in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
    if not (flat[key] >= 1 or flat[key] == -1):
      raise UserError(f"{key}={flat[key]}: must be 1 or above, or -1 for what the others leave")
  if [config.mesh.data, config.mesh.fsdp, config.mesh.tensor].count(-1) > 1:
    raise UserError("mesh.data, mesh.fsdp, mesh.tensor: only one may be -1; give the others their sizes")
  for key in ("seed", "optimizer.weight_decay", "data.validation_seed", "data.shuffle_seed", "model.lora.rank"):
    if flat[key] is not None and not flat[key] >= 0:
      raise UserError(f"{key}={flat[key]}: must be 0 or above")


def _divisors(number: int) -> str:
  return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _check_divides(key: str, value: int, of_key: str, of: int) -> None:
  if of % value:
    raise UserError(f"{key}={value}: must divide {of_key}={of}; choose one of {_divisors(of)}")


def _check_model(model: ModelConfig) -> None:
  _check_divides("model.num_heads", model.num_heads, "model.embed_dim", model.embed_dim)
  _check_divides("model.num_kv_heads", model.kv_heads, "model.num_heads", model.num_heads)
  if model.field == "llama" and model.head_dim % 2:
    raise UserError(f"model.num_heads={model.num_heads}: a llama head must have an even width to be rotated, "
                    f"not {model.head_dim}; change model.num_heads or model.embed_dim={model.embed_dim}")
  if model.field == "gpt" and model.norm_shift is False:
    raise UserError("model.norm_shift=False: gpt's norms have a shift; leave it at None, or set model.field=llama")
  if model.step_sizes:
    if model.weights != "stored" or model.horizon is not None:
      raise UserError("model.step_sizes: goes with model.weights=stored and model.horizon=None; leave it at ()")
    if len(model.step_sizes) != model.num_steps or not all(0 < size < math.inf for size in model.step_sizes):
      raise UserError(f"model.step_sizes={model.step_sizes}: must be {model.num_steps} numbers above 0, one for each of "
                      "model.num_steps")
  try:
    re.compile(model.lora.targets)
  except re.error as error:
    raise UserError(f"model.lora.targets={model.lora.targets!r}: is no regular expression ({error})") from error
  if model.time.constant and model.weights != "generated":
    raise UserError(f"model.time.constant=True: only generated weights depend on time; set it to False or "
                    f"model.weights={model.weights!r} to 'generated'")


def _check_training(config: Config) -> None:
  model, train = config.model, config.train
  _check_divides("train.loss_chunks", train.loss_chunks, "model.seq_len", model.seq_len)
  counts = {"model.num_steps": model.num_steps} if not train.step_counts else {
      f"train.step_counts[{i}]": n for i, n in enumerate(train.step_counts)}
  for key, count in counts.items():
    if count <= 0:
      raise UserError(f"{key}={count}: must be above 0")
    if train.remat != "none":
      _check_divides("train.remat_every", train.remat_every, key, count)
    _check_stored_count(model, key, count)
  if config.eval.num_steps is not None:
    _check_stored_count(model, "eval.num_steps", config.eval.num_steps)


def _check_harness(harness: HarnessConfig) -> None:
  for i, count in enumerate(harness.num_fewshot):
    if count < 0:
      raise UserError(f"harness.num_fewshot[{i}]={count}: must be 0 or above")
  if harness.stride is not None and harness.window != "sliding":
    raise UserError(f"harness.stride={harness.stride}: is of sliding windows; leave it out, or set "
                    "harness.window=sliding")
  first = os.path.normpath(harness.folder).split(os.sep)[0]
  if os.path.isabs(harness.folder) or first in ("..", ".", *RUN_FOLDERS):
    raise UserError(f"harness.folder={harness.folder!r}: must be a folder of its own within the work directory, e.g. "
                    "harness")
  if harness.text is None and not harness.names:
    raise UserError(f"harness.tasks={harness.tasks!r}: there is nothing to do; name tasks, or a harness.text")


def _check_stored_count(model: ModelConfig, key: str, count: int) -> None:
  if model.weights == "stored" and count != model.num_steps:
    raise UserError(f"{key}={count}: stored weights exist for model.num_steps={model.num_steps} steps only; "
                    "use that count, or model.weights='generated' or 'shared'")
