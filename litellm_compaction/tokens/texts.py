"""Remembers the tokens of texts by length and hash, never by the text."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from math import ceil

from litellm_compaction.concurrency import Bounded
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import vocabulary

# About 200 bytes each.
_MAX_ENTRIES = 65_536
# In the caller's thread so much of a text is counted, in pieces from all over it: 20 ms.
_QUICK_CHARS, _PIECES = 131_072, 8
# Fewer characters say too little of the rest.
_LEAST_CHARS = 64


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

    def lengths(
        self,
        family: Family,
        texts: Sequence[str],
        *,
        in_prompt: bool = False,
        share: float = 1.0,
        is_quick: bool = False,
    ) -> list[float]:
        """The tokens of each text; new ones are counted in this thread, about 0.1 s per MB.

        Args:
            family: whose vocabulary counts.
            texts: to be counted.
            in_prompt: each stands after a special token of a prompt; else by itself.
            share: of each text stands for all of it.
            is_quick: no more than 20 ms are spent on one.
        """
        pieces = [_pieces(text, min(share, _QUICK_CHARS / len(text)) if is_quick and text else share) for text in texts]
        left = iter(self._lengths(family, [piece for group in pieces for piece in group], in_prompt=in_prompt))
        return [
            sum(next(left) for _ in group) * len(text) / max(1, sum(map(len, group)))
            for text, group in zip(texts, pieces, strict=True)
        ]

    def _lengths(self, family: Family, texts: Sequence[str], *, in_prompt: bool) -> list[int]:
        # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that
        # is counted twice is read once. Another tenant's are other ones.
        own = hash((self._asker, family.vocabulary, family.single_digits, in_prompt))
        keys = [(len(text), hash((own, text))) for text in texts]
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            for key, tokens in zip(keys, found, strict=True):
                if tokens is not None:
                    self._entries.move_to_end(key)
        missing = [index for index, tokens in enumerate(found) if tokens is None]
        if missing:
            words, new = vocabulary(family.vocabulary), [texts[index] for index in missing]
            counted = words.lengths_in_prompt(new) if in_prompt else words.lengths(new)
            if family.single_digits:
                # cl100k, which stands in, takes three digits at once.
                counted = [tokens + 2 * _digits(text) // 3 for tokens, text in zip(counted, new, strict=True)]
            with self._lock:
                for index, tokens in zip(missing, counted, strict=True):
                    found[index] = self._entries[keys[index]] = tokens
        return [tokens or 0 for tokens in found]


def _pieces(text: str, share: float) -> list[str]:
    """A text, or equal pieces from all over it that are together such a share of it; of a short one its beginning."""
    chars = max(ceil(share * len(text)), _LEAST_CHARS)
    if chars >= len(text):
        return [text]
    pieces = min(_PIECES, chars // _LEAST_CHARS)
    step = len(text) // pieces
    return [text[start : start + chars // pieces] for start in range(0, step * pieces, step)]


def _digits(text: str) -> int:
    return sum(map(text.count, "0123456789"))
