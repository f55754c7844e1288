"""A store in the memory of one process, bounded in bytes and age: who has most loses the least recently used first."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.stores.protocol import (
    EVENTS_TTL_S,
    MAX_EVENTS,
    MAX_PLOTS,
    Join,
    Plot,
    StoredCompaction,
    StoredEvent,
    encode,
)

# Python objects, hashes and numbers around an entry's texts, rounded up.
_OVERHEAD_BYTES = 600

_Key: TypeAlias = tuple[Literal["compaction", "fact"], str, str]


class _Entry(NamedTuple):
    value: Compaction | str
    size_bytes: int
    created_s: float
    used_s: float


class MemoryStore:
    """A dict with bounds; every method is one step of the event loop, so no lock is needed.

    Args:
        ttl_s: seconds after which an entry that nobody used is forgotten.
        max_bytes: bound on all entries together; the newest one is kept however large it is.
        clock: wall clock, seconds since 1970.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._bytes_by_scope: Counter[str] = Counter()
        self._events: deque[StoredEvent] = deque(maxlen=MAX_EVENTS)
        self._last_number = 0
        self._settings: dict[str, str] = {}
        self._plots: dict[str, Plot] = {}

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """The compactions in `scope` whose covered hash is one of `hashes`, the one that covers most first."""
        values = (self._use(("compaction", scope, covered_hash)) for covered_hash in reversed(hashes))
        return [value for value in values if isinstance(value, Compaction)]

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps `compaction`, in place of an earlier one that covers the same messages."""
        self._keep(("compaction", scope, compaction.covered_hash), compaction, len(encode(compaction)))

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What was last put under `key`."""
        value = self._use(("fact", scope, key))
        return value if isinstance(value, str) else None

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps `text`, in place of an earlier one under the same key."""
        self._keep(("fact", scope, key), text, len(key) + 4 * len(text))

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        """Adds `text` to what is kept under `key`; gives both together."""
        kept = self._use(("fact", scope, key))
        both = join(kept, text) if isinstance(kept, str) else text
        self._keep(("fact", scope, key), both, len(key) + 4 * len(both))
        return both

    async def get_setting(self, key: str) -> str | None:
        """What an operator chose; it ends with this process."""
        return self._settings.get(key)

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps a choice."""
        self._settings[key] = text

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds to the ring."""
        self._last_number += 1
        self._events.append(StoredEvent(self._last_number, when_s, text))

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The newest `limit` events with a number above `after` and these characters in them, oldest first."""
        since_s = self._clock() - EVENTS_TTL_S
        found = [
            event
            for event in self._events
            if event.number > after and event.when_s >= since_s and containing in event.text
        ]
        return found[-limit:] if limit > 0 else []

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps plots, in place of earlier ones under the same keys."""
        self._plots.update((plot.key, plot) for plot in plots)
        for plot in self._newest_plots()[MAX_PLOTS:]:
            del self._plots[plot.key]

    async def plots(self, *, containing: str = "") -> list[str]:
        """The texts with these characters in them, the newest first."""
        since_s = self._clock() - EVENTS_TTL_S
        return [plot.text for plot in self._newest_plots() if plot.when_s >= since_s and containing in plot.text]

    async def compactions(self) -> list[StoredCompaction]:
        """All that are alive, the most recently used first."""
        alive_since_s = self._clock() - self._ttl_s
        return [
            StoredCompaction(scope, entry.value, entry.created_s, entry.used_s, entry.size_bytes)
            for (_, scope, _), entry in reversed(self._entries.items())
            if isinstance(entry.value, Compaction) and entry.used_s >= alive_since_s
        ]

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets what matches; how many compactions there were among it."""
        doomed = [
            key
            for key, entry in self._entries.items()
            if (scope is None or key[1] == scope)
            and (unused_since_s is None or entry.used_s < unused_since_s)
            and (covered_hash is None or key[::2] == ("compaction", covered_hash))
        ]
        for key in doomed:
            self._drop(key)
        if scope is None:
            kept = [event for event in self._events if unused_since_s is not None and event.when_s >= unused_since_s]
            self._events = deque(kept, maxlen=MAX_EVENTS)
            doomed_plots = [
                plot.key for plot in self._plots.values() if unused_since_s is None or plot.when_s < unused_since_s
            ]
            for plot_key in doomed_plots:
                del self._plots[plot_key]
        return sum(kind == "compaction" for kind, _, _ in doomed)

    async def aclose(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._events.clear()
        self._settings.clear()
        self._plots.clear()
        self._bytes_by_scope.clear()

    def _newest_plots(self) -> list[Plot]:
        return sorted(self._plots.values(), key=lambda plot: (-plot.when_s, plot.key))

    def _use(self, key: _Key) -> Compaction | str | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        now_s = self._clock()
        if entry.used_s < now_s - self._ttl_s:
            self._drop(key)
            return None
        self._entries[key] = entry._replace(used_s=now_s)
        self._entries.move_to_end(key)
        return entry.value

    def _keep(self, key: _Key, value: Compaction | str, text_bytes: int) -> None:
        now_s = self._clock()
        self._drop(key)
        self._entries[key] = _Entry(value, _OVERHEAD_BYTES + text_bytes, now_s, now_s)
        self._bytes_by_scope[key[1]] += _OVERHEAD_BYTES + text_bytes
        while self._bytes_by_scope.total() > self._max_bytes and len(self._entries) > 1:
            # One tenant's records take nothing from those who have fewer.
            [(largest, _)] = self._bytes_by_scope.most_common(1)
            oldest = next(each for each in self._entries if each[1] == largest)
            self._drop(oldest if oldest != key else next(iter(self._entries)))

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes_by_scope[key[1]] -= entry.size_bytes
            if not self._bytes_by_scope[key[1]]:
                del self._bytes_by_scope[key[1]]
