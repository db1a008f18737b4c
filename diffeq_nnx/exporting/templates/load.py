"""Runs the exported model; needs jax, flatbuffers and safetensors, but not diffeq-nnx.

    python load.py 5 17 2      # the most likely next tokens after these

In a program: `model = load(FOLDER)`, then `model(tokens)`: int32 [batch, length] -> logits [batch, length, vocabulary].
model.json has the largest sequence length, seq_len; tokenizer.json, if present, is for Hugging Face's `tokenizers`.
"""

import json
import os
import sys

import jax
import jax.export
import jax.numpy as jnp
from safetensors.numpy import load_file


def load(folder):
  """A function from tokens to logits, compiled once for each shape."""
  with open(os.path.join(folder, "model.jax_export"), "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
  with open(os.path.join(folder, "model.json"), encoding="utf-8") as file:
    facts = json.load(file)
  seq_len, vocab_size = facts["seq_len"], facts["vocab_size"]
  weights = jax.device_put(load_file(os.path.join(folder, "weights.safetensors")))
  run = jax.jit(program.call)

  def logits(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 2 or not 0 < tokens.shape[1] <= seq_len:
      raise ValueError(f"tokens of shape {tokens.shape}: must be [batch, length], length at most {seq_len}")
    if not isinstance(tokens, jax.core.Tracer) and not bool(((tokens >= 0) & (tokens < vocab_size)).all()):
      raise ValueError(f"tokens: the model's ids are 0 to {vocab_size - 1}")
    return run(weights, tokens)

  return logits


if __name__ == "__main__":
  logits = load(os.path.dirname(os.path.abspath(__file__)))([list(map(int, sys.argv[1:]))])
  print(jax.lax.top_k(logits[0, -1], min(5, logits.shape[-1])))
