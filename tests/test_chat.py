"""Chat templates: texts, ids and masks as transformers gives them, one line for what can't be used, and no way out."""

import json
import random

import pytest

from diffeq_nnx import data
from diffeq_nnx.config import Config, DataConfig
from diffeq_nnx.data import Options, chat
from diffeq_nnx.data.chat import ChatTemplate
from diffeq_nnx.data.documents import NOT_COUNTED, encode, read_ids
from diffeq_nnx.runs import workdir
from tests.conftest import told
from tests.test_data import prose, write_jsonl
from tests.test_published_tokenizers import model as published_model
from tests.test_tokenizer import BEGIN, END, pair_of_files, train_pairs, write

# Our own templates in two styles. [[ and ]] stand where generation blocks can be.
CHATML = """{%- if messages[0].role != 'system' %}
<|im_start|>system
You help.<|im_end|>
{% endif %}
{% for message in messages %}
  {% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\n' }}[[{{ message.content + '<|im_end|>\n' }}]]
  {%- elif message.role in ['user', 'system'] %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- else %}
    {{ raise_exception('no role ' + message.role) }}
  {%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HEADERS = """{{ bos_token }}
{%- set ns = namespace(last=0) %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set day = strftime_now('%Y') if strftime_now is defined else 'never' %}
{%- macro head(role) %}{{ '<|start|>' ~ role ~ '<|head|>\n\n' }}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
  {%- set said, rest = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
  {%- set said, rest = '', messages %}
{%- endif %}
{{- head('system') + '<Today> & now: ' + day + '\\n' + said + '<|im_end|>' }}
{%- for message in rest %}
  {%- if not message.content is string %}{% continue %}{% endif %}
  {{- head(message['role']) }}
  {%- if message['role'] == 'assistant' %}[[{{ message['content'] | trim }}<|im_end|>]]
  {%- else %}{{ message['content'] | tojson }}<|im_end|>{% endif %}
  {%- set ns.last = loop.index0 %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
STYLES = {"chatml": CHATML, "headers": HEADERS}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|head|>", "<s>"]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]


def with_blocks(template):
  return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def without_blocks(template):
  return template.replace("[[", "").replace("]]", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer's folder: byte pairs, and marks for conversations."""
  pairs = train_pairs([*prose(40), "\n\n \n\n  \n\n", "assistant\n\n user\n"], 500, SPECIAL)
  said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
  said |= {"chat_template": without_blocks(CHATML)}
  return write(tmp_path_factory.mktemp("tokenizer"), tokenizer__json=pairs, tokenizer_config__json=said)


@pytest.fixture(scope="module")
def theirs(folder):
  import transformers

  return transformers.AutoTokenizer.from_pretrained(folder)


def conversations(count=50):
  """Conversations of one to four turns, some with a system's message, some that end with a question."""
  draw = random.Random(7)
  odd = ["", " ", "\n", "\n\n", "<b>&amp;'\"", "\U0001f642 é\u3042", "<|im_end|>", "<|endoftext|>", "  end \n"]
  say = lambda: draw.choice(odd) + draw.choice(prose(40))[:40] + draw.choice(odd)
  for number in range(count):
    messages = [{"role": "system", "content": say()}] if number % 3 else []
    for _ in range(draw.randint(1, 4)):
      messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say(), "name": None}]
    yield messages + [{"role": "user", "content": say()}] * (number % 2)


@pytest.mark.parametrize("style", list(STYLES))
def test_texts_ids_and_masks_are_those_of_transformers(folder, theirs, tmp_path, style):
  """Where a template has no generation blocks, the masks are those with them."""
  (tmp_path / "chat.jinja").write_text(with_blocks(STYLES[style]))
  tokenizer = data.load_tokenizer(str(folder), DataConfig(chat_template=str(tmp_path / "chat.jinja")))
  (tmp_path / "chat.jinja").write_text(without_blocks(STYLES[style]))
  bare = chat.template_of(data.load_tokenizer(str(folder), DataConfig(chat_template=str(tmp_path / "chat.jinja"))))
  given = {"chat_template": with_blocks(STYLES[style])}
  for messages in conversations():
    text = theirs.apply_chat_template(messages, tokenize=False, **given)
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **given)
    assert tokenizer.encode_rendered(prompt).tolist() == theirs(prompt, add_special_tokens=False)["input_ids"]
    wanted = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **given)
    assert sum(wanted["assistant_masks"])
    for blocks, template in (("with", chat.template_of(tokenizer)), ("without", bare)):
      assert template.render(messages) == text, blocks
      assert template.render(messages, add_generation_prompt=True) == prompt, blocks
      tokens = encode(template.divide(messages), tokenizer, rendered=True)
      assert read_ids(tokens).tolist() == wanted["input_ids"], blocks
      assert (tokens & NOT_COUNTED == 0).astype(int).tolist() == wanted["assistant_masks"], blocks


