"""Adapters alone, as a PEFT folder: `peft` loads them onto the exported base model, with our logits."""

import dataclasses
import json
import shutil

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

import diffeq_nnx
from diffeq_nnx.config import LoraConfig
from diffeq_nnx.exporting import adapters, huggingface
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.runs.run import Run
from tests.conftest import Lazy, moved_instance, run_command, small_model, write_documents
from tests.test_discretize import logits
from tests.test_import import foreign, torch_logits
from tests.test_published_tokenizers import model as published_model

peft, transformers = map(Lazy, ("peft", "transformers"))


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers


def with_adapters(model, learned=0.0, **lora):
  """The config and parameters of a stored model with random adapters, and tables that moved by `learned`."""
  config = dataclasses.replace(model.config, lora=LoraConfig(**{"rank": 3, "alpha": 5.0, "embeddings": False, **lora}))
  rng, params = np.random.default_rng(1), jax.device_get(params_of(model))
  noise = lambda shape, scale=0.3: np.asarray(scale * rng.normal(size=shape), np.float32)
  shapes = jax.eval_shape(lambda: params_of(diffeq_nnx.Model(config, rngs=nnx.Rngs(0))))
  params["weight_source"]["lora"] = jax.tree.map(lambda leaf: noise(leaf.shape), shapes["weight_source"]["lora"])
  for name in {"embedding", "positions", "head"} & params.keys():
    params[name] = params[name] + noise(params[name].shape, learned)
  return config, params


def our_logits(config, params):
  return logits(build(config, jax.tree.map(jnp.asarray, params)))


def check_peft(base, folder, config, params, own=False):
  """PEFT's logits are ours, adapters change them, and merging keeps them."""
  loaded = transformers.AutoModelForCausalLM.from_pretrained(base, trust_remote_code=own)
  expected, model = our_logits(config, params), peft.PeftModel.from_pretrained(loaded, folder).eval()
  np.testing.assert_allclose(torch_logits(model), expected, rtol=0, atol=1e-5)
  with model.disable_adapter():
    assert np.abs(torch_logits(model) - expected).max() > 1e-2
  np.testing.assert_allclose(torch_logits(model.merge_and_unload()), expected, rtol=0, atol=1e-5)


# tables that learn or stay, of GPT-2 and of the others
@pytest.mark.parametrize(
  "kind,changes,embeddings",
  [("gpt2", {}, True), ("qwen3", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}, False)],
)
def test_peft_gives_our_logits_on_the_imported_folder_itself(kind, changes, embeddings, tmp_path):
  """So that adapters for a published checkpoint need no export of it; the config names what was asked for."""
  theirs, base, out = foreign(kind, **changes), str(tmp_path / "base"), str(tmp_path / "out")
  theirs.save_pretrained(base)
  asked = dict(rank=2, alpha=7.0, dropout=0.25, embeddings=embeddings)
  config, params = with_adapters(diffeq_nnx.import_hf(base), 0.1 * embeddings, **asked)
  result = adapters.write(config, params, out, base)
  assert not result["trust_remote_code"] and ("modules_to_save" in result) == embeddings
  check_peft(base, out, config, params)
  read = peft.PeftConfig.from_pretrained(out)
  assert isinstance(read, peft.LoraConfig) and read.base_model_name_or_path == base
  expected = (2, 7.0, 0.25, kind == "gpt2")
  assert (read.r, read.lora_alpha, read.lora_dropout, read.fan_in_fan_out) == expected
  kernels = {"gpt2": 4, "qwen3": 7}[kind]  # of a layer, of which none is left out or named for nothing
  assert len(read.target_modules) == kernels and (read.modules_to_save is None) != embeddings


@pytest.mark.parametrize(
  "field,solver,changes,lora",
  [
    ("gpt", "sequential", {"num_kv_heads": None}, {"rank": 1, "alpha": 0.5, "targets": "qkv|out"}),
    ("llama", "heun", {"qkv_bias": True, "qk_norm": True}, {"embeddings": True}),
  ],
)
def test_peft_gives_our_logits_on_generated_weights_that_were_discretized(field, solver, changes, lora, tmp_path):
  """Steps are not 1, so that their sizes are folded into B, but for solvers that use a layer several times."""
  model = diffeq_nnx.discretize(moved_instance(small_model(field=field, solver=solver, horizon=1.7, **changes)), 2)
  base, out = str(tmp_path / "base"), str(tmp_path / "out")
  own = huggingface.export_hf(model, base)["trust_remote_code"]
  assert own == (solver != "sequential")
  config, params = with_adapters(model, 0.1 * lora.get("embeddings", False), **lora)
  result = adapters.write(config, params, out)
  assert result["trust_remote_code"] == own
  check_peft(base, out, config, params, own)


def test_a_run_s_adapters_and_its_base_without_the_run_that_it_came_from(tmp_path, capsys):
  """By command lines: import, fine-tuning of adapters and tables, and the three exports of it."""
  place = lambda name: str(tmp_path / name)
  command = lambda *arguments: run_command("--num_processes=1", *arguments)
  export = lambda form, *more: command("--job=export", f"--workdir={place('run')}", f"--out={place(form)}", *more)
  write_documents(tmp_path)
  trained = published_model()
  size = sentencepiece.SentencePieceProcessor(model_proto=trained).vocab_size()
  foreign("qwen2", vocab_size=size, tie_word_embeddings=True, eos_token_id=2).save_pretrained(place("there"))
  (tmp_path / "there" / "tokenizer.model").write_bytes(trained)
  assert command("--job=import", f"--from_hf={place('there')}", f"--workdir={place('source')}") == 0
  assert command("--job=export", f"--workdir={place('source')}", f"--out={place('x')}", "--format=peft") == 2
  assert "format=peft: this run has no adapters (model.lora.rank=0)" in capsys.readouterr().err
  keys = f"data.source=text:{tmp_path}/*.txt data.cache_dir={place('cache')} data.validation_fraction=0.3 train.steps=3"
  keys += " train.batch_size=4 eval.max_batches=1 train.peak_tflops=0.1 model.lora.rank=2 optimizer.peak_rate=0.05"
  settings = [f"--config.{setting}" for setting in keys.split()]
  assert command("--job=finetune", f"--from_workdir={place('source')}", f"--workdir={place('run')}", *settings) == 0
  shutil.rmtree(place("source"))
  capsys.readouterr()
  assert export("peft", "--format=peft", f"--base={place('there')}") == 0
  assert json.loads(capsys.readouterr().out)["modules_to_save"] == ["embed_tokens", "lm_head"]
  assert export("base", "--format=hf_base") == export("merged") == 0
  assert export("y", f"--base={place('there')}") == 2
  assert "is for --format=peft, and this is --format=hf" in capsys.readouterr().err
  run = Run.open(place("run"))
  for base in ("there", "base"):
    check_peft(place(base), place("peft"), run.config.model, jax.device_get(run.params))
  merged = transformers.Qwen2ForCausalLM.from_pretrained(place("merged"))
  expected = our_logits(run.config.model, run.params)
  np.testing.assert_allclose(torch_logits(merged), expected, rtol=0, atol=1e-5)
