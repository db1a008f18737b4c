"""The training state and the function that advances it: loss, gradients, update, jitted.

B batch, L positions, A micro-batches, S solver steps.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from diffeq_nnx.config import RANDOM_BITS, Config
from diffeq_nnx.depth.trained import find_teaching_count
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.model import cpu_kernels, grids, integration, parameters, solvers, vector_fields, weight_sources
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import Params
from diffeq_nnx.model.ready import ReadyModel
from diffeq_nnx.parallel import sharding
from diffeq_nnx.parallel.console import say
from diffeq_nnx.training import optimizer as optimizer_lib
from diffeq_nnx.training.loss import chunked_cross_entropy, chunked_losses

# params (those that learn), opt_state, step [], key: what a checkpoint holds; frozen: the parameters that don't learn
State = dict[str, Any]
# inputs, targets [B, L]; segment_ids, positions [B, L] where documents are kept apart; mask [B, L], 1 where the target
# counts and else 0, where not all do
Batch = dict[str, jax.Array]

# the TPU compiler may cut a product whose result is reduce-scattered into one for each device, to hide communication:
# these are small and take longer than what they hide
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@functools.lru_cache(maxsize=8)
def known_options(mesh: Mesh) -> dict[str, str] | None:
  """`TPU_OPTIONS`; None, and a line that says so, if the compiler of the mesh's devices doesn't know one of them."""
  smallest = jax.jit(
    lambda: jnp.zeros(()), compiler_options=TPU_OPTIONS, out_shardings=sharding.replicated(mesh)
  ).lower()
  try:
    smallest.compile()
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    say(f"warning: this libtpu lacks an option of the train step, which is compiled without it ({first_line(error)})")
    return None
  return TPU_OPTIONS


def init_state(config: Config) -> State:
  """The state at step 0, a pure function of the config. Jit it, or shape it with `jax.eval_shape`."""
  model_key, _ = jax.random.split(jax.random.key(config.seed, impl=RANDOM_BITS))
  return state_of(config, parameters.params_of(Model(config.model, rngs=nnx.Rngs(params=model_key))))


def state_of(config: Config, params: Params) -> State:
  """The state at step 0 of a model that has these parameters. Jit it."""
  _, key = jax.random.split(jax.random.key(config.seed, impl=RANDOM_BITS))
  params, frozen = parameters.split(config.model, params)
  opt_state = _optimizer(config).init(params)
  return {"params": params, "opt_state": opt_state, "step": jnp.zeros((), jnp.int32), "key": key, "frozen": frozen}


def place_state(config: Config, params: Params, mesh: Mesh) -> State:
  """The state at step 0 of a model with these parameters, placed as the mesh splits them."""
  places = state_shardings(config, mesh)
  params = jax.device_put(params, all_params(places))
  return jax.jit(state_of, static_argnums=0, out_shardings=places)(config, params)


def _optimizer(config: Config, num_steps: int | None = None) -> optax.GradientTransformation:
  """The config's, which may read e(t) from the parameters at the times of so many solver steps; None: its own."""

  def vectors(params: Params) -> dict[str, jax.Array]:
    source = parameters.build(config.model, params).weight_source
    assert isinstance(source, weight_sources.GeneratedWeights)
    return source.vectors_of_kernels(solvers.weight_times(config.model, grids.make_grid(config.model, num_steps)))

  generated = config.model.weights == "generated"
  specs = vector_fields.make_field(config.model).specs(config.model)
  return optimizer_lib.make_optimizer(config.optimizer, config.train.steps, specs, vectors if generated else None)


def all_params(state: State) -> Params:
  """The whole model's parameters."""
  return parameters.join(state["params"], state["frozen"])


