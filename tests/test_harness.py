"""Downstream evaluation: lm_eval's hf backend on the exported weights says the same; order and padding say nothing."""

import dataclasses
import functools
from importlib import metadata
import json
import os
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp())

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import diffeq_nnx
from diffeq_nnx import config as config_lib
from diffeq_nnx.data import load_tokenizer
from diffeq_nnx.data.tokenizers import ByteTokenizer
from diffeq_nnx.errors import UserError
from diffeq_nnx.harness import __main__ as command_line
from diffeq_nnx.harness import packing, perplexity, report, scoring, tasks
from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.harness.jobs import evaluate_downstream
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training.loop import train
from launch import local
from tests.conftest import run_config, small_model, told
from tests.test_export import byte_pairs, make

pytestmark = pytest.mark.filterwarnings("default")  # lm_eval and what it brings warn as they like

QUESTIONS, TEXTS = 500, 12
WORDS = "river hill rain town stone bridge morning night people water road field house tree wind boat light".split()


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
  """Task files and their data: 500 questions of 3 or 4 choices, texts to be scored whole, prompts to go on from."""
  folder = tmp_path_factory.mktemp("tasks")
  rng = np.random.default_rng(0)
  words = lambda least, most: " ".join(rng.choice(WORDS, rng.integers(least, most)))
  lines = {"questions": [
      {"question": f"{words(1, 5)}?", "choices": [words(1, 3) + f" {n}" for n in range(3 + i % 2)], "gold": int(i % 3)}
      for i in range(QUESTIONS)]}
  lines["texts"] = [{"text": words(1, 40)} for _ in range(TEXTS)] + [{"text": "x"}]
  lines["prompts"] = [{"prompt": words(1, 6), "answer": "river"} for _ in range(10)]
  for name, records in lines.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
  head = "task: {0}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {1}/{2}.jsonl\ntest_split: test\n"
  (folder / "choice.yaml").write_text(head.format("choice", folder, "questions") + (
      'output_type: multiple_choice\ndoc_to_text: "Q: {{question}}\\nA:"\ndoc_to_target: gold\ndoc_to_choice: choices\n'
      "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"))
  (folder / "rolling.yaml").write_text(head.format("rolling", folder, "texts") + (
      'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
      "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"))
  (folder / "going_on.yaml").write_text(head.format("going_on", folder, "prompts") + (
      'output_type: generate_until\ndoc_to_text: "{{prompt}}"\ndoc_to_target: answer\n'
      'generation_kwargs:\n  until: ["e"]\n  max_gen_toks: 12\n  do_sample: false\n'
      "metric_list:\n  - metric: exact_match\n"))
  return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """(config, work directory) of a run of 2 steps that reads 96 bytes at a time; not to be changed."""
  folder = tmp_path_factory.mktemp("text")
  for i in range(12):
    (folder / f"{i}.txt").write_text(f"Document {i} tells of rivers, hills and rain. " * (20 + i))
  config = run_config(folder, steps=2)
  config = dataclasses.replace(
      config, model=dataclasses.replace(config.model, vocab_size=257, seq_len=96),
      data=dataclasses.replace(config.data, tokenizer="bytes"),
      checkpoint=dataclasses.replace(config.checkpoint, every=2))
  train(config, str(folder / "run"))
  return config, folder / "run"


def model_of(field="gpt", **changes):
  """A small model whose logits spread, with a byte a token."""
  kv_heads = {"num_kv_heads": None} if field == "gpt" else {"norm_eps": 1e-6, "final_norm_eps": 1e-6}
  sizes = {"vocab_size": 257, "seq_len": 96, "solver": "sequential"}
  return make(small_model(field=field, **{**sizes, **kv_heads, **changes}))


def evaluated(lm, folder, *names, **more):
  """lm_eval's results on the local tasks."""
  return lm_eval.simple_evaluate(model=lm, tasks=list(names), bootstrap_iters=0, verbosity=None,
                                 task_manager=TaskManager(include_path=str(folder), include_defaults=False), **more)


