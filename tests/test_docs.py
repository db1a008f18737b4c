"""The pages: every code block is executed or checked, every link leads somewhere, the map names all there is.

A block of `sh` or `python` is run, in a copy of the project's folders, with training cut to a few steps. A block of
`sh check` would take hours, downloads or hardware: its flags are parsed by the program itself, and nothing is run.
"""

import argparse
import ast
import importlib
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.test_resume import FAST

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"),
                                                             ROOT / "kernels" / "README.md"])
LANGUAGES = ("sh", "sh check", "python", "text")
SHORT = ("--config.train.steps=2", "--config.train.log_every=1", "--config.eval.every=2", "--config.eval.max_batches=1",
         "--config.checkpoint.every=2")
PARSE = """import sys
from diffeq_nnx import config, main
main.parse(sys.argv)
if main.CONFIG.value is not None:
  config.from_config_dict(main.CONFIG.value)
"""  # a process of its own: flags are defined once
DONE: dict[pathlib.Path, list[list[str]]] = {}  # commands by the folder that they ran in
PYTHONS = ("python", "python3", ".venv/bin/python")


class Block(NamedTuple):
  """A fenced block: its language, its lines, and where it begins."""
  language: str
  text: str
  line: int

  def commands(self) -> list[list[str]]:
    """The words of each command, without comments."""
    lines = self.text.replace("\\\n", " ").splitlines()
    return [words for line in lines for words in _split(shlex.split(line, comments=True))]


def _split(words: list[str]) -> list[list[str]]:
  parts = [[]]
  for word in words:
    parts.append([]) if word == "&&" else parts[-1].append(word)
  return [part for part in parts if part]


def blocks(page: str) -> list[Block]:
  """The fenced blocks of a page."""
  found, start, lines = [], None, (ROOT / page).read_text().splitlines()
  for number, line in enumerate(lines):
    if line.startswith("```"):
      if start is None:
        start = number
      else:
        found.append(Block(lines[start][3:], "\n".join(lines[start + 1:number]) + "\n", start + 1))
        start = None
  assert start is None, f"{page}:{start + 1}: a block without an end"
  return found


def prose(page: str) -> list[str]:
  """The lines outside fenced blocks."""
  return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page):
  for block in blocks(page):
    assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}"
  lines = ["", *prose(page)]
  for before, line in zip(lines, lines[1:]):
    assert before or not line.startswith("    "), f"{page}: an indented block, which nothing executes: {line}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with the project's own, in which commands run, and the run that the pages speak of."""
  folder = tmp_path_factory.mktemp("project")
  for name in ("configs", "diffeq_nnx", "docs", "kernels", "launch", "README.md", "demo.ipynb"):
    (folder / name).symlink_to(ROOT / name)
  for words in blocks("docs/training.md")[0].commands():
    run(words, folder)
  return folder


def run(words: list[str], folder: pathlib.Path) -> None:
  """Runs one command, a training cut short."""
  environment = {**FAST, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "HF_DATASETS_OFFLINE": "1",
                 "HF_HUB_OFFLINE": "1"}
  while re.match(r"[A-Z_]+=", words[0]):
    environment.update([words[0].split("=", 1)])
    words = words[1:]
  if words[0] in PYTHONS and words[1:3] == ["-m", "venv"] or words[0].endswith("pip"):
    return check(words)  # this environment is one
  assert words[0] in PYTHONS, f"{words}: mark the block `sh check`"
  words = ["python", *words[1:]]
  if words in DONE.setdefault(folder, []):
    return None  # a command that several pages have
  DONE[folder].append(words)
  words = [sys.executable, "-W", "error::UserWarning", *words[1:]] if "pdoc" in words else [sys.executable, *words[1:]]
  if any(word.startswith("--config=") for word in words):
    trains = not any(word.startswith("--job=") for word in words) or "--job=finetune" in words
    words = [*words, *(SHORT if trains else ()), f"--config.data.cache_dir={folder / 'cache'}"]
  done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, place):
  for block in blocks(page):
    if block.language == "sh":
      for words in block.commands():
        run(words, place)
  program = "\n".join(block.text for block in blocks(page) if block.language == "python")
  if program:
    run(["python", "-c", program], place)


class Parsed(Exception):
  """The flags were right."""


