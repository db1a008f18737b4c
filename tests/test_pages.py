"""Charts as data, as PNG files and on a page: what is drawn is what was given, and nothing is requested."""

import json
import os
import re
import struct

import matplotlib
from matplotlib import colors, pyplot
import numpy as np
import pytest

from diffeq_nnx.analysis.pages import charts, page, palette, png
from diffeq_nnx.analysis.pages.charts import Chart, ColoredText, Heatmap, Line, Panel, Points, Table
from tests.browser import chromium, opened

HOSTILE = ["</script><b>x</b>", "<!--", "$x^2$ & $", "\n", "\t", " ", " <img src=x onerror=alert(1)>", "%{x} 100%"]
HOSTILE += ["\x00\x1b", "漢字\U0001f600\u202e", "\ud800", "&amp;", "\"quoted'"]
NAN = float("nan")


def make_text(pieces=(*HOSTILE, "", " plain"), **changes) -> ColoredText:
  values = [NAN, np.inf, *np.linspace(-2, 3.25, len(pieces) - 2)]
  return ColoredText("text", "A <i>text</i>", "", [*pieces], values, "weight", marked=3, diverging=True, **changes)


def make_items() -> dict[str, Chart | ColoredText]:
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 4321))
  x[5], y[7], y[8] = NAN, np.inf, -np.inf
  hover, color = ["a", "<b>b</b>", "c", "d", "e"], [0, 1, NAN, 2, 3]
  few = Points([0, 1, 2, NAN, 4], [3, 5.4321, 4, 1, 2], label="few", color=color, hover=hover)
  lines = [Line(np.arange(30), rng.normal(size=30), label=f"line {index}") for index in range(3)]
  z = rng.normal(size=(3, len(HOSTILE)))
  z[1, 2] = NAN
  points = [
    Panel("many", "real", "imaginary", [Points(x, y), Line([0, 1], [0, 1], dashed=True)]),
    Panel("few", "x % of $a$", "y <b>", [few], color_label="c & d"),
  ]
  lines = [Panel("three", "step", "loss", lines), Panel("gap", "", "", [Line([1, 2, 3, 4], [1, NAN, 2, 3])])]
  cells = [
    Panel("hostile", "key", "query", heatmap=Heatmap(HOSTILE, ["a", "b", "c"], z)),
    Panel("nothing", "", "", heatmap=Heatmap(["a"], ["b"], [[NAN]])),
  ]
  return {
    "points": Chart("points", "Points", "Some.", points),
    "lines": Chart("lines", "Lines", "", lines),
    "cells": Chart("cells", "Cells", "", cells, columns=1),
    "text": make_text(),
    "plain": ColoredText(
      "plain", "", "A caption.", ["so", " it", " goes"], [1, 2, 50], "nats", marked=2, marked_colored=False
    ),
  }


ITEMS = make_items()
ROWS = [["<b>bold</b>", "1.5 %", *["0.25"] * 20], ["plain", "-2", *["1e-3"] * 20]]
TABLE = Table("Table", "Below.", ["name", "value", *(f"a column {index}" for index in range(20))], ROWS)


def test_thinned_points_are_given_ones_with_all_extremes_evenly_over_y():
  rng = np.random.default_rng(1)
  x, y, color = rng.normal(size=(3, 20_000))
  hover = [str(index) for index in range(20_000)]
  marks = [Points(x, y, hover=hover, color=color), Points([1], [NAN])]
  chart = Chart("f", "", "Said.", [Panel("", "", "", marks)]).thin()
  thin, gone = chart.panels[0].marks
  index = np.array(thin.hover, int)
  assert charts.MAX_POINTS - 4 <= len(index) <= charts.MAX_POINTS and len(set(index)) == len(index) and not len(gone.x)
  for given, drawn in ((x, thin.x), (y, thin.y), (color, thin.color)):
    np.testing.assert_array_equal(drawn, given[index])
    assert drawn.min() == given.min() and drawn.max() == given.max()
  parts = np.linspace(0, 1, 21)
  np.testing.assert_allclose(np.quantile(thin.y, parts), np.quantile(y, parts), atol=0.01)
  assert chart.caption == f"Said. {len(index):,} of 20,001 points are drawn."
  same = Chart("f", "", "Said.", [Panel("", "", "", [Points(x[:4000], y[:4000])])]).thin()
  assert same.caption == "Said." and len(same.panels[0].marks[0].x) == 4000


