"""Imported models give the logits of transformers' own; what can't be held is told; export and import are inverse."""

import dataclasses
import json
import math
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"

from absl import flags
from flax import nnx
import jax
import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import torch
import transformers

import diffeq_nnx
from diffeq_nnx import data, jobs, main
from diffeq_nnx.config import CheckpointConfig, Config, DataConfig, EvalConfig, ModelConfig, RopeConfig, TrainConfig
from diffeq_nnx.exporting import importing
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.loop import train
from tests.conftest import small_model, told
from tests.test_discretize import TOKENS_2x12, logits
from tests.test_export import make
from tests.test_published_tokenizers import model as published_model
from tests.test_tokenizer import write as write_files

GPT2 = dict(vocab_size=31, n_positions=12, n_embd=24, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=0)
LLAMA = dict(
  vocab_size=31,
  hidden_size=24,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=12,
  bos_token_id=None,
  eos_token_id=0,
)
LLAMA_3 = dict(
  rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
ROPE = {"gpt": RopeConfig(), "llama": RopeConfig(50.0, 8.0, 1.0, 4.0, 8)}


def foreign(kind, **changes):
  """A model of transformers' own of which no parameter sits at its initial value."""
  torch.manual_seed(0)
  made = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes})),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes})),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**{**LLAMA, **changes})),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**LLAMA, **changes})),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**LLAMA, **changes})),
  }[kind]()
  with torch.no_grad():
    for parameter in made.parameters():
      parameter += 0.1 * torch.randn_like(parameter)
  return made.eval()


def same_logits(folder, theirs):
  model = diffeq_nnx.import_hf(str(folder))
  with torch.no_grad():
    expected = theirs(torch.tensor(TOKENS_2x12)).logits.float().numpy()
  np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5)
  return model


@pytest.mark.parametrize(
  "kind,changes",
  [
    ("gpt2", {"n_inner": 40, "layer_norm_epsilon": 1e-3}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_theta": 50.0, **LLAMA_3}}),
    ("llama", {"rms_norm_eps": 1e-2, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 16}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 6, "num_key_value_heads": 1}),
  ],
)
def test_an_imported_model_gives_the_same_logits_and_goes_back_to_its_class(kind, changes, tmp_path):
  theirs, there, back = foreign(kind, **changes), tmp_path / "there", tmp_path / "back"
  theirs.save_pretrained(there)
  model = same_logits(there, theirs)
  assert (model.config.weights, model.config.solver, model.config.dtype) == ("stored", "sequential", "float32")
  result = diffeq_nnx.export_hf(model, str(back))
  assert result["architecture"] == type(theirs).__name__.replace("Mistral", "Llama") and not result["notes"]
  again = getattr(transformers, result["architecture"]).from_pretrained(back)
  expected, found = theirs.state_dict(), again.state_dict()
  assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
  with torch.no_grad():
    tokens = torch.tensor(TOKENS_2x12)
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind,changes", [("mistral", {}), ("qwen2", {"use_sliding_window": True})])
def test_a_sliding_window_is_told_and_no_limit_to_a_model_as_short_as_it(kind, changes, tmp_path):
  theirs = foreign(kind, sliding_window=12, max_position_embeddings=32, **changes)
  theirs.save_pretrained(tmp_path)
  line = told(lambda: importing.read(str(tmp_path)))
  assert "last 12 positions (sliding_window)" in line and "model.seq_len=12" in line
  assert "has 32 positions, not 33" in told(lambda: importing.read(str(tmp_path), 33))
  model = diffeq_nnx.import_hf(str(tmp_path), 12)
  with torch.no_grad():
    expected = theirs(torch.tensor(TOKENS_2x12)).logits.numpy()
  np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5)


def test_weights_in_several_files_and_in_bfloat16(tmp_path):
  theirs = foreign("llama").to(torch.bfloat16)
  theirs.save_pretrained(tmp_path, max_shard_size="5KB")
  assert len([name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]) > 2
  model = diffeq_nnx.import_hf(str(tmp_path))
  assert model.config.dtype == "bfloat16"
  table = nnx.to_pure_dict(nnx.state(model))["embedding"]
  assert table.dtype == np.float32
  np.testing.assert_array_equal(table, theirs.model.embed_tokens.weight.detach().float().numpy())


