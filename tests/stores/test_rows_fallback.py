"""A store that always works: what a failing one costs, what it says, and when the memory hands over."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores import Store
from litellm_compaction.stores.rows import SteadyRows
from litellm_compaction.stores.sqlite import MemoryRows
from tests.stores.compactions import compaction
from tests.stores.made import FailingRows

READS, WRITES = {"find", "scan", "tail"}, {"put", "change", "append", "delete"}


class Slow(MemoryRows):
    """Takes nothing that is large, and lets others come first, as anything does that is not in memory."""

    async def put(self, scope: str, key: str, body: bytes) -> None:
        await asyncio.sleep(0)
        if len(body) > 1500:
            raise TooLargeForStore("too large")
        await super().put(scope, key, body)

    is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


class Steady:
    """A store over rows that may fail, with a clock."""

    def __init__(self) -> None:
        self.kept = Slow(ttl_s=100, max_bytes=1_000_000)
        self.rows = FailingRows(self.kept)
        self.durable = Store(self.kept)
        self.now_s = 0.0
        spare = MemoryRows(ttl_s=1e6, max_bytes=1_000_000)
        self.store = Store(SteadyRows(self.rows, spare, clock=lambda: self.now_s))

    async def hand_over(self) -> None:
        """Lets the next call find that all is well: short conversations ask a store for nothing but settings."""
        self.rows.failing = set()
        self.now_s += 10
        await self.store.get_setting("live")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" ")[0] for record in caplog.records]


async def test_nothing_but_deleting_and_settings_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Of a setting in its memory each worker would have its own; of the rest there is one warning an hour."""
    made = Steady()
    made.rows.failing = READS | WRITES
    for _ in range(3):
        await made.store.put("team", compaction("h"))
        assert len(await made.store.find("team", ["h"])) == 1
        await made.store.put_fact("model", "ratio", "1")
        assert await made.store.get_fact("model", "ratio") == "1"
        assert await made.store.get_fact("model", "other") is None
        await made.store.add_event(1e12, "{}")
        assert [event.text for event in await made.store.events(limit=1)] == ["{}"]
        assert len(await made.store.compactions()) == 1
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "store_failed disk full; requests go on with the memory of this process")
    ]
    for made.now_s, count in ((3599.0, 1), (3600.0, 2)):
        await made.store.find("team", ["h"])
        assert len(caplog.records) == count
    made.rows.failing, made.now_s = WRITES, 7200.0
    await made.store.find("team", ["h"])
    assert len(caplog.records) == 3, "nothing can be handed over yet"
    made.rows.failing = READS | WRITES
    for call in (made.store.delete(), made.store.put_setting("mode", "off"), made.store.get_setting("mode")):
        with pytest.raises(StoreError, match="disk full"):
            await call


async def test_what_the_spare_took_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Other processes find it then; the end of the outage is told once, and its history stays in this process."""
    caplog.set_level(logging.INFO)
    made = Steady()
    await made.store.add_event(1e12, "before")
    made.rows.failing = READS | WRITES
    await made.store.put("team", compaction("h4", text="during"))
    await made.store.add_event(1e12, "during")
    assert [event.text for event in await made.store.events()] == ["during"]
    await made.hand_over()
    assert [each.summary for each in await made.durable.find("team", ["h4"])] == ["during"]
    assert [event.text for event in await made.store.events()] == ["before"]
    assert len(await made.store.compactions()) == 1
    assert told(caplog) == ["store_failed", "store_recovered"]


async def test_a_long_outage_is_made_up_for_by_and_by() -> None:
    """Sixty-four rows in five seconds: whoever asks meanwhile waits for them; the end of the process takes the rest."""
    made = Steady()
    made.rows.failing = WRITES
    for number in range(130):
        await made.store.put("team", compaction(f"h{number}"))
    made.rows.failing = set()
    for made.now_s, count in ((1.0, 64), (5.9, 64), (6.0, 128), (6.1, 128)):
        await made.store.get_setting("live")
        assert len(await made.durable.compactions()) == count
    await made.store.aclose()
    assert (len(await made.durable.compactions()), made.kept.is_closed) == (130, True)


async def test_a_store_that_comes_and_goes_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Every outage and its end would fill the log."""
    caplog.set_level(logging.INFO)
    made = Steady()
    for number, made.now_s in enumerate((0.0, 30.0, 59.0, 60.0)):
        made.rows.failing = READS
        await made.store.find("team", ["h"])
        made.rows.failing = set()
        await made.store.find("team", ["h"])
        assert told(caplog) == ["store_failed", "store_recovered"] * (2 if number == 3 else 1)


async def test_what_has_the_same_words_is_not_told_apart_after_an_outage() -> None:
    """Nobody knew then which others there were (P9); a step of all processes hands over first what it builds on."""
    made = Steady()
    before, during = (replace(compaction(name), words_hash="words") for name in ("h1", "h2"))
    await made.store.put("team", before)
    assert await made.store.find("team", [], ["words"]) == [before]
    made.rows.failing = WRITES
    await made.store.put("team", during)
    assert await made.store.find("team", ["h2"], ["words"]) == [during]
    await made.store.rows.put("team", "row", b"old")
    made.rows.failing = set()
    await made.store.rows.change("team", "row", lambda kept, _: (kept or b"") + b"+")
    assert [row.body for row in await made.durable.rows.find("team", ["row"])] == [b"old+"]
    await made.hand_over()
    assert await made.durable.find("team", ["h2"], ["words"]) == [during]


async def test_what_is_purged_while_it_is_handed_over_stays_purged() -> None:
    """A hand-over that is under way writes none of it anew."""
    made = Steady()
    made.rows.failing = WRITES
    for number in range(5):
        await made.store.put("team", compaction(f"h{number}"))
    made.rows.failing, made.now_s = set(), 10.0
    handing_over = asyncio.ensure_future(made.store.find("team", ["none"]))
    # The first of them is being written.
    await asyncio.sleep(0)
    await made.store.delete()
    await handing_over
    await made.hand_over()
    assert await made.durable.compactions() == await made.store.compactions() == []


async def test_what_is_too_large_for_the_store_holds_nothing_else_up(caplog: pytest.LogCaptureFixture) -> None:
    """This process keeps it; it is no outage, and what stands behind it in one is handed over."""
    caplog.set_level(logging.INFO)
    made = Steady()
    await made.store.put("team", compaction("large", text="x" * 2000))
    assert len(await made.store.find("team", ["large"])) == 1
    assert [record.getMessage() for record in caplog.records] == ["store_refused too large; this process keeps it"]
    await made.store.put("team", compaction("large", text="short"))
    assert [each.summary for each in await made.store.find("team", ["large"])] == ["short"]
    made.rows.failing = WRITES
    for name in ("a", "larger", "b"):
        await made.store.put("team", compaction(name, text="x" * 2000 if name == "larger" else "x"))
    await made.hand_over()
    assert {each.compaction.covered_hash for each in await made.durable.compactions()} == {"a", "b", "large"}
    assert told(caplog)[-1] == "store_recovered"
