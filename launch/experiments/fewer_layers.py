"""Ways to fewer layers for a published checkpoint: the loss of each before and after the same healing, as a table.

  python -m launch.experiments.fewer_layers --workdir=runs/smol --out=runs/fewer --depths=30,27,24,20,15 \\
      [--recipes=fitted,greedy,influence,merged,uniform] [--healing=none,teacher,alone,lora_teacher,lora,elastic] \\
      [--seeds=0,1] [--points=20,60,200] [--other=text:data/wikitext2.test.txt] [--set=KEY=VALUE] \\
      --set=data.source=jsonl:data/english/*train*.jsonl --set=data.validation=jsonl:data/english/*validation*.jsonl

--workdir is a run with stored weights, as --job=import makes it. A recipe says which layers a model of fewer has:

  greedy     those that --job=rank_steps leaves, by loss
  fitted     the same, fitted to the states of the whole model by --job=discretize with --fit_tokens
  influence  those of the largest block influence (Men et al. 2024, ShortGPT, arXiv 2403.03853)
  merged     groups of four neighbors become one, theta_1 + sum_k (theta_k - theta_1) (Yang et al. 2024, LaCo, arXiv
             2402.11187); the groups are chosen one after the other by loss on the first batch of the same text, where
             LaCo compares last states
  uniform    W(t) through the layers, made by --job=continuous, at equal steps

Each is then fine-tuned (--job=finetune) on the same tokens, with the run itself as its teacher or alone, all weights or
adapters of rank 16; with `none` it is evaluated as it is. With `elastic` one run serves all of `--depths`: each train
step draws one of them, and the full depth teaches it. That needs a recipe with an order of layers, and one point.
Losses are validation losses in nats per token, at the train steps `--points` of that one fine-tuning. The price is the
difference at the last point from the full depth after the same healing without a teacher, if that is among the depths.
With `--other`, two more columns have the loss on the whole of that text at the end, and its price. Several seeds give
means with standard errors; prices are paired. Everything is kept in --out, and the same command continues after an
interruption.
"""

import dataclasses
import os
import re
import shutil

import jax
import numpy as np

from diffeq_nnx import config as config_lib
from diffeq_nnx import files, jobs
from diffeq_nnx.analysis import ranking
from diffeq_nnx.config import RUN_FILE, Config
from diffeq_nnx.errors import UserError
from diffeq_nnx.jobs.deriving import load_text, make_batches
from diffeq_nnx.jobs.rank_steps import RESULT
from diffeq_nnx.model import grids
from diffeq_nnx.model.weight_sources import GridWeights
from diffeq_nnx.runs import workdir as workdir_lib
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training.evaluate import Evaluator
from diffeq_nnx.training.report import read_metrics
from diffeq_nnx.training.step import place_state
from launch import programs
from launch.experiments import tables

GROUP = 4  # neighbors that become one layer
TOKENS = 8192  # that the layers are chosen by
FIT_TOKENS = 32768  # that layers are fitted on
OF_ONE_DEPTH = ("fitted", "merged")  # recipes that make a run for each number of layers
HEALING = ("none", "teacher", "alone", "lora_teacher", "lora", "elastic")
LORA = ("model.lora.rank=16", "model.lora.alpha=32.0", "model.lora.embeddings=False")


def copy_unranked(workdir: str, place: str) -> None:
  """Copies a run, without an order of its layers, unless that is done."""
  if not workdir_lib.holds_run(place):
    with files.replacing_folder(place, RUN_FILE) as part:
      shutil.copytree(files.absolute(workdir), part, dirs_exist_ok=True)
      workdir_lib.set_depth_order(part, ())


def count_ranked(place: str) -> int:
  """How many layers the ranking of a run by loss has left out."""
  path = os.path.join(place, RESULT)
  return len(files.read_json(path)["left_out"]) if files.exists(path) else 0


