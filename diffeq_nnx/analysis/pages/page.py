"""One HTML file with interactive charts, which needs no network."""

from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup
import numpy as np
from plotly import graph_objects as go
from plotly import offline

from diffeq_nnx import files
from diffeq_nnx.analysis.pages import palette
from diffeq_nnx.analysis.pages.charts import Chart, Line, Panel, Points, Section, Table, visible

ENTITIES = {ord(char): f"&#{ord(char)};" for char in "&<>$%"}  # Plotly interprets these characters in texts
CLEAR = "rgba(0,0,0,0)"
LAYOUT: dict[str, Any] = {"template": "none", "hovermode": "closest", "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR}
LAYOUT |= {"modebar": {"bgcolor": CLEAR, "color": "#8a8a8a", "activecolor": "#0072b2"}}


def write_page(path: str, title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> None:
  """Writes the page atomically; `facts` are (name, value) pairs, which it shows at the top.

  A chart is drawn when it comes near the window. In the page, drawAll() draws the rest and returns a promise. Without
  JavaScript, each chart is a link to its PNG file beside the page (see `png.draw`).
  """
  env = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True, trim_blocks=True)
  env.filters |= {"visible": visible, "plot": _plot}
  env.tests |= {"chart": lambda item: isinstance(item, Chart), "table": lambda item: isinstance(item, Table)}
  page = env.get_template("page.html").render(
    title=title, facts=facts, sections=sections, plotly=Markup(offline.get_plotlyjs())
  )
  files.write(path, page.encode("utf-8", "replace"))


def _plot(panel: Panel, chart: Chart) -> Markup:
  """What Plotly.newPlot takes, as JSON; style sheets set the colors of texts, grid and background."""
  figure = go.Figure(layout=LAYOUT)
  figure.update_layout(height=420 if chart.columns == 1 else 340, margin={"l": 62, "r": 20, "t": 26, "b": 46})
  figure.update_layout(font={"size": 12, "family": "inherit"}, legend={"orientation": "h", "y": 1, "yanchor": "bottom"})
  figure.update_xaxes(title={"text": _plain(panel.x_label), "standoff": 8})
  figure.update_yaxes(title={"text": _plain(panel.y_label), "standoff": 8})
  if panel.color_limits:
    low, high = panel.color_limits
    bar = {"thickness": 10, "outlinewidth": 0, "title": {"text": _plain(panel.color_label), "side": "right"}}
    figure.update_layout(coloraxis={"cmin": low, "cmax": high, "colorscale": palette.CELLS, "colorbar": bar})
  if panel.heatmap:
    x, y, z = (list(map(_plain, panel.heatmap.x)), list(map(_plain, panel.heatmap.y)), panel.heatmap.z)
    text = [[f"{value:.5g}" for value in row] for row in z]
    figure.add_heatmap(
      x=x, y=y, z=z, text=text, hovertemplate="%{y}, %{x}: %{text}<extra></extra>", coloraxis="coloraxis"
    )
    figure.update_xaxes(type="category", showgrid=False, automargin=True)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", automargin=True)
    figure.update_layout(plot_bgcolor=palette.MISSING)  # of cells that aren't finite
  listed = {mark.label: mark for mark in panel.marks[::-1] if mark.label and not isinstance(mark.color, np.ndarray)}
  for mark in panel.marks:
    trace = _trace(panel, mark, chart.color_of(mark))
    figure.add_trace(trace.update(showlegend=mark is listed.get(mark.label)))
  return Markup(figure.to_json())


def _trace(panel: Panel, mark: Points | Line, color: str) -> go.Scatter:
  """Points or a line, with the text that hovering shows."""
  label, x, y = map(_plain, (mark.label, panel.x_label or "x", panel.y_label or "y"))
  shown = [f"<b>{label}</b>"] * bool(label) + [f"{x}: %{{x:.6~g}}", f"{y}: %{{y:.6~g}}"]
  trace = go.Scatter(x=mark.x, y=mark.y, name=label, legendgroup=label, marker={"color": color, "line": {"width": 0}})
  if isinstance(mark, Line):
    line = {"color": color, "width": mark.width, "dash": "dash" if mark.dashed else "solid"}
    trace.update(mode="lines+markers" if mark.dotted else "lines", line=line)
    trace.marker.size = 2.5 * mark.width
  else:
    trace.update(mode="markers", marker={"size": mark.size, "opacity": palette.POINT_OPACITY})
    if mark.hover is not None:
      trace.text, shown = list(map(_plain, mark.hover)), ["%{text}", *shown]
    if mark.color is not None:
      finite = np.isfinite(mark.color)
      colors = mark.color if finite.all() else np.where(finite, mark.color.astype(object), palette.MISSING)
      trace.update(marker={"color": colors, "coloraxis": "coloraxis"}, customdata=[f"{v:.5g}" for v in mark.color])
      shown.append(f"{_plain(panel.color_label or 'color')}: %{{customdata}}")
  return trace.update(hovertemplate="<br>".join(shown) + "<extra></extra>")


def _plain(text: str) -> str:
  """A text that Plotly shows as it is."""
  return visible(text).translate(ENTITIES)