def settings() -> dict:
  """Matplotlib's, but for a backend that is chosen when it is first asked for."""
  return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


@pytest.mark.parametrize("name", ["points", "cells", "text"])
def test_a_png_is_written_without_a_warning_or_a_trace(name, tmp_path):
  before = settings()
  path = tmp_path / f"{name}.png"
  png.draw(ITEMS[name], str(path))
  content = path.read_bytes()
  width, height = struct.unpack(">II", content[16:24])
  assert content[:8] == b"\x89PNG\r\n\x1a\n" and 3_000 < len(content) < 1e6
  assert 700 < width < 2000 and 100 < height < 2000
  assert os.listdir(tmp_path) == [path.name] and not pyplot.get_fignums() and settings() == before


def test_boxes_of_tokens_hold_all_text_and_do_not_overlap():
  pieces = ["long" * 100, "漢" * 120, *HOSTILE, *[" word"] * 50, "\n"]
  boxes = png.text_boxes(make_text(pieces))
  for token, piece in enumerate(pieces):
    assert "".join(box[3] for box in boxes if box[0] == token) == charts.visible(piece)
  for (_, row, column, part), (_, next_row, next_column, _) in zip(boxes, boxes[1:]):
    assert (row, column + png.count_columns(part)) <= (next_row, next_column) or next_row > row
  assert all(0 <= column and column + png.count_columns(part) <= png.COLUMNS for _, _, column, part in boxes)
  assert png.count_columns("a漢字\U0001f600") == 7


# ---- on the page


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("pages") / "page.html")
  points, lines, cells, text, plain = ITEMS.values()
  sections = [("First </h2>", "One <b>.", [lines, points]), ("Second", "", [cells, TABLE])]
  sections.append(("Third", "Texts.", [text, plain]))
  page.write_page(path, "Title & <b>", [("name", "value <i>")], sections)
  return path


@pytest.fixture(scope="module")
def browser():
  with chromium() as browser:
    yield browser


@pytest.fixture(scope="module")
def wide(browser, path):
  """The page in a desktop window, printed and all charts drawn; checks that nothing was logged or requested."""
  with opened(browser, path) as window:
    window.wait_for_selector(".main-svg")
    window.evaluate("window.drawnAtFirst = document.querySelectorAll('.js-plotly-plot').length")
    size = len(window.pdf())
    window.evaluate(f"""window.printed = [{size}, document.querySelectorAll('.js-plotly-plot .main-svg').length,
      document.documentElement.classList.contains('printing')]""")
    window.evaluate("drawAll().then(() => true)")
    yield window


def spot(window, panel: int, x: float, y: float) -> tuple[float, float]:
  """Scrolls to a panel; returns where in the window a point of its axes is."""
  return window.evaluate(f"""() => {{
    const plot = document.querySelectorAll('.plot')[{panel}];
    plot.scrollIntoView({{block: 'center'}});
    const {{xaxis, yaxis}} = plot._fullLayout, box = plot.getBoundingClientRect();
    return [box.x + xaxis._offset + xaxis.d2p({x}), box.y + yaxis._offset + yaxis.d2p({y})];
  }}""")


def wait_for_hover(window, panel: int, *parts: str) -> None:
  """Waits until the text that hovering shows in a panel has all these parts."""
  window.wait_for_function(
    """([panel, parts]) => {
    const shown = document.querySelectorAll('.plot')[panel].querySelector('.hoverlayer').textContent;
    return parts.every((part) => shown.includes(part));
  }""",
    arg=[panel, parts],
    timeout=10_000,
  )


