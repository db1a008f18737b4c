"""The programs in launch/ on small sizes: what they print, not how fast they are."""

import itertools
import json
import math
import os
import shutil

import numpy as np
import pytest

from diffeq_nnx.errors import RunError, UserError
from launch import faults
from launch.benchmarks import attention as benchmark_attention
from launch.benchmarks import generation as benchmark_generation
from launch.benchmarks import kernel_schedule
from launch.benchmarks import step_time as benchmark
from launch.breaking import table as breaking_table
from launch.experiments import compare, finetune_depths, grow_stored, inside, inside_stored, tables
from tests.conftest import told


def settings(text: str) -> list[str]:
  """The flags of a line of settings."""
  return [f"--set={one}" for one in text.split()]


SMALL = settings("model.num_steps=2 model.embed_dim=16 model.num_heads=2 model.seq_len=16")
SMALL += settings("model.dropout=0.0 train.loss_chunks=1 train.batch_size=2 train.remat=none")


def read_table(lines: list[str]) -> list[list[str]]:
  """The cells of each line of a table."""
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_faults_in_what_is_read_are_survived(finished, tmp_path, capsys, monkeypatch):
  def train(config, workdir):
    shutil.copytree(finished[1], workdir)
    shutil.copytree(finished[0].data.cache_dir, config.data.cache_dir)

  monkeypatch.setattr(breaking_table, "train", train)
  faults.main([f"--workdir={tmp_path}", "--kinds=configs,run_files,records,tokenizers", "--tries=1", "--seed=1"])
  out, err = capsys.readouterr()
  rows = read_table(out.splitlines()[2:])
  assert [int(row[1]) for row in rows] == [10, 3, 3, 10, 3]
  assert all(row[1] == row[2] for row in rows), err


def test_benchmark_prints_a_row_a_config(capsys):
  configs = ["configs/benchmark.py:builtin,gpt", "configs/benchmark.py:gpt"]
  benchmark.main([f"--configs={','.join(configs)}", "--what=loss_and_gradients", "--rounds=3", *SMALL])
  header, _, *table = capsys.readouterr().out.strip().splitlines()
  assert header.startswith("loss_and_gradients, median of 3 interleaved rounds, ")
  rows = read_table(table[2:])
  assert [row[0] for row in rows] == configs and rows[0][-1] == "1.000 (1.000 to 1.000)"
  for row in rows:
    milliseconds, tokens = float(row[1]), float(row[2].replace(",", ""))
    assert tokens == pytest.approx(2 * 16 / milliseconds * 1e3, rel=0.2)  # both are rounded
    assert float(row[4]) >= float(row[3])


def test_benchmark_attention_prints_what_this_backend_can_do(capsys):
  benchmark_attention.main(["--shapes=odd_length", "--batch=1", "--rounds=1"])
  lines = capsys.readouterr().out.splitlines()
  rows = read_table([line for line in lines if line.startswith("| odd_length")])
  ways = itertools.product(("forward", "forward+backward"), ("reference", "xla"))
  assert {(row[1], row[2]) for row in rows} == {*ways}
  assert all(float(row[3]) > 0 and float(row[4]) > 0 and row[5].endswith("%") for row in rows)


def test_benchmark_generation_prints_a_token_against_a_read(capsys):
  config = "--config=configs/tiny.py:diffeq"
  benchmark_generation.main([config, "--slots=16", "--rounds=2", "--tokens=2", "--rows=1,3", *SMALL])
  header, _, titles, _, first, values = capsys.readouterr().out.strip().splitlines()
  assert header.startswith("configs/tiny.py:diffeq, rows of 16 slots, median of 2 interleaved rounds of 2, ")
  assert first.startswith("| 1 |") and values.startswith("| 3 |")
  (values,) = read_table([values])
  assert len(values) == titles.count("|") - 1 and all(float(value.split()[0].replace(",", "")) >= 0 for value in values)
  with pytest.raises(UserError, match="--slots=17: the model has 16 positions"):
    benchmark_generation.main([config, "--slots=17", *SMALL])


@pytest.mark.parametrize(
  "program,arguments,part",
  [
    (kernel_schedule, "--chips=v4:2x2x2", "--chips=v4:2x2x2: must begin with v5e, v5p, v6e"),
    (
      grow_stored,
      "--config=configs/tiny.py:gpt --workdir=x --schedules=1x1 --set=model.solver=heun",
      "set it to sequential",
    ),
    (grow_stored, "--config=configs/tiny.py:diffeq --workdir=x --schedules=1x1", "has no layers to copy"),
    (
      finetune_depths,
      "--config=configs/finetune_small.py --from_workdir=a[bc]/x --workdir=x",
      "two runs have one name",
    ),
    (
      finetune_depths,
      "--config=configs/finetune_small.py --from_workdir=ab/x --workdir=x --set=train.steps=9 --set=train.log_every=5",
      "train.log_every=5: logs no step of the last tenth",
    ),
  ],
)
def test_a_mistake_is_one_line_before_anything_is_computed(program, arguments, part, tmp_path, monkeypatch):
  for folder in ("ab/x", "ac/x"):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / "configs").symlink_to(os.path.abspath("configs"))
  monkeypatch.chdir(tmp_path)
  assert part in told(lambda: program.main(arguments.split()))
  assert not (tmp_path / "x").exists()


