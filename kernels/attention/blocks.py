"""Block sizes of the TPU kernel, and the memory that they take.

D head width. VMEM is the on-chip memory of the TPU core; a block of an input or output is double-buffered: one copy is
transferred while the other is in use.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TPUBlocks:
  """Numbers of positions processed at a time; all multiples of 128."""

  block_q: int = 512
  block_kv: int = 512
  block_q_back: int = 512
  block_kv_back: int = 512
  chunk_bytes: int = 8 * 2**20  # of the side that is in VMEM chunk by chunk
  vmem_limit: int = 64 * 2**20

  @classmethod
  def tuned(cls, S: int, T: int, D: int, itemsize: int) -> "TPUBlocks":
    """Sizes for these lengths: the largest of those that need the least padding."""
    largest = 512 if itemsize < 4 and D <= 128 else 256  # unrolled code and its registers grow with the block
    fit = lambda length: min((128, 256, 512)[: 2 + (largest == 512)], key=lambda b: (-(-length // b) * b, -b))
    q, kv = fit(S), fit(T)
    return cls(block_q=q, block_kv=kv, block_q_back=q, block_kv_back=kv)

  @staticmethod
  def forward_bytes_per_key(D: int, itemsize: int) -> int:
    """k and v, twice each; rows are padded to lanes of 128."""
    return 2 * 2 * itemsize * _lanes(D)

  @staticmethod
  def backward_bytes_per_query(D: int, itemsize: int) -> int:
    """q, dO and dQ, twice each, and dQ's sum in float32; log-sum-exp and delta fill 8 sublanes each, twice."""
    return (3 * 2 * itemsize + 4) * _lanes(D) + 2 * 2 * 8 * 4

  def chunk(self, length: int, block: int, bytes_per_row: int) -> int:
    """Rows of a chunk: a multiple of the block, chunks of about equal size, within `chunk_bytes`."""
    most = max(self.chunk_bytes // bytes_per_row // block, 1)
    blocks = -(-length // block)
    chunks = -(-blocks // most)
    return -(-blocks // chunks) * block


def _lanes(D: int) -> int:
  return -(-D // 128) * 128
