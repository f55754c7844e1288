"""What a vocabulary makes of texts, remembered by hash, and computed where it stalls nobody.

Called by `counter.py`. Conversations are not kept here: a key is lengths and hashes.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from litellm_compaction.models.rendering import Form, written
from litellm_compaction.models.tokenizers import is_loaded, token_length

# 30,000 characters take 2 to 4 ms; more new text is counted outside the event loop's thread.
_THREAD_CHARS = 30_000
# Hashes alone of this much take 0.5 to 1 ms.
_HASH_CHARS = 1_000_000
# About 250 bytes each.
_MAX_ENTRIES = 65_536
_SLICE_CHARS = 65_536
_DIGIT = re.compile(r"[0-9]")
_DIGIT_GROUP = re.compile(r"[0-9]{1,3}")


class Measure(NamedTuple):
    """What is known of some texts together.

    Attributes:
        tokens: of the vocabulary.
        digit_tokens: how many more they are where every digit stands alone (cl100k and o200k take three at once).
        chars: characters.
        other_chars: those of them beyond ASCII.
    """

    tokens: int
    digit_tokens: int
    chars: int
    other_chars: int


class Item(NamedTuple):
    """Texts that are measured together."""

    texts: tuple[str, ...]
    form: Form = "plain"


_Key = tuple[str, Form, tuple[int, ...], tuple[int, ...]]


class Measures:
    """Measures by hash, least recently used ones forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Key, Measure] = OrderedDict()
        self._lock = threading.Lock()

    async def get(self, vocabulary_name: str, items: Sequence[Item]) -> list[Measure]:
        """One measure per item; known ones without a thread, long new ones in a thread."""
        chars = sum(len(text) for item in items for text in item.texts)
        if chars > _HASH_CHARS:
            return await asyncio.to_thread(self.get_now, vocabulary_name, items)
        keys = [_key(vocabulary_name, item) for item in items]
        known = self._known(keys)
        new_chars = sum(
            sum(map(len, item.texts)) for item, measure in zip(items, known, strict=True) if measure is None
        )
        if new_chars > _THREAD_CHARS or (new_chars and not is_loaded(vocabulary_name)):
            return await asyncio.to_thread(self._complete, vocabulary_name, items, keys, known)
        return self._complete(vocabulary_name, items, keys, known)

    def get_now(self, vocabulary_name: str, items: Sequence[Item]) -> list[Measure]:
        """One measure per item, in this thread."""
        keys = [_key(vocabulary_name, item) for item in items]
        return self._complete(vocabulary_name, items, keys, self._known(keys))

    def _known(self, keys: Sequence[_Key]) -> list[Measure | None]:
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            for key, measure in zip(keys, found, strict=True):
                if measure is not None:
                    self._entries.move_to_end(key)
        return found

    def _complete(
        self, vocabulary_name: str, items: Sequence[Item], keys: Sequence[_Key], known: Sequence[Measure | None]
    ) -> list[Measure]:
        result: list[Measure] = []
        for item, key, measure in zip(items, keys, known, strict=True):
            if measure is None:
                measure = _measure(vocabulary_name, item)
                with self._lock:
                    self._entries[key] = measure
                    if len(self._entries) > _MAX_ENTRIES:
                        self._entries.popitem(last=False)
            result.append(measure)
        return result


def _key(vocabulary_name: str, item: Item) -> _Key:
    # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that is
    # counted twice is read once.
    return vocabulary_name, item.form, tuple(map(len, item.texts)), tuple(map(hash, item.texts))


def _measure(vocabulary_name: str, item: Item) -> Measure:
    tokens = digit_tokens = chars = other_chars = 0
    for text in written(item.texts, item.form):
        tokens += token_length(vocabulary_name, text)
        chars += len(text)
        # In slices, since a regex over megabytes would hold the interpreter lock, and with it the event loop.
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            digit_tokens += len(_DIGIT.findall(part)) - len(_DIGIT_GROUP.findall(part))
        other_chars += len(text) - len(text.encode("ascii", "ignore"))
    return Measure(tokens, digit_tokens, chars, other_chars)
