"""Throughput of reading shards and of preparing text, and the memory of both.

  python -m launch.benchmarks.data reading      # tokens per second of training batches, from shards of random tokens
  python -m launch.benchmarks.data tokenizing   # --job=prepare against the tokenizer libraries alone, on one core
  python -m launch.benchmarks.data memory       # of all processes of --job=prepare, on a gigabyte of text

Rates are medians over interleaved rounds, with quartiles. `reading` uses the iterator of the train loop, in this
process; the shards are in the operating system's cache. `tokenizing` counts processor seconds: all work of the
preparation on one thread (reading JSON, tokenizing, writing) against the library's own calls
on the same documents, complete or by line. `memory` sums the proportional set sizes (PSS) of the processes. The text of
`tokenizing` and `memory` is that of --source, repeated as needed to --megabytes (5, for `memory` 1000). Linux only.
"""

import argparse
from collections.abc import Callable
import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import grain
import numpy as np
import sentencepiece
import tokenizers as huggingface

from diffeq_nnx import config as config_lib
from diffeq_nnx import data
from diffeq_nnx.data import preparation, shards, tokenizers
from launch import programs

VOCABULARY = 16_384
SHARDS = 16


def memory(pid: int) -> float:
  """Proportional set size (PSS) of a process and all its descendants, in MB."""
  total = 0.0
  with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
    total = next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1e3
  for path in glob.glob(f"/proc/{pid}/task/*/children"):
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
      total += sum(memory(int(child)) for child in file.read().split())
  return total


def write_text(path: str, source: str, megabytes: float) -> tuple[list[str], int]:
  """Writes documents of a source repeatedly, as JSON lines; returns the documents, and the bytes of all repetitions."""
  texts, size, goal = [], 0, megabytes * 1e6
  for text in data.documents(source):
    texts.append(text)
    size += len(text.encode())
    if size >= goal:
      break
  written = 0
  with open(path, "w", encoding="utf-8") as file:
    while written < goal:
      for text in texts:
        file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
      written += size
  return texts, written


def reading(args: argparse.Namespace, folder: str) -> None:
  """Tokens per second of training batches."""
  each = args.tokens // SHARDS
  paths = [os.path.join(folder, str(number)) for number in range(SHARDS)]
  for number, path in enumerate(paths):
    tokens = np.random.default_rng(number).integers(50_000, size=each, dtype=np.uint16)
    shards.write_shard(path, tokens)
  tokens = shards.Tokens(paths, [each] * SHARDS, np.uint16)
  train = data.Mixture((data.Split(tokens, num_bytes=4 * len(tokens), num_documents=1),))
  choices = {"attention across documents": None, "within documents": 0}
  rates: dict[str, list[float]] = {name: [] for name in choices}
  before, most = memory(os.getpid()), 0.0
  for _ in range(args.rounds):
    for name, eos_id in choices.items():
      batches = data.train_batches(train, seq_len=args.seq_len, batch_size=args.batch_size, seed=0, eos_id=eos_id)
      batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
      next(batches)
      start, count = time.perf_counter(), 0
      while (seconds := time.perf_counter() - start) < args.seconds:
        next(batches)
        count += 1
      rates[name].append(count * args.batch_size * args.seq_len / seconds / 1e6)
      most = max(most, memory(os.getpid()))
  print(f"reading {args.tokens:,} tokens of 2 bytes, {args.batch_size} x {args.seq_len} a batch, million tokens/s")
  for name, values in rates.items():
    print(f"  {name:24}{programs.format_spread(values, '.2f')}")
  print(f"  memory, MB              {most - before:8.0f}   more than before the first batch")


def library_tokenizers(texts: list[str], folder: str) -> dict[str, tuple[str, dict[str, Callable]]]:
  """Trains one tokenizer of each library; returns its file, and the library's own calls to encode the texts."""
  path = os.path.join(folder, "sentencepiece.model")
  with open(path, "wb") as file:
    file.write(tokenizers.train(texts, VOCABULARY))
  pieces = sentencepiece.SentencePieceProcessor(path)
  pairs = huggingface.Tokenizer(huggingface.models.BPE())
  pairs.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
  settings = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
  alphabet = huggingface.pre_tokenizers.ByteLevel.alphabet()
  trainer = huggingface.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, **settings)
  pairs.train_from_iterator(texts, trainer)
  pairs_path = os.path.join(folder, "tokenizer.json")
  pairs.save(pairs_path)
  lines = [line for text in texts for line in text.split("\n") if line]

  def in_batches(encode: Callable, items: list[str], size: int) -> None:
    for start in range(0, len(items), size):
      encode(items[start : start + size])

  encode_pieces = lambda batch: pieces.encode(batch, out_type=int, num_threads=1)
  encode_pairs = lambda batch: pairs.encode_batch_fast(batch, add_special_tokens=False)
  by_document = lambda encode: {"alone, by document": lambda: in_batches(encode, texts, 100)}
  by_line = {"alone, by line": lambda: in_batches(encode_pieces, lines, 5000)}
  return {
    "sentencepiece": (path, by_document(encode_pieces) | by_line),
    "byte pairs": (pairs_path, by_document(encode_pairs)),
  }


