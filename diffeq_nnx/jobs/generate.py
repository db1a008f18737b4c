"""--job=generate: text from a run's newest model."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import sys
from typing import Any

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.data.chat import template_of
from diffeq_nnx.errors import UserError, printable
from diffeq_nnx.inference.decoding import Decoder
from diffeq_nnx.inference.generation import Continuation, continue_texts, encode_prompts
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.jobs import prompt_files
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs.run import Run, say_attention


def generate(
  config: Config,
  workdir: str,
  *,
  prompt: Sequence[str] | None = None,
  prompts: str | None = None,
  out: str | None = None,
  num_steps: int | None = None,
  draft_steps: int | None = None,
  chat: bool = False,
  **options: Any,
) -> list[dict]:
  """Continues prompts with the newest model of a run, on all devices.

  Without files it prints on stdout: for one prompt its text, on a terminal as it comes and with control characters
  escaped; for several a JSON line each: prompt, text, tokens, stopped (eos, length, or with `chat` stop).

  Args:
    config: of the run; `mesh.tensor` splits the weights.
    workdir: the run's directory; the text that it was trained on need not be there.
    prompt: texts, or one.
    out: the file for the answers to `prompts`; see `jobs.prompt_files`.
    chat: whether the run's chat template writes a conversation, which is then called the prompt.
    **options: max_tokens, temperature, top_k, top_p, seed, rows, draft_tokens; see `sampling.GenerationOptions`.

  Returns:
    What the JSON lines say.

  Raises:
    UserError: no prompts or two kinds of them, values that can't be, no checkpoint, an attention that this backend
      lacks, files that can't be used.
  """
  settings = GenerationOptions(**options)  # mistakes are reported before anything is read
  if "draft_tokens" in options and draft_steps is None:
    raise UserError(f"--draft_tokens={options['draft_tokens']}: goes with --draft_steps; give both")
  if (prompt is None) == (prompts is None):
    raise UserError("--prompt, --prompts: give one of them")
  if (prompts is None) != (out is None):
    raise UserError("--prompts, --out: go together; give both, or --prompt")
  with distributed.sync_errors():
    answers = None if prompts is None or out is None else prompt_files.Answers(prompts, out)
  run = Run.open(workdir, config)
  tokenizer = run.tokenizer
  say_attention(run.config.model)
  template = template_of(tokenizer, f"--chat: workdir={workdir}") if chat else None
  if prompt is not None:
    given = [prompt] if isinstance(prompt, str) else prompt
    prompt = [prompt_files.write_prompt(one, template) for one in given]
    prompt_ids = encode_prompts(tokenizer, prompt, chat)
    distributed.require_same(prompt_ids, "--prompt: the tokens")  # a chat template may write the time of a host
  decoder, draft = _make_decoders(run, num_steps, draft_steps)
  identity = {"run": run.hash, "step": run.step, "depth_order": list(run.config.model.depth_order)}
  identity |= {"num_steps": decoder.grid.num_steps, "draft_steps": draft_steps, **dataclasses.asdict(settings)}
  del identity["rows"]  # on which no text depends
  identity |= {"chat": tokenizer.chat_template} if chat else {}
  del run  # the decoder has what it needs
  stop = () if template is None else template.end_of_turn
  continue_them = functools.partial(continue_texts, decoder, tokenizer, options=settings, stop=stop, draft=draft)
  if prompt is not None:
    return _print_texts(continue_them, prompt, prompt_ids)
  assert answers is not None
  with answers:
    texts, ids, numbers = answers.open(tokenizer, decoder, identity, template)
    for n, one in continue_them(texts, ids, row_numbers=numbers) if texts else ():
      answers.add(numbers[n], _to_record(one))
    with distributed.sync_errors():  # no process leaves while another still continues prompts
      return answers.finish()


def _make_decoders(run: Run, num_steps: int | None, draft_steps: int | None) -> tuple[Decoder, Decoder | None]:
  """The run's model at the steps that texts are generated with, and at those of the draft, if there is one."""
  steps = run.config.eval.num_steps if num_steps is None else num_steps
  for count in (steps,) if draft_steps is None else (steps, draft_steps):
    run.say_untrained(count)
  with jax.set_mesh(run.mesh):
    decoder = Decoder(run.model, steps, mesh=run.mesh)
    try:
      return decoder, None if draft_steps is None else Decoder(run.model, draft_steps, mesh=run.mesh)
    except UserError as error:
      raise UserError(f"--draft_steps: {error}") from None


def _print_texts(
  continue_them: Callable[..., Iterator[tuple[int, Continuation]]], prompts: Sequence[str], ids: list[list[int]]
) -> list[dict]:
  """Continues prompts, and prints their texts as `generate` says; returns their records."""
  alone = len(prompts) == 1
  streams = alone and sys.stdout.isatty()
  show = lambda _, piece: print(printable(piece), end="", flush=True)
  try:
    found = dict(continue_them(prompts, ids, on_text=show if streams and distributed.is_main_process() else None))
  except KeyboardInterrupt:  # how a text that has been read far enough is ended
    print(file=sys.stderr)
    distributed.finish()
    raise SystemExit(130) from None
  results = [_to_record(found[n]) for n in range(len(prompts))]
  for result in results if distributed.is_main_process() else ():
    print("" if streams else result["text"] if alone else json.dumps(result), flush=True)
  return results


def _to_record(one: Continuation) -> dict[str, Any]:
  return {"prompt": one.prompt, "text": one.text, "tokens": len(one.ids), "stopped": one.stopped}