def prepare(recipe: str, num_steps: int, args) -> str:
  """The run that a recipe is fine-tuned from at a depth, made unless it is there."""
  started = Run.open(args.workdir).started  # whose rows of text --set may shorten, which only fine-tuning does
  config = config_lib.apply_settings(started, [one for one in args.set if not one.startswith("model.")])
  place = os.path.join(args.out, f"{recipe}_{num_steps}" if recipe in OF_ONE_DEPTH else recipe)
  if num_steps == config.model.num_steps:
    return args.workdir
  if recipe in ("greedy", "influence"):
    copy_unranked(args.workdir, place)
    by = "loss" if recipe == "greedy" else recipe
    fewest, order = min(args.depths), Run.open(place).started.model.depth_order
    if not order or by == "loss" and count_ranked(place) < config.model.num_steps - fewest:
      config = dataclasses.replace(config, model=dataclasses.replace(config.model, depth_order=order))
      jobs.run("rank_steps", config, place, num_steps=fewest if by == "loss" else None, tokens=TOKENS, by=by)
  elif workdir_lib.holds_run(place):
    pass
  elif recipe == "uniform":
    jobs.run("continuous", jobs.JOBS["continuous"].prepared(started), place, from_workdir=args.workdir)
  elif recipe == "fitted":
    source, short = prepare("greedy", num_steps, args), dataclasses.replace(config.eval, batch_size=1, max_batches=1)
    config = dataclasses.replace(config, model=Run.open(source).started.model, eval=short)
    jobs.run("discretize", config, place, from_workdir=source, num_steps=num_steps, fit_tokens=FIT_TOKENS)
  else:
    merge(args.workdir, config, num_steps, place)
  return place


def merge(workdir: str, config: Config, num_steps: int, place: str) -> None:
  """Writes a run of `num_steps` layers, some of which are groups of neighbors."""
  run = Run.open(workdir)
  model, S = run.config.model, run.config.model.num_steps
  with jax.set_mesh(run.mesh):
    corpus, params = load_text(config, run), run.params
    batch = make_batches(config, corpus, TOKENS)[0]
    sets, kept = params["weight_source"]["stored"], list(range(S))
    grid = grids.make_grid(model)

    def join(sets, kept, group):
      first, *others = group
      add = lambda leaf: leaf.at[first].add(sum(leaf[other] - leaf[first] for other in others))
      return jax.tree.map(add, sets), [step for step in kept if step not in others]

    def loss(sets, kept):
      weights, sizes_S, none_S = GridWeights(sets, grid), np.asarray(grid.keep(kept).sizes), np.full(S, S, np.int32)
      return float(ranking.measure(model, params, weights, batch, sizes_S, none_S, 1).losses_S[0])

    while len(kept) > num_steps:
      size = min(GROUP, len(kept) - num_steps + 1)
      groups = [kept[i : i + size] for i in range(len(kept) - size + 1)]
      losses = [loss(*join(sets, kept, group)) for group in groups]
      best = groups[int(np.argmin(losses))]
      sets, kept = join(sets, kept, best)
      print(f"merged {best}: {len(kept)} layers", flush=True)
    sets = jax.tree.map(lambda leaf: leaf[np.asarray(kept)], sets)
    small = dataclasses.replace(run.started, model=dataclasses.replace(run.started.model, num_steps=num_steps))
    state = place_state(small, {**params, "weight_source": {"stored": sets}}, run.mesh)
    Run.create(small, place, run.tokenizer, None, state, source=run.hash)


def evaluate(args, recipe: str, num_steps: int) -> float:
  """The validation loss of a recipe as it is, measured unless it is known."""
  source = prepare(recipe, num_steps, args)
  asked = None if recipe in OF_ONE_DEPTH else num_steps
  path = os.path.join(args.out, f"{recipe}_{num_steps}_before.json")
  return tables.remember(path, lambda: measure(args, source, args.set, asked))


def read_config(args, workdir: str, settings: list[str]) -> Config:
  """The config of a run with other settings, validated as the whole checkpoint is: `fitted` was made without that."""
  config = dataclasses.replace(Run.open(workdir).started, eval=Run.open(args.workdir).started.eval)
  return config_lib.apply_settings(config, settings)


def measure(args, workdir: str, settings: list[str], num_steps: int | None) -> float:
  """The validation loss of a run with other settings, at a number of layers, or its own."""
  run, config = Run.open(workdir), read_config(args, workdir, settings)
  with jax.set_mesh(run.mesh):
    return Evaluator(config, load_text(config, run), run.mesh, num_steps)(run.params)["loss"]