def check(words: list[str]) -> None:
  """Lets the program that a command names parse its flags."""
  while re.match(r"[A-Z_]+=", words[0]):
    words = words[1:]
  if words[0] in PYTHONS:
    return _check_python(words[1:])
  if words[0].endswith("pip"):
    assert words[1] == "install", words
    extras = re.findall(r"\[(\w+)\]", (ROOT / "setup.py").read_text()) + re.findall(
        r'^        "(\w+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)
    named = [re.fullmatch(r"(?:diffeq-nnx|\.)\[(\w+)\]", word) for word in words[2:]]
    assert all(match is None or match[1] in extras for match in named), words
  elif words[0] == "sbatch":
    script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
    _dry_run(["bash", words[script], "--dry-run", *words[script + 1:]])
  elif words[0].endswith(".sh"):
    place = words.index("--") if "--" in words else len(words)
    _dry_run(["bash", *words[:place], "--dry-run", *words[place:]])
  else:
    assert words in (["bash", ".ci/run"], ["apt-get", "install", "chromium"]), f"{words}: nothing here knows it"


def _dry_run(words: list[str]) -> None:
  done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == 0 and done.stdout, (words, done.stderr)


def _check_python(words: list[str]) -> None:
  if words[:2] == ["-m", "diffeq_nnx.main"]:
    done = subprocess.run([sys.executable, "-c", PARSE, *words[2:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
  elif words[0].startswith("launch/"):
    with pytest.MonkeyPatch.context() as patch:
      parse = argparse.ArgumentParser.parse_args

      def parsed(self, *arguments):
        raise Parsed(parse(self, *arguments))

      patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
      patch.setattr(sys, "argv", words)
      patch.chdir(ROOT)
      with pytest.raises(Parsed):
        importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main()
  elif words[:2] == ["-m", "pytest"]:
    assert all((ROOT / word).exists() for word in words[2:] if not word.startswith("-")), words
  else:
    assert words[:2] in (["-m", "venv"], ["-m", "diffeq_nnx.harness"], ["-m", "nbconvert"]), words


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_what_is_not_run(page):
  for block in blocks(page):
    if block.language == "sh check":
      for words in block.commands():
        check(words)


def test_a_wrong_block_is_noticed():
  """The checks above can fail."""
  for line in ("python -m diffeq_nnx.main --confg=configs/tiny.py", "python -m launch.experiments.compare --config=a --wrongs=1",
               "python -m launch.nothing", "pip install 'diffeq-nnx[nothing]'", "launch/gke.sh begin --name=a", "rm a",
               "python -m diffeq_nnx.main --config=configs/tiny.py:gtp"):
    with pytest.raises((AssertionError, SystemExit, ImportError)):
      check(shlex.split(line))
  with pytest.raises(AssertionError):
    run(["curl", "x"], ROOT)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  text = "\n".join(prose(page))
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    path, _, anchor = target.partition("#")
    if path.startswith("http"):
      continue
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists(), f"{page}: {target}"
    if anchor:
      headings = [re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in
                  file.read_text().splitlines() if line.startswith("#")]
      assert anchor in headings, f"{page}: {target}"
  for name in re.findall(r"`((?:diffeq_nnx|launch|tests|configs|kernels|docs)/[\w./]+)`", text):
    assert (ROOT / name).exists(), f"{page}: {name}"
  for name in re.findall(r"`(test_\w+\.py)`", text):
    assert (ROOT / "tests" / name).exists(), f"{page}: {name}"


def test_the_map_names_every_module():
  (map_block,) = [block for block in blocks("README.md") if block.language == "text"]
  named = [line.split()[0] for line in map_block.text.splitlines()]
  assert len(named) == len(set(named))
  for name in named:
    assert (ROOT / name).exists(), name
  tracked = [path.relative_to(ROOT).as_posix() for folder in ("diffeq_nnx", "launch")
             for path in ROOT.glob(f"{folder}/**/*.py") if path.name != "__init__.py" and "kernels" not in path.parts]
  missing = [path for path in tracked if not any(path == name or name.endswith("/") and path.startswith(name)
                                                 for name in named)]
  assert not missing


def public(tree: ast.AST, path: str):
  """(where, node) of each public function, class and method."""
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
      yield f"{path}:{node.lineno} {node.name}", node
      if isinstance(node, ast.ClassDef):
        yield from public(node, path)


@pytest.mark.parametrize("folder", ["diffeq_nnx", "kernels", "launch", "configs"])
def test_everything_public_has_a_docstring(folder):
  for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
    if "templates" in path.parts or folder == "diffeq_nnx" and "kernels" in path.parts:
      continue
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, path
    missing = [where for where, node in public(tree, str(path.relative_to(ROOT))) if not ast.get_docstring(node)]
    assert not missing
