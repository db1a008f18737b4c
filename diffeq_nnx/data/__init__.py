"""From text to batches: sources of documents, tokenizers, prepared shards, windows of tokens."""

from diffeq_nnx.data.batches import document_end, eval_batches, num_eval_batches, packing, train_batches
from diffeq_nnx.data.corpus import Corpus, Mixture, load
from diffeq_nnx.data.preparation import num_cores, prepare, recipe
from diffeq_nnx.data.shards import Split
from diffeq_nnx.data.sources import Options, documents, fingerprint, open_source
from diffeq_nnx.data.tokenizers import Tokenizer, UnknownByte, train
from diffeq_nnx.data.tokenizers import load as load_tokenizer

__all__ = [
  "Corpus",
  "Mixture",
  "Options",
  "Split",
  "Tokenizer",
  "UnknownByte",
  "document_end",
  "documents",
  "eval_batches",
  "fingerprint",
  "load",
  "load_tokenizer",
  "num_cores",
  "num_eval_batches",
  "open_source",
  "packing",
  "prepare",
  "recipe",
  "train",
  "train_batches",
]
