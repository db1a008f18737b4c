"""Exported models give our logits when loaded by the other side's own library; tokenizers give our ids."""

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys

from flax import nnx
import jax
import numpy as np
import pytest
import sentencepiece

import diffeq_nnx
from diffeq_nnx import data
from diffeq_nnx.config import DataConfig, RopeConfig, TimeConfig
from diffeq_nnx.exporting import huggingface, layouts, stablehlo, tokenizer_files
from diffeq_nnx.model.solvers import SOLVERS, Splitting
from tests.conftest import Lazy, moved_instance, small_model, told
from tests.test_discretize import TOKENS_2x12, logits
from tests.test_import import stored_logits, torch_logits
from tests.test_published_tokenizers import TEXTS as PUBLISHED_TEXTS
from tests.test_published_tokenizers import lacking
from tests.test_published_tokenizers import model as published_model
from tests.test_tokenizer import train_pairs, write

torch, transformers = map(Lazy, ("torch", "transformers"))

PLAIN = {"weights": "stored", "solver": "sequential"}
ONE_EPS = {"norm_eps": 1e-6, "final_norm_eps": 1e-6}  # what Llama's config can say
ROPE = RopeConfig(50.0, 8.0, 1.0, 4.0, original_len=12)  # as long as the models here: transformers warns of that


make = functools.partial(moved_instance, scale=0.15)


def load(result):
  """The exported model, by transformers alone unless the folder says that it needs its own code."""
  own = result["trust_remote_code"]
  kind = transformers.AutoModelForCausalLM if own else getattr(transformers, result["architecture"])
  loaded, info = kind.from_pretrained(result["folder"], trust_remote_code=own, output_loading_info=True)
  assert not any(info.values()), info  # nothing missing, nothing left over
  assert loaded.dtype == torch.float32 and type(loaded).__name__ == result["architecture"]
  return loaded.eval()


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


# dt is a power of two, which leaves no rounding where it is folded in
@pytest.mark.parametrize(
  "field,num_steps,changes,dts",
  [
    ("gpt", 2, {"num_kv_heads": None, "horizon": 1.0, "dropout": 0.1}, [0.5, 0.5]),
    ("llama", None, {"rope": ROPE, "weights": "stored", "num_steps": 2, "step_sizes": (0.5, 2.0)}, [0.5, 2.0]),
  ],
)
def test_transformers_gives_our_logits_and_import_is_the_inverse_of_export(field, num_steps, changes, dts, tmp_path):
  model = make(small_model(field=field, solver="sequential", norm_eps=1e-4, final_norm_eps=1e-4, **changes))
  stored, out = diffeq_nnx.discretize(model, num_steps), tmp_path / "out"
  out.mkdir()  # a folder that is empty may be there
  result = diffeq_nnx.export_hf(stored, str(out))
  assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors"]
  assert result["architecture"] == {"gpt": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[field]
  assert not result["trust_remote_code"] and result["logit_difference"] < 1e-5
  assert ["transformers warns that max_position" in note for note in result["notes"]] == [True] * (field == "llama")
  loaded = load(result)
  assert type(loaded).__module__.startswith("transformers.models")
  close(torch_logits(loaded), logits(model, num_steps))
  again, expected = diffeq_nnx.import_hf(str(out)), nnx.to_pure_dict(nnx.state(stored))
  for group in ("out", "down"):
    leaves = expected["weight_source"]["stored"][group]
    for name, leaf in leaves.items():
      leaves[name] = leaf * np.reshape(np.float32(dts), (-1,) + (1,) * (leaf.ndim - 1))
  jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), expected)
  assert again.config == dataclasses.replace(stored.config, horizon=None, step_sizes=(), time=TimeConfig())


def test_llama_has_one_eps_and_the_difference_is_told(tmp_path):
  """LlamaConfig has one rms_norm_eps; our final norm's is 1e-5 and the block's 1e-6."""
  model = moved_instance(small_model(field="llama", num_steps=2, **PLAIN), scale=0.1)
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"))
  assert "the final norm's is 1e-05 here" in result["notes"][0]
  found = np.abs(torch_logits(load(result)) - stored_logits(model)).max()
  assert 1e-5 < found < 1e-3  # its states are small
  assert result["logit_difference"] == pytest.approx(found, abs=1e-5)


UNEVEN = {"weights": "stored", "step_sizes": (0.3, 1.7), "num_steps": 2}
QWEN = {"field": "llama", "qkv_bias": True, "qk_norm": True, **PLAIN}
FIVE_HEADS = {"field": "llama", "num_heads": 5, "num_kv_heads": 1, **PLAIN}


