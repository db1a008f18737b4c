"""Progress and metrics of a run: a progress line, metrics.jsonl, TensorBoard files, loss.png."""

from collections.abc import Callable
import datetime
import io
import json
import os
import sys
import time
from typing import Any

from tqdm import tqdm

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.config import METRICS_FILE, TENSORBOARD_FOLDER
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import draw, say, to_finite
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training import goodput


class Reporter:
  """Writes the metrics of a run to disk, and shows progress: a bar on a terminal, otherwise a line per log.

  Process 0 does so; in the other processes its methods do nothing.
  """

  def __init__(self, workdir: str, start: int, steps: int, project: str | None = None, validate: bool = False):
    """Opens the files; records after step `start`, left by a killed run, are dropped.

    `project`: of Weights & Biases, which gets the metrics too. `validate`: `start` will be validated, again perhaps.

    Raises:
      UserError: its package is not installed, or it can't be reached.
    """
    self._workdir = workdir
    self._start, self._steps, self._started = start, steps, time.perf_counter()
    self._bar, self._is_main = None, distributed.is_main_process()
    if not self._is_main:
      return
    self._growing = files.Growing(workdir, (METRICS_FILE,))
    folder = self._growing.folder
    _truncate(os.path.join(folder, METRICS_FILE), start, validate)
    self._file = open(os.path.join(folder, METRICS_FILE), "a", encoding="utf-8")
    self._tensorboard = _TensorBoard(os.path.join(folder, TENSORBOARD_FOLDER), start)
    self._wandb = _wandb_run(project, workdir, folder) if project else None
    if sys.stderr.isatty():
      self._bar = tqdm(total=steps, initial=start, unit="step", file=sys.stderr, dynamic_ncols=True)

  def train(self, step: int, values: dict[str, float]) -> None:
    """Records and shows training values after `step`: loss, tokens_per_second and utilization among them."""
    self._record(step, "train", values)
    text = (
      f"loss {values['loss']:.4f}{_details(values)}, {values['tokens_per_second']:,.0f} tokens/s, "
      f"utilization {100 * values['utilization']:.1f} %"
    )
    if "utilization_with_teacher" in values:
      text += f" ({100 * values['utilization_with_teacher']:.1f} % with the teacher)"
    if self._bar is not None:
      self._bar.set_postfix_str(text)
      self._bar.update(step - self._bar.n)
    else:
      left = (time.perf_counter() - self._started) / max(step - self._start, 1) * (self._steps - step)
      say(f"step {step}/{self._steps}: {text}, {datetime.timedelta(seconds=round(left))} left")

  def validation(self, step: int, values: dict[str, float]) -> None:
    """Records and shows validation values after `step`."""
    self._record(step, "validation", values)
    say(
      f"step {step}/{self._steps}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:.2f}, "
      f"{values['bits_per_byte']:.4f} bits per byte, {values['tokens']:,} tokens"
    )

  def goodput(self, step: int, shares: dict[str, float]) -> None:
    """Records and shows the `shares` of `Goodput` when training ends after `step`."""
    self._record(step, "time", shares)
    say(goodput.line(shares))

  def __enter__(self):
    return self

  def __exit__(self, *unused) -> None:
    """Closes the files and draws loss.png; an error here does not hide the one that ended the run."""
    if not self._is_main:
      return
    try:
      self._file.close()
      self._tensorboard.close()
      plot_losses(self._growing.folder)
      self._growing.close()
    except OSError as error:
      say(f"workdir={self._workdir}: the last records or loss.png can't be written ({error.strerror or error})")
    finally:
      self._send(lambda run: run.finish())
      if self._bar is not None:
        self._bar.close()

  def _send(self, call: Callable[[Any], None]) -> None:
    """Calls Weights & Biases, if it is used. Where its process is gone, as after SIGTERM, the run goes on alone."""
    try:
      if self._wandb is not None:
        call(self._wandb)
    except Exception as error:
      self._wandb = None
      say(f"report.wandb: is lost ({first_line(error, 200)}); the run goes on without it")

  def _record(self, step: int, split: str, values: dict[str, float]) -> None:
    if not self._is_main:
      return
    self._file.write(json.dumps(to_finite({"step": step, "split": split, **values})) + "\n")
    self._file.flush()
    named = {f"{split}/{name}": value for name, value in values.items()}
    self._tensorboard.add(step, named)
    self._send(lambda run: run.log(named, step=step))
    self._growing.note_growth()

  def upload(self) -> None:
    """Copies to a bucket what it lacks of metrics and TensorBoard files, before a checkpoint; raises OSError."""
    if self._is_main:
      self._growing.upload()


