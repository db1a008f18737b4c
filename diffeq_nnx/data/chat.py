"""Chat templates: Jinja programs of a tokenizer's folder that write a conversation as one text.

They run as in transformers: in Jinja's sandbox, and with the same functions at hand.
"""

from collections.abc import Callable, Mapping, Sequence
import datetime
import functools
import json
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diffeq_nnx.data.documents import TEMPLATE_ARGUMENTS, Piece, count_bytes, divide
from diffeq_nnx.data.tokenizers import Tokenizer
from diffeq_nnx.errors import UserError, first_line

_LABEL = "the chat template"  # in errors
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, of which the first counts
_ANSWER = "An answer."  # with the question below, what a template is asked to write to see how it ends a turn
_EXAMPLE = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}]
_CALLS = {"tool calls": ("tool_calls",), "function calls": ("function_call",)}  # keys of a message


class BadConversation(UserError):
  """Messages that can't be used. Its `reason` is worded to follow a number, as in "3 without an assistant's turn"."""

  def __init__(self, reason: str, detail: str):
    super().__init__(detail)
    self.reason = reason


class _Generation(jinja2.ext.Extension):
  """The block `generation`, which stands around what the assistant says and changes nothing in the text."""

  tags = {"generation"}
  found = False  # whether the template has such blocks
  length = 0  # of the text before the block
  texts: list[tuple[int, str]] = []  # where each block begins in the text, if none is kept for later, and its text

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    self.found, line = True, next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

  def _note(self, caller: Callable[[], str]) -> str:
    text = caller()
    self.texts.append((self.length, text))
    return text


