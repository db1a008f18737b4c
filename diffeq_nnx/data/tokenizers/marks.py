"""Which tokens are marks, from what the configuration and a tokenizer's files say about them."""

from collections.abc import Callable
from typing import Any

from diffeq_nnx.data.tokenizers.base import END_OF_TEXT, Marks
from diffeq_nnx.errors import UserError

# Statements about marks, value by place. "eos" and "bos": a token or an id. "ends": ids of all marks that end a
# generated text. "begins": whether documents begin with the begin mark; "otherwise_begins": if nothing else says so.
# "unknown": the token that stands for what the vocabulary lacks.
Stated = dict[str, dict[str, Any]]
KINDS = ("eos", "bos", "ends", "begins", "otherwise_begins", "unknown")


def merge(*sources: Stated) -> Stated:
  """Joins the statements of several sources, which are then compared."""
  return {what: {place: value for one in sources for place, value in one.get(what, {}).items()} for what in KINDS}


def read_name(value: Any) -> Any:
  """Returns the name that a file gives to a token, alone or in an object, or a number as it is."""
  return value.get("content") if isinstance(value, dict) else value


def find_unknown_token(stated: dict[str, Any], found: Marks, ids: dict[str, int]) -> str:
  """Returns the token that stands for what a vocabulary lacks, from the first file that names it.

  Raises UserError if there is none, or it is a mark.
  """
  place, value = next(iter(stated.items()), ("no file", None))
  name = read_name(value)
  if not isinstance(name, str) or name not in ids:
    problem = "no file names an unk_token" if value is None else f"{place} is {value!r}, not a token of the vocabulary"
    raise UserError(f"{problem}; set data.unknown_bytes=error, or correct the files")
  if ids[name] in found.ids:
    problem = f"the unknown token {name!r} is also a mark, which would divide documents"
    raise UserError(f"{problem}; set data.unknown_bytes=error, or name other marks")
  return name


def find_id(value: Any, ids: dict[str, int]) -> int | None:
  """Returns the id that a file means by a name, a number, or an object with the name; None if no token has it."""
  if isinstance(value, list) and len(value) == 1:
    (value,) = value
  name = read_name(value)
  number = ids.get(name) if isinstance(name, str) else name
  return number if type(number) is int and 0 <= number < len(ids) else None


def resolve(configured: Stated, stated: Stated, ids: dict[str, int]) -> Marks:
  """Decides the marks. What is configured comes before what files state, and statements of equal rank must agree.

  A list of end marks is no statement about the end of documents unless nothing else is; it must hold the end mark.
  Raises UserError where marks are missing, contradict each other or aren't tokens of the vocabulary.
  """
  said = {what: configured.get(what) or stated[what] for what in KINDS}
  # No tokenizer reads its marks in config.json, and published ids there may belong to another tokenizer.
  for what in ("eos", "bos"):
    said[what] = {place: one for place, one in said[what].items() if not place.endswith(" config.json")} or said[what]

  def complaint(values: dict[str, Any], problem: str) -> UserError:
    shown = ", ".join(f"{place} is {read_name(value)!r}" for place, value in values.items())
    return UserError(f"{shown}: {problem}, or correct the files")

  def agree(what: str, read: Callable[[Any], Any], problem: str, remedy: str) -> Any:
    found = {read(value) for value in said[what].values()} or {None}
    if said[what] and None in found or len(found) != 1:
      raise complaint(said[what], f"{problem if None in found else 'these differ'}; {remedy}")
    return found.pop()

  no_token = f"not one token of the vocabulary (ids 0 to {len(ids) - 1})"
  number_of = lambda value: find_id(value, ids)
  eos_id = agree("eos", number_of, no_token, "set data.end_token")
  lists: dict[str, list[Any]] = {place: [number_of(one) for one in values] for place, values in stated["ends"].items()}
  if configured.get("eos"):
    lists = {place: ends for place, ends in lists.items() if eos_id in ends and None not in ends}
  elif eos_id is None and lists:
    common = [one for one in next(iter(lists.values())) if all(one in ends for ends in lists.values())]
    eos_id = ids.get(END_OF_TEXT) if ids.get(END_OF_TEXT) in common else next(iter(common), None)
  if any(None in ends or eos_id not in ends for ends in lists.values()):
    unknown = eos_id is None or any(None in ends for ends in lists.values())
    raise complaint(said["eos"] | stated["ends"], f"{no_token if unknown else 'these differ'}; set data.end_token")
  if eos_id is None and (eos_id := ids.get(END_OF_TEXT)) is None:
    raise UserError(f"no file names an eos_token, and there is no {END_OF_TEXT}; set data.end_token")

  unclear, remedy = "unclear whether documents begin with the begin mark", "set data.begin_mark to True or False"
  begins = agree("begins", lambda value: value if isinstance(value, bool) else None, unclear, remedy)
  if begins is None:
    begins = next(iter(stated["otherwise_begins"].values()), None)
  bos_id = None if begins is False else agree("bos", number_of, no_token, "set data.begin_token")
  if begins and bos_id is None:
    raise UserError("has no begin mark; set data.begin_token to a token, or data.begin_mark to False")
  if begins is None and bos_id not in (None, eos_id):  # GPT-2 names one mark twice: the end mark divides documents
    raise UserError(f"names a begin mark (id {bos_id}), but it is {unclear}; {remedy}")
  # as in transformers, generation_config.json decides alone
  deciding = [ends for place, ends in lists.items() if "generation_config.json" in place] or lists.values()
  more_ends = dict.fromkeys(one for ends in deciding for one in ends if one != eos_id)
  return Marks(eos_id, bos_id if begins else None, tuple(more_ends))
