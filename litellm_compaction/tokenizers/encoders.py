"""The programs behind a vocabulary: tiktoken, `tokenizers`, or none; they know no special tokens.

All count pieces of text without holding the interpreter lock for long, and may be used from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import tiktoken
from tokenizers import Tokenizer

# How a vocabulary that comes from SentencePiece writes a space.
_SPACE = "▁"
# Longer words are data, which does not come again; about 150 bytes each, per vocabulary.
_MAX_WORD_CHARS, _MAX_WORDS = 64, 16_384


class Encoder(Protocol):
    """Counts tokens of ordinary text."""

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        """Tokens of each piece; no piece holds surrogates."""


class TiktokenEncoder:
    """A byte-level vocabulary by tiktoken."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        return [self._length(piece) for piece in pieces]

    def _length(self, piece: str) -> int:
        try:
            return len(self.encoding.encode_ordinary(piece))
        except BaseException as error:
            if not is_foreign_failure(error):
                raise
            return _most_tokens(piece)


class TokenizersEncoder:
    """A vocabulary of the `tokenizers` package; its `encode` would hold the interpreter lock, its batches do not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        # One at a time: a batch is divided among threads of its own, which compete with the event loop for every core.
        return list(map(self._length, pieces))

    def _length(self, piece: str) -> int:
        try:
            return len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
        except BaseException as error:
            if not is_foreign_failure(error):
                raise
            return _most_tokens(piece)


class WordsEncoder(TokenizersEncoder):
    """The same for a vocabulary in which words can be told apart: those that come again are remembered.

    Their tokens are asked of the model alone, without the steps around it, which take two thirds of the time.
    """

    def __init__(self, tokenizer: Tokenizer, pattern: str, across: Sequence[str]) -> None:
        """Takes the pattern that divides text, and the tokens that reach over the space between two words."""
        super().__init__(tokenizer)
        self._words = re.compile(pattern)
        self._across = across
        self._tokenize = tokenizer.model.tokenize
        self._remembered = lru_cache(maxsize=_MAX_WORDS)(self._word_length)

    def _word_length(self, word: str) -> int:
        return len(self._tokenize(word))

    def _length(self, piece: str) -> int:
        text = piece.replace(" ", _SPACE)
        words = self._words.findall(text)
        if any(token in text for token in self._across) or max(map(len, words), default=0) > _MAX_WORD_CHARS:
            return super()._length(piece)
        return sum(map(self._remembered, words))


class CharactersEncoder:
    """No vocabulary at all: four characters, begun or full, are a token."""

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        return [-(-len(piece) // 4) for piece in pieces]


def _most_tokens(piece: str) -> int:
    """The tokens of a piece on which a program has failed: no token is shorter than one byte."""
    return len(piece.encode())


def is_foreign_failure(error: BaseException) -> bool:
    """Returns True if a vocabulary that cannot be built or used raised this, and nothing that is to end the program.

    `tokenizers` raises bare Exception; the Rust side of both packages panics with a BaseException without an import.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