def test_a_missing_file_of_several_is_told_and_a_stray_one_is_not_read(tmp_path):
  theirs = foreign("llama")
  theirs.save_pretrained(tmp_path, max_shard_size="5KB")
  other = {name: np.full(array.shape, 9.0, np.float32) for name, array in theirs.state_dict().items()}
  for stray in ("model-00009-of-00009.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
    safetensors.numpy.save_file(other, tmp_path / stray)
  same_logits(tmp_path, theirs)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  last = max(index["weight_map"].values())
  (tmp_path / last).rename(tmp_path / "elsewhere")
  assert f"{last} can't be read" in told(lambda: importing.read(str(tmp_path)))
  index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  assert "the weights lack " in told(lambda: importing.read(str(tmp_path)))


@pytest.mark.parametrize("changes,name", [({}, "self_attn.q_proj"), ({"attention_bias": False}, "mlp.down_proj")])
def test_biases_that_the_config_hides_are_told(changes, name, tmp_path):
  """A config that says nothing of biases, or that there are none, beside weights that have one."""
  theirs = foreign("llama", **changes)
  theirs.save_pretrained(tmp_path)
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  tensors[f"model.layers.1.{name}.bias"] = np.ones(24, np.float32)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  assert f"the weights hold model.layers.1.{name}.bias" in told(lambda: importing.read(str(tmp_path)))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_masks_that_gpt2_once_saved_are_left_out_with_and_without_its_prefix(prefix, tmp_path):
  """Without the prefix it is GPT-2 as first published."""
  theirs = foreign("gpt2")
  (theirs if prefix else theirs.transformer).save_pretrained(tmp_path)
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert f"{prefix}wte.weight" in tensors
  for layer in range(2):
    tensors[f"{prefix}h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), np.uint8))
    tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.float32(-1e4)[None]
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  same_logits(tmp_path, theirs)


@pytest.mark.parametrize("field", ["gpt", "llama"])
def test_import_is_the_inverse_of_export(field, tmp_path):
  model = make(
    small_model(
      field=field,
      solver="sequential",
      weights="stored",
      step_sizes=(0.5, 1.0, 2.0),
      dropout=0.1,
      rope=ROPE[field],
      num_kv_heads=None if field == "gpt" else 2,
      norm_eps=1e-4,
      final_norm_eps=1e-4,
    )
  )
  diffeq_nnx.export_hf(model, str(tmp_path / "out"))
  again = diffeq_nnx.import_hf(str(tmp_path / "out"))
  np.testing.assert_allclose(logits(again), logits(model), rtol=0, atol=1e-5)
  expected = nnx.to_pure_dict(nnx.state(model))
  for group in ("out", "down"):  # dt is folded in; powers of two leave no rounding
    leaves = expected["weight_source"]["stored"][group]
    for name, leaf in leaves.items():
      leaves[name] = leaf * np.reshape(np.float32([0.5, 1, 2]), (3,) + (1,) * (leaf.ndim - 1))
  jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), expected)
  assert again.config == ModelConfig(
    weights="stored",
    field=field,
    solver="sequential",
    num_steps=3,
    embed_dim=24,
    num_heads=4,
    mlp_dim=40,
    vocab_size=31,
    num_kv_heads=None if field == "gpt" else 2,
    seq_len=12,
    norm_eps=1e-4,
    final_norm_eps=1e-4,
    dtype="float32",
    dropout=0.1 if field == "gpt" else 0.0,
    rope=ROPE[field],
  )
  diffeq_nnx.export_hf(again, str(tmp_path / "twice"))
  for name in ("config.json", "model.safetensors"):
    if field == "gpt" or name == "model.safetensors":
      assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def write(folder, config, tensors=None):
  (folder / "config.json").write_text(json.dumps(config))
  if tensors is not None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  return lambda: importing.read(str(folder))


