"""Conversations of lm_eval as a chat template writes them."""

from collections.abc import Sequence

from diffeq_nnx.data.chat import BadConversation, ChatTemplate


class Rendered(str):
  """A text that a chat template wrote, in which names of special tokens are these tokens; lm_eval passes it on."""


def render(template: ChatTemplate, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> Rendered:
  """Writes a conversation. Without the beginning of an answer the last message stays open: the text ends with it.

  As in lm_eval's hf backend, messages of the system are left out if the template refuses them.

  Raises:
    UserError: the template refuses the messages.
  """
  try:
    text = template.render(messages, add_generation_prompt)
  except BadConversation:
    others = [message for message in messages if message["role"] != "system"]
    if len(others) == len(messages):
      raise
    return render(template, others, add_generation_prompt)
  if add_generation_prompt:
    return Rendered(text)
  before, last, after = text.rpartition(messages[-1]["content"].strip())
  spaces = messages[-1]["content"][len(messages[-1]["content"].rstrip()) :]  # which the template may have removed
  return Rendered(before + last + (spaces if after.startswith(spaces) else ""))
