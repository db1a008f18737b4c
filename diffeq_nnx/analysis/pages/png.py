"""Figures as PNG files."""

import bisect
import functools
import io
import textwrap

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from diffeq_nnx import files
from diffeq_nnx.analysis.pages import palette
from diffeq_nnx.analysis.pages.charts import ColouredText, Figure, Heatmap, Line, Panel, drawable, limits, visible
from diffeq_nnx.analysis.pages.traces import MAX_ROWS, colour_limits, legend, marks_points, shortened, ticks

DPI = 120
_FONT = "DejaVu Sans"  # comes with matplotlib
_STYLE = {
    "text.parse_math": False, "font.family": _FONT, "font.size": 9, "axes.titlesize": 10, "axes.edgecolor": "#b4bac1",
    "axes.labelcolor": "#1c2126", "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "grid.color": "#e8ebee", "grid.linewidth": 0.8, "xtick.color": "#b4bac1",
    "ytick.color": "#b4bac1", "xtick.labelcolor": "#1c2126", "ytick.labelcolor": "#1c2126", "legend.frameon": False,
    "axes.unicode_minus": True, "figure.facecolor": "white",
}
_QUIET = "#59636e"


def draw(item: Figure | ColouredText, path: str) -> None:
  """Draws a figure, or a text with colours, as a PNG file of 120 dots an inch, written whole or not at all.

  Characters that the font lacks are drawn as empty boxes. Pyplot, its figures and the style set by others stay as
  they are.
  """
  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(_STYLE)
    canvas = _text_canvas(item) if isinstance(item, ColouredText) else _figure_canvas(drawable(item))
    content = io.BytesIO()
    canvas.savefig(content, format="png", dpi=DPI)  # within the style: some texts are made only now
  files.write(path, content.getvalue())


@functools.cache
def _known() -> frozenset[int]:
  """The code points that the font draws."""
  return frozenset(font_manager.get_font(font_manager.findfont(_FONT)).get_charmap())


def _sign(text: str) -> str:
  """A text on one line as the font can draw it."""
  return "".join(char if ord(char) in _known() else "□" for char in visible(text))


def _lines(text: str, inches: float, size: float) -> str:
  """A text in lines that fit a width, at a font size in points; an average character is 0.55 of it."""
  return "\n".join(textwrap.wrap(_sign(text.replace("\n", " ")), max(20, int(inches * 72 / (0.55 * size)))))


