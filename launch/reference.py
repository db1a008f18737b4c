"""Writes the reference pages of config keys and jobs from the code: python -m launch.reference

tests/test_docs.py fails where the pages differ from what this writes.
"""

import argparse
import ast
from collections.abc import Iterator
import dataclasses
import inspect
import io
import pathlib
import textwrap
import tokenize
import types
import typing

from diffeq_nnx import main as main_lib
from diffeq_nnx.config import Config
from diffeq_nnx.config_fields import plain_type
from diffeq_nnx.jobs import JOBS
from diffeq_nnx.parallel.console import markdown

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "reference"
WIDTH = 120
CONFIG_PAGE = """# Every config key

`python -m launch.reference` writes this page from `diffeq_nnx/config.py` and `diffeq_nnx/config_model.py`.

A config file is Python with a function `get_config(argument)`, which changes the values of
`diffeq_nnx.config.default()`; `configs/tiny.py` is a small one. On the command line `--config.KEY=VALUE` changes a key,
for example `--config.train.steps=500`. An unknown key, a value of another type and a value that breaks its rule end the
command with one line that names the key, the rule and the nearest name.
"""
JOBS_PAGE = """# Every job and its flags

`python -m launch.reference` writes this page from the program itself. `python -m diffeq_nnx.main --help` prints the
list of jobs, and `--help --job=NAME` the flags of one.
"""


def list_sections(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
  """Yields the prefix of the keys and the class of each section, in the order of their fields."""
  yield prefix, cls
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      yield from list_sections(field.type, f"{prefix}{field.name}.")


def read_meanings(cls: type) -> dict[str, str]:
  """Returns what the comments of a section's source say of each field: those above it, and those behind it."""
  source = inspect.getsource(cls)
  comments = {
    token.start[0]: token.string.lstrip("# ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline)
    if token.type == tokenize.COMMENT
  }
  (definition,) = ast.parse(source).body
  meanings, last = {}, 0
  for node in definition.body:
    if isinstance(node, ast.AnnAssign):
      meanings[node.target.id] = " ".join(text for line, text in comments.items() if last < line <= node.end_lineno)
    last = node.end_lineno
  return meanings


def describe_type(field: dataclasses.Field) -> str:
  """Returns the type of a field and the rule of its values, as a cell of a table."""
  if "choices" in field.metadata:
    return "one of " + ", ".join(f"`{name}`" for name in field.metadata["choices"])
  name = plain_type(field.type).__name__
  if name == "tuple":
    name = f"tuple of {typing.get_args(field.type)[0].__name__}"
  rule = field.metadata.get("rule", "").removeprefix("must be ").replace("must lie between", "between")
  return f"{name}{', ' if rule else ''}{rule}{' or None' if isinstance(field.type, types.UnionType) else ''}"


def write_config_page() -> str:
  """Returns the page of config keys: a table for each section."""
  parts = [CONFIG_PAGE]
  for prefix, cls in list_sections():
    meanings = read_meanings(cls)
    rows = [
      [f"`{prefix}{field.name}`", describe_type(field), f"`{field.default!r}`", escape(meanings[field.name])]
      for field in dataclasses.fields(cls)
      if not dataclasses.is_dataclass(field.type)
    ]
    text = "\n\n".join(textwrap.fill(part, WIDTH) for part in inspect.getdoc(cls).split("\n\n"))
    title = prefix.rstrip(".") or "The top level"
    parts.append(f"## {title}\n\n{text}\n\n{markdown(['key', 'type and rule', 'default', 'meaning'], rows)}\n")
  return "\n".join(parts)


def write_jobs_page() -> str:
  """Returns the page of jobs: a table of them, the flags of each, and those of all."""
  jobs = markdown(["job", "what it does"], [[f"[{name}](#{name})", job.summary] for name, job in JOBS.items()])
  parts = [JOBS_PAGE, f"{jobs}\n", f"## Flags of every job\n\n{list_flags(main_lib.COMMON_FLAGS)}"]
  for name, job in JOBS.items():
    example = f"```sh check\n{main_lib.example_of(name)}\n```\n"
    flags_text = f"\n{list_flags(job.flags)}" if job.flags else ""
    parts.append(f"## {name}\n\n{job.summary[0].upper()}{job.summary[1:]}.\n\n{example}{flags_text}")
  return "\n".join(parts)


def list_flags(names: tuple[str, ...]) -> str:
  """Returns a table of flags with their help."""
  return markdown(["flag", "meaning"], [[f"`--{name}`", escape(main_lib.help_of(name))] for name in names]) + "\n"


def escape(text: str) -> str:
  """Returns text as a cell of a Markdown table holds it."""
  return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES = {"config.md": write_config_page, "jobs.md": write_jobs_page}


def main() -> None:
  """Writes the pages."""
  argparse.ArgumentParser(description=__doc__).parse_args()
  for name, write in PAGES.items():
    (FOLDER / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
  main()
