"""Panels as what Plotly draws: a list of traces and a layout, of plain JSON values.

Colours of text, grid and background are left to the page, which knows whether it is dark. No trace needs WebGL.
"""

import math
from typing import Any

import numpy as np

from diffeq_nnx.analysis.pages import palette
from diffeq_nnx.analysis.pages.charts import Heatmap, Line, Panel, Points, limits, pick, visible

MAX_LEGEND = 12  # more labels than this are told by hovering alone
MAX_TICKS = 32  # of a heat map's axis
MAX_ROWS = 64  # of a heat map that it grows with
MARKED_LINE = 24  # lines of so few points show them


def plot(panel: Panel, mark_colours: list[str]) -> dict[str, Any]:
  """What Plotly's newPlot takes, `data` and `layout`, for a panel that `charts.drawable` has seen."""
  if any(isinstance(mark, Heatmap) for mark in panel.marks):
    return _heatmap(panel)
  shown, seen, data = legend(panel), set(), []
  scale = colour_limits(panel)
  for mark, colour in zip(panel.marks, mark_colours):
    for trace in [_line(panel, mark, colour)] if isinstance(mark, Line) else _points(panel, mark, colour):
      data.append({**trace, "name": plain(mark.label), "legendgroup": plain(mark.label),
                   "showlegend": mark.label in shown - seen})
      seen.add(mark.label)
  layout = {"xaxis": {"title": {"text": plain(panel.x_label)}}, "yaxis": {"title": {"text": plain(panel.y_label)}},
            "showlegend": bool(shown)}
  if panel.x_ticks is not None:
    layout["xaxis"].update(tickmode="array", tickvals=compact([place for place, _ in panel.x_ticks]),
                           ticktext=[plain(shortened(text)) for _, text in panel.x_ticks])
  if panel.equal or shown:  # a margin would depend on the ticks, and these on how a legend of that width wraps
    layout["xaxis"]["automargin"] = layout["yaxis"]["automargin"] = False
    layout["margin"] = {"l": 62, "r": 20, "t": 26, "b": 46}
  if panel.equal:
    layout["yaxis"].update(scaleanchor="x", scaleratio=1)
  if scale:
    layout["coloraxis"] = _colour_axis(panel, *scale, palette.DOTS)
  return {"data": data, "layout": layout}


def legend(panel: Panel) -> set[str]:
  """The labels that a legend lists: none where there are too many of them."""
  labels = {mark.label for mark in panel.marks if not isinstance(mark, Heatmap) and mark.label}
  return labels if len(labels) <= MAX_LEGEND else set()


def colour_limits(panel: Panel) -> tuple[float, float] | None:
  """The ends of the one colour scale of all points of a panel; None where no points have one."""
  values = [mark.colour for mark in panel.marks if isinstance(mark, Points) and mark.colour is not None]
  return limits(np.concatenate(values)) if values else None


def ticks(labels: tuple[str, ...], most: int = MAX_TICKS) -> list[int]:
  """The places of a heat map's labels that are written: all, or every second, third, ..."""
  return list(range(0, len(labels), max(1, math.ceil(len(labels) / most))))


def shortened(label: str, most: int = 24) -> str:
  """A tick's label that leaves room for what it stands beside."""
  return label if len(label) <= most else label[:most - 1] + "…"


def compact(values: Any) -> list:
  """Numbers, nested as they come, as JSON takes them: to 5 digits of each or of the span of all, whichever is finer.

  What isn't finite is None, and whole numbers stay whole.
  """
  values = np.asarray(values, np.float64)
  finite = values[np.isfinite(values)]
  span = float(finite.max() / 2 - finite.min() / 2) * 2 if finite.size else 0.0
  digits = _digits(span) if 0 < span < math.inf else -400
  return _nested(values, digits)


def plain(text: str) -> str:
  """Text that Plotly shows as it is: it reads tags and entities in texts, formulas in $...$, in some also %{...}."""
  return visible(text).translate(_ENTITIES)


_ENTITIES = {ord(char): f"&#{ord(char)};" for char in "&<>%$"}


def _nested(values: np.ndarray, digits: int) -> list:
  if values.ndim > 1:
    return [_nested(row, digits) for row in values]
  return [_short(value, digits) for value in values.tolist()]


def _short(value: float, digits: int) -> float | int | None:
  if not math.isfinite(value):
    return None
  if value == int(value) and abs(value) < 1e15:
    return int(value)
  return round(value, max(digits, _digits(value)))


def _digits(value: float) -> int:
  """How many digits after the point (or, below 0, before it are nought) keep 5 that matter."""
  return 4 - math.floor(math.log10(abs(value)))


