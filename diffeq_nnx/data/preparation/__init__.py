"""From a source of text to prepared shards, in three passes, each shared out over processes.

Count: every record is read once, to find mistakes, choose the documents held out, and divide the work.
Tokenize: each task turns consecutive records into a database of documents, as tokens with keys.
Gather: a shard takes the documents whose keys lie in its range from all databases, in the order of the keys.

A training document's key is a hash of the seed and of the record's place in the source, and a validation document's
key that place, so that training documents are shuffled, validation documents keep their order, and neither depends
on the number of processes. Each finished task leaves its result under `UNFINISHED`; a preparation that was killed
continues from there and ends with the same bytes.
"""

from diffeq_nnx.data.preparation.directory import UNFINISHED
from diffeq_nnx.data.preparation.preparing import Recipe, check_vocabulary, prepare, recipe
from diffeq_nnx.data.preparation.workers import num_cores

__all__ = ["UNFINISHED", "Recipe", "check_vocabulary", "num_cores", "prepare", "recipe"]
