"""GGUF files of Llamas: weights as the gguf package gives them, rotated channels in our order, both tokenizers."""

from unittest import mock

import gguf
import numpy as np
import pytest
import sentencepiece

import diffeq_nnx
from diffeq_nnx.data.tokenizers.byte_pairs import ALPHABET
from diffeq_nnx.exporting import hub, importing
from tests.conftest import Lazy, told
from tests.test_import import foreign, stored_logits, torch_logits
from tests.test_published_tokenizers import model as published_model

torch = Lazy("torch")


BYTES = [*ALPHABET, "th", "Ġth", "12", "<s>", "</s>"]  # byte pairs with two marks
MERGES = ["t h", "Ġ th", "1 2"]


def swap_halves(name, array, *sizes):
  """Rotated channels i and i + C / 2 of a head, sizes (2, C / 2), are 2 i and 2 i + 1 in the file, and back."""
  if not name.endswith(("q_proj.weight", "k_proj.weight")):
    return array
  split = array.reshape(-1, *sizes, array.shape[1])
  return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def write(path, theirs, values, architecture="llama", **more):
  """A Llama of transformers as a GGUF file; matrices in Q8_0, and in the model what they then mean."""
  config, writer = theirs.config, gguf.GGUFWriter(path, architecture, **more)
  writer.add_block_count(config.num_hidden_layers)
  writer.add_context_length(config.max_position_embeddings)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_attention_heads)
  writer.add_head_count_kv(config.num_key_value_heads)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  for key, value in values.items():
    writer.add_key_value(key, *value) if isinstance(value, tuple) else writer.add_array(key, value)
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
  kind, half = gguf.GGMLQuantizationType.Q8_0, config.head_dim // 2
  for name, tensor in theirs.state_dict().items():
    if name == "lm_head.weight" and config.tie_word_embeddings:
      continue
    array, there = tensor.numpy(), names.get_name(name, [".weight"])
    if array.ndim == 1:
      writer.add_tensor(there, array)
      continue
    stored = gguf.quantize(swap_halves(name, array, 2, half), kind)
    writer.add_tensor(there, stored, raw_dtype=kind)
    tensor.copy_(torch.from_numpy(swap_halves(name, gguf.dequantize(stored, kind), half, 2)))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


STRING, BOOL, UINT = gguf.GGUFValueType.STRING, gguf.GGUFValueType.BOOL, gguf.GGUFValueType.UINT32


def byte_pairs(pre):
  return {
    "tokenizer.ggml.model": ("gpt2", STRING),
    "tokenizer.ggml.pre": (pre, STRING),
    "tokenizer.ggml.tokens": BYTES,
    "tokenizer.ggml.token_type": [1] * (len(BYTES) - 2) + [3, 3],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": (len(BYTES) - 2, UINT),
    "tokenizer.ggml.eos_token_id": (len(BYTES) - 1, UINT),
    "tokenizer.ggml.add_bos_token": (pre == "qwen2", BOOL),
  }


def sentencepieces(proto):
  model = sentencepiece.SentencePieceProcessor(model_proto=proto)
  ids = range(model.vocab_size())
  tests = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
  kinds = [next((kind for kind, test in tests.items() if test(i)), 1) for i in ids]
  return {
    "tokenizer.ggml.model": ("llama", STRING),
    "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
    "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
    "tokenizer.ggml.token_type": kinds,
    "tokenizer.ggml.bos_token_id": (model.bos_id(), UINT),
    "tokenizer.ggml.eos_token_id": (model.eos_id(), UINT),
  }


def small(vocab_size, **changes):
  sizes = dict(hidden_size=32, intermediate_size=64, vocab_size=vocab_size)
  return foreign("llama", **sizes, **changes)


