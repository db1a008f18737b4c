"""Downstream evaluation as a job and as lm_eval's own command line."""

from importlib import metadata
import json
import math
import os
import re
import sys

import numpy as np
import pytest

from tests.harness_cases import WITHOUT_ENVIRONMENT, task_folder, without_environment  # noqa: F401  fixtures

pytest.importorskip("lm_eval")

from diffeq_nnx import config as config_lib
from diffeq_nnx.data import load_tokenizer
from diffeq_nnx.harness import __main__ as command_line
from diffeq_nnx.harness import report
from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.jobs.harness import evaluate_downstream
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from launch import local
from tests.conftest import Lazy, change, run_config, told, write_run
from tests.processes import Process
from tests.test_data import write_jsonl

tasks = Lazy("diffeq_nnx.harness.tasks")
pytestmark = pytest.mark.filterwarnings("default")  # of lm_eval and its dependencies


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """(config, work directory) of a run at step 0 that reads 96 bytes at a time; not to be changed."""
  folder = tmp_path_factory.mktemp("run")
  settings = ["model.vocab_size=257", "model.seq_len=96", "data.tokenizer=bytes"]
  config = config_lib.apply_settings(run_config(folder), settings)
  write_run(config, folder / "run", load_tokenizer("bytes"))
  return config, folder / "run"


@pytest.fixture(scope="module")
def evaluate(run, task_folder):
  """Runs the job with these settings of config.harness, and returns the folder of its results."""
  config, workdir = run

  def evaluate(baseline=None, num_steps=None, **settings):
    values = {"tasks": "choice", "include_path": str(task_folder), "default_tasks": False, "limit": 6, **settings}
    changed = change(config, harness=values, eval=dict(num_steps=num_steps))
    evaluate_downstream(changed, str(workdir), baseline=None if baseline is None else str(baseline))
    return workdir / changed.harness.folder

  return evaluate


@pytest.fixture(scope="module")
def measured(evaluate, task_folder):
  """The folder of the results of a text and of questions, with no and with two examples before them."""
  return evaluate(text=f"jsonl:{task_folder}/texts.jsonl", num_fewshot=(0, 2))


def test_the_job_writes_results_and_a_table(measured):
  two = json.loads((measured / "results_2shot.json").read_text())
  assert two["n-shot"]["choice"] == 2 and two["config"]["begin_mark"] == "auto"
  assert json.loads((measured / "perplexity.json").read_text())["rolling_windows"].startswith("disjoint")
  tables = (measured / "table.md").read_text()
  assert "|Tasks " in tables and "|     0|acc " in tables and "|     2|acc " in tables and "±" in tables


def test_a_comparison_notes_what_differs_and_replaces_earlier_results(run, measured, evaluate, capsys):
  (run[1] / "again").mkdir()
  (run[1] / "again" / "results_5shot.json").write_text("of an earlier job")
  baseline = measured / "results_0shot.json"
  folder = evaluate(baseline, num_fewshot=(0, 1), limit=8, begin_mark="always", folder="again")
  found = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert found["job"] == "harness" and set(found["acc"]) == {"choice (0-shot)", "choice (1-shot)"}
  assert sorted(os.listdir(folder)) == ["results_0shot.json", "results_1shot.json", "table.md"]
  table = (folder / "table.md").read_text()
  assert re.search(r"\| choice \| 0 \| acc \| 0[.\d]+ ± 0[.\d]+ \| 0[.\d]+ ± 0[.\d]+ \| [+-]0[.\d]{5} \|", table)
  for part in (
    "begin mark: always",
    "the baseline lacks 2 of these 4 numbers",
    'begin_mark: "always" here, "auto" for the baseline',
    "limit: 8 here, 6 for the baseline",
    "another number of questions for the baseline: choice",
  ):
    assert part in table
  evaluate(baseline, num_fewshot=(1,), limit=1, folder="third")
  assert "no number in common" in capsys.readouterr().err and (run[1] / "third" / "results_1shot.json").exists()


def test_how_a_baseline_was_made_is_noted_where_it_differs():
  """The command line of lm_eval says beside its config how chats were written."""
  limited, plain = {"config": {"limit": 100}}, {"config": {"limit": 100.0}, "chat_template": ""}
  turns = {"chat_template": "{{ messages }}", "fewshot_as_multiturn": True}
  sampled = [("num_steps", 6, 8), ("gen_kwargs", None, {"temperature": 1}), ("fewshot_seed", 1234, 42)]
  for ours, theirs, differing in (
    (limited, plain, []),
    ({"config": {"limit": 100, "chat_template": "examples are turns"}}, plain | turns, []),
    (limited, plain | turns, [("chat_template", None, "examples are turns")]),
    (limited, plain | {"system_instruction": "Be kind."}, [("system_instruction", None, "Be kind.")]),
    ({"config": {key: own for key, own, _ in sampled}}, {"config": {key: its for key, _, its in sampled}}, sampled),
  ):
    ours, theirs = ({"results": {"a": {"acc,none": 0.5}}, **one} for one in (ours, theirs))
    notes = [f"{key}: {json.dumps(own)} here, {json.dumps(its)} for the baseline" for key, own, its in differing]
    assert report.note_differences([ours], [theirs]) == notes
    versions = report.note_differences([ours | {"versions": {"a": 1}}], [theirs | {"versions": {"a": 2.0}}])
    assert versions == [*notes, "with another version of the task for the baseline: a"]


