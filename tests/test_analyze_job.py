"""--job=analyze: a report of any run, looked at in a browser."""

import contextlib
import io
import json
import os
import shutil

import numpy as np
import pytest

from diffeq_nnx.jobs.analyze import analyze
from tests.browser import chromium, opened
from tests.conftest import run_command, told

TEXT = "Document 3 tells"
PICTURES = """spectra_real spectra_magnitude spectra_positive_share spectra_induction sensitivity_exact
  sensitivity_per_token attention_rollout gradient_times_input sensitivity_spectra clustering_model""".split()


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory):
  """(the line of JSON, the folder, its numbers) of a finished run's report."""
  own, printed = tmp_path_factory.mktemp("analyzed") / "run", io.StringIO()
  shutil.copytree(finished[1], own)  # other tests use the run too
  with contextlib.redirect_stdout(printed):
    arguments = [f"--workdir={own}", f"--text={TEXT}", "--leading=3", "--num_processes=1"]
    assert run_command("--job=analyze", *arguments) == 0
  with np.load(own / "report" / "numbers.npz") as numbers:
    return json.loads(printed.getvalue()), own / "report", dict(numbers)


def test_the_folder_holds_page_pictures_and_numbers(report):
  result, folder, numbers = report
  assert {name.removesuffix(".png") for name in os.listdir(folder)} == {*PICTURES, "index.html", "numbers.npz"}
  n = result["position"]
  assert numbers["tokens"].shape == (result["tokens"],) and n == result["tokens"] - 1
  assert numbers["exponents_exact"].shape == numbers["exponents_per_token"].shape == (n + 1, 3)
  assert result["leading_exponent"] == pytest.approx(numbers["exponents_exact"][n, 0], abs=1e-4)
  assert np.iscomplexobj(numbers["eigenvalues_qk"]) and numbers["eigenvalues_qk"].shape == (2, 4, 4)
  assert numbers["between_times"].shape == (8,) and result["num_steps"] == 2
  assert all(np.isfinite(values).all() for name, values in numbers.items())
  before = numbers["exponents_exact"][:n, 0]
  assert result["most_sensitive_to"]["position"] == before.argmax()


def test_the_page_draws_in_a_browser_also_in_a_narrow_window(report):
  """Wide ones are looked at in tests/test_pages.py."""
  with chromium() as browser, opened(browser, str(report[1] / "index.html"), 390, True) as page:
    page.evaluate("drawAll().then(() => true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".js-plotly-plot:has(.main-svg)").count() == 3 + 3 + 2 + 1 + 2 + 2
    text = page.inner_text("body")
    assert "Sensitivity to each token" in text and "tells" in text.replace("·", " ").replace("\n", "")
    assert "NaN" not in text and "undefined" not in text


def test_what_can_t_be_is_told(finished, capsys):
  config, workdir = finished
  assert "--text='': gives no tokens" in told(lambda: analyze(config, str(workdir), text=""))
  assert run_command("--job=analyse", f"--workdir={workdir}", "--num_processes=1", "--times=0.5,2") == 2
  assert "times=[0.5, 2.0]: must be one or more times from 0 to 1" in capsys.readouterr().err
