"""Figures as data, as PNG files and on a page: what is drawn is what was given, and nothing is fetched."""

import html.parser
import json
import os
import re
import struct

import matplotlib
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
import numpy as np
import pytest

from diffeq_nnx.analysis.pages import charts, page, palette, png, traces
from diffeq_nnx.analysis.pages.charts import ColouredText, Figure, Heatmap, Line, Panel, Points, Table
from tests import browser as browser_lib

HOSTILE = ["</script><b>x</b>", "<!--", "$x^2$ & $", "\n", "\t", " ", " <img src=x onerror=alert(1)>", "%{x} 100%",
           "\x00\x1b", "漢字\U0001f600\u202e", "\ud800", "", "&amp;", '"quoted\'']
NAN = float("nan")


def make_text(**changes) -> ColouredText:
  values = dict(name="text", title="A <i>text</i>", caption="", pieces=[*HOSTILE, " plain"], marked=3,
                value_label="weight", values=[NAN, np.inf, *np.linspace(-2, 3.25, len(HOSTILE) - 1)], diverging=True)
  return ColouredText(**{**values, **changes})


def make_figures() -> dict[str, Figure | ColouredText]:
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 4321))
  x[5], y[7], y[8] = NAN, np.inf, -np.inf
  few = Points([0, 1, 2, NAN, 4], [3, 5.4321, 4, 1, 2], label="few", colour=[0, 1, NAN, 2, 3],
               hover=["a", "<b>b</b>", "c", "d", "e"])
  lines = [Line(np.arange(30), rng.normal(size=30), label=f"line {index}") for index in range(3)]
  labels = [*HOSTILE, "last", "last"]
  z = rng.normal(size=(3, len(labels)))
  z[1, 2] = NAN
  return {
      "points": Figure("points", "Points", "Some.", [
          Panel("many", "real", "imaginary", [Points(x, y), Line([0, 1], [0, 1], colour="black", dashed=True)],
                equal=True),
          Panel("few", "x % of $a$", "y <b>", [few], colour_label="c & d")]),
      "lines": Figure("lines", "Lines", "", [
          Panel("three", "step", "loss", lines),
          Panel("gap", "", "", [Line([1, 2, 3, 4], [1, NAN, 2, 3])], x_ticks=[(1, "one $"), (4, "</four>")])]),
      "cells": Figure("cells", "Cells", "", [
          Panel("hostile", "key", "query", [Heatmap(labels, ["a", "a", "b"], z, diverging=True)]),
          Panel("nothing", "", "", [Heatmap(["a"], ["b"], [[NAN]])])], columns=1),
      "text": make_text(),
      "plain": ColouredText("plain", "", "A caption.", ["so", " it", " goes"], [1, 2, 3], "nats"),
  }


FIGURES = make_figures()
TABLE = Table("Table", "Below.", ["name", "value"] + [f"a column {index}" for index in range(20)],
              [["<b>bold</b>", "1.5 %", *["0.25"] * 20], ["plain", "-2", *["1e-3"] * 20]])


def test_lengths_that_do_not_agree_are_told():
  for make, told in (
      (lambda: Points([1, 2], [1]), "x has 2, y has 1"),
      (lambda: Points([1], [1], hover=["a", "b"]), "hover has 2"),
      (lambda: Points([1], [1], colour=[1, 2, 3]), "colour has 3"),
      (lambda: Points([[1]], [1]), r"x has shape \(1, 1\)"),
      (lambda: Line([1], [1, 2]), "x has 1, y has 2"),
      (lambda: Line([1], [1], colour="tab:blue"), "tab:blue"),
      (lambda: Heatmap(["a"], ["b", "c"], [[1, 2]]), r"\(2, 1\)"),
      (lambda: Heatmap(["a"], ["b"], [[1]], hover=[["a", "b"]]), r"hover has shape \(1, 2\)"),
      (lambda: Panel("", "", "", [Heatmap([], [], np.zeros((0, 0))), Line([], [])]), "2 marks"),
      (lambda: Figure("a/b", "", "", [Panel("", "", "", [])]), "a/b"),
      (lambda: Figure("a", "", "", []), "0 panels"),
      (lambda: make_text(values=[1]), "values has 1"),
      (lambda: make_text(marked=99), "marked=99"),
      (lambda: Table("t", "", ["a"], [["1"], ["1", "2"]]), "row 1 has 2 cells"),
      (lambda: page.write_page("unwritten.html", "", [], [("", "", [FIGURES["lines"], FIGURES["lines"]])]), "'lines'")):
    with pytest.raises(ValueError, match=told):
      make()
  assert not os.path.exists("unwritten.html")


