"""One job of several processes: joining, checking that all run the same, stopping together.

Every process runs the same command. `jax.distributed` joins them, and notifies the others when one dies.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import errno
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from flax import traverse_util
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint

from diffeq_nnx import config as config_lib
from diffeq_nnx.config import Config
from diffeq_nnx.errors import RunError, UserError, first_line

HEARTBEAT_SECONDS = 60  # a process without a heartbeat for so long counts as dead
WAIT_SECONDS = 7 * 24 * 3600  # for a process that is alive and busy
LEAVE_SECONDS = 60  # for all processes to end after the first
ALIKE_SECONDS = 10  # for all processes to meet the same error
# words in what JAX raises when another process has died, which has no type of its own
_DEATH_WORDS = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED", "Connection", "Socket", "heartbeat")

_joined = False  # whether `start` has found other processes
_shell: subprocess.Popen[bytes] | None = None  # of `_explain_a_sudden_end`


def start(coordinator: str | None, num_processes: int | None, process_id: int | None, join_seconds: int) -> None:
  """Joins the job's processes.

  JAX detects them on TPU pods, Slurm (of several tasks) and Open MPI; elsewhere the first three arguments name them:
  HOST:PORT of process 0, how many there are (1 alone turns detection off), and which one this is, from 0. Without them,
  and outside such a cluster, there is a single process. Where not all have joined after `join_seconds`, the process
  exits with code 1. Call it before anything that touches a device.

  Raises:
    UserError: some of the three arguments without the others, or arguments that don't fit.
    RunError: the processes could not be joined.
  """
  global _joined
  given = (coordinator, num_processes, process_id)
  # of one task JAX would use one GPU; an interactive step of Slurm has the number of its allocation in SLURM_NTASKS
  slurm_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS"))
  by_slurm = slurm_tasks == "1" and "OMPI_COMM_WORLD_SIZE" not in os.environ  # mpirun starts its own tasks of Slurm
  if given == (None, 1, None) or given == (None, None, None) and by_slurm:
    return
  if given != (None, None, None):
    _check_given(*given)
    if process_id == 0:
      _check_free(str(coordinator))
  # JAX's own limit aborts the process with a stack dump. No row of launch/faults.py starts too few processes, but
  # tests/test_distributed.py does.
  timer = threading.Timer(join_seconds, _end_unjoined, [join_seconds])
  timer.daemon = True
  timer.start()
  try:
    with _hidden_variables():
      jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method="deactivate" if coordinator else None,
        initialization_timeout=2 * join_seconds,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=LEAVE_SECONDS,
      )
  except ValueError as error:
    if coordinator is None and "coordinator_address" in str(error):
      if (size := os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) != "1":
        raise UserError(
          f"mpirun started {size} processes, which JAX can't join; give --coordinator, --num_processes and --process_id"
        ) from error
      return  # no cluster: one process
    raise UserError(f"--coordinator={coordinator}: {error}") from error
  except Exception as error:  # also of packages of the cluster, of which the services can't be reached
    raise RunError(
      f"the processes could not be joined ({first_line(error)}); start the same "
      "command on every host, or give --num_processes=1 for a single process"
    ) from error
  finally:
    timer.cancel()
  counts = collections.Counter(device.process_index for device in jax.devices())
  if len(set(counts.values())) > 1 or len(counts) < jax.process_count():
    found = ", ".join(str(counts[process]) for process in range(jax.process_count()))
    raise UserError(f"the processes have different numbers of devices ({found}); give each the same")
  if not jax.config.values["jax_enable_preemption_service"]:
    raise UserError("JAX_ENABLE_PREEMPTION_SERVICE=0: joined processes ask that service for SIGTERM; unset it")
  _joined = True
  _keep_stdout_for_results()
  _explain_a_sudden_end()


@contextlib.contextmanager
def _hidden_variables() -> Iterator[None]:
  """A context without the variables that keep processes from being joined.

  Through a proxy they would not reach each other. A pod of Kubernetes is no cluster of its own, unless it is of a Job.
  """
  names = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")]
  names += ["KUBERNETES_SERVICE_HOST"] if "JOB_COMPLETION_INDEX" not in os.environ else []
  kept = {name: os.environ.pop(name) for name in names if name in os.environ}
  try:
    yield
  finally:
    os.environ |= kept


def _check_given(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
  if coordinator is None or num_processes is None or process_id is None:
    raise UserError(
      "--coordinator, --num_processes, --process_id: give all three; or none of them, on a TPU pod, "
      "under Slurm, or for a single process"
    )
  if not 0 <= process_id < num_processes:
    raise UserError(f"--process_id={process_id}: must lie between 0 and --num_processes={num_processes}, excluded")
  if not coordinator.rpartition(":")[2].isdigit():
    raise UserError(f"--coordinator={coordinator}: must be HOST:PORT, e.g. 10.0.0.2:8476")


def _check_free(coordinator: str) -> None:
  """Raises RunError where another program listens at the port of process 0.

  JAX would share the port with another job, which then takes these processes for its own and aborts.
  """
  port = int(coordinator.rpartition(":")[2])
  with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a job that has just ended is none
    try:
      listener.bind(("", port))
    except OverflowError:
      return  # JAX says that there is no such port
    except OSError as error:
      if error.errno == errno.EADDRINUSE:
        raise RunError(
          f"--coordinator={coordinator}: another program uses port {port} of this host; wait for its end, or choose "
          "another port"
        ) from error


def _keep_stdout_for_results() -> None:
  """Sends to stderr what libraries write on descriptor 1, where Gloo tells of each connection between CPUs."""
  if sys.stdout is None:  # it is closed
    return
  sys.stdout.flush()
  results = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
  os.dup2(2, 1)
  sys.stdout = results


def _explain_a_sudden_end() -> None:
  """Has a shell print one line when this process is killed or aborted.

  JAX aborts it, with a stack dump, when another process or the connection to it is lost. The rows "each of N processes
  is killed" of launch/faults.py fail without this, since their last lines must say what to do.
  """
  global _shell
  line = (
    "error: this process ended before its work did, killed from outside or since another process was lost (the lines "
    "above say which); run the same command on every host to continue from the newest checkpoint"
  )
  command = ["sh", "-c", 'read -r _ || printf "%s\\n" "$0" >&2', line]
  _shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def finish() -> None:
  """Ends what `start` began; call it when the work is done, or an error was reported."""
  if _shell is not None:
    _shell.communicate(b"\n")


def _end_unjoined(seconds: int) -> None:
  print(
    f"error: not all processes joined within {seconds} s; start the same command on every host, look at the logs "
    "of the missing ones, or raise --join_seconds; a single process takes --num_processes=1",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def whoami() -> tuple[int, int]:
  """Returns the number of this process and how many there are, which is (0, 1) before the processes have joined."""
  return (jax.process_index(), jax.process_count()) if _joined else (0, 1)


def is_main_process() -> bool:
  """Whether this is process 0, which prints and writes."""
  return whoami()[0] == 0


def exchange(value: Any, wait_seconds: int = WAIT_SECONDS, key: str = "exchange") -> list[Any]:
  """Returns the values of all processes, in JSON's types. All must call it and wait up to `wait_seconds` for the last.

  They wait at a barrier, which notices a death but tolerates an hour of tokenizing, and only then enter a
  collective, which would time out earlier. Calls with different keys don't meet.
  """
  if whoami()[1] == 1:
    return [value]
  orbax.checkpoint.multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * wait_seconds)
  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(len(data))).reshape(-1)
  rows = multihost_utils.process_allgather(np.pad(data, (0, sizes.max() - len(data))))
  return [json.loads(bytes(np.asarray(row[:size], np.uint8))) for row, size in zip(rows, sizes)]


@contextlib.contextmanager
def sync_errors() -> Iterator[None]:
  """Runs the body on every process and waits for all. An error in one process ends all with the same line.

  Raises:
    UserError or RunError: the body raised it, here or elsewhere. The line names the process if not all agree. Other
      exceptions are raised unchanged where they arose, and as a RunError elsewhere.
  """
  error = None
  try:
    yield
  except Exception as found:
    error = found
  if whoami()[1] == 1:
    if error is not None:
      raise error
    return
  one_line = isinstance(error, (UserError, RunError))
  line = str(error) if one_line else f"{type(error).__name__}: {error}"
  reports = exchange(error and [isinstance(error, UserError), line])
  if error is not None and not one_line:
    raise error
  first = next((process for process, one in enumerate(reports) if one), None)
  if first is not None:
    is_user_error, line = reports[first]
    kind = UserError if is_user_error else RunError
    raise kind(line if reports.count(reports[first]) == len(reports) else f"process {first}: {line}") from error


def on_main_process(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in process 0 alone, and returns its result in all processes, in JSON's types.

  Raises:
    UserError or RunError: as `sync_errors` does.
  """
  with sync_errors():
    result = function(*args) if is_main_process() else None
  return exchange(result)[0]