@pytest.mark.parametrize(
  "kind,changes,parts",
  [
    ("gpt2", {"activation_function": "relu"}, ["activation_function is 'relu'", "'gelu_new'"]),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is True"]),
    ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights is False"]),
    ("gpt2", {"add_cross_attention": True}, ["add_cross_attention is True"]),
    ("gpt2", {"n_head": 5}, ["n_head is 5", "n_embd, 24"]),
    ("gpt2", {"n_inner": 0}, ["n_inner is 0"]),
    ("gpt2", {"torch_dtype": "int8"}, ["dtype is 'int8'", "float32"]),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is None", "above 0"]),
    ("llama", {"rope_scaling": {**LLAMA_3, "factor": "8"}}, ["factor is '8'", "a number above 1"]),
    ("llama", {"rope_scaling": {**LLAMA_3, "high_freq_factor": 1.0}}, ["high_freq_factor is 1.0", "above 1.0"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type is 'linear'", "'llama3'"]),
    ("llama", {"rope_theta": -1.0}, ["rope_theta is -1.0", "above 0"]),
    ("llama", {"attention_bias": True}, ["attention_bias is True"]),
    ("llama", {"mlp_bias": True}, ["mlp_bias is True"]),
    ("llama", {"head_dim": 0}, ["head_dim is 0"]),
    ("llama", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads is 3"]),
    ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ("gemma", {}, ["model_type is 'gemma'", "gpt2, llama, mistral, qwen2, qwen3 can be imported"]),
  ],
)
def test_what_can_t_be_held_is_told(kind, changes, parts, tmp_path):
  line = told(write(tmp_path, {"model_type": kind, **(GPT2 if kind == "gpt2" else LLAMA), **changes}))
  assert line.startswith(f"from_hf={tmp_path}: ")
  for part in parts:
    assert part in line


def test_files_that_can_t_be_used_are_told(tmp_path):
  assert "there is no such folder" in told(lambda: importing.read(str(tmp_path / "none")))
  assert "config.json can't be read" in told(lambda: importing.read(str(tmp_path)))
  (tmp_path / "config.json").write_text("{")
  assert "is not JSON" in told(lambda: importing.read(str(tmp_path)))
  config = {"model_type": "gpt2", **GPT2, "n_inner": 40, "n_layer": 3}
  read = write(tmp_path, config)
  assert "holds no model.safetensors" in told(read)
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  assert "save_pretrained(NEW)" in told(read)
  (tmp_path / "model.safetensors").write_bytes(b"nothing")
  assert "model.safetensors can't be read" in told(read)
  out = tmp_path / "out"
  diffeq_nnx.export_hf(make(small_model(solver="sequential", weights="stored", num_kv_heads=None)), str(out))
  tensors = safetensors.numpy.load_file(out / "model.safetensors")
  write(tmp_path, config, tensors)()
  name = "transformer.h.1.mlp.c_fc.weight"
  without = {key: array for key, array in tensors.items() if key != name}
  assert f"the weights lack {name}" in told(write(tmp_path, config, without))
  other = {**tensors, name: np.zeros((24, 39), np.float32)}
  assert f"{name}: has the shape (24, 39)" in told(write(tmp_path, config, other))
  assert "hold transformer.h.2." in told(write(tmp_path, {**config, "n_layer": 2}, tensors))
  head = {"lm_head.weight": np.zeros((31, 24), np.float32)}
  assert "lm_head.weight differs from the embedding" in told(write(tmp_path, config, {**tensors, **head}))
  assert "the directory must hold one of tokenizer.json, tokenizer.model" in told(
    lambda: importing.read_tokenizer(str(out))
  )


def test_the_folder_s_tokenizer(tmp_path):
  ours = data.load_tokenizer("bytes")
  model = make(small_model(solver="sequential", num_kv_heads=None, vocab_size=257))
  diffeq_nnx.export_hf(model, str(tmp_path / "out"), tokenizer=ours)
  assert importing.read_tokenizer(str(tmp_path / "out")).hash == ours.hash


# as jobs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """(config, work directory) of a sequential run of 4 steps with generated weights."""
  folder = tmp_path_factory.mktemp("text")
  for i in range(12):
    (folder / f"{i}.txt").write_text(f"Document {i} tells of rivers, hills and rain. " * (20 + i))
  config = Config(
    model=small_model(num_steps=2, embed_dim=16, seq_len=16, vocab_size=300, solver="sequential", num_kv_heads=None),
    data=DataConfig(source=f"text:{folder}/*.txt", validation_fraction=0.3, cache_dir=f"{folder}/cache"),
    train=TrainConfig(steps=4, batch_size=4, remat="none", loss_chunks=4, peak_tflops=0.1),
    eval=EvalConfig(every=4, batch_size=4, max_batches=2),
    checkpoint=CheckpointConfig(every=4),
  )
  train(config, str(folder / "run"))
  return config, str(folder / "run")


def test_a_run_exported_and_imported_has_the_same_loss(finished, tmp_path, capsys):
  config, workdir = finished
  out, new = str(tmp_path / "out"), str(tmp_path / "new")
  result = jobs.run("export", config, workdir, out=out)
  assert json.loads(capsys.readouterr().out) == result
  assert (result["architecture"], result["step"], result["trust_remote_code"]) == ("GPT2LMHeadModel", 4, False)
  assert result["logit_difference"] < 1e-5
  jobs.run("import", dataclasses.replace(config, model=ModelConfig()), new, from_hf=out)
  assert json.loads(capsys.readouterr().out)["num_steps"] == 2
  imported = Run.open(new).started
  assert (imported.model.weights, imported.model.solver, imported.data.tokenizer) == (
    "stored",
    "sequential",
    os.path.join(new, "tokenizer.model"),
  )
  before, after = jobs.run("evaluate", config, workdir), jobs.run("evaluate", imported, new)
  assert math.isclose(before["loss"], after["loss"], rel_tol=1e-5) and after["step"] == 0
  assert "holds a run already" in told(lambda: jobs.run("import", config, new, from_hf=out))
  assert "holds something already" in told(lambda: jobs.run("export", config, workdir, out=out))
  loaded = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
  prompt = transformers.AutoTokenizer.from_pretrained(out)("Document 3 tells", return_tensors="pt")
  assert loaded.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 3


def test_an_imported_run_reads_text_as_its_tokenizer_was_trained(finished, tmp_path, capsys):
  """Its directory says how, without the folder; text that is prepared with its file fits it."""
  config, out, new = finished[0], tmp_path / "out", str(tmp_path / "new")
  trained = published_model()
  theirs = sentencepiece.SentencePieceProcessor(model_proto=trained)
  foreign("llama", vocab_size=theirs.vocab_size() + 1).save_pretrained(out)
  marks = {"bos_token_id": 1, "eos_token_id": [2, 9]}
  files = {"tokenizer__model": trained, "added_tokens__json": {"<|im_start|>": theirs.vocab_size()}}
  config_json = json.loads((out / "config.json").read_text()) | marks
  write_files(out, **files, generation_config__json=marks, config__json=config_json)
  jobs.run("import", config, new, from_hf=str(out))
  shutil.rmtree(out)
  imported = Run.open(new).started
  tokenizer = Run.open(new).tokenizer
  assert (tokenizer.end_ids, tokenizer.bos_id) == ((2, 9), 1)
  assert tokenizer.encode("Hello  world\nx").tolist() == theirs.encode("Hello  world\nx")
  assert tokenizer.encode("<|im_start|>").tolist() == [theirs.vocab_size()]
  assert math.isfinite(jobs.run("evaluate", imported, new)["loss"])
  again = str(tmp_path / "again")
  jobs.run("export", imported, new, out=again)
  assert importing.read_tokenizer(again).end_ids == (2, 9)
  assert transformers.AutoTokenizer.from_pretrained(again)("a  b\n")["input_ids"] == [1, *theirs.encode("a  b\n")]
  own = dataclasses.replace(config.data, tokenizer=os.path.join(new, "tokenizer.model"))
  assert data.load(own, 500, seed=0).tokenizer.hash == tokenizer.hash


def test_other_formats_and_mistakes(finished, tmp_path):
  config, workdir = finished
  out = str(tmp_path / "out")
  result = jobs.run("export", config, workdir, out=out, format="stablehlo", num_steps=3)
  assert (result["num_steps"], result["platforms"]) == (3, ("cpu", "cuda", "tpu")) and "load.py" in os.listdir(out)
  assert "num_steps=0: must be 1 or above" in told(
    lambda: jobs.run("export", config, workdir, out=str(tmp_path / "other"), num_steps=0)
  )
  grouped = dataclasses.replace(config, model=dataclasses.replace(config.model, num_kv_heads=2))
  assert "GPT-2 has no grouped-query heads" in told(
    lambda: jobs.run("export", grouped, workdir, out=str(tmp_path / "other"))
  )
  (tmp_path / "empty").mkdir()
  workdir_lib.claim(str(tmp_path / "empty"), config, importing.read_tokenizer(workdir), None)
  assert "holds no checkpoint yet" in told(
    lambda: jobs.run("export", config, str(tmp_path / "empty"), out=str(tmp_path / "other"))
  )
  assert not (tmp_path / "other").exists()


# a run without text, by command lines


def run_command(*arguments: str, code: int = 0) -> None:
  """Runs a command line in this process and checks its exit code."""
  flags.FLAGS.unparse_flags()
  for name in flags.FLAGS:  # as in a new process
    flags.FLAGS[name].unparse()
  assert main.main(main.parse(["main", "--num_processes=1", *arguments])) == code


def command(capsys, *arguments: str) -> dict:
  """The line of JSON that a command line prints, if any."""
  capsys.readouterr()
  run_command(*arguments)
  out = capsys.readouterr().out
  return json.loads(out) if out.strip() else {}


def refused(capsys, *arguments: str) -> str:
  """The last line of what a command line prints that holds a mistake."""
  run_command(*arguments, code=2)
  return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def textless(finished, tmp_path_factory):
  """(the settings that name text and a short training, a work directory) of an import without text."""
  config, workdir = finished
  folder = tmp_path_factory.mktemp("textless")
  jobs.run("export", config, workdir, out=str(folder / "out"))
  arguments = (f"--from_hf={folder}/out", f"--workdir={folder}/run", "--set=model.seq_len=8")
  run_command("--job=import", *arguments)
  text = dict(source=config.data.source, cache_dir=config.data.cache_dir, validation_fraction=0.3)
  settings = [f"--config.data.{key}={value}" for key, value in text.items()]
  short = ("train.steps=2", "train.batch_size=4", "eval.max_batches=2", "train.peak_tflops=0.1")
  return [*settings, *(f"--config.{setting}" for setting in short)], f"{folder}/run"


def test_a_run_without_text_generates_and_says_what_needs_text(textless, capsys):
  text, workdir = textless
  run = Run.open(workdir)
  assert run.started.model.seq_len == 8 and run.params["positions"].shape[0] == 8
  run_command("--job=generate", f"--workdir={workdir}", "--prompt=a", "--max_tokens=2")
  for job in ("--job=evaluate", "--job=train"):
    assert "data.source=none: the run has no text yet; name it" in refused(capsys, job, f"--workdir={workdir}")
  assert math.isfinite(command(capsys, "--job=evaluate", f"--workdir={workdir}", *text)["loss"])
  assert Run.open(workdir).started.data.source == "none"


def test_a_run_without_text_is_made_into_others_with_any_text(textless, tmp_path, capsys):
  text, workdir = textless
  source = f"--from_workdir={workdir}"
  values = {}
  for job in ("continuous", "discretize"):
    bare = command(capsys, f"--job={job}", source, f"--workdir={tmp_path}/{job}")
    assert bare["before"] == bare["after"] == {"num_steps": 2}
    made = command(capsys, f"--job={job}", source, f"--workdir={tmp_path}/{job}_text", *text)
    assert made["before"]["loss"] == pytest.approx(made["after"]["loss"], abs=1e-5)
    values[job] = made["before"]["loss"]
    run = Run.open(f"{tmp_path}/{job}_text")
    assert run.started.data.source.startswith("text:") and run.started.train.steps == 2
    assert os.path.dirname(run.started.data.tokenizer) == f"{tmp_path}/{job}_text"
  assert values["continuous"] == values["discretize"]
  other = ("--job=continuous", source, f"--workdir={tmp_path}/x", "--config.model.embed_dim=32")
  assert "only model.time, model.dropout, model.attention may differ" in refused(capsys, *other)
  other = ("--job=discretize", source, f"--workdir={tmp_path}/x", *text, "--config.data.tokenizer=bytes")
  assert "was trained with another tokenizer" in refused(capsys, *other) and not (tmp_path / "x").exists()
  tuned = f"{tmp_path}/tuned"
  command(capsys, "--job=finetune", source, f"--workdir={tuned}", *text)
  assert Run.open(tuned).step == 2 and Run.open(workdir).step == 0


def test_a_run_without_text_takes_the_first_that_it_is_trained_on(textless, tmp_path, capsys):
  text, workdir = textless
  copy, tuned = f"{tmp_path}/copy", f"{tmp_path}/tuned"
  shutil.copytree(workdir, copy)
  command(capsys, "--job=finetune", f"--from_workdir={copy}", f"--workdir={tuned}", *text)
  command(capsys, f"--workdir={copy}", *text)
  run = Run.open(copy)
  assert run.step == 2 and run.started.data.source.startswith("text:") and run.corpus
  command(capsys, f"--workdir={copy}")  # is finished
  assert "belongs to another run: data.source" in refused(capsys, f"--workdir={copy}", "--config.data.source=builtin")
  command(capsys, "--job=finetune", f"--from_workdir={copy}", f"--workdir={tuned}")  # its source is still the same run


def test_an_import_is_not_longer_than_its_checkpoint_and_changes_no_other_model_key(textless, tmp_path, capsys):
  folder = os.path.dirname(textless[1]) + "/out"
  for setting, part in (("seq_len=17", "17"), ("num_heads=2", "only model.seq_len, model.dropout, model.attention")):
    arguments = ("--job=import", f"--from_hf={folder}", f"--workdir={tmp_path}/new", f"--config.model.{setting}")
    assert part in refused(capsys, *arguments) and not (tmp_path / "new").exists()
