"""Fine-tunes one run at several numbers of steps; prints validation perplexity before and after as a Markdown table.

  python -m launch.experiments.finetune_depths --config=configs/finetune_small.py --from_workdir=runs/english \\
      --workdir=runs/rfc --rows=full,lora --steps=3,4,6,8,12 [--set=train.steps=200]

A run with stored weights has one number of steps: give that as --steps. Finished runs are not repeated, so the same
command continues after an interruption.
"""

import argparse
import os

from diffeq_nnx import config as config_lib
from diffeq_nnx import jobs
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training.report import read_metrics


def perplexities(args: argparse.Namespace, row: str, num_steps: int) -> tuple[float, float]:
  """Validation perplexity at step 0 and at the last step."""
  config = config_lib.load(f"{args.config}{',' if ':' in args.config else ':'}{row}", args.set)
  workdir = os.path.join(args.workdir, f"{row}_{num_steps}")
  if workdir_lib.holds_run(workdir):
    known = workdir_lib.config_of(workdir)
    if (known.optimizer, known.train.steps, known.train.batch_size, known.seed) != (
      config.optimizer,
      config.train.steps,
      config.train.batch_size,
      config.seed,
    ):
      raise UserError(f"--workdir={args.workdir}: {row}_{num_steps} was trained with other settings; name another")
  jobs.run("finetune", config, workdir, from_workdir=args.from_workdir, num_steps=num_steps)
  recorded = read_metrics(workdir, "validation")
  if recorded[0]["step"] or recorded[-1]["step"] < config.train.steps:
    raise RunError(f"{workdir}: is not finished; run the same command to continue")
  return recorded[0]["perplexity"], recorded[-1]["perplexity"]


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", required=True)
  parser.add_argument("--from_workdir", required=True)
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=lambda text: text.split(","), default=["full", "lora"])
  parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",")], default=[3, 4, 6, 8, 12])
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  args = parser.parse_args(argv)
  found = {(row, count): perplexities(args, row, count) for count in args.steps for row in args.rows}
  lines = [f"| steps | before | {' | '.join(args.rows)} |", "| --- " * (2 + len(args.rows)) + "|"]
  for count in args.steps:
    after = " | ".join(f"{found[row, count][1]:.2f}" for row in args.rows)
    lines.append(f"| {count} | {found[args.rows[0], count][0]:.2f} | {after} |")
  print("\n".join(lines))


if __name__ == "__main__":
  try:
    main()
  except (RunError, UserError) as error:
    raise SystemExit(f"error: {error}") from None