def _details(values: dict[str, float]) -> str:
  """What a training loss is made of, in brackets, where that needs saying."""
  parts = [f"{name.replace('_', '-')} {values[name]:.4f}" for name in ("cross_entropy", "divergence") if name in values]
  parts += [f"{values['counted_tokens']:,} counted tokens"] if "counted_tokens" in values else []
  return f" ({', '.join(parts)})" if parts else ""


class _TensorBoard:
  """A file for TensorBoard, which is written here: the thread of tensorboardX's SummaryWriter ends at a full disk.

  After that the writer would wait for the thread forever.
  """

  def __init__(self, folder: str, start: int):
    """Opens a new file in a folder, in which TensorBoard then drops records after step `start`."""
    # tensorboardX imports torch for the name of a type. That takes seconds, and where torch is missing it does without.
    hidden = "torch" not in sys.modules
    if hidden:
      sys.modules["torch"] = None  # type: ignore[assignment]
    try:
      import tensorboardX
      from tensorboardX import event_file_writer
    finally:
      if hidden:
        del sys.modules["torch"]
    self._events, self._summary = tensorboardX.proto.event_pb2, tensorboardX.summary
    os.makedirs(folder, exist_ok=True)
    self._writer = event_file_writer.EventsWriter(os.path.join(folder, "events"))
    self._write(start + 1, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

  def _write(self, step: int, **content: Any) -> None:
    self._writer.write_event(self._events.Event(wall_time=time.time(), step=step, **content))

  def add(self, step: int, values: dict[str, float]) -> None:
    """Writes values after `step` by their names; raises OSError."""
    for name, value in values.items():
      self._write(step, summary=self._summary.scalar(name, value))
    self._writer.flush()

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()


def _wandb_run(project: str, workdir: str, folder: str) -> Any:
  """The run of Weights & Biases that belongs to a work directory: the same one when training goes on."""
  label = f"report.wandb={project}"
  try:
    import wandb
  except ImportError as error:
    raise UserError(f"{label}: needs a package; pip install wandb, or set it to None") from error
  name = os.path.basename(files.absolute(workdir))
  identity = os.environ.get("WANDB_RUN_ID") or workdir_lib.run_hash(workdir)[:16]
  config = config_lib.to_dict(workdir_lib.config_of(workdir))
  try:
    return wandb.init(project=project, name=name, id=identity, resume="allow", dir=folder, config=config)
  except Exception as error:  # also of a machine without a home directory
    raise UserError(
      f"{label}: can't be reached ({first_line(error, 200)}); log in with wandb login, or set WANDB_MODE=offline"
    ) from error


def _truncate(path: str, last_step: int, validate: bool) -> None:
  """Drops the records after `last_step`, its validation if that will be repeated, and a half-written line."""
  if not os.path.exists(path):
    return
  repeated = (last_step, "validation") if validate else None
  kept = [
    line
    for line, record in _lines(path)
    if record["step"] <= last_step and (record["step"], record["split"]) != repeated
  ]
  files.write(path, b"".join(kept))


def _lines(path: str):
  for line in io.BytesIO(files.read(path)):  # which end at line feeds alone
    try:
      yield line, json.loads(line)
    except ValueError:  # a run killed while it wrote
      return


def read_metrics(workdir: str, split: str) -> list[dict[str, Any]]:
  """The records of `split` (train or validation) in the work directory's metrics.jsonl, in order."""
  return [record for _, record in _lines(os.path.join(workdir, METRICS_FILE)) if record["split"] == split]


def plot_losses(workdir: str) -> None:
  """Draws loss.png in the work directory: training and validation loss in nats per token, by step."""

  def fill(figure: Any) -> None:
    axes = figure.subplots()
    for split, style in (("train", dict(linewidth=1)), ("validation", dict(marker="o", linewidth=2))):
      records = [r for r in read_metrics(workdir, split) if r["loss"] is not None]
      if records:
        label = f"{split}, last {records[-1]['loss']:.3f}"
        axes.plot([r["step"] for r in records], [r["loss"] for r in records], label=label, **style)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    if axes.lines:
      axes.legend()
    axes.grid(alpha=0.3)

  draw(os.path.join(workdir, "loss.png"), (7, 4.5), fill)
