"""--job=analyze: a report on a run's newest model."""

from collections.abc import Sequence
import os
import time
from typing import Any

import jax
import numpy as np

from diffeq_nnx import files
from diffeq_nnx.analysis.analyzed_model import AnalyzedModel
from diffeq_nnx.analysis.figures import sections
from diffeq_nnx.analysis.findings import Findings, find, show_progress
from diffeq_nnx.analysis.pages.charts import Chart, ColoredText
from diffeq_nnx.analysis.pages.page import write_page
from diffeq_nnx.analysis.pages.png import draw
from diffeq_nnx.config import REPORT_FOLDER, Config
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.generation import encode_texts
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.parallel.console import print_result
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run

TEXT = (
  "The river rose in the night, and in the morning the people of the town came down to the river to see how far "
  "the water had come."
)
TOKENS = 32  # of the text above, at most


def analyze(
  config: Config,
  workdir: str,
  *,
  text: str | None = None,
  position: int = -1,
  num_steps: int | None = None,
  leading: int = 16,
  times: Sequence[float] | None = None,
) -> dict[str, Any]:
  """Analyzes the newest model of a run, writes report/ in its directory, and prints one JSON line on stdout.

  report/ holds index.html, one file with everything; every picture as a PNG; and numbers.npz (`Findings.arrays`). The
  text that the run was trained on need not be there.

  Raises:
    UserError: no checkpoint, a text without tokens or too long, a position, number or times out of range, or a
      directory that can't be written.
    RunError: the disk is full.
  """
  start = time.perf_counter()
  run = Run.open(workdir, config)
  folder = os.path.join(workdir, REPORT_FOLDER)
  workdir_lib.require_writable(folder)
  config, tokenizer = run.config, run.tokenizer
  ids = text_ids(tokenizer, TEXT if text is None else text)
  if text is None:
    ids = ids[: min(TOKENS, config.model.seq_len)]
  with jax.set_mesh(run.mesh):
    step, analyzed = run.step, AnalyzedModel(run.model, num_steps)
  run.say_untrained(num_steps)
  del run  # the analyzed model has what it needs
  shown = [piece or f"<{token}>" for piece, token in zip(pieces(tokenizer, ids), ids)]
  decode = lambda token: TextStream(tokenizer.decode_within).add(token) or f"<{token}>"  # a part of a character
  found = find(analyzed, ids, shown, decode, position=position, leading=leading, times=times)
  facts = {
    "Run": os.path.basename(files.absolute(workdir)),
    "Optimizer steps": str(step),
    "Field": config.model.field,
    "Weights": config.model.weights,
    "Solver": f"{config.model.solver}, {analyzed.grid.num_steps} steps",
    "Width": f"{config.model.embed_dim}, {config.model.num_heads} heads",
    "Tokens of the text": str(len(ids)),
  }
  _write_report(found, folder, facts)
  most_sensitive_to = None
  if found.position:
    token = int(np.argmax(found.exact[: found.position, 0]))
    most_sensitive_to = {"position": token, "text": found.pieces[token]}
  return print_result(
    "analyze",
    workdir,
    step=step,
    report=os.path.join(folder, "index.html"),
    num_steps=analyzed.grid.num_steps,
    tokens=len(ids),
    position=found.position,
    leading_exponent=round(float(found.exact[found.position, 0]), 4),
    most_sensitive_to=most_sensitive_to,
    seconds=time.perf_counter() - start,
  )


def _write_report(found: Findings, folder: str, facts: dict[str, str]) -> None:
  """Writes index.html, the PNGs and numbers.npz to a folder, which replaces an existing one atomically."""
  made = sections(found)
  pictures = [item for _, _, items in made for item in items if isinstance(item, (Chart, ColoredText))]
  with files.writing(folder, "copy the run to a place of yours"), files.replacing_folder(folder, "index.html") as place:
    np.savez_compressed(os.path.join(place, "numbers.npz"), **found.arrays())  # type: ignore[arg-type]
    with show_progress("pictures", len(pictures)) as progress:
      for picture in pictures:
        draw(picture, os.path.join(place, f"{picture.name}.png"))
        progress(1)
    write_page(os.path.join(place, "index.html"), f"Inside {facts['Run']}", [*facts.items()], made)


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
  """The ids of a document that begins with this text.

  Raises:
    UserError: it gives no tokens, or is no Unicode text.
  """
  ids = encode_texts(tokenizer, [text], "--text")[0]
  if not ids:
    raise UserError(f"--text={text!r}: gives no tokens; give some text")
  return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """The text of each token; they add up to the whole, so one in the midst of a character has none."""
  stream = TextStream(tokenizer.decode_within, leading=tokenizer.leading)
  return ["[begin]" if token == tokenizer.bos_id else stream.add(token) for token in ids]
