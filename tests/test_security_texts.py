"""Prepared text of a stranger runs no code and leads nowhere else; texts stay texts in reports and on terminals."""

import html.parser
import json
import os
import shutil
import sys

import pytest

from diffeq_nnx import data, files
from diffeq_nnx.analysis.pages import page
from diffeq_nnx.analysis.pages.charts import Chart, ColoredText, Heatmap, Line, Panel, Points, Table
from diffeq_nnx.config import DataConfig
from diffeq_nnx.data import sources
from diffeq_nnx.errors import printable
from diffeq_nnx.harness import report
from diffeq_nnx.inference.generation import Continuation
from diffeq_nnx.jobs import generate
from diffeq_nnx.parallel.console import draw, print_result, say
from tests.attacks import TAG, bomb, give_run, marker, program, write_json  # noqa: F401  a fixture
from tests.conftest import mistake, told
from tests.prepared_text import load, prepared, small_tasks, text  # noqa: F401  fixtures

# ---- prepared text and its sources


def read_all(corpus):
  """All tokens of both splits."""
  return [split.tokens[:] for split in (*corpus.train.splits, corpus.validation)]


@pytest.fixture
def theirs(prepared, tmp_path):
  """A stranger's copy of the shards."""
  return shutil.copytree(prepared, tmp_path / "theirs" / "shards")


@pytest.mark.parametrize("what", ["shard", "tokenizer"])
def test_a_manifest_names_files_of_its_folder_alone(prepared, theirs, tmp_path, what):
  """What it names is there, and fits."""
  manifest = json.loads((theirs / "manifest.json").read_text())
  entry = manifest["tokenizer"] if what == "tokenizer" else manifest["splits"]["train"]["shards"][0]
  name = entry["file"]
  shutil.copy(prepared / name, tmp_path / "theirs" / name)
  files.write(f"memory://{name}", (prepared / name).read_bytes())
  for outside in (f"../{name}", str(prepared / name), f"./{name}", f"memory://{name}", "", ".."):
    entry["file"] = outside
    write_json(theirs / "manifest.json", manifest)
    assert "manifest.json is damaged" in told(lambda: load(theirs)), outside


def test_a_manifest_of_any_shape_is_one_line(theirs):
  whole = (theirs / "manifest.json").read_text()
  for number, change in enumerate(
    (
      lambda one: one["splits"].update(other=one["splits"]["train"]),
      lambda one: one["splits"]["train"]["shards"][0].update(size="x"),
      lambda one: one["splits"]["train"].update(bytes=-1),
      lambda one: one["tokenizer"].update(file=5),
      lambda one: one.update(splits=[]),
    )
  ):
    manifest = json.loads(whole)
    change(manifest)
    write_json(theirs / "manifest.json", manifest)
    assert "manifest.json is damaged" in told(lambda: load(theirs)), number


def test_no_file_of_prepared_text_is_read_as_a_pickle(theirs, marker):
  for name in sorted({*os.listdir(theirs)} - {".lock"}):
    whole = (theirs / name).read_bytes()
    (theirs / name).write_bytes((bomb(marker) + bytes(len(whole)))[: len(whole)])
    told(lambda: read_all(load(theirs)))
    (theirs / name).write_bytes(whole)


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_urls_that_compute_are_refused(tmp_path, kind):
  """fsspec fills templates in the file that a reference:: URL names."""
  write_json(tmp_path / "refs.json", {"version": 1, "templates": {"x": "{{ 6 * 7 }}"}, "refs": {"a": ["{{x}}"]}})
  for url in (f"reference::file://{tmp_path}/refs.json", f"simplecache::reference::file://{tmp_path}/refs.json"):
    line = told(lambda: data.load(DataConfig(source=f"{kind}:{url}", tokenizer="bytes", num_processes=1), 257, 0))
    assert "URLs through reference:: are not read" in line


def test_a_tfds_data_set_imports_no_module(tmp_path, marker, monkeypatch):
  """TFDS imports the module of each class that features.json names; the working directory is on Python's path."""
  pytest.importorskip("tensorflow_datasets")
  (tmp_path / "theirs.py").write_text(program(marker))
  monkeypatch.syspath_prepend(tmp_path)
  folder = tmp_path / "sets" / "theirs" / "1.0.0"
  folder.mkdir(parents=True)
  write_json(folder / "dataset_info.json", {"name": "theirs", "version": "1.0.0", "fileFormat": "array_record"})
  write_json(folder / "features.json", {"pythonClassName": "theirs.Feature", "jsonFeature": {"json": "{}"}})
  options = sources.Options(tfds_dir=str(tmp_path / "sets"))
  line = told(lambda: sources.open_source("tfds:theirs", options=options))
  assert "features.json names the class 'theirs.Feature'" in line


# ---- reports


