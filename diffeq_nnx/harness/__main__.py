"""python -m diffeq_nnx.harness: lm_eval's own command line, with the model diffeq_nnx registered.

lm_eval 0.4.13 finds the models of its own package only; no flag of its command line imports others.
"""

import os
import sys

from diffeq_nnx.errors import RunError, UserError


def main() -> None:
  """Runs lm_eval; errors are reported in one line, with exit code 2 for bad input and 1 for what ends a run."""
  try:
    from lm_eval.__main__ import cli_evaluate
  except ImportError:
    print("error: lm_eval is not installed; pip install 'diffeq-nnx[harness]'", file=sys.stderr)
    sys.exit(2)
  import jax

  from diffeq_nnx.harness import adapter, tasks
  from diffeq_nnx.parallel import distributed

  del adapter  # imported to register the model
  try:
    distributed.start(None, None, None, 100)
    if jax.process_count() > 1:
      os.environ["LOCAL_RANK"] = str(jax.process_index())  # lm_eval writes results where it is 0
    flags = [argument.partition("=")[0] for argument in sys.argv[1:]]
    if "--include_path" not in flags and any(flag == "--tasks" or flag.startswith("-t") for flag in flags):
      sys.argv += ["--include_path", tasks.GROUPS]
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # bootstrap without forks, which JAX may not survive
    with tasks.mending():
      cli_evaluate()
  except (UserError, RunError, ValueError) as error:
    if type(error) is ValueError and not str(error).startswith("Tasks not found"):  # lm_eval's own, for a wrong name
      raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1 if isinstance(error, RunError) else 2)
  finally:
    distributed.finish()


if __name__ == "__main__":
  main()
