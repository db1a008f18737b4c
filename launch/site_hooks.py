"""Hooks of MkDocs, named in mkdocs.yml: files outside docs/ become pages, and formulas become MathML.

Browsers draw MathML by themselves, so that a page needs no script from another site.
"""

import html as html_lib
import pathlib
import re

from latex2mathml import converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
PAGES_OUTSIDE = ("demo.ipynb", "CONTRIBUTING.md", "CHANGELOG.md")


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages that lie outside docs/."""
  for name in PAGES_OUTSIDE:
    files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
  return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Drops the second word of a block's language, which is for tests, and `docs/` from the links of pages outside it."""
  markdown = re.sub(r"^```(sh check|text output)$", lambda found: f"```{found[1].split()[0]}", markdown, flags=re.M)
  return re.sub(r"\]\(docs/", "](", markdown) if page.file.src_uri in PAGES_OUTSIDE else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Turns the formulas of paragraphs, outside code, into MathML."""
  formula = r"<code>.*?</code>|(\$\$?)(.+?)\1"
  convert = lambda paragraph: re.sub(formula, _convert, paragraph[0], flags=re.DOTALL)
  return re.sub(r"<p>.*?</p>", convert, html, flags=re.DOTALL)


def _convert(found: re.Match) -> str:
  if found[1] is None:
    return found[0]
  return converter.convert(html_lib.unescape(found[2]), display="block" if found[1] == "$$" else "inline")
