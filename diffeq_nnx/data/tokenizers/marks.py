"""Which ids mark a document's begin and end: what a tokenizer's files say about it, and if they agree."""

from collections.abc import Callable, Sequence
import dataclasses
import os
from typing import Any

from diffeq_nnx.data.tokenizers.files import read_json
from diffeq_nnx.errors import UserError

_NAMING = ("tokenizer_config.json", "special_tokens_map.json")  # marks by name: "eos_token"
_NUMBERING = ("config.json", "generation_config.json")  # marks by number: "eos_token_id"


@dataclasses.dataclass(frozen=True)
class Statement:
  """One place that says which token a mark is.

  Attributes:
    where: The place, for errors.
    mark: "eos" or "bos".
    token: The token's text, or None where the place gives numbers only.
    ids: The numbers that it gives, any of which may be meant; () where it gives the text only.
  """

  where: str
  mark: str
  token: str | None = None
  ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Said:
  """All that is said about marks: which tokens they are, and (where, whether) text begins with one."""

  statements: tuple[Statement, ...] = ()
  begins: tuple[tuple[str, bool], ...] = ()

  def __add__(self, other: "Said") -> "Said":
    return Said(self.statements + other.statements, self.begins + other.begins)


def beside(directory: str, label: str) -> Said:
  """Reads what Hugging Face's files in a directory say: names and numbers of marks, and `add_bos_token`.

  Raises:
    UserError: For a file that can't be read, is no JSON object, or says something else than a mark.
  """
  statements, begins = [], []
  for name in (*_NAMING, *_NUMBERING):
    if not os.path.exists(os.path.join(directory, name)):
      continue
    said = read_json(os.path.join(directory, name), label)
    if not isinstance(said, dict):
      raise UserError(f"{label}: {name} must be a JSON object; restore the file, or remove it")
    for mark in ("eos", "bos"):
      key = f"{mark}_token" if name in _NAMING else f"{mark}_token_id"
      if said.get(key) is not None:
        statements.append(_statement(f"{key} in {name}", mark, said[key], name in _NAMING, label))
    statements += _numbered(said.get("added_tokens_decoder"), f"added_tokens_decoder in {name}")
    adds = said.get("add_bos_token")
    if not isinstance(adds, bool | None):
      raise UserError(f"{label}: add_bos_token in {name} is {adds!r}; it must be true or false, or left out")
    if adds is not None:
      begins.append((f"add_bos_token in {name}", adds))
  return Said(tuple(statements), tuple(begins))


def _statement(where: str, mark: str, value: Any, named: bool, label: str) -> Statement:
  if named:
    token = value.get("content") if isinstance(value, dict) else value
    if isinstance(token, str):
      return Statement(where, mark, token)
  else:
    ids = tuple(value) if isinstance(value, list) else (value,)
    if ids and all(type(number) is int for number in ids):
      return Statement(where, mark, ids=ids)
  raise UserError(
    f"{label}: {where} is {value!r}; give {'the name of a token' if named else 'an id'}, or remove it"
  )


def _numbered(decoder: Any, where: str) -> list[Statement]:
  """The ids that tokenizer_config.json repeats, to be compared with the vocabulary's."""
  if not isinstance(decoder, dict):
    return []
  entries = [(number, entry.get("content")) for number, entry in decoder.items() if isinstance(entry, dict)]
  return [
    Statement(where, "", token, (int(number),))
    for number, token in entries
    if isinstance(token, str) and number.isdecimal()
  ]


