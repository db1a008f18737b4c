"""Where an import finds a model: a folder, a name on the Hugging Face hub, or a GGUF file."""

from collections.abc import Iterator
import contextlib
import os
import re
import tempfile

from diffeq_nnx import files
from diffeq_nnx.data.sources.hub import explain
from diffeq_nnx.errors import UserError
from diffeq_nnx.exporting import gguf_files

# What an import reads. Code, and weights in other formats, stay on the hub.
_FILES = [
  *("config.json", "generation_config.json", "model.safetensors.index.json", "model*.safetensors"),
  *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
  *("vocab.json", "merges.txt", "chat_template.jinja", "adapter_config.json"),
]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@contextlib.contextmanager
def open_folder(name: str) -> Iterator[str]:
  """The folder with a model: `find_folder` of its name, or of a file, which must be GGUF, a temporary one.

  Raises UserError as `find_folder` and `gguf_files.write_folder`. Errors about the temporary folder name the file.
  """
  name = os.fspath(name)
  if not name.endswith(".gguf") and (files.is_folder(name) or not files.exists(name)):
    yield find_folder(name)
    return
  with tempfile.TemporaryDirectory() as folder:
    gguf_files.write_folder(name, folder)
    try:
      yield folder
    except UserError as error:
      raise UserError(str(error).replace(folder, name)) from error


def find_folder(name: str) -> str:
  """The folder of this path or, where there is none, of the model with this name on the hub.

  A name is ORGANIZATION/MODEL, and perhaps @REVISION (a branch, a tag or a commit). The model is fetched to
  huggingface_hub's cache, with the token of `hf auth login` or of HF_TOKEN. HF_ENDPOINT names another hub, and with
  HF_HUB_OFFLINE=1 the cache alone is used. Raises UserError if huggingface_hub is not installed, the hub can't be
  reached, or it does not give this model.
  """
  if not _NAME.fullmatch(name) or files.exists(name):
    return name
  try:
    import huggingface_hub
    from huggingface_hub import errors
  except ImportError as error:
    raise UserError(
      f"from_hf={name}: is no folder, and a name on the hub needs huggingface_hub; "
      "pip install 'diffeq-nnx[hf]', or name a folder"
    ) from error
  repository, _, revision = name.partition("@")
  try:
    return huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_FILES)
  except errors.HFValidationError as error:
    raise UserError(f"from_hf={name}: is no folder, and can't be a name on the hub; correct it") from error
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
    raise UserError(f"from_hf={name}: is no folder, and {explain(error, 'model')}") from error
