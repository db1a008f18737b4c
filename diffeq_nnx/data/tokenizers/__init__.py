"""Tokenizers behind one interface: sentencepiece models, byte-pair vocabularies of bytes or characters, bytes."""

from diffeq_nnx.data.tokenizers.base import Tokenizer, UnknownByte
from diffeq_nnx.data.tokenizers.byte_fallback import ByteFallbackTokenizer
from diffeq_nnx.data.tokenizers.byte_pairs import BytePairTokenizer, ByteTokenizer
from diffeq_nnx.data.tokenizers.files import CHAT_TEMPLATE, name_marks, read_template_file, save
from diffeq_nnx.data.tokenizers.loading import load
from diffeq_nnx.data.tokenizers.sentencepieces import SentencePieceTokenizer, train
