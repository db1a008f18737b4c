"""lm_eval requests per second: ours against lm_eval's hf backend with the same weights, in turn, in one process.

  python -m launch.benchmarks.harness --config=configs/gpt_small.py:builtin,gpt [--items=40] [--rounds=3]
      [--batch_size=16] [--kinds=choice,letters,five_shot,last_word,text] [--set=model.num_steps=4]

Weights have their initial values, in float32 on both sides, and are exported with `diffeq_nnx.export_hf`; a token is a
byte, and the vocabulary is the config's. `--batch_size` is that of the hf backend. Kinds of request:

  choice     `--items` questions of 100 to 180 tokens with four answers of 12 to 40: four requests an item
  letters    the questions with the letters A to D as answers; the hf backend, too, reads each question once
  five_shot  the same after five examples of such a question and its letter, common to all
  last_word  `--items` passages of 80 to 160 tokens, of which the last word is scored: nothing is shared
  text       a quarter of `--items` texts of 200 to 900 tokens, every token scored

Each side computes all requests of a kind once to warm up (ours compiles then), which is timed separately, and then once
in each round, in turn; reported are medians over rounds, and the largest difference of the log-likelihoods. The last
line is JSON.
"""

import functools
import json
import os
import statistics
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
import numpy as np

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.data.tokenizers import ByteTokenizer
from diffeq_nnx.harness.adapter import DiffEqLM
from launch import programs

WORDS = "river hill rain town stone bridge morning night people water road field house tree wind boat".split()


def requests_of(kind: str, items: int) -> list[Instance]:
  """Deterministic requests of one kind."""
  rng = np.random.default_rng(0)

  def text(least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS, most))[: int(rng.integers(least, most))].rstrip()

  if kind == "choice":
    questions = [text(100, 180) for _ in range(items)]
    pairs = [(question, f" {text(12, 40)} {n}") for question in questions for n in range(4)]
  elif kind in ("letters", "five_shot"):
    examples = "".join(f"{text(90, 120)} {letter}\n" for letter in "ABCDA") if kind == "five_shot" else ""
    questions = [examples + text(100, 180) for _ in range(items)]
    pairs = [(question, f" {letter}") for question in questions for letter in "ABCD"]
  elif kind == "last_word":
    pairs = [(text(80, 160), f" {rng.choice(WORDS)}") for _ in range(items)]
  else:
    return [Instance("loglikelihood_rolling", {}, (text(200, 900),), i) for i in range(max(items // 4, 1))]
  return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def measure(sides: dict, requests: list[Instance], rounds: int) -> dict[str, float]:
  """Requests per second of both sides, their ratio, and the largest difference of their log-likelihoods."""
  found: dict[str, np.ndarray] = {}

  def answer(name: str) -> None:
    results = getattr(sides[name], requests[0].request_type)(requests, disable_tqdm=True)
    found[name] = np.array([one[0] if isinstance(one, tuple) else one for one in results])

  calls = {name: functools.partial(answer, name) for name in sides}
  first, seconds = programs.time_rounds(calls, 1), programs.time_rounds(calls, rounds)
  rates = {name: len(requests) / statistics.median(some) for name, some in seconds.items()}
  ratios = (seconds["hf"] / seconds["ours"]).tolist()
  return {
    "requests": len(requests),
    "ours_per_second": round(float(rates["ours"]), 2),
    "hf_per_second": round(float(rates["hf"]), 2),
    "ratio": round(statistics.median(ratios), 2),
    "ratios": [round(one, 2) for one in ratios],
    "first_seconds_ours": round(float(first["ours"][0]), 2),
    "first_seconds_hf": round(float(first["hf"][0]), 2),
    "largest_difference": float(np.abs(found["ours"] - found["hf"]).max()),
  }


def main() -> None:
  """Exports the weights and measures each kind of request."""
  kinds = ["choice", "letters", "five_shot", "last_word", "text"]
  arguments = programs.make_parser(__doc__, config=str, items=40, rounds=3, batch_size=16, kinds=kinds).parse_args()
  config = config_lib.load(arguments.config, [*arguments.set, "model.dtype=float32", "model.dropout=0.0"])
  model = programs.init_model(config)
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "hf")
    exported = diffeq_nnx.export_hf(model, path, tokenizer=ByteTokenizer())
    sides = {
      "ours": DiffEqLM(model=model, tokenizer=ByteTokenizer(), batch_size=2),
      "hf": HFLM(
        pretrained=path,
        device="cpu",
        dtype="float32",
        batch_size=arguments.batch_size,
        trust_remote_code=exported["trust_remote_code"],
      ),
    }
    found = {}
    for kind in arguments.kinds:
      found[kind] = measure(sides, requests_of(kind, arguments.items), arguments.rounds)
      print(f"{kind}: {found[kind]}", flush=True)
  print(json.dumps({"config": arguments.config, "hf_batch_size": arguments.batch_size, **found}))


if __name__ == "__main__":
  main()
