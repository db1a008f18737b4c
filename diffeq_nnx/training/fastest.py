"""The fastest way to compute a train step on these devices: measured for train.remat=auto, device_batch_size=-1."""

import dataclasses
import hashlib
import itertools
import math
import os
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffeq_nnx import files
from diffeq_nnx.config import Config
from diffeq_nnx.depth.trained import find_costliest
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.kernels import attention
from diffeq_nnx.model.ready import ReadyModel
from diffeq_nnx.parallel import distributed, sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.training.step import (
  abstract_batch,
  abstract_state,
  has_mask,
  init_state,
  make_train_step,
  packs_documents,
  state_shardings,
)

FILE = "fastest.json"  # in the work directory: the devices, and what was the fastest on them
SPARE = 0.05  # of a device's memory must stay free
TIMED = 3  # steps, after one that is not timed
SIZES = 4  # how many numbers of sequences are tried: all that a device holds, a half, a quarter, an eighth

Choice = tuple[str, int | None]  # train.remat, train.device_batch_size


def autotune(config: Config, workdir: str, mesh: Mesh, teacher: ReadyModel | None = None) -> Config:
  """The config with the fastest values in place of train.remat=auto and train.device_batch_size=-1.

  Every choice is compiled, and run for a few steps from the initial state on random tokens. What was found is kept in
  the work directory, and is measured again only for other devices or another step. Raises UserError if none fits.
  """
  if not _remat_is_open(config) and config.train.device_batch_size != -1:
    return config
  asked = _describe(config, mesh, teacher)
  path = os.path.join(workdir, FILE)
  tried = list_candidates(config, config.train.batch_size // sharding.num_shards("batch", mesh.shape))
  known = distributed.on_main_process(files.read_notes, path)
  choice = known.get("remat"), known.get("device_batch_size")
  if known.get("asked") == asked and choice in tried:
    say(f"{_format_choice(choice)}: was the fastest on these devices ({FILE})")
    return _choose(config, choice)
  found = measure(config, tried, mesh, teacher)
  if not found:
    raise UserError(
      "train.remat=auto, train.device_batch_size=-1: no choice fits these devices; use more of them, or see the advice "
      "of launch/compile_ahead.py"
    )
  choice = min(found, key=lambda choice: found[choice])
  say(f"{_format_choice(choice)}: the fastest of {len(found)} that fit, {found[choice]:.3g} s a step")
  record = {"asked": asked, "remat": choice[0], "device_batch_size": choice[1]}
  distributed.on_main_process(files.write_json, path, record)
  return _choose(config, choice)


def _remat_is_open(config: Config) -> bool:
  return config.train.remat == "auto" and config.train.adjoint == "checkpointed"


def list_candidates(config: Config, held: int) -> list[Choice]:
  """The values worth measuring on devices that hold `held` sequences each, for each remat from few to many."""
  train = config.train
  remats = ["full", "dots", "none"] if _remat_is_open(config) else [train.remat]
  # About all of them, a half, a quarter...: the fewest micro-batches that divide them evenly.
  counts = {next(n for n in range(min(1 << power, held), held + 1) if held % n == 0) for power in range(SIZES)}
  sizes = sorted(held // n for n in counts) if train.device_batch_size == -1 else [train.device_batch_size]
  return list(itertools.product(remats, sizes))


def measure(config: Config, choices: list[Choice], mesh: Mesh, teacher: ReadyModel | None) -> dict[Choice, float]:
  """Seconds of a train step with each of these choices that fits."""
  found: dict[Choice, float] = {}
  too_large: set[str] = set()  # with these, no larger number of sequences fits either
  for choice in choices:
    seconds = None if choice[0] in too_large else time_step(_choose(config, choice), mesh, teacher)
    of_processes = distributed.exchange(seconds)
    if None in of_processes:
      too_large.add(choice[0])
      say(f"{_format_choice(choice)}: does not fit")
    else:
      found[choice] = max(of_processes)
      say(f"{_format_choice(choice)}: {found[choice]:.3g} s a step")
  return found


def time_step(config: Config, mesh: Mesh, teacher: ReadyModel | None) -> float | None:
  """Seconds of a train step, the median of `TIMED`; None: it needs more memory than a device has, less `SPARE`."""
  most = find_costliest(config)
  step, fits = make_train_step(config, mesh), True
  try:
    compiled = step.lower(abstract_state(config, mesh), abstract_batch(config, mesh), most, teacher).compile()
    memory = compiled.memory_analysis()
    fits = not memory or memory.peak_memory_in_bytes <= (1 - SPARE) * memory_limit(mesh.local_devices[0])
  except jax.errors.JaxRuntimeError as error:
    _require_exhausted(error)
    fits = False
  if not all(distributed.exchange(fits)):  # all processes run the step, or none
    return None
  try:
    state = jax.jit(init_state, static_argnums=0, out_shardings=state_shardings(config, mesh))(config)
    batch = jax.jit(lambda: _random_batch(config), out_shardings=sharding.batch_sharding(mesh))()
    seconds = []
    for _ in range(1 + TIMED):
      start = time.perf_counter()
      state, metrics = compiled(state, batch, teacher)
      jax.block_until_ready((state, metrics))
      seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
  except jax.errors.JaxRuntimeError as error:
    _require_exhausted(error)
    if distributed.whoami()[1] > 1:  # of which others may wait for this one
      choice = _format_choice((config.train.remat, config.train.device_batch_size))
      raise RunError(
        f"{choice}: takes more memory than the compiler said; name smaller values in their place"
      ) from error
    return None


def _require_exhausted(error: jax.errors.JaxRuntimeError) -> None:
  """Raises an error again unless it says that a device lacks memory."""
  if "RESOURCE_EXHAUSTED" not in str(error):
    raise error


def memory_limit(device: jax.Device) -> float:
  """Bytes of memory that programs may use on a device; infinite if unknown, as for CPUs."""
  return (device.memory_stats() or {}).get("bytes_limit", math.inf)


def _random_batch(config: Config) -> dict[str, jax.Array]:
  """Random tokens; where documents are kept apart, each row is one."""
  shape = (config.train.batch_size, config.model.seq_len)
  inputs, targets = jax.random.randint(jax.random.key(0), (2, *shape), 0, config.model.vocab_size)
  batch = {"inputs": inputs, "targets": targets}
  if packs_documents(config):
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    batch |= {"segment_ids": jnp.zeros(shape, jnp.int32), "positions": places}
  return {**batch, "mask": jnp.ones(shape)} if has_mask(config) else batch


def _choose(config: Config, choice: Choice) -> Config:
  train = dataclasses.replace(config.train, remat=choice[0], device_batch_size=choice[1])
  return dataclasses.replace(config, train=train)


def _format_choice(choice: Choice) -> str:
  return f"train.remat={choice[0]}, train.device_batch_size={choice[1]}"


def _describe(config: Config, mesh: Mesh, teacher: ReadyModel | None) -> str:
  """What the time of a step depends on."""
  devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {sharding.describe(mesh)}, jax {jax.__version__}"
  train = dataclasses.replace(config.train, steps=1, log_every=1, teacher=None)
  model = config.model
  kernel = attention.choose(model.attention, dtype=jnp.dtype(model.dtype), head_dim=model.head_size)[0]
  step = (kernel, model, train, config.optimizer.name, teacher and teacher.config)
  batch = (packs_documents(config), has_mask(config))
  return f"{devices}, {hashlib.sha256(repr((step, batch)).encode()).hexdigest()[:12]}"
