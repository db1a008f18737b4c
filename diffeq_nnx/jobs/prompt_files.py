"""Prompts from a file of JSON lines, and a file of answers that goes on after a kill.

While it is written, the answers are in OUT.unfinished, a JSON line each after one that says what made them. When all
are there, OUT is written at once, in the order of the prompts, and the other file is removed.
"""

import contextlib
import hashlib
import json
import os
import time
from typing import Any

from tqdm import tqdm

from diffeq_nnx import files
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.data.chat import ChatTemplate, refuse_arguments
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.decoding import Decoder
from diffeq_nnx.inference.generation import encode_texts
from diffeq_nnx.parallel import distributed

# keys that lines of other programs have
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed")
UNREAD = ("stop", "n", "max_new_tokens", "max_completion_tokens", "max_length", "min_tokens", "stop_token_ids", "min_p")
UNREAD += ("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "best_of", "echo")
UNREAD += ("suffix", "do_sample", "num_beams", "response_format", "guided_json")


class Answers(contextlib.ExitStack):
  """The answers to a file of prompts; process 0 writes them. A context, after which the unfinished file is closed.

  An answer has `line`, the prompt's line from 1, and what its continuation says; or `error`, why there is none.
  """

  def __init__(self, prompts: str, out: str):
    """Reads the prompts.

    Raises:
      UserError: prompts that can't be read, or an `out` that is there already or in a bucket.
    """
    super().__init__()
    content = read_file(prompts)
    if files.is_url(out):
      raise UserError(f"--out={out}: must be on a disk, since it grows; copy it when it is finished")
    if not os.path.basename(out):
      raise UserError(f"--out={out}: names a folder; name a file in it")
    if files.exists(out):
      raise UserError(f"--out={out}: already exists; choose another file")
    self._lines = split_lines(content)
    self._out = os.path.expanduser(out)
    self._unfinished = f"{self._out}.unfinished"
    self._identity: dict[str, Any] = {"prompts": hashlib.sha256(content).hexdigest()}
    self._answers: dict[int, dict[str, Any]] = {}
    self._started = time.monotonic()
    self._tokens = 0

  def open(
    self, tokenizer: Tokenizer, decoder: Decoder, identity: dict[str, Any], template: ChatTemplate | None = None
  ) -> tuple[list[str], list[list[int]], list[int]]:
    """(prompts, their ids, their lines) that are to be answered; prompts that can't be have their error already.

    Args:
      identity: what the answers depend on beside the prompts, in JSON's types.
      template: writes messages and prompts as conversations; None: the prompts are texts.

    Raises:
      UserError: answers that other settings made, or processes that read different prompts.
    """
    distributed.require_same(self._identity["prompts"], "--prompts: the lines")
    self._identity |= identity
    self._answers = {one["line"]: one for one in distributed.on_main_process(self._read_unfinished)}
    self._bar = tqdm(
      total=len(self._lines), initial=len(self._answers), desc="prompts", disable=not distributed.is_main_process()
    )
    begin = [] if template is not None or tokenizer.bos_id is None else [tokenizer.bos_id]
    texts, ids, numbers = [], [], []
    for n, line in self._lines.items():
      if n in self._answers:
        continue
      try:
        text = parse_prompt(line, template)
        one = begin + encode_texts(tokenizer, [text], "prompt", template is not None)[0]
        if problem := decoder.find_problem(one):
          raise UserError(f"prompt: {problem}")
      except UserError as error:
        self.add(n, {"error": str(error)})
        continue
      texts.append(text)
      ids.append(one)
      numbers.append(n)
    distributed.require_same(ids, "--prompts: the tokens")  # a chat template may write the time of a host
    return texts, ids, numbers

  def add(self, line: int, answer: dict[str, Any]) -> None:
    """Notes an answer."""
    self._answers[line] = {"line": line, **answer}
    self._tokens += answer.get("tokens", 0)
    if distributed.is_main_process():
      self._file.write(json.dumps(self._answers[line]) + "\n")
      self._file.flush()
    self._bar.set_postfix_str(f"{self._tokens / (time.monotonic() - self._started):.1f} tokens/s", refresh=False)
    self._bar.update()

  def finish(self) -> list[dict[str, Any]]:
    """Writes the finished file, and returns its answers."""
    self._bar.close()
    answers = [self._answers[n] for n in sorted(self._answers)]
    if distributed.is_main_process():
      files.write(self._out, "".join(json.dumps(one) + "\n" for one in answers).encode())
      self._file.close()
      os.remove(self._unfinished)
    return answers

  def _read_unfinished(self) -> list[dict[str, Any]]:
    """The answers in an unfinished file, to which more are then added; a line that a kill cut off is removed."""
    with files.writing(f"--out={self._out}", "name another file"):
      files.make_folder(os.path.dirname(self._unfinished) or ".")
      self._file = self.enter_context(open(self._unfinished, "a", encoding="utf-8"))
    with contextlib.suppress(OSError):  # of a file system without locks
      if not files.lock(self._file.fileno()):
        raise UserError(f"--out={self._out}: another process writes it; wait for that, or name another file")
    kept = files.read(self._unfinished)
    kept = kept[: kept.rfind(b"\n") + 1]
    lines = [files.parse_json(line, self._unfinished, "--out") for line in kept.split(b"\n")[:-1]]
    if lines and lines[0] != self._identity:
      raise UserError(
        f"--out={self._out}: {self._unfinished} was begun with other settings or prompts; repeat those, or remove it"
      )
    os.truncate(self._unfinished, len(kept))
    if not lines:
      self._file.write(json.dumps(self._identity) + "\n")
      self._file.flush()
    return lines[1:]


def read_file(path: str) -> bytes:
  """Returns a file of prompts; raises UserError if it can't be read."""
  try:
    return files.read(path)
  except OSError as error:
    raise UserError(f"--prompts={path}: can't be read ({error.strerror or error}); name a file") from error


def split_lines(content: bytes) -> dict[int, bytes]:
  """The lines of a file that are not blank, by number from 1; they end at line feeds, as in `jsonl:` sources."""
  return {n: line for n, line in enumerate(content.split(b"\n"), 1) if line.strip()}


def parse_prompt(line: bytes, template: ChatTemplate | None = None) -> str:
  """The prompt of a JSON line, or its conversation as a template writes it; raises UserError."""
  value = files.parse_json(line, "the line", "prompt")
  for key in (*SAMPLING, *UNREAD) if isinstance(value, dict) else ():
    if key in value:
      advice = f"is the same for all; give --{key}" if key in SAMPLING else "is not read; leave it out"
      raise UserError(f"prompt: the line sets {key}, which {advice}")
  if template is not None and isinstance(value, dict):
    refuse_arguments(value)
    if "messages" in value:
      return template.render(value["messages"], add_generation_prompt=True)
  if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
    raise UserError("prompt: the line must be an object whose key `prompt` is a text, or `messages` with --chat a list")
  return write_prompt(value["prompt"], template)


def write_prompt(text: str, template: ChatTemplate | None) -> str:
  """A prompt as it is, or as a template writes it as the only message of a user; raises UserError."""
  return text if template is None else template.render([{"role": "user", "content": text}], add_generation_prompt=True)