def loss_and_gradients(
  config: Config,
  grid: grids.Grid,
  params: Params,
  batch: Batch,
  key: jax.Array,
  frozen: Params | None = None,
  teacher: ReadyModel | None = None,
  full: grids.Grid | None = None,
) -> tuple[dict[str, jax.Array], Params]:
  """Mean losses in nats per counted token of the whole batch, and the gradient of "loss" with respect to `params`.

  With a mask the sums over counted targets are divided by their number in all micro-batches, devices and processes; if
  no target counts, losses and gradients are 0. With a teacher there are "cross_entropy" and "divergence" too, of which
  the loss is made.

  With `full`, the same model integrated over that grid is the teacher, by its predictions as they are, and learns too:
  "loss" is the mean of the taught loss and of its own cross-entropy, which is "full_cross_entropy".

  The weights are generated in one call, whatever the number of micro-batches; gradients with respect to them add up
  over micro-batches, and the generator is differentiated once.

  `params` learn, and `frozen` parameters don't; `key` is that of dropout.
  """
  source = params["weight_source"]
  rest = {name: value for name, value in params.items() if name != "weight_source"}
  merge = lambda learning: parameters.build(config.model, parameters.join(learning, frozen or {}))
  adapter_key = jax.random.fold_in(key, 2)  # 0 and 1 are the model's
  grids_used = (grid,) if full is None else (grid, full)

  def generate(source: Params) -> list[weight_sources.GridWeights]:
    model = merge({**rest, "weight_source": source})
    return [model.block_weights(each, adapter_key) for each in grids_used]

  block_weights, pull_back = jax.vjp(generate, source)
  adjoint = integration.make_adjoint(config)
  prepare = cpu_kernels.put_smaller_first if vector_fields.only_multiplies(config.model) else lambda weights: weights

  def microbatch_loss(block_weights, rest, batch):
    model = merge({**rest, "weight_source": source})
    hidden = functools.partial(
      _hidden, config, model, batch, dropout_key=key, rows_B=batch["rows"], adjoint=adjoint, prepare=prepare
    )
    return _losses(config, model, batch, teacher, *map(hidden, block_weights))

  gradient = jax.value_and_grad(microbatch_loss, argnums=(0, 1), has_aux=True)
  count = num_microbatches(config)
  batch = {**batch, "rows": jnp.arange(len(batch["inputs"]))}
  if "mask" in batch:  # a micro-batch's share of the mean over the whole batch, times their number
    batch["mask"] = batch["mask"] * (count / jnp.maximum(batch["mask"].sum(), 1))
  (loss, parts), (weight_gradients, rest_gradients) = _mean_over_microbatches(
    count, functools.partial(gradient, block_weights, rest), batch
  )
  weight_gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), weight_gradients, block_weights)
  (source_gradients,) = pull_back(weight_gradients)
  return {"loss": loss, **parts}, {**rest_gradients, "weight_source": source_gradients}


def _losses(
  config: Config,
  model: Model,
  batch: Batch,
  teacher: ReadyModel | None,
  hidden_BxLxD: jax.Array,
  full_BxLxD: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a micro-batch, and its parts by name, as of `loss_and_gradients`.

  The last hidden states are those on its `grid` and, if there is one, on `full`.
  """
  targets_BxL, mask_BxL, train = batch["targets"], batch.get("mask"), config.train
  if mask_BxL is None:
    mask_BxL = jnp.full(targets_BxL.shape, 1.0 / targets_BxL.size, jnp.float32)
  head_VxD = model.unembedding()
  wanted: tuple[jax.Array, ...] = ()
  if teacher is not None:
    guide = teacher.make_model()
    wanted = _hidden(config, guide, batch, teacher.weights), guide.unembedding()
  if full_BxLxD is not None:
    wanted = jax.lax.stop_gradient((full_BxLxD, head_VxD))
  loss, *parts = chunked_losses(
    hidden_BxLxD, head_VxD, wanted, targets_BxL, mask_BxL, train.loss_chunks, train.teacher_weight
  )
  named = dict(zip(("cross_entropy", "divergence"), parts))
  if full_BxLxD is None:
    return loss, named
  full_loss = chunked_cross_entropy(full_BxLxD, head_VxD, targets_BxL, mask_BxL, train.loss_chunks)
  return (loss + full_loss) / 2, {**named, "full_cross_entropy": full_loss}


def _hidden(config: Config, model: Model, batch: Batch, weights: weight_sources.GridWeights, **more) -> jax.Array:
  """The model's last hidden state on a batch; documents are kept apart where the batch has segment ids."""
  get = batch.__getitem__ if packs_documents(config) else batch.get  # then the batch must have them
  return model.hidden(
    batch["inputs"], weights, segment_ids_BxL=get("segment_ids"), positions_BxL=get("positions"), **more
  )


def num_microbatches(config: Config) -> int:
  """The fewest with which no device of the surrounding mesh holds more than train.device_batch_size sequences.

  Raises UserError while these are still to be measured.
  """
  held = config.train.batch_size // sharding.num_shards("batch")
  most = config.train.device_batch_size or held
  if most < 0:
    raise UserError(f"train.device_batch_size={most}: is measured by --job=train; set it to a number of sequences")
  return next(count for count in range(1, held + 1) if held % count == 0 and held // count <= most)


def _mean_over_microbatches(count: int, gradient: Callable, batch: Batch):
  """(losses, gradients) of the whole batch, `batch_size / count` sequences at a time, summed in float32.

  A micro-batch takes every count-th sequence, so that no sequence moves between devices.
  """
  if count == 1:
    return gradient(batch)
  batch = jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]).swapaxes(0, 1), batch)
  batch = jax.tree.map(lambda a: sharding.constrain(a, None, "batch", *[None] * (a.ndim - 2)), batch)
  widen = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
  shapes = jax.eval_shape(gradient, jax.tree.map(lambda a: a[0], batch))
  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), shapes)

  def add(total, microbatch):
    return jax.tree.map(lambda t, g: t + widen(g) / count, total, gradient(microbatch)), None

  return jax.lax.scan(add, zeros, batch)[0]


