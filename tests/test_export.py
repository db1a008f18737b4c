"""Exported models give our logits when loaded by the other side's own library; tokenizers give our ids."""

import dataclasses
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # where transformers copies a folder's own code

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.config import ModelConfig, RopeConfig, TimeConfig
from diffeq_nnx.exporting import huggingface, layouts, stablehlo, tokenizer_files
from diffeq_nnx.model import solvers, vector_fields
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import graph
from diffeq_nnx.model.solvers import SOLVERS, RungeKutta, Splitting
from tests.conftest import moved_instance, small_model, told
from tests.test_discretize import TOKENS_2x12, logits
from tests.test_published_tokenizers import TEXTS as PUBLISHED_TEXTS
from tests.test_published_tokenizers import lacking
from tests.test_published_tokenizers import model as published_model
from tests.test_tokenizer import write

ONE_EPS = {"norm_eps": 1e-6, "final_norm_eps": 1e-6}  # what Llama's config can say
GENERATED = {"horizon": 2.0}, 5  # changes to a model, num_steps of the export
UNEVEN = {"weights": "stored", "step_sizes": (0.3, 1.7, 0.9)}, None
SCALED = {"rope": RopeConfig(50.0, 8.0, 1.0, 4.0, original_len=8), "horizon": 2.5}, None
CASES = [
  ("gpt", "sequential", *GENERATED),
  ("llama", "sequential", *UNEVEN),
  ("gpt", "sequential", {"weights": "shared", "horizon": 4.0}, 2),
  ("llama", "sequential", *SCALED),
  ("llama", "euler", *SCALED),
]


