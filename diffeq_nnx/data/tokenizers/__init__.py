"""Tokenizers behind one interface: sentencepiece models, byte-level byte-pair vocabularies, bytes."""

from diffeq_nnx.data.tokenizers.base import Tokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer, ByteTokenizer
from diffeq_nnx.data.tokenizers.loading import load
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer, train

__all__ = ["BytePairTokenizer", "ByteTokenizer", "SentencePieceTokenizer", "Tokenizer", "load", "train"]
