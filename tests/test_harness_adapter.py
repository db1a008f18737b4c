"""The adapter to lm_eval: its hf backend on the exported weights gives the same results; which tokens are scored."""

import functools
import types

import numpy as np
import pytest

from tests.harness_cases import QUESTIONS, WORDS, one_by_one, random_model, task_folder, without_environment  # noqa: F401  fixtures, and the environment

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.api.instance import Instance

import diffeq_nnx
from diffeq_nnx.data import load_tokenizer
from diffeq_nnx.data.tokenizers import ByteTokenizer
from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.harness.scoring import Score
from tests.conftest import Lazy, told
from tests.test_export import byte_pairs, published

tasks = Lazy("lm_eval.tasks")
pytestmark = pytest.mark.filterwarnings("default")  # of lm_eval and its dependencies


@pytest.fixture(scope="module")
def model():
  return random_model()


@pytest.fixture(scope="module")
def lm(model):
  return DiffEqLM(model=model, tokenizer=ByteTokenizer())


def evaluated(lm, folder, *names):
  """lm_eval's results on the local tasks."""
  manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
  return lm_eval.simple_evaluate(lm, tasks=list(names), task_manager=manager, bootstrap_iters=0, verbosity=None)


def responses(results, name):
  """The model's responses to the requests of a task, in order."""
  samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
  return [response for sample in samples for response in sample["filtered_resps"]]


@pytest.mark.parametrize("kind,names", [("pairs", ("choice", "continuing")), ("sentencepiece", ("choice",))])
def test_the_hf_backend_on_the_exported_weights_gives_the_same(kind, names, task_folder, tmp_path):
  """Of tokens after a begin mark; of sentencepieces after a dummy prefix, too.

  Odd bytes among the tokens of these the libraries decode differently, so that no texts of them are compared.
  """
  from lm_eval.models.huggingface import HFLM

  words = " ".join(WORDS)
  given = byte_pairs(tmp_path, words) if kind == "pairs" else published(tmp_path, sentence_iterator=iter([words] * 40))
  tokenizer = load_tokenizer(given)
  model, hf = random_model("llama", vocab_size=tokenizer.vocab_size), str(tmp_path / "hf")
  diffeq_nnx.export_hf(model, hf, tokenizer=tokenizer)
  make_theirs = functools.partial(HFLM, pretrained=hf, device="cpu", dtype="float32", batch_size=128)
  theirs = evaluated(make_theirs(), task_folder, *names)
  ours = evaluated(DiffEqLM(model=model, tokenizer=tokenizer), task_folder, *names, "rolling")
  found, expected = (responses(one, "choice") for one in (ours, theirs))
  assert len(found) == len(expected) > 3 * QUESTIONS
  np.testing.assert_allclose([one[0] for one in found], [one[0] for one in expected], rtol=0, atol=1e-3)
  assert [one[1] for one in found] == [one[1] for one in expected]
  for metric in ("acc,none", "acc_norm,none"):
    assert ours["results"]["choice"][metric] == theirs["results"]["choice"][metric]
  assert ours["config"]["mark_before_contexts"] == tokenizer.bos_id and ours["config"]["begin_mark"] == "auto"
  if kind == "pairs":
    assert responses(ours, "continuing") == responses(theirs, "continuing")
    theirs = evaluated(make_theirs(add_bos_token=False), task_folder, "rolling")  # else the mark is scored after itself
    np.testing.assert_allclose(responses(ours, "rolling"), responses(theirs, "rolling"), rtol=0, atol=1e-3)


def instances(kind, *arguments):
  return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def scored(lm, *pairs):
  """What a scorer is given for (context, continuation) pairs, in order, and the results if its scores are -1."""
  given, scorer = [], lm.scorer
  lm.scorer = lambda requests: (given.extend(requests), enumerate([Score(-1.0, False)] * len(requests)))[1]
  try:
    results = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
  finally:
    lm.scorer = scorer
  return given, results