def responses(results, name):
  """What the model said of each request of a task, in order."""
  samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
  return [response for sample in samples for response in sample["filtered_resps"]]


@pytest.mark.parametrize("field,tokens", [("gpt", "bytes"), ("llama", "byte pairs after a begin mark")])
def test_the_hf_backend_on_the_exported_weights_gives_the_same(field, tokens, task_folder, tmp_path):
  from lm_eval.models.huggingface import HFLM
  tokenizer = ByteTokenizer() if tokens == "bytes" else load_tokenizer(byte_pairs(tmp_path, " ".join(WORDS)))
  model, hf = model_of(field, vocab_size=tokenizer.vocab_size), str(tmp_path / "hf")
  diffeq_nnx.export_hf(model, hf, tokenizer=tokenizer)
  make_theirs = functools.partial(HFLM, pretrained=hf, device="cpu", dtype="float32", batch_size=128)
  theirs = evaluated(make_theirs(), task_folder, "choice", "going_on")
  rolling = evaluated(make_theirs(add_bos_token=False), task_folder, "rolling")  # else the mark is scored after itself
  ours = evaluated(DiffEqLM(model=model, tokenizer=tokenizer), task_folder, "choice", "going_on", "rolling")
  found, expected = (responses(one, "choice") for one in (ours, theirs))
  assert len(found) == len(expected) > 3 * QUESTIONS
  np.testing.assert_allclose([one[0] for one in found], [one[0] for one in expected], rtol=0, atol=1e-3)
  assert [one[1] for one in found] == [one[1] for one in expected]
  for metric in ("acc,none", "acc_norm,none"):
    assert ours["results"]["choice"][metric] == theirs["results"]["choice"][metric]
  np.testing.assert_allclose(responses(ours, "rolling"), responses(rolling, "rolling"), rtol=0, atol=1e-3)
  assert responses(ours, "going_on") == responses(theirs, "going_on")
  assert ours["config"]["mark_before_contexts"] == tokenizer.bos_id and ours["config"]["begin_mark"] == "auto"


