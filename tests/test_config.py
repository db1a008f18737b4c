"""Configs: every shipped one parses, shapes and counts right; every key is read; every mistake is one line."""

import ast
import glob
import importlib.util
import json
import os

from flax import traverse_util
import jax
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import presets
from diffeq_nnx.config import ModelConfig
from diffeq_nnx.jobs import deriving
from diffeq_nnx.kernels.attention.dispatch import WITHOUT_BACKEND
from diffeq_nnx.model.parameters import abstract_model, params_of
from tests.attacks import ROOT
from tests.conftest import change, told

FILES = sorted(os.path.basename(path)[:-3] for path in glob.glob(str(ROOT / "configs" / "*.py")))


def raw_config(name: str, choice: str = ""):
  """What configs/NAME.py:choice returns."""
  spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(choice)


def changed(settings):
  """The default config with dotted keys changed (`__` for a dot)."""
  return config_lib.from_dict(traverse_util.unflatten_dict(settings, sep="__"))


def num_parameters(config) -> int:
  """Parameters of the model, by shape alone."""
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params_of(abstract_model(config.model))))


@pytest.mark.parametrize("name", FILES)
def test_every_config_parses_with_every_preset_and_has_shapes(name):
  """Shapes of each config in one preset, and of one config in each preset."""
  tunes = name.startswith("finetune")
  choices = [*(presets.TUNING if tunes else presets.PRESETS)]
  for preset in choices:
    config = config_lib.from_config_dict(raw_config(name, preset))
    if tunes:  # whose model is that of a run, discretized
      config = change(config, model=dict(weights="stored"))
    if tunes or name == "gpt_small" or preset == choices[0]:
      assert num_parameters(config) > 0, preset


@pytest.mark.parametrize(
  "name,choice,expected",
  [
    ("gpt_small", "gpt", 124),
    ("gpt_large", "gpt", 774),
    ("llama1b", "llama", 1205),
    ("gpt_small", "openwebtext", (512, 20_000, 20, 6e-4, 0.999)),
    ("gpt_small", "wikitext103", (256, 10_001, 20, 6e-4, 0.999)),
    ("gpt_medium", "openwebtext", (256, 40_001, 96, 3e-4, 0.999)),
    ("gpt_large", "openwebtext", (256, 40_001, 96, 3e-4, 0.95)),
    ("llama1b", "openwebtext", (256, 40_001, 96, 3e-4, 0.95)),
  ],
)
def test_baselines_have_the_papers_millions_of_parameters_and_its_hyper_parameters(name, choice, expected):
  config = config_lib.from_config_dict(raw_config(name, choice))
  if isinstance(expected, int):
    assert round(num_parameters(config) / 1e6) == expected
    return
  train, time, optimizer = config.train, config.model.time, config.optimizer
  assert (train.batch_size, train.steps, time.time_embed_dim, optimizer.peak_rate, optimizer.b2) == expected


def test_no_key_that_nothing_reads():
  read = set()
  for path in (ROOT / "diffeq_nnx").rglob("*.py"):
    if path.name in ("config.py", "config_fields.py", "config_model.py", "presets.py"):
      tree = ast.parse(path.read_text())  # of these, only the properties that fill in defaults
      nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.decorator_list]
    else:
      nodes = [ast.parse(path.read_text())]
    for node in nodes:
      read |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
  keys = {key.rsplit(".", 1)[-1] for key in config_lib.key_types()}
  assert keys <= read, keys - read


def test_a_new_run_on_another_text_has_no_validation_of_the_run_s_and_with_other_records_none_of_their_keys():
  """And a schedule as long as itself, unless the settings say how long, and no teacher but one that they name."""
  own = {"data__source": "jsonl:a", "data__validation": "jsonl:b", "data__text_key": "body", "train__batch_size": 2}
  run = changed(own | {"optimizer__schedule_steps": 9, "train__teacher": "runs/a"})
  found = deriving.start_from(run, ["data.source=jsonl:a", "train.steps=3"])
  assert found == change(run, train=dict(steps=3, teacher=None), optimizer=dict(schedule_steps=None))
  other = deriving.start_from(run, ["data.records=chat", "data.source=jsonl:c"])
  assert other == changed({"data__source": "jsonl:c", "data__records": "chat", "train__batch_size": 2})
  kept = ["data.source=jsonl:c", "data.validation=jsonl:b", "optimizer.schedule_steps=9", "train.teacher=runs/b"]
  assert deriving.start_from(run, kept) == change(run, data=dict(source="jsonl:c"), train=dict(teacher="runs/b"))
  adapted = {"model__lora__rank": 2, "model__lora__alpha": 3.0, "model__weights": "stored"}
  padded = changed(adapted | {"data__rows": "padded", "data__too_long": "drop"})
  assert deriving.start_from(padded, ["data.rows=packed", "model.lora.rank=0"]) == changed({"model__weights": "stored"})


DRAWS_LATE = {"train__step_counts": (5, 10), "train__draw_from": 0.5}  # before it, 12 steps
TEACHES_ITSELF = {"train__self_distillation": True}


def test_text_that_looks_like_a_value_of_python_s_stays_text():
  for text in ('{{"a"}}', "{[]: 1}", "[1", "5"):
    assert config_lib.load("configs/tiny.py", [f"data.end_token={text}"]).data.end_token == text


