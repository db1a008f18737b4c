"""--job=prepare: text to prepared shards."""

from diffeq_nnx import data, files
from diffeq_nnx.config import Config
from diffeq_nnx.parallel.console import print_result


def prepare_shards(config: Config, workdir: str) -> dict:
  """Turns data.source into prepared shards in the work directory and prints one JSON line on stdout.

  Run again after it was killed, it goes on.

  Raises:
    UserError: text, a tokenizer or a directory that can't be used.
    RunError: one of the data.num_processes that it starts dies, or the disk is full.
  """
  recipe = data.make_recipe(config.data, config.model.vocab_size, config.seed)
  with files.writing(f"workdir={workdir}", "choose another directory"):
    manifest = data.prepare(workdir, recipe)
  counts = {
    name: {key: split[key] for key in ("tokens", "counted", "bytes", "documents") if key in split}
    | {"shards": len(split["shards"])}
    for name, split in manifest["splits"].items()
  }
  tokenizer, records = manifest["tokenizer"]["hash"], manifest["records"]
  return print_result("prepare", workdir, tokenizer=tokenizer, records=records, **counts)
