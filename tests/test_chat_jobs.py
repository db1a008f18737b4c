"""Conversations in jobs: generation of an assistant's turn, and downstream evaluation with a chat template."""

import functools
import itertools
import json
import re
import shutil
import sys
from unittest import mock

import pytest

from tests.harness_cases import WORDS, random_model, task_folder, without_environment  # noqa: F401  fixtures, and the environment

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

import diffeq_nnx
from diffeq_nnx import jobs
from diffeq_nnx.config import Config
from diffeq_nnx.data import load_tokenizer
from diffeq_nnx.data.chat import ChatTemplate
from diffeq_nnx.harness import __main__ as command_line
from diffeq_nnx.harness import conversations
from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.harness.packing import Request
from diffeq_nnx.jobs import prompt_files
from diffeq_nnx.jobs.harness import evaluate_downstream
from diffeq_nnx.runs.run import Run
from tests.conftest import Lazy, change, run_command, told
from tests.test_data import write_jsonl
from tests.test_export import byte_pairs
from tests.test_harness_adapter import scored

tasks, transformers = map(Lazy, ("lm_eval.tasks", "transformers"))


pytestmark = pytest.mark.filterwarnings("default")  # of lm_eval and its dependencies

CHAT = (
  "{% for one in messages %}[{{ one.role }}] {{ one.content }}<|endoftext|>\n{% endfor %}"
  "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED = [{"role": "user", "content": "Tell of rivers."}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """(a folder of Hugging Face, a run imported from it), both with the chat template."""
  folder = tmp_path_factory.mktemp("folders")
  (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT)
  tokenizer = load_tokenizer(byte_pairs(folder, " ".join(WORDS)))
  model = random_model("llama", vocab_size=tokenizer.vocab_size, seq_len=320)
  diffeq_nnx.export_hf(model, str(folder / "hf"), tokenizer=tokenizer)
  jobs.run("import", jobs.JOBS["import"].prepared(Config()), str(folder / "run"), from_hf=str(folder / "hf"))
  return folder / "hf", folder / "run"


@pytest.fixture
def talking(folders, tmp_path):
  """(config, work directory) of the run, whose chat template may be changed."""
  workdir = shutil.copytree(folders[1], tmp_path / "run")
  (workdir / "chat_template.jinja").write_text(CHAT)
  return Run.open(str(workdir)).started, workdir


def ends_turns_in(word):
  """The template, with a word after the assistant's turns; what is asked stays the same."""
  return CHAT.replace(
    "<|endoftext|>", "{% if one.role == 'user' %}<|endoftext|>{% else %} " + word + "{% endif %}{{ '' }}"
  )


def test_the_assistant_s_turn_follows_the_conversation_and_ends_as_the_template_says(talking, tmp_path, capsys):
  """Marks that the template writes are marks, and no other is added; a line that is no conversation is told."""
  config, workdir = talking
  run = Run.open(str(workdir))
  longer = [{"role": "system", "content": "Be short."}, *ASKED, {"role": "assistant", "content": "No."}, *ASKED]
  lines = [{"messages": longer}, {"prompt": "Tell of rivers."}, {"messages": [{"role": "user"}]}, {"messages": "x"}, {}]
  prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
  write_jsonl(prompts, lines)
  options = {"max_tokens": 24, "temperature": 0.0}
  found = jobs.run("generate", config, str(workdir), prompts=str(prompts), out=str(out), chat=True, **options)
  texts = [ChatTemplate(CHAT).render(messages, add_generation_prompt=True) for messages in (longer, ASKED)]
  ids = [run.tokenizer.encode_rendered(text).tolist() for text in texts]
  assert [one.count(run.tokenizer.eos_id) for one in ids] == [len(longer), 1]
  generated = diffeq_nnx.generate(run.model, ids, stop_ids=run.tokenizer.end_ids, **options)
  for one, text, expected in zip(found, texts, generated):
    assert (one["prompt"], one["text"]) == (text, run.tokenizer.decode_within(expected))
    assert one["tokens"] == len(expected)
  assert "message 0 has no 'content'" in found[2]["error"] and "type str, not a list" in found[3]["error"]
  assert "whose key `prompt` is a text" in found[4]["error"]
  assert "with --chat" in told(lambda: prompt_files.parse_prompt(json.dumps(lines[0]).encode()))
  assert "stop, which is not read" in told(lambda: prompt_files.parse_prompt(b'{"prompt": "a", "stop": "b"}'))
  assert "min_p, which is not read" in told(lambda: prompt_files.parse_prompt(b'{"prompt": "a", "min_p": 0.5}'))

  whole = found[1]["text"]
  word = re.findall("[a-z]{2,}", whole)[-1]
  (workdir / "chat_template.jinja").write_text(ends_turns_in(word))
  capsys.readouterr()
  arguments = ("--job=generate", f"--workdir={workdir}", "--prompt=Tell of rivers.", "--max_tokens=24")
  assert run_command("--num_processes=1", *arguments, "--temperature=0", "--chat") == 0
  assert capsys.readouterr().out == whole[: whole.find(word)] + "\n"


@pytest.mark.parametrize(
  "turn,end,taught",
  [
    ("<|{{ m.role }}|>{{ m.content }}<|im_end|>\n", ("<|im_end|>",), True),
    ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", ("<|im_end|>",), False),
    ("{{ m.role }}: {{ m.content }}\n", (), False),
    ("{{ raise_exception('no') }}", (), True),
  ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_after_it(turn, end, taught):
  """A model learns it where it counts; of a template that can't be asked nothing is said."""
  template = ChatTemplate("{% for m in messages %}" + turn + "{% endfor %}")
  assert (template.end_of_turn, template.teaches_end) == (end, taught)


def test_a_run_without_a_template_and_one_that_refuses_are_told_in_a_line(talking, capsys):
  _, workdir = talking
  arguments = ["--num_processes=1", "--job=generate", f"--workdir={workdir}", "--prompt=x", "--chat"]
  refusing = workdir / "chat_template.jinja"
  refusing.write_text("{{ raise_exception('only of ships') }}")
  assert run_command(*arguments) == 2
  assert "the chat template refuses the messages (only of ships)" in capsys.readouterr().err
  named = workdir / "named.jinja"
  for content, part in ((None, "named.jinja: can't be read"), ("{{ raise_exception('only of kites') }}", "of kites")):
    if content:
      named.write_text(content)
    assert run_command(*arguments, f"--config.data.chat_template={named}") == 2
    assert part in capsys.readouterr().err
  refusing.unlink()
  assert run_command(*arguments) == 2
  assert f"error: --chat: workdir={workdir}: has no chat template" in capsys.readouterr().err


# lm_eval


def test_contexts_have_the_ids_that_transformers_gives_them_and_one_begin_mark(folders):
  """The template writes the begin mark; a space at the end of a context goes to the continuation."""
  run, theirs = Run.open(str(folders[1])), transformers.AutoTokenizer.from_pretrained(folders[0])
  lm = DiffEqLM(model=run.model, tokenizer=run.tokenizer)
  for messages in (ASKED, [*ASKED, {"role": "assistant", "content": "No."}, *ASKED]):
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    context = lm.apply_chat_template(messages)
    assert lm.tok_encode(context) == ids and ids.count(run.tokenizer.bos_id) == 1
    texts = context.rstrip(), f"{context}river"
    before, whole = (theirs(text, add_special_tokens=False)["input_ids"] for text in texts)
    requests, _ = scored(lm, (context, "river"))
    assert requests == [Request(tuple(before), tuple(whole[len(before) :]))]


def test_texts_of_a_chat_end_where_the_template_ends_turns_and_exports_name_the_token(folders, tmp_path):
  run = Run.open(str(shutil.copytree(folders[1], tmp_path / "run")))

  def answer(template):
    (tmp_path / "run" / "chat_template.jinja").write_text(template)
    lm = DiffEqLM(str(tmp_path / "run"))
    kwargs = {"until": [], "max_gen_toks": 24}
    return lm.generate_until([Instance("generate_until", {}, (lm.apply_chat_template(ASKED), kwargs), 0)], True)[0]

  whole = answer(CHAT)
  word = re.findall("[a-z]{2,}", whole)[-1]
  assert answer(ends_turns_in(word)) == whole[: whole.find(word)]
  (tmp_path / "run" / "chat_template.jinja").write_text(CHAT.replace("<|endoftext|>", "<s>"))
  tokenizer = Run.open(str(tmp_path / "run")).tokenizer
  diffeq_nnx.export_hf(run.model, str(tmp_path / "hf"), tokenizer=tokenizer)
  ends = [json.loads((folder / "generation_config.json").read_text()) for folder in (folders[0], tmp_path / "hf")]
  assert [one["eos_token_id"] for one in ends] == [tokenizer.eos_id, [tokenizer.eos_id, tokenizer.bos_id]]


def test_an_open_message_ends_the_text_as_in_transformers(tmp_path):
  theirs = transformers.AutoTokenizer.from_pretrained(byte_pairs(tmp_path, " ".join(WORDS)))
  contents = ["The answer is", "The answer is ", " The answer\n", "a", " "]
  for content, trim in itertools.product(contents, ["", "| trim"]):
    text = CHAT.replace("one.content", f"one.content {trim}")
    messages = [*ASKED, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(messages, chat_template=text, tokenize=False, continue_final_message=True)
    assert conversations.render(ChatTemplate(text), messages, False) == expected
  thoughtless = ChatTemplate(CHAT.replace("one.content", "one.content.split('</think>')[-1]"))
  messages = [*ASKED, {"role": "assistant", "content": "<think></think>Answer:"}]
  assert "does not write how the answer begins" in told(lambda: conversations.render(thoughtless, messages, False))


def test_system_messages_are_left_out_where_the_template_refuses_them():
  refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
  system = {"role": "system", "content": "Be short."}
  found = conversations.render(ChatTemplate(refusing), [system, *ASKED], True)
  assert found == ChatTemplate(CHAT).render(ASKED, True) and isinstance(found, conversations.Rendered)
  line = told(lambda: conversations.render(ChatTemplate("{{ raise_exception('never') }}"), [system, *ASKED], True))
  assert "never" in line


def test_the_job_and_lm_eval_s_command_line_apply_the_template(talking, task_folder, tmp_path, monkeypatch, capsys):
  config, workdir = talking
  keys = {"tasks": "choice", "include_path": str(task_folder), "default_tasks": False, "limit": 4, "num_fewshot": (1,)}
  changed, real = change(config, harness=keys | {"apply_chat_template": True}), DiffEqLM.apply_chat_template
  with mock.patch.object(DiffEqLM, "apply_chat_template", autospec=True, side_effect=real) as writing:
    evaluate_downstream(changed, str(workdir))
  assert {len(call.args[1]) for call in writing.call_args_list} == {3}  # an example as turns
  table = (workdir / "harness" / "table.md").read_text()
  assert "the run's chat template writes the contexts: examples are turns" in table
  quick = functools.partial(tasks.TaskManager, include_defaults=False)  # the default tasks take seconds
  monkeypatch.setattr("lm_eval.tasks.TaskManager", quick)
  monkeypatch.setattr("diffeq_nnx.parallel.distributed.start", lambda *arguments: None)  # a device was used already
  words = f"lm_eval --model diffeq_nnx --model_args workdir={workdir} --limit 4 --num_fewshot 1 --apply_chat_template"
  more = ["--fewshot_as_multiturn", "True", "--tasks", str(task_folder / "choice.yaml"), "--output_path", str(tmp_path)]
  monkeypatch.setattr(sys, "argv", [*words.split(), *more])
  command_line.main()
  (path,) = tmp_path.rglob("results_2*.json")
  there, here = json.loads(path.read_text()), json.loads((workdir / "harness" / "results_1shot.json").read_text())
  assert there["chat_template"] == CHAT
  assert there["results"]["choice"]["acc,none"] == here["results"]["choice"]["acc,none"]
  (workdir / "chat_template.jinja").unlink()
  assert "apply_chat_template: workdir=" in told(lambda: evaluate_downstream(changed, str(workdir)))