SAID = "{{ messages[0].content ~ messages[1].content }}"


def test_the_folder_decides_about_the_template(folder, tmp_path):
  (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
  said = json.loads((folder / "tokenizer_config.json").read_text())
  write = lambda **changes: (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | changes))
  load = lambda: data.load_tokenizer(str(tmp_path))
  write(chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": SAID + "{{ eos_token }}"}])
  assert ChatTemplate(load().chat_template).render(TURNS) == "HiBye<|im_end|>"
  write(chat_template="old", eos_token={"content": "<|im_end|>"})
  (tmp_path / "chat_template.jinja").write_text(
    "  {% if true %}{{ bos_token ~ unk_token ~ eos_token }}{% endif %}" + SAID
  )
  tokenizer = load()
  assert ChatTemplate(tokenizer.chat_template).render(TURNS) == "<s><|im_end|>HiBye"
  assert tokenizer.hash == data.load_tokenizer(str(folder)).hash  # of which the template is no part
  defaults = "{% if eos_token is not defined %}{% set eos_token = 'x' %}{% endif %}{{ eos_token }}" + SAID
  (tmp_path / "chat_template.jinja").write_text(defaults)
  for _ in range(2):  # as published, and as an export writes it
    assert ChatTemplate(load().chat_template).render(TURNS) == "<|im_end|>HiBye"
    (tmp_path / "chat_template.jinja").write_text(load().chat_template)


NAMES = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
TURN = "{% for m in messages %}{{ m.content }}{{ turn_token }}{% endfor %}"
IN_TURN = {"eos_token": END, "bos_token": END, "extra_special_tokens": {"turn_token": BEGIN}}


@pytest.mark.parametrize(
  "kind,files",
  [
    ("gpt2", lambda: pair_of_files(chat_template__jinja=NAMES.replace("{{ bos_token }}", ""))),
    ("llama", lambda: {"tokenizer__model": published_model(), "chat_template__jinja": NAMES}),
    ("gpt2", lambda: pair_of_files(tokenizer_config__json={**IN_TURN, "chat_template": TURN})),
    ("gpt2", lambda: pair_of_files(tokenizer_config__json={**IN_TURN, "chat_template": {"default": TURN}})),
  ],
)
def test_variables_for_tokens_are_those_of_transformers_whatever_the_files_name(kind, files, tmp_path):
  import transformers

  given = write(tmp_path, config__json={"model_type": kind}, **files())
  theirs = transformers.AutoTokenizer.from_pretrained(given).apply_chat_template(TURNS, tokenize=False)
  assert ChatTemplate(data.load_tokenizer(str(given)).chat_template).render(TURNS) == theirs != "HiBye"


def test_a_run_keeps_the_template_beside_its_tokenizer(tmp_path):
  (tmp_path / "chat.jinja").write_text("{{ bos_token }}{{ eos_token }}" + SAID)
  tokenizer = data.load_tokenizer("bytes", DataConfig(chat_template=str(tmp_path / "chat.jinja")))
  run = str(tmp_path / "run")
  workdir.clear(run, tokenizer)
  workdir.claim(run, Config(data=DataConfig(source="none")), tokenizer, None)
  kept = workdir.tokenizer_of(run, Config())
  assert kept.chat_template == tokenizer.chat_template is not None
  assert chat.template_of(kept).render(TURNS) == chat.template_of(tokenizer).render(TURNS)
  assert data.load_tokenizer(run).chat_template == kept.chat_template
  (tmp_path / "other.jinja").write_text("{{ eos_token }}" + SAID)
  other = DataConfig(chat_template=str(tmp_path / "other.jinja"))  # beside which nothing names marks
  given = data.load_tokenizer(run, other)
  assert chat.template_of(given).render(TURNS) == tokenizer.name_token(tokenizer.eos_id) + "HiBye"


def test_characters_of_tokens_join_to_the_text(folder):
  """For every kind of tokenizer, in plain and in rendered text; plain text has the ids of `encode`."""
  text = "<|im_start|>one  \u2581 \U0001f642\n\n<s>two<|endoftext|><|im_end|> </s>\n x"
  trained = data.tokenizers.SentencePieceTokenizer
  model = data.train(prose(40), 380)
  for tokenizer in (
    data.load_tokenizer(str(folder)),
    data.load_tokenizer("bytes"),
    trained(model),
    trained(model, added=["<|im_start|>"]),
    trained(model, added=["<|im_start|>"], as_trained=True),
  ):
    for rendered in (False, True):
      ids, spans_Nx2 = tokenizer.encode_spans(text, rendered)
      assert spans_Nx2[0, 0] == 0 and spans_Nx2[-1, 1] == len(text)
      assert (spans_Nx2[:, 0] < spans_Nx2[:, 1]).all()
      joins = spans_Nx2[1:, 0] == spans_Nx2[:-1, 1]
      assert (joins | (spans_Nx2[1:] == spans_Nx2[:-1]).all(1)).all()  # bytes of one character share it
      if not rendered:
        assert ids.tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.name_token(tokenizer.eos_id) in text
    assert tokenizer.eos_id in ids and tokenizer.eos_id not in tokenizer.encode(text)


def answered(*more, **changes):
  """A record whose assistant's turn has these keys, and more turns after it."""
  return {"messages": [TURNS[0], TURNS[1] | changes, *more]}


CALLED, UNWRITTEN = {"name": "look"}, "with {} that the chat template does not write"
BAD_CONVERSATIONS = [
  ({}, 'without key "messages"', "data.messages_key names the key"),
  ({"messages": "Hi"}, "whose messages are no list", "of type str, not a list"),
  ({"messages": [{"role": "user"}]}, "with a message without role and content", "message 0 has no 'content'"),
  ({"messages": [{"role": "user", "content": ["Hi"]}]}, "with a content that is not a string", "of type list"),
  ({"messages": [*TURNS, {"role": "judge", "content": "x"}]}, "that the chat template refuses", "no role judge"),
  ({"messages": TURNS[:1]}, "without an assistant's turn", "no message has the role"),
  ({"messages": [{"role": "assistant", "content": "a\ud800"}]}, "with a lone surrogate", "'\\ud800'; remove it"),
  (answered(*TURNS, content="", tool_calls=[{"function": CALLED}]), UNWRITTEN.format("tool calls"), "tool_calls"),
  (answered(content=None, function_call=CALLED), "that the chat template refuses", "refuses the messages"),
  (answered(thinking="hm"), UNWRITTEN.format("reasoning"), "does not write thinking"),
  (answered(weight=0.5), "with a weight that is not 0 or 1", "has the weight 0.5"),
  ({"messages": [*TURNS, TURNS[0], TURNS[1] | {"weight": 0}]}, "with a weight of 0", "remove the messages"),
  ({"messages": TURNS, "tools": [{"name": "look"}]}, "with tools", "gets no tools; remove the key"),
  ({"messages": TURNS, "functions": [{"name": "look"}]}, "with functions", "gets no functions; remove the key"),
  ({"messages": TURNS, "chat_template_kwargs": {"a": 1}}, "with chat_template_kwargs", "gets no chat_template_kwargs"),
]


BAD_COMPLETIONS = [
  ({"prompt": "x", "completion": ["x"]}, 'where "completion" is not a string', "of type list"),
  ({"prompt": "x", "completion": ""}, "with an empty completion", "nothing would count"),
  (["x"], "not an object", 'must be like {"prompt": "...", "completion": "..."}'),
]
BAD = [("chat", *bad) for bad in BAD_CONVERSATIONS] + [("completion", *bad) for bad in BAD_COMPLETIONS]


@pytest.mark.parametrize("kind, record, reason, detail", BAD)
def test_a_record_that_cannot_be_used_has_one_line_and_is_counted(tmp_path, kind, record, reason, detail):
  path = tmp_path / "records.jsonl"
  good = {"messages": TURNS, "prompt": "ask", "completion": "answer"}
  write_jsonl(path, [good, record])
  options = {"records": kind, "chat_template": with_blocks(CHATML)}
  read = lambda **more: data.open_source(f"jsonl:{path}", options=Options(**options, **more))
  message = told(lambda: list(read().documents()))
  assert f"{path} line 2: " in message and detail in message and message.endswith("skip and count such records")
  source = read(bad_records="skip")
  assert len(list(source.documents())) == 1
  assert source.counts.bad == {reason: 1} and source.counts.documents == 1


def test_a_turn_of_weight_0_is_written_and_does_not_count():
  template, muted = ChatTemplate(without_blocks(CHATML)), [TURNS[0], TURNS[1] | {"weight": 0}]
  pieces = template.divide([*muted, TURNS[0], TURNS[1] | {"weight": 1}])
  assert "".join(piece.text for piece in pieces) == template.render([*TURNS, *TURNS])
  assert [piece.text for piece in pieces if piece.counts] == ["Bye<|im_end|>\n"]
  bare = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
  silent = [TURNS[0], TURNS[1] | {"content": ""}]
  for one, messages in ((template, muted), (bare, silent)):
    with pytest.raises(chat.BadConversation, match="no text of the assistant"):
      one.divide(messages)


def test_a_template_that_reads_lists_of_parts_gets_them():
  turn = "{{ m.role }}:[[{% for c in m.content %}{{ c.text }}{% endfor %};]]"
  template = ChatTemplate(with_blocks(f"{{% for m in messages %}}{turn}{{% endfor %}}"))
  assert template.render(TURNS) == "user:Hi;assistant:Bye;" and "Hi" in template.render(TURNS[:1])


def test_a_message_that_the_template_leaves_out_is_refused_and_one_that_it_changes_is_not():
  """As templates of some published models leave out what a system says."""
  writes = (
    "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content | upper if m.role == 'user' else m.content }}{% endif %}"
  )
  template = ChatTemplate(f"{{% for m in messages %}}{writes}{{% endfor %}}")
  assert template.render(TURNS) == "<user>HI<assistant>Bye"
  for act in (template.divide, template.render):
    with pytest.raises(chat.BadConversation, match=r"does not write message 0 \(system\)"):
      act([{"role": "system", "content": "Be kind."}, *TURNS])
    act([{"role": "system", "content": " "}, *TURNS])


def test_a_template_whose_turns_cannot_be_told_without_blocks_needs_them():
  """They depend on later ones; the assistant begins, and the template refuses no messages, or begins it in its loop."""
  forgetful = "{% for m in messages %}[{{ m.content if loop.last else m.content | first }}]{% endfor %}"
  first = "{{ messages[0].role }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
  in_the_loop = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};"
    "{% if loop.last and add_generation_prompt %}<assistant>{% endif %}{% endfor %}"
  )
  for text, messages in ((forgetful, [*TURNS, *TURNS]), (first, TURNS[1:]), (in_the_loop, TURNS[1:])):
    with pytest.raises(chat.BadConversation, match="needs {% generation %} blocks") as caught:
      ChatTemplate(text).divide(messages)
    assert caught.value.reason == "that need generation blocks"
  assert [piece.text for piece in ChatTemplate(in_the_loop).divide(TURNS) if piece.counts] == ["Bye;"]
  assert ChatTemplate(without_blocks(CHATML).replace("messages[0].role != 'system'", "false")).divide(TURNS[1:])
  blocks = forgetful.replace("[", "{% generation %}[").replace("]", "]{% endgeneration %}")
  counted = [piece.text for piece in ChatTemplate(blocks).divide([*TURNS, *TURNS]) if piece.counts]
  assert counted == ["[H]", "[B]", "[H]", "[Bye]"]


