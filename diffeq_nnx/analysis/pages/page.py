"""One HTML file with figures that answer to mouse, finger and keyboard, which needs nothing but itself."""

from collections.abc import Sequence
import html
import importlib.resources
import json
import re
import string
from typing import Any

import numpy as np
from plotly import offline

from diffeq_nnx import files
from diffeq_nnx.analysis.pages import palette, traces
from diffeq_nnx.analysis.pages.charts import (
  ColouredText,
  Figure,
  Heatmap,
  Line,
  Panel,
  Points,
  Section,
  Table,
  drawable,
  limits,
  visible,
)

# what the browser may load: nothing but what is in the file
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(path: str, title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> None:
  """Writes the page, whole or not at all.

  Where a browser runs no scripts, each figure's place names the PNG file that `png.draw` makes of it: NAME.png beside
  the page. In the page, drawAllFigures() draws what hasn't come near the window yet, and returns a promise.

  Args:
    path: Of the HTML file.
    title: Of the page.
    facts: (name, value) pairs, shown at the top.
    sections: (heading, paragraph, items). A blank line in a paragraph starts another; it may be empty.

  Raises:
    ValueError: If two figures or texts have the same name.
  """
  names = [item.name for _, _, items in sections for item in items if not isinstance(item, Table)]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise ValueError(f"{path}: more than one figure is called {twice[0]!r}; give each a name of its own")
  page = string.Template(_part("page.html")).substitute(
      title=_text(title), policy=_POLICY, style=_part("page.css"), script=_part("page.js"), facts=_facts(facts),
      plotly=offline.get_plotlyjs().replace("</script", "<\\/script"), contents=_contents(sections),
      sections="\n".join(_section(index, *section) for index, section in enumerate(sections, 1)))
  files.write(path, page.encode())


def _part(name: str) -> str:
  return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
  """Prose as HTML; what UTF-8 can't hold becomes a question mark."""
  return html.escape(str(text).encode("utf-8", "replace").decode())


def _sign(text: str) -> str:
  """A token or another text on one line, with signs for line breaks and the like, as HTML."""
  return html.escape(visible(text))


def _json(value: Any) -> str:
  """JSON for a script element, which no text within can end."""
  return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _facts(facts: Sequence[tuple[str, str]]) -> str:
  rows = "\n".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
  return f'<dl class="facts">\n{rows}\n</dl>' if facts else ""


def _contents(sections: Sequence[Section]) -> str:
  entries = []
  for index, (heading, _, items) in enumerate(sections, 1):
    inner = "".join(f'<li><a href="#{_anchor(index, place, item)}">{_text(item.title)}</a></li>'
                    for place, item in enumerate(items, 1) if item.title)
    entries.append(f'<li><a href="#section-{index}">{_text(heading)}</a>{f"<ol>{inner}</ol>" if inner else ""}</li>')
  listed = "\n".join(entries)
  return f'<nav aria-labelledby="contents">\n<h2 id="contents">Contents</h2>\n<ol>\n{listed}\n</ol>\n</nav>'


def _anchor(section: int, place: int, item: Figure | ColouredText | Table) -> str:
  return f"table-{section}-{place}" if isinstance(item, Table) else f"figure-{item.name}"


def _section(index: int, heading: str, paragraph: str, items: Sequence[Figure | ColouredText | Table]) -> str:
  written = [f'<section aria-labelledby="section-{index}">', f'<h2 id="section-{index}">{_text(heading)}</h2>']
  written += [f"<p>{_text(part)}</p>" for part in re.split(r"\n\s*\n", paragraph) if part.strip()]
  makers = {Figure: _figure, ColouredText: _coloured_text, Table: _table}
  for place, item in enumerate(items, 1):
    anchor = _anchor(index, place, item)
    body, caption = makers[type(item)](item)
    title = f'<h3 id="{anchor}-title">{_text(item.title)}</h3>\n' if item.title else ""
    named = f' aria-labelledby="{anchor}-title"' if item.title else ""
    below = f"\n<figcaption>{_text(caption)}</figcaption>" if caption else ""
    written.append(f'<figure id="{anchor}"{named}>\n{title}{body}{below}\n</figure>')
  return "\n".join([*written, "</section>"])


def _figure(figure: Figure) -> tuple[str, str]:
  """The panels, each a drawing of its own so that they can stack; and the caption."""
  figure = drawable(figure)
  columns = min(figure.columns, len(figure.panels))
  panels = "\n".join(_panel(panel, colours, columns) for panel, colours in
                     zip(figure.panels, palette.mark_colours(figure)))
  file = f"{figure.name}.png"
  instead = ("<noscript><p>Drawing this needs JavaScript; as a picture it is in "
             f'<a href="{file}">{file}</a>.</p></noscript>')
  return f'<div class="panels" style="--columns:{columns}">\n{panels}\n</div>\n{instead}', figure.caption


def _panel(panel: Panel, colours: list[str], columns: int) -> str:
  """A title, and a box for Plotly with what it draws there."""
  title = f"<h4>{_text(panel.title)}</h4>\n" if panel.title else ""
  size = {"height": f"{420 if columns == 1 else 340}px"}
  for mark in panel.marks:
    if isinstance(mark, Heatmap):  # as large as its labels need; a narrow window scrolls it
      rows, across = (min(len(labels), traces.MAX_ROWS) for labels in (mark.y, mark.x))
      size = {"height": f"{max(360, 130 + 18 * rows)}px", "needed": f"{130 + 18 * rows}px",
              "least": f"{130 + 16 * across}px"}
  style = ";".join(f"--{name}:{value}" for name, value in size.items())
  return (f'<div class="panel">\n{title}<div class="scroll"><div class="plot" style="{style}" role="img" '
          f'aria-label="{html.escape(_summary(panel))}"></div>'
          f'<script type="application/json">{_json(traces.plot(panel, colours))}</script></div>\n</div>')


def _summary(panel: Panel) -> str:
  """A panel in words, for those who can't see it."""
  told = []
  for kind, noun in ((Points, "points"), (Line, "lines")):
    marks = [mark for mark in panel.marks if isinstance(mark, kind)]
    if marks:
      count = len(marks) if kind is Line else sum(len(mark.x) for mark in marks)
      labels = ", ".join(dict.fromkeys(mark.label for mark in marks if mark.label))
      told.append(f"{count:,} {noun if count != 1 else noun[:-1]}" + (f" ({labels})" if labels else ""))
  for mark in panel.marks:
    if isinstance(mark, Heatmap):
      low, high = limits(mark.z)
      told.append(f"{len(mark.y)} by {len(mark.x)} cells from {low:.4g} to {high:.4g}")
  axes = " by ".join(label for label in (panel.y_label, panel.x_label) if label)
  return visible(": ".join(part for part in (panel.title, axes, " and ".join(told)) if part))


def _coloured_text(text: ColouredText) -> tuple[str, str]:
  """The tokens with their colours, which show without any script; the scale below them; and the caption."""
  low, high = limits(text.coloured_values, diverging=text.diverging)
  stops = palette.DIVERGING if text.diverging else palette.TINTS
  colours = palette.token_colours(text.coloured_values, low, high, stops)
  tokens = []
  for index, (piece, value, colour) in enumerate(zip(text.pieces, text.values, colours)):
    number = f"{value:.4g}" if np.isfinite(value) else "not finite"
    style = f' style="background:{colour[0]};color:{colour[1]}"' if colour else ""
    marked = " marked" * (index == text.marked)
    after = "<br>" if "\n" in piece else ""
    told = html.escape(f"token {index}, {visible(text.value_label) or 'value'}: {number}")
    tokens.append(f'<span class="token{marked}" role="listitem" tabindex="{-1 if index else 0}" data-told="{told}" '
                  f'aria-label="{_sign(piece)}, {told}"{style}>{_sign(piece)}</span>{after}')
  gradient = ", ".join(stops)
  body = (f'<p class="tokens" role="list" aria-label="{_sign(text.title or text.name)}">{"".join(tokens)}</p>\n'
          f'<div class="scale"><span>{_text(text.value_label)}</span><span>{low:.3g}</span>'
          f'<i style="background:linear-gradient(to right, {gradient})"></i><span>{high:.3g}</span></div>')
  return body, text.caption


def _table(table: Table) -> tuple[str, str]:
  """The table, in a box that scrolls where it is too wide; numbers to the right; and the caption."""
  columns = list(zip(*table.rows)) or [() for _ in table.header]
  classes = [' class="number"' if any(column) and all(map(_is_number, column)) else "" for column in columns]
  head = "".join(f'<th scope="col"{kind}>{_text(cell)}</th>' for cell, kind in zip(table.header, classes))
  body = "\n".join("<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row, classes)) + "</tr>"
                   for row in table.rows)
  named = f' role="region" aria-label="{_text(table.title)}"' if table.title else ""
  inside = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
  return f'<div class="scroll" tabindex="0"{named}>\n{inside}\n</div>', table.caption


def _is_number(cell: str) -> bool:
  """Whether a cell is nothing, or a number with perhaps a unit behind it."""
  number = r"[-+−±<>≤≥~]?\s?[\d.,]*\d[\d.,]*(e[-+]?\d+)?(\s?[^\d\s]{1,5})?"
  return bool(re.fullmatch(rf"|{number}|[-–—]|nan|-?inf", cell.strip()))