def test_contexts_are_cut_where_their_tokens_end(model, lm):
  make_lm = functools.partial(DiffEqLM, model=model, tokenizer=ByteTokenizer())
  plain = make_lm(begin_mark="none")
  ids = lambda text: tuple(text.encode())
  pairs = lambda *given, of=plain: scored(of, *given)[0]
  assert pairs(("a b ", "c"), ("a b", " c")) == [Request(ids("a b"), ids(" c"))] * 2  # the space goes to the right
  assert pairs(("", "ab"), (" ", "b")) == [Request((256,), ids("ab")), Request((256,), ids(" b"))]
  assert scored(plain, ("ab", ""), ("", "")) == ([], [(0.0, True)] * 2)
  marked = [Request((256, *ids("ab")), ids("c")), Request((256,), ids("c"))]
  assert pairs(("ab", "c"), ("", "c"), of=make_lm(begin_mark="always")) == marked
  assert pairs(("ab", "c"), ("", "c"), of=lm) == [Request(ids("ab"), ids("c")), marked[1]]  # bytes have no begin mark
  assert plain.get_model_info()["truncated_requests"] == 0
  (cut,) = pairs(("x" * 200, "cd"))
  assert len(cut.read) == 96 and cut.continuation == ids("cd")
  assert plain.get_model_info()["truncated_requests"] == 1 and plain.get_model_info()["mark_before_contexts"] is None
  assert "a continuation of 97 tokens" in told(lambda: pairs(("a", "b" * 97)))
  assert "not Unicode" in told(lambda: pairs(("a", "\ud800")))


class Merging(ByteTokenizer):
  """Bytes, but "ng" is one token, 250."""

  def encode_batch(self, texts):
    """Ids of each text."""
    return [np.array(list(text.encode().replace(b"ng", bytes([250]))), np.int32) for text in texts]


def test_a_continuation_that_merges_into_its_context_is_scored_from_there(model):
  lm = DiffEqLM(model=model, tokenizer=Merging())
  ids = lambda text: tuple(text.encode())
  requests, results = scored(lm, ("stron", "g"), ("a", ""), ("n", "g"), ("strong", ""), ("stron", "g!"))
  assert requests == [Request(ids("stro"), (250,)), Request((256,), (250,)), Request((*ids("stro"), 250), ids("!"))]
  assert results == [(-1.0, False), (0.0, True)] * 2 + [(-1.0, False)]
  assert lm.get_model_info()["merged_requests"] == 2
  merged, empty = lm.loglikelihood(instances("loglikelihood", ("stron", "g"), ("strong", "")), disable_tqdm=True)
  assert merged[0] < -1 and empty == (0.0, True)


def generated(lm, kwargs, count=1, prompt="river"):
  """Texts of `count` equal requests."""
  return lm.generate_until(instances("generate_until", *[(prompt, kwargs)] * count), disable_tqdm=True)