def test_rounds_must_be_positive(capsys):
  with pytest.raises(SystemExit):
    benchmark_attention.main(["--rounds=0"])
  assert "--rounds: must be 1 or more" in capsys.readouterr().err


@pytest.mark.slow(reason="trains several models")
def test_the_smallest_study_end_to_end(tmp_path, capsys):
  other = "gpt@data.validation_fraction=0.3@eval.max_batches=2"  # what is compiled stays the same
  arguments = ["--config=configs/tiny.py:builtin", f"--presets=gpt,{other}", f"--plot={tmp_path}/curves.png"]
  arguments += ["--rates=3e-2", "--seeds=0,1", f"--workdir={tmp_path}/runs", *SMALL]
  arguments += settings("train.steps=4 optimizer.name=adamw data.tokenizer=bytes model.vocab_size=257")
  arguments += settings(f"data.source=text:docs/*.md eval.max_batches=1 data.cache_dir={tmp_path}/cache")
  compare.main(arguments)
  with pytest.raises(UserError, match="was trained with other keys of optimizer, train or eval"):
    compare.main([*arguments, "--set=optimizer.b2=0.5"])
  *_, first, second, _, head, _, curve, other_curve = capsys.readouterr().out.strip().splitlines()
  rows = read_table([first, second])
  assert rows[0][:2] == ["gpt", "0.03"] and rows[1][0] == other
  results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json")}
  runs = {f"gpt_rate0.03_seed{seed}.json" for seed in (0, 1)}
  assert {name for name in results if "@" not in name} == runs and len(results) == 4
  losses = [[loss for name, loss in results.items() if ("@" in name) == changed] for changed in (False, True)]
  mean = lambda cell: float(cell.split("±")[0])
  assert mean(rows[1][3]) == pytest.approx(np.mean(losses[1]) - np.mean(losses[0]), abs=1e-4)
  assert head == "| preset | step 4 |" and (tmp_path / "curves.png").stat().st_size > 10_000
  for row, (name, cell) in zip(rows, read_table([curve, other_curve])):
    assert name == row[0] and mean(cell) == pytest.approx(mean(row[2]), abs=6e-4)

  runs = f"--runs={tmp_path}/runs/gpt_rate0.03_seed*"
  inside.main([runs, "--texts=2", "--tokens=8", f"--plot={tmp_path}/inside.png"])
  cells = read_table(capsys.readouterr().out.splitlines())
  assert cells[0][1] == "gpt_rate0.03" and all("±" in cell for row in cells[2:] for cell in row[1:])
  assert (tmp_path / "inside.png").stat().st_size > 10_000

  (tmp_path / "text.txt").write_text("The river rose in the night, and the people came down to see how far. " * 4)
  # the same model on as many tokens: compiled already
  arguments = [f"--workdir={tmp_path}/runs/gpt_rate0.03_seed0", f"--text={tmp_path}/text.txt", "--ranks=1,0"]
  arguments += [f"--out={tmp_path}/stored", "--rows=2", "--tokens=7", "--texts=1", "--short=8"]
  inside_stored.main(arguments)
  parts = (json.loads((tmp_path / f"stored/{part}.json").read_text()) for part in ("states", "loss", "ranks"))
  states, loss, (shares, losses) = parts
  for whole, less in losses.values():  # of two layers, the mean and one component hold all
    assert whole == pytest.approx(loss, abs=2e-6) and abs(less - loss) > 1e-5
  assert all(share[-1] == pytest.approx(1) for name, share in shares.items() if "neighbors" not in name)
  assert len(states["state"]) == 3 and len(states["attention / state"]) == 2
  assert (tmp_path / "stored/inside.png").stat().st_size > 10_000
  assert "of other settings" in told(lambda: inside_stored.main([*arguments, "--rows=1"]))


def test_kernels_over_depth_are_approximated_as_well_as_the_rank_allows():
  rng = np.random.default_rng(0)
  kernel_UxN = rng.normal(size=(5, 40)) * np.array([[1], [4], [0.1], [2], [3]])
  gram_UxU, error = kernel_UxN @ kernel_UxN.T, {}
  for way in inside_stored.WAYS:
    whole, near = (inside_stored.combine(gram_UxU, rank, way) for rank in (4, 2))
    np.testing.assert_allclose(whole @ kernel_UxN, kernel_UxN, atol=1e-10)
    assert np.linalg.matrix_rank(near @ kernel_UxN) == 3  # the mean and two components, or three
    error[way] = np.square(near @ kernel_UxN - kernel_UxN).sum(1)
  dropped = np.linalg.svd(kernel_UxN - kernel_UxN.mean(0), compute_uv=False)[2:]
  least, relative = error.values()
  assert least.sum() == pytest.approx(np.square(dropped).sum())
  size_U = np.square(kernel_UxN).sum(1)
  unit_UxN = kernel_UxN / np.sqrt(size_U)[:, None]
  assert (relative / size_U).sum() == pytest.approx(np.square(np.linalg.svd(unit_UxN, compute_uv=False)[3:]).sum())


