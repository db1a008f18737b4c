"""Figures as data: points, lines, heat maps, coloured texts and tables.

Numbers become float64 arrays. They needn't be finite: what isn't is left out of a drawing, as a gap in a line, a grey
cell of a heat map, a grey point where only the colour is missing, a token without a colour.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from matplotlib import colors
import numpy as np

MAX_POINTS = 4000  # of one mark; a browser draws each as an element of its own


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
  """Dots.

  Attributes:
    x, y: [N] where they are.
    label: In the legend; marks of a figure with the same label have the same colour.
    hover: [N] what the page says of each, beside its numbers.
    colour: [N] values shown by a colour scale, whose label is the panel's `colour_label`; by default one colour.
    size: The diameter, in pixels of the page and in points of the PNG.
    opacity: From 0 to 1.

  Raises:
    ValueError: If lengths don't agree.
  """
  x: np.ndarray
  y: np.ndarray
  label: str = ""
  hover: Sequence[str] | None = None
  colour: np.ndarray | None = None
  size: float = 5.0
  opacity: float = 0.7

  def __post_init__(self):
    _hold_vectors(self, "x", "y", "colour")
    _hold_texts(self, "hover")
    _agree(self, "x", "y", "hover", "colour")


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
  """A line through points; it breaks where one isn't finite.

  Attributes:
    x, y: [N] the points, in order.
    label: In the legend; marks of a figure with the same label have the same colour.
    dashed: Dashes in place of a whole line.
    width: In pixels of the page; the PNG's is in proportion.
    colour: "#rrggbb", "#rgb" or a CSS colour's name; "black" is the colour of the text on a dark page. By default
      a colour of the palette.
    hover: [N] what the page says of each point, beside its numbers.
    opacity: From 0 to 1.

  Raises:
    ValueError: If lengths don't agree, or the colour is none.
  """
  x: np.ndarray
  y: np.ndarray
  label: str = ""
  dashed: bool = False
  width: float = 2.0
  colour: str | None = None
  hover: Sequence[str] | None = None
  opacity: float = 1.0

  def __post_init__(self):
    _hold_vectors(self, "x", "y")
    _hold_texts(self, "hover")
    _agree(self, "x", "y", "hover")
    if self.colour is not None and not (
        re.fullmatch(r"#([0-9a-fA-F]{3}){1,2}", self.colour) or self.colour in colors.CSS4_COLORS):
      raise ValueError(f"Line: colour={self.colour!r} is none that both a page and a PNG know; write #rrggbb or a name "
                       "of CSS in lower case")


@dataclasses.dataclass(frozen=True, eq=False)
class Heatmap:
  """A table of values as coloured cells; alone in its panel.

  Attributes:
    x: [X] labels of the columns; they may repeat.
    y: [Y] labels of the rows, from the top down.
    z: [Y, X] values.
    hover: [Y, X] what the page says of each cell, beside its labels and value.
    low, high: Where the colour scale ends; by default at the extremes.
    diverging: Blue below 0, white at 0, red above; the scale then reaches as far down as up.

  Raises:
    ValueError: If shapes don't agree.
  """
  x: Sequence[str]
  y: Sequence[str]
  z: np.ndarray
  hover: np.ndarray | None = None
  low: float | None = None
  high: float | None = None
  diverging: bool = False

  def __post_init__(self):
    _hold_texts(self, "x", "y")
    _hold(self, z=np.asarray(self.z, np.float64))
    if self.z.shape != (len(self.y), len(self.x)):
      raise ValueError(f"Heatmap: z has shape {self.z.shape}, and {len(self.y)} labels in y with {len(self.x)} in x "
                       f"want {(len(self.y), len(self.x))}")
    if self.hover is not None:
      _hold(self, hover=np.asarray(self.hover, object))
      if self.hover.shape != self.z.shape:
        raise ValueError(f"Heatmap: hover has shape {self.hover.shape} and z {self.z.shape}; give a text for each cell")


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
  """One pair of axes.

  Attributes:
    title, x_label, y_label: May be empty.
    marks: `Points` and `Line`s, or one `Heatmap`.
    colour_label: Beside the colour scale, where there is one.
    x_ticks: (place, text) of each tick on the x axis, for points and lines; by default round numbers.
    equal: Whether a unit of y is as long as one of x, for points and lines: then a circle looks like one.

  Raises:
    ValueError: If a heat map isn't alone.
  """
  title: str
  x_label: str
  y_label: str
  marks: Sequence[Points | Line | Heatmap]
  colour_label: str = ""
  x_ticks: Sequence[tuple[float, str]] | None = None
  equal: bool = False

  def __post_init__(self):
    _hold(self, marks=tuple(self.marks))
    if len(self.marks) > 1 and any(isinstance(mark, Heatmap) for mark in self.marks):
      raise ValueError(f"Panel {self.title!r}: a heat map has to be alone, and here are {len(self.marks)} marks; give "
                       "it a panel of its own")
    if self.x_ticks is not None:
      _hold(self, x_ticks=tuple((float(place), str(text)) for place, text in self.x_ticks))


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
  """Panels that belong together.

  Attributes:
    name: Of its file, without the ending; letters, digits, `.`, `_` and `-`.
    title, caption: Above and below it.
    panels: From left to right, then down.
    columns: How many panels stand side by side where there is room.

  Raises:
    ValueError: If the name can't be a file's, or there are no panels or no columns.
  """
  name: str
  title: str
  caption: str
  panels: Sequence[Panel]
  columns: int = 2

  def __post_init__(self):
    _hold(self, panels=tuple(self.panels))
    _check_name(self)
    if not self.panels or self.columns < 1:
      raise ValueError(f"Figure {self.name}: {len(self.panels)} panels in {self.columns} columns; give at least one of "
                       "each")


@dataclasses.dataclass(frozen=True, eq=False)
class ColouredText:
  """A text with each token's background coloured by its value.

  Attributes:
    name: As a figure's.
    title, caption: Above and below it.
    pieces: [N] the tokens' texts, any characters.
    values: [N] what the colours show.
    value_label: What the values are, with their unit.
    diverging: As a heat map's.
    marked: The index of the one token drawn in a frame.
    marked_coloured: Whether the marked token has a colour; if not, its value is told, and not part of the scale.

  Raises:
    ValueError: If lengths don't agree, the marked token isn't there, or the name can't be a file's.
  """
  name: str
  title: str
  caption: str
  pieces: Sequence[str]
  values: np.ndarray
  value_label: str
  diverging: bool = False
  marked: int | None = None
  marked_coloured: bool = True

  @property
  def coloured_values(self) -> np.ndarray:
    """[N] the values, not a number where a token has no colour."""
    apart = self.marked is not None and not self.marked_coloured
    return np.where(apart & (np.arange(len(self.values)) == self.marked), np.nan, self.values)

  def __post_init__(self):
    _hold_texts(self, "pieces")
    _hold_vectors(self, "values")
    _check_name(self)
    _agree(self, "pieces", "values")
    if self.marked is not None and not 0 <= self.marked < len(self.pieces):
      raise ValueError(f"ColouredText {self.name}: marked={self.marked} is none of the {len(self.pieces)} tokens; give "
                       "an index from 0")


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Rows of text.

  Attributes:
    title, caption: Above and below it.
    header: [C] names of the columns.
    rows: [R, C] cells.

  Raises:
    ValueError: If a row has another length than the header.
  """
  title: str
  caption: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]

  def __post_init__(self):
    _hold_texts(self, "header")
    _hold(self, rows=tuple(tuple(str(cell) for cell in row) for row in self.rows))
    for index, row in enumerate(self.rows):
      if len(row) != len(self.header):
        raise ValueError(f"Table {self.title!r}: row {index} has {len(row)} cells and the header {len(self.header)}; "
                         "give a cell for each column")