def all_end_with(error: BaseException) -> bool:
  """Whether all processes end with this error's line, so that one of them reports it.

  A process waits for the others no longer than `ALIKE_SECONDS`, since it may be alone with its error.
  """
  if whoami()[1] == 1:
    return True
  if error.__cause__ is not None and is_process_death(error.__cause__):
    return False
  try:
    return len(set(exchange(str(error), ALIKE_SECONDS, "all_end_with"))) == 1
  except Exception:
    return False


def agree(config: Config, job: str, workdir: str, options: dict[str, Any]) -> None:
  """Raises UserError unless all processes run the same job from the same code.

  The line names the differences, and the process that differs from process 0.
  """
  facts = {
    "--job": job,
    "--workdir": workdir,
    "the code": hash_code(),
    "jax": jax.__version__,
    **{f"--{name}": value for name, value in options.items()},
    **traverse_util.flatten_dict(config_lib.to_dict(config), sep="."),
  }
  del facts["data.tokenizer"]  # which a moved run names by a path of this machine; `load_corpus` compares tokenizers
  reports = exchange(facts)
  for process, theirs in enumerate(reports):
    differing = [
      f"{key} is {theirs.get(key)!r} there and {reports[0].get(key)!r} in process 0"
      for key in {**reports[0], **theirs}
      if repr(theirs.get(key)) != repr(reports[0].get(key))  # nan is itself
    ]
    if differing:
      raise UserError(
        f"process {process} runs something else: {'; '.join(differing)}; start the same command, from "
        "the same code, on every host"
      )


