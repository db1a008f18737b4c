"""Hooks of MkDocs, named in mkdocs.yml: files outside docs/ become pages, and formulas become MathML.

Browsers draw MathML by themselves, so that a page needs no script from another site.
"""

import pathlib
import re

from latex2mathml import converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
PAGES_OUTSIDE = ("demo.ipynb", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages that lie outside docs/."""
  for name in PAGES_OUTSIDE:
    files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
  return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Drops the second word of a block's language, which is for tests, and `docs/` from the links of pages outside it."""
  markdown = re.sub(r"^```(sh check|text output)$", lambda found: f"```{found[1].split()[0]}", markdown, flags=re.M)
  return re.sub(r"\]\(docs/", "](", markdown) if page.file.src_uri in PAGES_OUTSIDE else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Replaces the formulas that pymdownx.arithmatex found."""
  return re.sub(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', _convert, html, flags=re.DOTALL)


def _convert(found: re.Match) -> str:
  text = found[3].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
  return converter.convert(text, display="block" if found[2] == "[" else "inline")
