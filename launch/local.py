"""Runs a job of several processes on this machine's CPU, as a cluster would.

  python -m launch.local --processes 2 --devices-per-process 4 -- --config=configs/tiny.py --workdir=runs/two

Arguments after `--` are those of `python -m diffeq_nnx.main` in every process. SIGTERM and Ctrl-C are forwarded to all.
The exit code is 0 if every process exits with 0, else that of the first one that failed.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time


def commands(processes: int, port: int, arguments: list[str]) -> list[list[str]]:
  """The command line of each process."""
  words = [sys.executable, "-m", "diffeq_nnx.main", *arguments]
  words += [f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}"]
  return [[*words, f"--process_id={process}"] for process in range(processes)]


def environment(devices: int) -> dict[str, str]:
  """Variables that make each process use the CPU, as so many devices."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
  return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def free_port() -> int:
  """An unused port."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def run(lines: list[list[str]], variables: dict[str, str]) -> int:
  """Runs all command lines together and returns the first exit code that is not 0."""
  running = [subprocess.Popen(line, env={**os.environ, **variables}) for line in lines]

  def forward(number, frame):
    for process in running:
      if process.poll() is None:
        process.send_signal(signal.SIGTERM)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, forward)
  failed = 0
  while any(process.poll() is None for process in running):
    failed = failed or _first_failure(running)
    time.sleep(0.05)
  return failed or _first_failure(running)


def _first_failure(running: list[subprocess.Popen]) -> int:
  codes = [process.poll() for process in running]
  return next((code if code > 0 else 128 - code for code in codes if code), 0)  # 128 + the signal, as in shells


def main(argv: list[str] | None = None) -> int:
  """Starts the processes and waits for them."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--processes", type=int, default=2, help="how many; default: 2")
  parser.add_argument("--devices-per-process", type=int, default=1, help="devices that JAX sees; default: 1")
  parser.add_argument("--dry-run", action="store_true", help="only print the commands")
  parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of python -m diffeq_nnx.main")
  args = parser.parse_args(argv)
  for name in ("processes", "devices_per_process"):
    if getattr(args, name) < 1:
      parser.error(f"--{name.replace('_', '-')}: must be 1 or above")
  lines, variables = commands(args.processes, free_port(), args.arguments), environment(args.devices_per_process)
  if args.dry_run:
    for line in lines:
      print(" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(line))
    return 0
  return run(lines, variables)


if __name__ == "__main__":
  sys.exit(main())
