"""Charts as PNG files."""

import textwrap
from typing import Any
import unicodedata
import warnings

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from diffeq_nnx.analysis.pages import palette
from diffeq_nnx.analysis.pages.charts import Chart, ColoredText, Line, Panel, visible

DPI = 120
STYLE = {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 9, "figure.constrained_layout.use": True}
QUIET = "#59636e"  # of captions
COLUMNS = 100  # characters in a row of a text


def draw(item: Chart | ColoredText, path: str) -> None:
  """Writes a chart or a text as a PNG file; leaves Matplotlib's settings and figures as they are."""
  styled = style.context(["seaborn-v0_8-whitegrid", STYLE], after_reset=True)
  silent = warnings.catch_warnings(action="ignore")  # of glyphs that the font lacks: they become boxes
  with styled, silent:
    figure = _text_figure(item) if isinstance(item, ColoredText) else _chart_figure(item.thin())
    figure.savefig(path, format="png", dpi=DPI)


def _chart_figure(chart: Chart) -> Figure:
  columns = min(chart.columns, len(chart.panels))
  rows = -(-len(chart.panels) // columns)
  width = 4.6 * max(columns, 1.6)
  figure = Figure(figsize=(width, 3.6 * rows + 0.8))
  _add_titles(figure, chart)
  axes = figure.subplots(rows, columns, squeeze=False).flat
  for panel, one in zip(chart.panels, axes):
    _draw_panel(chart, panel, one)
  for one in axes[len(chart.panels) :]:
    one.remove()
  return figure


def _draw_panel(chart: Chart, panel: Panel, axes: Axes) -> None:
  axes.set(title=visible(panel.title), xlabel=visible(panel.x_label), ylabel=visible(panel.y_label))
  if panel.color_limits:
    colors: Any = ScalarMappable(Normalize(*panel.color_limits), palette.color_map(palette.CELLS))
    axes.figure.colorbar(colors, ax=axes, label=visible(panel.color_label), pad=0.02, aspect=28)
  if panel.heatmap:
    axes.grid(False)
    axes.imshow(panel.heatmap.z, cmap=colors.cmap, norm=colors.norm, aspect="auto", interpolation="nearest")
    for axis, ticks in ((axes.xaxis, panel.heatmap.x), (axes.yaxis, panel.heatmap.y)):
      axis.set_major_locator(MaxNLocator(integer=True))
      names = dict(enumerate(map(visible, ticks)))
      show: Any = lambda place, _, names=names: names.get(place, "")
      axis.set_major_formatter(show)
  labels: dict[str, Any] = {}
  for mark in panel.marks:
    color = chart.color_of(mark)
    if isinstance(mark, Line):
      shape: dict[str, Any] = {"linestyle": "--" if mark.dashed else "-", "marker": "o" if mark.dotted else None}
      sizes: dict[str, Any] = {"linewidth": 0.75 * mark.width, "markersize": 2 * mark.width}
      (drawn,) = axes.plot(mark.x, mark.y, color=color, **shape, **sizes)
    else:
      shades = color if mark.color is None else colors.to_rgba(mark.color, alpha=palette.POINT_OPACITY)
      drawn = axes.scatter(
        mark.x, mark.y, color=shades, alpha=palette.POINT_OPACITY, s=(0.75 * mark.size) ** 2, linewidths=0
      )
    if mark.label:
      labels.setdefault(visible(mark.label), drawn)
  if labels:
    axes.legend(labels.values(), labels.keys(), frameon=True, framealpha=0.8)


def _text_figure(text: ColoredText) -> Figure:
  """A text in a font of fixed width, on axes whose units are a character and a row."""
  boxes = text_boxes(text)
  rows = boxes[-1][1] + 1 if boxes else 1
  figure = Figure(figsize=(9, 0.3 * rows + 1.4))
  _add_titles(figure, text)
  axes = figure.subplots()
  axes.set(xlim=(0, COLUMNS), ylim=(rows, 0))
  axes.axis("off")
  tokens = text.tokens
  for index, row, column, part in boxes:
    behind, letters = tokens[index][2] or ("none", "black")
    frame = {"edgecolor": "black", "linewidth": 1.5, "zorder": 3} if index == text.marked else {"linewidth": 0}
    axes.add_patch(Rectangle((column, row + 0.1), count_columns(part) - 0.15, 0.8, facecolor=behind, **frame))
    axes.text(column, row + 0.5, part, color=letters, size=10, family="DejaVu Sans Mono", va="center", zorder=4)
  stops, low, high = text.scale
  colors = ScalarMappable(Normalize(low, high), palette.color_map(stops))
  figure.colorbar(colors, ax=axes, location="bottom", shrink=0.3, aspect=28, label=visible(text.value_label))
  return figure


def text_boxes(text: ColoredText) -> list[tuple[int, int, int, str]]:
  """The token, row, column and characters of each box; a token that is longer than a row has several."""
  boxes, row, column = [], 0, 0
  for index, piece in enumerate(text.pieces):
    shown = visible(piece) or " "
    most = COLUMNS if count_columns(shown) == len(shown) else COLUMNS // 2
    for start in range(0, len(shown), most):
      part = shown[start : start + most]
      if column + count_columns(part) > COLUMNS:
        row, column = row + 1, 0
      boxes.append((index, row, column, part))
      column += count_columns(part)
    if "\n" in piece:
      row, column = row + 1, 0
  return boxes


def count_columns(text: str) -> int:
  """How many columns a text takes; a wide character has two."""
  return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _add_titles(figure: Figure, item: Chart | ColoredText) -> None:
  figure.suptitle(visible(item.title), fontsize=12, fontweight="bold")
  caption = textwrap.fill(visible(item.caption), int(16 * figure.get_figwidth()))
  figure.supxlabel(caption, fontsize=8, color=QUIET, x=0.01, ha="left")
