"""Text to batches: sources of documents, lossless tokenizers, a cached token corpus."""

from diffeq_nnx.data.corpus import Corpus, Split, eval_batches, load, num_eval_batches, train_batches
from diffeq_nnx.data.sources import documents, fingerprint
from diffeq_nnx.data.tokenizers import Tokenizer, load as load_tokenizer, train

__all__ = [
  "Corpus",
  "Split",
  "Tokenizer",
  "documents",
  "eval_batches",
  "fingerprint",
  "load",
  "load_tokenizer",
  "num_eval_batches",
  "train",
  "train_batches",
]
