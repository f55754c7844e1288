"""Keeps events in a store, for `litellm-compaction events` and the page, without holding up requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from litellm_compaction.errors import CompactionError
from litellm_compaction.events import ContinuationEvent, Event, event_to_json
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")

# Lines that may wait for a slow disk; beyond that the oldest are not kept.
_MAX_WAITING = 1000


class History:
    """Writes lines to `store` in the background, in its event loop; a failure is logged once and ignored."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Event] = deque(maxlen=_MAX_WAITING)
        self._writing: asyncio.Task[None] | None = None
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        # The compaction of a restart is an event of its own.
        if isinstance(event, ContinuationEvent) and event.outcome == "restarted":
            return
        self._waiting.append(event)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def settle(self) -> None:
        """Returns when all lines so far are written, or given up."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            try:
                await self._store.add_event(event.when_s, event_to_json(event))
            except Exception as error:  # noqa: BLE001 - nothing that is only told may harm a request
                if not self._has_warned:
                    said = str(error) if isinstance(error, CompactionError) else type(error).__name__
                    logger.warning("history_failed %s; this is said once", said)
                self._has_warned = True
