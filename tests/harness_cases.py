"""Models, requests and tasks that the tests of downstream evaluation share."""

import functools
import json
import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax
import numpy as np
import pytest

from diffeq_nnx.harness.packing import Request
from tests.conftest import moved_instance, small_model
from tests.test_data import write_jsonl

QUESTIONS = 20
WORDS = "river hill rain town stone bridge morning night people water road field house tree wind boat light".split()
CHOICES, GREEDY = {"doc_to_choice": "choices"}, {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
TASKS = {  # the records, the metrics, the kind of requests, what is asked, what is right, and more
  "choice": ("questions", "acc acc_norm", "multiple_choice", "Q: {{question}}\nA:", "gold", CHOICES),
  "last": ("questions", "perplexity acc", "loglikelihood", "{{question}}", " {{gold}}", {}),
  "rolling": ("texts", "word_perplexity byte_perplexity bits_per_byte", "loglikelihood_rolling", "", "{{text}}", {}),
  "continuing": ("prompts", "exact_match", "generate_until", "{{prompt}}", "answer", {"generation_kwargs": GREEDY}),
}


# what lm_eval reports of the machine takes it a dozen processes
WITHOUT_ENVIRONMENT = "from lm_eval import evaluator; evaluator.add_env_info = lambda results: None"


@pytest.fixture(autouse=True, scope="module")
def without_environment():
  """As WITHOUT_ENVIRONMENT, in this process."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    yield


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
  """The task files and their data: questions of 3 or 4 choices, texts, and prompts to be continued."""
  folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
  words = lambda least, most: " ".join(rng.choice(WORDS, rng.integers(least, most)))
  choices = lambda count: [f"{words(1, 3)} {n}" for n in range(count)]
  records = {
    "questions": [
      {"question": f"{words(1, 5)}?", "choices": choices(3 + i % 2), "gold": i % 3} for i in range(QUESTIONS)
    ],
    "texts": [{"text": words(1, 40)} for _ in range(12)] + [{"text": "x"}],
    "prompts": [{"prompt": words(1, 6), "answer": "river"} for _ in range(10)],
  }
  for name, lines in records.items():
    write_jsonl(folder / f"{name}.jsonl", lines)
  for name, (of, metrics, kind, asked, right, more) in TASKS.items():
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{folder}/{of}.jsonl"}}}
    metric_list = [{"metric": metric} for metric in metrics.split()]
    task = {"output_type": kind, "doc_to_text": asked, "doc_to_target": right, **more}
    content = {"task": name, **files, "test_split": "test", "metric_list": metric_list, **task}
    (folder / f"{name}.yaml").write_text(json.dumps(content))  # which is YAML, too
  return folder


def random_model(field="gpt", **changes):
  """A small model with a byte a token, whose logits spread; its parameters come from NumPy, so nothing is compiled."""
  kv_heads = {"num_kv_heads": None} if field == "gpt" else {"norm_eps": 1e-6, "final_norm_eps": 1e-6}
  values = {"num_steps": 2, "vocab_size": 257, "seq_len": 96, "solver": "sequential", **kv_heads, **changes}
  return moved_instance(small_model(field=field, **values), scale=0.15)


def trees(count=12, longest=60, V=257, seed=0):
  """Requests of which some share beginnings, at several depths, and two are equal."""
  rng = np.random.default_rng(seed)
  draw = lambda least, most: tuple(rng.integers(V, size=rng.integers(least, most)).tolist())
  requests = []
  for _ in range(count):
    beginning = draw(1, longest // 2)
    for _ in range(rng.integers(1, 4)):
      context = beginning + draw(0, longest // 4)
      requests += [Request(context, draw(1, longest // 4)) for _ in range(rng.integers(1, 4))]
  return [*requests, requests[0]]


def by_number(scorer, requests):
  """Log-probabilities of all requests, and whether each continuation is the likeliest, in the requests' order."""
  scores = dict(scorer(requests))
  return np.array([scores[i].logprob for i in range(len(requests))]), [scores[i].greedy for i in range(len(requests))]


@functools.cache
def _forward(model):
  return jax.jit(lambda tokens_1xL: jax.nn.log_softmax(model(tokens_1xL)[0], axis=-1))


def one_by_one(model, requests):
  """As `by_number`, by the plain forward pass, each request in a row of its own without padding in front."""
  totals, greedy = [], []
  for request in requests:
    tokens_1xL = np.zeros((1, model.config.seq_len), np.int32)
    tokens_1xL[0, : len(request.read)] = request.read
    logprob_NxV = np.asarray(_forward(model)(tokens_1xL))[len(request.context) - 1 : len(request.read)]
    totals.append(logprob_NxV[range(len(logprob_NxV)), request.continuation].sum())
    greedy.append((logprob_NxV.argmax(-1) == request.continuation).all())
  return np.array(totals), greedy
