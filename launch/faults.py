"""Breaks small runs in every way that it knows, and counts what they survive; docs/evidence/reliability.md.

  python -m launch.faults --workdir=/tmp/faults [--kinds=kill,term,several,damage,disk,refuse,configs,
      trained_configs,run_files,records,tokenizers] [--tries=20] [--seed=0]

Prints a Markdown table. A run survives a fault if, started again, it ends with the losses of the run without faults,
bit for bit. Bad input is survived if it is used as it was, or rejected with one line. Details of what is not survived
are printed on stderr. A kind that this machine can't try (cutting off a process needs root and iptables, a full disk
user namespaces) is named there too.
"""

import signal
import subprocess
import sys

from diffeq_nnx.errors import UserError
from launch import programs
from launch.breaking import inputs, processes, storage
from launch.breaking.table import HEADER, Suite

KINDS = {
  "kill": lambda suite: processes.send_signals(suite, signal.SIGKILL),
  "term": lambda suite: processes.send_signals(suite, signal.SIGTERM),
  "several": processes.several,
  "damage": storage.damage,
  "disk": storage.disk,
  "refuse": storage.refuse,
  "configs": inputs.configs,
  "trained_configs": inputs.trained_configs,
  "run_files": inputs.run_files,
  "records": inputs.records,
  "tokenizers": inputs.tokenizers,
}


def main(argv: list[str] | None = None) -> None:
  """Prints each row when it is known."""
  args = programs.make_parser(__doc__, workdir=str, kinds=list(KINDS), tries=20, seed=0).parse_args(argv)
  unknown = set(args.kinds) - set(KINDS)
  if unknown:
    raise UserError(f"--kinds={','.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
  suite = Suite(args.workdir, args.tries, args.seed)
  print(HEADER, flush=True)
  for kind in args.kinds:
    try:
      for row in KINDS[kind](suite):
        print(row, flush=True)
    except (OSError, subprocess.CalledProcessError) as error:
      print(f"--kinds={kind}: not tried to its end: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
  programs.start(main)
