"""A run as a model of lm-evaluation-harness, under the name `diffeq_nnx`."""

import collections
import inspect
import json
import re
from typing import Any, Callable, Sequence
import zlib

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from diffeq_nnx.config import Config, ModelConfig, choices, nearest
from diffeq_nnx.data import Tokenizer
from diffeq_nnx.errors import RunError, UserError
from diffeq_nnx.harness import loading
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.harness.requests import Encoder
from diffeq_nnx.harness.scoring import Score, Scorer
from diffeq_nnx.inference.generation import Decoder
from diffeq_nnx.inference.sampling import Sampling
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.model import vector_fields
from diffeq_nnx.model.model import Model
from diffeq_nnx.parallel import distributed

AUTO = 8  # batch_size=auto
MAX_TOKENS = 256  # of a generated text, where a task doesn't say; at most half of what the model reads
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")  # what a task may ask of it


@register_model("diffeq_nnx")
class DiffEqLM(LM):
  """What lm_eval asks for: log-likelihoods of continuations and of whole texts, and generated texts.

  Every process of a job gets all requests and must be given the same; they share the work.
  """

  def __init__(self, workdir: str | None = None, *, model: Model | None = None, tokenizer: Tokenizer | None = None,
               mesh: jax.sharding.Mesh | None = None, batch_size: int | str = AUTO, num_steps: int | None = None,
               dtype: str = "model", begin_mark: str = "auto", window: str = "disjoint", stride: int | None = None,
               max_length: int | None = None, share: bool = True, seed: int = 0, config: Config | None = None,
               max_batch_size: int | None = None, device: str | None = None, **unknown: Any):
    """Makes a run's newest model ready, or `model`.

    Args:
      workdir: the run's directory.
      model: in place of a run; with its tokenizer, and its mesh where it is on several devices.
      tokenizer: likewise.
      mesh: likewise.
      batch_size: sequences of `max_length` tokens that a device holds at a time (shorter ones: more), or auto: 8.
      num_steps: of the solver; None: eval.num_steps of the run, or else the model's own.
      dtype: of the computation: bfloat16, float32, or model: the model's.
      begin_mark: as for `requests.Encoder`.
      window: disjoint or sliding, where texts are longer than `max_length`.
      stride: of sliding windows: tokens that each predicts; None: half of `max_length`.
      max_length: tokens that the model reads at a time; None: model.seq_len.
      share: whether requests with a common beginning are computed together.
      seed: of generated texts that are drawn; each depends on it, its prompt and its repetition alone.
      config: the run's, changed; see `loading.run`.
      max_batch_size: lm_eval gives it; not used.
      device: likewise: JAX chooses the devices.
      **unknown: none.

    Raises:
      UserError: no run, no checkpoint, or a value outside its rule.
    """
    super().__init__()
    del max_batch_size, device
    for name in unknown:
      raise UserError(f"model_args: {name}: unknown; {nearest(name, ARGUMENTS)}")
    if (workdir is None) == (model is None) or (model is None) != (tokenizer is None) or mesh is not None and workdir:
      raise UserError("model_args: name a run, e.g. workdir=runs/tiny")
    for name, value in (("num_steps", num_steps), ("stride", stride), ("max_length", max_length)):
      if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{name}={value!r}: must be a whole number above 0")
    self._load: Callable[[], loading.Loaded] = lambda: loading.run(workdir, num_steps, config, dtype)
    if model is not None:
      self._load = lambda: loading.Loaded(model, tokenizer, mesh, num_steps, None)
    loaded = self._load()
    config = loading.computed(loaded.model.config, dtype)
    max_length = config.seq_len if max_length is None else max_length
    self._dtype, self._step, self._workdir, self._seed = dtype, loaded.step, workdir, seed
    self._num_steps = loaded.num_steps
    self.batch_size = _batch_size(batch_size)
    self.encoder = Encoder(loaded.tokenizer, *_ways(config, begin_mark, window, stride, max_length))
    self.scorer = Scorer(loaded.model, loaded.num_steps, config=config, mesh=loaded.mesh, batch_size=self.batch_size,
                         max_length=max_length, share=share)
    self._decoder: Decoder | None = None

  def get_model_info(self) -> dict[str, Any]:
    """What decides the figures, for lm_eval's results."""
    config = self.scorer.config
    return {"workdir": self._workdir, "checkpoint_step": self._step, "field": config.field, "solver": config.solver,
            "weights": config.weights, "num_steps": self.scorer.grid.num_steps, "dtype": config.dtype,
            "devices": self.scorer.mesh.size, "processes": jax.process_count(), **self.encoder.describe()}

  def apply_chat_template(self, *arguments, **keywords) -> str:
    """Raises UserError: there are none."""
    raise UserError("--apply_chat_template: runs have no chat template; leave it out")

  def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """(log-probability of the continuation, nats; whether it is the likeliest), for each (context, continuation)."""
    pairs = [request.args for request in requests]
    made: list[Score | None] = [Score(0.0, True)] * len(pairs)  # of a continuation without tokens
    wanted = {i: request for i, request in enumerate(self.encoder.pairs(pairs)) if request is not None}
    places = list(wanted)
    for number, score in self._scored(list(wanted.values()), disable_tqdm, "log-likelihoods"):
      made[places[number]] = score
      self.cache_hook.add_partial("loglikelihood", pairs[places[number]], tuple(score))
    return [tuple(score) for score in made]

  def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
    """Log-probability of each text, nats, every token of it predicted once."""
    texts = [request.args[0] for request in requests]
    totals = [total for total, _ in self.rolling(texts, disable_tqdm)]
    for text, total in zip(texts, totals):
      self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
    return totals

  def rolling(self, texts: Sequence[str], disable_tqdm: bool = False) -> list[tuple[float, int]]:
    """(log-probability in nats, number of tokens) of each text."""
    windows = [(owner, request) for owner, text in enumerate(texts) for request in self.encoder.windows(text)]
    scores = dict(self._scored([request for _, request in windows], disable_tqdm, "texts, by window"))
    totals, counts = [0.0] * len(texts), [0] * len(texts)
    for number, (owner, request) in enumerate(windows):  # in one order, whatever that of the scores
      totals[owner] += scores[number].logprob
      counts[owner] += len(request.continuation)
    return list(zip(totals, counts))

  def _scored(self, requests: Sequence[Request], quiet: bool, what: str):
    """What the scorer says, with progress shown by one process."""
    with tqdm(total=len(requests), desc=what, disable=quiet or not distributed.leads() or not requests) as bar:
      for one in self.scorer(requests):
        bar.update()
        yield one

  def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
    """The text that follows each context, up to a stop string, the end mark or the number of tokens.

    Raises:
      UserError: several processes, more tokens wanted than the model reads, or another way of generating than these.
      RunError: the run went on since its checkpoint was read.
    """
    check_generating()
    if self._decoder is None:
      loaded = self._load()  # its parameters were not kept beside the weights that are made of them
      if loaded.step != self._step:
        raise RunError(f"{self._workdir}: went on from checkpoint {self._step} to {loaded.step} meanwhile; evaluate a "
                       "copy, or wait for its end")
      config = loading.computed(loaded.model.config, self._dtype)
      self._decoder = Decoder(loaded.model, self._num_steps, config)
    made = [""] * len(requests)
    by_way: dict[str, list[int]] = {}
    times: dict[tuple[str, str], int] = collections.Counter()
    row_numbers = []
    for i, request in enumerate(requests):
      way = json.dumps(request.args[1], sort_keys=True)
      by_way.setdefault(way, []).append(i)
      prompt = request.args[0]
      row_numbers.append(zlib.crc32(f"{times[way, prompt]} {prompt}".encode(errors="surrogatepass")))
      times[way, prompt] += 1
    ways = {way: self._way(json.loads(way), requests[numbers[0]]) for way, numbers in by_way.items()}
    with tqdm(total=len(requests), desc="texts generated", disable=disable_tqdm) as bar:
      for way, numbers in by_way.items():
        sampling, until = ways[way]
        prompts = dict(zip(numbers, self._prompts([requests[i].args[0] for i in numbers], sampling.max_tokens)))
        numbers.sort(key=lambda i: (len(prompts[i]), prompts[i]), reverse=True)
        for first in range(0, len(numbers), self.batch_size):
          batch = numbers[first:first + self.batch_size]
          texts = self._generate([prompts[i] for i in batch], sampling, until, [row_numbers[i] for i in batch])
          for i, text in zip(batch, texts):
            made[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
          bar.update(len(batch))
    return made

  def _way(self, asked: dict[str, Any], request: Instance) -> tuple[Sampling, list[str]]:
    """How texts are drawn, and where they stop, as a task asks for it."""
    prefix = f"task {request.task_name}: generation_kwargs: "
    kwargs = normalize_gen_kwargs(asked, min(MAX_TOKENS, max(self.encoder.max_length // 2, 1)))
    for name, value in kwargs.items():
      if name not in GENERATION:
        raise UserError(f"{prefix}{name}={value!r}: is not supported; only {', '.join(GENERATION)} are")
    if kwargs["max_gen_toks"] >= self.encoder.max_length:
      raise UserError(f"{prefix}max_gen_toks={kwargs['max_gen_toks']}: the model reads {self.encoder.max_length} "
                      "tokens, and at least one is the context's; lower it in the task's file, or with lm_eval's "
                      "--gen_kwargs")
    try:
      sampling = Sampling(max_tokens=kwargs["max_gen_toks"], temperature=float(kwargs.get("temperature", 0.0)),
                          top_k=kwargs.get("top_k") or None, top_p=kwargs.get("top_p", 1.0), seed=self._seed)
    except (UserError, TypeError, ValueError) as error:
      raise UserError(f"{prefix}{error}") from error
    return sampling, [stop for stop in kwargs["until"] if stop]

  def _prompts(self, contexts: Sequence[str], max_tokens: int) -> list[tuple[int, ...]]:
    """Ids of contexts, without what leaves no room for `max_tokens`."""
    room = self.encoder.max_length - max_tokens
    ids = [one or (self.encoder.prefix,) for one in self.encoder.contexts(contexts)]
    self.encoder.truncated += sum(len(one) > room for one in ids)
    return [one[-room:] for one in ids]

  def _generate(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, until: Sequence[str],
                row_numbers: Sequence[int]) -> list[str]:
    """Texts that follow prompts of one way of sampling."""
    streams = [TextStream(self.encoder.tokenizer.decode, until) for _ in prompts]
    ended = [False] * len(prompts)
    for tokens_B in self._decoder.stream(prompts, sampling, row_numbers):
      for row, token in enumerate(tokens_B.tolist()):
        ended[row] = ended[row] or token == self.encoder.tokenizer.eos_id
        if not ended[row]:
          streams[row].add(token)
          ended[row] = streams[row].stopped
      if all(ended):
        break
    for stream in streams:
      stream.finish()
    return [stream.text for stream in streams]


ARGUMENTS = tuple(name for name in inspect.signature(DiffEqLM.__init__).parameters if name not in ("self", "unknown"))


def check_generating() -> None:
  """Raises UserError where tasks that generate can't run: in a job of several processes."""
  if jax.process_count() > 1:
    raise UserError("tasks that generate: run in one process; start them on one host", everywhere=True)


def _batch_size(given: int | str) -> int:
  if str(given).startswith("auto"):
    return AUTO
  if not re.fullmatch("0*[1-9][0-9]*", str(given)):
    raise UserError(f"batch_size={given!r}: must be a whole number above 0, or auto")
  return int(given)


def _ways(model: ModelConfig, begin_mark: str, window: str, stride: int | None,
          length: int) -> tuple[str, int, int | None]:
  """begin_mark, max_length and stride for `Encoder`, checked."""
  if vector_fields.FIELDS[model.field].learned_positions and length > model.seq_len:
    raise UserError(f"max_length={length}: must be 1 to model.seq_len={model.seq_len}, the positions that it has")
  for name, value, known in (("begin_mark", begin_mark, choices("harness.begin_mark")),
                              ("window", window, choices("harness.window"))):
    if value not in known:
      raise UserError(f"{name}={value!r}: must be one of {', '.join(known)}")
  if window == "disjoint":
    if stride is not None:
      raise UserError(f"stride={stride}: is of sliding windows; leave it out, or set window=sliding")
    return begin_mark, length, None
  stride = max(length // 2, 1) if stride is None else stride
  if not 1 <= stride <= length:
    raise UserError(f"stride={stride}: must be 1 to {length}, the tokens that the model reads at a time")
  return begin_mark, length, stride