def heal(args, recipe: str, num_steps: int, healing: str, seed: int) -> list[float]:
  """Fine-tunes, unless that is done; the validation losses before and at `--points`, and that of `--other`."""
  started = Run.open(args.workdir).started
  elastic, depths = healing == "elastic", tuple(sorted({*args.depths, started.model.num_steps}))
  source = prepare(recipe, depths[0] if elastic else num_steps, args)
  name = f"{recipe}_all" if elastic else f"whole_{num_steps}" if source == args.workdir else f"{recipe}_{num_steps}"
  workdir = os.path.join(args.out, f"{name}_{healing}_seed{seed}")
  every = int(np.gcd.reduce(args.points))
  settings = [*args.set, f"seed={seed}", f"eval.every={every}", f"train.steps={max(args.points)}"]
  settings += LORA if "lora" in healing else ()
  settings += [f"train.teacher={args.workdir}"] if "teacher" in healing else ()
  settings += [f"train.step_counts={depths}", "train.self_distillation=True"] if elastic else ()
  asked = None if elastic or recipe in OF_ONE_DEPTH else num_steps
  config = read_config(args, source, settings)
  if elastic and workdir_lib.holds_run(workdir) and Run.open(workdir).started.train.step_counts != depths:
    raise UserError(f"{workdir}: was trained at other --depths; give another --out")
  tables.fine_tune(config, workdir, source, asked, settings)
  after, depth = f"{workdir}_{num_steps}_after_{max(args.points)}", num_steps if elastic else None
  other = []
  if args.other:
    text = [f"data.source={args.other}", f"data.validation={args.other}", "eval.max_batches=None"]
    path = f"{after}_{re.sub('[^a-z0-9]+', '_', args.other.lower())}.json"
    other.append(tables.remember(path, lambda: measure(args, workdir, text, depth)))
  if elastic:
    healed = tables.remember(f"{after}.json", lambda: measure(args, workdir, args.set, depth))
    return [evaluate(args, recipe, num_steps), healed, *other]
  losses = {record["step"]: record["loss"] for record in read_metrics(workdir, "validation")}
  if missing := [step for step in args.points if step not in losses]:
    raise UserError(f"{workdir}: was not validated at step {missing[0]}; give other --points, or another --out")
  return [*(losses[step] for step in (0, *args.points)), *other]


def main(argv: list[str] | None = None) -> None:
  """Runs everything and prints the table."""
  recipes = ["fitted", "greedy", "influence", "merged", "uniform"]
  study = {"recipes": recipes, "healing": ["teacher"], "depths": [30, 27, 24, 20, 15], "points": [20, 60, 200]}
  parser = programs.make_parser(__doc__, workdir=str, out=str, **study, seeds=[0], other=None)
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  args = parser.parse_args(argv)
  if "elastic" in args.healing and (len(args.points) > 1 or {*OF_ONE_DEPTH} & {*args.recipes}):
    parser.error("--healing=elastic: give one of --points, and recipes with one run for all depths")
  for name, known in (("recipes", recipes), ("healing", HEALING)):
    if unknown := {*getattr(args, name)} - {*known}:
      parser.error(f"--{name}={','.join(sorted(unknown))}: choose from {', '.join(known)}")
  ordered = bool(Run.open(args.workdir).started.model.depth_order)  # by which all recipes would choose their layers
  of_training = ("train.", "optimizer.", "checkpoint.", "eval.every=")  # which `heal` compares
  settings = sorted(one for one in args.set if not one.startswith(of_training))
  tables.require_settings(args.out, {"workdir": args.workdir, "set": settings})
  if ordered:
    copy_unranked(args.workdir, os.path.join(args.out, "whole"))
    args.workdir = os.path.join(args.out, "whole")
  whole = Run.open(args.workdir).started.model.num_steps
  rows, base = [], None
  of_whole = "none" if args.healing == ["none"] else "alone"
  wanted = [("greedy", whole, of_whole)] if whole in args.depths else []  # the recipe plays no part
  wanted += [(r, n, h) for n in args.depths for r in args.recipes for h in args.healing if n != whole or h == "elastic"]
  for recipe, num_steps, how in wanted:
    name = "all layers" if num_steps == whole and how != "elastic" else recipe
    if how == "none":
      empty = [""] * (len(args.points) + (3 if args.other else 1))
      rows.append([str(num_steps), name, how, f"{evaluate(args, recipe, num_steps):.3f}", *empty])
      continue
    values = np.array([heal(args, recipe, num_steps, how, seed) for seed in args.seeds]).T
    base = values if how == "alone" and num_steps == whole else base
    cells, last = [tables.mean_and_error(one, ".3f") for one in values], len(args.points)
    prices = ["" if base is None else tables.difference(values[n], base[n], "+.3f") for n in range(last, len(values))]
    of_other = [cells[-1], prices[-1]] if args.other else []
    rows.append([str(num_steps), name, how, *cells[: last + 1], prices[0], *of_other])
  head = ["layers", "recipe", "healing", "before", *(f"after {step} steps" for step in args.points), "price"]
  head += ["other text", "its price"] if args.other else []
  print(tables.markdown(head, rows))


if __name__ == "__main__":
  programs.start(main)
