"""Remembers tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from litellm_compaction.concurrency import Bounded
from litellm_compaction.stores import Facts

_MOST_SCOPES = 4096
_FACT = "wanted"
# So long a tenant without any counts as such: another process may be asked for its first.
_NONE_S = 1.0
# A store that does not answer delays no request again soon.
_STORE_SILENT_S, _STORE_TIMEOUT_S = 30.0, 2.0


class SmallConversations:
    def __init__(self, store: Facts, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        # A time until which a scope has none; infinite if it has.
        self._known_until_s: Bounded[str, float] = Bounded(_MOST_SCOPES)

    async def are_compacted(self, scope: str) -> bool:
        """Returns True if one of a scope has been compacted: by another process, or before a restart, as well.

        The store is asked once a second at most, and never again if there is one.
        """
        until_s = self._known_until_s.get(scope, -math.inf)
        if until_s <= self._clock():
            try:
                found = await asyncio.wait_for(self._store.get_fact(scope, _FACT), _STORE_TIMEOUT_S)
                until_s = math.inf if found is not None else self._clock() + _NONE_S
            except Exception:  # noqa: BLE001 - the store tells its own troubles; the request is small
                until_s = self._clock() + _STORE_SILENT_S
            # What this process has made meanwhile is known better.
            until_s = max(until_s, self._known_until_s.get(scope, until_s))
            self._known_until_s[scope] = until_s
        return until_s == math.inf

    async def remember(self, scope: str) -> None:
        """Before the answer begins: the next turn may come to another process."""
        self._known_until_s[scope] = math.inf
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(scope, _FACT, "1"), _STORE_TIMEOUT_S)
