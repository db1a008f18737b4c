"""The pages: every code block is executed or checked, every link leads somewhere, the map names every module.

A block of `sh` or `python` is executed, in a folder with the project's own in it, whose configs train a narrow model
for two steps. A block of `sh check` would take hours, downloads or hardware: its flags are parsed, and nothing is
executed.
"""

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
  path.relative_to(ROOT).as_posix()
  for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "kernels" / "README.md"]
)
ARCHITECTURE = "docs/architecture.md"
LANGUAGES = ("sh", "sh check", "python", "text")
PYTHONS = ("python", "python3", ".venv/bin/python")
# folders that the map describes by one line each; every other module has a line of its own
SUMMARIZED = (
  "diffeq_nnx/analysis/pages/",
  "diffeq_nnx/data/preparation/",
  "diffeq_nnx/data/tokenizers/",
  "diffeq_nnx/exporting/templates/",
  "diffeq_nnx/harness/",
  "launch/benchmarks/",
  "launch/breaking/",
)
SHORT_CONFIG = """import importlib.util

spec = importlib.util.spec_from_file_location("original", {path!r})
original = importlib.util.module_from_spec(spec)
spec.loader.exec_module(original)


def get_config(choice=""):
  config = original.get_config(choice)
  config.model.update(embed_dim=8 * config.model.num_heads, dropout=0.0)
  config.train.update(steps=2, batch_size=2, remat="none", loss_chunks=1, log_every=1, peak_tflops=0.1)
  config.eval.update(every=2, batch_size=2, max_batches=1)
  config.checkpoint.every = 2
  config.data.cache_dir = {cache!r}
  return config
"""


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
        found.append(Block(lines[start][3:], "\n".join(lines[start + 1 : number]) + "\n", start + 1))
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


class Project:
  """A folder in which the pages' commands are executed, each once, by one process of `tests/command_server.py`."""

  def __init__(self, folder: pathlib.Path):
    for name in ("diffeq_nnx", "docs", "kernels", "launch", "README.md"):
      (folder / name).symlink_to(ROOT / name)
    (folder / "configs").mkdir()
    for path in ROOT.glob("configs/*.py"):
      text = SHORT_CONFIG.format(path=str(path), cache=str(folder / "cache"))
      (folder / "configs" / path.name).write_text(text)
    self.done: list[list[str]] = []
    self.log = folder / "log"
    environment = {
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
      **os.environ,
      "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
      "JAX_PLATFORMS": "cpu",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "HF_DATASETS_OFFLINE": "1",
      "HF_HUB_OFFLINE": "1",
      "HF_MODULES_CACHE": str(folder / "modules"),
      "MPLBACKEND": "agg",
    }
    with open(self.log, "w", encoding="utf-8") as log:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "tests.command_server"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
      )

  def ask(self, action: str, words: list[str]) -> None:
    """Has the process run a command or parse its flags."""
    start = self.log.stat().st_size
    self.process.stdin.write(json.dumps([action, words]) + "\n")
    self.process.stdin.flush()
    answer = self.process.stdout.readline()
    error = json.loads(answer) if answer else f"the process ended with {self.process.wait()}"
    assert error is None, f"{shlex.join(words)}\n{self.log.read_bytes()[start:][-3000:].decode()}\n{error}"

  def run(self, words: list[str]) -> None:
    """Runs one command."""
    if words[0] in PYTHONS and words[1:3] == ["-m", "venv"] or words[0].endswith("pip"):
      return check(words, self)  # this environment is one
    assert words[0] in PYTHONS and words[1] in ("-m", "-c"), f"{words}: mark the block `sh check`"
    if words[1:] not in self.done:  # a command may stand on several pages
      self.done.append(words[1:])
      self.ask("run", words[1:])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  """The folder, with the run that the pages speak of."""
  made = Project(tmp_path_factory.mktemp("project"))
  with made.process:  # ends when its stdin is closed
    for words in blocks("docs/training.md")[0].commands():
      made.run(words)
    yield made


LONG = pytest.mark.slow(reason="half a minute or more; the commands that they run have tests of their own")


@pytest.mark.parametrize(
  "page", [pytest.param(page, marks=LONG if page in ("docs/depth.md", "docs/evaluation.md") else ()) for page in PAGES]
)
def test_blocks_run(page, project):
  for block in blocks(page):
    if block.language == "sh":
      for words in block.commands():
        project.run(words)
  # no page shows other depths of a run that was trained at one
  assert not re.search(r"this run was trained at \d+ solver steps and never", project.log.read_text())
  program = "\n".join(block.text for block in blocks(page) if block.language == "python")
  if program:
    project.run(["python", "-c", program])


def extras() -> set[str]:
  """The names of the extras in setup.py."""
  tree = ast.parse((ROOT / "setup.py").read_text())
  (named,) = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "extras_require"]
  return {key.value for key in named.keys}


