"""The two exceptions that are told in one line: what a user can put right, and what ends a run."""


def first_line(error: BaseException, most: int | None = None) -> str:
  """The first line of another library's error, or its type where it says nothing; at most so many characters."""
  lines = str(error).strip().splitlines()
  return (lines[0] if lines else type(error).__name__)[:most]


class _OneLine(Exception):
  """An error told in one line.

  Attributes:
    everywhere: all processes of the job raise it alike, so that one of them may tell it.
  """

  def __init__(self, line: str, everywhere: bool = False):
    super().__init__(line)
    self.everywhere = everywhere


class UserError(_OneLine, ValueError):
  """Bad input, told in one line that names the key, the value, the rule and the way out.

  `main.py` prints the line and exits with code 2; in a program it is an ordinary `ValueError`.
  """


class RunError(_OneLine, RuntimeError):
  """A run that can't go on (a loss that is not finite, a full disk), told in one line; exit code 1."""
