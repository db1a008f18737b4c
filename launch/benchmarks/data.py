"""Throughput of reading shards and of preparing text, and the memory of preparation.

  python -m launch.benchmarks.data reading      # tokens per second of training batches, from shards of random tokens
  python -m launch.benchmarks.data tokenizing   # --job=prepare against the tokenizer libraries alone, on one core
  python -m launch.benchmarks.data memory       # of all processes of --job=prepare, on a gigabyte of text

Rates are medians over interleaved rounds, with quartiles. `reading` uses the iterator of the train loop, in this
process; the shards are in the operating system's cache. `tokenizing` counts processor seconds: all work of the
preparation on one thread (reading JSON, tokenizing, writing) against the library's own calls
on the same documents, complete or by line. `memory` sums the proportional set sizes (PSS) of the processes. The text of
`tokenizing` and `memory` is the built-in one, repeated as needed to 5 and to 1000 MB. Linux only.
"""

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
SOURCE = "builtin"  # of the text
SHARDS, TOKENS = 16, 256_000_000  # that are read
BATCH_SIZE, SEQ_LEN = 64, 1024
ROUNDS = 5
SECONDS = 3.0  # of reading, in each round


def memory(pid: int) -> float:
  """Proportional set size (PSS) of a process and all its descendants, in MB."""
  total = 0.0
  with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
    total = next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1e3
  for path in glob.glob(f"/proc/{pid}/task/*/children"):
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
      total += sum(memory(int(child)) for child in file.read().split())
  return total


def write_text(path: str, megabytes: int) -> tuple[list[str], int]:
  """Writes documents repeatedly, as JSON lines; returns the documents, and the bytes of all repetitions."""
  texts, size, goal = [], 0, megabytes * 1e6
  for text in data.documents(SOURCE):
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


def reading(folder: str) -> None:
  """Tokens per second of training batches."""
  each = TOKENS // SHARDS
  paths = [os.path.join(folder, str(number)) for number in range(SHARDS)]
  for number, path in enumerate(paths):
    tokens = np.random.default_rng(number).integers(50_000, size=each, dtype=np.uint16)
    shards.write_shard(path, tokens)
  tokens = shards.Tokens(paths, [each] * SHARDS, np.uint16)
  train = data.Mixture((data.Split(tokens, num_bytes=4 * len(tokens), num_documents=1),))
  choices = {"attention across documents": None, "within documents": 0}
  rates: dict[str, list[float]] = {name: [] for name in choices}
  for _ in range(ROUNDS):
    for name, eos_id in choices.items():
      batches = data.train_batches(train, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, seed=0, eos_id=eos_id)
      batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
      next(batches)
      start, count = time.perf_counter(), 0
      while (seconds := time.perf_counter() - start) < SECONDS:
        next(batches)
        count += 1
      rates[name].append(count * BATCH_SIZE * SEQ_LEN / seconds / 1e6)
  print(f"reading {TOKENS:,} tokens of 2 bytes, {BATCH_SIZE} x {SEQ_LEN} a batch, million tokens/s")
  for name, values in rates.items():
    print(f"  {name:24}{programs.format_spread(values, '.2f')}")


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


def tokenizing(folder: str) -> None:
  """Megabytes of text per processor second, by preparation and by the libraries alone."""
  path = os.path.join(folder, "text.jsonl")
  texts, size = write_text(path, 5)
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
  for _ in range(ROUNDS):
    for key, run in runs.items():
      start = time.process_time()
      run()
      rates[key].append(size / 1e6 / (time.process_time() - start))
  print(f"tokenizing {size / 1e6:.1f} MB of {SOURCE}, vocabularies of {VOCABULARY:,}, MB a processor second")
  for (library, way), values in rates.items():
    print(f"  {library:15}{way:22}{programs.format_spread(values, '.2f')}")
    if way != "--job=prepare":
      ours = np.array(rates[library, "--job=prepare"]) / np.array(values)
      print(f"  {'':15}{'  --job=prepare to it':22}{programs.format_spread(ours, '.2f')}")


def memory_of_preparing(folder: str) -> None:
  """The peak of the sum of the memory of all processes of a preparation."""
  path = os.path.join(folder, "text.jsonl")
  _, size = write_text(path, 1000)
  words = f"-m diffeq_nnx.main --job=prepare --config=configs/tiny.py --config.model.vocab_size={VOCABULARY}".split()
  words += [f"--workdir={folder}/out", f"--config.data.source=jsonl:{path}"]
  words += ["--config.data.tokenizer=bytes", "--config.data.num_processes=2"]
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
  print(f"preparing {size / 1e6:,.0f} MB of {SOURCE}, tokenizer bytes, 2 processes")
  print(f"  exit code {process.returncode}, {seconds:.0f} s, {size / 1e6 / seconds:.2f} MB/s")
  print(f"  memory of all processes, MB       {most:6.0f}   at most")
  print(f"  of one that has only imported, MB {interpreter:6.0f}")


def main() -> None:
  """Reads the command line."""
  measure = {"reading": reading, "tokenizing": tokenizing, "memory": memory_of_preparing}
  parser = programs.make_parser(__doc__)
  parser.add_argument("what", choices=measure)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    measure[args.what](folder)


if __name__ == "__main__":
  programs.start(main)
