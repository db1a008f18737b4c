"""The train loop: from a config and a work directory to a trained model."""

import contextlib
import dataclasses
import math
import os
import time
from typing import Any

from clu import parameter_overview
import grain
import jax
from jax.sharding import Mesh

from diffeq_nnx import data, files
from diffeq_nnx.config import CHECKPOINT_FOLDER, Config
from diffeq_nnx.data import Corpus
from diffeq_nnx.data.preparation.directory import lock
from diffeq_nnx.depth.trained import count_steps_before_drawing, draw_num_steps, list_computed, say_untrained
from diffeq_nnx.errors import Diverged, UserError
from diffeq_nnx.model.ready import ReadyModel, make_ready
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.checkpoint import Checkpoints
from diffeq_nnx.runs.run import checked_mesh, load_corpus
from diffeq_nnx.training import fastest, flops
from diffeq_nnx.training.evaluate import Evaluator, bits_per_byte, perplexity
from diffeq_nnx.training.goodput import Goodput
from diffeq_nnx.training.optimizer import schedule
from diffeq_nnx.training.report import Reporter
from diffeq_nnx.training.step import State, abstract_state, all_params, init_state, make_train_step, state_shardings
from diffeq_nnx.training.teacher import find_teacher


def train(config: Config, workdir: str) -> dict[str, float]:
  """Trains, or continues to train.

  Returns:
    The last validation values, as of `evaluate.Evaluator`: loss (nats per token), perplexity, bits_per_byte, tokens,
    seconds; {} where SIGTERM ended the run before the first validation.

  Raises:
    UserError: the text, the work directory, the checkpoints, the teacher, the devices or this backend don't fit the
      config.
    Diverged: a loss, a gradient or parameters that are not finite; the newest checkpoint is of before.
    RunError: a file that can't be written.
  """
  goodput = Goodput()
  mesh = checked_mesh(config)
  with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
    say(f"mesh: {sharding.describe(mesh)}, {jax.process_count()} processes")
    with goodput.spending("reading the text"):
      corpus = load_corpus(config)
    with distributed.sync_errors():
      _check_lossless(config, corpus, workdir)
    of_teacher = find_teacher(config, corpus.tokenizer, mesh)
    with distributed.sync_errors():
      if distributed.is_main_process() and not files.is_url(workdir):  # two would remove each other's files
        with files.writing(f"workdir={workdir}", "choose another directory"):
          files.make_folder(workdir)
          stack.enter_context(lock(files.absolute(workdir), f"workdir={workdir}", what="trains there"))
    workdir_lib.claim(workdir, config, corpus.tokenizer, corpus)
    with goodput.spending("starting"):
      teacher = origin = None
      if of_teacher is not None:
        teacher = make_ready(of_teacher.model, mesh=of_teacher.mesh)
        origin = f"{of_teacher.hash[:12]} at step {of_teacher.step}"
    del of_teacher  # which would keep its parameters in memory
    with goodput.spending("compiling"):
      config = fastest.autotune(config, workdir, mesh, teacher)
    share = sharding.Share(mesh, config.train.batch_size)
    checkpoints = Checkpoints(workdir, config, corpus.tokenizer.hash)
    with goodput.spending("starting"):
      state, position = start_state(config, checkpoints, mesh)
      say_untrained(config, config.train.steps, config.eval.num_steps)
      _say_another_schedule(config, position.get("schedule_steps"), int(state["step"]))
      _say_another_teacher(origin, position, int(state["step"]))
      position |= {"schedule_steps": config.optimizer.schedule_steps or config.train.steps, "teacher": origin}
    with distributed.sync_errors():
      batches = batch_iterator(config, corpus, share, position["windows"])
    try:
      start, validate = int(state["step"]), position["validate"]
      way_on = "the checkpoints there stay as they are; make room, and run the same command to continue from the newest"
      with (
        files.writing(f"workdir={workdir}", way_on, begun=True),
        Reporter(workdir, start, config.train.steps, config.report.wandb, validate) as report,
        distributed.Preemption() as preemption,
        goodput.watched(),
      ):
        values = _loop(
          _Run(
            config, mesh, corpus, share, batches, start, position, checkpoints, report, preemption, goodput, teacher
          ),
          state,
        )
      with distributed.sync_errors():  # no process leaves while process 0 still writes its report
        return values
    except Diverged as error:
      raise Diverged(f"{error}; {_way_back(checkpoints, workdir, error.step)}", error.step) from None
    except Exception:
      if jax.process_count() == 1:  # several processes write a checkpoint together, and only one may have the error
        with contextlib.suppress(Exception):  # the first error is told
          checkpoints.close()  # waits for the checkpoint that is being written
      raise


