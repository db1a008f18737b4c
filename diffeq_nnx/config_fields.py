"""Rules and types of the keys that `config` declares, parsing of their values, and sections from nested dicts."""

import ast
from collections.abc import Iterable
import dataclasses
import difflib
import math
import numbers
import types
import typing
from typing import Any, ClassVar

import ml_collections

from diffeq_nnx.errors import UserError

# The rules are our own because pydantic's dataclasses nearly triple the time to import the configuration, fix the
# choices of a field when its class is made, so that a program can't add a solver, and refuse NumPy's integers. Their
# errors name neither the whole key nor the nearest name, so they would have to be translated into ours.


def one_of(default: str | None, *others: str, programs: tuple[str, ...] = ()) -> Any:
  """Makes a field whose value is one of these names or its default. `choices` lists them, and `add_choice` adds one.

  Names of `programs` are for programs alone, and not for config files.
  """
  names = [name for name in (default, *others) if name is not None]
  return dataclasses.field(default=default, metadata={"choices": names, "programs": programs})


def number(
  default: Any,
  *,
  above: float = -math.inf,
  at_least: float = -math.inf,
  below: float = math.inf,
  at_most: float = math.inf,
  minus_one: str = "",
) -> Any:
  """Makes a field whose value, unless it is None, lies within these bounds: one from below, and perhaps one from above.

  `minus_one` says what -1 stands for, where it is a value too.
  """
  if min(below, at_most) == math.inf:
    rule = f"must be above {above}" if at_least == -math.inf else f"must be {at_least} or above"
    rule = f"{rule}, or -1 for {minus_one}" if minus_one else rule
  else:
    low = f"{above} (excluded)" if at_least == -math.inf else f"{at_least} (included)"
    high = f"{below} (excluded)" if at_most == math.inf else f"{at_most} (included)"
    rule = f"must lie between {low} and {high}"

  def fits(value: Any) -> bool:
    within = value is None or above < value < below and at_least <= value <= at_most
    return within or bool(minus_one) and value == -1

  return dataclasses.field(default=default, metadata={"fits": fits, "rule": rule})


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a config, whose values are checked wherever it is made.

  Subclasses are frozen dataclasses, `class TimeConfig(Section, prefix="model.time.")`; their keys begin with `prefix`.
  A field that is itself a section has one as its default.

  Raises:
    UserError: a value that breaks the rule of its field or has another type, or two that don't fit.
  """

  prefix: ClassVar[str] = ""

  def __init_subclass__(cls, prefix: str = ""):
    cls.prefix = prefix

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = _check(f"{self.prefix}{field.name}", getattr(self, field.name), field)
      object.__setattr__(self, field.name, value)
    self._check_together()

  def _check_together(self) -> None:
    """Raises UserError: values that don't fit each other."""


def list_fields(cls: type[Section]) -> dict[str, dataclasses.Field]:
  """Returns the fields of a section, and of the sections in it, by their dotted keys."""
  found: dict[str, dataclasses.Field] = {}
  for field in dataclasses.fields(cls):
    if isinstance(field.default, Section):
      found |= list_fields(type(field.default))
    else:
      found[f"{cls.prefix}{field.name}"] = field
  return found


def _check(key: str, value: Any, field: dataclasses.Field) -> Any:
  """Returns the value of a field in its type; raises UserError if it breaks the field's rule or has another type."""
  kind = type(field.default)
  if "choices" in field.metadata:
    if value not in field.metadata["programs"]:
      _check_choice(key, value, field)
  elif issubclass(kind, Section):
    if not isinstance(value, kind):
      raise UserError(f"{key}={value!r}: must be a {kind.__name__}, not {type(value).__name__}")
  else:
    value = _convert(key, value, field.type)
    if "rule" in field.metadata and not field.metadata["fits"](value):
      infinite = isinstance(value, float) and math.isinf(value)
      raise UserError(f"{key}={value}: {'must be finite' if infinite else field.metadata['rule']}")
  return value