def read_tokenizer(path):
  with hub.open_folder(path) as folder:
    return importing.read_tokenizer(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_logits_of_the_model_that_it_holds(tied, tmp_path):
  """Whatever its name is: Ollama's are hashes."""
  theirs, path = small(len(BYTES), tie_word_embeddings=tied), str(tmp_path / ("sha256-a1" if tied else "model.gguf"))
  write(path, theirs, byte_pairs("gpt-2"))
  model = diffeq_nnx.import_hf(path)
  assert model.config.tied_head is (True if tied else None) and model.config.norm_eps is None
  np.testing.assert_allclose(stored_logits(model), torch_logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  "pre,divided",
  [
    ("gpt-2", ["Ġth", "a", "n", "'", "S", "Ġ", "12", "12", "3", "."]),
    ("smollm", ["Ġth", "a", "n", "'", "S", "Ġ", "1", "2", "1", "2", "3", "."]),
    ("llama-bpe", ["Ġth", "a", "n", "'", "S", "Ġ", "12", "1", "2", "3", "."]),
    ("qwen2", ["Ġth", "a", "n", "'", "S", "Ġ", "1", "2", "1", "2", "3", "."]),
  ],
)
def test_byte_pairs_are_merged_within_what_the_file_s_name_for_it_divides(pre, divided, tmp_path):
  """Llama 3's own files lack a word about the begin mark; there is one, as in llama.cpp."""
  path, pairs = str(tmp_path / "model.gguf"), byte_pairs(pre)
  if pre == "llama-bpe":
    del pairs["tokenizer.ggml.add_bos_token"]
  write(path, small(len(BYTES)), pairs)
  tokenizer = read_tokenizer(path)
  assert [BYTES[i] for i in tokenizer.encode(" than'S 12123.")] == divided
  assert tokenizer.eos_id == len(BYTES) - 1
  assert tokenizer.bos_id == (len(BYTES) - 2 if pre in ("llama-bpe", "qwen2") else None)


def test_sentencepieces_are_those_of_the_model_that_the_file_was_made_from(tmp_path):
  """Any piece can be the end mark, as the end of a chat's turn, which follows the pieces."""
  proto, path = published_model(), str(tmp_path / "model.gguf")
  theirs, pieces = sentencepiece.SentencePieceProcessor(model_proto=proto), sentencepieces(proto)
  last = theirs.vocab_size()
  for key, value in (("tokens", "<|im_end|>"), ("scores", 0.0), ("token_type", 3)):
    pieces[f"tokenizer.ggml.{key}"].append(value)
  for end in (theirs.eos_id(), last):
    write(path, small(last + 1), pieces | {"tokenizer.ggml.eos_token_id": (end, UINT)})
    tokenizer = read_tokenizer(path)
    for text in ("Hello  world\nx", "the rivers and hills, é 字 \U0001f642", " a"):
      assert tokenizer.encode(text).tolist() == theirs.encode(text)
    assert (tokenizer.bos_id, tokenizer.end_ids) == (theirs.bos_id(), (end,))
  write(path, small(last + 1), pieces | {"tokenizer.ggml.eot_token_id": (last, UINT)})
  assert read_tokenizer(path).end_ids == (theirs.eos_id(), last)  # that of a turn too
  pieces["tokenizer.ggml.token_type"][-1] = 4  # user-defined: no text before it gets the model's space
  for more in ([], [3], [5, 5]):  # control pieces and padding may follow
    names = [f"[{number}]" for number in range(len(more))]
    added = {"tokens": names, "scores": [0.0] * len(more), "token_type": more}
    longer = {f"tokenizer.ggml.{key}": pieces[f"tokenizer.ggml.{key}"] + values for key, values in added.items()}
    write(path, small(last + 1 + len(more)), pieces | longer)
    assert read_tokenizer(path).encode("<|im_end|>").tolist() == [last]


def test_what_a_file_holds_that_is_not_supported_is_told(tmp_path):
  path, pairs, theirs = str(tmp_path / "model.gguf"), byte_pairs("gpt-2"), small(len(BYTES))
  factor, token_type = (4.0, gguf.GGUFValueType.FLOAT32), {"tokenizer.ggml.token_type": [1, 3]}
  for values, part in (
    (byte_pairs("other"), "'gpt2' with tokenizer.ggml.pre='other'"),
    (pairs | {"llama.rope.scaling.type": ("yarn", STRING)}, "llama.rope.scaling is not supported"),
    (pairs | {"llama.rope.scaling.factor": factor}, "llama.rope.scaling is not supported"),
    (pairs | {"llama.rope.scale_linear": factor}, "llama.rope.scaling is not supported"),
    (pairs | {"llama.attention.causal": (False, BOOL)}, "llama.attention.causal is False"),
    (pairs | {"llama.attention.sliding_window": (8, UINT)}, "sliding_window is not supported"),
    (pairs | {"llama.attention.key_length": ("x", STRING)}, "can't be read as GGUF (unsupported operand"),
    (pairs | {"llama.attention.head_count": (0, UINT)}, "can't be read as GGUF (integer division or modulo by zero)"),
    (pairs | {"split.count": (2, UINT)}, "is one of 2 parts"),
    (pairs | token_type, f"has {len(BYTES)} tokens and 2 in tokenizer.ggml.token_type"),
  ):
    write(path, theirs, values)
    line = told(lambda: diffeq_nnx.import_hf(path))
    assert part in line and line.count("from_hf=") == 1, line
  write(path, theirs, pairs)
  line = told(lambda: diffeq_nnx.import_hf(path, seq_len=10**6))
  assert f"from_hf={path}: the model has" in line  # and no temporary folder
  with mock.patch.object(gguf, "dequantize", side_effect=NotImplementedError("I32 is not yet implemented")):
    line = told(lambda: diffeq_nnx.import_hf(path))
  assert "I32 is not yet implemented; give the model's Hugging Face folder" in line
  write(path, theirs, pairs, architecture="gemma")
  assert "architecture is 'gemma'" in told(lambda: diffeq_nnx.import_hf(path))
  write(path, theirs, pairs, endianess=gguf.GGUFEndian.BIG)
  assert "is of the other byte order" in told(lambda: diffeq_nnx.import_hf(path))
  (tmp_path / "model.gguf").write_bytes(b"nothing")
  assert "is not a GGUF file" in told(lambda: diffeq_nnx.import_hf(path))
