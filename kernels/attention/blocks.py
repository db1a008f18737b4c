"""Block sizes of the TPU kernel, and the memory that they take.

W lanes. VMEM is the on-chip memory of the TPU core; a block of an input or output is double-buffered: one copy is
transferred while the other is in use.
"""

import dataclasses

import jax

from diffeq_nnx.kernels.backend import find_backend


def has_little_memory() -> bool:
  """Whether the TPU compiled for is known to have 16 MiB of VMEM; known under `jax.shard_map` and on a TPU itself."""
  device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  if device is None and find_backend() == "tpu":
    device = jax.devices()[0]
  return device is not None and device.device_kind.startswith(("TPU v2", "TPU v3", "TPU v4"))


@dataclasses.dataclass(frozen=True)
class TPUBlocks:
  """Numbers of positions processed at a time; all multiples of 128."""

  block_q: int = 512
  block_kv: int = 512
  block_q_back: int = 512
  block_kv_back: int = 512
  chunk_bytes: int = 24 * 2**20  # of the side that is in VMEM chunk by chunk
  vmem_limit: int = 64 * 2**20

  @classmethod
  def tuned(cls, S: int, T: int, W: int, itemsize: int) -> "TPUBlocks":
    """Sizes for these lengths: the largest of those that need the least padding.

    Unrolled code and its registers grow with the block. Blocks of 1,024 save work between blocks, but more of their
    scores are masked, which long sequences make up for.
    """

    little = has_little_memory()
    long = itemsize < 4 and min(S, T) >= 4096 and not little

    def fit(length: int, largest: int) -> int:
      return min((b for b in (128, 256, 512, 1024) if b <= largest), key=lambda b: (-(-length // b) * b, -b))

    large = 1024 if long else 256 if itemsize == 4 or (little and W > 128) else 512
    other = min(large, 512) if W > 128 else large
    return cls(
      block_q=fit(S, large),
      block_kv=fit(T, other),
      block_q_back=fit(S, other),
      block_kv_back=fit(T, large),
      chunk_bytes=8 * 2**20 if little else cls.chunk_bytes,
    )

  def forward_chunk(self, T: int, W: int, itemsize: int) -> int:
    """Keys in VMEM at a time: k and v, twice each."""
    return self._chunk(T, self.block_kv, 2 * 2 * itemsize * W)

  def backward_chunk(self, S: int, W: int, itemsize: int) -> int:
    """Queries in VMEM at a time: q, out, dO and dQ, twice each, q multiplied by the scale, and dQ's sum in float32.

    Three rows fill 8 sublanes each, two of them twice.
    """
    return self._chunk(S, self.block_q_back, (9 * itemsize + 4) * W + 5 * 8 * 4)

  def _chunk(self, length: int, block: int, bytes_per_row: int) -> int:
    """A multiple of the block, so that chunks are of about equal size, within `chunk_bytes`."""
    most = max(self.chunk_bytes // bytes_per_row // block, 1)
    blocks = -(-length // block)
    chunks = -(-blocks // most)
    return -(-blocks // chunks) * block
