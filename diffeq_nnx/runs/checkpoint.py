"""Checkpoints of a run: saved asynchronously, restored bit for bit; the newest and the best are kept."""

from collections.abc import Iterator
import contextlib
import json
import math
import os
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from diffeq_nnx import config as config_lib
from diffeq_nnx import files
from diffeq_nnx.config import CHECKPOINT_FOLDER, DAMAGED_FOLDER, FROZEN_FOLDER, RANDOM_BITS, Config
from diffeq_nnx.errors import Diverged, RunError, UserError, first_line
from diffeq_nnx.model import parameters
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs.workdir import check_config

State = dict[str, Any]  # a training state: see `training.step`
BIT_SUMS = "bit_sums"  # in the item data, by item; orbax does not notice every changed byte
# What the errors of XLA and of tensorstore say of a device, a disk or a bucket rather than of a checkpoint.
_PASSING = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED")
_UNDAMAGED = "undamaged: "  # begins problems that need not be the checkpoint's, so that processes can tell each other


class _Manager(ocp.CheckpointManager):
  """Orbax's manager without its own question whether SIGTERM came.

  JAX answers yes at one number of the question alone. Orbax would ask with the train step as the number, so that the
  questions that `distributed.Preemption` counts could miss the answer.
  """

  def reached_preemption(self, step: int) -> bool:
    """Returns False, since the train loop asks, and then saves."""
    return False


