"""demo.ipynb: it runs whole, shortened, and the committed file holds what it showed when it ran in order."""

import re
import shutil

import nbclient
import nbformat
import pytest

from tests.attacks import ROOT

SHORT = {"DEMO_STEPS": "2", "DEMO_TUNING_STEPS": "1", "DEMO_COUNTS": "6", "DEMO_TOKENS": "4", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
  """The committed file."""
  return nbformat.read(ROOT / "demo.ipynb", as_version=4)


def code_cells(notebook) -> list[nbformat.NotebookNode]:
  """Its cells of code."""
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell) -> set[str]:
  """The MIME types of what a cell shows, `stdout` and `stderr`, and the types of other outputs."""
  return {
    kind for output in cell.outputs for kind in output.get("data", {output.get("name", output.output_type): None})
  }


@pytest.mark.slow(reason="a minute; each part of the demo has tests of its own")
@pytest.mark.timeout(900)
def test_the_demo_runs_whole_and_shows_what_the_file_shows(notebook, tmp_path, monkeypatch):
  for name, value in {**SHORT, "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}.items():
    monkeypatch.setenv(name, value)
  shutil.copy(ROOT / "demo.ipynb", tmp_path)
  fresh = nbformat.read(tmp_path / "demo.ipynb", as_version=4)
  for cell in code_cells(fresh):
    cell.outputs, cell.execution_count = [], None
  nbclient.NotebookClient(
    fresh, kernel_name="python3", timeout=600, resources={"metadata": {"path": str(tmp_path)}}
  ).execute()  # raises where a cell does
  shutil.rmtree(tmp_path)  # checkpoints of four runs
  for cell, committed in zip(code_cells(fresh), code_cells(notebook)):
    assert kinds(cell) == kinds(committed), cell.source


def test_the_committed_file_was_executed_in_order_and_shows_nothing_of_where_it_ran(notebook):
  """The table of perplexities has a column for each number of steps that the file itself names."""
  nbformat.validate(notebook)
  cells = code_cells(notebook)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert not any(kinds(cell) & {"error", "stderr"} for cell in cells)
  (settings,) = (cell.source for cell in cells if "DEMO_COUNTS" in cell.source)
  counts = re.search(r'"DEMO_COUNTS", "([\d ]+)"', settings)[1].split()
  told = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
  assert re.search(r"^steps\s+" + r"\s+".join(counts) + "$", told, re.MULTILINE)
  path = ROOT / "demo.ipynb"
  assert path.stat().st_size < 1_500_000
  told = re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8"))
  assert not re.search(r"/(tmp|home|root|usr|work|Users|content)/", told)
  assert set(notebook.metadata) <= {"kernelspec", "language_info", "colab"}
  assert notebook.metadata.kernelspec.name == "python3"
  assert not any("execution" in cell.metadata for cell in notebook.cells)
