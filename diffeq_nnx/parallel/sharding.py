"""Where arrays are placed: a mesh of devices, names for the axes of arrays, one table from names to mesh axes.

The mesh has five axes: `slice` (TPU slices, connected by the data-center network), `data`, `fsdp`, `context` and
`tensor`. A batch's sequences are split over slice, data and fsdp, the positions of each over context, and devices along
tensor share them; parameters are split over fsdp, context and tensor. Functions here read the mesh of the surrounding
`jax.set_mesh`, and do nothing without one, or with a mesh of another kind.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from diffeq_nnx.config import Config, MeshConfig, ModelConfig
from diffeq_nnx.errors import UserError

MESH_AXES = ("slice", "data", "fsdp", "context", "tensor")

# The mesh axes that an array's axis may be split over. Each mesh axis splits at most one axis of an array: the first
# that names it and that it divides. So a kernel [embed, mlp] is split over fsdp and context along embed and over
# tensor along mlp, and a kernel [mlp, embed] over all three along mlp, which costs a TPU no padding. An axis without a
# name (None) is replicated.
RULES: dict[str, tuple[str, ...]] = {
  "batch": ("slice", "data", "fsdp"),
  "context": ("context",),
  "parts": ("slice", "data", "fsdp", "context"),  # one for each device that holds tokens of its own
  "embed": ("fsdp", "context"),
  "heads": ("tensor", "fsdp", "context"),
  "whole_heads": ("tensor",),  # of queries, keys and values, where no part of a head is of use
  "mlp": ("tensor", "fsdp", "context"),
  "vocab": ("tensor", "fsdp", "context"),
  "position": (),
}
SPLIT_IN_USE = ("tensor",)  # mesh axes over which a parameter stays split while it is used

Axes = tuple[str | None, ...]


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
  """Makes the mesh over `devices` (None: all of them), each slice split as the config says.

  Raises:
    UserError: the sizes don't multiply to the number of devices of a slice.
  """
  devices = jax.devices() if devices is None else devices
  slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
  sizes = _fill_sizes(config, len(devices) // slices)
  if slices > 1:
    placed = mesh_utils.create_hybrid_device_mesh(sizes, (slices, 1, 1, 1), devices, allow_split_physical_axes=True)
  else:
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return _name_axes(placed.reshape(slices, *sizes))


def without_fsdp(mesh: Mesh) -> Mesh:
  """Returns a mesh of the same devices that keeps `tensor`, and puts all other axes along `data`.

  Each device then holds parameters ready for use.
  """
  shape = (1, mesh.size // mesh.shape["tensor"], 1, 1, mesh.shape["tensor"])
  return _name_axes(mesh.devices.reshape(shape))


def _name_axes(devices: np.ndarray) -> Mesh:
  return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _fill_sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
  given = config.data, config.fsdp, config.context, config.tensor
  known = math.prod(size for size in given if size != -1)
  sizes = tuple(count // known if size == -1 else size for size in given)
  if math.prod(sizes) != count:
    raise UserError(
      f"{', '.join(f'mesh.{axis}={size}' for axis, size in zip(MESH_AXES[1:], given))}: don't multiply to "
      f"the {count} devices of a slice; set one of them to -1 and the others to divisors of {count}"
    )
  return sizes


def check(config: Config, mesh: Mesh, trains: bool = True) -> None:
  """Raises UserError unless the model and, if it `trains`, a batch can be split over the mesh."""
  shards = num_shards("batch", mesh.shape)
  if trains and config.train.batch_size % shards:
    raise UserError(
      f"train.batch_size={config.train.batch_size}: must be a multiple of the {shards} devices that hold "
      f"different sequences (mesh {describe(mesh)}); change it, or raise mesh.context or mesh.tensor"
    )
  model = config.model
  check_model(model, mesh)
  if model.embed_dim % (fsdp := mesh.shape["fsdp"]):
    raise UserError(f"mesh.fsdp={fsdp}: must divide model.embed_dim={model.embed_dim}")
  context, chunks = mesh.shape["context"], config.train.loss_chunks
  if context > 1 and model.seq_len % (2 * context):
    raise UserError(f"mesh.context={context}: twice this must divide model.seq_len={model.seq_len}")
  if chunks is not None and model.seq_len // context % chunks:
    raise UserError(
      f"train.loss_chunks={chunks}: must divide the {model.seq_len // context} positions of a sequence that a device "
      f"holds (mesh.context={context})"
    )


def check_model(model: ModelConfig, mesh: Mesh) -> None:
  """Raises UserError unless the mesh splits heads and hidden channels of a model evenly."""
  tensor = mesh.shape["tensor"]
  for key, value in (("model.num_kv_heads", model.kv_heads), ("model.mlp_dim", model.hidden_dim)):
    if value % tensor:
      raise UserError(f"mesh.tensor={tensor}: must divide {key}={value}")


def describe(mesh: Mesh) -> str:
  """Describes the mesh as in "data 1 x fsdp 8 x tensor 1", slices and context only where there are several."""
  rare = ("slice", "context")
  return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1 or axis not in rare)


def num_shards(name: str, mesh_shape: dict[str, int] | None = None) -> int:
  """Returns how many parts an axis of this name is split into at most, by default on the surrounding mesh."""
  if mesh_shape is None:
    mesh = _get_mesh()
    mesh_shape = {} if mesh is None else mesh.shape
  return math.prod(mesh_shape.get(axis, 1) for axis in RULES[name])


def partition(
  axes: Axes, shape: tuple[int, ...], mesh_shape: dict[str, int], only: tuple[str, ...] = MESH_AXES
) -> PartitionSpec:
  """Returns how an array with these axis names is split: by `RULES`, where they divide it, over mesh axes in `only`."""
  used: set[str] = set()
  entries = []
  for name, size in zip(axes, shape, strict=True):
    places: list[str] = []
    for axis in RULES[name] if name else ():
      parts = math.prod(mesh_shape[place] for place in places) * mesh_shape[axis]
      if axis in only and axis not in used and size % parts == 0:
        places.append(axis)
        used.add(axis)
    entries.append(tuple(places) or None)
  return PartitionSpec(*entries)


def make_sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
  """Makes the sharding on `mesh` of an array with these axis names."""
  return NamedSharding(mesh, partition(axes, shape, mesh.shape))


def replicated(mesh: Mesh) -> NamedSharding:
  """Makes the sharding of an array of which every device has a copy."""
  return NamedSharding(mesh, PartitionSpec())


def _get_mesh() -> jax.sharding.AbstractMesh | None:
  """Returns the mesh of the surrounding `jax.set_mesh`, if `make_mesh` made it and it has several devices."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if mesh.axis_names == MESH_AXES and mesh.size > 1 else None