class Checkpoints:
  """The checkpoints of one work directory.

  Each holds five items: params, optimizer and counters (step, random key) as arrays; data (the position in the batches,
  and sums over the bits of the other items) and run (config and tokenizer hash) as JSON.
  """

  def __init__(self, workdir: str, config: Config, tokenizer_hash: str, read_only: bool = False):
    """`read_only`: nothing is written to the directory, and a damaged checkpoint stays where it is."""
    files.check_place(workdir)
    self._read_only = read_only
    self._workdir = files.absolute(workdir)
    self._folder = os.path.join(self._workdir, CHECKPOINT_FOLDER)
    self._config = config
    self._saved: list[int] = []  # steps that this object has saved
    self._frozen_sums: list[int] = []  # of the bits of the parameters that don't learn
    self._run: dict[str, Any] = {"config": config_lib.to_dict(config), "tokenizer_hash": tokenizer_hash}
    if not read_only:
      distributed.on_main_process(self._set_aside_without_metrics)
    score = lambda metrics: -metrics["loss"]
    best = checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
    newest = checkpoint_managers.LatestN(max(2, config.checkpoint.keep))
    self._manager = _Manager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        create=not read_only,
        cleanup_tmp_directories=not read_only,  # what a kill left of saves would stay forever
        async_options=ocp.AsyncOptions(timeout_secs=distributed.WAIT_SECONDS),  # a slow disk is no dead one
        lightweight_initialize=read_only,  # else it raises where the loss of any checkpoint is damaged
        best_fn=score,  # the policy below decides what stays; without this orbax would not write the losses
        preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
      ),
    )

  def steps(self) -> list[int]:
    """Steps with a finished checkpoint, in order."""
    return sorted(self._manager.all_steps())

  def save(self, state: State, data_state: dict[str, Any], validation_loss: float | None) -> None:
    """Starts to save the state under its step, and returns once the arrays are copied off the device.

    Raises:
      Diverged: the parameters are not finite, or so large that their norm is not. Nothing is saved.
      RunError: this save or the one before could not be written.
    """
    step, items = int(state["step"]), _items(state)
    norm = float(jax.jit(optax.tree.norm)(state["params"]))  # not finite where an element is not
    if not math.isfinite(norm):
      raise Diverged(f"step {step}: the norm of the parameters is {norm} after the update, so they are not saved", step)
    sums = {name: _bit_sums(item) for name, item in items.items()} | {"run": _sum_json(self._run)}
    if state.get("frozen"):
      self._frozen_sums = self._frozen_sums or _bit_sums(state["frozen"])
      sums[FROZEN_FOLDER] = self._frozen_sums
    args = ocp.args.Composite(
      data=ocp.args.JsonSave({**data_state, BIT_SUMS: sums}),
      run=ocp.args.JsonSave(self._run),
      **{name: ocp.args.StandardSave(item) for name, item in items.items()},
    )
    with self._explain(f"save the checkpoint of step {step}"):
      self._manager.save(step, args=args, metrics=_rank(validation_loss))
    self._saved.append(step)

  def set_loss(self, step: int, validation_loss: float) -> None:
    """Sets the loss of a checkpoint that was saved before it was validated, so that the best one is kept.

    Raises RunError if it can't be written.
    """
    path = os.path.join(self._folder, str(step), "metrics", "metrics")
    with self._explain(f"write the loss of the checkpoint of step {step}"):
      distributed.on_main_process(lambda: files.write_json(path, _rank(validation_loss)))
    self._manager.reload()

  def without(self, step: int) -> list[int]:
    """Moves the checkpoint of a step aside if this object saved it; the steps of those that stay.

    A checkpoint that was there before stays, since a changed config rather than its parameters may be at fault. Raises
    RunError if the last save could not be written.
    """
    with self._explain("finish saving the checkpoint"):
      self._manager.wait_until_finished()
    if step in self._saved:
      self._set_aside(step, "its parameters give a loss or gradient that is not finite")
    return distributed.on_main_process(self.steps)

  def restore(self, abstract: State) -> tuple[State, dict[str, Any]] | None:
    """The newest state that can be read, and its position in the data; None if nothing was saved yet.

    `abstract` holds shapes of the state, with shardings where they matter.

    A damaged checkpoint is moved to the folder checkpoints_damaged, unless this is `read_only`, and the one before is
    tried.

    Raises:
      UserError: there are checkpoints, and none can be read, or the newest is of another run.
      RunError: some processes can read it, and others can't; or what keeps it from being read need not be the
        checkpoint's, such as a lack of memory.
    """
    items, _ = self._restore({name: ocp.args.StandardRestore(item) for name, item in _items(abstract).items()})
    if items is None:
      return None
    frozen = self._restore_frozen(abstract["frozen"], items["data"].pop(BIT_SUMS))
    return {**_state(items), "frozen": frozen}, items["data"]

  def restore_params(self, abstract: Params) -> tuple[Params, int] | None:
    """All parameters of the newest model, and its step; the rest of the state stays on disk. Otherwise as `restore`."""
    learning, frozen = parameters.split(self._config.model, abstract)
    items, step = self._restore({"params": ocp.args.StandardRestore(learning)})
    if items is None:
      return None
    return parameters.join(items["params"], self._restore_frozen(frozen, items["data"][BIT_SUMS])), step

  def _restore(self, wanted: dict[str, Any]) -> tuple[Any, int]:
    """These items and `data` of the newest readable checkpoint, and its step; (None, 0) if there is none."""
    found = distributed.on_main_process(self.steps)
    for step in reversed(found):
      problem = ""
      if not self._read_only:
        distributed.on_main_process(self._require_own, step)
      try:
        items = self._manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore(), **wanted))
        sums = items["data"][BIT_SUMS]
        changed = [name for name in wanted if _bit_sums(items[name]) != sums[name]]
        problem = f"{', '.join(changed)}: not the bits that were saved" if changed else ""
      except Exception as error:  # orbax raises many types: bare Exception, KeyError, FileNotFoundError...
        problem = _describe(error)
      problem = self._find_problem(step, problem, os.path.join(self._folder, str(step)))
      if not problem:
        return items, step
      if self._read_only:
        say(f"the checkpoint of step {step} is damaged ({problem}); trying the one before")
      else:
        self._set_aside(step, problem)
    if found:
      moved = "" if self._read_only else f"; they were moved to {DAMAGED_FOLDER}"
      raise UserError(
        f"workdir={self._workdir}: none of its checkpoints {found} can be read{moved}; to start again, choose another "
        "workdir or remove this one"
      )
    return None, 0

  def _require_own(self, step: int) -> None:
    """Raises UserError if a checkpoint says that it is of another run, which is no damage."""
    read = lambda item: files.read_json(os.path.join(self._folder, str(step), item, "metadata"))
    try:
      theirs, known = read("run"), read("data")[BIT_SUMS].get("run")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
      return  # it is damaged, as restoring it finds
    whole = isinstance(theirs, dict) and theirs.keys() == self._run.keys()
    if whole and known == _sum_json(theirs):
      check_config(self._workdir, theirs, self._config, self._run["tokenizer_hash"])

  def save_frozen(self, frozen: dict[str, Any]) -> None:
    """Saves the parameters that don't learn, once for all checkpoints; {}: none. Raises RunError if that fails."""
    if frozen:
      with self._explain("save the checkpoint of step 0"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.join(self._workdir, FROZEN_FOLDER), frozen, force=True)

  def _restore_frozen(self, abstract: dict[str, Any], sums: dict[str, list[int]]) -> dict[str, Any]:
    if not abstract:
      return {}
    problem, frozen = "", {}
    try:
      with ocp.StandardCheckpointer() as checkpointer:
        frozen = checkpointer.restore(os.path.join(self._workdir, FROZEN_FOLDER), abstract)
      if FROZEN_FOLDER in sums and _bit_sums(frozen) != sums[FROZEN_FOLDER]:
        problem = "not the bits that were saved"
    except Exception as error:  # as above
      problem = _describe(error)
    problem = self._find_problem(0, problem, os.path.join(self._workdir, FROZEN_FOLDER))
    if problem:
      raise UserError(
        f"workdir={self._workdir}: {FROZEN_FOLDER}, the parameters that don't learn, can't be read ({problem}); "
        "restore it, or fine-tune again"
      )
    return frozen

  def _find_problem(self, step: int, problem: str, folder: str) -> str:
    """The first process's problem with a checkpoint in a folder that is damaged, or "".

    Raises:
      RunError: the problem is none of the checkpoint's, or only some processes have one: those without still wait for
        the others in orbax.
    """
    try:
      found = next(filter(None, distributed.exchange(problem, wait_seconds=distributed.HEARTBEAT_SECONDS)), "")
    except jax.errors.JaxRuntimeError as error:
      raise RunError(
        f"the checkpoint of step {step} can be read by some processes only "
        f"({problem.removeprefix(_UNDAMAGED) or 'not by another'}); check that all hosts mount the work directory "
        f"alike, and start again; if this stays, {folder} is damaged: move it away"
      ) from error
    if found.startswith(_UNDAMAGED):
      raise RunError(
        f"the checkpoint of step {step} can't be read at the moment ({found.removeprefix(_UNDAMAGED)}); it stays where "
        "it is: free memory or take more devices, or make the work directory readable, and run the same command again"
      )
    return found

  def _set_aside_without_metrics(self) -> None:
    """Moves checkpoints whose loss can't be read, which would keep orbax from opening the others."""
    for name in files.list_sizes(self._folder):
      if not (name.isascii() and name.isdigit()):
        continue
      try:
        files.read_json(os.path.join(self._folder, name, "metrics", "metrics"))
      except FileNotFoundError:
        pass  # not finished, as orbax sees too
      except ValueError as error:
        self._move_aside(int(name), first_line(error, 200))

  def _set_aside(self, step: int, problem: str) -> None:
    distributed.on_main_process(self._move_aside, step, problem)
    self._manager.reload()

  def _move_aside(self, step: int, problem: str) -> None:
    target = os.path.join(self._workdir, DAMAGED_FOLDER, str(step))
    files.move_folder(os.path.join(self._folder, str(step)), target)
    say(f"the checkpoint of step {step} is damaged ({problem}); moved to {target}; the one before takes its place")

  def close(self) -> None:
    """Waits for the current save; raises RunError if it could not be written."""
    with self._explain("finish saving the checkpoint"):
      self._manager.close()

  @contextlib.contextmanager
  def _explain(self, what: str) -> Iterator[None]:
    """Turns whatever orbax raises into one line that names the checkpoints that still exist."""
    try:
      yield
    except Exception as error:
      if distributed.is_process_death(error):
        raise
      kept: list[int] = []
      with contextlib.suppress(Exception):  # packages for buckets raise what they like
        kept = sorted(ocp.utils.checkpoint_steps(self._folder))
      raise RunError(
        f"could not {what} ({type(error).__name__}: {first_line(error, 300)}); checkpoints of steps {kept} are "
        "untouched; make room or repair the directory, and run the same command to continue from there"
      ) from error