def tokenizing(args: argparse.Namespace, folder: str) -> None:
  """Megabytes of text per processor second, by preparation and by the libraries alone."""
  path = os.path.join(folder, "text.jsonl")
  texts, size = write_text(path, args.source, args.megabytes)
  texts = texts * (size // sum(len(text.encode()) for text in texts))

  def prepare(tokenizer: str) -> None:
    out = os.path.join(folder, "out")
    config = config_lib.DataConfig(source=f"jsonl:{path}", tokenizer=tokenizer, num_processes=1)
    preparation.prepare(out, preparation.make_recipe(config, VOCABULARY, 0))
    shutil.rmtree(out)

  runs = {}
  for library, (name, ways) in library_tokenizers(texts, folder).items():
    runs |= {(library, way): run for way, run in ways.items()}
    runs[library, "--job=prepare"] = lambda name=name: prepare(name)
  rates: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
  for _ in range(args.rounds):
    for key, run in runs.items():
      start = time.process_time()
      run()
      rates[key].append(size / 1e6 / (time.process_time() - start))
  print(f"tokenizing {size / 1e6:.1f} MB of {args.source}, vocabularies of {VOCABULARY:,}, MB a processor second")
  for (library, way), values in rates.items():
    print(f"  {library:15}{way:22}{programs.format_spread(values, '.2f')}")
    if way != "--job=prepare":
      ours = np.array(rates[library, "--job=prepare"]) / np.array(values)
      print(f"  {'':15}{'  --job=prepare to it':22}{programs.format_spread(ours, '.2f')}")


def memory_of_preparing(args: argparse.Namespace, folder: str) -> None:
  """The peak of the sum of the memory of all processes of a preparation."""
  path = os.path.join(folder, "text.jsonl")
  _, size = write_text(path, args.source, args.megabytes)
  words = f"-m diffeq_nnx.main --job=prepare --config=configs/tiny.py --config.model.vocab_size={VOCABULARY}".split()
  settings = {"source": f"jsonl:{path}", "tokenizer": args.tokenizer, "num_processes": args.processes}
  words += [f"--workdir={folder}/out", *(f"--config.data.{key}={value}" for key, value in settings.items())]
  idle = subprocess.Popen([sys.executable, "-c", "import diffeq_nnx.main, diffeq_nnx.jobs, time; time.sleep(60)"])
  time.sleep(15)
  interpreter = memory(idle.pid)
  idle.kill()
  idle.wait()
  start, most = time.perf_counter(), 0.0
  process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
  while process.poll() is None:
    most = max(most, memory(process.pid))
    time.sleep(0.1)
  seconds = time.perf_counter() - start
  print(f"preparing {size / 1e6:,.0f} MB of {args.source}, tokenizer {args.tokenizer}, {args.processes} processes")
  print(f"  exit code {process.returncode}, {seconds:.0f} s, {size / 1e6 / seconds:.2f} MB/s")
  print(f"  memory of all processes, MB       {most:6.0f}   at most")
  print(f"  of one that has only imported, MB {interpreter:6.0f}")


def main() -> None:
  """Reads the command line."""
  of_reading = {"seq_len": 1024, "batch_size": 64, "tokens": 256_000_000, "seconds": 3.0}
  of_text = {"source": "builtin", "megabytes": 0.0, "processes": 2, "tokenizer": "bytes"}
  parser = programs.make_parser(__doc__, rounds=5, **of_reading, **of_text)
  parser.add_argument("what", choices=["reading", "tokenizing", "memory"])
  args = parser.parse_args()
  args.megabytes = args.megabytes or (1000 if args.what == "memory" else 5)
  with tempfile.TemporaryDirectory() as folder:
    {"reading": reading, "tokenizing": tokenizing, "memory": memory_of_preparing}[args.what](args, folder)


if __name__ == "__main__":
  programs.start(main)
