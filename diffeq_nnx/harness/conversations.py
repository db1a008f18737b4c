"""Conversations of lm_eval as a chat template writes them."""

from collections.abc import Sequence

from diffeq_nnx.data.chat import BadConversation, ChatTemplate
from diffeq_nnx.errors import UserError

_OPEN_END = "[the answer goes on here] "  # stands at the end of the last message until the template has written it


class Rendered(str):
  """A text that a chat template wrote, in which names of special tokens are these tokens; lm_eval passes it on."""


def render(template: ChatTemplate, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> Rendered:
  """Writes a conversation. Without the beginning of an answer the last message stays open: the text ends with it.

  As in lm_eval's hf backend, messages of the system are left out if the template refuses them.

  Raises:
    UserError: the template refuses the messages, or leaves out the last one.
  """
  if add_generation_prompt:
    return Rendered(_write(template, messages, True))
  *others, last = messages
  marked = _write(template, [*others, {**last, "content": last["content"] + _OPEN_END}], False)
  text, found, rest = marked.rpartition(_OPEN_END.strip())
  if not rest.startswith(" "):  # the template removes spaces at the end of a message
    text = text.rstrip()
  if not found or not text.rstrip().endswith(last["content"].strip()):
    raise UserError(
      f"the chat template does not write how the answer begins ({last['content']!r}, the task's gen_prefix); "
      "set harness.apply_chat_template=False, or give the run another template"
    )
  return Rendered(text)


def _write(template: ChatTemplate, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
  try:
    return template.render(messages, add_generation_prompt)
  except BadConversation:
    others = [message for message in messages if message["role"] != "system"]
    if len(others) == len(messages):
      raise
    return template.render(others, add_generation_prompt)
