"""lm_eval requests per second: ours against lm_eval's hf backend with the same weights, in turn, in one process.

  python -m launch.benchmarks.harness --config=configs/gpt_small.py:builtin,gpt [--items=40] [--rounds=3]
      [--batch_size=16] [--kinds=choice,letters,five_shot,last_word,text] [--set=model.num_steps=4]

Weights have their initial values, in float32 on both sides, and are exported with `diffeq_nnx.export_hf`; a token is a
byte, and the vocabulary is the config's. Kinds of request:

  choice     `--items` questions of 100 to 180 tokens with four answers of 12 to 40: four requests an item
  letters    the questions with the letters A to D as answers; the hf backend, too, reads each question once
  five_shot  the same after five examples of such a question and its letter, common to all
  last_word  `--items` passages of 80 to 160 tokens, of which the last word is scored: nothing is shared
  text       a quarter of `--items` texts of 200 to 900 tokens, every token scored

Each side computes all requests of a kind once to warm up (ours compiles then), which is timed separately, and then once
in each round, in turn; reported are medians over rounds, and the largest difference of the log-likelihoods. The last
line is JSON.
"""

import json
import os
import statistics
import tempfile
import time

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


def answers(lm, requests: list[Instance]) -> tuple[np.ndarray, float]:
  """Log-likelihoods and seconds."""
  start = time.perf_counter()
  results = getattr(lm, requests[0].request_type)(requests, disable_tqdm=True)
  return np.array([one[0] if isinstance(one, tuple) else one for one in results]), time.perf_counter() - start


def measure(sides: dict, requests: list[Instance], rounds: int) -> dict[str, float]:
  """Requests per second of both sides, their ratio, and the largest difference of their log-likelihoods."""
  first = {name: answers(lm, requests) for name, lm in sides.items()}
  seconds = {name: [] for name in sides}
  for _ in range(rounds):
    for name, lm in sides.items():
      seconds[name].append(answers(lm, requests)[1])
  rates = {name: len(requests) / statistics.median(some) for name, some in seconds.items()}
  ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["hf"])]
  return {
    "requests": len(requests),
    "ours_per_second": round(rates["ours"], 2),
    "hf_per_second": round(rates["hf"], 2),
    "ratio": round(statistics.median(ratios), 2),
    "ratios": [round(one, 2) for one in ratios],
    "first_seconds_ours": round(first["ours"][1], 2),
    "first_seconds_hf": round(first["hf"][1], 2),
    "largest_difference": float(np.abs(first["ours"][0] - first["hf"][0]).max()),
  }


def main() -> None:
  """Exports the weights and measures each kind of request."""
  parser = programs.make_parser(__doc__)
  parser.add_argument("--config", required=True)
  parser.add_argument("--items", type=int, default=40)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--batch_size", type=int, default=16, help="of the hf backend")
  parser.add_argument("--kinds", default="choice,letters,five_shot,last_word,text")
  arguments = parser.parse_args()
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
    for kind in arguments.kinds.split(","):
      found[kind] = measure(sides, requests_of(kind, arguments.items), arguments.rounds)
      print(f"{kind}: {found[kind]}", flush=True)
  print(json.dumps({"config": arguments.config, "hf_batch_size": arguments.batch_size, **found}))


if __name__ == "__main__":
  main()
