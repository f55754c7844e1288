"""The programs behind a vocabulary: tiktoken, `tokenizers`, or none; they know no special tokens.

Each counts a piece of text without holding the interpreter lock for long, and may be used from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import tiktoken
from tokenizers import Tokenizer

# The tokens of a piece of ordinary text without surrogates.
Encoder: TypeAlias = Callable[[str], int]

# How a vocabulary that comes from SentencePiece writes a space.
_SPACE = "▁"
# Longer words are data, which does not come again; about 150 bytes each, per vocabulary.
_MAX_WORD_CHARS, _MAX_WORDS = 64, 16_384


def by_tiktoken(encoding: tiktoken.Encoding) -> Encoder:
    return lambda piece: len(encoding.encode_ordinary(piece))


def by_tokenizers(tokenizer: Tokenizer) -> Encoder:
    """A batch of one: `encode` holds the interpreter lock, and a larger batch takes every core from the event loop."""
    return lambda piece: len(tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])


def by_words(tokenizer: Tokenizer, pattern: str, across: Sequence[str]) -> Encoder:
    """For a vocabulary in which words can be told apart: those that come again are remembered.

    Their tokens are asked of the model alone, without the steps around it, which take two thirds of the time. `pattern`
    divides text, and the tokens `across` reach over the space between two words.
    """
    find, whole, tokenize = re.compile(pattern).findall, by_tokenizers(tokenizer), tokenizer.model.tokenize
    remembered = lru_cache(maxsize=_MAX_WORDS)(lambda word: len(tokenize(word)))

    def length(piece: str) -> int:
        text = piece.replace(" ", _SPACE)
        words = find(text)
        if any(token in text for token in across) or max(map(len, words), default=0) > _MAX_WORD_CHARS:
            return whole(piece)
        return sum(map(remembered, words))

    return length


def by_characters(piece: str) -> int:
    """No vocabulary at all: four characters, begun or full, are a token."""
    return -(-len(piece) // 4)


def is_foreign_failure(error: BaseException) -> bool:
    """Returns True if a vocabulary that cannot be built or used raised this, and nothing that is to end the program.

    `tokenizers` raises bare Exception; the Rust side of both packages panics with a BaseException without an import.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