@pytest.mark.parametrize(
  "make,parts",  # settings of the default config, or what makes a value
  [
    ({"model__num_heads": 7}, ["model.num_heads=7", "must divide model.embed_dim=768", "8, 12"]),
    ({"model__rope__base": 5e5}, ["model.rope", "model.field=llama"]),
    ({"model__field": "llama", "model__rope__low_freq_factor": 4.0}, ["low_freq_factor=4.0", "high_freq_factor=4.0"]),
    ({"model__num_kv_heads": 5}, ["model.num_kv_heads=5", "must divide model.num_heads=12"]),
    ({"model__weights": "generate"}, ["model.weights='generate'", "did you mean 'generated'?"]),
    ({"model__dropout": 1.0}, ["model.dropout=1.0", "between 0"]),
    ({"model__lora__embeddings": False}, ["model.lora.embeddings=False", "set model.lora.rank"]),
    ({"train__step_counts": (4, 0)}, ["train.step_counts[1]=0", "above 0"]),
    ({"train__step_counts": (4, 6.0)}, ["train.step_counts", "whole numbers"]),
    ({"train__draw_from": 0.5}, ["train.draw_from=0.5", "is for train.step_counts"]),
    ({**DRAWS_LATE, "train__remat_every": 5}, ["train.remat_every=5", "must divide model.num_steps=12"]),
    ({"report__wandb": ""}, ["report.wandb=: is empty", "report.wandb=None"]),
    ({"optimizer__peak_rate": np.inf}, ["optimizer.peak_rate=inf", "must be finite"]),
    ({"mesh__fsdp": 0}, ["mesh.fsdp=0", "1 or above, or -1"]),
    ({"train__loss_chunks": 3}, ["train.loss_chunks=3", "must divide model.seq_len=1024"]),
    ({"modle": 3}, ["modle: unknown key", "did you mean 'model'?"]),
    ({"model": 3}, ["model=3: must be a section of keys"]),
    ({"model__num_steps": {}}, ["model.num_steps={}: must be of type int, not dict"]),
    ({"model__weights": "stored", "eval__num_steps": 6}, ["eval.num_steps=6", "the weights of this model are stored"]),
    ({"model__weights": "shared", "model__time__constant": True}, ["model.time.constant=True", "generated"]),
    ({"train__step_schedule": (4,)}, ["train.step_schedule=(4,)", "one train step for each of train.step_counts"]),
    ({"train__step_schedule": (4, 4), "train__step_counts": (1, 2, 3)}, ["train.step_schedule=(4, 4)", "increase"]),
    (TEACHES_ITSELF | {"train__step_counts": (2,)}, ["train.self_distillation=True", "several numbers of train."]),
    (TEACHES_ITSELF | DRAWS_LATE | {"train__teacher": "a"}, ["train.self_distillation=True", "without train.teacher"]),
    ({"harness__num_fewshot": (-1,)}, ["harness.num_fewshot[0]=-1"]),
    ({"harness__stride": 3}, ["harness.stride=3", "sliding"]),
    ({"harness__tasks": "none"}, ["harness.tasks='none'", "nothing to do"]),
    ({"harness__tasks": ","}, ["harness.tasks=','", "nothing to do"]),
    *(({"model__attention": name}, [f"model.attention='{name}'", "must be one of auto"]) for name in WITHOUT_BACKEND),
    ({"model__norm_shift": False}, ["model.norm_shift=False", "gpt's norms have a shift", "model.field=llama"]),
    (lambda: ModelConfig(num_steps=4.0), ["model.num_steps=4.0", "type int, not float"]),
    (lambda: ModelConfig(dtype=jax.numpy.float32), ["model.dtype=", "one of bfloat16, float32, float64"]),
    (lambda: ModelConfig(time={"scale": 3.0}), ["model.time=", "must be a TimeConfig, not dict"]),
    (lambda: ModelConfig(step_sizes=(1.0, 2.0)), ["model.step_sizes=(1.0, 2.0)", "model.num_steps=12 numbers"]),
    (lambda: ModelConfig(num_steps=2, step_sizes=(6.0, 1e-20)), ["model.step_sizes=(6.0, 1e-20)", "1e-09 of their"]),
    (lambda: config_lib.MeshConfig(data=-1), ["mesh.data, mesh.fsdp", "only one may be -1"]),
    (lambda: config_lib.Config(model=config_lib.DataConfig()), ["model=DataConfig", "must be a ModelConfig"]),
    (lambda: raw_config("gpt_small", "wikitext"), ["write CORPUS,PRESET; "]),
    (lambda: raw_config("gpt_small", "diffeq,gpt"), ["a second preset, gpt", "write CORPUS,PRESET"]),
  ],
)
def test_a_mistake_is_told_with_key_value_rule_and_way_out(make, parts):
  line = told(make if callable(make) else lambda: changed(make))
  assert all(part in line for part in parts), line


def test_values_have_the_types_of_their_keys_whatever_a_program_gives():
  """So that a config from a program is equal to one from a file, and can be stored."""
  made = ModelConfig(num_steps=np.int64(2), horizon=3, step_sizes=())
  assert made == ModelConfig(num_steps=2, horizon=3.0) and (type(made.num_steps), type(made.horizon)) == (int, float)
  listed = ModelConfig(num_steps=2, step_sizes=[1, np.float32(2.0)])
  assert listed.step_sizes == (1.0, 2.0) and hash(listed)
  whole = config_lib.Config(model=listed)
  assert config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(whole)))) == whole
