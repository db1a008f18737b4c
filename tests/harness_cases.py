"""Models, requests and tasks that the tests of downstream evaluation share."""

import json
import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp())

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx.harness.packing import Request
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import graph
from tests.conftest import small_model

QUESTIONS = 60
WORDS = "river hill rain town stone bridge morning night people water road field house tree wind boat light".split()


@pytest.fixture(autouse=True)
def without_environment(monkeypatch):
  """Leaves out what lm_eval reports of the machine, which takes it a dozen processes."""
  monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
  """Task files with 60 questions."""
  return write_tasks(tmp_path_factory.mktemp("tasks"), QUESTIONS)


def random_model(field="gpt", **changes):
  """A small model with a byte a token, whose logits spread; its parameters come from NumPy, so nothing is compiled."""
  kv_heads = {"num_kv_heads": None} if field == "gpt" else {"norm_eps": 1e-6, "final_norm_eps": 1e-6}
  config = small_model(field=field, **{"vocab_size": 257, "seq_len": 96, "solver": "sequential", **kv_heads, **changes})
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Model(config, rngs=nnx.Rngs(0)))))
  values = lambda path, leaf: jnp.asarray(0.15 * rng.normal(size=leaf.shape) + (path[-1].key == "scale"), jnp.float32)
  return nnx.merge(graph(config), jax.tree_util.tree_map_with_path(values, shapes))


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


def write_tasks(folder, questions):
  """Task files and their data: questions of 3 or 4 choices, texts to be scored entirely, prompts to be continued."""
  rng = np.random.default_rng(0)
  words = lambda least, most: " ".join(rng.choice(WORDS, rng.integers(least, most)))
  lines = {
    "questions": [
      {"question": f"{words(1, 5)}?", "choices": [words(1, 3) + f" {n}" for n in range(3 + i % 2)], "gold": int(i % 3)}
      for i in range(questions)
    ]
  }
  lines["texts"] = [{"text": words(1, 40)} for _ in range(12)] + [{"text": "x"}]
  lines["prompts"] = [{"prompt": words(1, 6), "answer": "river"} for _ in range(10)]
  for name, records in lines.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
  head = "task: {0}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {1}/{2}.jsonl\ntest_split: test\n"
  (folder / "choice.yaml").write_text(
    head.format("choice", folder, "questions")
    + (
      'output_type: multiple_choice\ndoc_to_text: "Q: {{question}}\\nA:"\ndoc_to_target: gold\ndoc_to_choice: choices\n'
      "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
  )
  (folder / "last.yaml").write_text(
    head.format("last", folder, "questions")
    + (
      'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: " {{gold}}"\n'
      "metric_list:\n  - metric: perplexity\n  - metric: acc\n"
    )
  )
  (folder / "rolling.yaml").write_text(
    head.format("rolling", folder, "texts")
    + (
      'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
      "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"
    )
  )
  (folder / "continuing.yaml").write_text(
    head.format("continuing", folder, "prompts")
    + (
      'output_type: generate_until\ndoc_to_text: "{{prompt}}"\ndoc_to_target: answer\n'
      'generation_kwargs:\n  until: ["e"]\n  max_gen_toks: 12\n  do_sample: false\n'
      "metric_list:\n  - metric: exact_match\n"
    )
  )
  return folder