def state_shardings(config: Config, mesh: Mesh) -> State:
  """The sharding of each array of the state; optimizer moments are sharded like their parameters."""
  params, frozen = parameters.split(config.model, parameters.param_shardings(config.model, mesh))
  shapes = jax.eval_shape(lambda: init_state(config))
  replicated = sharding.replicated(mesh)
  of_path = {parameters.path_names(path): place for path, place in jax.tree_util.tree_leaves_with_path(params)}

  def moment(path, _):  # whose path ends in that of its parameter
    names = parameters.path_names(path)
    return next((of_path[names[n:]] for n in range(len(names)) if names[n:] in of_path), replicated)

  opt_state = jax.tree_util.tree_map_with_path(moment, shapes["opt_state"])
  return {"params": params, "opt_state": opt_state, "step": replicated, "key": replicated, "frozen": frozen}


def abstract_state(config: Config, mesh: Mesh) -> State:
  """Shapes and shardings of the state, without its arrays."""
  shapes, places = jax.eval_shape(lambda: init_state(config)), state_shardings(config, mesh)
  return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, places)


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and shardings of a training batch, without its arrays."""
  tokens = jax.ShapeDtypeStruct(
    (config.train.batch_size, config.model.seq_len), jnp.int32, sharding=sharding.batch_sharding(mesh)
  )
  packing = ("segment_ids", "positions") if packs_documents(config) else ()
  batch = dict.fromkeys(("inputs", "targets", *packing), tokens)
  return {**batch, "mask": tokens.update(dtype=jnp.float32)} if has_mask(config) else batch


def has_mask(config: Config) -> bool:
  """Whether training batches say which targets count."""
  return config.data.records != "text" or config.data.rows == "padded"


def packs_documents(config: Config) -> bool:
  """Whether rows hold several documents that are kept apart."""
  return not config.data.attend_across_documents and config.data.rows == "packed"


# Few, since each compiled step holds hundreds of memory maps, of which Linux gives a process 65,530.
@functools.lru_cache(maxsize=4)
def make_train_step(config: Config, mesh: Mesh | None = None) -> jax.stages.Wrapped:
  """A jitted `step(state, batch, num_steps, teacher) -> (state, metrics)`; the old state's buffers are donated.

  `num_steps`, of the solver, is a static argument: each number is compiled once. Equal configs and meshes share the
  compiled step. The teacher may be left out. Metrics are scalars on the device: those of `loss_and_gradients`,
  gradient_norm (before clipping), learning_rate, and counted_tokens where the batch has a mask. Call it inside
  `jax.set_mesh(mesh)`; without a mesh, it is for one device.
  """
  schedule = optimizer_lib.schedule(config.optimizer, config.train.steps)

  places = None if mesh is None else (state_shardings(config, mesh), sharding.replicated(mesh))
  on_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"

  @functools.partial(
    jax.jit,
    donate_argnums=0,
    static_argnums=2,
    out_shardings=places,
    compiler_options=known_options(mesh) if on_tpu else None,
  )
  def train_step(state: State, batch: Batch, num_steps: int, teacher: ReadyModel | None = None):
    grid, teaching = grids.make_grid(config.model, num_steps), find_teaching_count(config, num_steps)
    full = None if teaching is None else grids.make_grid(config.model, teaching)
    key = jax.random.fold_in(state["key"], state["step"])
    losses, gradients = loss_and_gradients(config, grid, state["params"], batch, key, state["frozen"], teacher, full)
    optimizer = _optimizer(config, num_steps)
    used_W = solvers.weight_times(config.model, full or grid).kept_W  # the sets of `grid` are among those of `full`
    if used_W is not None:
      optimizer = optimizer_lib.restrict_to_sets(optimizer, used_W)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    metrics = {
      **losses,
      "gradient_norm": optax.tree.norm(gradients),
      "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
    }
    if "mask" in batch:
      metrics["counted_tokens"] = batch["mask"].sum().astype(jnp.int32)
    return {
      "params": optax.apply_updates(state["params"], updates),
      "opt_state": opt_state,
      "step": state["step"] + 1,
      "key": state["key"],
      "frozen": state["frozen"],
    }, metrics

  return train_step


@functools.lru_cache(maxsize=4)
def make_eval_step(
  config: Config, mesh: Mesh | None = None
) -> Callable[[Params, weight_sources.GridWeights, Batch], tuple[jax.Array, jax.Array]]:
  """A jitted `step(params, weights, batch) -> (summed loss in nats, number of targets)`, no dropout.

  Generate `weights` once with `make_generate`, which says the number of steps, and use them for every batch.
  """

  @functools.partial(jax.jit, out_shardings=None if mesh is None else sharding.replicated(mesh))
  def eval_step(params: Params, weights: weight_sources.GridWeights, batch: Batch):
    model = parameters.build(config.model, params)
    hidden_BxLxD = _hidden(config, model, batch, weights)
    total = chunked_cross_entropy(
      hidden_BxLxD, model.unembedding(), batch["targets"], batch["mask"], config.train.loss_chunks
    )
    return total, batch["mask"].sum()

  return eval_step


@functools.lru_cache(maxsize=4)
def make_generate(config: Config, num_steps: int) -> Callable[[Params], weight_sources.GridWeights]:
  """A jitted `generate(params)` of the weights for the model's grid of `num_steps`."""
  grid = grids.make_grid(config.model, num_steps)
  return jax.jit(lambda params: parameters.build(config.model, params).block_weights(grid))