def check(words: list[str], project: Project) -> None:
  """Has the program that a command names parse its flags."""
  while re.match(r"[A-Z_]+=", words[0]):
    words = words[1:]
  mine = words[words.index("--") + 1 :] if "--" in words else []  # of the main program
  if words[0] in PYTHONS:
    _check_python(words[1:], project)
  elif words[0].endswith("pip"):
    assert words[1] == "install", words
    named = [re.fullmatch(r"(?:diffeq-nnx|\.)\[([\w,]+)\]", word) for word in words[2:]]
    assert all(match is None or set(match[1].split(",")) <= extras() for match in named), words
  elif words[0] == "sbatch":
    script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
    _dry_run(["bash", words[script], "--dry-run", *words[script + 1 :]])
    mine = words[script + 1 :]
  elif words[0].endswith(".sh"):
    place = words.index("--") if "--" in words else len(words)
    _dry_run(["bash", *words[:place], "--dry-run", *words[place:]])
  else:
    known = ["bash .ci/run", ".ci/run", "apt-get install chromium", "pre-commit run --all-files"]
    assert shlex.join(words) in known, f"{words}: unknown command"
  if mine:
    project.ask("parse", ["-m", "diffeq_nnx.main", *mine])


def _dry_run(words: list[str]) -> None:
  done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == 0 and done.stdout, (words, done.stderr)


def _check_python(words: list[str], project: Project) -> None:
  if words[0] == "-m" and words[1].startswith(("diffeq_nnx.main", "launch.")):
    project.ask("parse", words)
  elif words[:2] == ["-m", "pytest"]:
    assert all((ROOT / word).exists() for word in words[2:] if not word.startswith("-")), words
  else:
    assert words[:2] in (["-m", "venv"], ["-m", "diffeq_nnx.harness"], ["-m", "nbconvert"]), words


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_what_is_not_run(page, project):
  for block in blocks(page):
    if block.language == "sh check":
      for words in block.commands():
        check(words, project)


def test_a_wrong_command_and_one_that_fails_are_noticed(project):
  """The check and the run above can fail; the configs of what is run are short."""
  project.run(["python", "-c", "from diffeq_nnx import config; assert config.load('configs/tiny.py').train.steps == 2"])
  main = "python -m diffeq_nnx.main"
  for line in (
    f"{main} --confg=configs/tiny.py",
    f"{main} --config=configs/tiny.py:gtp",
    f"{main} --config=configs/tiny.py --config.model.num_step=3",
    "python -m launch.nothing",
    "python -m launch.experiments.compare --config=a --wrongs=1",
    "pip install 'diffeq-nnx[nothing]'",
    "pip install '.[test,nothing]'",
    "launch/gke.sh begin --name=a",
    "rm a",
    "python -m nothing",
  ):
    with pytest.raises(AssertionError):
      check(shlex.split(line), project)
  failing = ("curl x", "python -c 'assert False'", "python -c 'exit(3)'", f"{main} --workdir=nothing --job=evaluate")
  for line in failing:
    with pytest.raises(AssertionError):
      project.run(shlex.split(line))


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
      headings = [
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in file.read_text().splitlines()
        if line.startswith("#")
      ]
      assert anchor in headings, f"{page}: {target}"
  if page == "CHANGELOG.md":
    return  # which also names what is no longer there
  for name in re.findall(r"`((?:diffeq_nnx|launch|tests|configs|kernels|docs)/[\w./]+)`", text):
    assert (ROOT / name).exists(), f"{page}: {name}"
  for name in re.findall(r"`(test_\w+\.py)`", text):
    assert (ROOT / "tests" / name).exists(), f"{page}: {name}"


def section_block(heading: str) -> list[str]:
  """The lines of the `text` block under a heading of the architecture page."""
  text = (ROOT / ARCHITECTURE).read_text()
  return re.search(rf"^## {heading}$.*?^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1].splitlines()


def mapped() -> list[str]:
  """Paths that the map names; a name's folder is the nearest line above that is indented less."""
  found, folders = [], []
  for line in section_block("Map"):
    name, indent = line.split()[0], len(line) - len(line.lstrip())
    folders = [(width, folder) for width, folder in folders if width < indent]
    path = (folders[-1][1] if folders else "") + name
    found.append(path)
    if name.endswith("/"):
      folders.append((indent, path))
  return found


def test_the_map_names_every_module():
  named = mapped()
  assert len(named) == len(set(named))
  for name in named:
    assert (ROOT / name).exists() and (ROOT / name).is_dir() == name.endswith("/"), name
  modules = [
    path.relative_to(ROOT).as_posix()
    for folder in ("diffeq_nnx", "kernels", "launch")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if path.name != "__init__.py"
  ]
  modules = [path for path in modules if not path.startswith("diffeq_nnx/kernels/")]  # a link
  folders = {f"{path.rpartition('/')[0]}/" for path in modules}
  single = [path for path in modules if not path.startswith(SUMMARIZED)]
  missing = sorted({*single, *folders} - {*named})
  assert not missing


def test_the_floors_are_those_that_the_linter_keeps():
  """import-linter checks the imports against the list in pyproject.toml, which the page repeats."""
  (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
  floors = [set(re.findall(r"diffeq_nnx\.(\w+)", layer)) for layer in contract["layers"]]
  assert [set(line.replace("/", "").replace(".py", "").split()) for line in section_block("Floors")] == floors
  assert set.union(*floors) == {path.stem for path in ROOT.glob("diffeq_nnx/*") if not path.name.startswith("__")}