def test_texts_are_sampled_as_tasks_ask(model, lm):
  make_lm = functools.partial(DiffEqLM, model=model, tokenizer=ByteTokenizer())
  one = make_lm(batch_size=1)
  plain, sampled = {"max_gen_toks": 8}, {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
  (greedy,) = generated(one, {**plain, "do_sample": False})
  assert generated(one, plain) == generated(one, {**plain, "do_sample": True}) == [greedy]  # no temperature: greedy
  four = generated(one, sampled, 4)
  assert len(set(four)) == 4 and four == generated(lm, sampled, 4)  # whatever shares a batch
  two = [("river", sampled)] * 2
  mixed = instances("generate_until", ("a longer prompt", plain), *two, ("river", plain), *two)
  texts = one.generate_until(mixed, disable_tqdm=True)
  assert texts[1:3] + texts[4:] == four and texts[3] == greedy  # whatever the order
  assert generated(make_lm(batch_size=1, seed=1), sampled, 4) != four
  assert generated(one, {**sampled, "top_k": 0}) == four[:1]  # off, as in transformers
  assert len(generated(one, {})[0].encode()) > 8  # a limit that fits, where the task sets none
  for key, value in (("num_beams", 4), ("max_gen_toks", 96)):
    assert f"{key}={value}" in told(lambda: generated(one, {key: value}))


@pytest.mark.parametrize("window,count", [("disjoint", 4), ("sliding", 6)])
def test_texts_of_several_windows_are_scored_whole_and_perplexity_is_that_of_all(window, count, model):
  """Also of one, two or three windows and a token more or less: the sum over windows, by the forward pass of each."""
  lm = DiffEqLM(model=model, tokenizer=ByteTokenizer(), window=window)
  text, expected = "the river rose in the night and the rain went on " * 6, []
  texts = [text[:length] for length in (1, 2, 95, 96, 97, 191, 192, 193)] + [text]
  for one in texts:
    windows = lm.make_windows(one)
    assert [token for _, continuation in windows for token in continuation] == list(one.encode())
    sizes = [len(context) + len(continuation) - 1 for context, continuation in windows]
    assert max(sizes) <= 96 and sizes[-1] == min(len(one), 96) and all(context for context, _ in windows)
    expected.append(one_by_one(model, [Request(*map(tuple, window)) for window in windows])[0].sum())
  assert len(windows) == count and lm.get_model_info()["rolling_windows"].startswith(window)
  requests = instances("loglikelihood_rolling", *((one,) for one in [*texts, ""]))
  assert lm.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx([*expected, 0], abs=1e-3)
  found = lm.measure_perplexity([text, text[:2]])
  assert found["nats"] == pytest.approx(-expected[-1] - expected[1], abs=1e-3)
  assert found["tokens"] == found["bytes"] == len(text) + 2
  assert found["words"] == len(text.split()) + 1 + 1  # white space at the end counts, as in lm_eval
  assert found["documents"] == 2
  assert np.isclose(np.log(found["perplexity_per_word"]) * found["words"], found["nats"])


def test_answers_that_are_empty_texts_are_told(lm, capsys):
  assert lm.loglikelihood(instances("loglikelihood", ("a", ""), ("a", "b")), disable_tqdm=True)[0] == (0.0, True)
  assert "1 of 2 answers are empty texts" in capsys.readouterr().err


def test_a_cache_of_answers_is_of_one_model_and_depth(model, lm):
  hook = types.SimpleNamespace(dbdict={})
  lm.set_cache_hook(hook)
  lm.set_cache_hook(hook)
  other = DiffEqLM(model=model, tokenizer=ByteTokenizer(), num_steps=1)
  assert "--use_cache: holds answers for num_steps=" in told(lambda: other.set_cache_hook(hook))


def test_mistakes_are_reported_in_one_line(model):
  make_lm = functools.partial(DiffEqLM, model=model, tokenizer=ByteTokenizer())
  for wrong, part in (
    ({"windo": "sliding"}, "windo: unknown; did you mean 'window'?"),
    ({"dtype": "float8"}, "dtype='float8': must be one of model, bfloat16, float32"),
    ({"window": "sliding", "stride": 97}, "must be 1 to 96"),
    ({"max_length": 97}, "max_length=97"),
    ({"batch_size": "²"}, "batch_size='²'"),
  ):
    assert part in told(lambda: make_lm(**wrong))
  assert "no chat template" in told(lambda: make_lm().apply_chat_template([]))
  added = types.SimpleNamespace(**{name: getattr(ByteTokenizer(), name) for name in ("bos_id", "eos_id")})
  added.encode_batch = lambda texts: [np.array([model.config.vocab_size]) for _ in texts]
  lm = DiffEqLM(model=model, tokenizer=added)
  assert f"the id {model.config.vocab_size}" in told(lambda: lm.score_texts(["<pad>"]))
  assert "workdir=runs/tiny" in told(DiffEqLM)
