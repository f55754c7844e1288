"""Tokens of the pieces of rendered prompts, remembered by hash, so that the next turn counts only what is new.

Called by `counting.py`. A key is a short text itself, or the length and the hash of a longer one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from litellm_compaction.models.tokenizers import vocabulary

# About 200 bytes each.
_MAX_ENTRIES = 65_536
_SHORT_CHARS = 64
_Key: TypeAlias = tuple[str, "str | tuple[int, int]"]


class Lookup(NamedTuple):
    """Texts and what is known of them.

    Attributes:
        texts: n.
        keys: one per text.
        lengths: tokens of each; None where it has to be counted.
        new_chars: characters of the texts that have to be counted.
    """

    texts: Sequence[str]
    keys: list[_Key]
    lengths: list[int | None]
    new_chars: int


class SegmentLengths:
    """Least recently used ones are forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Key, int] = OrderedDict()
        self._lock = threading.Lock()

    def look_up(self, vocabulary_name: str, texts: Sequence[str]) -> Lookup:
        """What is known of texts that stand behind special tokens: about 0.5 ms per MB."""
        keys = [_key(vocabulary_name, text) for text in texts]
        with self._lock:
            lengths = [self._entries.get(key) for key in keys]
            for key, length in zip(keys, lengths, strict=True):
                if length is not None:
                    self._entries.move_to_end(key)
        new_chars = sum(len(text) for text, length in zip(texts, lengths, strict=True) if length is None)
        return Lookup(texts, keys, lengths, new_chars)

    def complete(self, vocabulary_name: str, lookup: Lookup) -> list[int]:
        """Tokens of each text, counted in this thread where they are not known: about 0.1 s per MB."""
        missing = [index for index, length in enumerate(lookup.lengths) if length is None]
        if missing:
            counted = vocabulary(vocabulary_name).lengths_in_prompt([lookup.texts[index] for index in missing])
            with self._lock:
                for index, length in zip(missing, counted, strict=True):
                    lookup.lengths[index] = self._entries[lookup.keys[index]] = length
                while len(self._entries) > _MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return [length or 0 for length in lookup.lengths]


def _key(vocabulary_name: str, text: str) -> _Key:
    if len(text) <= _SHORT_CHARS:
        return vocabulary_name, text
    # The interpreter's own hash: 64 bit, seeded for this process, three times as fast as a digest of the bytes.
    return vocabulary_name, (len(text), hash(text))
