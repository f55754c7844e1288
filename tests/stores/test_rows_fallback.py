"""A store that always works: what a failing one costs, and what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores import Store
from litellm_compaction.stores.rows import Change, Line, MemoryRows, Row, SteadyRows
from tests.stores.compactions import compaction
from tests.virtual_time import played


class Failing(MemoryRows):
    """Rows in memory that fail where they are told to, and keep what they have when they are ended, as a file does."""

    def __init__(self) -> None:
        super().__init__(ttl_s=100, max_bytes=1_000_000)
        self.reads_fail = self.writes_fail = self.yields = False

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        self._may_fail(self.reads_fail)
        return await super().find(scope, keys)

    async def put(self, scope: str, key: str, body: bytes) -> None:
        if self.yields:
            # As anything that is not in memory, it lets others come first.
            await asyncio.sleep(0)
        self._may_fail(self.writes_fail)
        if len(body) > 1500:
            raise TooLargeForStore("too large")
        await super().put(scope, key, body)

    async def change(self, scope: str, key: str, change: Change) -> None:
        self._may_fail(self.writes_fail)
        await super().change(scope, key, change)

    async def scan(self) -> list[Row]:
        self._may_fail(self.reads_fail)
        return await super().scan()

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        self._may_fail(self.writes_fail)
        return await super().delete(scope=scope, before_s=before_s, key=key)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        self._may_fail(self.writes_fail)
        await super().append(log, when_s, body, most=most)

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        self._may_fail(self.reads_fail)
        return await super().tail(log, after=after, most=most, containing=containing)

    async def aclose(self) -> None:
        pass

    def _may_fail(self, fails: bool) -> None:
        if fails:
            raise StoreError("disk full")


class Steady:
    """A store over rows that may fail, with a clock."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.rows = Failing()
        self.durable = Store(self.rows)
        self.now_s = 0.0
        spare = MemoryRows(ttl_s=1e6, max_bytes=1_000_000)
        self.store = Store(SteadyRows(self.rows, spare, clock=clock or (lambda: self.now_s)))


async def test_what_a_full_disk_does_not_take_is_found_all_the_same() -> None:
    """Beside what was there before, longest first, the later of two that cover the same."""
    made = Steady()
    await made.store.put("team", compaction("h2", covered=2))
    await made.store.put("team", compaction("h4", covered=4, text="before"))
    made.rows.writes_fail = True
    await made.store.put("team", compaction("h3", covered=3))
    await made.store.put("team", compaction("h4", covered=4, text="after"))
    found = await made.store.find("team", ["h1", "h2", "h3", "h4"])
    assert [(each.covered_hash, each.summary) for each in found] == [
        ("h4", "after"),
        ("h3", "What happened."),
        ("h2", "What happened."),
    ]
    made.rows.writes_fail = False
    await made.store.put("team", compaction("h5", covered=5))
    assert len(await made.durable.find("team", ["h5"])) == 1


async def test_settings_are_never_kept_in_the_memory_of_one_process() -> None:
    """Whoever chooses or asks is told, so that no worker goes its own way."""
    made = Steady()
    await made.store.put_setting("mode", "observe")
    assert await made.store.get_setting("mode") == "observe"
    made.rows.reads_fail = made.rows.writes_fail = True
    with pytest.raises(StoreError, match="disk full"):
        await made.store.put_setting("mode", "off")
    with pytest.raises(StoreError, match="disk full"):
        await made.store.get_setting("mode")


async def test_nothing_but_deleting_and_settings_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Every other call works while nothing below does; one warning, and one more an hour later."""
    made = Steady()
    made.rows.reads_fail = made.rows.writes_fail = True
    for _ in range(3):
        await made.store.put("team", compaction("h"))
        assert len(await made.store.find("team", ["h"])) == 1
        await made.store.put_fact("model", "ratio", "1")
        assert await made.store.get_fact("model", "ratio") == "1"
        assert await made.store.get_fact("model", "other") is None
        await made.store.add_event(1e12, "{}")
        assert [event.text for event in await made.store.events(limit=1)] == ["{}"]
        await made.store.add_turn(1e12, "{}")
        assert (await made.store.turns())[-1] == "{}"
        assert len(await made.store.compactions()) == 1
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "store_failed disk full; requests go on with the memory of this process")
    ]
    made.now_s = 3601
    await made.store.find("team", ["h"])
    assert len(caplog.records) == 2
    with pytest.raises(StoreError, match="disk full"):
        await made.store.delete()


async def handed_over(made: Steady) -> None:
    """Lets what was begun behind a call end."""
    made.now_s += 10
    for _ in range(50):
        await made.store.find("team", ["none"])
        await asyncio.sleep(0)


async def test_what_the_spare_took_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Other processes find it then; nothing is there twice, and the end of the outage is told once."""
    caplog.set_level(logging.INFO)
    made = Steady()
    await made.store.add_event(1e12, "before")
    made.rows.reads_fail = made.rows.writes_fail = True
    await made.store.put("team", compaction("h4", text="during"))
    await made.store.put_fact("model", "ratio", "1")
    await made.store.add_event(1e12, "during")
    assert [event.text for event in await made.store.events()] == ["during"]
    made.rows.reads_fail = made.rows.writes_fail = False
    await handed_over(made)
    assert [each.summary for each in await made.durable.find("team", ["h4"])] == ["during"]
    assert await made.durable.get_fact("model", "ratio") == "1"
    assert [event.text for event in await made.store.events()] == ["before"], "history stays in this process"
    assert len(await made.store.compactions()) == 1
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["store_failed", "store_recovered"]
    await made.durable.put_fact("model", "ratio", "2")
    assert await made.store.get_fact("model", "ratio") == "2"