def _check_choice(key: str, value: Any, field: dataclasses.Field) -> None:
  known = field.metadata["choices"]
  if value not in known and (value is not None or field.default is not None):
    otherwise = "or give the --config that registers it" if key in ("model.solver", "model.field") else ""
    hint = find_near(str(value), known) or otherwise
    raise UserError(f"{key}={value!r}: must be one of {', '.join(known)}{hint and f'; {hint}'}")


def freeze(cls: type[Section], nested: Any) -> Any:
  """Turns nested dicts or a ConfigDict into a section of the type `cls`.

  Raises:
    UserError: an unknown key, a value in place of a section, or what `Section` raises.
  """
  if not isinstance(nested, (dict, ml_collections.ConfigDict)):
    raise UserError(f"{cls.prefix[:-1]}={nested!r}: must be a section of keys")
  fields = {field.name: field for field in dataclasses.fields(cls)}
  values = {}
  for name, value in nested.items():
    key = f"{cls.prefix}{name}"
    if name not in fields:
      raise UserError(f"{key}: unknown key; {nearest(name, fields)}")
    if "choices" in fields[name].metadata:
      _check_choice(key, value, fields[name])
    kind = type(fields[name].default)
    values[name] = freeze(kind, value) if issubclass(kind, Section) else value
  return cls(**values)


def _convert(key: str, value: Any, annotation: Any) -> Any:
  if value is None and isinstance(annotation, types.UnionType):
    return None
  if value == "" and isinstance(annotation, types.UnionType):
    raise UserError(f"{key}=: is empty; write a value, or {key}=None")
  wanted = plain_type(annotation)
  if wanted is tuple:
    element = typing.get_args(annotation)[0]
    if isinstance(value, (tuple, list)) and all(_is_number(v, element) for v in value):
      return tuple(map(element, value))
    example = "whole numbers; write it as '(4, 6, 8)'" if element is int else "numbers; write it as '(0.5, 0.25)'"
    raise UserError(f"{key}={value!r}: must be a tuple of {example}")
  if wanted in (int, float) and _is_number(value, wanted):
    return wanted(value)
  if type(value) is not wanted:
    example = {int: f"; write {key}=10, say", float: f"; write {key}=0.1, say"}.get(wanted, "")
    raise UserError(f"{key}={value!r}: must be of type {wanted.__name__}, not {type(value).__name__}{example}")
  return value


def _is_number(value: Any, kind: type) -> bool:
  """Whether a value is a whole number (int) or any (float), of Python or NumPy."""
  return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)


def plain_type(annotation: Any) -> type:
  """Returns int for `int | None`, tuple for `tuple[int, ...]`, and so on."""
  if isinstance(annotation, types.UnionType):
    annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
  return typing.get_origin(annotation) or annotation


def find_near(name: str, names: Iterable[str]) -> str:
  """Asks whether the name most like `name` was meant; "" if none is like it."""
  close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
  return f"did you mean {close[0]!r}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str:
  """Says what to write instead of `name`, as the end of an error line."""
  if not (names := list(names)):
    return "there are none"
  return find_near(name, names) or f"choose one of {', '.join(names)}"


def parse(kind: type, text: str) -> Any:
  """Parses a value: true and false for flags, a number alone for a tuple of one, strings as they stand."""
  if kind is bool and text.lower() in ("true", "false"):
    return text.lower() == "true"
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # what Python can't read, as {{"a"}}
    return text
  if kind is str and not isinstance(value, (str, type(None))):
    return text
  return (value,) if kind is tuple and isinstance(value, (int, float)) else value


def check_divides(key: str, value: int, of_key: str, of: int) -> None:
  """Raises UserError unless the value of a key divides that of another."""
  if of % value:
    divisors = ", ".join(str(divisor) for divisor in range(1, min(of, 10**5) + 1) if of % divisor == 0)
    raise UserError(f"{key}={value}: must divide {of_key}={of}; choose one of {divisors}")