def make(config) -> Model:
  """A model of random parameters, by NumPy: nothing is compiled."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Model(config, rngs=nnx.Rngs(0)))))
  noise = lambda path, leaf: jnp.asarray(0.15 * rng.normal(size=leaf.shape) + (path[-1].key == "scale"), jnp.float32)
  return nnx.merge(graph(config), jax.tree_util.tree_map_with_path(noise, shapes))


def load(result):
  """The exported model, by transformers alone unless the folder says that it needs its own code."""
  own = result["trust_remote_code"]
  kind = transformers.AutoModelForCausalLM if own else getattr(transformers, result["architecture"])
  loaded, info = kind.from_pretrained(result["folder"], trust_remote_code=own, output_loading_info=True)
  assert not any(info.values()), info  # nothing missing, nothing left over
  assert loaded.dtype == torch.float32 and type(loaded).__name__ == result["architecture"]
  return loaded.eval()


def torch_logits(loaded, tokens=TOKENS_2x12, **arguments):
  with torch.no_grad():
    return loaded(torch.tensor(np.asarray(tokens)), **arguments).logits.numpy()


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("field,solver,changes,num_steps", CASES)
def test_transformers_gives_our_logits(field, solver, changes, num_steps, tmp_path):
  if solver == "sequential":
    changes = {**changes, **({"num_kv_heads": None} if field == "gpt" else ONE_EPS)}
  model = make(small_model(field=field, solver=solver, **changes))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"), num_steps=num_steps)
  plain = {"gpt": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[field]
  expected = plain if solver == "sequential" else "DiffEqFormerForCausalLM"
  assert result["architecture"] == expected and result["num_steps"] == (num_steps or model.config.num_steps)
  told_so = any("trust_remote_code" in note for note in result["notes"])
  assert result["trust_remote_code"] == told_so == (solver == "euler")
  assert result["logit_difference"] < 1e-5
  loaded = load(result)
  assert type(loaded).__module__.startswith("transformers_modules" if solver == "euler" else "transformers.models")
  close(torch_logits(loaded), logits(model, num_steps))


@pytest.mark.parametrize(
  "solver,note",
  [("euler", "no architecture of transformers"), ("sequential", "has a shift in its norms, or both biases")],
)
def test_our_own_modeling_file_holds_the_published_llama(solver, note, tmp_path):
  model = make(small_model(field="llama", solver=solver, initialization="published", horizon=1.0))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"), num_steps=4)
  assert result["architecture"] == "DiffEqFormerForCausalLM" and result["logit_difference"] < 1e-5
  assert note in result["notes"][0]
  loaded, expected = load(result), logits(model, 4)
  close(torch_logits(loaded), expected)
  for layer in loaded.layers:
    layer.attention_norm.bias.data.zero_()
    layer.mlp_norm.bias.data.zero_()
  assert np.abs(torch_logits(loaded) - expected).max() > 1e-2  # a hundred times what `close` lets pass


@pytest.mark.parametrize(
  "field,changes",
  [
    ("gpt", {"num_kv_heads": 2, "head_dim": 10, "tied_head": False}),
    ("llama", {"num_kv_heads": 4, "qkv_bias": True, "qk_norm": True, "head_dim": 10, "tied_head": True}),
  ],
)
def test_our_own_modeling_file_holds_sequential_steps_too(field, changes, tmp_path):
  model = make(small_model(field=field, solver="sequential", **changes))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"), form="hf_code")
  assert result["trust_remote_code"] and result["logit_difference"] < 1e-5
  close(torch_logits(load(result)), logits(model))


def test_llama_has_one_eps_and_the_difference_is_told(tmp_path):
  """LlamaConfig has one rms_norm_eps; our final norm's is 1e-5 and the block's 1e-6."""
  model = make(small_model(field="llama", solver="sequential"))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"))
  assert "the final norm's is 1e-05 here" in result["notes"][0]
  found = np.abs(torch_logits(load(result)) - logits(model)).max()
  assert 1e-5 < found < 1e-3  # its states are small: mean squares of about 0.03
  assert abs(result["logit_difference"] - found) < 1e-5 + 0.5 * found  # on other tokens
  params = nnx.to_pure_dict(nnx.state(model))
  large = {**params, "embedding": params["embedding"] * 10}  # as large as trained ones
  trained = nnx.merge(nnx.graphdef(model), large)
  result = diffeq_nnx.export_hf(trained, str(tmp_path / "large"))
  assert result["logit_difference"] < 1e-4
  close(torch_logits(load(result)), logits(trained))


def test_the_compute_dtype_s_weights_are_exported(tmp_path):
  model = make(small_model(solver="sequential", num_kv_heads=None, dtype="bfloat16"))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"))
  stored = diffeq_nnx.discretize(model)  # whose weights are rounded to bfloat16 too
  wide = graph(dataclasses.replace(stored.config, dtype="float32"))
  close(torch_logits(load(result)), logits(nnx.merge(wide, nnx.to_pure_dict(nnx.state(stored)))))


MEAN = {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, scale=6.0, weights_at="mean"), "horizon": 0.7}, 2
THIRD = 1 / 3
REGISTERED = {  # as a user may: Heun's method of third order, whose second stage has b = 0, and a splitting
  "third": RungeKutta(((), (THIRD,), (0.0, 2 * THIRD)), (0.25, 0.0, 0.75), (0.0, THIRD, 2 * THIRD)),
  "late": Splitting((("feedforward", 0.3), ("attention", 1.0), ("feedforward", 0.7)), 0.9),
}


@pytest.fixture
def forgotten():
  """Solvers and fields that a test registers, as a program does, are forgotten after it."""
  tables = {"solver": solvers.SOLVERS, "field": vector_fields.FIELDS}
  before = {key: [*table] for key, table in tables.items()}
  yield
  for field in dataclasses.fields(ModelConfig):
    for name in tables.get(field.name, {}).keys() - before.get(field.name, ()):
      del tables[field.name][name]
      field.metadata["choices"].remove(name)


@pytest.mark.parametrize(
  "solver,field,case",
  [
    (solver, field, MEAN if solver == "ralston" else case)
    for solver, field, case in zip(
      [*SOLVERS, *REGISTERED], itertools.cycle(["gpt", "llama"]), itertools.cycle([UNEVEN, GENERATED])
    )
  ],
)
def test_our_own_modeling_file_runs_every_solver(solver, field, case, tmp_path, forgotten):
  """It gives our logits, and generates with a cache, of one entry for each evaluation of attention, as without."""
  for name, registered in REGISTERED.items():
    solvers.register(name, registered)
  changes, num_steps = case
  model = moved_instance(small_model(field=field, solver=solver, **changes))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"), num_steps=num_steps, form="hf_code")
  assert result["trust_remote_code"] and result["logit_difference"] < 1e-5
  loaded = load(result)
  np.testing.assert_allclose(torch_logits(loaded), logits(model, num_steps), rtol=0, atol=1e-5)
  assert len(loaded.layers) == len(model.times(model.grid(num_steps)).points_UxQ)
  settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
  ids = torch.tensor(TOKENS_2x12[:, :6])
  cached, whole = (loaded.generate(ids, use_cache=use_cache, **settings) for use_cache in (True, False))
  np.testing.assert_array_equal(cached.sequences, whole.sequences)
  np.testing.assert_array_equal(whole.sequences[:, 6:], torch.stack(whole.logits, 1).argmax(-1))  # greedy
  np.testing.assert_allclose(torch.stack(cached.logits), torch.stack(whole.logits), rtol=0, atol=1e-5)
  lengths = [entry.get_seq_length() for entry in cached.past_key_values.layers]
  assert lengths == [9] * loaded.config.num_hidden_layers
  assert len(lengths) == result["num_steps"] * model.solver.evaluations.attention


def test_our_own_modeling_file_generates_after_padding_on_the_left_and_learns(tmp_path):
  loaded = load(diffeq_nnx.export_hf(make(small_model(field="llama", solver="heun")), str(tmp_path / "out")))
  settings = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
  tokens = torch.tensor(TOKENS_2x12)
  ids = tokens[:, :6]
  whole = loaded.generate(ids, **settings).numpy()
  mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
  short = loaded.generate(ids[1:, 2:], **settings).numpy()
  both = loaded.generate(ids, attention_mask=mask, **settings).numpy()
  np.testing.assert_array_equal(both[0], whole[0])
  np.testing.assert_array_equal(both[1, 2:], short[0])
  loss = loaded.train()(tokens, labels=tokens).loss
  rows = [loaded(row, labels=row, num_items_in_batch=22).loss.item() for row in tokens[:, None]]
  assert sum(rows) == pytest.approx(loss.item(), rel=1e-5)  # so Trainer adds up micro-batches
  packed = loaded(tokens.reshape(1, -1), position_ids=torch.arange(12).repeat(2)[None]).logits
  close(packed.reshape(2, 12, -1).detach(), torch_logits(loaded))  # documents of a row don't see each other
  loss.backward()
  assert loss.item() > 0 and all(p.grad is not None and p.grad.isfinite().all() for p in loaded.parameters())
  loaded.save_pretrained(tmp_path / "again")
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
  close(torch_logits(again), torch_logits(loaded.eval()))


def test_gpt2_has_no_grouped_query_heads_and_stored_weights_no_other_steps(tmp_path):
  model = make(small_model(solver="sequential"))
  line = told(lambda: diffeq_nnx.export_hf(model, str(tmp_path / "out")))
  for part in ("model.num_kv_heads=2", "4", "--format=hf_code", "--format=stablehlo"):
    assert part in line
  stored = make(small_model(weights="stored"))
  line = told(lambda: diffeq_nnx.export_hf(stored, str(tmp_path / "out"), num_steps=5))
  assert "num_steps=5: the weights of this model are stored" in line and not os.listdir(tmp_path)


class Reversed(Splitting):
  """A solver of a kind of its own, though it is a splitting to Python."""


class SquaredRelu(vector_fields.GPTField):
  """A block of a kind of its own."""


@pytest.mark.parametrize("changes", [{"solver": "reversed"}, {"field": "gpt_relu2"}])
@pytest.mark.parametrize("form", huggingface.FORMS)
def test_parts_that_were_added_are_in_no_folder(changes, form, forgotten):
  vector_fields.register("gpt_relu2", SquaredRelu)
  solvers.register("reversed", Reversed((("feedforward", 1.0), ("attention", 1.0))))
  added = dataclasses.replace(small_model(solver="sequential", num_kv_heads=None), **changes)
  assert "--format=stablehlo supports any" in told(lambda: huggingface.choose_architecture(added, form))


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
  model = make(small_model(solver="sequential", num_kv_heads=None))
  (tmp_path / "note").write_text("mine")
  for export in (diffeq_nnx.export_hf, diffeq_nnx.export_stablehlo):
    assert "holds something already" in told(lambda: export(model, str(tmp_path)))
    assert "holds something already" in told(lambda: export(model, str(tmp_path / "note")))
  assert os.listdir(tmp_path) == ["note"]
  (tmp_path / "empty").mkdir()
  diffeq_nnx.export_hf(model, str(tmp_path / "empty"))
  assert sorted(os.listdir(tmp_path / "empty")) == ["config.json", "generation_config.json", "model.safetensors"]
  assert sorted(os.listdir(tmp_path)) == ["empty", "note"]


# tokenizers


def byte_pairs(folder, text):
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  marks = ["<s>", "<|endoftext|>"]
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=marks
  )
  made.train_from_iterator([text], trainer)
  made.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
  return str(folder)


def sentencepieces(folder, text):
  (folder / "tokenizer.model").write_bytes(data.train([text], 500))
  return str(folder)


TEXTS = ["", "a", " lead and trail ", "two  spaces\n\n\nlines\r\n\ttab", "\x00\u00a0x\ufb01 1234567"]
TEXTS.append("d\u00e9j\u00e0 vu \u5b57 \U0001f642")


@pytest.mark.parametrize("kind", ["bytes", "byte pairs", "sentencepiece"])
def test_auto_tokenizer_gives_our_ids(kind, tmp_path):
  text = inspect.getsource(layouts)
  sources = {"bytes": lambda *_: "bytes", "byte pairs": byte_pairs, "sentencepiece": sentencepieces}
  source = sources[kind](tmp_path, text)
  ours = data.load_tokenizer(source)
  model = make(small_model(solver="sequential", num_kv_heads=None, vocab_size=ours.vocab_size))
  out = str(tmp_path / "out")
  diffeq_nnx.export_hf(model, out, tokenizer=ours)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
  assert (ours.bos_id is not None) == (kind == "byte pairs")
  for one in [*TEXTS, text]:
    ids = ours.encode(one).tolist()
    assert theirs(one)["input_ids"] == ([] if ours.bos_id is None else [ours.bos_id]) + ids
    assert theirs.decode(ids) == one
  for name in ("config.json", "generation_config.json"):
    with open(os.path.join(out, name), encoding="utf-8") as file:
      marks = json.load(file)
    assert (marks["eos_token_id"], marks["bos_token_id"]) == (ours.eos_id, ours.bos_id)
  assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == ours.eos_id
  again = data.load_tokenizer(os.path.join(out, "tokenizer.model") if kind == "sentencepiece" else out)
  assert again.hash == ours.hash


@pytest.mark.parametrize("changes", [{}, {"add_dummy_prefix": False}])
def test_auto_tokenizer_gives_the_ids_of_a_published_sentencepiece_model(changes, tmp_path):
  """With tokens that were added beside it, and several end marks."""
  start, stop = "<|im_start|>", "<|im_end|>"
  trained = published_model(**changes)
  size = sentencepiece.SentencePieceProcessor(model_proto=trained).vocab_size()
  said = {
    "added_tokens__json": {start: size, stop: size + 1},
    "tokenizer_config__json": {"eos_token": stop},
    "generation_config__json": {"eos_token_id": [2, size + 1]},
  }
  ours = data.load_tokenizer(str(write(tmp_path / "given", tokenizer__model=trained, **said)))
  model = make(small_model(field="llama", solver="sequential", num_kv_heads=None, vocab_size=size + 2))
  out = str(tmp_path / "out")
  diffeq_nnx.export_hf(model, out, tokenizer=ours)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  for text in [*TEXTS, *PUBLISHED_TEXTS, f"{start}a {start} b {start}"]:
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == [1, *ids]
    assert theirs.decode(ids) == ours.decode(ids)
  assert (theirs.eos_token, theirs.bos_token, theirs.eos_token_id) == (stop, "<s>", size + 1)
  assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [size + 1, 2] == list(ours.end_ids)
  again = data.load_tokenizer(out)
  assert (again.end_ids, again.bos_id, again.lossless) == (ours.end_ids, ours.bos_id, False)
  assert again.encode("two  words\n").tolist() == ours.encode("two  words\n").tolist()


def test_auto_tokenizer_gives_the_ids_of_a_vocabulary_that_lacks_bytes(tmp_path):
  given = lacking(model__unk_token="<unk>")
  given["added_tokens"].append({**given["added_tokens"][0], "id": len(given["model"]["vocab"]), "content": "<|e|>"})
  said = {"generation_config__json": {"eos_token_id": [len(given["model"]["vocab"]), 0]}}
  folder = write(tmp_path / "given", tokenizer__json=given, **said)
  model = make(small_model(solver="sequential", num_kv_heads=None, vocab_size=300))
  for policy, texts in (("unknown", ["no! \U00041234!!", *TEXTS]), ("error", TEXTS)):
    ours, out = data.load_tokenizer(str(folder), unknown_bytes=policy), str(tmp_path / policy)
    notes = diffeq_nnx.export_hf(model, out, tokenizer=ours)["notes"]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert [theirs(text)["input_ids"] for text in texts] == [ours.encode(text).tolist() for text in texts]
    assert ("left out by AutoTokenizer" in " ".join(notes)) == (policy == "error")
    again = data.load_tokenizer(out, unknown_bytes=policy)
    assert (again.end_ids, again.hash) == (ours.end_ids, ours.hash)
    assert "diffeq_nnx" not in json.loads((tmp_path / policy / "tokenizer.json").read_text())["model"]


def test_a_sentencepiece_model_that_tokenizer_json_can_t_represent_is_reported(tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(published_model(model_type="unigram", vocab_size=300))
  tokenizer = data.load_tokenizer(str(tmp_path / "tokenizer.model"))
  (tmp_path / "out").mkdir()
  notes = tokenizer_files.write(tokenizer, str(tmp_path / "out"), 12)
  written = sorted(os.listdir(tmp_path / "out"))
  assert "can't represent" in notes[0] and written == ["tokenizer.model", "tokenizer_config.json"]


# StableHLO

ALONE = """
import importlib.util, os, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path = [path for path in sys.path if not os.path.isdir(os.path.join(path or ".", "diffeq_nnx"))]
assert importlib.util.find_spec("diffeq_nnx") is None
sys.path.insert(0, sys.argv[1])
import numpy as np
from load import load
model = load(sys.argv[1])
tokens = np.load("tokens.npy")
np.savez("logits.npz", whole=model(tokens), part=model(tokens[:1, :5]))
try:
  model(np.zeros((1, 13), np.int32))
