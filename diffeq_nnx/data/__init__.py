"""Text to batches: sources of documents, lossless tokenizers, a cached token corpus."""

from diffeq_nnx.data.batches import eval_batches, num_eval_batches, packing, train_batches
from diffeq_nnx.data.corpus import Corpus, Split, load
from diffeq_nnx.data.sources import Options, documents, fingerprint, open_source
from diffeq_nnx.data.tokenizers import Tokenizer, load as load_tokenizer, train

__all__ = [
  "Corpus",
  "Options",
  "Split",
  "Tokenizer",
  "documents",
  "eval_batches",
  "fingerprint",
  "load",
  "load_tokenizer",
  "num_eval_batches",
  "open_source",
  "packing",
  "train",
  "train_batches",
]
