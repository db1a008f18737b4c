"""The jobs export and import as inverses, and runs that are imported without text."""

import dataclasses
import json
import math
import os
import shutil

import pytest
import sentencepiece

from diffeq_nnx import data, jobs
from diffeq_nnx.config import Config, ModelConfig
from diffeq_nnx.runs.run import Run
from tests.conftest import change, run_command, run_config, told, write_documents, write_run
from tests.test_import import foreign
from tests.test_published_tokenizers import model as published_model
from tests.test_tokenizer import added_token, spec_of
from tests.test_tokenizer import write as write_files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """(config, work directory) of a run with generated weights and sequential steps."""
  folder = tmp_path_factory.mktemp("text")
  write_documents(folder)
  config = change(run_config(folder), model=dict(solver="sequential", num_kv_heads=None))
  return config, write_run(config, folder / "run")


@pytest.fixture(scope="module")
def exported(written):
  """(what the job export says of the run, the folder that it wrote)."""
  config, workdir = written
  out = f"{os.path.dirname(workdir)}/out"
  return jobs.run("export", config, workdir, out=out), out


def test_a_run_exported_and_imported_has_the_same_loss(written, exported, tmp_path, capsys):
  (config, workdir), (result, out), new = written, exported, str(tmp_path / "new")
  assert (result["architecture"], result["step"], result["trust_remote_code"]) == ("GPT2LMHeadModel", 0, False)
  assert result["logit_difference"] < 1e-5
  jobs.run("import", dataclasses.replace(config, model=ModelConfig()), new, from_hf=out)
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_steps"] == 2
  imported = Run.open(new).started
  assert imported.data.tokenizer == os.path.join(new, "tokenizer.model")
  before, after = jobs.run("evaluate", config, workdir), jobs.run("evaluate", imported, new)
  assert math.isclose(before["loss"], after["loss"], rel_tol=1e-5) and after["step"] == 0
  assert "holds a run already" in told(lambda: jobs.run("import", config, new, from_hf=out))
  assert "holds something already" in told(lambda: jobs.run("export", config, workdir, out=out))
  jobs.run("import", config, str(tmp_path / "half"), from_hf=out, model_settings=["model.dtype=bfloat16"])
  assert Run.open(str(tmp_path / "half")).started.model.dtype == "bfloat16"


def test_tokens_that_the_model_has_no_embedding_for_are_told(tmp_path, caplog):
  spec = spec_of()
  spec["added_tokens"].append(added_token(300, "<pad>", special=True))
  folder = write_files(tmp_path / "there", tokenizer__json=spec)
  foreign("llama", vocab_size=300).save_pretrained(folder)
  jobs.run("import", jobs.JOBS["import"].prepared(Config()), str(tmp_path / "run"), from_hf=str(folder))
  assert "no embedding for 1 tokens of its tokenizer (<pad>)" in caplog.text


def test_an_imported_run_reads_text_as_its_tokenizer_was_trained(written, tmp_path, capsys):
  """Its directory says how, without the folder; text that is prepared with its file fits it."""
  config, out, new = written[0], tmp_path / "out", str(tmp_path / "new")
  trained = published_model()
  theirs = sentencepiece.SentencePieceProcessor(model_proto=trained)
  foreign("llama", vocab_size=theirs.vocab_size() + 1).save_pretrained(out)
  marks = {"bos_token_id": 1, "eos_token_id": [2, 9]}
  files = {"tokenizer__model": trained, "added_tokens__json": {"<|im_start|>": theirs.vocab_size()}}
  config_json = json.loads((out / "config.json").read_text()) | marks
  write_files(out, **files, generation_config__json=marks, config__json=config_json)
  jobs.run("import", config, new, from_hf=str(out))
  shutil.rmtree(out)
  tokenizer = Run.open(new).tokenizer
  assert (tokenizer.end_ids, tokenizer.bos_id) == ((2, 9), 1)
  assert tokenizer.encode("Hello  world\nx").tolist() == theirs.encode("Hello  world\nx")
  assert tokenizer.encode("<|im_start|>").tolist() == [theirs.vocab_size()]
  own = dataclasses.replace(config.data, tokenizer=os.path.join(new, "tokenizer.model"))
  assert data.load(own, 500, seed=0).tokenizer.hash == tokenizer.hash