def batch_iterator(
  config: Config, corpus: data.Corpus, share: sharding.Share, windows: int = 0
) -> grain.DatasetIterator:
  """This process's rows of the endless batches after `windows` training windows, read ahead by a thread.

  Raises:
    UserError: the text is too short; or documents must be kept apart, and their begin and end marks are the same.
  """
  batches = data.train_batches(
    corpus.train,
    seq_len=config.model.seq_len,
    batch_size=config.train.batch_size,
    seed=config.seed,
    rows=share.rows,
    start=windows,
    eos_id=data.choose_document_end(config.data, corpus),
  )
  iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
  iterator.start_prefetch()  # the first batches of shards in a bucket take a second
  return iterator


def start_state(config: Config, checkpoints: Checkpoints, mesh: Mesh) -> tuple[State, dict[str, Any]]:
  """(state, position): the newest checkpoint's, or those of step 0.

  In the position, `windows` counts the windows trained on so far, and `validate` is whether SIGTERM kept the step of
  the checkpoint from its validation.

  Raises:
    UserError: no checkpoint can be read, or adapters without a trained model.
  """
  restored = checkpoints.restore(abstract_state(config, mesh))
  if restored is None and config.model.lora.rank:
    raise UserError(
      f"model.lora.rank={config.model.lora.rank}: adapters need a trained model; use --job=finetune "
      "--from_workdir=RUN, or set it to 0"
    )
  if restored is None:
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    say(parameter_overview.get_parameter_overview(all_params(state), include_stats="global"))  # in all processes
    return state, {"windows": 0, "validate": False}
  state, position = restored
  if step := int(state["step"]):  # at 0 another job made the run, and training begins
    say(f"continuing from the checkpoint of step {step}")
  return state, position


def _say_another_schedule(config: Config, before: int | None, step: int) -> None:
  """Says how the learning rate changes at a step where the run goes on, if its schedule had another length before."""
  now = config.optimizer.schedule_steps or config.train.steps
  if before in (None, now) or step >= config.train.steps:
    return
  of_length = lambda length: schedule(dataclasses.replace(config.optimizer, schedule_steps=length), length)
  last, following = float(of_length(before)(step - 1)), float(of_length(now)(step))
  say(
    f"the schedule of the learning rate has {now} steps now and had {before} until step {step}: the rate goes from "
    f"{last:.3g} to {following:.3g}; with optimizer.schedule_steps={before} the former schedule stays, which ends at "
    f"{float(of_length(before)(before)):.3g}"
  )
  if step < (first := count_steps_before_drawing(config)):
    say(f"train.draw_from={config.train.draw_from}: depths are drawn again from train step {math.ceil(first)} on")


def _say_another_teacher(now: str | None, position: dict[str, Any], step: int) -> None:
  """Says so where the run had another teacher, or its teacher another model, before a step where it goes on."""
  before = position.get("teacher", now)
  if before != now:
    say(f"train.teacher: was {before} until step {step}, and is {now} now")


def _way_back(checkpoints: Checkpoints, workdir: str, step: int) -> str:
  """What to do after a run diverged, whose parameters were still finite after `step`; the end of an error line."""
  stay = checkpoints.without(step)
  if not stay:
    return "there is no checkpoint; lower optimizer.peak_rate, and start again in another directory"
  back = "run the same command with a lower optimizer.peak_rate, to continue from the checkpoint of step"
  folder = os.path.join(workdir, CHECKPOINT_FOLDER)
  if len(stay) == 1:
    return f"{back} {stay[-1]}"
  return f"{back} {stay[-1]}; if it diverges again, move {os.path.join(folder, str(stay[-1]))} away for step {stay[-2]}"


