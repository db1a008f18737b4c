r"""The last word of passages of held-out text, in the manner of LAMBADA (Paperno et al. 2016); a Markdown table.

  python -m launch.experiments.cloze --text='jsonl:data/english/*validation*.jsonl*' --to=runs/cloze \
      --runs='runs/small/diffeq_rate0.001_seed*,runs/small/gpt_rate0.001_seed*' [--passages=1000]

Writes two tasks for lm_eval to the folder --to, and does --job=harness with them on every run that has no results yet.
A passage is some sentences of at least 25 and at most 45 words; its last word has four letters or more, none of them a
capital, and occurs earlier in the passage. `cloze_word` asks for that word: the share that are the likeliest text, and
the loss in nats per word. `cloze_choice` asks which of four words it is, the others being last words of other passages
(chance: 0.25). Of each preset, means over seeds with standard errors, and differences from the first preset's with the
same seed.
"""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
import random
import re

from diffeq_nnx import config as config_lib
from diffeq_nnx import files, jobs
from diffeq_nnx.data import sources
from diffeq_nnx.errors import UserError
from diffeq_nnx.harness import report
from diffeq_nnx.runs.run import Run
from launch import programs
from launch.experiments import tables

FEWEST, MOST = 25, 45  # words of a passage
ANSWER = re.compile(r"[a-z]{4,}")
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{passage}}", "metadata": {"version": 1}}
TASKS = {
  "cloze_word": {
    "output_type": "loglikelihood",
    "doc_to_target": "{{' ' + answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
  },
  "cloze_choice": {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}],
  },
}
COLUMNS = {
  "word, accuracy": lambda of: of["cloze_word", "acc"],
  "word, nats": lambda of: math.log(of["cloze_word", "perplexity"]),
  "choice, accuracy": lambda of: of["cloze_choice", "acc"],
}


def passages(text: str) -> Iterator[tuple[str, str]]:
  """The passages of a text, which don't overlap, in its order: all but the last word, and that word."""
  sentences, first = re.split(r"(?<=[.!?])\s+", text), 0
  for last in range(len(sentences)):
    words = " ".join(sentences[first : last + 1]).split()
    while first < last and len(words) > MOST:
      first += 1
      words = " ".join(sentences[first : last + 1]).split()
    answer = words[-1][:-1] if words else ""
    before = " ".join(words[:-1])
    if FEWEST <= len(words) <= MOST and ANSWER.fullmatch(answer) and answer in re.findall(r"\w+", before):
      yield before, answer
      first = last + 1


def questions(found: list[tuple[str, str]], rng: random.Random) -> Iterator[dict]:
  """The records of passages, each with its passage, answer, four choices and the index of the right one.

  Raises:
    UserError: the passages end in too few different words.
  """
  answers = sorted({answer for _, answer in found})
  for before, answer in found:
    others = [word for word in rng.sample(answers, min(30, len(answers))) if word not in before and word != answer]
    if len(others) < 3:
      raise UserError(f"--passages={len(found)}: they end in too few different words for four choices; ask for more")
    choices = [answer, *others[:3]]
    rng.shuffle(choices)
    yield {"passage": before, "answer": answer, "choices": choices, "gold": choices.index(answer)}


def write_tasks(source: str, folder: str, count: int) -> None:
  """Writes the task files and their questions, drawn from all passages of the source.

  Raises:
    UserError: the source has fewer passages, or can't be read.
  """
  rng = random.Random(0)
  found = [one for text in sources.open_source(source, "--text").documents() for one in passages(text)]
  if len(found) < count:
    raise UserError(f"--passages={count}: the text has {len(found)} that fit")
  os.makedirs(folder, exist_ok=True)
  lines = os.path.join(os.path.abspath(folder), "cloze.jsonl")
  files.write(lines, "".join(json.dumps(one) + "\n" for one in questions(rng.sample(found, count), rng)).encode())
  for name, task in TASKS.items():
    whole = {"task": name, "dataset_kwargs": {"data_files": {"test": lines}}, **COMMON, **task}
    files.write_json(os.path.join(folder, f"{name}.yaml"), whole)  # JSON is YAML


def measure(workdir: str, folder: str) -> dict[tuple[str, str], float]:
  """Evaluates a run's newest model unless that is done; returns the value of each (task, metric)."""
  harness = config_lib.HarnessConfig(
    tasks=",".join(TASKS), include_path=folder, default_tasks=False, batch_size=32, folder="cloze"
  )
  if not os.path.exists(os.path.join(workdir, harness.folder, report.NAME)):
    jobs.run("harness", dataclasses.replace(Run.open(workdir).started, harness=harness), workdir)
  found = report.collect_estimates(report.read(workdir, harness.folder))
  return {(key.task, key.metric): one.value for key, one in found.items()}


def main(argv: list[str] | None = None) -> None:
  """Writes the tasks if they are not there, evaluates every run, and prints the table."""
  args = programs.make_parser(__doc__, text=str, to=str, runs=str, passages=1000).parse_args(argv)
  runs = tables.runs_by_preset(args.runs)
  if not os.path.exists(os.path.join(args.to, "cloze_choice.yaml")):
    write_tasks(args.text, args.to, args.passages)
  first, rows = None, []
  for preset, seeds in runs.items():
    found = [measure(workdir, args.to) for workdir in seeds]
    values = [[of(one) for one in found] for of in COLUMNS.values()]
    first = first or values
    rows.append([preset])
    for ours, base in zip(values, first, strict=True):
      difference = "" if ours is base else tables.difference(ours, base, "+.3f")
      rows[-1] += [tables.mean_and_error(ours, ".3f"), difference]
  print(tables.markdown(["preset", *(head for name in COLUMNS for head in (name, "against the first"))], rows))


if __name__ == "__main__":
  programs.start(main)
