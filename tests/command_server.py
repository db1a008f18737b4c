"""Runs commands of the pages one after another in one process, so that JAX, torch and lm_eval are imported once.

Each line on stdin is a request, JSON `[action, words]`; each gets one line in answer, JSON `null` or what went wrong.
Actions: `run`, what `python WORDS` would do, and `parse`, which parses the flags and stops before the work.
"""

import argparse
import contextlib
import importlib
import json
import os
import runpy
import sys
import time
import traceback
from typing import TextIO
import warnings

from absl import flags

from diffeq_nnx import config as config_lib
from diffeq_nnx import main
from diffeq_nnx.parallel import distributed


class Parsed(BaseException):
  """The flags were right."""


def parse_main(words: list[str]) -> list[str]:
  """The flags of `python -m diffeq_nnx.main`; exits where they are wrong."""
  for name in flags.FLAGS:  # as in a new process
    flags.FLAGS[name].unparse()
  flags.FLAGS.unparse_flags()
  return main.parse(["diffeq_nnx.main", *words])


def run(words: list[str]) -> None:
  """What `python WORDS` would do, but for looking for other processes, which is too late once JAX is in use."""
  distributed.start = lambda *arguments: None
  if words[:2] == ["-m", "diffeq_nnx.main"]:
    sys.exit(main.main(parse_main(words[2:])))
  with warnings.catch_warnings():
    if words[0] == "-c":
      exec(compile(words[1], "page", "exec"), {"__name__": "__main__"})
    else:
      assert words[0] == "-m", words
      sys.argv = words[1:]
      runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def parse(words: list[str]) -> None:
  """Parses the flags of a program of this project."""
  assert words[0] == "-m", words
  if words[1] == "diffeq_nnx.main":
    parse_main(words[2:])
    if main.CONFIG.value is not None:
      config_lib.load(main.CONFIG.value, main.SETTINGS.value)
    return
  original = argparse.ArgumentParser.parse_args

  def parsed(self, *arguments):
    raise Parsed(original(self, *arguments))

  argparse.ArgumentParser.parse_args, sys.argv = parsed, words[1:]
  try:
    importlib.import_module(words[1]).main()
  except Parsed:
    return
  finally:
    argparse.ArgumentParser.parse_args = original
  raise AssertionError(f"{words}: parsed no flags")


def serve(requests: TextIO, answers: TextIO) -> None:
  """Answers requests until they end."""
  for line in requests:
    action, words = json.loads(line)
    error = None
    with contextlib.redirect_stdout(sys.stderr):
      try:
        {"run": run, "parse": parse}[action](words)
      except SystemExit as end:
        error = None if end.code in (None, 0) else f"exit code {end.code}"
      except BaseException:
        error = traceback.format_exc()[-3000:]
    print(f"{time.process_time():.1f} s of CPU time so far", file=sys.stderr)
    print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
  channels = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)  # what commands print goes to the log, also from below Python
  serve(*channels)