def test_thinned_points_are_given_ones_with_all_extremes_evenly_over_y():
  rng = np.random.default_rng(1)
  x, y, colour = rng.normal(size=(3, 20_000))
  hover = [str(index) for index in range(20_000)]
  marks = [Points(x, y, hover=hover, colour=colour), Points([1], [NAN])]
  figure = charts.drawable(Figure("f", "", "Said.", [Panel("", "", "", marks)]))
  thin, gone = figure.panels[0].marks
  index = np.array(thin.hover, int)
  assert charts.MAX_POINTS - 4 <= len(index) <= charts.MAX_POINTS and len(set(index)) == len(index) and not len(gone.x)
  for given, drawn in ((x, thin.x), (y, thin.y), (colour, thin.colour)):
    np.testing.assert_array_equal(drawn, given[index])
    assert drawn.min() == given.min() and drawn.max() == given.max()
  parts = np.linspace(0, 1, 21)
  np.testing.assert_allclose(np.quantile(thin.y, parts), np.quantile(y, parts), atol=0.01)
  assert figure.caption == f"Said. {len(index):,} of 20,001 points are drawn."
  same = Figure("f", "", "Said.", [Panel("", "", "", [Points(x[:4000], y[:4000])])])
  assert charts.drawable(same).caption == "Said." and len(charts.drawable(same).panels[0].marks[0].x) == 4000


def test_numbers_are_short_and_near():
  values = np.random.default_rng(0).normal(size=1000) * 10.0**np.arange(-5, 5).repeat(100)
  short = np.array(traces.compact(values))
  np.testing.assert_allclose(short, values, rtol=5e-5)
  assert traces.compact([123456, 1e300, -0.0, NAN, -np.inf, 1 / 3]) == [123456, 1e300, 0, None, None, 0.33333]
  near = 1e6 + np.linspace(0, 1e-2, 50)
  np.testing.assert_allclose(traces.compact(near), near, rtol=0, atol=1e-6)
  assert len(json.dumps(traces.compact(np.random.default_rng(0).random(100).astype(np.float32)))) < 1000


def test_colour_scales_end_where_they_should():
  values = np.array([-1, 4, NAN, np.inf])
  assert charts.limits(values) == (-1, 4) and charts.limits(values, diverging=True) == (-4, 4)
  assert charts.limits(values, low=-9, diverging=True) == (-9, 9) and charts.limits(values, 0, 2) == (0, 2)
  for odd in ([], [NAN], [0.0], [7.0, 7.0], [-3.0]):
    low, high = charts.limits(np.array(odd))
    assert low < high and np.isfinite([low, high]).all()


def test_letters_can_be_read_on_every_colour():
  for stops in (palette.TINTS, palette.DIVERGING):
    for behind, letters in palette.token_colours(np.linspace(0, 1, 101), 0, 1, stops):
      bright, dark = sorted((palette.luminance(behind), palette.luminance(letters)), reverse=True)
      assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_the_same_label_has_the_same_colour():
  a, b, c = (Line([0, 1], [0, 1], label=label) for label in "abc")
  (first, second) = palette.mark_colours(Figure("f", "", "", [Panel("", "", "", [a, b]), Panel("", "", "", [c, b, a])]))
  assert second[2] == first[0] and second[1] == first[1] and len({*first, *second}) == 3


def style() -> dict:
  """Matplotlib's, but for a backend that is chosen when it is first asked for."""
  return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


