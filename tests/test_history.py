"""Events in the store: written behind the request's back, and no trouble of the request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from litellm_compaction.errors import StoreError
from litellm_compaction.events import TruncationAlarm, event_from_json
from litellm_compaction.proxy.service import History
from tests.stores.made import MemoryStore
from tests.test_events import CUT, event

ALARM = TruncationAlarm(model="qwen", window_tokens=1, expected_tokens=2, reported_tokens=3, reason="x", when_s=2e12)


class Gated(MemoryStore):
    """A store that waits at a gate, and then fails if told to."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(ttl_s=100, max_bytes=1_000_000)
        self.gate = asyncio.Event()
        self.fails = fails
        self.asked = 0

    async def add_event(self, when_s: float, text: str) -> None:
        self.asked += 1
        await self.gate.wait()
        if self.fails:
            raise StoreError("disk full")
        await super().add_event(when_s, text)


async def test_events_are_kept_in_order() -> None:
    """Every field, with the event's own time."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    history = History(store)
    told = [event(when_s=1e12), event(when_s=1e12 + 1), ALARM]
    for each in told:
        history(each)
    await asyncio.gather(*history.writing)
    history(later := event(when_s=1e12 + 3))
    # What a restart compacted is told by itself; that an answer was cut is told nowhere else.
    history(replace(CUT, outcome="restarted", when_s=3e12))
    history(cut := replace(CUT, when_s=3e12))
    await asyncio.gather(*history.writing)
    found = await store.events()
    assert [event_from_json(stored.text) for stored in found] == [*told, later, cut]
    assert [stored.when_s for stored in found] == [1e12, 1e12 + 1, 2e12, 1e12 + 3, 3e12]


async def test_nobody_waits_for_a_slow_store() -> None:
    """Telling returns at once; of what waits the newest thousand are kept."""
    store = Gated()
    history = History(store)
    for number in range(1500):
        history(event(when_s=1e12 + number))
    store.gate.set()
    await asyncio.gather(*history.writing)
    assert [stored.when_s - 1e12 for stored in await store.events()] == list(range(500, 1500))


async def test_a_failing_store_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, no error, and the next event is tried all the same."""
    store = Gated(fails=True)
    store.gate.set()
    history = History(store)
    for _ in range(5):
        history(event())
        await asyncio.gather(*history.writing)
    assert store.asked == 5
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "history_failed disk full; this is said once")
    ]
