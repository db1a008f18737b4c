"""--job=analyze: a report of any run, looked at in a browser."""

import json
import os
import shutil

import numpy as np
import pytest

from diffeq_nnx.jobs.analyze import analyze, pieces, text_ids
from diffeq_nnx.runs.run import Run
from tests.browser import chromium, opened
from tests.conftest import XLA_FLAGS, run_command, told
from tests.processes import Process

TEXT = "Document 3 tells"
PICTURES = {
  "spectra_real",
  "spectra_magnitude",
  "spectra_positive_share",
  "spectra_induction",
  "sensitivity_exact",
  "sensitivity_per_token",
  "attention_rollout",
  "gradient_times_input",
  "sensitivity_spectra",
  "clustering_model",
}


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory):
  """(the line of JSON, the folder, its numbers) of a finished run's report."""
  config, workdir = finished
  own = tmp_path_factory.mktemp("analyzed") / "run"  # a copy: other tests use the run too
  shutil.copytree(workdir, own)
  result = analyze(config, str(own), text=TEXT, leading=3)
  return result, own / "report", dict(np.load(own / "report" / "numbers.npz"))


def test_the_folder_holds_page_pictures_and_numbers(report):
  result, folder, numbers = report
  assert {name.removesuffix(".png") for name in os.listdir(folder)} == PICTURES | {"index.html", "numbers.npz"}
  n = result["position"]
  assert numbers["tokens"].shape == (result["tokens"],) and n == result["tokens"] - 1
  assert numbers["exponents_exact"].shape == numbers["exponents_per_token"].shape == (n + 1, 3)
  assert result["leading_exponent"] == pytest.approx(numbers["exponents_exact"][n, 0], abs=1e-4)
  assert np.iscomplexobj(numbers["eigenvalues_qk"]) and numbers["eigenvalues_qk"].shape == (2, 4, 4)
  assert numbers["between_times"].shape == (8,) and result["num_steps"] == 2
  assert all(np.isfinite(values).all() for name, values in numbers.items())
  before = numbers["exponents_exact"][:n, 0]
  assert result["most_sensitive_to"]["position"] == before.argmax()


def test_the_page_draws_in_a_browser_at_any_width(report):
  _, folder, _ = report
  with chromium() as browser:
    for width, mobile in ((1280, False), (390, True)):
      with opened(browser, str(folder / "index.html"), width, mobile) as page:
        page.evaluate("drawAll().then(() => true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".js-plotly-plot:has(.main-svg)").count() == 3 + 3 + 2 + 1 + 2 + 2
        text = page.inner_text("body")
        assert "Sensitivity to each token" in text and "tells" in text.replace("·", " ").replace("\n", "")
        assert "NaN" not in text and "undefined" not in text


def test_pieces_add_up_to_the_text(finished):
  config, workdir = finished
  tokenizer = Run.open(str(workdir)).tokenizer
  for text in (TEXT, "äöü 文字 🎉", "  two  spaces\n"):
    ids = text_ids(tokenizer, text)
    made = pieces(tokenizer, ids)
    assert len(made) == len(ids) and "".join(made).replace("[begin]", "") == text


def test_on_several_devices_it_finds_the_same(report, finished, tmp_path):
  result, _, numbers = report
  shutil.copytree(finished[1], tmp_path / "run")
  words = ["--job=analyze", f"--workdir={tmp_path / 'run'}", f"--text={TEXT}", "--leading=3"]
  without_pictures = "import sys, diffeq_nnx.jobs.analyze; sys.modules['diffeq_nnx.jobs.analyze'].draw = lambda *_: 0"
  process = Process(words, {"XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=4"}, without_pictures)
  assert process.end(240) == 0, process.lines[-20:]
  assert json.loads(process.out)["leading_exponent"] == pytest.approx(result["leading_exponent"], abs=1e-3)
  found = np.load(tmp_path / "run" / "report" / "numbers.npz")
  np.testing.assert_allclose(found["rollout"], numbers["rollout"], atol=1e-5)


def test_what_can_t_be_is_told(finished, capsys):
  config, workdir = finished
  for changes, says in (
    (dict(text=""), "--text='': gives no tokens"),
    (dict(text=TEXT, position=40), "position=40: the text has"),
    (dict(num_steps=0), "num_steps=0"),
  ):
    assert says in told(lambda: analyze(config, str(workdir), **changes))
  assert run_command("--job=analyse", f"--workdir={workdir}", "--num_processes=1", "--times=0.5,2") == 2
  assert "times=[0.5, 2.0]: must be one or more times from 0 to 1" in capsys.readouterr().err
