"""The two exceptions that are reported in one line: errors that a user can correct, and errors that end a run.

Their texts quote files and names that may be a stranger's, so they are printed by `printable`.
"""


def first_line(error: BaseException, most: int | None = None) -> str:
  """The first line of another library's error, or its type if the message is empty; at most `most` characters."""
  lines = str(error).strip().splitlines()
  return (lines[0] if lines else type(error).__name__)[:most]


def printable(text: str) -> str:
  """The text with escapes in place of what a terminal would act on: control characters, but for line feeds and tabs."""
  return "".join(
    char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
  )


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
