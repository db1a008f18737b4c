"""Imported models give the logits of transformers' own; what can't be held is told."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.exporting import huggingface, importing
from diffeq_nnx.model.parameters import params_of
from tests.conftest import Lazy, told
from tests.test_discretize import TOKENS_2x12
from tests.test_tokenizer import spec_of
from tests.test_tokenizer import write as write_files

torch, torch_files, transformers = map(Lazy, ("torch", "safetensors.torch", "transformers"))


GPT2 = dict(vocab_size=31, n_positions=12, n_embd=24, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=0)
LLAMA = dict(vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, max_position_embeddings=12, bos_token_id=None, eos_token_id=0)
# of the three frequencies here one stays, one lies between, and one is slowed by the whole factor
LLAMA_3 = dict(
  rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def foreign(kind, **changes):
  """A model of transformers' own of which no parameter sits at its initial value."""
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(kind, **{**(GPT2 if kind == "gpt2" else LLAMA), **changes})
  made = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for parameter in made.parameters():
      parameter += 0.1 * torch.randn_like(parameter)
  return made.eval()


def torch_logits(model, tokens=TOKENS_2x12):
  """Those of a model of PyTorch."""
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.float().numpy()


def stored_logits(model):
  """Those of a model with stored weights, by the program that an export of it runs too."""
  return np.asarray(huggingface.compute_logits(model.config, params_of(model), jnp.asarray(TOKENS_2x12, jnp.int32)))


def same_logits(folder, theirs, seq_len=None):
  model = diffeq_nnx.import_hf(folder, seq_len)
  np.testing.assert_allclose(stored_logits(model), torch_logits(theirs), rtol=0, atol=1e-5)
  return model


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SCALED = {"rope_parameters": {"rope_theta": 50.0, **LLAMA_3}, "max_position_embeddings": 64}
UNUSUAL = {  # below, a GPT-2 is tied, and a Llama and a Qwen 2 are not
  "gpt2": UNTIED | {"n_inner": 40, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_pytorch_tanh"},
  "llama": TIED | SCALED | {"rms_norm_eps": 1e-2, "num_key_value_heads": 4},
  "mistral": {"sliding_window": None, "head_dim": 8},
  "qwen2": TIED | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
  "qwen3": TIED | {"head_dim": 6, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_imported_model_gives_the_same_logits_and_goes_back_to_its_class(kind, tmp_path):
  theirs, there, back = foreign(kind, **UNUSUAL[kind]), tmp_path / "there", tmp_path / "back"
  theirs.save_pretrained(there)
  model = same_logits(there, theirs)
  assert (model.config.weights, model.config.solver, model.config.dtype) == ("stored", "sequential", "float32")
  result = diffeq_nnx.export_hf(model, str(back))
  assert result["architecture"] == type(theirs).__name__.replace("Mistral", "Llama") and not result["notes"]
  again = getattr(transformers, result["architecture"]).from_pretrained(back)
  torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)
  np.testing.assert_allclose(torch_logits(again), torch_logits(theirs), rtol=0, atol=1e-5)


def test_scaled_positions_are_read_where_transformers_reads_them(tmp_path):
  """`rope_scaling` takes the place of `rope_parameters`, and an original length beside them that of one within."""
  foreign("llama", **UNUSUAL["llama"]).save_pretrained(tmp_path)
  path, plain = tmp_path / "config.json", {"rope_theta": 5e4, "rope_type": "default"}
  config = json.loads(path.read_text())
  scaled = {"rope_scaling": LLAMA_3, "rope_parameters": plain, "rope_theta": 50.0}
  for changes in (scaled, {"original_max_position_embeddings": 5}):
    path.write_text(json.dumps(config | changes))
    same_logits(tmp_path, transformers.LlamaForCausalLM.from_pretrained(tmp_path))


def test_a_window_that_no_layer_has_is_no_limit(tmp_path):
  theirs = foreign("qwen2")
  theirs.save_pretrained(tmp_path)
  path = tmp_path / "config.json"
  said = json.loads(path.read_text()) | {"use_sliding_window": True, "sliding_window": 6}
  for changes in (
    {"layer_types": None},  # layers slide from max_window_layers, 28, on
    {"layer_types": ["full_attention"] * 2},
    {"use_sliding_window": False, "max_window_layers": 1, "layer_types": None},
  ):
    path.write_text(json.dumps({**said, **changes}))
    same_logits(tmp_path, theirs)


def test_an_exported_qwen_2_says_that_auto_tokenizer_takes_its_own_class(tmp_path):
  spec, text = spec_of(), "e\u0301 12"
  tokenizer = data.load_tokenizer(str(write_files(tmp_path / "given", tokenizer__json=spec)))
  foreign("qwen2", vocab_size=300).save_pretrained(tmp_path / "there")
  out = str(tmp_path / "out")
  notes = diffeq_nnx.export_hf(diffeq_nnx.import_hf(str(tmp_path / "there")), out, tokenizer=tokenizer)["notes"]
  assert any("takes Qwen2Tokenizer" in note for note in notes)
  ours, fast = tokenizer.encode(text).tolist(), transformers.PreTrainedTokenizerFast.from_pretrained(out)
  assert fast(text)["input_ids"] == ours != transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"]


@pytest.mark.parametrize(
  "kind,changes", [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})]
)
def test_a_sliding_window_is_told_and_no_limit_to_a_model_as_short_as_it(kind, changes, tmp_path):
  theirs = foreign(kind, sliding_window=12, max_position_embeddings=32, **changes)
  theirs.save_pretrained(tmp_path)
  line = told(lambda: importing.read(str(tmp_path)))
  assert "last 12 positions (sliding_window)" in line and "model.seq_len=12" in line
  assert "has 32 positions, not 33" in told(lambda: importing.read(str(tmp_path), 33))
  same_logits(tmp_path, theirs, 12)


