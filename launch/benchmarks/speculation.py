"""Self-speculation of an elastic run: drafted tokens that are kept, and speed against plain decoding.

  python -m launch.benchmarks.speculation --workdir=runs/elastic --prompts=prompts.jsonl [--num_steps=12] \
      [--draft_steps=2,3,4,6] [--draft_tokens=1,2,4] [--rows=1] [--max_tokens=64] [--temperature=0] [--rounds=5]

In each round all variants continue the same prompts, and plain decoding too. Speeds are tokens/s over those of plain
decoding, medians over rounds with quartiles. `--num_steps` is of plain decoding and of the verification; by default it
is the run's own. `--prompts` holds JSON lines with the key `prompt`. Kept is the mean number of drafted tokens that a
row keeps in a round of drafting.
"""

import dataclasses
import functools
import statistics

from diffeq_nnx.inference.batching import continue_prompts
from diffeq_nnx.inference.decoding import Decoder
from diffeq_nnx.inference.generation import encode_prompts
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.inference.speculation import speculate
from diffeq_nnx.jobs.prompt_files import parse_prompt, read_file, split_lines
from diffeq_nnx.runs.run import Run
from launch import programs
from launch.experiments import tables


def main(argv: list[str] | None = None) -> None:
  """Times, prints."""
  drafting = {"draft_steps": [2, 3, 4, 6], "draft_tokens": [1, 2, 4], "rows": 1, "max_tokens": 64, "temperature": 0.0}
  parser = programs.make_parser(__doc__, workdir=str, prompts=str, num_steps=0, **drafting, rounds=5)
  args = parser.parse_args(argv)
  run = Run.open(args.workdir)
  lines = split_lines(read_file(args.prompts)).values()
  prompts = encode_prompts(run.tokenizer, list(map(parse_prompt, lines)))
  options = GenerationOptions(max_tokens=args.max_tokens, temperature=args.temperature, rows=args.rows)
  decoder = Decoder(run.model, args.num_steps or None)
  drafts = {steps: Decoder(run.model, steps) for steps in args.draft_steps}
  variants = [None, *((steps, count) for steps in args.draft_steps for count in args.draft_tokens)]
  kept: dict[tuple[int, int], list[int]] = {}

  def decode(variant: tuple[int, int] | None) -> None:
    take = lambda n, token: None
    if variant is None:
      ends = continue_prompts(decoder, prompts, options, take)
    else:
      steps, count = variant
      note = kept.setdefault(variant, []).append
      drafted = dataclasses.replace(options, draft_tokens=count)
      ends = speculate(decoder, drafts[steps], prompts, drafted, take, on_round=note)
    for _ in ends:
      pass

  calls = {variant: functools.partial(decode, variant) for variant in variants}
  times = programs.time_rounds(calls, args.rounds)
  tokens = sum(decoder.limit_texts(prompts, args.max_tokens))
  print(
    f"{len(prompts)} prompts, {args.rows} at a time, {tokens} tokens at {decoder.grid.num_steps} steps, median of "
    f"{args.rounds} interleaved rounds, {programs.describe_device()}\n"
  )
  print(f"Plain decoding: {tokens / statistics.median(times[None]):,.1f} tokens/s.\n")
  rows = []
  for variant in variants[1:]:
    speed = programs.format_spread(times[None] / times[variant], ".2f")
    rows.append([*map(str, variant), f"{statistics.mean(kept[variant]):.2f}", speed])
  print(tables.markdown(["draft at steps", "drafted at a time", "kept", "speed over plain"], rows))


if __name__ == "__main__":
  programs.start(main)