def test_a_template_that_counts_turns_by_their_tool_calls_writes_these():
  alternates = (
    "{% set n = namespace(i=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% generation %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
    "{% endgeneration %}{% endfor %}"
  )
  called = TURNS[1] | {"content": "", "tool_calls": [{"function": {"name": "look"}}]}
  messages = [TURNS[0], called, {"role": "tool", "content": "a bird"}, TURNS[1]]
  assert any("look" in piece.text for piece in ChatTemplate(alternates).divide(messages))


def test_blocks_out_of_order_are_refused():
  """In each other, or in text that is kept for later, where their places in the text are not known."""
  for text in ("[[<[[{{ m.content }}]]>]]", "{% set y %}[[{{ m.content }}!]]{% endset %}{{ m.content[:1] }}"):
    with pytest.raises(chat.BadConversation, match="generation blocks out of order"):
      ChatTemplate(with_blocks(f"{{% for m in messages %}}{text}{{% endfor %}}")).divide(TURNS)


def test_reasoning_has_the_names_that_transformers_gives_it(theirs):
  template = (
    "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}"
  )
  for keys in (["thinking", "reasoning"], ["reasoning_content", "thinking"]):
    messages = [{**message, **{key: f"by {key}" for key in keys}, "name": None} for message in TURNS]
    wanted = theirs.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert ChatTemplate(template).render(messages) == wanted, keys


