"""From a source of text to prepared shards, in one pass that processes share.

The source is divided into tasks, each of which writes its documents, in their order, as shards of its own. Which
documents are held out depends on their bytes alone, and windows of tokens are shuffled when they are read, so tasks
need to know nothing of each other. Each finished task leaves its result under `UNFINISHED`, from where a preparation
that was killed continues. It ends with the same bytes.
"""

from diffeq_nnx.data.preparation.directory import UNFINISHED
from diffeq_nnx.data.preparation.preparing import Recipe, check_vocabulary, make_recipe, prepare