def resolve(
  said: Said,
  id_of: Callable[[str], int | None],
  vocab_size: int,
  begin_mark: bool | None,
  label: str,
  default_eos: str | None = None,
) -> tuple[int, int | None]:
  """The ids of the marks, where all that is said about them agrees.

  Args:
    said: All statements.
    id_of: Gives the id of a token's text, None for one that the vocabulary lacks.
    vocab_size: Number of ids.
    begin_mark: Whether documents begin with the begin mark; None: as the files say.
    label: What errors begin with.
    default_eos: The end mark where nothing is said, if the vocabulary has it.

  Returns:
    The id of the end mark, and that of the begin mark, or None where documents begin without one.

  Raises:
    UserError: For a mark that the vocabulary lacks, places that disagree, no end mark, or a begin mark of
      which nothing says whether text begins with it.
  """
  for statement in said.statements:
    _check(statement, id_of, vocab_size, label)
  eos_id = _agreed("eos", said.statements, id_of, label)
  if eos_id is None:
    eos_id = id_of(default_eos) if default_eos else None
    if eos_id is None:
      raise UserError(
        f"{label}: has no end-of-text id: no file names an eos_token"
        f"{f', and there is no {default_eos}' if default_eos else ''}; put a tokenizer_config.json with "
        '{"eos_token": "..."} beside it'
      )
  bos_id = _agreed("bos", said.statements, id_of, label)
  return eos_id, bos_id if _begins(said.begins, bos_id, eos_id, begin_mark, label) else None


def _check(statement: Statement, id_of: Callable[[str], int | None], vocab_size: int, label: str) -> None:
  known = None if statement.token is None else id_of(statement.token)
  if statement.token is not None and known is None:
    raise UserError(
      f"{label}: {statement.where} names {statement.token!r}, which the vocabulary lacks; "
      "name a token of it, or give the vocabulary that the file goes with"
    )
  for number in statement.ids:
    if not 0 <= number < vocab_size:
      raise UserError(
        f"{label}: {statement.where} names the id {number}, but ids run from 0 to {vocab_size - 1}; "
        "correct it, or give the vocabulary that the file goes with"
      )
  if known is not None and statement.ids and known not in statement.ids:
    raise UserError(
      f"{label}: {statement.where} gives {statement.token!r} the id {statement.ids[0]}, but the vocabulary "
      f"{known}; give files that go together"
    )


def _agreed(
  mark: str, statements: Sequence[Statement], id_of: Callable[[str], int | None], label: str
) -> int | None:
  """The one id that all statements about a mark allow; None where there is no statement."""
  allowed: set[int] | None = None
  first = None
  for statement in statements:
    if statement.mark != mark:
      continue
    ids = set(statement.ids) if statement.token is None else {id_of(statement.token)}
    if allowed is not None and not allowed & ids:
      raise UserError(
        f"{label}: {_telling(first, id_of)}, but {_telling(statement, id_of)}; correct one of them, "
        "or give files that go together"
      )
    allowed, first = ids if allowed is None else allowed & ids, first or statement
  if allowed is not None and len(allowed) > 1:
    raise UserError(
      f"{label}: {_telling(first, id_of)}; name the one to use in a tokenizer_config.json beside it"
    )
  return allowed.pop() if allowed else None


def _telling(statement: Statement, id_of: Callable[[str], int | None]) -> str:
  if statement.token is None:
    return f"{statement.where} is {' or '.join(map(str, statement.ids))}"
  return f"{statement.where} is {statement.token!r} (id {id_of(statement.token)})"


def _begins(
  begins: Sequence[tuple[str, bool]], bos_id: int | None, eos_id: int, begin_mark: bool | None, label: str
) -> bool:
  """Whether documents begin with the begin mark."""
  if begin_mark is not None:
    if begin_mark and bos_id is None:
      raise UserError(
        f"data.begin_mark=True: {label} has no begin mark; set data.begin_mark to None or False"
      )
    return begin_mark
  said = dict(begins)
  if len(set(said.values())) > 1:
    yes, no = (next(where for where, value in begins if value is wanted) for wanted in (True, False))
    raise UserError(
      f"{label}: text begins with the begin mark by {yes} and not by {no}; "
      "set data.begin_mark to True or False"
    )
  if True in said.values() and bos_id is None:
    raise UserError(
      f"{label}: text begins with a begin mark by {next(iter(said))}, but no file names a bos_token; "
      "name it in tokenizer_config.json, or set data.begin_mark to False"
    )
  if said or bos_id is None or bos_id == eos_id:  # GPT-2 names one mark twice: the end mark divides documents
    return True in said.values()
  raise UserError(
    f"{label}: names a begin mark (id {bos_id}), but no file says whether text begins with it; "
    "set data.begin_mark to True or False"
  )
