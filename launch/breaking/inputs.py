"""Bad input: configs, run files, records, tokenizer files. It is used as it was, or rejected with one line."""

from collections.abc import Iterator
import dataclasses
import json
import pathlib
import shutil

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, jobs
from diffeq_nnx.runs.run import Run
from launch.breaking import processes
from launch.breaking.table import Row, Suite, find_problem

JUNK = ["", "0", "-1", "1e9", "nan", "inf", "None", "True", "()", "(1,)", "[]", "{}", "x", "é\x00", "../..", "1" * 40]
JUNK += ["1", "2", "3", "7", "0.5", "1e-3", "100000", "False", "(2, 3)"]


def configs(suite: Suite) -> Iterator[Row]:
  """Random values for random keys."""
  row = Row("a config key with a random value")
  for setting in _settings(suite):
    suite.use(row, lambda setting=setting: config_lib.load("configs/tiny.py", [setting]), setting)
  yield row


def trained_configs(suite: Suite) -> Iterator[Row]:
  """Random values for random keys. Those that are valid are trained with for one step."""
  row = Row("a config key with a random value that is valid, and one train step")
  for setting in _settings(suite):
    if not find_problem(lambda setting=setting: config_lib.load("configs/tiny.py", [setting])):
      processes.try_config(suite, row, setting)
  yield row


def _settings(suite: Suite) -> Iterator[str]:
  keys = sorted(config_lib.key_types())
  for _ in range(10 * suite.tries):
    yield f"{suite.random.choice(keys)}={suite.random.choice(JUNK)}"


def run_files(suite: Suite) -> Iterator[Row]:
  """run.json and a manifest of shards with a random change."""

  def shards(place: str) -> object:
    return data.load(dataclasses.replace(suite.config.data, source=f"shards:{place}"), 512, seed=0)

  def run(place: str) -> object:
    return jobs.run("evaluate", Run.open(place).started, place)

  cached = next(pathlib.Path(suite.cache).iterdir())
  for name, folder, use in (("run.json", pathlib.Path(suite.whole), run), ("manifest.json", cached, shards)):
    row = Row(f"{name} with a random change")
    for _ in range(3 * suite.tries):
      place = suite.place("changed")
      shutil.copytree(folder, place)
      path = pathlib.Path(place, name)
      path.write_bytes(suite.mutate(path.read_bytes()))
      suite.use(row, lambda use=use, place=place: use(place))
    yield row


def records(suite: Suite) -> Iterator[Row]:
  """JSON lines with a random change, among good ones."""
  row = Row("a JSON line with a random change")
  path = pathlib.Path(suite.folder, "records.jsonl")
  good = [
    json.dumps({"text": f"Document {number} tells of rivers, é and hills. " * 5}).encode() for number in range(20)
  ]
  for number in range(10 * suite.tries):
    lines = [suite.mutate(line) if place == 7 else line for place, line in enumerate(good)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    config = dataclasses.replace(
      suite.config.data, source=f"jsonl:{path}", tokenizer="bytes", cache_dir=suite.place(f"records{number % 2}")
    )
    suite.use(row, lambda config=config: data.load(config, 512, seed=0))
  yield row


def tokenizers(suite: Suite) -> Iterator[Row]:
  """Tokenizer files with a random change."""
  row, path = Row("a tokenizer file with a random change"), pathlib.Path(suite.folder, "changed.model")
  sources = [pathlib.Path(suite.whole, "tokenizer.model").read_bytes(), data.load_tokenizer("bytes").model_bytes]
  for number in range(3 * suite.tries):
    path.write_bytes(suite.mutate(sources[number % 2]))
    suite.use(row, lambda: data.load_tokenizer(str(path)))
  yield row