def test_a_model_that_can_t_be_exported_is_told(written, tmp_path):
  config, workdir = written
  grouped = change(config, model=dict(num_kv_heads=2))
  line = told(lambda: jobs.run("export", grouped, workdir, out=str(tmp_path / "out")))
  assert "GPT-2 has no grouped-query heads" in line and not (tmp_path / "out").exists()


# a run without text, by command lines


def command(capsys, *arguments: str) -> dict:
  """The line of JSON that a command line prints, if any."""
  capsys.readouterr()
  assert run_command("--num_processes=1", *arguments) == 0
  out = capsys.readouterr().out
  return json.loads(out) if out.strip() else {}


def refused(capsys, *arguments: str) -> str:
  """The last line of what a command line prints that holds a mistake."""
  assert run_command("--num_processes=1", *arguments) == 2
  return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def textless(written, exported):
  """(the settings that name text and a short training, a work directory) of an import without text."""
  config, out, workdir = written[0], exported[1], f"{exported[1]}_imported"
  arguments = (f"--from_hf={out}", f"--workdir={workdir}", "--set=model.seq_len=8")
  assert run_command("--num_processes=1", "--job=import", *arguments) == 0
  text = dict(source=config.data.source, cache_dir=config.data.cache_dir, validation_fraction=0.3)
  settings = [f"--config.data.{key}={value}" for key, value in text.items()]
  short = ("train.steps=2", "train.batch_size=4", "eval.max_batches=2", "train.peak_tflops=0.1")
  return [*settings, *(f"--config.{setting}" for setting in short)], workdir


def test_a_run_without_text_generates_and_says_what_needs_text(textless, capsys):
  text, workdir = textless
  run = Run.open(workdir)
  assert run.started.model.seq_len == 8 and run.params["positions"].shape[0] == 8
  assert run_command("--num_processes=1", "--job=generate", f"--workdir={workdir}", "--prompt=a", "--max_tokens=2") == 0
  for job in ("--job=evaluate", "--job=train"):
    assert "data.source=none: the run has no text yet; name it" in refused(capsys, job, f"--workdir={workdir}")
  assert math.isfinite(command(capsys, "--job=evaluate", f"--workdir={workdir}", *text)["loss"])
  assert Run.open(workdir).started.data.source == "none"


def test_a_run_without_text_is_made_into_others_with_any_text(textless, tmp_path, capsys):
  text, workdir = textless
  source = f"--from_workdir={workdir}"
  bare = command(capsys, "--job=discretize", source, f"--workdir={tmp_path}/bare")
  assert bare["before"] == bare["after"] == {"num_steps": 2}
  made = command(capsys, "--job=continuous", source, f"--workdir={tmp_path}/made", *text)
  assert made["before"]["loss"] == pytest.approx(made["after"]["loss"], abs=1e-5)
  run = Run.open(f"{tmp_path}/made")
  assert run.started.data.source.startswith("text:") and run.started.train.steps == 2
  assert os.path.dirname(run.started.data.tokenizer) == f"{tmp_path}/made"
  other = ("--job=discretize", source, f"--workdir={tmp_path}/x", *text, "--config.data.tokenizer=bytes")
  assert "was trained with another tokenizer" in refused(capsys, *other) and not (tmp_path / "x").exists()


def test_a_run_without_text_takes_the_first_that_it_is_trained_on(textless, tmp_path, capsys):
  """It stays the same run, from which others were made; tests/test_adapters.py fine-tunes one that has no text."""
  text, workdir = textless
  copy = f"{tmp_path}/copy"
  shutil.copytree(workdir, copy)
  before = Run.open(copy).hash
  command(capsys, f"--workdir={copy}", *text)
  run = Run.open(copy)
  assert run.step == 2 and run.hash == before
  assert run.started.data.source.startswith("text:") and run.corpus
  command(capsys, f"--workdir={copy}")  # is finished
  assert "belongs to another run: data.source" in refused(capsys, f"--workdir={copy}", "--config.data.source=builtin")


def test_an_import_is_not_longer_than_its_checkpoint_and_changes_no_other_model_key(exported, tmp_path, capsys):
  for setting, part in (("seq_len=17", "17"), ("num_heads=2", "only model.seq_len, model.dtype, model.dropout")):
    arguments = (f"--from_hf={exported[1]}", f"--workdir={tmp_path}/new", f"--config.model.{setting}")
    assert part in refused(capsys, "--job=import", *arguments) and not (tmp_path / "new").exists()
