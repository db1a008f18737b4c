"""From a source of text to prepared shards, in three passes, each shared out over processes.

Count: every record is read once, so that mistakes come to light, documents can be held out and work be shared out.
Tokenise: stretches of records become runs, each of some documents' tokens, sorted by the documents' keys.
Gather: a shard takes the documents whose keys lie in its range from all runs, in the order of the keys.

A training document's key is a hash of the seed and of the record's place in the source, and a validation document's
key that place, so that training documents are shuffled, validation documents keep their order, and neither depends
on the number of processes. What a pass has finished stays under `UNFINISHED`; a preparation that was killed goes on
from there and ends with the same bytes.
"""

from diffeq_nnx.data.preparation.directory import UNFINISHED
from diffeq_nnx.data.preparation.preparing import Sizes, prepare
from diffeq_nnx.data.preparation.recipe import Recipe, check_vocabulary, recipe
from diffeq_nnx.data.preparation.workers import num_cores

__all__ = ["UNFINISHED", "Recipe", "Sizes", "check_vocabulary", "num_cores", "prepare", "recipe"]