@pytest.mark.parametrize("name", FIGURES)
def test_a_png_is_written_without_a_warning_or_a_trace(name, tmp_path):
  before = style()
  path = tmp_path / f"{name}.png"
  png.draw(FIGURES[name], str(path))
  content = path.read_bytes()
  width, height = struct.unpack(">II", content[16:24])
  assert content[:8] == b"\x89PNG\r\n\x1a\n" and 3_000 < len(content) < 1e6
  assert 700 < width < 2000 and 100 < height < 2000
  assert os.listdir(tmp_path) == [path.name] and not pyplot.get_fignums() and style() == before


def test_a_png_that_cannot_be_drawn_leaves_the_old_one(tmp_path, monkeypatch):
  path = tmp_path / "figure.png"
  path.write_bytes(b"old")
  monkeypatch.setattr(Canvas, "savefig", lambda *arguments, **named: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    png.draw(FIGURES["lines"], str(path))
  assert path.read_bytes() == b"old" and os.listdir(tmp_path) == [path.name]


def test_boxes_of_tokens_hold_all_text_and_do_not_overlap():
  renderer = FigureCanvasAgg(Canvas(dpi=120)).get_renderer()
  pieces = [charts.visible(piece) for piece in ["long" * 100, *HOSTILE, *[" word"] * 50, "\n"]]
  with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.parse_math": False}):
    boxes, rows = png._laid_out([png._sign(piece) for piece in pieces], [piece == "⏎" for piece in pieces],
                                lambda text: png._width(renderer, text))
  for token, piece in enumerate(pieces):
    assert "".join(box[5] for box in boxes if box[0] == token) == png._sign(piece).strip(" ")
  for box, after in zip(boxes, boxes[1:]):
    assert (box[1], box[2] + box[3]) <= (after[1], after[2]) or after[1] > box[1]
  assert all(30 <= left and left + width <= 1050 for _, _, left, width, _, _ in boxes)
  assert rows == boxes[-1][1] + 1


# ---- on the page


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("pages") / "page.html")
  points, lines, cells, text, plain = FIGURES.values()
  page.write_page(path, "Title & <b>", [("name", "value <i>")], [
      ("First </h2>", "One.\n\nTwo <b>.", [lines, points]), ("Second", "", [cells, TABLE]),
      ("Third", "Texts.", [text, plain])])
  return path


@pytest.fixture(scope="module")
def browser():
  if not browser_lib.find():
    pytest.skip("no Chromium here")
  with browser_lib.Browser() as browser:
    yield browser


@pytest.fixture(scope="module")
def wide(browser, path):
  """The browser with the page in a window as on a desk, all figures drawn."""
  browser.open(path, 1280, 900)
  browser.evaluate("window.drawnAtFirst = document.querySelectorAll('.js-plotly-plot').length")
  browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'; drawAllFigures().then(() => true)")
  return browser


def spot(browser, panel: int, x: float, y: float) -> tuple[float, float]:
  """Scrolls to the panel of this index; where in the window a point of its axes is."""
  return browser.evaluate(f"""(() => {{
    const plot = document.querySelectorAll('.plot')[{panel}];
    plot.scrollIntoView({{block: 'center'}});
    const {{xaxis, yaxis}} = plot._fullLayout, box = plot.getBoundingClientRect();
    return [box.x + xaxis._offset + xaxis.d2p({x}), box.y + yaxis._offset + yaxis.d2p({y})];
  }})()""")


def hovers(browser, panel: int, x: float, y: float, *parts: str) -> bool:
  """Waits until the page, with the mouse at a place of a panel, says all of this."""
  browser.point(1, 1)
  browser.point(*spot(browser, panel, x, y))
  return browser.until(f"says({panel}, {json.dumps(parts)})")


SAYS = """window.says = (panel, parts) => {
  const said = document.querySelectorAll('.plot')[panel].querySelector('.hoverlayer').textContent;
  return parts.every((part) => said.includes(part));
}, 0"""


