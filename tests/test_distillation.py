"""Losses without and with a teacher against plain ones, runs with a teacher, and self-distillation."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx import jobs
from diffeq_nnx.model.grids import make_grid
from diffeq_nnx.model.parameters import build, params_of
from diffeq_nnx.model.ready import make_ready
from diffeq_nnx.runs.run import Run
from diffeq_nnx.training import flops
from diffeq_nnx.training import loss as loss_lib
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.loss import chunked_cross_entropy, chunked_losses
from diffeq_nnx.training.report import read_metrics
from diffeq_nnx.training.step import init_state, loss_and_gradients, make_train_step
from tests.conftest import change, equal, masked_batch, moved_instance, run_config, small_config, told
from tests.test_depth_order import ordered


def example(dtype=jnp.float32, B=2, L=12, D=8, V=17):
  """(hidden, head, teacher, targets, mask), random, the teacher of another width."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  targets, mask = jnp.asarray(rng.integers(V, size=(B, L))), jnp.asarray(rng.random((B, L)), jnp.float32)
  return normal(B, L, D), normal(V, D), (normal(B, L, 5), normal(V, 5)), targets, mask


def plain_losses(hidden, head, teacher, targets, mask, weight):
  """All logits at one time."""
  log_q, *log_p = (jax.nn.log_softmax(jnp.einsum("bld,vd->blv", *one)) for one in ((hidden, head), teacher) if one)
  cross_entropy = -jnp.sum(mask * jnp.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0])
  if not teacher:
    return (cross_entropy,)
  divergence = jnp.sum(mask[..., None] * jnp.exp(log_p[0]) * (log_p[0] - log_q))
  return (1 - weight) * cross_entropy + weight * divergence, cross_entropy, divergence


def plain_cross_entropy(hidden, head, targets, mask):
  return plain_losses(hidden, head, (), targets, mask, 0.0)[0]


def test_value_and_gradient_are_those_of_the_plain_losses_and_none_reaches_the_teacher(x64):
  """In float64, without a teacher, with one, and with one equal to the model, to which the divergence is exactly 0."""
  hidden, head, taught, *rest = example(jnp.float64)
  for teacher, weight, num_chunks in (((), 0.0, 1), ((), 0.0, 12), (taught, 0.3, 4), ((hidden, head), 1.0, None)):

    def tripled(losses, *how):
      def function(*states):
        loss, *parts = losses(*states, *rest, *how)
        return 3 * loss, parts

      return function

    plain, chunked = tripled(plain_losses, weight), tripled(chunked_losses, num_chunks, weight)
    gradients = lambda one, of: jax.jit(jax.value_and_grad(one, of, has_aux=True))(hidden, head, teacher)
    expected, (found, (*found_gradients, of_teacher)) = gradients(plain, (0, 1)), gradients(chunked, (0, 1, 2))
    equal((found, tuple(found_gradients)), expected, 1e-12, 1e-10)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_teacher))
    equal(jax.jit(chunked)(hidden, head, teacher), expected[0], 1e-12, 1e-10)
  assert found[0] == found[1][1] == 0


def test_no_array_has_the_logits_of_all_positions():
  """Nor of more than a chunk, of 3 positions."""
  hidden, head, taught, targets, mask = example(D=4, V=100)
  for teacher in ((), taught):
    loss = lambda hidden, head, teacher=teacher: chunked_losses(hidden, head, teacher, targets, mask, 4, 0.5)[0]
    written = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, head))
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"f32\[([\d,]+)\]", written)]
    assert max(sizes) == 2 * 3 * 100


def test_a_length_without_divisors_is_filled_up(x64, monkeypatch):
  """11 positions of which a chunk holds 4 are 3 chunks, not 11."""
  monkeypatch.setattr(loss_lib, "LOGITS_BYTES", 4 * (2 * 17 * 4))
  hidden, head, _, *rest = example(jnp.float64, L=11)
  assert [one.shape[0] for one in loss_lib._chunks((hidden,), None, 17)] == [3]
  both = [jax.value_and_grad(one, (0, 1))(hidden, head, *rest) for one in (chunked_cross_entropy, plain_cross_entropy)]
  equal(*both, 1e-12, 1e-10)


def test_bfloat16_accumulates_in_float32():
  hidden, head, _, *rest = example(jnp.bfloat16, D=64, V=400)
  chunked = jax.value_and_grad(lambda *a: chunked_cross_entropy(*a, 4), (0, 1))
  value, gradients = jax.jit(chunked)(hidden, head, *rest)
  wide = (np.asarray(array, np.float32) for array in (hidden, head))
  exact, exact_gradients = jax.jit(jax.value_and_grad(plain_cross_entropy, (0, 1)))(*wide, *rest)
  assert value.dtype == jnp.float32 and gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
  np.testing.assert_allclose(value, exact, rtol=1e-5)
  for ours, theirs in zip(gradients, exact_gradients):
    assert np.linalg.norm(np.asarray(ours, np.float32) - theirs) / np.linalg.norm(theirs) < 1e-2


def test_chunks_that_do_not_divide_are_an_error():
  hidden, head, _, *rest = example()
  line = told(lambda: chunked_cross_entropy(hidden, head, *rest, 5), ValueError)
  assert "num_chunks=5: must divide the 12 positions of a sequence that a device holds" in line


def test_between_a_student_and_a_teacher_that_equals_it_there_is_no_divergence():
  """Of a model in two micro-batches, where some targets count."""
  config = small_config(device_batch_size=2, teacher_weight=0.75)
  params, batch = params_of(moved_instance(config.model)), masked_batch(config)
  grid, key = make_grid(config.model), jax.random.key(0)
  losses_of = jax.jit(lambda params, teacher: loss_and_gradients(config, grid, params, batch, key, None, teacher)[0])
  losses = losses_of(params, make_ready(build(config.model, params)))
  assert abs(losses["divergence"]) < 1e-6 < losses["cross_entropy"]
  np.testing.assert_allclose(losses["loss"], 0.25 * losses["cross_entropy"], rtol=1e-5)


