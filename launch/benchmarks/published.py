"""A published checkpoint in this package against transformers, in turn, in one process: generation and gradients.

  python -m diffeq_nnx.main --job=export --workdir=runs/smol --out=exported/smol
  python -m launch.benchmarks.published --workdir=runs/smol --folder=exported/smol [--rounds=5] [--sides=...]
      [--set=train.loss_chunks=16]

`--folder` holds the weights of the run's newest model for transformers. Both compute in float32 on the CPU.

  generate 1, 16   so many prompts of `--prompt_tokens` tokens, each continued by `--new_tokens`, greedily;
                   end marks don't end a text, and the weights of the run are prepared once, before
  gradients        loss and gradients of 4 sequences of 512 tokens, without the optimizer

The tokens are of the text that Python's documentation of its expressions is. Each side runs once to warm up (ours
compiles then) and then once in each round, in turn. Printed are medians of tokens/s over rounds, the median of the
rounds' ratios with quartiles, and what the sides agree on: rows with the same tokens, or both losses.
"""

import dataclasses
import functools
from pydoc_data import topics
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.inference.generation import make_decoder
from diffeq_nnx.model import grids
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.step import loss_and_gradients
from launch import programs
from launch.experiments import tables

SEQUENCES, LENGTH = 4, 512


class Ours:
  """The run of a work directory."""

  def __init__(self, workdir: str, settings: list[str]):
    run = Run.open(workdir)
    self.tokenizer = run.tokenizer
    lengths = [f"model.seq_len={LENGTH}", f"train.batch_size={SEQUENCES}", "model.dtype=float32", "train.remat=none"]
    config = config_lib.changed(run.config, [*lengths, *settings])
    self._params, self._decoder = run.params, make_decoder(run.model, None)
    grid = grids.make_grid(config.model)
    self._gradients = jax.jit(functools.partial(loss_and_gradients, config, grid))

  def generate(self, prompts: np.ndarray, new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt."""
    return diffeq_nnx.generate(self._decoder, prompts.tolist(), max_tokens=new_tokens, temperature=0)

  def loss(self, tokens: np.ndarray) -> float:
    """The loss, when its gradients are there too."""
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "rows": np.arange(len(tokens), dtype=np.int32)}
    return float(jax.block_until_ready(self._gradients(self._params, batch, jax.random.key(0)))[0])


class Theirs:
  """transformers."""

  def __init__(self, folder: str):
    self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  def generate(self, prompts: np.ndarray, new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt."""
    read = torch.tensor(prompts, dtype=torch.int64)
    options = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
      return self._model.generate(read, attention_mask=torch.ones_like(read), **options)[:, read.shape[1] :].tolist()

  def loss(self, tokens: np.ndarray) -> float:
    """The loss, when its gradients are there too."""
    self._model.zero_grad()
    read = torch.tensor(tokens, dtype=torch.int64)
    logits = self._model(read[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), read[:, 1:].flatten())
    loss.backward()
    return loss.item()


@dataclasses.dataclass
class Measured:
  """Seconds of each side by round, its last result, and the tokens of a run."""

  tokens: int
  seconds: dict[str, list[float]]
  results: dict[str, Any]


def measure(sides: dict[str, Any], method: str, arguments: tuple, tokens: int, rounds: int) -> Measured:
  """Runs each side once, and then in each round."""
  found = Measured(tokens, {name: [] for name in sides}, {})
  for round_number in range(rounds + 1):
    for name, side in sides.items():
      start = time.perf_counter()
      found.results[name] = getattr(side, method)(*arguments)
      if round_number:
        found.seconds[name].append(time.perf_counter() - start)
  return found


def format_row(name: str, found: Measured) -> list[str]:
  """The row of the table."""
  ours, theirs = found.seconds.values()
  a, b = found.results.values()
  speeds = [f"{found.tokens / statistics.median(seconds):,.1f}" for seconds in (ours, theirs)]
  if isinstance(a, float):
    agreement = f"losses {a:.5f}, {b:.5f}"
  else:
    agreement = f"{sum(one == other for one, other in zip(a, b))} of {len(a)} rows"
  return [name, *speeds, programs.format_spread(np.divide(theirs, ours), ".2f"), agreement]


def main(argv: list[str] | None = None) -> None:
  """Measures, prints."""
  parser = programs.make_parser(__doc__)
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--folder", required=True)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--prompts", type=programs.split(int), default=[1, 16])
  parser.add_argument("--prompt_tokens", type=int, default=16)
  parser.add_argument("--new_tokens", type=int, default=48)
  args = parser.parse_args(argv)
  ours = Ours(args.workdir, args.set)
  sides = {"ours": ours, "transformers": Theirs(args.folder)}
  text = " ".join(topics.topics[name] for name in sorted(topics.topics))
  ids = ours.tokenizer.encode(text[:40_000])
  rows = []
  for count in args.prompts:
    starts = np.arange(count)[:, None] * LENGTH // 4 + np.arange(args.prompt_tokens)
    new = count * args.new_tokens
    found = measure(sides, "generate", (ids[starts], args.new_tokens), new, args.rounds)
    rows.append(format_row(f"generate {count}", found))
  tokens = jnp.asarray(ids[: SEQUENCES * (LENGTH + 1)], jnp.int32).reshape(SEQUENCES, LENGTH + 1)
  found = measure(sides, "loss", (np.asarray(tokens),), SEQUENCES * LENGTH, args.rounds)
  rows.append(format_row("gradients", found))
  print(tables.markdown(["", "ours, tokens/s", "transformers, tokens/s", "ratio", "the same"], rows))


if __name__ == "__main__":
  programs.start(main)