def test_the_file_is_whole_and_asks_for_nothing(path):
  with open(path, encoding="utf-8") as file:
    content = file.read()
  scripts = re.findall(r"<script([^>]*)>(.*?)</script>", content, re.DOTALL)
  data = [text for kind, text in scripts if "json" in kind]
  assert len(scripts) == len(data) + 2 == 8 and content.count("</script>") == 8
  for text in data:
    json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert "<" not in text
  own, links = re.sub("<script.*?</script>", "", content, flags=re.DOTALL), []
  parser = html.parser.HTMLParser()
  parser.handle_starttag = lambda tag, attributes: links.extend(
      value for name, value in attributes if name in ("src", "href"))
  parser.feed(own)
  assert all(link.startswith("#") or link in ("data:,", "points.png", "lines.png", "cells.png") for link in links)
  assert {f'id="{link[1:]}"' in own for link in links if link.startswith("#")} == {True}
  assert "url(" not in own and "@import" not in own
  assert all(f'<a href="{name}.png">' in own for name in ("points", "lines", "cells")) and "gl\"" not in "".join(data)
  assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_every_mark_is_drawn_as_given(wide):
  drawn = wide.evaluate("""[...document.querySelectorAll('.plot')].map((plot) => [
    plot.querySelectorAll('.scatterlayer .js-line').length, plot.querySelectorAll('.scatterlayer .point').length,
    plot.querySelectorAll('.heatmaplayer image').length])""")
  points = charts.drawable(FIGURES["points"]).panels
  many = len(points[0].marks[0].x)
  # the second has a line in two parts, the last one grey cell
  assert drawn == [[3, 0, 0], [2, 3, 0], [1, many, 0], [0, 4, 0], [0, 0, 1], [0, 0, 0]]
  assert 3990 < many <= 4000 and f"{many + 4:,} of 4,326 points are drawn" in wide.evaluate(
      "document.querySelector('#figure-points figcaption').textContent")
  z = wide.evaluate("document.querySelectorAll('.plot')[4].data[0].z")
  np.testing.assert_allclose(np.array(z, float), FIGURES["cells"].panels[0].marks[0].z, rtol=1e-4)
  assert z[1][2] is None


def test_figures_wait_until_they_are_near_and_no_console_or_network_is_touched(wide, path):
  assert wide.evaluate("[drawnAtFirst < 6, document.querySelectorAll('.js-plotly-plot').length]") == [True, 6]
  assert wide.messages == [] and wide.requests == ["file://" + path]


def test_hovering_tells_values_and_labels(wide):
  wide.evaluate(SAYS)
  assert hovers(wide, 3, 1, 5.4321, "few", "<b>b</b>", "x % of $a$: 1", "y <b>: 5.4321", "c & d: 1")
  assert hovers(wide, 3, 2, 4, "c & d: not finite")
  line, z = FIGURES["lines"].panels[0].marks[1], FIGURES["cells"].panels[0].marks[0].z
  assert hovers(wide, 0, 12, line.y[12], "step: 12", "loss: " + f"{line.y[12]:.4f}"[:-1].replace("-", "−"))
  assert hovers(wide, 4, 0, 2, f"b, </script><b>x</b>: {z[2, 0]:.5g}")
  assert hovers(wide, 4, 2, 1, "not finite")


def test_hostile_tokens_come_out_as_text(wide):
  tokens = wide.evaluate("[...document.querySelectorAll('#figure-text .token')].map((token) => token.textContent)")
  assert tokens == [charts.visible(piece) for piece in FIGURES["text"].pieces] and "</script><b>x</b>" in tokens
  assert wide.evaluate("document.querySelectorAll('main b, main i:not(.scale i), main img').length") == 0
  ticks = wide.evaluate(
      "[...document.querySelectorAll('.plot')[4].querySelectorAll('.xtick text')].map((tick) => tick.textContent)")
  assert ticks[0] == "</script><b>x</b>" and "$x^2$ & $" in ticks and ticks[-2:] == ["last", "last"]
  assert wide.evaluate("document.title") == "Title & <b>"