def _check_lossless(config: Config, corpus: Corpus, workdir: str) -> None:
  """Raises UserError where a run from scratch would learn from text that its tokenizer changes."""
  if not corpus.tokenizer.lossless and not workdir_lib.holds_run(workdir):
    raise UserError(
      f"data.tokenizer={config.data.tokenizer}, data.source={config.data.source}: this tokenizer doesn't give every "
      "text back as it was, which training from scratch requires; set data.unknown_bytes=error if the vocabulary lacks "
      "bytes, name the file tokenizer.model (whose leading space is then left out), or train a model from --job=import"
    )


@dataclasses.dataclass
class _Run:
  """What the loop works with, apart from the state."""

  config: Config
  mesh: Mesh
  corpus: data.Corpus
  share: sharding.Share
  batches: grain.DatasetIterator
  start: int  # the step before the first of these batches
  position: dict[str, Any]  # there; of `start_state`, with the schedule and the teacher of this run
  checkpoints: Checkpoints
  report: Reporter
  preemption: distributed.Preemption
  goodput: Goodput
  teacher: ReadyModel | None
  saved: float = dataclasses.field(default_factory=time.monotonic)  # when the last checkpoint was, or this run began

  def must_save(self, step: int) -> bool:
    """Whether a checkpoint is due after this step."""
    settings = self.config.checkpoint
    if step % settings.every == 0 or step == self.config.train.steps:
      return True
    minutes = settings.minutes
    if minutes is None or step % self.config.train.log_every:
      return False
    return distributed.on_main_process(lambda: time.monotonic() - self.saved > 60 * minutes)

  def save(self, state: State, loss: float | None, validate: bool) -> None:
    """Starts to save a checkpoint; `validate`: its step was not validated, though it is one to be."""
    step = int(state["step"])
    with self.goodput.spending("saving"):
      self.report.upload()
      windows = self.position["windows"] + (step - self.start) * self.config.train.batch_size
      self.checkpoints.save(state, {**self.position, "windows": windows, "validate": validate}, loss)
    self.saved = time.monotonic()


def _loop(run: _Run, state: State) -> dict[str, float]:
  config, mesh = run.config, run.mesh
  train_step = make_train_step(config, mesh)
  evaluator = Evaluator(config, run.corpus, mesh)
  watch = _Watch(run)
  start, steps = run.start, config.train.steps
  compiled: set[int] = set()

  def run_validation(step: int) -> dict[str, float]:
    def stop() -> bool:
      run.goodput.mark_step(step)  # before each batch, so that a long validation is not called stalled
      return run.preemption.reached()

    with run.goodput.spending("validating"):
      found = evaluator(all_params(state), stop)
      if found:
        run.report.validation(step, found)
    return found

  values = run_validation(start) if run.position["validate"] else {}
  if run.position["validate"] and not values:
    _finish(run, start)
    say(f"SIGTERM: run the same command to continue from the checkpoint of step {start}, which is to be validated")
    return values
  if values:
    run.checkpoints.set_loss(start, values["loss"])
  # JAX's modes for finding errors run a step operation by operation, with numbers from the host
  guard = "allow" if jax.config.values["jax_disable_jit"] or jax.config.values["jax_debug_nans"] else "disallow"
  for step in range(start, steps):
    num_steps = draw_num_steps(config, step)
    with run.goodput.spending("waiting for data"):
      rows = next(run.batches)
    batch = run.share.place(rows)
    compiles = run.goodput.spending("compiling") if num_steps not in compiled else contextlib.nullcontext()
    with jax.transfer_guard(guard), compiles:
      state, metrics = train_step(state, batch, num_steps, run.teacher)
    compiled.add(num_steps)
    watch.after(step + 1, num_steps, metrics)
    run.goodput.mark_step(step + 1)
    validate = (step + 1) % config.eval.every == 0 or step + 1 == steps
    save, preempted = run.must_save(step + 1), run.preemption.reached()
    if validate or save or preempted:
      watch.read()  # a step that was not finite must not be saved
      found = {}
      if validate and not preempted:
        try:
          found = run_validation(step + 1)
        except (jax.errors.JaxRuntimeError, UserError):  # such as a lack of memory, or of text that counts
          if save and jax.process_count() == 1:  # as in `train`
            run.save(state, None, validate=True)
          raise
        values, preempted = found or values, not found
      if save or preempted:
        run.save(state, found.get("loss"), validate=validate and not found)
    if preempted:
      _finish(run, step + 1)
      say(f"SIGTERM: saved the checkpoint of step {step + 1}; run the same command to continue from there")
      return values
  _finish(run, max(start, steps))
  if start >= steps:
    say(
      f"nothing to train: the newest checkpoint is of step {start}, and train.steps={steps}; "
      "raise train.steps to continue"
    )
    values = values or evaluator(all_params(state))
  return values


