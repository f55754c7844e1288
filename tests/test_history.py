"""Events in the store: written behind the request's back, and no trouble of the request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from litellm_compaction.events import event_from_json
from litellm_compaction.proxy.observers import History
from litellm_compaction.stores import Store
from litellm_compaction.stores.sqlite import MemoryRows
from tests.stores.made import FailingRows, MemoryStore
from tests.test_events import ALARM, CUT, event


class Gated(MemoryStore):
    """A store that waits at a gate."""

    gate = asyncio.Event()

    async def add_event(self, when_s: float, text: str) -> None:
        await self.gate.wait()
        await super().add_event(when_s, text)


async def test_events_are_kept_in_order() -> None:
    """Every field, with the event's own time."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    history = History(store)
    told = [event(when_s=1e12), event(when_s=1e12 + 1), ALARM]
    for each in told:
        history(each)
    # What a restart compacted is told by itself; that an answer was cut is told nowhere else.
    history(replace(CUT, outcome="restarted", when_s=3e12))
    history(cut := replace(CUT, when_s=3e12))
    await asyncio.gather(*history.writing)
    found = await store.events()
    assert [event_from_json(stored.text) for stored in found] == [*told, cut]
    assert [stored.when_s for stored in found] == [1e12, 1e12 + 1, 2e12, 3e12]


async def test_nobody_waits_for_a_slow_store() -> None:
    """Telling returns at once; of what waits the newest thousand are kept."""
    store = Gated(ttl_s=100, max_bytes=1_000_000)
    history = History(store)
    for number in range(1500):
        history(event(when_s=1e12 + number))
    store.gate.set()
    await asyncio.gather(*history.writing)
    assert [stored.when_s - 1e12 for stored in await store.events()] == list(range(500, 1500))


async def test_an_event_at_the_end_of_the_writer_is_written() -> None:
    """That has ended, and stands among the running tasks until the loop's next step."""
    store = Gated(ttl_s=100, max_bytes=1_000_000)
    store.gate, history = asyncio.Event(), History(store)
    history(event(when_s=1e12))
    await asyncio.sleep(0)
    store.gate.set()
    asyncio.get_running_loop().call_soon(history, event(when_s=1e12))
    await asyncio.sleep(0)
    await asyncio.gather(*history.writing)
    assert len(await store.events()) == 2


async def test_a_failing_store_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, no error, and the next event is tried all the same."""
    rows = FailingRows(MemoryRows(ttl_s=100, max_bytes=1_000_000))
    history = History(store := Store(rows))
    for rows.failing in ({"append"}, {"append"}, set()):
        history(event(when_s=1e12))
        await asyncio.gather(*history.writing)
    assert len(await store.events()) == 1
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "history_failed disk full; this is said once")
    ]