class ChatTemplate:
  """A chat template, ready to write conversations. Messages are dicts with "role", "content" and what else it reads."""

  def __init__(self, text: str):
    """Compiles a template, which holds the names of the marks that it uses; raises UserError if it is none."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    self._blocks = cast(_Generation, environment.extensions[_Generation.identifier])
    try:
      self._template = environment.from_string(text)
    except Exception as error:  # of Jinja, and of Python for what Jinja makes of it
      line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
      raise UserError(f"{_LABEL}: is no Jinja template ({first_line(error, 200)}{line}); correct it") from error

  def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
    """Writes a conversation, with the beginning of the assistant's answer after it if `add_generation_prompt`.

    Raises BadConversation if a message lacks a role, or a content that is a string unless it calls tools, or the
    template refuses the messages or leaves out calls or reasoning.
    """
    _check_messages(messages)
    text = self._render(messages, add_generation_prompt)
    self._check_written(messages, text, add_generation_prompt)
    return text

  @functools.cached_property
  def _reads_parts(self) -> bool:
    """Whether it writes a content only if that is a list of parts, as templates of models that see pictures may."""
    said, writes = "A question.", []
    for content in (said, [{"type": "text", "text": said}]):
      try:
        writes.append(said in self._write([{"role": "user", "content": content}], False))
      except BadConversation:
        writes.append(False)
    return writes == [False, True]

  def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    if self._reads_parts:
      parts = lambda one: [{"type": "text", "text": one["content"]}] if one.get("content") is not None else None
      messages = [{**one, "content": parts(one)} for one in messages]
    return self._write(messages, add_generation_prompt)

  def _write(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    given = [_name_reasoning({key: value for key, value in one.items() if value is not None}) for one in messages]
    blocks, parts = self._blocks, []
    blocks.length, blocks.texts = 0, []
    variables: dict[str, Any] = {"messages": given, "tools": None, "documents": None}
    try:
      for part in self._template.generate(**variables, add_generation_prompt=add_generation_prompt):
        parts.append(part)
        blocks.length += len(part)
    except Exception as error:  # whatever a template does wrong
      problem = f"{_LABEL} refuses the messages ({first_line(error, 200)}); change them, or the template"
      raise BadConversation("that the chat template refuses", problem) from error
    text = "".join(parts)
    try:
      text.encode()
    except UnicodeEncodeError as error:
      problem = f"the conversation holds a lone surrogate, {text[error.start]!a}; remove it"
      raise BadConversation("with a lone surrogate", problem) from error
    return text

  def divide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Piece, ...]:
    """Writes a conversation as pieces, of which the assistant's turns count.

    They are the text of the template's `generation` blocks. Without such blocks a turn is what follows the messages
    before it, written with `add_generation_prompt`, where these messages and the turn are written; turns with
    "weight": 0 don't count. Raises BadConversation as `render` does, and if there is no assistant's turn, turns can't
    be told from the rest, the template does not write tool calls, or weights can't be kept.
    """
    _check_messages(messages)
    turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if not turns:
      raise BadConversation("without an assistant's turn", 'no message has the role "assistant"; add one')
    counted = _find_counted(messages, turns)
    text = self._render(messages, False)
    spans = [(start, start + len(block)) for start, block in self._blocks.texts]
    moved = any(not text.startswith(block, start) for start, block in self._blocks.texts)
    self._check_written(messages, text, False)
    if not self._blocks.found:
      spans = [self._find_turn(messages, number, text) for number in counted]
    elif counted != turns:
      problem = f"{_LABEL} says by its generation blocks what counts; remove the messages with the weight 0"
      raise BadConversation("with a weight of 0", problem)
    if moved or any(start < stop for (_, stop), (start, _) in zip([(0, 0), *spans], [*spans, (len(text),) * 2])):
      problem = f"{_LABEL} writes its generation blocks out of order (in each other, or in text kept for later)"
      raise BadConversation("whose generation blocks are out of order", f"{problem}; take them out of these")
    pieces = divide(text, spans)
    if not count_bytes(pieces):
      problem = "no text of the assistant counts: it is empty, not written, or has the weight 0; remove the record"
      raise BadConversation("whose assistant says nothing", problem)
    return pieces

  @functools.cached_property
  def end_of_turn(self) -> tuple[str, ...]:
    """What is written after an assistant's turn, if anything is; it need not be a mark of the tokenizer."""
    try:
      _, found, after = self._render(_EXAMPLE, False).rpartition(_ANSWER)
    except BadConversation:
      return ()
    return tuple(after.split()[:1]) if found else ()

  @functools.cached_property
  def teaches_end(self) -> bool:
    """Whether a model learns what follows an answer, and so where to end; True where the template can't be asked."""
    try:
      learned = "".join(piece.text for piece in self.divide(_EXAMPLE) if piece.counts)
    except BadConversation:
      return True
    _, found, after = learned.rpartition(_ANSWER)
    return not found or bool(after.strip())

  def _check_written(self, messages: Sequence[Mapping[str, Any]], text: str, add_generation_prompt: bool) -> None:
    """Raises BadConversation if `text`, which the template wrote, lacks a message, calls of tools or all reasoning.

    It raises that too if arguments of a call are JSON in a string, and the text has this string in quotes. Reasoning
    may be left out where an answer is to follow, as many templates do with that of earlier turns.
    """
    for number, one in enumerate(messages):
      if (one.get("content") or "").strip() in text:
        continue
      # The template changed this content, as it may, or it writes the same whatever the content is.
      other = [*messages[:number], {**one, "content": _ANSWER}, *messages[number + 1 :]]
      if self._writes(text, other, add_generation_prompt):
        problem = f"{_LABEL} does not write message {number} ({one['role']}); give one that does, or remove the message"
        raise BadConversation("with a message that the chat template does not write", problem)
    kinds = _CALLS if add_generation_prompt else _CALLS | {"reasoning": _REASONING}
    for what, keys in kinds.items():
      found = next((key for key in keys if any(one.get(key) for one in messages)), None)
      if found is None:
        continue
      bare = [{key: value for key, value in one.items() if key not in keys} for one in messages]
      if self._writes(text, bare, add_generation_prompt):
        problem = f"{_LABEL} does not write {found}; give one that does, or remove the record"
        raise BadConversation(f"with {what} that the chat template does not write", problem)
    calls = [call for one in messages if isinstance(one.get("tool_calls"), list) for call in one["tool_calls"]]
    for call in calls:
      function = call.get("function", call) if isinstance(call, Mapping) else None
      arguments = function.get("arguments") if isinstance(function, Mapping) else None
      if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
        problem = (
          f"{_LABEL} writes the arguments of a call as a string; give them as an object, not as JSON in a string"
        )
        raise BadConversation("with arguments of calls in a string", problem)

  def _writes(self, text: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> bool:
    """Whether it writes this text for the messages; no where it refuses them, as if it counts turns by their calls."""
    try:
      return self._render(messages, add_generation_prompt) == text
    except BadConversation:
      return False

  def _find_turn(self, messages: Sequence[Mapping[str, Any]], number: int, text: str) -> tuple[int, int]:
    problem = "needs {% generation %} blocks around what the assistant says: without them its turns can't be found here"
    needed, head = BadConversation("that need generation blocks", f"{_LABEL} {problem}"), ""
    try:
      before = self._render(messages[:number], True)
      until = self._render(messages[: number + 1], False)
      if number == 0:  # a template that begins the answer in its loop over messages writes nothing for none of them
        asked = [{"role": "user", "content": "A question."}]
        head = self._render(asked, True).removeprefix(self._render(asked, False))
    except BadConversation as error:  # of a template that refuses a part of a conversation which it accepts whole
      raise needed from error
    if not (before.endswith(head) and until.startswith(before) and text.startswith(until)):
      raise needed
    return len(before), len(until)


compile_template = functools.lru_cache(8)(ChatTemplate)  # the same template for every record


def template_of(tokenizer: Tokenizer, label: str = "data.tokenizer") -> ChatTemplate:
  """Returns the chat template of a tokenizer; raises UserError, which begins with `label`, if it has none."""
  if tokenizer.chat_template is None:
    raise UserError(f"{label}: has no chat template; put one beside the tokenizer as chat_template.jinja")
  return compile_template(tokenizer.chat_template)


def refuse_arguments(record: Mapping[str, Any]) -> None:
  """Raises BadConversation if a record has arguments for the template beside its messages, such as tools."""
  if found := next((key for key in TEMPLATE_ARGUMENTS if record.get(key)), None):
    problem = f"a chat template gets no {found}; remove the key, if the conversation makes sense so"
    raise BadConversation(f"with {found}", problem)


def _find_counted(messages: Sequence[Mapping[str, Any]], turns: Sequence[int]) -> list[int]:
  """The turns that count: those without a weight, or with the weight 1; raises BadConversation for others than 0."""
  for number in turns:
    weight = messages[number].get("weight")
    if weight not in (None, 0, 1):
      problem = f"message {number} has the weight {weight!r}; give 0, which leaves it out of the loss, or 1"
      raise BadConversation("with a weight that is not 0 or 1", problem)
  return [number for number in turns if messages[number].get("weight") != 0]


def _check_messages(messages: Any) -> None:
  if not isinstance(messages, Sequence) or isinstance(messages, str):
    problem = f"the messages are of type {type(messages).__name__}, not a list"
    raise BadConversation("whose messages are no list", problem)
  if not messages:
    raise BadConversation("without messages", "the list of messages is empty")
  for number, one in enumerate(messages):
    message = one if isinstance(one, Mapping) else {}
    calls = any(message.get(key) for keys in _CALLS.values() for key in keys)
    for key in ("role",) if calls and message.get("content") is None else ("role", "content"):
      if key not in message:
        rule = 'each must be like {"role": "user", "content": "..."}'
        raise BadConversation("with a message without role and content", f"message {number} has no {key!r}; {rule}")
      if not isinstance(message[key], str):
        kind = type(message[key]).__name__
        problem = f"the {key} of message {number} is of type {kind}, not a string"
        raise BadConversation(f"with a {key} that is not a string", problem)


def _name_reasoning(message: dict[str, Any]) -> dict[str, Any]:
  """The message with its reasoning under the names that templates read, as transformers gives it."""
  reasoning = next((message[key] for key in _REASONING if key in message), None)
  return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(
  value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
  """Jinja's own filter of this name writes some characters as HTML needs them."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