def _finish(run: _Run, step: int) -> None:
  """Waits for the last checkpoint, and reports where the time went."""
  with run.goodput.spending("saving"):
    run.checkpoints.close()
  run.report.goodput(step, run.goodput.shares())


class _Watch:
  """Reads each step's metrics one step late, so that the device never waits for the host."""

  def __init__(self, run: _Run):
    self._run, self._config = run, run.config
    peak, source = self._config.train.peak_tflops, "train.peak_tflops"
    if peak is None:
      peak, source = flops.device_peak_tflops(self._config.model.dtype)
    self._peak = peak * 1e12 * jax.device_count()
    say(f"utilization is relative to {peak:.3g} TFLOP/s per device ({source})")
    self._pending: tuple[int, dict[str, jax.Array]] | None = None
    self._restart_clock()

  def after(self, step: int, num_steps: int, metrics: dict[str, jax.Array]) -> None:
    """Takes the metrics of the step just dispatched; checks and reports those of the step before."""
    self.read()
    self._pending = (step, metrics)
    self._steps += 1
    for count in list_computed(self._config, num_steps):
      self._flops += flops.model_flops(self._config, count)
      self._generator_flops += flops.generator_flops(self._config.model, count)

  def read(self) -> None:
    """Waits for the metrics of the last step, and reports them; raises Diverged where one of them is not finite."""
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    values = {name: value.item() for name, value in jax.device_get(metrics).items()}
    for name in ("loss", "gradient_norm"):
      if not math.isfinite(values[name]):
        raise Diverged(f"step {step}: the {name.replace('_', ' ')} is {values[name]}", step - 1)
    if step % self._config.train.log_every == 0:
      self._log(step, values)

  def _log(self, step: int, values: dict[str, float]) -> None:
    train = self._config.train
    elapsed, waited, paused = (now - before for now, before in zip(self._clocks(), self._before))
    seconds = max(elapsed - paused, 1e-9)
    loss = values.get("cross_entropy", values["loss"])
    utilization = lambda operations: operations / seconds / self._peak
    operations = self._flops + self._generator_flops
    found = {
      **values,
      "perplexity": perplexity(loss),
      "bits_per_byte": bits_per_byte(loss, self._run.corpus.train.bytes_per_token),
      "waiting_for_data": waited / seconds,
      "tokens_per_second": self._steps * train.batch_size * self._config.model.seq_len / seconds,
      "utilization": utilization(self._flops),
      "utilization_with_generator": utilization(operations),
    }
    if self._run.teacher is not None:
      operations += self._steps * flops.teacher_flops(self._config, self._run.teacher.config)
      found["utilization_with_teacher"] = utilization(operations)
    self._run.report.train(step, found)
    self._restart_clock()

  def _clocks(self) -> tuple[float, float, float]:
    """Seconds on the clock, those spent waiting for data, and those that do not count as training."""
    spent = self._run.goodput.spent
    return time.perf_counter(), spent("waiting for data"), spent("compiling", "validating", "saving")

  def _restart_clock(self) -> None:
    self._before = self._clocks()
    self._steps, self._flops, self._generator_flops = 0, 0.0, 0.0