Section = tuple[str, str, Sequence[Figure | ColouredText | Table]]  # heading, paragraph, items


def drawable(figure: Figure) -> Figure:
  """The figure as both renderers draw it: without points that aren't finite, and at most `MAX_POINTS` to a mark.

  Where points had to go for their number, the caption says how many of how many are drawn.
  """
  panels = [dataclasses.replace(panel, marks=[_thinned(mark) if isinstance(mark, Points) else mark
                                              for mark in panel.marks]) for panel in figure.panels]
  before, after = ([mark for panel in panels for mark in panel.marks if isinstance(mark, Points)]
                   for panels in (figure.panels, panels))
  caption = figure.caption
  if any(np.sum(_placed(mark)) > MAX_POINTS for mark in before):
    shown, whole = (sum(len(mark.x) for mark in marks) for marks in (after, before))
    caption = f"{caption} {shown:,} of {whole:,} points are drawn.".strip()
  return dataclasses.replace(figure, panels=panels, caption=caption)


def visible(text: str) -> str:
  """The text on one line with signs for what has no shape: line breaks, tabs, control characters, lone spaces."""
  if text and not text.strip(" "):
    return "·" * len(text)
  return "".join(_SIGNS.get(char) or _sign(char) for char in text)


_SIGNS = {"\n": "⏎", "\t": "⇥", "\x7f": "␡", "\u2028": "⏎", "\u2029": "⏎", "\x85": "⏎"}


