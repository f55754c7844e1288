"""Compactions in the memory of one process: least recently used first out, bounded in bytes and age."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from litellm_compaction.core.compaction import Compaction

# Python objects, hashes and numbers around a compaction's texts, rounded up.
_OVERHEAD_BYTES = 600


class _Entry(NamedTuple):
    compaction: Compaction
    size_bytes: int
    expires_s: float


class MemoryStore:
    """A dict with bounds; every method is one step of the event loop, so no lock is needed.

    Args:
        ttl_s: seconds after which an entry that nobody used is forgotten.
        max_bytes: bound on all entries together.
        clock: seconds, monotonic.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._used_bytes = 0

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """The compactions in `scope` whose covered hash is one of `hashes`, the one that covers most first."""
        now_s = self._clock()
        found: list[Compaction] = []
        for covered_hash in reversed(hashes):
            key = (scope, covered_hash)
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.expires_s < now_s:
                self._drop(key)
                continue
            self._entries[key] = entry._replace(expires_s=now_s + self._ttl_s)
            self._entries.move_to_end(key)
            found.append(entry.compaction)
        return found

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps `compaction`, in place of an earlier one that covers the same messages."""
        key = (scope, compaction.covered_hash)
        size_bytes = _OVERHEAD_BYTES + 4 * (len(compaction.summary) + len(compaction.ledger))
        self._drop(key)
        self._entries[key] = _Entry(compaction, size_bytes, self._clock() + self._ttl_s)
        self._used_bytes += size_bytes
        while self._used_bytes > self._max_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    async def aclose(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._used_bytes = 0

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.size_bytes