# each kind of method, methods that use weights at several times of a step, and what no class of transformers holds
@pytest.mark.parametrize(
  "note,form,changes",
  [
    ("has a shift in its norms, or both biases", "hf", {**QWEN, "norm_shift": True, "head_dim": 10, "rope": ROPE}),
    ("a multiple of its number of heads", "hf", {**FIVE_HEADS, "head_dim": 4}),
    ("as requested", "hf_code", {"field": "gpt", "head_dim": 10, "tied_head": False, **PLAIN}),
    ("no architecture", "hf", {"field": "gpt", "solver": "rk4", **UNEVEN}),
    ("no architecture", "hf", {"field": "llama", "solver": "strang", "tied_head": True, **UNEVEN}),
    ("no architecture", "hf", {"field": "llama", "solver": "leapfrog", **UNEVEN}),
  ],
)
def test_our_own_modeling_file_holds_what_no_class_of_transformers_does(note, form, changes, tmp_path):
  """It gives our logits, and generates with a cache, of one entry for each evaluation of attention, as without."""
  model = moved_instance(small_model(**{"num_steps": 2, **changes}))
  result = diffeq_nnx.export_hf(model, str(tmp_path / "out"), form=form)
  (found,) = result["notes"]
  assert result["trust_remote_code"] and note in found and "trust_remote_code" in found
  assert result["logit_difference"] < 1e-5
  modes = {os.stat(tmp_path / "out" / name).st_mode for name in ("config.json", "model.safetensors")}
  assert len(modes) == 1  # whoever may read one may read the other
  loaded = load(result)
  assert type(loaded).__module__.startswith("transformers_modules")
  np.testing.assert_allclose(torch_logits(loaded), stored_logits(diffeq_nnx.discretize(model)), rtol=0, atol=1e-5)
  assert len(loaded.layers) == len(model.times(model.grid()).points_UxQ)
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
  model = make(small_model(field="llama", solver="heun", num_steps=2, weights="stored"))
  loaded = load(diffeq_nnx.export_hf(model, str(tmp_path / "out")))
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


class Reversed(Splitting):
  """A solver of a kind of its own, though it is a splitting to Python."""


def test_what_a_folder_can_t_hold_is_told(monkeypatch):
  monkeypatch.setitem(SOLVERS, "strang", Reversed((("feedforward", 1.0), ("attention", 1.0))))
  gpt = small_model(solver="sequential", num_kv_heads=None)
  for changes, parts in (
    ({"head_dim": 10}, ["model.head_dim=10", "--format=hf_code", "--format=stablehlo"]),
    ({"solver": "strang"}, ["--format=stablehlo supports any"]),
  ):
    line = told(lambda: huggingface.choose_architecture(dataclasses.replace(gpt, **changes), "hf"))
    assert all(part in line for part in parts), line


# tokenizers


def byte_pairs(folder, text):
  pairs, said = train_pairs([text], 400, ["<s>", "<|endoftext|>"]), {"bos_token": "<s>", "add_bos_token": True}
  return str(write(folder, tokenizer__json=pairs, tokenizer_config__json=said))


TEXTS = ["", "a", " lead and trail ", "two  spaces\n\n\nlines\r\n\ttab", "\x00\u00a0x\ufb01 1234567"]
TEXTS.append("d\u00e9j\u00e0 vu \u5b57 \U0001f642")


@pytest.fixture(scope="module")
def model():
  """One that has more embeddings than any tokenizer here has tokens."""
  return make(small_model(solver="sequential", num_kv_heads=None, num_steps=1, vocab_size=600, weights="stored"))


def published(folder, said=None, **changes):
  """A sentencepiece model as it is published, with tokens that were added beside it, and several end marks."""
  trained = published_model(**changes)
  size = sentencepiece.SentencePieceProcessor(model_proto=trained).vocab_size()
  said = {
    "added_tokens__json": {"<|im_start|>": size, "<|im_end|>": size + 1},
    "tokenizer_config__json": {"eos_token": "<|im_end|>", "tokenizer_class": "LlamaTokenizer", **(said or {})},
    "generation_config__json": {"eos_token_id": [2, size + 1]},
  }
  return str(write(folder, tokenizer__model=trained, **said))


def without_bytes(folder):
  """A vocabulary that lacks some bytes, with two end marks."""
  given = lacking(model__unk_token="<unk>")
  size = len(given["model"]["vocab"])
  given["added_tokens"].append({**given["added_tokens"][0], "id": size, "content": "<|e|>"})
  return str(write(folder, tokenizer__json=given, generation_config__json={"eos_token_id": [size, 0]}))


