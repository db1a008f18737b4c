"""A run as a model of lm-evaluation-harness, under the name `diffeq_nnx`."""

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
import types
from typing import Any
import zlib

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from diffeq_nnx.config import Config, HarnessConfig, nearest
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.data.chat import template_of
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.harness.conversations import Rendered, render
from diffeq_nnx.harness.scoring import Scorer
from diffeq_nnx.harness.windows import choose_windows
from diffeq_nnx.inference.decoding import Decoder
from diffeq_nnx.inference.generation import continue_texts, encode_texts
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.ready import one_device_mesh
from diffeq_nnx.parallel import distributed
from diffeq_nnx.parallel.console import say
from diffeq_nnx.runs.run import Run, say_attention
from diffeq_nnx.training.evaluate import perplexity

AUTO = 8  # the batch size that batch_size=auto stands for
DOCUMENTS = 256  # documents whose perplexity is measured together
MAX_TOKENS = 256  # of a generated text whose task sets no limit; at most half of max_length
# of `DiffEqLM.get_model_info`: on what an answer does not depend
_NOT_OF_ANSWERS = ("workdir", "devices", "processes", "truncated_requests", "merged_requests")
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")  # supported generation_kwargs


@register_model("diffeq_nnx")
class DiffEqLM(TemplateLM):
  """Computes log-likelihoods of continuations and of texts, and generates texts, as lm_eval requests them.

  Every process of a job must receive the same requests. The processes share the work.

  Attributes:
    batch_size: sequences of `max_length` tokens that a device holds at a time.
    windows: what the model reads of long texts, and how many tokens at a time.
    truncated: number of requests so far that lost the beginning of their context.
    merged: number of continuations so far that share a token with the end of their context; see `_encode_pair`.
    scorer: the model, ready to compute log-likelihoods.
  """

  def __init__(
    self,
    workdir: str | None = None,
    *,
    model: Model | None = None,
    tokenizer: Tokenizer | None = None,
    batch_size: int | str = AUTO,
    num_steps: int | None = None,
    dtype: str = "model",
    begin_mark: str = "auto",
    window: str = "disjoint",
    stride: int | None = None,
    max_length: int | None = None,
    share: bool = True,
    seed: int = 0,
    config: Config | None = None,
    **unknown: Any,
  ):
    """Loads the newest model of a run, or takes `model`.

    Args:
      workdir: the run's directory.
      model: used instead of a run, together with `tokenizer`; it is on one device.
      tokenizer: the tokenizer of `model`.
      batch_size: as for `Scorer`, or auto: 8.
      num_steps: number of solver steps; None: eval.num_steps of the run, or else the model's own.
      dtype: as the key `harness.dtype`.
      begin_mark: as the key `harness.begin_mark`.
      window: as the key `harness.window`, for texts longer than `max_length`.
      stride: as the key `harness.stride`; None: half of `max_length`.
      max_length: tokens that the model reads at a time; None: model.seq_len.
      share: as for `Scorer`.
      seed: of sampled texts; each depends only on the seed, its prompt and its repetition.
      config: the run's config with changes, as for `Run.open`.
      **unknown: must be empty but for max_batch_size and device, which lm_eval passes and this model ignores.

    Raises:
      UserError: no run, no checkpoint, or a value outside its rule.
    """
    super().__init__()
    for name in unknown.keys() - {"max_batch_size", "device"}:
      known = [*inspect.signature(DiffEqLM.__init__).parameters][1:-1]  # without `self` and `unknown`
      raise UserError(f"model_args: {name}: unknown; {nearest(name, known)}")
    if (workdir is None) == (model is None) or (model is None) != (tokenizer is None):
      raise UserError("model_args: name a run, e.g. workdir=runs/tiny")
    self.batch_size = AUTO if str(batch_size).startswith("auto") else _read_count("batch_size", batch_size, ", or auto")
    num_steps = None if num_steps is None else _read_count("num_steps", num_steps)
    max_length = None if max_length is None else _read_count("max_length", max_length)
    try:  # the rules of the keys with these names in a config
      HarnessConfig(dtype=dtype, begin_mark=begin_mark, window=window, stride=stride)
    except UserError as error:
      raise UserError(str(error).replace("harness.", "")) from error
    self._open: Callable[[], Any] = functools.partial(Run.open, str(workdir), config)
    if model is not None:
      known = {"config": Config(model=model.config), "mesh": one_device_mesh(model), "step": None, "hash": None}
      self._open = functools.partial(types.SimpleNamespace, model=model, tokenizer=tokenizer, **known)
    run = self._open()
    self._hash = run.hash
    dtype = run.config.model.dtype if dtype == "model" else dtype
    config = dataclasses.replace(run.config.model, dropout=0.0, dtype=dtype)
    self._num_steps = run.config.eval.num_steps if num_steps is None else num_steps
    if model is None:
      say_attention(config)
      run.say_untrained(self._num_steps)
    self.windows = choose_windows(config, max_length, window == "sliding", stride)
    self.truncated = self.merged = 0
    self._workdir, self._tokenizer, self._seed = workdir, run.tokenizer, seed
    self._step, self._begin_mark = run.step, begin_mark
    self._context_mark = {"auto": run.tokenizer.bos_id, "none": None, "always": self.prefix_token_id}[begin_mark]
    sizes: dict[str, Any] = {"batch_size": self.batch_size, "max_length": self.windows.max_length, "share": share}
    self.scorer = Scorer(run.model, self._num_steps, config=config, mesh=run.mesh, **sizes)
    self._known_ids: dict[str, list[int]] = {}  # of the texts of the requests in progress

  @property
  def eot_token_id(self) -> int:
    """The end mark."""
    return self._tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The context of a text's first token if it has no other: the begin mark, or else the end mark."""
    return self._tokenizer.eos_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

  def get_model_info(self) -> dict[str, Any]:
    """Returns the settings on which the results depend, for lm_eval's results."""
    config = self.scorer.ready.config
    return {
      "workdir": self._workdir,
      "checkpoint_step": self._step,
      "field": config.field,
      "solver": config.solver,
      "weights": config.weights,
      "num_steps": self.scorer.ready.weights.grid.num_steps,
      "dtype": config.dtype,
      "devices": self.scorer.ready.mesh.size,
      "processes": jax.process_count(),
      "begin_mark": self._begin_mark,
      "mark_before_contexts": self._context_mark,
      "mark_before_texts_without_context": self.prefix_token_id,
      "max_length": self.windows.max_length,
      "rolling_windows": str(self.windows),
      "truncated_requests": self.truncated,
      "merged_requests": self.merged,
    }

  def set_cache_hook(self, cache_hook: Any) -> None:
    """Takes lm_eval's cache of answers (--use_cache), which does not know of what model an answer is.

    Raises:
      UserError: its answers are of another model, checkpoint or setting, or of one of several processes.
    """
    super().set_cache_hook(cache_hook)
    if (kept := cache_hook.dbdict) is not None:
      if jax.process_count() > 1:  # which send the same requests, and after a kill their caches may differ
        raise UserError("--use_cache: is for one process; leave it out")
      info = {key: value for key, value in self.get_model_info().items() if key not in _NOT_OF_ANSWERS}
      ours = {**info, "run": self._hash, "seed": self._seed}
      if (theirs := kept.setdefault("diffeq_nnx", ours)) != ours:
        changed = next(key for key in ours if theirs.get(key) != ours[key])
        problem = f"holds answers for {changed}={theirs.get(changed)}, and this is {ours[changed]}"
        raise UserError(f"--use_cache: {problem}; name another file")

  @property
  def tokenizer_name(self) -> str:
    """What lm_eval's cache of requests that a chat template wrote depends on."""
    return f"{self._tokenizer.hash[:12]}-{zlib.crc32((self._tokenizer.chat_template or '').encode()):08x}"

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """Returns the tokenizer's template, or None for False; raises UserError for the name of one among several."""
    if isinstance(chat_template, str):
      raise UserError(f"apply_chat_template={chat_template}: a run has one chat template; leave the name out")
    return self._tokenizer.chat_template if chat_template else None

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """As `conversations.render`; raises UserError if the run has no template, or it refuses the messages."""
    template = template_of(self._tokenizer, f"apply_chat_template: workdir={self._workdir}")
    return render(template, chat_history, add_generation_prompt)

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
    """Encodes a context with the mark before it or, with `add_special_tokens=False`, a text without a context.

    Raises:
      UserError: the text is not Unicode.
    """
    ids = self._known_ids[string] if string in self._known_ids else self._encode([string])[0]
    if add_special_tokens is False:
      return ids or [self.prefix_token_id]  # TemplateLM takes this mark for the context, and nothing is left to score
    mark = self._context_mark
    return ids if mark is None or ids[:1] == [mark] else [mark, *ids]  # a chat template may have written it

  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    encode = functools.partial(encode_texts, self._tokenizer, name="a request's text")
    if any(isinstance(text, Rendered) for text in texts):
      return [encode([text], rendered=isinstance(text, Rendered))[0] for text in texts]
    return encode(texts)

  def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encodes both together, and cuts where the context's ids end, as TemplateLM does.

    If that leaves no continuation, since it merged into the last token of its context, the cut is where the two
    begin to differ, so that the merged token is scored. The context's ids are those of the joint encoding.
    """
    before, after = super()._encode_pair(context, continuation)
    joint = self.tok_encode(context + continuation)
    cut = len(before)
    if not after and joint != before:
      cut = len(os.path.commonprefix([before, joint]))
      self.merged += 1
    return joint[:cut] or [self.prefix_token_id], joint[cut:]

  def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Returns, for each (context, continuation), the log-probability in nats and whether it is the likeliest."""
    pairs = [request.args for request in requests]
    halves = ((type(context), half) for context, after in pairs for half in (context.rstrip(), context + after))
    texts = list(dict.fromkeys(kind(half) for kind, half in halves))
    self._known_ids = dict(zip(texts, self._encode(texts)))  # at once: TemplateLM encodes one text after another
    try:
      return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not distributed.is_main_process())
    finally:
      self._known_ids = {}

  def _loglikelihood_tokens(
    self,
    requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
    disable_tqdm: bool = False,
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    """Scores triples of the texts, or None to keep the result out of lm_eval's cache, context ids, continuation ids."""
    results = [(0.0, True)] * len(requests)  # an empty continuation is certain
    scored = [i for i, (_, _, continuation) in enumerate(requests) if continuation]
    if empty := len(requests) - len(scored):
      say(f"warning: {empty} of {len(requests)} answers are empty texts, which are always the likeliest")
    fitted = [self.windows.fit(*requests[i][1:]) for i in scored]
    self.truncated += sum(len(fit.context) < len(requests[i][1]) for i, fit in zip(scored, fitted))
    quiet = disable_tqdm or not distributed.is_main_process() or not scored
    for number, score in tqdm(self.scorer(fitted), desc="log-likelihoods", total=len(scored), disable=quiet):
      i = scored[number]
      results[i] = tuple(score)
      if requests[i][0] is not None:
        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
    return results

  def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
    """Returns the log-probability of each text in nats. Every token of it is predicted once."""
    texts = [request.args[0] for request in requests]
    totals = [total for total, _ in self.score_texts(texts, disable_tqdm)]
    for text, total in zip(texts, totals):
      self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
    return totals

  def make_windows(self, text: str) -> list[tuple[list[int], list[int]]]:
    """Returns pairs (context, continuation) that together predict each token of a text once, the first after a mark."""
    (ids,) = self._encode([text])
    return self.windows.split(ids, self.prefix_token_id)

  def score_texts(self, texts: Sequence[str], disable_tqdm: bool = False) -> list[tuple[float, int]]:
    """Returns the log-probability in nats and the number of tokens of each text."""
    windows = [(i, *window) for i, text in enumerate(texts) for window in self.make_windows(text)]
    scores = self._loglikelihood_tokens([(None, context, after) for _, context, after in windows], disable_tqdm)
    totals, counts = [0.0] * len(texts), [0] * len(texts)
    for (i, _, continuation), (logprob, _) in zip(windows, scores):
      totals[i] += logprob
      counts[i] += len(continuation)
    return list(zip(totals, counts))

  def measure_perplexity(self, documents: Iterable[str], limit: int | None = None) -> dict[str, float | int]:
    """Measures how well documents are predicted, each token once.

    Words and bytes are counted as lm_eval counts them: pieces between white space, and bytes of UTF-8.

    Returns:
      perplexity_per_token, perplexity_per_word, perplexity_per_byte, bits_per_byte, nats (the corpus' negative
      log-likelihood), and how many documents, tokens, words and bytes.
    """
    nats, counts = 0.0, collections.Counter[str]()
    documents = itertools.islice(documents, limit)
    while group := list(itertools.islice(documents, DOCUMENTS)):
      for text, (logprob, tokens) in zip(group, self.score_texts(group)):
        nats -= logprob
        counts.update(documents=1, tokens=tokens, words=len(re.split(r"\s+", text)), bytes=len(text.encode()))
    per = {f"perplexity_per_{unit}": perplexity(nats / counts[f"{unit}s"]) for unit in ("token", "word", "byte")}
    return {**per, "bits_per_byte": nats / counts["bytes"] / math.log(2), "nats": nats, **counts}

  @functools.cached_property
  def _decoder(self) -> Decoder:
    """The model, ready to generate: the scorer keeps generated weights, not the parameters that they come from."""
    run = self._open()
    if self._step not in (None, run.step):
      raise RunError(
        f"{self._workdir}: continued from checkpoint {self._step} to {run.step} meanwhile; evaluate a copy, "
        "or wait for its end"
      )
    return Decoder(run.model, self._num_steps, self.scorer.ready.config, run.mesh)

  def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
    """Generates the text that follows each context, up to a stop string, an end mark or the limit of tokens.

    Where a chat template wrote the context, what it writes after an answer ends the text too.
    As with the hf backend, a space that the tokenizer puts before a text is dropped at its beginning.

    Raises:
      UserError: a limit of tokens that the model can't read, or generation_kwargs that aren't supported.
      RunError: the run continued after its checkpoint was read.
    """
    repeats: dict[tuple[str, str], int] = collections.Counter()
    # By options and stop strings: the number of a request, its prompt, and the number of its random numbers.
    groups: dict[tuple[GenerationOptions, tuple[str, ...]], list[tuple[int, list[int], int]]]
    groups = collections.defaultdict(list)
    for number, request in enumerate(requests):
      prompt, kwargs = request.args
      options, until = self._read_options(str(request.task_name), kwargs)
      if isinstance(prompt, Rendered):
        until += template_of(self._tokenizer).end_of_turn
      room = self.windows.max_length - options.max_tokens
      ids = self.tok_encode(prompt) or [self.prefix_token_id]
      self.truncated += len(ids) > room
      asked = prompt, json.dumps(kwargs, sort_keys=True)
      row_number = zlib.crc32(f"{repeats[asked]} {prompt}".encode())  # does not depend on the batch
      repeats[asked] += 1
      groups[options, until].append((number, ids[-room:], row_number))
    distributed.require_same(list(groups.items()), "the questions")
    texts = [""] * len(requests)
    quiet = disable_tqdm or not distributed.is_main_process()
    with tqdm(total=len(requests), desc="texts generated", disable=quiet) as bar:
      for (options, until), group in groups.items():
        numbers, prompts, row_numbers = zip(*sorted(group, key=lambda one: (-len(one[1]), one[1])))
        asked = [requests[number].args[0] for number in numbers]
        options = dataclasses.replace(options, rows=self.batch_size * self._decoder.parts)
        choices: dict[str, Any] = {"stop": until, "row_numbers": row_numbers, "leading": self._tokenizer.leading}
        for n, one in continue_texts(self._decoder, self._tokenizer, asked, prompts, options, **choices):
          texts[numbers[n]] = one.text
          self.cache_hook.add_partial("generate_until", requests[numbers[n]].args, one.text)
          bar.update()
    return texts

  def check_task(self, task: ConfigurableTask) -> None:
    """Raises UserError, as `generate_until` would, if a task's texts can't be generated as it asks."""
    if task.OUTPUT_TYPE == "generate_until":
      self._read_options(str(task.config.task), task.config.generation_kwargs or {})

  def _read_options(self, task: str, given: dict[str, Any]) -> tuple[GenerationOptions, tuple[str, ...]]:
    """Reads how a task's texts are sampled, and the strings at which they stop."""
    prefix = f"task {task}: generation_kwargs: "
    longest = self.windows.max_length
    kwargs = normalize_gen_kwargs(given, min(MAX_TOKENS, max(longest // 2, 1)))
    for name, value in kwargs.items():
      if name not in GENERATION:
        raise UserError(f"{prefix}{name}={value!r}: is not supported; only {', '.join(GENERATION)} are")
    if kwargs["max_gen_toks"] >= longest:
      raise UserError(
        f"{prefix}max_gen_toks={kwargs['max_gen_toks']}: the model reads {longest} tokens, and "
        "at least one is the context's; lower it in the task's file, or with lm_eval's --gen_kwargs"
      )
    try:
      options = GenerationOptions(
        max_tokens=kwargs["max_gen_toks"],
        temperature=float(kwargs.get("temperature", 0.0)),
        top_k=kwargs.get("top_k") or None,
        top_p=kwargs.get("top_p", 1.0),
        seed=self._seed,
      )
    except (UserError, TypeError, ValueError) as error:
      raise UserError(f"{prefix}{error}") from error
    return options, tuple(stop for stop in kwargs["until"] if stop)


def _read_count(name: str, given: int | str, otherwise: str = "") -> int:
  """The number that is meant; raises UserError, which ends with `otherwise`, unless it is a whole one above 0."""
  if not str(given).isdecimal() or not int(given):
    raise UserError(f"{name}={given!r}: must be a whole number above 0{otherwise}")
  return int(given)