def _sign(char: str) -> str:
  code = ord(char)
  if code < 0x20:
    return chr(0x2400 + code)  # the block of pictures of control characters
  return "\N{REPLACEMENT CHARACTER}" if 0x80 <= code < 0xa0 or 0xd800 <= code < 0xe000 else char


def limits(values: np.ndarray, low: float | None = None, high: float | None = None,
           diverging: bool = False) -> tuple[float, float]:
  """The two ends of a colour scale for these values, the lower one first; never equal, always finite."""
  finite = values[np.isfinite(values)]
  low = float(finite.min(initial=np.inf)) if low is None else low
  high = float(finite.max(initial=-np.inf)) if high is None else high
  if diverging:
    reach = max((abs(end) for end in (low, high) if np.isfinite(end)), default=0) or 1.0
    return -reach, reach
  if not np.isfinite([low, high]).all():
    return 0.0, 1.0
  return (low, high) if low < high else (low - (0.5 * abs(low) or 0.5), low + (0.5 * abs(low) or 0.5))


def _placed(mark: Points) -> np.ndarray:
  """[N] bool: whether a point has a place."""
  return np.isfinite(mark.x) & np.isfinite(mark.y)


def _thinned(mark: Points) -> Points:
  """Points that have a place; of too many, evenly in the order of y, with the extremes of x, y and colour."""
  (kept,) = np.nonzero(_placed(mark))
  if len(kept) > MAX_POINTS:
    extremes = {kept[mark.x[kept].argmin()], kept[mark.x[kept].argmax()]}
    if mark.colour is not None and (coloured := kept[np.isfinite(mark.colour[kept])]).size:
      extremes |= {coloured[mark.colour[coloured].argmin()], coloured[mark.colour[coloured].argmax()]}
    in_order = kept[np.argsort(mark.y[kept], kind="stable")]
    evenly = in_order[np.linspace(0, len(kept) - 1, MAX_POINTS - len(extremes)).round().astype(np.int64)]
    kept = np.union1d(evenly, list(extremes))
  return pick(mark, kept)


def pick(mark: Points, kept: np.ndarray) -> Points:
  """The points at these indices."""
  hover = None if mark.hover is None else [mark.hover[index] for index in kept]
  colour = None if mark.colour is None else mark.colour[kept]
  return dataclasses.replace(mark, x=mark.x[kept], y=mark.y[kept], hover=hover, colour=colour)


def _hold(instance: Any, **values: Any) -> None:
  """Sets attributes of a frozen instance while it is made."""
  for name, value in values.items():
    object.__setattr__(instance, name, value)


def _hold_vectors(instance: Any, *names: str) -> None:
  for name in names:
    if (value := getattr(instance, name)) is not None:
      value = np.asarray(value, np.float64)
      if value.ndim != 1:
        raise ValueError(f"{type(instance).__name__}: {name} has shape {value.shape}; give one value a point")
      _hold(instance, **{name: value})


def _hold_texts(instance: Any, *names: str) -> None:
  for name in names:
    if (value := getattr(instance, name)) is not None:
      _hold(instance, **{name: tuple(str(text) for text in value)})


def _agree(instance: Any, *names: str) -> None:
  """Raises a ValueError unless these attributes are as long as each other, or None."""
  lengths = {name: len(getattr(instance, name)) for name in names if getattr(instance, name) is not None}
  if len(set(lengths.values())) > 1:
    told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
    raise ValueError(f"{type(instance).__name__}: {told}; give as many of each")


def _check_name(instance: Any) -> None:
  if not re.fullmatch(r"[\w-][\w.-]*", instance.name, re.ASCII):
    raise ValueError(f"{type(instance).__name__}: name={instance.name!r} can't name a file; use letters, digits, ., _ "
                     "and -")
