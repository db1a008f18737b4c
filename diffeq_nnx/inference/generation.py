"""Text generation: prompts of token ids, or texts, continued together."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from typing import Any

from diffeq_nnx.data import Tokenizer, UnknownByte
from diffeq_nnx.errors import UserError
from diffeq_nnx.inference.batching import continue_prompts
from diffeq_nnx.inference.decoding import Decoder
from diffeq_nnx.inference.sampling import GenerationOptions
from diffeq_nnx.inference.speculation import speculate
from diffeq_nnx.inference.text_stream import TextStream
from diffeq_nnx.model.model import Model


@dataclasses.dataclass(frozen=True)
class Continuation:
  """The continuation of a prompt.

  Attributes:
    prompt: the prompt.
    text: the text after it, without end mark or stop string.
    ids: its tokens, without the end mark, but with those of a stop string.
    stopped: eos (one of the tokenizer's end marks), stop (a stop string), or length.
  """

  prompt: str
  text: str
  ids: list[int]
  stopped: str


def generate(
  model: Model | Decoder,
  prompts: Sequence[Sequence[int]],
  *,
  stop_ids: Sequence[int] = (),
  num_steps: int | None = None,
  draft: Decoder | None = None,
  **options: Any,
) -> list[list[int]]:
  """Continues prompts of token ids, of any lengths.

  Args:
    model: the model, whose weights are generated for this call; or a `Decoder`, for several calls.
    prompts: token ids, at least one each; begin with the tokenizer's `bos_id` where it has one.
    stop_ids: tokens that end a row; they are left out.
    num_steps: of the solver; None: the model's own.
    draft: the same model at fewer steps, which drafts tokens for this one to verify (`inference.speculation`).
    **options: max_tokens, temperature, top_k, top_p, seed, rows, draft_tokens; see `sampling.GenerationOptions`.

  Returns:
    The new tokens of each prompt. With learned positions a row also ends at the last position.

  Raises:
    UserError: no prompts, an empty one, one longer than the positions, unknown ids, or values out of range.
  """
  ids: list[list[int]] = [[] for _ in prompts]

  def take(row: int, token: int) -> str | None:
    if token in stop_ids:
      return "stop"
    ids[row].append(token)
    return None

  for _ in _continue(draft, make_decoder(model, num_steps), prompts, GenerationOptions(**options), take):
    pass
  return ids


def _continue(draft: Decoder | None, decoder: Decoder, *arguments: Any, **more: Any) -> Iterator[tuple[int, str]]:
  """`continue_prompts`, or `speculate` with a draft."""
  if draft is None:
    return continue_prompts(decoder, *arguments, **more)
  return speculate(decoder, draft, *arguments, **more)


def generate_texts(
  model: Model | Decoder,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  *,
  stop: Sequence[str] = (),
  num_steps: int | None = None,
  draft: Decoder | None = None,
  on_text: Callable[[int, str], None] | None = None,
  **options: Any,
) -> list[Continuation]:
  """Continues texts, as beginnings of documents, up to the end of the document.

  Args:
    model: as for `generate`.
    tokenizer: the model's.
    prompts: texts, or one.
    stop: strings that end a text, or one; they are left out.
    on_text: called with (row, piece) as text is generated; the pieces of a row add up to its text.
    num_steps: as for `generate`.
    draft: as for `generate`.
    **options: as for `generate`.

  Raises:
    UserError: as `generate`; or a prompt without tokens, or with invalid Unicode.
  """
  prompts, stop = ([one] if isinstance(one, str) else one for one in (prompts, stop))
  settings, ids = GenerationOptions(**options), encode_prompts(tokenizer, prompts)
  decoder = make_decoder(model, num_steps)
  made = continue_texts(decoder, tokenizer, prompts, ids, settings, stop=stop, on_text=on_text, draft=draft)
  return [one for _, one in sorted(made, key=lambda pair: pair[0])]


def continue_texts(
  decoder: Decoder,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  prompts_ids: Sequence[Sequence[int]],
  options: GenerationOptions,
  *,
  stop: Sequence[str] = (),
  on_text: Callable[[int, str], None] | None = None,
  draft: Decoder | None = None,
  row_numbers: Sequence[int] | None = None,
  leading: str = "",
) -> Iterator[tuple[int, Continuation]]:
  """Yields (number, continuation) of texts as they end.

  `leading` is dropped where a text begins with it; `row_numbers` are as for `batching.continue_prompts`, and the rest
  is as for `generate_texts`.
  """
  if not all(stop):
    raise UserError("stop: holds an empty string, which every text contains; leave it out")
  ids: list[list[int]] = [[] for _ in prompts]
  texts = [TextStream(tokenizer.decode_within, stop, leading) for _ in prompts]
  stop_ids = find_stop_ids(tokenizer, stop)

  def emit(row: int, piece: str) -> None:
    if piece and on_text is not None:
      on_text(row, piece)

  def take(row: int, token: int) -> str | None:
    if token in tokenizer.end_ids:
      return "eos"
    ids[row].append(token)
    emit(row, texts[row].add(token))
    return "stop" if token in stop_ids or texts[row].stopped else None

  for row, reason in _continue(draft, decoder, prompts_ids, options, take, row_numbers=row_numbers):
    emit(row, texts[row].finish())
    reason = "stop" if texts[row].stopped else reason
    yield row, Continuation(prompts[row], texts[row].text, ids[row], reason)


def find_stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> set[int]:
  """Finds the ids that end a text as stop strings do.

  They are special tokens with which a stop string begins, since decoded text lacks their names, and added tokens whose
  name is a whole stop string.
  """
  found: set[int] = set()
  for one in stop:
    with contextlib.suppress(UnicodeEncodeError, UnknownByte):  # no generated text holds this
      first = tokenizer.encode_rendered(one)[:1].tolist()
      named = bool(first) and first[0] in tokenizer.added_ids and tokenizer.name_token(first[0]) == one
      if named or not tokenizer.decode_within(first):
        found.update(first)
  return found


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], name: str, rendered: bool = False) -> list[list[int]]:
  """The ids of texts, without marks but those that a chat template wrote into texts that are `rendered`.

  Raises:
    UserError: invalid Unicode, or a byte that the tokenizer lacks; the line begins with `name`.
  """
  try:
    encoded = map(tokenizer.encode_rendered, texts) if rendered else tokenizer.encode_batch(list(texts))
    return [ids.tolist() for ids in encoded]
  except UnicodeEncodeError as error:
    raise UserError(f"{name}: not Unicode text ({error.reason}); give valid UTF-8") from error
  except UnknownByte as error:
    raise UserError(f"{name}: {error}; leave the character out") from error


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], rendered: bool = False) -> list[list[int]]:
  """The ids of documents that begin with these texts; `rendered` as for `encode_texts`.

  Raises:
    UserError: no prompts, or one without tokens or with invalid Unicode.
  """
  if not len(prompts):
    raise UserError("prompts: none given; give one or more")
  begin = [] if rendered or tokenizer.bos_id is None else [tokenizer.bos_id]
  ids = [begin + one for one in encode_texts(tokenizer, prompts, "prompts", rendered)]
  if [] in ids:
    raise UserError(
      f"prompts[{ids.index([])}]={prompts[ids.index([])]!r}: gives no tokens, and this tokenizer has no "
      "begin mark; give some text"
    )
  return ids


def make_decoder(model: Model | Decoder, num_steps: int | None) -> Decoder:
  """A Decoder as it is, or one of a model; raises UserError for another number of steps than a Decoder's."""
  if not isinstance(model, Decoder):
    return Decoder(model, num_steps)
  if num_steps not in (None, model.grid.num_steps):
    raise UserError(f"num_steps={num_steps}: this Decoder was made for {model.grid.num_steps}; leave it out")
  return model