def test_what_is_no_template_stops_at_once(tmp_path):
  path = tmp_path / "chat.jinja"

  def told_of(given):
    config = DataConfig(source="builtin", tokenizer="bytes", records="chat", chat_template=given)
    return told(lambda: data.make_recipe(config, 257, 0))

  for text in ("{% for %}", "{%for a in b%}" * 40):
    path.write_text(text)
    assert "the chat template: is no Jinja template (" in told_of(str(path)), text
  path.unlink()
  assert f"data.chat_template={path}: can't be read" in told_of(str(path))
  assert "data.tokenizer=bytes has no chat template; set data.chat_template" in told_of(None)


ATTACKS = [
  "{{ ''.__class__.__mro__[1].__subclasses__() }}",
  "{{ '' | attr('__class__') }}",
  "{{ cycler.__init__.__globals__ }}",
  "{{ self._TemplateReference__context }}",
  "{{ '{0.__class__}'.format(messages) }}",
  "{{ open('SECRET').read() }}",
  "{% include 'SECRET' %}",
  "{{ messages.append(1) }}",
  "{{ range(10 ** 9) | list }}",
  "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_of_a_stranger_reaches_nothing(tmp_path, attack):
  """It is refused in one line, or writes nothing of what it asks for."""
  (tmp_path / "secret").write_text("the secret")
  messages = [dict(one) for one in TURNS]
  try:
    written = ChatTemplate(SAID + attack.replace("SECRET", str(tmp_path / "secret"))).render(messages)
  except data.chat.BadConversation as error:
    written = str(error)
    assert "\n" not in written and "refuses the messages" in written
  assert "the secret" not in written and "<class" not in written and "0x" not in written and messages == TURNS
  assert [path.name for path in tmp_path.iterdir()] == ["secret"]
