"""Charts as data: points, lines, heat maps, colored texts and tables.

Values may be infinite or not a number. They are left out of a drawing: a gap in a line, a gray cell of a heat map, a
gray point where only the color is missing, a token without a color.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from diffeq_nnx.analysis.pages import palette

MAX_POINTS = 4000  # drawn of one mark: a browser keeps an SVG element for each
SIGNS: dict[int, int | str] = dict(zip(range(0x20), range(0x2400, 0x2420)))  # the "control pictures" of Unicode
# other control characters, marks that change the direction of what follows, and halves of characters
HIDDEN = (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
SIGNS |= dict.fromkeys(HIDDEN, "\N{REPLACEMENT CHARACTER}")
SIGNS |= {**dict.fromkeys(map(ord, "\n\x85\u2028\u2029"), "⏎"), ord("\t"): "⇥"}


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
  """A scatter plot."""

  x: np.ndarray  # [N]
  y: np.ndarray  # [N]
  label: str = ""  # in the legend; marks of a chart with the same label have the same color
  hover: Sequence[str] | None = None  # [N] shown by the page beside the values
  color: np.ndarray | None = None  # [N] values for the panel's color scale; None: the label's color
  size: float = 5.0  # diameter in pixels of the page

  def __post_init__(self):
    _make_arrays(self, x=float, y=float, hover=object, color=float)

  def thin(self) -> "Points":
    """The points with finite x and y; of more than `MAX_POINTS`, a part that is even in y and keeps all extremes."""
    arrays: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
    kept = np.flatnonzero(np.isfinite(self.x) & np.isfinite(self.y))
    if len(kept) > MAX_POINTS:
      by_y = kept[np.argsort(self.y[kept])]
      parts = [by_y[np.linspace(0, len(kept) - 1, MAX_POINTS - 4).round().astype(int)]]
      for key in (self.x, self.x if self.color is None else self.color):
        shown = kept[np.isfinite(key[kept])]
        parts.append(shown[np.argsort(key[shown])][[0, -1] if len(shown) else []])
      kept = np.unique(np.concatenate(parts))
    return dataclasses.replace(self, **{name: array[kept] for name, array in arrays.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
  """A line with gaps where a point is not finite."""

  x: np.ndarray  # [N]
  y: np.ndarray  # [N]
  label: str = ""  # as of `Points`
  dashed: bool = False
  width: float = 2.0  # in pixels of the page
  color: str | None = None  # "#rrggbb"; None: the label's

  def __post_init__(self):
    _make_arrays(self, x=float, y=float)

  @property
  def dotted(self) -> bool:
    """Whether its points are shown: where they are few, each is a measurement."""
    return not self.dashed and len(self.x) <= 24


@dataclasses.dataclass(frozen=True, eq=False)
class Heatmap:
  """A matrix of fractions, from 0 to 1, as colored cells."""

  x: Sequence[str]  # [X] labels of the columns, all different
  y: Sequence[str]  # [Y] labels of the rows from the top down, all different
  z: np.ndarray  # [Y, X]

  def __post_init__(self):
    _make_arrays(self, z=float)


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
  """One pair of axes."""

  title: str
  x_label: str
  y_label: str
  marks: Sequence[Points | Line] = ()
  heatmap: Heatmap | None = None
  color_label: str = ""  # beside the color scale

  @property
  def color_limits(self) -> tuple[float, float] | None:
    """The ends of the color scale; None if there is none."""
    if self.heatmap:
      return 0.0, 1.0
    values = [mark.color for mark in self.marks if isinstance(mark, Points) and mark.color is not None]
    return palette.limits(np.concatenate(values)) if values else None


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
  """Panels that belong together."""

  name: str  # of its file, without the ending
  title: str  # above it
  caption: str  # below it
  panels: Sequence[Panel]  # from left to right, then down
  columns: int = 2  # panels side by side where there is room

  def thin(self) -> "Chart":
    """The chart with `Points.thin`; if some had too many, the caption says how many of how many are drawn."""
    before = [mark for panel in self.panels for mark in panel.marks if isinstance(mark, Points)]
    after: dict[Any, Points] = {mark: mark.thin() for mark in before}
    panels = [dataclasses.replace(p, marks=[after.get(mark, mark) for mark in p.marks]) for p in self.panels]
    shown, total = (sum(len(mark.x) for mark in marks) for marks in (after.values(), before))
    crowded = any(len(mark.x) > MAX_POINTS for mark in before)
    note = f" {shown:,} of {total:,} points are drawn." if crowded else ""
    return dataclasses.replace(self, panels=panels, caption=(self.caption + note).strip())

  def color_of(self, mark: Points | Line) -> str:
    """The color of a mark that has no color scale."""
    labels = list(dict.fromkeys(mark.label for panel in self.panels for mark in panel.marks if mark.label))
    own = mark.color if isinstance(mark, Line) else None
    return own or palette.LINES[labels.index(mark.label) % len(palette.LINES) if mark.label else 0]


@dataclasses.dataclass(frozen=True, eq=False)
class ColoredText:
  """A text with each token's background colored by its value."""

  name: str  # as of `Chart`
  title: str
  caption: str
  pieces: Sequence[str]  # [N] the tokens' texts
  values: np.ndarray  # [N]
  value_label: str  # the quantity, with its unit
  diverging: bool = False  # red above 0, white at 0, blue below
  marked: int | None = None  # the token drawn in a frame
  marked_colored: bool = True  # if not, its value is shown without a color and is not part of the scale

  def __post_init__(self):
    _make_arrays(self, values=float)

  @property
  def colored_values(self) -> np.ndarray:
    """[N] the values, not a number where a token has no color."""
    hidden = None if self.marked_colored else self.marked
    return np.where(np.arange(len(self.values)) == hidden, np.nan, self.values)

  @property
  def tokens(self) -> list[tuple[str, float, tuple[str, str] | None]]:
    """[N] text, value, and colors of the background and the letters."""
    return list(zip(self.pieces, self.values, palette.token_colors(self.colored_values, self.diverging)))

  @property
  def scale(self) -> tuple[list[str], float, float]:
    """The colors of the color scale and its ends."""
    stops = palette.DIVERGING if self.diverging else palette.TINTS
    return stops, *palette.limits(self.colored_values, diverging=self.diverging)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Rows of text."""

  title: str
  caption: str
  header: Sequence[str]  # [C]
  rows: Sequence[Sequence[str]]  # [R, C]


Section = tuple[str, str, Sequence[Chart | ColoredText | Table]]  # heading, paragraph, items


def visible(text: str) -> str:
  """The text on one line, with signs for line breaks, tabs and control characters, and dots for spaces alone."""
  return text.translate(SIGNS) if text.strip(" ") else "·" * len(text)


def _make_arrays(item: Any, **kinds: type) -> None:
  """Turns these attributes into arrays, where they are given."""
  given = vars(item)
  given |= {name: np.asarray(given[name], kind) for name, kind in kinds.items() if given[name] is not None}