@pytest.mark.parametrize(
  "splits",
  [["test_split"], ["validation_split"], ["training_split", "validation_split"], ["training_split", "test_split"]],
)
def test_no_question_is_among_its_own_examples(splits, tmp_path):
  records = [{"q": f"Item {number}?", "choices": ["yes", "no"]} for number in range(12)]
  write_jsonl(tmp_path / "own.jsonl", records)
  files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"some": str(tmp_path / "own.jsonl")}}}
  task = {"task": "own", "output_type": "multiple_choice", **files, **dict.fromkeys(splits, "some")}
  task |= {"doc_to_text": "{{q}}", "doc_to_choice": "choices", "doc_to_target": "yes"}
  (tmp_path / "own.yaml").write_text(json.dumps(task))
  with tasks.mending():
    own = tasks.make_manager(str(tmp_path), False).load(["own"])["tasks"]["own"]
  own.set_fewshot_seed(1234)
  contexts = [own.fewshot_context(document, 5) for document in own.eval_docs]
  assert [context.count(one["q"]) for context, one in zip(contexts, records)] == [1] * 12


def test_a_perplexity_beyond_all_numbers_is_infinite():
  from lm_eval.api import metrics

  with tasks.mending():
    assert metrics.weighted_perplexity([(-1860.0, 1)]) == math.inf and metrics.perplexity([-1.0]) == math.e
  with pytest.raises(OverflowError):
    metrics.perplexity([-1860.0])


def test_the_average_of_a_group_stands_for_its_subtasks():
  entry = {"acc,none": 0.5, "acc_stderr,none": 0.1, "perplexity,none": 3.0, "perplexity_stderr,none": "N/A"}
  groups = {"groups": {"g": {"acc,none": 0.25}, "h": {}}, "group_subtasks": {"g": ["a"], "h": ["b"]}}
  results = {"results": dict.fromkeys("abc", entry), "n-shot": {"b": 5}, **groups}
  found = report.collect_estimates([results])
  assert {key.task for key in found} == {"b", "c", "g"} and found["b", 5, "acc", "none"] == (0.5, 0.1)
  assert found["c", None, "perplexity", "none"].error is None and found["g", None, "acc", "none"].value == 0.25


def test_mistakes_are_reported_in_one_line(evaluate, task_folder, tmp_path):
  line = lambda **arguments: told(lambda: evaluate(**arguments))
  assert "harness.tasks='choise': there is no such task; did you mean 'choice'?" == line(tasks="choise")
  assert "harness.tasks=paper: arc_easy" in line(tasks="paper")
  assert "there is no such folder" in line(include_path="nowhere")
  assert f"--baseline={tmp_path}: holds no harness/results.json" in line(baseline=tmp_path)
  assert "there is no such file" in line(baseline=tmp_path / "nothing")
  task = json.loads((task_folder / "choice.yaml").read_text())
  task |= {"task": "broken", "doc_to_text": "{{nonsense.x}}"}
  (tmp_path / "broken.yaml").write_text(json.dumps(task))
  assert "UndefinedError: 'nonsense' is undefined" in line(tasks="broken", include_path=str(tmp_path), limit=2)


def test_an_error_loses_no_finished_numbers_and_settings_are_checked_before_scoring(
  run, evaluate, task_folder, tmp_path, monkeypatch
):
  """Examples come from the questions, of which there are 20."""
  text = f"jsonl:{task_folder}/texts.jsonl"
  assert "Sample larger than population" in told(
    lambda: evaluate(text=text, num_fewshot=(0, 40), limit=2, folder="partly")
  )
  assert sorted(os.listdir(run[1] / "partly")) == ["perplexity.json", "results_0shot.json"]
  (tmp_path / "choice.yaml").write_text((task_folder / "choice.yaml").read_text())
  monkeypatch.setattr(DiffEqLM, "loglikelihood", None)
  task = json.loads((task_folder / "continuing.yaml").read_text())
  for settings, problem in (
    ({"max_gen_toks": 96}, "at least one"),
    ({"num_beams": 2}, "num_beams=2: is not supported"),
  ):
    task |= {"task": "long", "generation_kwargs": settings}
    (tmp_path / "long.yaml").write_text(json.dumps(task))
    assert problem in told(lambda: evaluate(tasks="choice,long", include_path=str(tmp_path)))