def value_shown(window, token: str) -> str:
  """The value that the page shows below a text for this token; "none" where it shows none."""
  return window.eval_on_selector(token, "(token) => getComputedStyle(token, '::after').content").strip('"')


def test_the_file_is_complete_and_requests_nothing(path):
  with open(path, encoding="utf-8") as file:
    content = file.read()
  scripts = re.findall(r"<script([^>]*)>(.*?)</script>", content, re.DOTALL)
  data = [text for kind, text in scripts if "json" in kind]
  assert len(scripts) == len(data) + 2 == 8 and content.count("</script>") == 8
  for text in data:
    json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert "<" not in text and '"scattergl"' not in text  # which needs WebGL
  own = re.sub("<script.*?</script>", "", content, flags=re.DOTALL)
  links = re.findall(r'(?:src|href)="([^"]*)"', own)
  assert all(link.startswith("#") or link in ("data:,", "points.png", "lines.png", "cells.png") for link in links)
  assert {f'id="{link[1:]}"' in own for link in links if link.startswith("#")} == {True}
  assert "url(" not in own and "@import" not in own
  assert all(f'<a href="{name}.png">' in own for name in ("points", "lines", "cells"))
  assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
  # the scale of the text whose marked token, of 50, has no color ends at the others'
  np.testing.assert_array_equal(ITEMS["plain"].colored_values, [1, 2, NAN])
  assert "</i> 2</p>" in content


def test_every_mark_is_drawn_as_given(wide):
  drawn = wide.evaluate("""[...document.querySelectorAll('.plot')].map((plot) => [
    plot.querySelectorAll('.scatterlayer .js-line').length, plot.querySelectorAll('.scatterlayer .point').length,
    plot.querySelectorAll('.heatmaplayer image').length])""")
  many = len(ITEMS["points"].thin().panels[0].marks[0].x)
  # the second has a line in two parts, the last one gray cell
  assert drawn == [[3, 0, 0], [2, 3, 0], [1, many, 0], [0, 4, 0], [0, 0, 1], [0, 0, 0]]
  assert 3990 < many <= 4000
  assert f"{many + 4:,} of 4,326 points are drawn" in wide.inner_text("figure:has-text('Points') figcaption")
  z = wide.evaluate("document.querySelectorAll('.plot')[4].calcdata[0][0].z.map((row) => Array.from(row, Number))")
  np.testing.assert_array_equal(np.nan_to_num(np.array(z, float)), np.nan_to_num(ITEMS["cells"].panels[0].heatmap.z))
  fills = wide.evaluate("""[...document.querySelectorAll('.plot')[3].querySelectorAll('.point')].map(
    (point) => point.style.fill)""")
  assert fills[2] == f"rgb{tuple(round(255 * part) for part in colors.to_rgb(palette.MISSING))}"
  assert len(set(fills)) == 4


def test_charts_are_drawn_when_they_come_near_and_on_paper_and_a_wide_window_has_panels_side_by_side(wide):
  assert wide.evaluate("[drawnAtFirst < 6, document.querySelectorAll('.js-plotly-plot').length]") == [True, 6]
  size, charts_drawn, printing = wide.evaluate("printed")
  assert size > 50_000 and charts_drawn >= 6 and not printing
  assert wide.evaluate("document.documentElement.scrollWidth") <= 1280
  tops = wide.evaluate("[...document.querySelectorAll('.panel')].map((panel) => panel.offsetTop)")
  assert tops[0] == tops[1]


def test_hovering_shows_values_and_labels(wide):
  line, z = ITEMS["lines"].panels[0].marks[1], ITEMS["cells"].panels[0].heatmap.z
  for place, parts in (
    ((3, 1, 5.4321), ("few", "<b>b</b>", "x % of $a$: 1", "y <b>: 5.4321", "c & d: 1")),
    ((3, 2, 4), ("c & d: nan",)),
    ((0, 12, line.y[12]), ("line 1", "step: 12", "loss: " + f"{line.y[12]:.4f}"[:-1].replace("-", "−"))),
    ((4, 0, 2), (f"c, </script><b>x</b>: {z[2, 0]:.5g}",)),
    ((4, 2, 1), ("$x^2$ & $: nan",)),
  ):
    wide.mouse.move(1, 1)
    wide.mouse.move(*spot(wide, *place))
    wait_for_hover(wide, place[0], *parts)


