"""The one exception for what a user can put right: a key, a file, a work directory."""


class UserError(ValueError):
  """Bad input, told in one line that names the key, the value, the rule and the way out.

  `main.py` prints the line and exits with code 2; in a program it is an ordinary `ValueError`.
  """


class RunError(RuntimeError):
  """A run that can't go on (a loss that is not finite, a full disk), told in one line; exit code 1."""


class ProcessLost(RunError):
  """Another process of the job has gone; each that is left tells it."""