def letters(kept: str, new: str) -> str:
    """A fact that can be added to."""
    return "".join(sorted({*kept, *new}))


async def test_what_was_added_during_an_outage_is_added_behind_it() -> None:
    """It takes nothing away of what other processes have added to the same fact meanwhile."""
    made = Steady()
    assert await made.store.merge_fact("model", "letters", "b", letters) == "b"
    made.rows.reads_fail = made.rows.writes_fail = True
    assert await made.store.merge_fact("model", "letters", "c", letters) == "c"
    made.rows.reads_fail = made.rows.writes_fail = False
    assert await made.store.get_fact("model", "letters") == "bc"
    await made.durable.merge_fact("model", "letters", "a", letters)
    await handed_over(made)
    assert await made.durable.get_fact("model", "letters") == "abc"
    assert await made.store.get_fact("model", "letters") == "abc"


async def test_a_newer_value_counts_before_the_hand_over() -> None:
    """Whatever the spare has kept of the outage."""
    made = Steady()
    made.rows.writes_fail = True
    await made.store.put("team", compaction("h4", text="during"))
    await made.store.put_fact("model", "ratio", "1")
    made.now_s += 1
    made.rows.writes_fail = False
    await made.store.put("team", compaction("h4", text="after"))
    await made.store.put_fact("model", "ratio", "2")
    assert [each.summary for each in await made.store.find("team", ["h4"])] == ["after"]
    assert await made.store.get_fact("model", "ratio") == "2"


async def test_a_hand_over_that_fails_is_tried_again() -> None:
    """Nothing is lost when the store fails a second time."""
    made = Steady()
    made.rows.writes_fail = True
    for number in range(5):
        await made.store.put("team", compaction(f"h{number}"))
    await handed_over(made)
    assert await made.durable.compactions() == []
    assert len(await made.store.compactions()) == 5
    made.rows.writes_fail = False
    await handed_over(made)
    assert len(await made.durable.compactions()) == 5


async def test_what_is_purged_while_it_is_handed_over_stays_purged() -> None:
    """A purge waits for the hand-over, which would write anew."""
    made = Steady()
    made.rows.writes_fail = True
    for number in range(5):
        await made.store.put("team", compaction(f"h{number}"))
    made.rows.writes_fail, made.rows.yields, made.now_s = False, True, 10.0
    await made.store.find("team", ["none"])
    # The first of them is being written.
    await asyncio.sleep(0)
    await made.store.delete()
    await handed_over(made)
    assert await made.durable.compactions() == await made.store.compactions() == []


async def test_an_outage_that_comes_and_goes_is_not_told_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """Once a minute at most."""
    caplog.set_level(logging.INFO)
    made = Steady()
    for _ in range(10):
        made.rows.reads_fail = True
        await made.store.find("team", ["h"])
        made.rows.reads_fail = False
        await made.store.find("team", ["h"])
        made.now_s += 1
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["store_failed", "store_recovered"]
    made.now_s += 61
    made.rows.reads_fail = True
    await made.store.find("team", ["h"])
    assert len(caplog.records) == 3


async def test_what_is_too_large_for_the_store_holds_nothing_else_up(caplog: pytest.LogCaptureFixture) -> None:
    """This process keeps it; it is no outage, and what stands behind it in one is handed over."""
    caplog.set_level(logging.INFO)
    made = Steady()
    await made.store.put("team", compaction("large", text="x" * 2000))
    assert len(await made.store.find("team", ["large"])) == 1
    assert [record.getMessage() for record in caplog.records] == ["store_refused too large; this process keeps it"]
    made.rows.writes_fail = True
    for name in ("a", "larger", "b"):
        await made.store.put("team", compaction(name, text="x" * 2000 if name == "larger" else "x"))
    made.rows.writes_fail = False
    await handed_over(made)
    assert {each.compaction.covered_hash for each in await made.durable.compactions()} == {"a", "b"}
    assert caplog.records[-1].getMessage().startswith("store_recovered")


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return played(test, test)


@in_virtual_time
async def test_a_process_that_ends_hands_over_what_only_it_has() -> None:
    """Also where the store comes back a moment later; one that does not come back is not waited for."""
    made = Steady(asyncio.get_running_loop().time)
    for number, writes_fail_s in enumerate((0.0, 0.5, 3600.0)):
        made.rows.writes_fail = True
        await made.store.put("team", compaction(f"h{number}"))
        asyncio.get_running_loop().call_later(writes_fail_s, setattr, made.rows, "writes_fail", False)
        await made.store.aclose()
    assert [each.compaction.covered_hash for each in await made.durable.compactions()] == ["h1", "h0"]


async def test_a_fact_that_is_replaced_in_an_outage_is_replaced_behind_it() -> None:
    """Whatever was added to it before in the same outage."""
    made = Steady()
    await made.durable.put_fact("model", "letters", "z")
    made.rows.writes_fail = True
    await made.store.merge_fact("model", "letters", "a", letters)
    await made.store.put_fact("model", "letters", "n")
    made.rows.writes_fail = False
    await handed_over(made)
    assert await made.durable.get_fact("model", "letters") == "n"