SOURCE = inspect.getsource(layouts)
ADDED = [*PUBLISHED_TEXTS, "<|im_start|>a <|im_start|> b <|im_start|>"]
TOKENIZERS = {  # what each is loaded from, and more texts
  "bytes": (lambda folder: "bytes", [SOURCE]),
  "byte pairs": (lambda folder: byte_pairs(folder, SOURCE), [SOURCE]),
  "sentencepiece": (lambda folder: str(write(folder, tokenizer__model=data.train([SOURCE], 500))), [SOURCE]),
  "published": (published, ADDED),
  "legacy": (functools.partial(published, said={"legacy": True}), ADDED),
  "without prefix": (functools.partial(published, add_dummy_prefix=False), ADDED),
  "unknown bytes": (without_bytes, ["no! \U00041234!!"]),
  "missing bytes": (without_bytes, []),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_auto_tokenizer_gives_our_ids_and_marks(kind, model, tmp_path):
  (given, texts), out, policy = TOKENIZERS[kind], tmp_path / "out", "unknown" if kind == "unknown bytes" else None
  ours = data.load_tokenizer(given(tmp_path / "given"), DataConfig(unknown_bytes=policy))
  notes = diffeq_nnx.export_hf(model, str(out), tokenizer=ours)["notes"]
  assert ("left out by AutoTokenizer" in " ".join(notes)) == (kind == "missing bytes")
  theirs, begin = transformers.AutoTokenizer.from_pretrained(out), [] if ours.bos_id is None else [ours.bos_id]
  assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
  assert bool(begin) == (kind in ("byte pairs", "published", "legacy", "without prefix"))
  if kind in ("published", "legacy"):  # whether text after an added token gets a space
    own, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "given"), "<|im_start|>a<|im_start|>b"
    ids = ours.encode(text).tolist()
    assert own.encode(text, add_special_tokens=False) == ids
    assert ours.name_token(ids[1]).startswith("\u2581") == (kind == "legacy")
  for text in [*TEXTS, *texts]:
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == begin + ids
    # Of an unknown byte transformers shows the token, and our tokenizer a replacement character.
    assert theirs.decode(ids) == ours.decode(ids) or kind == "unknown bytes"
  for name in ("config.json", "generation_config.json"):
    marks = json.loads((out / name).read_text())
    assert marks["bos_token_id"] == ours.bos_id
    assert marks["eos_token_id"] == (ours.eos_id if len(ours.end_ids) == 1 else [*ours.end_ids])
  assert "diffeq_nnx" not in json.loads((out / "tokenizer.json").read_text())["model"]
  place = out / "tokenizer.model" if kind == "sentencepiece" else out
  again = data.load_tokenizer(str(place), DataConfig(unknown_bytes=policy))
  assert (again.end_ids, again.bos_id, again.lossless) == (ours.end_ids, ours.bos_id, ours.lossless)
  assert again.encode("two  words\n").tolist() == ours.encode("two  words\n").tolist()


def test_an_export_names_added_tokens_and_where_an_answer_ends_and_says_whether_texts_get_a_space(tmp_path):
  """For programs that read tokenizer.model, or generate with transformers."""
  chat = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
  said = {"generation_config__json": {"eos_token_id": 2}, "chat_template__jinja": chat}
  pieces = tmp_path / "pieces"
  published(pieces, {"eos_token": "</s>", "bos_token": "<s>"})
  write(pieces, **said)
  transformers.LlamaTokenizer.from_pretrained(str(pieces)).save_pretrained(tmp_path / "fallback")
  config = json.loads((tmp_path / "fallback" / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
  fallback = write(tmp_path / "fallback", tokenizer_config__json=config, **said)
  own = write(tmp_path / "own", tokenizer__model=data.train([SOURCE], 500))
  for folder in (pieces, fallback, own):
    ours, out = data.load_tokenizer(str(folder)), tmp_path / f"{folder.name}_out"
    out.mkdir()
    tokenizer_files.write(ours, str(out), 64)
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["add_prefix_space"] == (folder is not own)
    ends = {} if folder is own else {"eos_token_id": [2, *ours.encode_rendered("<|im_end|>").tolist()]}
    assert tokenizer_files.list_ends(ours) == ends and len(ends.get("eos_token_id", [2, 0])) == 2
    if folder is pieces:
      assert [one["content"] for one in config["added_tokens_decoder"].values()] == ["<|im_start|>", "<|im_end|>"]


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
for wrong, part in ((np.zeros((1, 13), np.int32), "length at most 12"), (np.full((1, 2), 31), "ids are 0 to 30")):
  try:
    model(wrong)
  except ValueError as error:
    assert part in str(error), error
  else:
    raise AssertionError(part)
assert not any(name.startswith("diffeq_nnx") for name in sys.modules)
"""


def test_stablehlo_runs_without_this_package(tmp_path):
  model = make(small_model(field="llama", solver="euler", horizon=2.0))
  out = str(tmp_path / "out")
  result = diffeq_nnx.export_stablehlo(model, out, num_steps=2, tokenizer=data.load_tokenizer("bytes"))
  assert result["logit_difference"] < 1e-5
  assert sorted(os.listdir(out)) == sorted(
    [stablehlo.PROGRAM, stablehlo.WEIGHTS, stablehlo.LOADER, "model.json", "tokenizer.json", "tokenizer_config.json"]
  )
  program = jax.export.deserialize(bytearray((tmp_path / "out" / stablehlo.PROGRAM).read_bytes()))
  assert set(program.platforms) == {"cpu", "cuda", "tpu"}
  assert len(program.mlir_module_serialized) < 60_000  # the weights are not in it
  np.save(tmp_path / "tokens.npy", TOKENS_2x12)
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  words = [sys.executable, "-c", ALONE, out]
  done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  ours = stored_logits(diffeq_nnx.discretize(model, 2))
  with np.load(tmp_path / "logits.npz") as theirs:
    close(theirs["whole"], ours)
    close(theirs["part"], ours[:1, :5])  # causal: what follows changes nothing