def _rank(validation_loss: float | None) -> dict[str, float]:
  """What orbax orders checkpoints by; NaN has no place in an order."""
  return {"loss": math.inf if validation_loss is None or not math.isfinite(validation_loss) else validation_loss}


def _describe(error: Exception) -> str:
  """A problem of restoring in a line, which begins with _UNDAMAGED where the checkpoint need not be at fault."""
  passes = files.is_refused(error) or isinstance(error, MemoryError) or any(status in str(error) for status in _PASSING)
  return f"{_UNDAMAGED if passes else ''}{type(error).__name__}: {first_line(error, 200)}"


def _sum_json(value: Any) -> list[int]:
  """A sum over a value of JSON's types, which a changed byte changes."""
  return [zlib.crc32(json.dumps(value, sort_keys=True).encode())]


def _bit_sums(tree: Any) -> list[int]:
  """The sum of each array's bits, taken as integers, modulo 2^32: the same on any mesh."""
  return np.asarray(_sum_bits(tree)).tolist()


@jax.jit
def _sum_bits(tree: Any) -> jax.Array:
  integer = lambda leaf: {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)  # two of 64 bits
  bits = (jax.lax.bitcast_convert_type(leaf, integer(leaf)) for leaf in jax.tree.leaves(tree))
  return jnp.stack([jnp.sum(one, dtype=jnp.uint32) for one in bits])


def _items(state: State) -> dict[str, Any]:
  """The state as orbax items; a typed random key as its integers."""
  key = state["key"]
  if isinstance(key, jax.ShapeDtypeStruct):
    data = jax.eval_shape(jax.random.key_data, key).update(sharding=key.sharding)  # none: the one it was saved with
  else:
    data = jax.random.key_data(key)
  return {"params": state["params"], "optimizer": state["opt_state"], "counters": {"step": state["step"], "key": data}}


def _state(items: Any) -> State:
  counters = items["counters"]
  return {
    "params": items["params"],
    "opt_state": items["optimizer"],
    "step": counters["step"],
    "key": jax.random.wrap_key_data(counters["key"], impl=RANDOM_BITS),
  }
