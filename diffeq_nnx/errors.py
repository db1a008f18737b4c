"""The two exceptions that are reported in one line: errors that a user can correct, and errors that end a run.

Their texts quote files and names that may be a stranger's, so they are printed by `printable`.
"""

import unicodedata

_ACTING = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of control characters, surrogates, separators of lines
# Unicode's marks that change the direction of a text
_ORDERING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def first_line(error: BaseException, most: int | None = None) -> str:
  """The first line of another library's error, or its type if the message is empty; at most `most` characters."""
  lines = str(error).strip().splitlines()
  return (lines[0] if lines else type(error).__name__)[:most]


def printable(text: str) -> str:
  """The text with escapes in place of what a terminal would act on.

  These are control characters, but for line feeds and tabs, and characters that change the order of what is shown.
  """
  acting = lambda char: unicodedata.category(char) in _ACTING and char not in "\n\t" or char in _ORDERING
  return "".join(char.encode("unicode_escape").decode() if acting(char) else char for char in text)


class UserError(ValueError):
  """Invalid input, reported in one line with the key, the value, the rule and a way to correct it.

  `main.py` prints the line and exits with code 2; in a program it is an ordinary `ValueError`.
  """


class RunError(RuntimeError):
  """A run that can't continue (a loss that is not finite, a full disk), reported in one line; exit code 1."""


class Diverged(RunError):
  """A run whose loss, gradient or parameters are not finite.

  Attributes:
    step: the last train step before which all were finite.
  """

  def __init__(self, line: str, step: int):
    super().__init__(line)
    self.step = step
