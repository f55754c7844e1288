"""Remembers the tokens of texts by length and hash, never by the text."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.tokenizers.registry import vocabulary

# A text by itself, with each of its digits a token, or as it is after a special token of a prompt.
Place: TypeAlias = Literal["alone", "digits apart", "in prompt"]

# About 200 bytes each.
_MAX_ENTRIES = 65_536
# A longer text by itself is estimated by pieces of it.
_EXACT_CHARS, _PIECES, _PIECE_CHARS = 262_144, 8, 16_384


class TextCounts:
    """Tokens by hash, least recently used ones forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: Bounded[tuple[int, int], int] = Bounded(_MAX_ENTRIES)
        self._lock = threading.Lock()
        self._asker = ""

    def of(self, asker: str) -> TextCounts:
        """The same memory and bound for another tenant, who finds only their own entries."""
        own = copy.copy(self)
        own._asker = asker
        return own

    def lengths(self, vocabulary_name: str, texts: Sequence[str], place: Place = "alone") -> list[int]:
        """The tokens of each text; new ones are counted in this thread, about 0.1 s per MB."""
        # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that
        # is counted twice is read once. Another tenant's are other ones.
        own = hash((self._asker, vocabulary_name, place))
        keys = [(len(text), hash((own, text))) for text in texts]
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            for key, tokens in zip(keys, found, strict=True):
                if tokens is not None:
                    self._entries.move_to_end(key)
        missing = [index for index, tokens in enumerate(found) if tokens is None]
        if missing:
            words, new = vocabulary(vocabulary_name), [texts[index] for index in missing]
            counted = words.lengths_in_prompt(new) if place == "in prompt" else words.lengths(new)
            if place == "digits apart":
                counted = [tokens + 2 * _digits(text) // 3 for tokens, text in zip(counted, new, strict=True)]
            with self._lock:
                for index, tokens in zip(missing, counted, strict=True):
                    found[index] = self._entries[keys[index]] = tokens
        return [tokens or 0 for tokens in found]

    def sampled(self, vocabulary_name: str, texts: Sequence[str], place: Place = "alone") -> list[float]:
        """The tokens of each text; eight pieces stand for all of one that is long, so that none takes above 20 ms."""
        pieces = [_pieces(text) for text in texts]
        left = iter(self.lengths(vocabulary_name, [each for group in pieces for each in group], place))
        return [
            sum(next(left) for _ in group) * len(text) / max(1, sum(map(len, group)))
            for text, group in zip(texts, pieces, strict=True)
        ]


def _pieces(text: str) -> list[str]:
    """A text, or equal pieces from all over it."""
    if len(text) <= _EXACT_CHARS:
        return [text]
    step = len(text) // _PIECES
    return [text[start : start + _PIECE_CHARS] for start in range(0, step * _PIECES, step)]


def _digits(text: str) -> int:
    """Vocabularies with stand-ins split numbers into digits, of which cl100k takes three at once."""
    return sum(map(text.count, "0123456789"))