def _points(panel: Panel, mark: Points, colour: str) -> list[dict[str, Any]]:
  """One trace, or with colours three: the legend's, the coloured points, and grey ones where a colour is missing."""
  marker = {"size": mark.size, "opacity": mark.opacity, "line": {"width": 0}}
  if mark.colour is None:
    return [{**_places(panel, mark), "mode": "markers", "marker": {**marker, "color": colour}}]
  made = []
  for kept, number in ((np.isfinite(mark.colour), "%{marker.color:.5~g}"), (~np.isfinite(mark.colour), "not finite")):
    if kept.any():
      part = pick(mark, np.nonzero(kept)[0])
      colours = {"color": palette.MISSING} if number == "not finite" else {
          "color": compact(part.colour), "coloraxis": "coloraxis"}
      made.append({**_places(panel, part, number), "mode": "markers", "marker": {**marker, **colours}})
  # what the legend shows: it takes no colour from a scale
  listed = {"type": "scatter", "x": [None], "y": [None], "mode": "markers"}
  return [{**listed, "marker": {**marker, "color": palette.DOTS[len(palette.DOTS) // 2]}}, *made]


def _line(panel: Panel, mark: Line, colour: str) -> dict[str, Any]:
  return {**_places(panel, mark), "mode": "lines+markers" if marks_points(mark) else "lines", "opacity": mark.opacity,
          "line": {"color": colour, "width": mark.width, "dash": "dash" if mark.dashed else "solid"},
          "marker": {"color": colour, "size": 2.5 * mark.width}}


def marks_points(mark: Line) -> bool:
  """Whether a line's points are shown: where they are few, each of them was measured."""
  return not mark.dashed and len(mark.x) <= MARKED_LINE


def _places(panel: Panel, mark: Points | Line, colour: str = "") -> dict[str, Any]:
  """What points and lines have in common: where they are, and what hovering says, perhaps of a colour's value."""
  said = [f"<b>{plain(mark.label)}</b>"] * bool(mark.label) + ["%{text}"] * (mark.hover is not None)
  said += [f"{plain(panel.x_label) or 'x'}: %{{x:.6~g}}", f"{plain(panel.y_label) or 'y'}: %{{y:.6~g}}"]
  if colour:
    said.append(f"{plain(panel.colour_label) or 'colour'}: {colour}")
  trace = {"type": "scatter", "x": compact(mark.x), "y": compact(mark.y), "hovertemplate": "<br>".join(said) + _NO_NAME}
  return trace if mark.hover is None else {**trace, "text": [plain(text) for text in mark.hover]}


_NO_NAME = "<extra></extra>"  # else Plotly writes the trace's name beside the box


def _heatmap(panel: Panel) -> dict[str, Any]:
  """Cells by index, since labels may repeat; missing ones let a grey background through."""
  (mark,) = panel.marks
  low, high = limits(mark.z, mark.low, mark.high, mark.diverging)
  said = [[_cell(mark, row, column) for column in range(len(mark.x))] for row in range(len(mark.y))]
  trace = {"type": "heatmap", "z": compact(mark.z), "text": said, "hovertemplate": "%{text}" + _NO_NAME,
           "coloraxis": "coloraxis", "hoverongaps": True}
  axes = {}
  for name, title, labels in (("xaxis", panel.x_label, mark.x), ("yaxis", panel.y_label, mark.y)):
    places = ticks(labels)
    axes[name] = {"title": {"text": plain(title)}, "tickmode": "array", "tickvals": places,
                  "ticktext": [plain(shortened(labels[place])) for place in places],
                  "showgrid": False, "zeroline": False,
                  "range": [-0.5, len(labels) - 0.5] if name == "xaxis" else [len(labels) - 0.5, -0.5]}
  stops = palette.DIVERGING if mark.diverging else palette.CELLS
  return {"data": [trace], "layout": {**axes, "plot_bgcolor": palette.MISSING, "showlegend": False,
                                      "coloraxis": _colour_axis(panel, low, high, stops)}}


def _cell(mark: Heatmap, row: int, column: int) -> str:
  value = mark.z[row, column]
  number = f"{value:.5g}" if math.isfinite(value) else "not finite"
  beside = "" if mark.hover is None else f"<br>{plain(str(mark.hover[row, column]))}"
  return f"{plain(mark.y[row])}, {plain(mark.x[column])}: <b>{number}</b>{beside}"


def _colour_axis(panel: Panel, low: float, high: float, stops: tuple[str, ...]) -> dict[str, Any]:
  label = f"<br>{plain(panel.colour_label)}" * bool(panel.colour_label)  # Plotly alone sets it too near the numbers
  bar = {"thickness": 10, "outlinewidth": 0, "xpad": 6, "title": {"text": label, "side": "right", "font": {"size": 12}}}
  return {"cmin": low, "cmax": high, "colorscale": palette.colour_scale(stops), "colorbar": bar}