def require_same(value: Any, what: str) -> None:
  """Raises UserError unless all processes have the same value, which `what` names in the plural; all must call it."""
  if whoami()[1] > 1 and len(set(exchange(hashlib.sha256(repr(value).encode()).hexdigest()))) > 1:
    raise UserError(f"{what} differ between processes; give all hosts the same files")


def hash_code() -> str:
  """Computes a hash of the package's source files."""
  folder = pathlib.Path(__file__).parents[1]
  digest = hashlib.sha256()
  for path in sorted({*folder.rglob("*.py"), *(folder / "kernels").rglob("*.py")}):  # kernels may be a link
    digest.update(path.name.encode() + path.read_bytes())
  return digest.hexdigest()[:12]


class Preemption:
  """Whether the job was asked to end, by SIGTERM to any of its processes.

  It is a context, outside of which SIGTERM ends a single process immediately. In a job of several processes, or of one
  in a cluster that was detected, the handler of jax.distributed notes the signal at any time, and the first call of
  `reached` answers it.
  """

  def __init__(self) -> None:
    self._asked, self._calls = False, 0
    self._before: Any = None  # the handler to restore

  def __enter__(self) -> "Preemption":
    if not _joined and threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGTERM, self._ask)
    return self

  def __exit__(self, *unused: Any) -> None:
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)

  def _ask(self, *unused: Any) -> None:
    self._asked = True

  def reached(self) -> bool:
    """Whether to stop here. All processes, which must call it at the same places and often, get the same answer."""
    self._calls += 1
    return multihost_utils.reached_preemption_sync_point(self._calls) if _joined else self._asked


def is_process_death(error: BaseException) -> bool:
  """Whether this is what a collective or barrier raises when another process has died."""
  return (
    jax.process_count() > 1
    and isinstance(error, (jax.errors.JaxRuntimeError, ValueError))
    and any(sign in str(error) for sign in _DEATH_WORDS)
  )


@contextlib.contextmanager
def shorten_errors() -> Iterator[None]:
  """Raises, as a RunError of one line, what JAX raises when another process has died or memory runs out."""
  try:
    yield
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    if "RESOURCE_EXHAUSTED" in str(error):
      raise RunError(
        f"out of memory on a device ({first_line(error, 300)}); lower train.device_batch_size (in training), "
        "eval.batch_size, --rows (generate) or harness.batch_size, or take more devices (launch/compile_ahead.py "
        "reports ahead of time what fits)"
      ) from error
    if isinstance(error, UserError) or not is_process_death(error):
      raise
    raise RunError(
      f"another process of the job has died ({first_line(error, 300)}); its log says why; run the same "
      "command on every host to continue from the newest checkpoint"
    ) from error
