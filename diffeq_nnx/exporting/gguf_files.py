"""A GGUF file of a Llama as a Hugging Face folder: its weights dequantized by the gguf package, and its tokenizer.

H heads, C channels of a head, D embed_dim.
"""

import os
from typing import Any

import numpy as np

from diffeq_nnx import files
from diffeq_nnx.data.tokenizers.byte_pairs import BYTE_LEVEL
from diffeq_nnx.errors import UserError, first_line
from diffeq_nnx.exporting import folders, layouts

_CONFIG = {  # key in config.json -> key of the file, after "llama."
  "num_hidden_layers": "block_count",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "max_position_embeddings": "context_length",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How tokenizer.ggml.pre, a name of llama.cpp's, divides text before byte pairs are merged.
_DIVIDED = {
  "gpt-2": [BYTE_LEVEL],
  "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
  "llama-bpe": rf"{_LETTERS}\p{{N}}{{1,3}}{_OTHERS}",
  "qwen2": rf"{_LETTERS}\p{{N}}{_OTHERS}",
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # kinds of tokens
_OTHERWISE = "give the model's Hugging Face folder"


def write_folder(path: str, folder: str) -> None:
  """Writes config.json, model.safetensors in float32, and the tokenizer's files of a GGUF file to a folder.

  Raises UserError if gguf is not installed, or the file can't be read, is of another architecture, has properties that
  are not supported, or a tokenizer that is not known.
  """
  try:
    import gguf
  except ImportError as error:
    raise UserError(f"from_hf={path}: a GGUF file needs gguf; pip install 'diffeq-nnx[gguf]'") from error
  try:
    with files.local(path) as local:
      with open(local, "rb") as file:
        if file.read(4) != b"GGUF":
          raise UserError("is not a GGUF file; name one, or a folder with config.json and model.safetensors")
      reader = gguf.GGUFReader(local)
      if reader.byte_order != "I":  # which dequantize takes for this machine's
        raise UserError("is of the other byte order; convert it with gguf-convert-endian")
      values = {key: field.contents() for key, field in reader.fields.items()}
      config, tied = _config(values), all(tensor.name != "output.weight" for tensor in reader.tensors)
      num_layers = min(config["num_hidden_layers"], len(reader.tensors))  # the file can claim any number
      modules = [f"layers.{layer}.{one}" for layer in range(num_layers) for one in layouts.LLAMA_GROUPS.values()]
      modules = ["lm_head", *(f"model.{one}" for one in ("embed_tokens", "norm", *modules))]
      names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
      ours = {f"{names.get_name(module)}.weight": f"{module}.weight" for module in modules}
      tensors: layouts.Tensors = {}
      for tensor in reader.tensors:
        if tensor.name not in ours:
          raise UserError(f"holds {tensor.name}, which is not supported; {_OTHERWISE}")
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        tensors[ours[tensor.name]] = np.ascontiguousarray(_pair_halves(tensor.name, array, config))
    _write_tokenizer(values, folder)
  except UserError as error:
    raise UserError(f"from_hf={path}: {error}") from error
  except NotImplementedError as error:
    raise UserError(f"from_hf={path}: {first_line(error, 200)}; {_OTHERWISE}") from error
  except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
    raise UserError(f"from_hf={path}: can't be read as GGUF ({first_line(error, 200)}); restore the file") from error
  try:
    folders.write_json(folder, "config.json", config | {"tie_word_embeddings": tied})
    folders.write_tensors(folder, "model.safetensors", tensors)
  except OSError as error:
    problem = f"its weights can't be written to {folder} ({error.strerror})"
    raise UserError(f"from_hf={path}: {problem}; make room there, or set TMPDIR to another place") from error


def _config(values: dict[str, Any]) -> dict[str, Any]:
  """config.json but for whether the head is tied."""
  if (parts := values.get("split.count", 1)) > 1:
    raise UserError(f"is one of {parts} parts; join them with llama-gguf-split --merge")
  if (kind := values.get("general.architecture")) != "llama":
    raise UserError(f"its architecture is {kind!r}; of GGUF files, those of llama can be imported")
  # `scale_linear` is the older key; llama.cpp takes a factor without a type for linear scaling
  factors = [values.get(f"llama.rope.{key}", 0.0) for key in ("scaling.factor", "scale_linear")]
  if values.get("llama.rope.scaling.type", "none") != "none" or any(factor not in (0, 1) for factor in factors):
    raise UserError(f"llama.rope.scaling is not supported; {_OTHERWISE}")
  values = {  # floats are of 32 bits: 1e-5, not 9.999999747378752e-06
    key: float(str(np.float32(value))) if isinstance(value, float) else value for key, value in values.items()
  }
  config = {theirs: values[f"llama.{key}"] for theirs, key in _CONFIG.items() if f"llama.{key}" in values}
  size = values.get("llama.attention.key_length", config["hidden_size"] // config["num_attention_heads"])
  plain = {"rope.dimension_count": size, "attention.value_length": size, "attention.causal": True}
  for key, value in plain.items():
    if (said := values.get(f"llama.{key}", value)) != value:
      raise UserError(f"llama.{key} is {said}, and only {value} is supported here; {_OTHERWISE}")
  if 0 < values.get("llama.attention.sliding_window", 0) < config["max_position_embeddings"]:
    raise UserError(f"llama.attention.sliding_window is not supported; {_OTHERWISE}")
  return config | {
    "model_type": "llama",
    "dtype": "float32",
    "head_dim": size,
    "rope_theta": values.get("llama.rope.freq_base", 10000.0),
    "vocab_size": len(values["tokenizer.ggml.tokens"]),
  }


def _pair_halves(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
  """Reorders the channels of a kernel [H C, D] of queries or keys; other arrays stay as they are.

  A GGUF file rotates channels 2 i and 2 i + 1 of a head as a pair, and a Hugging Face folder channels i and i + C/2.
  """
  if not name.endswith(("attn_q.weight", "attn_k.weight")):
    return array
  pairs = array.reshape(-1, config["head_dim"] // 2, 2, array.shape[1])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _write_tokenizer(values: dict[str, Any], folder: str) -> None:
  """tokenizer.json of byte pairs, or tokenizer.model of sentencepiece, and tokenizer_config.json."""

  def said(key: str, default: Any = None) -> Any:
    return values.get(f"tokenizer.ggml.{key}", default)

  kind, tokens, divided = said("model"), said("tokens"), _DIVIDED.get(said("pre"))
  kinds = said("token_type", [1] * len(tokens))
  for key in ("token_type", "scores"):
    if (count := len(said(key, tokens))) != len(tokens):
      raise UserError(f"its tokenizer has {len(tokens)} tokens and {count} in tokenizer.ggml.{key}; restore the file")
  named = {"bos_token": said("bos_token_id"), "eos_token": said("eos_token_id"), "unk_token": said("unknown_token_id")}
  config = {key: tokens[number] for key, number in named.items() if number is not None}
  if kind == "llama":
    pieces = list(zip(tokens, said("scores", [0.0] * len(tokens)), kinds, strict=True))
    # Tokens were added from the first user-defined one behind the text's pieces on. As pieces of the model, they would
    # get its space.
    behind = max(
      (number for number, one in enumerate(kinds, 1) if one not in (_CONTROL, _USER_DEFINED, _UNUSED)), default=0
    )
    size = next((number for number in range(behind, len(kinds)) if kinds[number] == _USER_DEFINED), len(kinds))
    config["added_tokens_decoder"] = {str(number): {"content": tokens[number]} for number in range(size, len(tokens))}
    _write_sentencepieces(pieces[:size], config, said("add_space_prefix", True), folder)
  elif kind != "gpt2" or divided is None:
    name = f"{kind!r} with tokenizer.ggml.pre={said('pre')!r}"
    known = f"those of llama, and gpt2's with {', '.join(_DIVIDED)}"
    raise UserError(f"its tokenizer is {name}; {known} are known; {_OTHERWISE}")
  else:
    if isinstance(divided, str):
      split = {"type": "Split", "pattern": {"Regex": divided}, "behavior": "Isolated", "invert": False}
      divided = [split, BYTE_LEVEL | {"use_regex": False}]
    added = [
      {"id": number, "content": token, "special": kinds[number] == _CONTROL, "normalized": False}
      | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
      for number, token in enumerate(tokens)
      if kinds[number] in (_CONTROL, _USER_DEFINED)
    ]
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": said("merges"), "ignore_merges": said("pre") == "llama-bpe"}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": divided}
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre_tokenizer, "model": model}
    folders.write_json(folder, "tokenizer.json", spec)
  ends = dict.fromkeys(said(f"{name}_token_id") for name in ("eos", "eot", "eom"))  # at all of which llama.cpp ends
  if len(ends := [number for number in ends if number is not None]) > 1:
    folders.write_json(folder, "generation_config.json", {"eos_token_id": ends})
  # as in llama.cpp where the file does not say it: Llama 3's own files lack the key
  config["add_bos_token"] = bool(said("add_bos_token", kind == "llama" or said("pre") == "llama-bpe"))
  if template := values.get("tokenizer.chat_template"):
    config["chat_template"] = template
  folders.write_json(folder, "tokenizer_config.json", config)


def _write_sentencepieces(
  pieces: list[tuple[str, float, int]], names: dict[str, Any], prefix: bool, folder: str
) -> None:
  """tokenizer.model: kinds of pieces have the same numbers as in sentencepiece; `names` are those of its marks."""
  from sentencepiece import sentencepiece_model_pb2  # which needs protobuf

  messages: Any = sentencepiece_model_pb2  # whose classes are made when it is imported
  proto = messages.ModelProto()
  marks = {names.get(f"{key}_token") for key in ("bos", "eos")}
  for token, score, kind in pieces:
    if token in marks and kind == _USER_DEFINED:  # as llama.cpp writes marks that were added, such as ChatML's
      kind = _CONTROL
    elif kind == _USER_DEFINED:  # llama.cpp writes its spaces as they are
      token = token.replace(" ", "\u2581")
    proto.pieces.add(piece=token, score=score, type=kind)
  for key in ("bos", "eos"):
    if (name := names.get(f"{key}_token")) in {token for token, *_ in pieces}:
      setattr(proto.trainer_spec, f"{key}_piece", name)
  proto.trainer_spec.model_type = messages.TrainerSpec.BPE
  proto.trainer_spec.byte_fallback = True
  proto.normalizer_spec.name = "identity"
  proto.normalizer_spec.add_dummy_prefix = prefix
  proto.normalizer_spec.remove_extra_whitespaces = False
  with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
    file.write(proto.SerializeToString())
