"""Perplexity of a corpus by token, word and byte, each document by itself."""

from collections.abc import Iterable
import itertools
import math
import re

from diffeq_nnx.harness.adapter import DiffEqLM
from diffeq_nnx.training.evaluate import perplexity

GROUP = 256  # documents whose windows are scored together


def measure_perplexity(lm: DiffEqLM, documents: Iterable[str], limit: int | None = None) -> dict[str, float | int]:
  """Measures how well documents are predicted, each token once, in the windows that `lm` was made with.

  Words and bytes are counted as lm_eval counts them: pieces between white space, and bytes of UTF-8.

  Returns:
    perplexity_per_token, perplexity_per_word, perplexity_per_byte, bits_per_byte, nats (the corpus' negative
    log-likelihood), and how many documents, tokens, words and bytes.
  """
  nats, counts = 0.0, {"documents": 0, "tokens": 0, "words": 0, "bytes": 0}
  documents = itertools.islice(documents, limit)
  while group := list(itertools.islice(documents, GROUP)):
    for text, (logprob, tokens) in zip(group, lm.score_texts(group)):
      nats -= logprob
      counts["documents"] += 1
      counts["tokens"] += tokens
      counts["words"] += len(re.split(r"\s+", text))
      counts["bytes"] += len(text.encode())
  per = {f"perplexity_per_{unit}": perplexity(nats / counts[f"{unit}s"]) for unit in ("token", "word", "byte")}
  return {**per, "bits_per_byte": nats / counts["bytes"] / math.log(2), "nats": nats, **counts}
