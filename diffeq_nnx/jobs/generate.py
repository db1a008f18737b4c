"""--job=generate: text from a run's newest model."""

from collections.abc import Sequence
import json
import sys
from typing import Any

import jax

from diffeq_nnx.config import Config
from diffeq_nnx.errors import printable
from diffeq_nnx.inference.generation import Decoder, generate_texts, prompt_ids
from diffeq_nnx.inference.sampling import Sampling
from diffeq_nnx.parallel import distributed
from diffeq_nnx.runs import opening
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.training.setup import say_attention


def generate(
  config: Config, workdir: str, *, prompts: Sequence[str], num_steps: int | None = None, **sampling: Any
) -> list[dict]:
  """Continues prompts with the newest model of a run, and prints on stdout.

  For one prompt its text, on a terminal as it comes and with control characters escaped; for several a JSON line each:
  prompt, text, tokens, stopped (eos or length).

  Args:
    config: of the run.
    workdir: the run's directory; the text that it was trained on need not be there.
    prompts: texts.
    num_steps: of the solver; None: eval.num_steps, or else the model's own.
    **sampling: max_tokens, temperature, top_k, top_p, seed; see `sampling.Sampling`.

  Returns:
    What the JSON lines say.

  Raises:
    UserError: several processes, prompts or values that can't be, no checkpoint, an attention that this backend lacks.
  """
  distributed.require_one_process("generate")
  Sampling(**sampling)  # mistakes are reported before anything is read
  workdir_lib.require(workdir, config)
  config, tokenizer = opening.described(workdir, config)
  say_attention(config.model)
  prompt_ids(tokenizer, prompts)
  run = opening.read(workdir, config, tokenizer)
  with jax.set_mesh(run.mesh):
    decoder = Decoder(run.model, config.eval.num_steps if num_steps is None else num_steps)
  del run  # the decoder has what it needs
  alone = len(prompts) == 1
  streams = alone and sys.stdout.isatty()
  show = (lambda _, piece: print(printable(piece), end="", flush=True)) if streams else None
  try:
    found = generate_texts(decoder, tokenizer, prompts, on_text=show, **sampling)
  except KeyboardInterrupt:  # how a text that has been read far enough is ended
    print(file=sys.stderr)
    raise SystemExit(130) from None
  results = [{"prompt": one.prompt, "text": one.text, "tokens": len(one.ids), "stopped": one.stopped} for one in found]
  for result in results:
    print("" if streams else result["text"] if alone else json.dumps(result), flush=True)
  return results