def test_weights_may_be_in_several_files_of_bfloat16_too_and_a_stray_file_is_not_read(tmp_path):
  theirs = foreign("llama")
  theirs.save_pretrained(tmp_path, max_shard_size="5KB")
  other = {name: np.full(array.shape, 9.0, np.float32) for name, array in theirs.state_dict().items()}
  for stray in ("model-00009-of-00009.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
    safetensors.numpy.save_file(other, tmp_path / stray)
  same_logits(tmp_path, theirs)
  last = max(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
  (tmp_path / last).rename(tmp_path / "elsewhere")
  assert f"{last} can't be read" in told(lambda: importing.read(str(tmp_path)))
  theirs.to(torch.bfloat16).save_pretrained(tmp_path / "half", max_shard_size="5KB")
  assert len([name for name in os.listdir(tmp_path / "half") if name.endswith(".safetensors")]) > 2
  config, params = importing.read(str(tmp_path / "half"))
  assert config.dtype == "bfloat16" and params["embedding"].dtype == np.float32
  np.testing.assert_array_equal(params["embedding"], theirs.model.embed_tokens.weight.detach().float().numpy())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_table_may_be_there_as_the_head_alone(kind, tmp_path):
  theirs = foreign(kind, **TIED)
  theirs.save_pretrained(tmp_path)
  torch_files.save_model(theirs, str(tmp_path / "model.safetensors"))
  same_logits(tmp_path, theirs)


def test_masks_that_gpt2_once_saved_are_left_out_with_and_without_its_prefix(tmp_path):
  """Without the prefix it is GPT-2 as first published."""
  theirs = foreign("gpt2")
  for prefix, saved in (("transformer.", theirs), ("", theirs.transformer)):
    saved.save_pretrained(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert f"{prefix}wte.weight" in tensors
    for layer in range(2):
      tensors[f"{prefix}h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), np.uint8))
      tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.float32(-1e4)[None]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    same_logits(tmp_path, theirs)


def write(folder, config, tensors=None):
  (folder / "config.json").write_text(json.dumps(config))
  if tensors is not None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  return lambda: importing.read(str(folder))


@pytest.mark.parametrize(
  "kind,changes,parts",
  [
    ("gpt2", {"activation_function": "relu"}, ["activation_function is 'relu'", "'gelu_new'"]),
    ("gpt2", {"n_head": 5}, ["n_head is 5", "n_embd, 24"]),
    ("gpt2", {"n_inner": 0}, ["n_inner is 0"]),
    ("gpt2", {"torch_dtype": "int8"}, ["dtype is 'int8'", "float32"]),
    ("llama", {"rope_scaling": {**LLAMA_3, "factor": "8"}}, ["factor is '8'", "a number above 1"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type is 'linear'", "'llama3'"]),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": {}}, ["rope_type is 'yarn'"]),
    ("llama", {"attention_bias": True}, ["attention_bias is True"]),
    ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads is 3"]),
    ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ("qwen2", {"is_causal": False}, ["is_causal is False"]),
    ("gpt2", {"is_causal": False}, ["is_causal is False"]),
    ("gpt2", {"layer_norm_epsilon": "<b>"}, ["config.json can't be used", "<b>"]),
    ("gpt2", {"resid_pdrop": {}, "embd_pdrop": {}}, ["config.json can't be used", "not 'dict'"]),
    ("gpt2", {"dtype": []}, ["holds no model.safetensors"]),  # as if it were not there
    ("gpt2", {"n_inner": "\x1b[2J"}, ["n_inner is '\\x1b[2J'"]),
    ("llama", {"rope_scaling": 5}, ["config.json can't be used"]),
    ("llama", {"model_type": []}, ["model_type is []"]),
    ("gemma", {}, ["model_type is 'gemma'", "gpt2, llama, mistral, qwen2, qwen3 can be imported"]),
  ],
)
def test_what_can_t_be_held_is_told(kind, changes, parts, tmp_path):
  line = told(write(tmp_path, {"model_type": kind, **(GPT2 if kind == "gpt2" else LLAMA), **changes}))
  assert line.startswith(f"from_hf={tmp_path}: ") and line.isprintable()
  for part in parts:
    assert part in line


def test_files_that_can_t_be_used_are_told(tmp_path):
  assert "there is no such folder" in told(lambda: importing.read(str(tmp_path / "none")))
  assert "config.json can't be read" in told(lambda: importing.read(str(tmp_path)))
  (tmp_path / "config.json").write_text("{")
  assert "is not JSON" in told(lambda: importing.read(str(tmp_path)))
  config = {"model_type": "gpt2", **GPT2, "n_inner": 40, "n_layer": 3}
  assert "holds no model.safetensors" in told(write(tmp_path, config))
  out = tmp_path / "out"
  foreign("gpt2", n_inner=40, n_layer=3).save_pretrained(out)
  tensors = safetensors.numpy.load_file(out / "model.safetensors")
  write(tmp_path, config, tensors)()
  name = "transformer.h.1.mlp.c_fc.weight"
  without = {key: array for key, array in tensors.items() if key != name}
  assert f"the weights lack {name}" in told(write(tmp_path, config, without))
  other = {**tensors, name: np.zeros((24, 39), np.float32)}
  assert f"{name}: has the shape (24, 39)" in told(write(tmp_path, config, other))
  assert "hold transformer.h.2." in told(write(tmp_path, {**config, "n_layer": 2}, tensors))
  infinite = {**tensors, name: np.full((24, 40), np.inf, np.float32)}
  assert f"{name} holds numbers that are not finite" in told(write(tmp_path, config, infinite))
  for kind in (torch.int8, torch.float8_e4m3fn):
    quantized = {key: torch.from_numpy(array) for key, array in tensors.items()}
    quantized[name] = quantized[name].to(kind)
    torch_files.save_file(quantized, tmp_path / "model.safetensors")
    assert "holds quantized weights (" in told(lambda: importing.read(str(tmp_path)))
  head = {"lm_head.weight": np.zeros((31, 24), np.float32)}
  assert "lm_head.weight differs from the embedding" in told(write(tmp_path, config, {**tensors, **head}))
  (tmp_path / "adapter_config.json").write_text("{}")
  assert "an adapter, which can't be imported" in told(write(tmp_path, config, tensors))
  line = told(lambda: importing.read_tokenizer(str(out)))
  assert "the directory must hold one of tokenizer.json, tokenizer.model" in line