except ValueError as error:
  assert "length at most 12" in str(error), error
else:
  raise AssertionError("longer than seq_len")
assert not any(name.startswith("diffeq_nnx") for name in sys.modules)
"""


def test_stablehlo_runs_without_this_package(tmp_path):
  model = make(small_model(field="llama", solver="heun", horizon=2.0))
  out = str(tmp_path / "out")
  result = diffeq_nnx.export_stablehlo(model, out, num_steps=4, tokenizer=data.load_tokenizer("bytes"))
  assert result["logit_difference"] < 1e-5
  assert sorted(os.listdir(out)) == sorted(
    [stablehlo.PROGRAM, stablehlo.WEIGHTS, stablehlo.LOADER, "model.json", "tokenizer.json", "tokenizer_config.json"]
  )
  program = jax.export.deserialize(bytearray((tmp_path / "out" / stablehlo.PROGRAM).read_bytes()))
  assert set(program.platforms) == {"cpu", "cuda", "tpu"}
  assert len(program.mlir_module_serialized) < 60_000  # the weights are not in it
  np.save(tmp_path / "tokens.npy", TOKENS_2x12)
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  done = subprocess.run(
    [sys.executable, "-c", ALONE, out], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  theirs = np.load(tmp_path / "logits.npz")
  ours = np.asarray(logits(model, 4))
  close(theirs["whole"], ours)
  close(theirs["part"], ours[:1, :5])  # causal: what follows changes nothing