@pytest.mark.parametrize("killed_in,how", [(1, "kill"), (4, "SIGTERM")])
def test_a_killed_comparison_goes_on_without_training_a_finished_run_again(killed_in, how, tmp_path, monkeypatch):
  trained, finished = [], set()

  def train(config, workdir):
    trained.append(workdir)
    assert workdir not in finished
    killed = len(trained) == killed_in + 1
    if killed and how == "kill":
      raise KeyboardInterrupt
    finished.update([] if killed else [workdir])
    os.makedirs(workdir, exist_ok=True)
    with open(f"{workdir}/metrics.jsonl", "a") as file:  # SIGTERM ends a run after a checkpoint
      print(json.dumps({"step": config.train.steps - killed, "split": "validation"}), file=file)
    return {"loss": abs(config.optimizer.peak_rate - 2) + config.seed}

  monkeypatch.setattr(compare, "train", train)
  arguments = ["--config=configs/tiny.py", "--presets=gpt", "--rates=1,2,4", "--seeds=0,1,2", f"--workdir={tmp_path}"]
  with pytest.raises((KeyboardInterrupt, RunError)):
    compare.main(arguments)
  compare.main(arguments)
  assert len(finished) == 5 and trained.count(trained[killed_in]) == 2 and len(trained) == 6


def test_compare_moves_the_rates_until_the_best_lies_between_two_worse_ones(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(compare, "loss_at", lambda args, preset, rate, seed: abs(math.log2(rate)) + seed)
  arguments = ["--config=configs/tiny.py", "--presets=gpt", "--seeds=0,2", f"--workdir={tmp_path}", "--bracket"]
  compare.main([*arguments, "--rates=8,4"])
  (row,) = read_table(capsys.readouterr().out.splitlines()[-1:])
  assert row[1:3] == ["1", "1.0000 ± 1.0000"]
  assert row[5] == "0.5: 1.0000, 1: 0.0000, 2: 1.0000, 4: 2.0000, 8: 3.0000"
  monkeypatch.setattr(compare, "loss_at", lambda args, preset, rate, seed: rate)
  assert "--bracket: of 12 rates" in told(lambda: compare.main([*arguments, "--rates=8,4"]))


def test_runs_by_preset_says_what_does_not_fit(tmp_path):
  for name in ("a_seed0", "a_seed1", "b_seed0", "c"):
    (tmp_path / name).mkdir()
  assert tables.runs_by_preset(f"{tmp_path}/a_*") == {"a": [f"{tmp_path}/a_seed0", f"{tmp_path}/a_seed1"]}
  for pattern, part in (("a_*,{}/b_*", "different seeds"), ("*_seed*", "one preset"), ("d*", "none"), ("c", "_seedN")):
    assert part in told(lambda: tables.runs_by_preset(f"{tmp_path}/" + pattern.format(tmp_path)))


def test_finetune_depths_trains_once_and_prints_a_row_a_number_of_steps(finished, tmp_path, capsys, monkeypatch):
  arguments = ["--config=configs/finetune_small.py:builtin", f"--from_workdir={finished[1]}", "--presets=lora"]
  arguments += ["--steps=3", f"--workdir={tmp_path}/out"]
  arguments += settings("train.steps=2 train.log_every=1 train.batch_size=4 train.loss_chunks=1 eval.max_batches=1")
  arguments += settings(f"data.source={finished[0].data.source} data.cache_dir={tmp_path}/cache")
  arguments += settings("data.validation_fraction=0.3")
  finetune_depths.main(arguments)
  table = capsys.readouterr().out
  finetune_depths.main(arguments)
  again = capsys.readouterr()
  assert again.out == table and "nothing to train" in again.err
  header, _, row = table.splitlines()
  assert header == "| steps | before | lora | over training |"
  ((steps, before, after, _),) = read_table([row])
  assert steps == "3" and 0 < float(before) < 10 and 0 < float(after) < 10
  with pytest.raises(UserError, match="lora_3_.* was trained with other settings"):
    finetune_depths.main([*arguments, "--set=optimizer.peak_rate=0.5"])
  tune = lambda _, source, preset, count: (count, count + (preset == "full"), 0.5)
  monkeypatch.setattr(finetune_depths, "tune", tune)
  finetune_depths.main([*arguments, "--presets=full,lora", "--steps=3,4"])
  rows = read_table(capsys.readouterr().out.splitlines()[2:])
  assert [[float(cell) for cell in row] for row in rows] == [[n, n, n + 1, 0.5, n, 0.5] for n in (3, 4)]


def test_a_result_is_computed_once_and_kept_in_a_folder_that_need_not_be_there(tmp_path):
  for folder in (f"{tmp_path}/new", "memory://new"):
    assert [tables.remember(f"{folder}/one.json", lambda value=value: value) for value in (1, 2)] == [1, 1]
