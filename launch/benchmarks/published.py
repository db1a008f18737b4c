"""A published checkpoint in this package against transformers, in turn: generation and gradients.

  python -m diffeq_nnx.main --job=export --workdir=runs/smol --out=exported/smol
  python -m launch.benchmarks.published --workdir=runs/smol --folder=exported/smol [--rounds=5]
      [--set=train.loss_chunks=16] [--gguf=FILE]

`--folder` holds the weights of the run's newest model for transformers. Both compute in float32 on the CPU. `--gguf` is
the file that the run came from: llama.cpp (llama-cpp-python, which must be installed) then generates beside them, with
the weights as they are stored there.

  generate 1, 16   so many prompts of `--prompt_tokens` tokens, each continued by `--new_tokens`, greedily; end marks
                   don't end a text, and the weights of the run are prepared once, before (--prompts=0: not measured)
  gradients        loss and gradients of 4 sequences of 512 tokens, without the optimizer

The tokens are of the documentation that comes with Python. Each side has a process of its own, which runs once to
warm up (ours compiles then) and then in each round, while the other waits. In a round a side runs twice, and the
second time counts, as in training, where steps follow each other: memory that a process gave back before it waited
may be slow to get again, as in virtual machines whose host takes it. Printed are medians of tokens/s over rounds, the
median of the rounds' ratios with quartiles, and what the sides agree on: rows with the same tokens, or both losses.
"""

from concurrent.futures import ProcessPoolExecutor
import dataclasses
import functools
import logging
import multiprocessing
import os
from pydoc_data import topics
import time
from typing import Any

import jax
import numpy as np
import torch
import transformers

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.generation import make_decoder
from diffeq_nnx.model import grids
from diffeq_nnx.model.parameters import build
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.step import loss_and_gradients
from launch import programs
from launch.experiments import tables

SEQUENCES, LENGTH = 4, 512
MOST_ROWS = 16  # that llama.cpp has room for