def constrain(x: jax.Array, *axes: str | None, only: tuple[str, ...] = MESH_AXES) -> jax.Array:
  """Returns x, split as `partition` says."""
  mesh = _get_mesh()
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh.shape, only))


def gather(x: jax.Array, axes: Axes) -> jax.Array:
  """All-gathers a parameter for use, except over the tensor axis. Its gradient is reduce-scattered immediately."""
  return x if _get_mesh() is None else _gather(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x, axes):
  return constrain(constrain(x, *axes), *axes, only=SPLIT_IN_USE)


def _gather_forward(x, axes):
  return _gather(x, axes), None


def _gather_backward(axes, _, gradient):
  return (constrain(gradient, *axes),)


_gather.defvjp(_gather_forward, _gather_backward)


def per_device(function: Callable, axes: Axes, *arrays: jax.Array) -> jax.Array:
  """Applies a function on each device to its own part of every array, for its own part of the result.

  Args:
    function: of arrays that have axes of these names, or the first few of them; the result is like the first array.
    axes: the names; the function must not depend on other parts of an axis.
    arrays: global arrays; the first one has all axes.

  Raises:
    ValueError: the arrays would be split in different ways.
  """
  mesh = _get_mesh()
  if mesh is None:
    return function(*arrays)
  specs = tuple(partition(axes[: x.ndim], x.shape, mesh.shape) for x in arrays)
  if any(tuple(spec) != tuple(specs[0])[: len(spec)] for spec in specs):
    raise ValueError(f"arrays of shapes {[x.shape for x in arrays]} can't be split alike over the mesh {mesh.shape}")
  return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Makes the sharding of tokens [B, L], where B must be a multiple of `num_shards("batch")`."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"], None))


class Share:
  """This process's part of the batches of one size, B rows.

  Attributes:
    rows: the rows that its devices hold, in order, [rows] int; they need not be adjacent.
  """

  def __init__(self, mesh: Mesh, batch_size: int):
    self._sharding, self._size = batch_sharding(mesh), batch_size
    indices = self._sharding.addressable_devices_indices_map((batch_size, 1)).values()
    self.rows = np.unique(np.concatenate([np.arange(batch_size)[index[0]] for index in indices if index is not None]))

  def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes global arrays [B, L] of this process's rows of them, [rows, L]."""
    shapes = {name: (self._size, *local.shape[1:]) for name, local in batch.items()}
    return jax.make_array_from_process_local_data(self._sharding, batch, shapes)
