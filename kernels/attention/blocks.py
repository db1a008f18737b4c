"""Block sizes of the TPU kernel, and the memory that they take.

W lanes. VMEM is the on-chip memory of the TPU core; a block of an input or output is double-buffered: one copy is
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
  def tuned(cls, S: int, T: int, W: int, itemsize: int) -> "TPUBlocks":
    """Sizes for these lengths: the largest of those that need the least padding."""
    largest = 512 if itemsize < 4 and W <= 128 else 256  # unrolled code and its registers grow with the block
    fit = lambda length: min((128, 256, 512)[: 2 + (largest == 512)], key=lambda b: (-(-length // b) * b, -b))
    q, kv = fit(S), fit(T)
    return cls(block_q=q, block_kv=kv, block_q_back=q, block_kv_back=kv)

  @staticmethod
  def forward_bytes_per_key(W: int, itemsize: int) -> int:
    """k and v, twice each."""
    return 2 * 2 * itemsize * W

  @staticmethod
  def backward_bytes_per_query(W: int, itemsize: int) -> int:
    """q, out, dO and dQ, twice each, and dQ's sum in float32; three rows fill 8 sublanes each, two of them twice."""
    return (4 * 2 * itemsize + 4) * W + 5 * 8 * 4

  def chunk(self, length: int, block: int, bytes_per_row: int) -> int:
    """Rows of a chunk: a multiple of the block, chunks of about equal size, within `chunk_bytes`."""
    most = max(self.chunk_bytes // bytes_per_row // block, 1)
    blocks = -(-length // block)
    chunks = -(-blocks // most)
    return -(-blocks // chunks) * block