class Ours:
  """The run of a work directory."""

  def __init__(self, workdir: str, settings: list[str]):
    run = Run.open(workdir)
    lengths = [f"model.seq_len={LENGTH}", f"train.batch_size={SEQUENCES}", "model.dtype=float32", "train.remat=none"]
    config = config_lib.apply_settings(run.config, [*lengths, *settings])
    exact = dataclasses.replace(run.config.model, dtype="float32")
    self._params, self._decoder = run.params, make_decoder(build(exact, run.params), None)
    grid = grids.make_grid(config.model)
    self._gradients = jax.jit(functools.partial(loss_and_gradients, config, grid))

  def generate(self, prompts: np.ndarray, new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt."""
    return diffeq_nnx.generate(self._decoder, prompts.tolist(), max_tokens=new_tokens, temperature=0)

  def loss(self, tokens: np.ndarray) -> float:
    """The loss, when its gradients are there too."""
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "rows": np.arange(len(tokens), dtype=np.int32)}
    return float(jax.block_until_ready(self._gradients(self._params, batch, jax.random.key(0)))[0]["loss"])


class LlamaCpp:
  """llama.cpp, with as many threads as this process may use."""

  def __init__(self, path: str):
    import llama_cpp  # only where it is asked for

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    self._module = llama_cpp
    options = llama_cpp.llama_context_default_params()
    options.n_seq_max = options.n_ctx = MOST_ROWS
    options.n_ctx *= LENGTH
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    self._context = llama_cpp.llama_init_from_model(model, options)
    self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

  def generate(self, prompts: np.ndarray, new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt, which are read and continued together."""
    module, context, count = self._module, self._context, len(prompts)
    module.llama_memory_clear(module.llama_get_memory(context), True)
    batch = module.llama_batch_init(prompts.size, 0, 1)
    texts: list[list[int]] = [[] for _ in prompts]
    read, start = prompts.T, 0  # [position, prompt]
    while len(texts[0]) < new_tokens:
      batch.n_tokens = read.size
      for i, token in enumerate(read.flat):
        batch.token[i], batch.pos[i] = int(token), start + i // count
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, i % count
        batch.logits[i] = i >= read.size - count
      assert module.llama_decode(context, batch) == 0
      logits = [module.llama_get_logits_ith(context, i - count) for i in range(count)]
      start += len(read)
      read = np.array([[np.ctypeslib.as_array(row, (self._vocabulary,)).argmax() for row in logits]])
      for text, token in zip(texts, read[0]):
        text.append(int(token))
    module.llama_batch_free(batch)
    return texts


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


def start_side(kind: type, *arguments: Any) -> None:
  """Initializes the process of a side."""
  global side
  side = kind(*arguments)


def call_side(method: str, arguments: tuple[Any, ...]) -> tuple[Any, float]:
  """What a method of the side of this process returns, and the seconds of its second call."""
  getattr(side, method)(*arguments)
  start = time.perf_counter()
  return getattr(side, method)(*arguments), time.perf_counter() - start


def describe_agreement(ours: Any, theirs: Any) -> str:
  """What the sides agree on."""
  if isinstance(ours, float):
    return f"losses {ours:.5f}, {theirs:.5f}"
  return f"{sum(one == other for one, other in zip(ours, theirs))} of {len(ours)} rows"


def main(argv: list[str] | None = None) -> None:
  """Measures, prints."""
  lengths = {"prompts": [1, 16], "prompt_tokens": 16, "new_tokens": 48}
  parser = programs.make_parser(__doc__, workdir=str, folder=str, rounds=5, gguf=None, **lengths)
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  args = parser.parse_args(argv)
  named = {"ours": (Ours, args.workdir, args.set), "transformers": (Theirs, args.folder)}
  if args.gguf:
    if max(args.prompts) > MOST_ROWS:
      raise UserError(f"--prompts={max(args.prompts)}: with --gguf at most {MOST_ROWS}")
    named["llama.cpp"] = (LlamaCpp, args.gguf)
  processes = multiprocessing.get_context("spawn")
  sides = [ProcessPoolExecutor(1, processes, start_side, arguments) for arguments in named.values()]
  text = " ".join(topics.topics[name] for name in sorted(topics.topics))
  ids = Run.open(args.workdir).tokenizer.encode(text[:40_000])
  kinds = []
  for count in filter(None, args.prompts):
    starts = np.arange(count)[:, None] * LENGTH // 4 + np.arange(args.prompt_tokens)
    kinds.append((f"generate {count}", "generate", (ids[starts], args.new_tokens), count * args.new_tokens))
  tokens = ids[: SEQUENCES * (LENGTH + 1)].astype(np.int32).reshape(SEQUENCES, LENGTH + 1)
  kinds.append(("gradients", "loss", (tokens,), SEQUENCES * LENGTH))
  rows = []
  for name, method, arguments, count in kinds:
    able = sides[:2] if method == "loss" else sides  # llama.cpp has no gradients
    calls = [functools.partial(one.submit, call_side, method, arguments) for one in able]
    (ours, _), (theirs, _), *_ = [call().result() for call in calls]  # the first calls compile
    seconds = np.array([[call().result()[1] for call in calls] for _ in range(args.rounds)])
    speeds = [f"{count / one:,.1f}" for one in np.median(seconds, axis=0)] + [""] * (len(sides) - len(able))
    ratios = programs.format_spread(seconds[:, 1] / seconds[:, 0], ".2f")
    rows.append([name, *speeds, ratios, describe_agreement(ours, theirs)])
  for one in sides:
    one.shutdown()
  print(f"median of {args.rounds} interleaved rounds, {programs.describe_device()}, torch {torch.__version__}\n")
  print(tables.markdown(["", *(f"{name}, tokens/s" for name in named), "ratio", "the same"], rows))


if __name__ == "__main__":
  programs.start(main)
