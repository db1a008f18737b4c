"""The command line: every mistake is one line and exit code 2; evaluate prints one JSON line."""

import pytest

from diffeq_nnx import main


@pytest.mark.parametrize("arguments,parts", [
    (["--config.trian.steps=1"], ["trian.steps: unknown key", "did you mean 'train.steps'?"]),
    (["--config.train.step=1"], ["train.step: unknown key", "did you mean 'train.steps'?"]),
    (["--config.train.steps=abc"], ["train.steps='abc'", "must be of type int"]),
    (["--config.optimizer.peak_rate=fast"], ["optimizer.peak_rate='fast'", "must be of type float"]),
    (["--config=configs/nope.py"], ["--config=configs/nope.py", "no file"]),
    (["--config=configs/tiny.py:gtp"], ["'gtp'", "did you mean 'gpt'?"]),
    (["--job=trian"], ["--job=trian"]),
    (["--confg=configs/tiny.py"], ["confg", "config"]),
])
def test_a_mistake_in_the_flags_is_one_line(arguments, parts, capsys):
  with pytest.raises(SystemExit) as stop:
    main.parse(["main", "--config=configs/tiny.py", *arguments])
  assert stop.value.code == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: ")
  for part in parts:
    assert part in lines[0]