def _figure_canvas(figure: Figure) -> Canvas:
  columns = min(figure.columns, len(figure.panels))
  rows = -(-len(figure.panels) // columns)
  width = 7.5 if columns == 1 else 4.6 * columns
  height = max(_height(panel) for panel in figure.panels) * rows
  caption = _lines(figure.caption, width - 0.4, 8)
  extra = 0.35 * bool(figure.title) + 0.17 * (caption.count("\n") + 1) * bool(caption)
  canvas = Canvas(figsize=(width, height + extra), layout="constrained")
  FigureCanvasAgg(canvas)
  canvas.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
  if figure.title:
    canvas.suptitle(_lines(figure.title, width, 12), fontsize=12, fontweight="bold")
  if caption:
    canvas.supxlabel(caption, fontsize=8, color=_QUIET, x=0.01, ha="left")
  axes = canvas.subplots(rows, columns, squeeze=False).flat
  for panel, colours, one in zip(figure.panels, palette.mark_colours(figure), axes):
    _draw_panel(canvas, one, panel, colours)
  for one in axes[len(figure.panels):]:
    one.remove()
  return canvas


def _height(panel: Panel) -> float:
  """Inches."""
  return max([3.4] + [1.2 + 0.19 * min(len(mark.y), MAX_ROWS) for mark in panel.marks if isinstance(mark, Heatmap)])


def _draw_panel(canvas: Canvas, axes, panel: Panel, colours: list[str]) -> None:
  axes.set(title=_lines(panel.title, 4.2, 10), xlabel=_lines(panel.x_label, 4.2, 9), ylabel=_lines(panel.y_label, 3, 9))
  listed, scale = legend(panel), colour_limits(panel)
  for mark, colour in zip(panel.marks, colours):
    if isinstance(mark, Heatmap):
      _draw_heatmap(canvas, axes, panel, mark)
      return
    label = _sign(mark.label) if mark.label in listed else None
    listed.discard(mark.label)  # once
    if isinstance(mark, Line):
      axes.plot(mark.x, mark.y, color=colour, linewidth=0.75 * mark.width, linestyle="--" if mark.dashed else "-",
                marker="o" if marks_points(mark) else None, markersize=2 * mark.width, alpha=mark.opacity)
    elif mark.colour is None:
      axes.scatter(mark.x, mark.y, s=(0.75 * mark.size)**2, color=colour, alpha=mark.opacity, linewidths=0)
    else:
      axes.scatter(mark.x, mark.y, s=(0.75 * mark.size)**2, c=mark.colour, cmap=palette.colour_map(palette.DOTS),
                   norm=Normalize(*scale), plotnonfinite=True, alpha=mark.opacity, linewidths=0)
    if label:
      (axes.lines if isinstance(mark, Line) else axes.collections)[-1].set_label(label)
  if scale:
    _draw_scale(canvas, axes, Normalize(*scale), palette.DOTS, panel.colour_label)
  if legend(panel):
    axes.legend(fontsize=8)
  if panel.equal:
    axes.set_aspect("equal", adjustable="datalim")
  if panel.x_ticks is not None:
    _set_ticks(axes, [place for place, _ in panel.x_ticks], [text for _, text in panel.x_ticks])


def _draw_heatmap(canvas: Canvas, axes, panel: Panel, mark: Heatmap) -> None:
  stops = palette.DIVERGING if mark.diverging else palette.CELLS
  norm = Normalize(*limits(mark.z, mark.low, mark.high, mark.diverging))
  axes.grid(False)
  if mark.z.size:
    axes.imshow(mark.z, cmap=palette.colour_map(stops), norm=norm, aspect="auto", interpolation="nearest")
  across, down = ticks(mark.x), ticks(mark.y)
  _set_ticks(axes, across, [mark.x[place] for place in across])
  axes.set_yticks(down, [_sign(shortened(mark.y[place])) for place in down])
  _draw_scale(canvas, axes, norm, stops, panel.colour_label)


def _set_ticks(axes, places: list, labels: list[str]) -> None:
  """Labels the x axis; upright where they would touch."""
  labels = [_sign(shortened(label)) for label in labels]
  axes.set_xticks(places, labels)
  if sum(map(len, labels)) + len(labels) > 44:
    axes.tick_params(axis="x", rotation=90)


def _draw_scale(canvas: Canvas, axes, norm: Normalize, stops: tuple[str, ...], label: str) -> None:
  bar = canvas.colorbar(ScalarMappable(norm, palette.colour_map(stops)), ax=axes, pad=0.02, aspect=28)
  bar.outline.set_visible(False)
  bar.set_label(_sign(label))


_WIDTH, _MARGIN, _SIZE = 1080, 30, 11  # a text's picture and its margin in pixels, its letters in points
_ROW, _BOX, _GAP = 30, 24, 3  # pixels from row to row, the height of a token's box, and between boxes


def _text_canvas(text: ColouredText) -> Canvas:
  """A text; laid out by measured widths, so that what is drawn in is one pair of axes whose units are pixels."""
  canvas = Canvas(figsize=(_WIDTH / DPI, 1), dpi=DPI)
  measure = functools.partial(_width, FigureCanvasAgg(canvas).get_renderer())
  boxes, rows = _laid_out([_sign(piece) for piece in text.pieces], ["\n" in piece for piece in text.pieces], measure)
  room = (_WIDTH - 2 * _MARGIN) / DPI
  title, caption = _lines(text.title, room, 12), _lines(text.caption, room, 8)
  top = 16 + 26 * (title.count("\n") + 1) * bool(title)
  bottom = top + _ROW * rows
  height = bottom + 66 + (16 * (caption.count("\n") + 1) + 8) * bool(caption)
  canvas.set_size_inches(_WIDTH / DPI, height / DPI)
  axes = canvas.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
  axes.axis("off")
  axes.text(_MARGIN, 12, title, fontsize=12, fontweight="bold", va="top")
  axes.text(_MARGIN, bottom + 60, caption, fontsize=8, color=_QUIET, va="top")
  low, high = limits(text.coloured_values, diverging=text.diverging)
  stops = palette.DIVERGING if text.diverging else palette.TINTS
  colours = palette.token_colours(text.coloured_values, low, high, stops)
  for index, row, left, width, indent, piece in boxes:
    behind, letters = colours[index] or ("none", "#1c2126")
    middle = top + _ROW * (row + 0.5)
    framed = dict(edgecolor="black", linewidth=1.6, zorder=3) if index == text.marked else dict(linewidth=0)
    axes.add_patch(Rectangle((left, middle - _BOX / 2), width, _BOX, facecolor=behind, **framed))
    axes.text(left + _GAP + indent, middle + 5, piece, fontsize=_SIZE, color=letters, va="baseline", zorder=4)
  scale = canvas.add_axes((_MARGIN / _WIDTH, 1 - (bottom + 24) / height, 220 / _WIDTH, 10 / height))
  shown = ScalarMappable(Normalize(low, high), palette.colour_map(stops))
  bar = canvas.colorbar(shown, cax=scale, orientation="horizontal")
  bar.outline.set_visible(False)
  bar.locator = MaxNLocator(4)
  axes.text(_MARGIN + 232, bottom + 23, _sign(text.value_label), fontsize=9, color=_QUIET, va="baseline")
  return canvas


def _width(renderer, text: str) -> float:
  """How far a text reaches in pixels, spaces at its ends included."""
  properties = font_manager.FontProperties(size=_SIZE)
  between, nothing = (renderer.get_text_width_height_descent(inside, properties, False)[0]
                      for inside in (f"|{text}|", "||"))
  return max(0.0, between - nothing)


def _laid_out(pieces: list[str], breaks: list[bool], measure) -> tuple[list[tuple], int]:
  """Where the boxes of tokens come: (token, row, left, width, the text's indent, text), and the number of rows."""
  boxes, row, left, room = [], 0, _MARGIN, _WIDTH - 2 * _MARGIN
  for index, (piece, is_break) in enumerate(zip(pieces, breaks)):
    for part in _parts(piece, room - 2 * _GAP, measure):
      width = max(measure(part), 4) + 2 * _GAP
      if left > _MARGIN and left + width > _MARGIN + room:
        row, left = row + 1, _MARGIN
      letters = part.strip(" ")
      indent = measure(part[:len(part) - len(part.lstrip(" "))])
      boxes.append((index, row, left, width, indent, letters))
      left += width + _GAP
    if is_break:
      row, left = row + 1, _MARGIN
  return boxes, row + (left > _MARGIN or not row)


def _parts(piece: str, most: float, measure) -> list[str]:
  """A token that is wider than a row, in parts that aren't."""
  parts = [piece]
  while len(parts[-1]) > 1 and measure(parts[-1]) > most:
    last = parts.pop()
    fits = max(1, bisect.bisect_right(range(len(last)), most, key=lambda count: measure(last[:count])) - 1)
    parts += [last[:fits], last[fits:]]
  return parts