def test_a_text_is_read_by_other_keys_than_the_run_s(run, tmp_path):
  (tmp_path / "a.jsonl").write_text('{"body": "Rain on hills."}\n')
  settings = dict(tasks="none", text=f"jsonl:{tmp_path}/a.jsonl", folder="by_key")
  by_key = lambda key: change(run[0], harness=settings, data=dict(text_key=key))
  assert 'no key "text"' in told(lambda: evaluate_downstream(by_key("text"), str(run[1])))
  assert evaluate_downstream(by_key("body"), str(run[1]))["text"]["bytes"] == 14


def test_errors_of_perplexities_need_no_forks_and_stdout_is_one_line(evaluate, capsys, monkeypatch):
  monkeypatch.setattr(os, "fork", None)
  monkeypatch.setenv("LOCAL_RANK", "1")  # as some launchers set it
  folder = evaluate(tasks="last", num_steps=1, folder="errors")
  (line,) = capsys.readouterr().out.splitlines()
  assert json.loads(line)["acc"]
  results = json.loads((folder / "results.json").read_text())
  assert results["results"]["last"]["perplexity_stderr,none"] > 0 and os.environ["LOCAL_RANK"] == "1"
  assert results["config"]["num_steps"] == 1  # the config's, changed by the command


def test_the_section_is_no_part_of_a_run_and_old_runs_lack_it(run, tmp_path):
  config, workdir = run
  other = config_lib.apply_settings(config, ["harness.tasks=piqa,sciq", "harness.num_fewshot=(0, 5)"])
  assert other.harness.tasks == "piqa,sciq" and other.harness.num_fewshot == (0, 5)
  assert workdir_lib.identity(other) == workdir_lib.identity(config)
  known = json.loads((workdir / "run.json").read_text())
  del known["config"]["harness"]
  (tmp_path / "run.json").write_text(json.dumps(known))
  assert Run.open(str(tmp_path)).started == config


@pytest.mark.slow(reason="two starts of a job with lm_eval")
def test_the_job_s_command_line_with_two_processes_of_two_devices_agrees_with_one(run, task_folder, measured):
  """The job with settings on top of the run's own config."""
  settings = f"tasks=choice,continuing num_fewshot=(0,) default_tasks=False limit=6 include_path={task_folder}"
  settings += f" folder=by_two text=jsonl:{task_folder}/texts.jsonl"
  arguments = [f"--config.harness.{setting}" for setting in settings.split()]
  commands = local.commands(2, local.free_port(), ["--job=harness", f"--workdir={run[1]}", *arguments])
  running = [Process(line[3:], local.environment(2), WITHOUT_ENVIRONMENT) for line in commands]
  assert [process.end() for process in running] == [0, 0], running[0].lines[-20:]
  (line,) = running[0].out.splitlines()
  assert json.loads(line)["acc"] and running[1].out == ""
  read = lambda folder: [json.loads((folder / f"{name}.json").read_text()) for name in ("results_0shot", "perplexity")]
  (alone, text), (by_two, text_by_two) = read(measured), read(run[1] / "by_two")
  assert np.isclose(text_by_two["nats"], text["nats"], rtol=1e-6)
  assert text_by_two["tokens"] == text["tokens"] > 6
  assert (by_two["config"]["processes"], by_two["config"]["devices"]) == (2, 4)
  for metric in ("acc,none", "acc_norm,none"):
    assert by_two["results"]["choice"][metric] == alone["results"]["choice"][metric]


def test_lm_eval_finds_the_model_by_its_entry_point():
  """Releases of lm_eval after 0.4.13 look models up there, so that `lm_eval --model diffeq_nnx` is enough."""
  try:
    metadata.distribution("diffeq_nnx")
  except metadata.PackageNotFoundError:
    pytest.skip("the package is not installed")
  (found,) = metadata.entry_points(group="lm_eval.models", name="diffeq_nnx")
  assert found.load() is DiffEqLM


def test_the_paper_s_group_is_found_however_tasks_are_given(monkeypatch):
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)
  monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
  monkeypatch.setenv("DISABLE_MULTIPROC", "1")
  for words, added in (
    ("--tasks=a", True),
    ("-t a", True),
    ("--model x", False),
    ("--tasks a --include_path=b", False),
  ):
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split()])
    command_line.main()
    assert (sys.argv[-2:] == ["--include_path", tasks.GROUPS]) == added


def test_the_command_line_says_in_one_line_that_a_task_is_unknown(monkeypatch, capsys):
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)
  monkeypatch.setattr(sys, "argv", "lm_eval --model diffeq_nnx --tasks nosuch --include_path=tests".split())
  with pytest.raises(SystemExit) as ended:
    command_line.main()
  assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1] == "error: Tasks not found: nosuch"