def test_hostile_texts_come_out_as_text(wide):
  tokens = wide.locator("figure:has-text('weight') .token").all_text_contents()
  assert tokens == [charts.visible(piece) for piece in ITEMS["text"].pieces] and "</script><b>x</b>" in tokens
  assert "\u202e" not in "".join(tokens)  # which would turn all that follows around
  assert wide.evaluate("document.querySelectorAll('main b, main i:not(.scale i), main img').length") == 0
  ticks = wide.locator(".plot >> nth=4 >> .xtick text").all_text_contents()
  assert ticks == [charts.visible(label) for label in HOSTILE]
  assert wide.title() == "Title & <b>" and wide.inner_text("figure:has-text('weight') .marked") == "⏎"


def test_tokens_show_their_values_to_mouse_and_keyboard(wide):
  plain = "figure:has-text('nats') .token"
  assert value_shown(wide, f"{plain} >> nth=2") == "none"
  wide.hover(f"{plain} >> nth=2")
  assert value_shown(wide, f"{plain} >> nth=2") == "token 2, nats: 50"
  wide.mouse.move(2, 2)
  assert value_shown(wide, f"{plain} >> nth=2") == "none"
  wide.focus(plain)
  assert value_shown(wide, plain) == "token 0, nats: 1"
  wide.keyboard.press("ArrowRight")
  assert value_shown(wide, f"{plain} >> nth=1") == "token 1, nats: 2" and value_shown(wide, plain) == "none"
  assert wide.get_attribute("figure:has-text('weight') .token", "data-value") == "token 0, weight: nan"
  assert wide.locator(".tokens [tabindex='0']").count() == 2  # one stop of the Tab key for each text


def test_the_dark_scheme_reaches_text_and_charts_and_paper_is_white(wide):
  shown = """() => [[document.body, 'color'], [document.body, 'backgroundColor'],
    [document.querySelector('.plot .xtick text'), 'fill'], [document.querySelector('.plot .xgrid'), 'stroke']].map(
      ([element, name]) => getComputedStyle(element)[name])"""
  light = wide.evaluate(shown)
  wide.emulate_media(color_scheme="dark")
  dark = wide.evaluate(shown)
  assert light[1] == "rgb(255, 255, 255)" and all(before != after for before, after in zip(light, dark))
  assert dark[2] == dark[0]
  wide.emulate_media(media="print", color_scheme="dark")
  assert wide.evaluate(shown) == light
  wide.emulate_media(media="screen", color_scheme="light")


def test_a_telephone_scrolls_only_down_and_answers_to_taps(browser, path):
  with opened(browser, path, width=390, mobile=True) as window:
    window.evaluate("drawAll().then(() => true)")
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth") == 390
    tops = window.evaluate("[...document.querySelectorAll('.panel')].map((panel) => panel.offsetTop)")
    assert tops[0] < tops[1] and window.evaluate("document.querySelector('.table').scrollWidth") > 390
    window.touchscreen.tap(*spot(window, 3, 1, 5.4321))
    wait_for_hover(window, 3, "few", "y <b>: 5.4321")
    (x, y), before = spot(window, 3, 3, 3), window.evaluate("scrollY")
    finger = window.context.new_cdp_session(window)
    for kind, distance in (("touchStart", 0), *(("touchMove", 20 * part) for part in range(1, 11)), ("touchEnd", None)):
      points = [] if distance is None else [{"x": x, "y": y - distance}]
      finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert window.evaluate("scrollY") > before + 100
    token = "figure:has-text('nats') .token >> nth=1"
    window.tap(token)
    assert value_shown(window, token) == "token 1, nats: 2"