class Tags(html.parser.HTMLParser):
  """Which elements a page has, with their attributes' names and the text of each."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.texts = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, tuple(name for name, _ in attrs)))

  def handle_data(self, text):
    self.texts.append(text)


def whole_page(path, text):
  """A page whose every text is this one."""
  points = Points([0, 1], [1, 2], label=text, hover=[text, text + "2"], color=[0, 1])
  panels = [
    Panel(text, text, text, [points, Line([0, 1], [1, 2], label=text)], color_label=text),
    Panel(text, text, text, heatmap=Heatmap([text], [text], [[1.0]]), color_label=text),
  ]
  items = [
    Chart("chart", text, text, panels),
    ColoredText("text", text, text, [text, text], [0.0, 1.0], text),
    Table(text, text, [text], [[text]]),
  ]
  page.write_page(str(path), text, [(text, text)], [(text, text, items)])
  return Tags(path.read_text(encoding="utf-8"))


def test_a_page_has_no_element_or_attribute_from_a_text(tmp_path):
  """That the data of its charts are JSON without a tag: tests/test_pages.py."""
  text = f"""{TAG}" onmouseover=alert(1) x="' onload='alert(1)<!--"""
  plain, hostile = whole_page(tmp_path / "plain.html", "plain"), whole_page(tmp_path / "hostile.html", text)
  assert plain.tags == hostile.tags
  assert any(text in shown for shown in hostile.texts)


def results(task, **config):
  entry = {"acc,none": 0.5, "acc_stderr,none": 0.1, f"{task},<b>": 1.0}
  return [{"results": {task: entry}, "config": config, "n-samples": {task: {"effective": 1}}, "versions": {}}]


def test_the_tables_of_the_harness_show_texts_as_texts():
  text = f"{TAG}a | b\n\n# c[x](javascript:alert(1))`$\\frac{{$`\x1b[2J_$x^{{"
  ours, theirs = results(text, dtype="a"), results(text, dtype=text)
  notes = [text, *report.note_differences(ours, theirs)]
  for baseline, columns in ((theirs, 6), ([], 9)):
    table = report.make_table(ours, baseline, notes)
    lines = table.splitlines()
    assert "<" not in table and "\x1b" not in table and len(lines) == 2 + 2 + 1 + 2
    for line in lines[:4]:
      assert line.replace("\\|", "").count("|") == columns + 1, line
    assert "](" not in table.replace("\\]", "")


@pytest.mark.parametrize(
  "content", ["bomb", "[" * 100_000, '{"results": {}, "config": 5}', '{"results": {"a": {"acc,none": 1}}}']
)
def test_a_baseline_of_any_shape_is_one_line(tmp_path, marker, content):
  (tmp_path / "results.json").write_bytes(bomb(marker) if content == "bomb" else content.encode())
  assert "is no results.json of lm_eval" in told(lambda: report.read(str(tmp_path / "results.json"), "harness"))


# ---- terminals


def test_control_characters_do_not_reach_a_terminal(capsys, tmp_path):
  text = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\r\ud800"
  assert printable(f"a\tb\n{text}").replace("\n", "").replace("\t", "").isprintable()
  joined = "\u0645\u06cc\u200c\u062e\u0648 \U0001f468\u200d\U0001f469 \u3000 \u00a0 \u00ad \U0001fae8"
  assert printable(joined) == joined  # what languages and pictures need
  say(f"a {text}")
  give_run(tmp_path, harness={"folder": "harness"}, model={f"x{text}": 1})
  code, line = mistake(["--job=evaluate", f"--workdir={tmp_path}"], capsys)
  assert code == 2 and "unknown key" in line and line.isprintable()


def test_generated_text_on_a_terminal_is_escaped(monkeypatch, capsys):
  """A model is a stranger's as its text is; what is written to a file or a pipe is exact."""
  hostile = "a\x1b]0;title\x07\n"

  def continue_them(prompts, ids, on_text):
    if on_text:
      on_text(0, hostile)
    return [(0, Continuation("p", hostile, [1], "eos"))]

  for terminal, expected in ((True, "a\\x1b]0;title\\x07\n\n"), (False, hostile + "\n")):
    monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
    capsys.readouterr()
    generate._print_texts(continue_them, ["p"], [[1]])
    assert capsys.readouterr().out == expected


def test_a_picture_that_cannot_be_made_costs_a_line_and_results_are_json(tmp_path, capsys):
  draw(str(tmp_path / "x.png"), (1, 1), lambda figure: figure.no_such_method())
  assert "x.png: can't be drawn (AttributeError" in capsys.readouterr().err and not [*tmp_path.iterdir()]
  print_result("evaluate", "runs/x", values=[{"loss": float("nan")}, (float("inf"), 1.0)])
  assert json.loads(capsys.readouterr().out, parse_constant=None)["values"] == [{"loss": None}, [None, 1.0]]
