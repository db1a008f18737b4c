"""Kill and resume: as if nothing had happened, bit for bit."""

import json
import os
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.processes import Process

SMALL = [
  "--config=configs/tiny.py",
  *(f"--config.model.{one}" for one in ("num_steps=2", "embed_dim=32", "vocab_size=512", "seq_len=64")),
  *(f"--config.{one}" for one in ("train.steps=16", "train.log_every=1", "checkpoint.every=8", "eval.every=8")),
  "--config.eval.max_batches=1",
  "--config.train.peak_tflops=0.1",
]


def records(workdir) -> list[dict]:
  """metrics.jsonl without the figures that depend on the clock."""
  clock = {"seconds", "tokens_per_second", "waiting_for_data", "utilization", "utilization_with_generator"}
  with open(workdir / "metrics.jsonl", encoding="utf-8") as file:
    found = [json.loads(line) for line in file if line.endswith("\n")]
  return [{k: v for k, v in one.items() if k not in clock} for one in found if one["split"] != "time"]


def arrays(workdir, step) -> dict[str, np.ndarray]:
  """Every array of a checkpoint, by path."""
  found = {}
  for item in ("params", "optimizer", "counters"):
    tree = ocp.StandardCheckpointer().restore(os.path.abspath(workdir / "checkpoints" / str(step) / item))
    found |= {
      item + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
  return found


STANDS_STILL = """
import time
from absl import app
from diffeq_nnx import main
from diffeq_nnx.parallel import distributed

def reached(self):
  time.sleep(300 * (self._calls == 12))
  return told(self)

told, distributed.Preemption.reached = distributed.Preemption.reached, reached
app.run(main.main, flags_parser=main.parse)
"""


def start(workdir, program=None) -> Process:
  """The main program on a small model."""
  return Process([*SMALL, f"--config.data.cache_dir={workdir.parent}/cache", f"--workdir={workdir}"], program=program)


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  uninterrupted = start(whole)
  assert uninterrupted.end(240) == 0, uninterrupted.lines[-20:]
  process, deadline = start(broken, STANDS_STILL), time.monotonic() + 200
  while not (broken / "checkpoints" / "8").is_dir() and time.monotonic() < deadline:
    time.sleep(0.005)
  process.send(signal.SIGKILL)
  assert process.end() == -signal.SIGKILL
  assert 8 < max(record["step"] for record in records(broken)) < 16
  resumed = start(broken)
  assert resumed.end(240) == 0 and "continuing from the checkpoint of step 8" in "\n".join(resumed.lines)
  assert len(records(whole)) == 18 and records(broken) == records(whole)  # 16 of training, 2 of validation
  ours, theirs = arrays(broken, 16), arrays(whole, 16)
  assert ours.keys() == theirs.keys() and len(ours) > 20
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
