"""From a source of text to prepared shards, in one pass that processes share.

The source is divided into tasks, each of which writes its documents, in their order, as shards of its own. Which
documents are held out depends on their bytes alone, and windows of tokens are shuffled when they are read, so tasks
need to know nothing of each other. Each finished task leaves its result under `UNFINISHED`; a preparation that was
killed continues from there and ends with the same bytes.
"""

from diffeq_nnx.data.preparation.directory import UNFINISHED
from diffeq_nnx.data.preparation.preparing import Recipe, check_vocabulary, prepare, recipe
from diffeq_nnx.data.preparation.workers import num_cores

__all__ = ["UNFINISHED", "Recipe", "check_vocabulary", "num_cores", "prepare", "recipe"]