def test_tokens_tell_their_values_to_mouse_and_keyboard(wide):
  tip = "document.getElementById('tip')"
  wide.evaluate("document.querySelector('#figure-plain .token').scrollIntoView({block: 'center'})")
  x, y = wide.evaluate("(({x, y}) => [x + 3, y + 5])("
                       "document.querySelectorAll('#figure-plain .token')[2].getBoundingClientRect())")
  wide.point(x, y)
  assert wide.until(f"!{tip}.hidden && {tip}.textContent") == "token 2, nats: 3"
  wide.point(2, 2)
  assert wide.until(f"{tip}.hidden")
  wide.evaluate("document.querySelector('#figure-plain .token').focus()")
  assert wide.evaluate(f"{tip}.textContent") == "token 0, nats: 1"
  wide.press("ArrowRight")
  assert wide.evaluate(f"!{tip}.hidden && {tip}.textContent") == "token 1, nats: 2"
  wide.press("Escape")
  assert wide.evaluate(f"{tip}.hidden")
  assert wide.evaluate("document.querySelectorAll('#figure-text .token')[0].dataset.told") == "token 0, weight: not finite"
  assert wide.evaluate("document.querySelectorAll('.tokens [tabindex=\"0\"]').length") == 2
  assert wide.evaluate("document.querySelector('#figure-text .marked').textContent") == "⏎"


def test_the_dark_scheme_reaches_text_and_figures(wide):
  colours = """[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,
    document.querySelector('.plot .xtick text').style.fill,
    document.querySelectorAll('.plot')[2]._fullData[1].line.color]"""
  light = wide.evaluate(colours)
  wide.prefer("dark")
  dark = wide.until(f"(({light!r})[2] !== document.querySelector('.plot .xtick text').style.fill) && {colours}")
  assert light[1] == "rgb(255, 255, 255)" and all(before != after for before, after in zip(light, dark))
  assert dark[3] == wide.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--text')")
  wide.evaluate("dispatchEvent(new Event('beforeprint'))")
  assert wide.evaluate("document.querySelector('.plot .xtick text').style.fill") == light[2]
  wide.evaluate("dispatchEvent(new Event('afterprint'))")
  wide.prefer("light")
  assert wide.until(f"document.querySelector('.plot .xtick text').style.fill === '{light[2]}'")


def test_a_printed_page_has_all_figures(browser, path):
  browser.open(path, 1280, 600)
  assert len(browser.call("Page.printToPDF")["data"]) > 50_000
  assert browser.evaluate("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 6") and not browser.messages


@pytest.mark.parametrize("width,mobile", [(1280, False), (390, True)])
def test_the_page_is_no_wider_than_the_window(width, mobile, browser, path):
  browser.open(path, width, 844, mobile)
  browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'; drawAllFigures().then(() => true)")
  assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth") == width
  tops = browser.evaluate("[...document.querySelectorAll('#figure-lines .panel')].map((panel) => panel.offsetTop)")
  assert (tops[0] < tops[1]) == mobile
  if mobile:
    assert browser.evaluate("[...document.querySelectorAll('.scroll')].at(-1).scrollWidth > innerWidth")
    browser.evaluate(SAYS)
    browser.tap(*spot(browser, 3, 1, 5.4321))
    assert browser.until("says(3, ['few', 'y <b>: 5.4321'])")
    x, y = spot(browser, 3, 3, 3)
    before = browser.evaluate("scrollY")
    browser.drag(x, y, 200)
    assert browser.evaluate("scrollY") > before + 100
    browser.evaluate("document.querySelector('#figure-plain .token').scrollIntoView({block: 'center'})")
    x, y = browser.evaluate("(({x, y, width, height}) => [x + width / 2, y + height / 2])("
                            "document.querySelectorAll('#figure-plain .token')[1].getBoundingClientRect())")
    browser.tap(x, y)
    assert browser.until("!tip.hidden && tip.textContent") == "token 1, nats: 2"
  assert browser.messages == [] and len(browser.requests) == 1


def test_a_marked_token_may_be_told_and_not_coloured(tmp_path):
  text = ColouredText("t", "", "", ["a", "b", "c"], np.array([1.0, 2.0, 50.0]), "nats", marked=2, marked_coloured=False)
  np.testing.assert_array_equal(text.coloured_values, [1, 2, np.nan])
  page.write_page(str(tmp_path / "p.html"), "t", [], [("h", "", [text])])
  written = (tmp_path / "p.html").read_text()
  assert "token 2, nats: 50" in written and "<span>2</span></div>" in written  # the scale ends at the others'
