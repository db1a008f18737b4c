"""From text to batches: sources of documents, tokenizers, prepared shards, windows of tokens."""

from diffeq_nnx.data.batches import Rows, choose_document_end, eval_batches, find_documents, train_batches
from diffeq_nnx.data.corpus import Corpus, Mixture, load
from diffeq_nnx.data.preparation import make_recipe, prepare
from diffeq_nnx.data.shards import Split
from diffeq_nnx.data.sources import Options, documents, open_source
from diffeq_nnx.data.tokenizers import Tokenizer, UnknownByte, train
from diffeq_nnx.data.tokenizers import load as load_tokenizer
from diffeq_nnx.data.tokenizers import save as save_tokenizer
