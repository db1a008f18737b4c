"""Colors of the page and of the PNGs, which people with color blindness can tell apart."""

import matplotlib
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_hex
from matplotlib.ticker import AutoLocator
import numpy as np


def _stops(name: str, start: float = 0.0, end: float = 1.0) -> list[str]:
  """Nine colors of a color map of Matplotlib, at equal distances."""
  return [to_hex(color) for color in matplotlib.colormaps[name](np.linspace(start, end, 9))]


# Okabe and Ito's (2008), with gray in place of black and yellow, which are lost on a dark or a white page
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
MISSING = "#a3a7ad"  # of a value that isn't finite
POINT_OPACITY = 0.7
CELLS = _stops("viridis", 0.2, 0.93)  # the part that is seen on dark and on white
TINTS = _stops("Blues")  # behind a token
DIVERGING = _stops("RdBu_r")


def color_map(stops: list[str]) -> Colormap:
  """The color map of Matplotlib through these colors."""
  return LinearSegmentedColormap.from_list("stops", stops).with_extremes(bad=MISSING)


def limits(values: np.ndarray, diverging: bool = False) -> tuple[float, float]:
  """The ends of a color scale for these values: finite, the first below the second."""
  finite = values[np.isfinite(values)]
  if diverging:
    finite = np.append(finite, -finite)
  low, high = AutoLocator().nonsingular(finite.min(initial=np.inf), finite.max(initial=-np.inf))
  return float(low), float(high)


def token_colors(values: np.ndarray, diverging: bool = False) -> list[tuple[str, str] | None]:
  """The colors of each token's background and letters; None where the value isn't finite."""
  shades = color_map(DIVERGING if diverging else TINTS)(Normalize(*limits(values, diverging=diverging))(values))[:, :3]
  # relative luminance as in the Web Content Accessibility Guidelines 2.2; both sides of 0.179 have a contrast above 4.5
  luminance = np.where(shades <= 0.04045, shades / 12.92, ((shades + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
  letters = np.where(luminance > 0.179, "#000000", "#ffffff").tolist()
  return [(to_hex(s), c) if np.isfinite(v) else None for s, c, v in zip(shades, letters, values)]