@pytest.fixture
def student(finished):
  """The config of a narrower run of stored weights on the text of `finished`, which is its teacher."""
  config = change(run_config(finished[1].parent, steps=20), train=dict(teacher=str(finished[1]), teacher_weight=0.75))
  return change(config, model=dict(weights="stored", embed_dim=8, num_steps=1, seq_len=8))


def test_a_run_learns_from_its_teacher_and_says_so(student, finished, tmp_path, capsys):
  """Another teacher is said, and without the one that its config names it does not go on."""
  teacher, workdir = str(tmp_path / "teacher"), str(tmp_path / "student")
  shutil.copytree(finished[1], teacher)
  last = train(change(student, train=dict(teacher=teacher)), workdir)
  records = read_metrics(workdir, "train")
  for record in records:
    assert record["loss"] == pytest.approx(0.25 * record["cross_entropy"] + 0.75 * record["divergence"], rel=1e-5)
    assert record["perplexity"] == pytest.approx(np.exp(record["cross_entropy"]))
    more = flops.teacher_flops(student, finished[0].model) / flops.model_flops(student, 1)
    assert record["utilization_with_teacher"] / record["utilization"] == pytest.approx(1 + more)
  assert records[-1]["divergence"] < records[0]["divergence"]
  assert last["loss"] == jobs.run("evaluate", Run.open(workdir).started, workdir)["loss"]  # plain cross-entropy
  told_lines = capsys.readouterr().err
  assert re.search(r"loss \S+ \(cross-entropy \S+, divergence \S+\), .* % with the teacher\)", told_lines)
  assert "train.teacher: was" not in told_lines
  train(change(student, train=dict(teacher=workdir)), workdir)  # its own model
  told_lines = capsys.readouterr().err
  assert re.search(r"train.teacher: was \w+ at step 20 until step 20, and is \w+ at step 20 now", told_lines)
  shutil.rmtree(teacher)
  message = told(lambda: train(change(student, train=dict(teacher=teacher)), workdir))
  assert message.startswith(f"--config.train.teacher={teacher}: holds no run")


def test_a_teacher_that_does_not_fit_is_one_line_and_nothing_is_written(student, finished, tmp_path):
  tokens = change(student, data=dict(tokenizer="bytes"))
  for config, part in (
    (change(student, train=dict(teacher=str(tmp_path))), "holds no run"),
    (change(student, train=dict(teacher="xyz://run")), "xyz://run/run.json: this kind of URL can't be used"),
    (tokens, f"train.teacher={finished[1]}: has another tokenizer ("),
    (change(student, model=dict(seq_len=32)), "has model.seq_len=16, less than the 32 of the run that it teaches"),
  ):
    assert part in told(lambda: train(config, str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
  bad = change(finished[0], train=dict(teacher=str(tmp_path)))
  assert "holds no run" in told(lambda: jobs.run("finetune", bad, str(tmp_path / "new"), from_workdir=str(finished[1])))
  assert not (tmp_path / "new" / "run.json").exists()


# a model that teaches itself


def test_self_distillation_is_half_the_taught_loss_and_half_that_of_the_teaching(x64):
  """Of a train step in two micro-batches."""
  model = ordered(dtype="float64", horizon=2.0, weights="stored")
  config = small_config(model, step_counts=(2, 4), self_distillation=True, teacher_weight=0.3, device_batch_size=2)
  config = change(config, optimizer=dict(clip_norm=1e9))
  params, batch = params_of(moved_instance(model)), masked_batch(config)
  mask_BxL = batch["mask"] / batch["mask"].sum()

  def plain(params):
    log_q, log_p = (jax.nn.log_softmax(build(model, params)(batch["inputs"], n)) for n in (2, 4))
    losses_of = lambda log: -(mask_BxL * jnp.take_along_axis(log, batch["targets"][..., None], -1)[..., 0]).sum()
    cross_entropy, full = losses_of(log_q), losses_of(log_p)
    log_p = jax.lax.stop_gradient(log_p)
    divergence = (mask_BxL[..., None] * jnp.exp(log_p) * (log_p - log_q)).sum()
    loss = (0.7 * cross_entropy + 0.3 * divergence + full) / 2
    return loss, {"loss": loss, "cross_entropy": cross_entropy, "divergence": divergence, "full_cross_entropy": full}

  (_, losses), gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
  shapes = jax.eval_shape(lambda: init_state(config))["opt_state"]
  moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
  rest = {"step": np.int32(0), "key": jax.random.key(0), "frozen": {}}
  state = {"params": jax.tree.map(np.array, params), "opt_state": moments, **rest}
  state, metrics = make_train_step(config)(state, batch, 2)
  leaves = jax.tree_util.tree_leaves_with_path(state["opt_state"])
  moments = [leaf for path, leaf in leaves if "mu" in jax.tree_util.keystr(path)]  # Adam's first, after one step
  found = {name: metrics[name] for name in losses}, [np.asarray(leaf) / (1 - config.optimizer.b1) for leaf in moments]
  equal(found, (losses, jax.tree.leaves(gradients)), 1e-12, 1e-9)


def test_where_the_most_steps_are_drawn_a_train_step_is_one_without_self_distillation():
  config = small_config(ordered(weights="stored"), step_counts=(2, 4))
  state = jax.eval_shape(lambda: init_state(config))
  lower = lambda config: make_train_step(config).lower(state, masked_batch(config), 4).as_text()
  assert lower(change(config, train=dict(self_distillation=True))) == lower(config)