def trees(count=12, longest=60, V=257, seed=0):
  """Requests of which some share beginnings, at several depths."""
  rng = np.random.default_rng(seed)
  draw = lambda least, most: tuple(rng.integers(V, size=rng.integers(least, most)).tolist())
  made = []
  for _ in range(count):
    beginning = draw(1, longest // 2)
    for _ in range(rng.integers(1, 4)):
      context = beginning + draw(0, longest // 4)
      made += [Request(context, draw(1, longest // 4)) for _ in range(rng.integers(1, 4))]
  return [*made, made[0]]


def by_number(scorer, requests):
  scores = dict(scorer(requests))
  return np.array([scores[i].logprob for i in range(len(requests))]), [scores[i].greedy for i in range(len(requests))]


def one_by_one(model, requests):
  """Log-likelihoods by the plain forward pass, each request in a row of its own without padding in front."""
  run = jax.jit(lambda tokens_1xL: jax.nn.log_softmax(model(tokens_1xL)[0], axis=-1))
  totals, greedy = [], []
  for request in requests:
    tokens_1xL = np.zeros((1, 64), np.int32)
    tokens_1xL[0, :len(request.read)] = request.read
    logprob_NxV = np.asarray(run(tokens_1xL))[len(request.context) - 1:len(request.read)]
    totals.append(logprob_NxV[range(len(logprob_NxV)), request.continuation].sum())
    greedy.append((logprob_NxV.argmax(-1) == request.continuation).all())
  return np.array(totals), greedy


@pytest.mark.parametrize("field,solver,kv_heads", [("gpt", "euler", 2), ("llama", "sequential", 1)])
def test_sharing_a_beginning_changes_nothing(field, solver, kv_heads, x64, monkeypatch):
  monkeypatch.setattr(scoring, "QUERIES", 24)  # attention in several parts
  sizes = {"num_kv_heads": kv_heads, "vocab_size": 257, "seq_len": 64}
  model = make(small_model(field=field, solver=solver, dtype="float64", **sizes))
  requests = trees(8)
  rows = packing.rows_of(requests, 64)
  assert len(rows) < 0.7 * len(requests) and any(row.branches for row in rows) and not all(row.branches for row in rows)
  expected = one_by_one(model, requests)
  for share in (True, False):
    found = by_number(scoring.Scorer(model, share=share), requests)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-9)
    assert found[1] == expected[1]


def test_a_slot_sees_its_own_path_and_a_beginning_is_held_once():
  requests = [Request((5, 6), (7, 8)), Request((5, 6), (9,)), Request((5, 6), (7, 1)), Request((5, 6, 7), (2,))]
  (row,) = packing.rows_of(requests, 64)
  assert row.tokens == [5, 6, 7] and row.positions == [0, 1, 2] and row.ends == [3, 3, 3] and not row.branches
  forks = [Request((5, 6, 7), (1, 2)), Request((5, 6, 7), (3, 4)), Request((5, 6, 8), (1, 2))]
  (row,) = packing.rows_of(forks, 64)
  assert row.tokens == [5, 6, 7, 1, 3, 8, 1] and row.positions == [0, 1, 2, 3, 3, 2, 3]
  assert row.ends == [7, 7, 5, 4, 5, 7, 7] and row.branches
  assert len(packing.rows_of(forks, 6)) == 2  # no room for all


def test_order_changes_nothing_and_batches_only_rounding(monkeypatch):
  model, requests = model_of(), trees(20)
  scorer = scoring.Scorer(model)
  expected = by_number(scorer, requests)
  order = np.random.default_rng(1).permutation(len(requests))
  found = by_number(scorer, [requests[i] for i in order])
  assert (found[0] == expected[0][order]).all() and found[1] == [expected[1][i] for i in order]
  small = by_number(scoring.Scorer(model, batch_size=1), requests)
  np.testing.assert_allclose(small[0], expected[0], rtol=0, atol=2e-5)
  assert small[1] == expected[1]
  monkeypatch.setattr(scoring, "LOGITS", 1 << 12)  # logits in many pieces
  scoring.score.clear_cache()
  np.testing.assert_allclose(by_number(scorer, requests)[0], expected[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("branches", [False, True])
def test_padding_never_leaks(branches):
  """Whatever stands in slots that are not used, even no number at all, is seen by none."""
  model = model_of()
  requests = trees(6) if branches else [Request((1,) * n, (2, 3)) for n in (2, 9, 15, 33)]
  rows = packing.rows_of(requests, 64, share=branches)
  (batch, *_) = packing.batches(rows, 64 * 64, 1)
  assert batch.branches == branches
  scorer = scoring.Scorer(model)
  used = np.zeros(batch.arrays["tokens"].shape, bool)
  for row in range(len(batch.parts)):
    used[row] = batch.arrays["ends"][row] > 0
  assert (~used).sum() > 20
  before = [np.asarray(one) for one in scorer._score(batch)]
  batch.arrays["tokens"][~used] = 123
  batch.arrays["positions"][~used] = 77
  after = [np.asarray(one) for one in scorer._score(batch)]
  for row, parts in enumerate(batch.parts):
    count = sum(part[2] for part in parts)
    for a, b in zip(before, after):
      assert (a[row, :count] == b[row, :count]).all()


def test_few_shapes_are_compiled():
  rows = packing.rows_of(trees(400), 96)
  shapes = {tuple(array.shape for array in batch.arrays.values()) for batch in packing.batches(rows, 1024, 1)}
  assert len(rows) > 300 and len(shapes) < 20
  assert all(n <= packing.bucket(n) <= max(16, 1.34 * n) or n < 64 for n in range(1, 5000))
  assert len({packing.bucket(n) for n in range(1, 2049)}) < 32


def test_eight_devices_say_what_one_does():
  """A program of its own, since devices are counted at the start."""
  code = """
import jax, numpy as np
from diffeq_nnx.parallel import sharding
from diffeq_nnx.config import MeshConfig
from diffeq_nnx.harness.scoring import Scorer
from flax import nnx
from diffeq_nnx.training.step import state_shardings, all_params
from tests.conftest import small_config
from tests.test_harness import model_of, trees, by_number
model, requests = model_of(), trees(10)
expected = by_number(Scorer(model), requests)
mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2))
places = all_params(state_shardings(small_config(model.config), mesh))
params = jax.device_put(nnx.to_pure_dict(nnx.state(model)), places)
scorer = Scorer(nnx.merge(nnx.graphdef(model), params), mesh=mesh)
assert not jax.tree.leaves(scorer._weights["steps"])[-1].sharding.is_fully_replicated
found = by_number(scorer, requests)
np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-5)
assert found[1] == expected[1]
print("the same")
"""
  env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=240)
  assert done.stdout.endswith("the same\n"), done.stderr


def instances(kind, *arguments):
  return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_contexts_are_cut_where_their_tokens_end():
  lm = DiffEqLM(model=model_of(), tokenizer=ByteTokenizer(), begin_mark="none")
  pairs = lambda *given, **changes: list(dataclasses.replace(lm.encoder, **changes).pairs(given))
  ids = lambda text: tuple(text.encode())
  assert pairs(("a b ", "c"), ("a b", " c")) == [Request(ids("a b"), ids(" c"))] * 2  # the space goes to the right
  assert pairs(("", "ab"), (" ", "b")) == [Request((256,), ids("ab")), Request((256,), ids(" b"))]
  assert pairs(("ab", "")) == [None]
  marked = [Request((256, *ids("ab")), ids("c")), Request((256,), ids("c"))]
  assert pairs(("ab", "c"), ("", "c"), begin_mark="always") == marked
  (cut,) = pairs(("x" * 200, "cd"))
  assert len(cut.read) == 96 and cut.continuation == ids("cd")
  lm.loglikelihood(instances("loglikelihood", ("x" * 200, "cd")), disable_tqdm=True)
  assert lm.get_model_info()["truncated_requests"] == 1 and lm.get_model_info()["mark_before_contexts"] is None
  assert "a continuation of 97 tokens" in told(lambda: pairs(("a", "b" * 97)))
  assert "not Unicode" in told(lambda: pairs(("a", "\ud800")))


class Merging(ByteTokenizer):
  """Bytes, but "ng" is one token, 250."""

  def encode_batch(self, texts):
    """Ids of each text."""
    return [np.array(list(text.encode().replace(b"ng", bytes([250]))), np.int32) for text in texts]


def test_a_continuation_that_merges_into_its_context_is_scored_from_there():
  lm = DiffEqLM(model=model_of(), tokenizer=Merging())
  ids = lambda text: tuple(text.encode())
  assert list(lm.encoder.pairs([("stron", "g"), ("a", ""), ("n", "g")])) == [
      Request(ids("stro"), (250,)), None, Request((256,), (250,))]
  asked = instances("loglikelihood", ("stron", "g"), ("strong", ""))
  (logprob, _), empty = lm.loglikelihood(asked, disable_tqdm=True)
  assert logprob < -1 and empty == (0.0, True) and lm.get_model_info()["merged_requests"] == 3


def test_equal_requests_are_computed_once_and_rows_hold_no_more_than_fits():
  model, requests = model_of(), trees(4)
  scorer = scoring.Scorer(model)
  shapes, score = [], scorer._score
  scorer._score = lambda batch: (shapes.append(batch.arrays["slots"].shape), score(batch))[1]
  expected = by_number(scorer, requests)
  found = by_number(scorer, requests * 40)
  np.testing.assert_array_equal(found[0], np.tile(expected[0], 40))
  assert shapes[:len(shapes) // 2] == shapes[len(shapes) // 2:]
  many = [Request((1,), (2, i)) for i in range(257)] + [Request((1,), (i,)) for i in range(257)]
  assert all(len(row.scored) <= 96 and len(row.tokens) <= 96 for row in packing.rows_of(many, 96))


def generating(lm, kwargs, count=1, prompt="river"):
  """Texts of `count` equal requests."""
  asked = [Instance("generate_until", {}, (prompt, kwargs), i) for i in range(count)]
  return lm.generate_until(asked, disable_tqdm=True)


def test_texts_are_drawn_as_tasks_ask():
  model = model_of()
  make_lm = functools.partial(DiffEqLM, model=model, tokenizer=ByteTokenizer())
  one, eight = make_lm(batch_size=1), make_lm(batch_size=8)
  plain, sampled = {"max_gen_toks": 8}, {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
  (greedy,) = generating(one, {**plain, "do_sample": False})
  assert generating(one, plain) == generating(one, {**plain, "do_sample": True}) == [greedy]  # no temperature: greedy
  four = generating(one, sampled, 4)
  assert len(set(four)) == 4 and four == generating(eight, sampled, 4)  # whatever shares a batch
  assert generating(make_lm(seed=1), sampled, 4) != four
  assert generating(one, {**sampled, "top_k": 0}) == four[:1]  # off, as in transformers
  assert len(generating(one, {})[0].encode()) > 8  # a length that fits, where the task doesn't say
  for wrong, part in (({"num_beams": 4}, "num_beams=4: is not supported"), ({"max_gen_toks": 96}, "max_gen_toks=96"),
                      ({**sampled, "top_p": 2}, "top_p=2")):
    assert part in told(lambda: generating(one, wrong))


def test_windows_predict_each_token_once():
  model, text = model_of(), "the river rose in the night and the rain went on " * 6
  make_lm = functools.partial(DiffEqLM, model=model, tokenizer=ByteTokenizer())
  disjoint, sliding = make_lm(), make_lm(window="sliding")
  for lm in (disjoint, sliding):
    windows = lm.encoder.windows(text)
    assert [token for one in windows for token in one.continuation] == list(text.encode())
    assert all(len(one.read) <= 96 for one in windows) and len(windows[-1].read) == 96
  assert len(sliding.encoder.windows(text)) > len(disjoint.encoder.windows(text)) == 4
  assert "sliding" in sliding.get_model_info()["rolling_windows"]
  said = perplexity.corpus_perplexity(sliding, [text, "one two"])
  (total,) = sliding.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
  (short,) = sliding.loglikelihood_rolling(instances("loglikelihood_rolling", ("one two",)), disable_tqdm=True)
  assert np.isclose(said["nats"], -total - short) and said["tokens"] == said["bytes"] == len(text) + 7
  assert said["words"] == len(text.split()) + 1 + 2  # white space at the end counts, as in lm_eval
  assert said["documents"] == 2
  assert np.isclose(np.log(said["perplexity_per_word"]) * said["words"], said["nats"])


class Hook:
  """What lm_eval gives results to as they come."""

  def __init__(self):
    self.kept = {}

  def add_partial(self, kind, arguments, result):
    """Keeps one."""
    self.kept[kind, json.dumps(arguments)] = result


def test_results_go_to_the_request_cache():
  lm = DiffEqLM(model=model_of(), tokenizer=ByteTokenizer())
  hook = Hook()
  lm.set_cache_hook(hook)
  asked = instances("loglikelihood", ("river", " town"), ("river", " hill"))
  made = lm.loglikelihood(asked, disable_tqdm=True)
  assert made == [hook.kept["loglikelihood", json.dumps(one.args)] for one in asked]


def test_the_job_writes_results_a_table_and_bars(run, task_folder, tmp_path, capsys):
  config, workdir = run
  settings = {"tasks": "choice", "include_path": str(task_folder), "default_tasks": False, "limit": 40,
              "text": f"jsonl:{task_folder}/texts.jsonl"}
  both = dataclasses.replace(config, harness=dataclasses.replace(config.harness, **settings, num_fewshot=(0, 2)))
  evaluate_downstream(both, str(workdir))
  folder = workdir / "harness"
  two = json.loads((folder / "results_2shot.json").read_text())
  assert two["n-shot"]["choice"] == 2 and two["config"]["begin_mark"] == "auto"
  said = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert said["job"] == "harness" and set(said["acc"]) == {"choice (0-shot)", "choice (2-shot)"}
  one = dataclasses.replace(
      both, harness=dataclasses.replace(both.harness, num_fewshot=(0,), text=None, folder="again"))
  (workdir / "again").mkdir()
  (workdir / "again" / "results_5shot.json").write_text("of an earlier job")
  evaluate_downstream(one, str(workdir), baseline=str(folder / "results_0shot.json"))
  assert sorted(os.listdir(workdir / "again")) == ["bars.png", "results_0shot.json", "table.md"]
  table = (workdir / "again" / "table.md").read_text()
  assert "| choice | 0 | acc |" in table and "+0.0000" in table and "±" in table and "begin mark: auto" in table
  assert (workdir / "again" / "bars.png").read_bytes()[:4] == b"\x89PNG"
  assert json.loads((folder / "perplexity.json").read_text())["rolling_windows"].startswith("disjoint")


def test_mistakes_are_told_in_one_line(run, task_folder, tmp_path):
  config, workdir = run
  def line(baseline=None, where=workdir, **settings):
    values = {"tasks": "choice", "include_path": str(task_folder), "default_tasks": False, **settings}
    job = dataclasses.replace(config, harness=dataclasses.replace(config.harness, **values))
    return told(lambda: evaluate_downstream(job, str(where), baseline=baseline))

  assert "harness.tasks='choise': there is no such task; did you mean 'choice'?" == line(tasks="choise")
  assert "harness.tasks=paper: arc_easy" in line(tasks="paper")
  assert "there is no such folder" in line(include_path="nowhere")
  assert "holds no run" in line(where=tmp_path)
  assert f"--baseline={tmp_path}: holds no harness/results.json" in line(baseline=str(tmp_path))
  (tmp_path / "results.json").write_text("[]")
  assert "is no results.json of lm_eval" in line(baseline=str(tmp_path / "results.json"))
  assert "harness.text=text:nothing*" in line(text="text:nothing*")
  assert "there is no such file" in line(baseline=str(tmp_path / "nothing"))
  (tmp_path / "broken.yaml").write_text((task_folder / "choice.yaml").read_text().replace("choice\n", "broken\n", 1)
                                        .replace("{{question}}", "{{nonsense.x}}"))
  assert "UndefinedError: 'nonsense' is undefined" in line(tasks="broken", include_path=str(tmp_path), limit=2)
  assert "windo: unknown; did you mean 'window'?" in told(lambda: DiffEqLM(str(workdir), windo="sliding"))
  model = {"model": model_of(), "tokenizer": ByteTokenizer()}
  assert "must be one of auto, none, always" in told(lambda: DiffEqLM(**model, begin_mark="yes"))
  assert "is of sliding windows" in told(lambda: DiffEqLM(**model, stride=3))
  assert "must be 1 to 96" in told(lambda: DiffEqLM(**model, window="sliding", stride=97))
  assert "max_length=97" in told(lambda: DiffEqLM(**model, max_length=97))
  assert "batch_size='x'" in told(lambda: DiffEqLM(**model, batch_size="x"))
  assert "batch_size='²'" in told(lambda: DiffEqLM(**model, batch_size="²"))
  assert "max_length='abc'" in told(lambda: DiffEqLM(**model, max_length="abc"))
  assert "no chat template" in told(lambda: DiffEqLM(**model).apply_chat_template([]))
  assert "workdir=runs/tiny" in told(DiffEqLM)


def test_what_a_reader_of_a_comparison_must_know(run, task_folder, tmp_path):
  config, workdir = run
  def job(folder, baseline=None, **settings):
    values = {"tasks": "choice", "include_path": str(task_folder), "default_tasks": False, "limit": 6, "folder": folder}
    harness = dataclasses.replace(config.harness, **{**values, **settings})
    evaluate_downstream(dataclasses.replace(config, harness=harness), str(workdir), baseline=baseline)
    return (workdir / folder / "table.md").read_text()

  job("first", num_fewshot=(0,))
  table = job("second", str(workdir / "first" / "results_0shot.json"), num_fewshot=(0, 1), limit=8, begin_mark="always")
  for part in ("the baseline lacks 2 of these 4 numbers", 'begin_mark: "always" here, "auto" for the baseline',
               "limit: 8 here, 6 for the baseline", "another number of questions for the baseline: choice"):
    assert part in table
  with pytest.raises(UserError, match="no number in common"):
    job("third", str(workdir / "first" / "results_0shot.json"), num_fewshot=(2,))


def test_errors_of_perplexities_need_no_forks_and_stdout_is_one_line(run, task_folder, tmp_path, capsys, monkeypatch):
  config, workdir = run
  (tmp_path / "last.yaml").write_text((task_folder / "choice.yaml").read_text().split("output_type")[0].replace(
      "choice\n", "last\n", 1) + 'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: " {{gold}}"\n'
      "metric_list:\n  - metric: perplexity\n  - metric: acc\n")
  monkeypatch.setattr(os, "fork", None)
  monkeypatch.setenv("LOCAL_RANK", "1")  # as some launchers set it
  harness = dataclasses.replace(config.harness, tasks="last", include_path=str(tmp_path), default_tasks=False, limit=6)
  changed = dataclasses.replace(config, harness=harness, eval=dataclasses.replace(config.eval, num_steps=2))
  evaluate_downstream(changed, str(workdir))
  (line,) = capsys.readouterr().out.splitlines()
  assert json.loads(line)["acc"]
  results = json.loads((workdir / "harness" / "results.json").read_text())
  assert results["results"]["last"]["perplexity_stderr,none"] > 0 and os.environ["LOCAL_RANK"] == "1"
  assert results["config"]["num_steps"] == 2  # the config's, changed by the command


def test_the_section_is_no_part_of_a_run_and_old_runs_lack_it(run, tmp_path):
  config, workdir = run
  other = config_lib.changed(config, ["harness.tasks=piqa,sciq", "harness.num_fewshot=(0, 5)", "harness.stride=None"])
  assert other.harness.tasks == "piqa,sciq" and other.harness.num_fewshot == (0, 5)
  assert workdir_lib.identity(other) == workdir_lib.identity(config)
  known = json.loads((workdir / "run.json").read_text())
  del known["config"]["harness"]
  (tmp_path / "run.json").write_text(json.dumps(known))
  assert workdir_lib.config_of(str(tmp_path)) == config
  written = config_lib.changed(config, ["harness.default_tasks=false", "harness.num_fewshot=5", "harness.folder=2024"])
  assert (written.harness.default_tasks, written.harness.num_fewshot, written.harness.folder) == (False, (5,), "2024")
  for setting, part in (("harness.num_fewshot=(-1,)", "harness.num_fewshot[0]=-1"), ("harness.stride=3", "sliding"),
                        ("harness.folder=checkpoints", "a folder of its own"),
                        ("harness.folder=./", "a folder of its own"),
                        ("harness.tasks=none", "nothing to do"), ("harness.tasks=','", "nothing to do"),
                        ("harness.folder='../x'", "within the work directory"), ("harness.tasks=''", "nothing to do"),
                        ("harness.window=slide", "disjoint, sliding"), ("harness.limit=0", "harness.limit=0")):
    assert part in told(lambda: config_lib.changed(config, [setting]))


def test_both_command_lines(run, task_folder, tmp_path, monkeypatch, capsys):
  """The job with settings on top of the run's own config; and lm_eval's, to which our model is known."""
  _, workdir = run
  job = subprocess.Popen([sys.executable, "-m", "diffeq_nnx.main", "--job=harness", f"--workdir={workdir}",
                          "--config.harness.tasks=choice", f"--config.harness.include_path={task_folder}",
                          "--config.harness.default_tasks=False", "--config.harness.limit=6",
                          "--config.harness.folder=by_command"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))  # seconds
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)  # only before anything touches a device
  monkeypatch.setattr(sys, "argv", [
      "lm_eval", "--model", "diffeq_nnx", "--model_args", f"workdir={workdir},begin_mark=always", "--tasks",
      str(task_folder / "choice.yaml"), "--limit", "6", "--output_path", str(tmp_path)])
  command_line.main()
  assert "|choice|" in capsys.readouterr().out
  (path,) = tmp_path.rglob("results_*.json")
  results = json.loads(path.read_text())
  assert results["config"]["mark_before_contexts"] == results["config"]["mark_before_texts_without_context"] == 256
  assert report.figures(results)["choice", 0, "acc", "none"].error is not None
  with job:
    line, said = job.communicate(timeout=240)
  assert job.returncode == 0 and json.loads(line)["acc"], said


def test_two_processes_of_two_devices_say_what_one_does(run, task_folder, tmp_path):
  _, workdir = run
  source = f"jsonl:{task_folder}/texts.jsonl"
  arguments = ["--job=harness", f"--workdir={workdir}", "--config.harness.tasks=choice", "--config.harness.limit=12",
               f"--config.harness.include_path={task_folder}", "--config.harness.default_tasks=False",
               f"--config.harness.text={source}", "--config.harness.folder=by_two"]
  assert local.run(local.commands(2, local.free_port(), arguments), local.environment(2)) == 0
  alone = DiffEqLM(str(workdir))
  with open(task_folder / "texts.jsonl", encoding="utf-8") as file:
    expected = perplexity.corpus_perplexity(alone, [json.loads(line)["text"] for line in file][:12])
  found = json.loads((workdir / "by_two" / "perplexity.json").read_text())
  assert np.isclose(found["nats"], expected["nats"], rtol=1e-6) and found["tokens"] == expected["tokens"]
  results = json.loads((workdir / "by_two" / "results.json").read_text())
  assert (results["config"]["processes"], results["config"]["devices"]) == (2, 4)
  again = evaluated(alone, task_folder, "choice", limit=12)
  assert results["results"]["choice"]["acc,none"] == again["results"]["choice"]["acc,none"]


def test_lm_eval_finds_the_model_by_its_entry_point():
  """Releases of lm_eval after 0.4.13 look models up there, so that `lm_eval --model diffeq_nnx` is enough."""
  try:
    metadata.distribution("diffeq_nnx")
  except metadata.PackageNotFoundError:
    pytest.skip("the package is not installed")
  (found,) = metadata.entry_points(group="lm_eval.models", name="diffeq_nnx")
  assert found.load() is DiffEqLM


def test_the_paper_s_list_is_a_group_that_the_task_files_name():
  with open(os.path.join(tasks.GROUPS, "paper.yaml"), encoding="utf-8") as file:
    named = [line.strip(" -\n") for line in file if line.startswith("  - ")]
  assert tuple(named) == tasks.PAPER and tasks.PAPER_SHOTS == (0, 5)


def test_the_group_is_found_however_tasks_are_given(monkeypatch):
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)
  monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
  monkeypatch.setenv("DISABLE_MULTIPROC", "1")
  for given, added in ((["--tasks=a"], True), (["--tasks", "a"], True), (["-t", "a"], True), (["--model", "x"], False),
                       (["--tasks", "a", "--include_path=b"], False)):
    monkeypatch.setattr(sys, "argv", ["lm_eval", *given])
    command_line.main()
    assert (sys.argv[-2:] == ["--include_path", tasks.GROUPS]) == added
