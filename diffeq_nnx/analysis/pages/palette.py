"""Colours that both renderers draw with; all can be told apart by the colour-blind."""

import matplotlib
from matplotlib import colors
import numpy as np

from diffeq_nnx.analysis.pages.charts import Figure, Line, Points

# Okabe and Ito's (2008) without black and yellow, which vanish on a dark and on a white page, and with a grey
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
MISSING = "#a3a7ad"  # a value that isn't finite

_VIRIDIS = matplotlib.colormaps["viridis"]
CELLS = tuple(colors.to_hex(colour) for colour in _VIRIDIS(np.linspace(0, 1, 17)))
DOTS = tuple(colors.to_hex(colour) for colour in _VIRIDIS(np.linspace(0.2, 0.93, 17)))  # seen on dark and on white
TINTS = ("#f7fafc", "#d9e8f2", "#b3d1e6", "#84b5d6", "#5497c4", "#2a79ae", "#0b5a8f")  # behind a text: none at first
DIVERGING = ("#1f4e8c", "#3f7fbf", "#86b4dc", "#c9deee", "#f8f8f8", "#f6d3c5", "#eb9c7e", "#cc5a45", "#96202b")


def colour_map(stops: tuple[str, ...]) -> colors.Colormap:
  """Matplotlib's colour map through these colours at equal distances; `MISSING` for what isn't finite."""
  return colors.LinearSegmentedColormap.from_list("stops", stops).with_extremes(bad=MISSING)


def colour_scale(stops: tuple[str, ...]) -> list[list]:
  """Plotly's colour scale through these colours at equal distances."""
  return [[round(place, 4), colour] for place, colour in zip(np.linspace(0, 1, len(stops)).tolist(), stops)]


def token_colours(values: np.ndarray, low: float, high: float, stops: tuple[str, ...]) -> list[tuple[str, str] | None]:
  """The background and the text colour of each value on a scale from `low` to `high`; None where it isn't finite."""
  colour_of = colour_map(stops)
  found = []
  for value in values:
    if not np.isfinite(value):
      found.append(None)
      continue
    behind = colour_of(float(np.clip((value - low) / (high - low), 0, 1)))
    found.append((colors.to_hex(behind), "#000000" if luminance(behind) > 0.179 else "#ffffff"))
  return found


def luminance(colour: str | tuple[float, ...]) -> float:
  """Relative luminance of a colour, 0 to 1, as in the Web Content Accessibility Guidelines 2.2."""
  channels = np.array(colors.to_rgb(colour))
  linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055)**2.4)
  return float(linear @ [0.2126, 0.7152, 0.0722])


def mark_colours(figure: Figure) -> list[list[str]]:
  """The colour of each mark of each panel: its own, its label's, or the next; a heat map's means nothing."""
  of_label, found = {}, []
  for panel in figure.panels:
    here = []
    for index, mark in enumerate(panel.marks):
      colour = getattr(mark, "colour", None) if isinstance(mark, Line) else None
      if colour is None and isinstance(mark, (Points, Line)) and mark.label:
        colour = of_label.setdefault(mark.label, LINES[len(of_label) % len(LINES)])
      here.append(colour or LINES[index % len(LINES)])
    found.append(here)
  return found
