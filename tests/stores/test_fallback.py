"""A store that always works: what a failing one costs, and what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores import Join, MemoryStore, Plot, SteadyStore, StoredCompaction, StoredEvent
from litellm_compaction.stores.patience import WAIT_S, Patience
from tests.stores.compactions import compaction
from tests.virtual_time import played, run


class Failing(MemoryStore):
    """A memory store that fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(ttl_s=100, max_bytes=1_000_000)
        self.reads_fail = self.writes_fail = False

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        self._may_fail(self.reads_fail)
        return await super().find(scope, hashes)

    async def put(self, scope: str, compaction: Compaction) -> None:
        self._may_fail(self.writes_fail)
        if len(compaction.summary) > 1000:
            raise TooLargeForStore("too large")
        await super().put(scope, compaction)

    async def get_fact(self, scope: str, key: str) -> str | None:
        self._may_fail(self.reads_fail)
        return await super().get_fact(scope, key)

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        self._may_fail(self.writes_fail)
        await super().put_fact(scope, key, text)

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        self._may_fail(self.writes_fail)
        return await super().merge_fact(scope, key, text, join)

    async def get_setting(self, key: str) -> str | None:
        self._may_fail(self.reads_fail)
        return await super().get_setting(key)

    async def put_setting(self, key: str, text: str) -> None:
        self._may_fail(self.writes_fail)
        await super().put_setting(key, text)

    async def add_event(self, when_s: float, text: str) -> None:
        self._may_fail(self.writes_fail)
        await super().add_event(when_s, text)

    async def events(self, *, after: int = 0, limit: int = 10_000, containing: str = "") -> list[StoredEvent]:
        self._may_fail(self.reads_fail)
        return await super().events(after=after, limit=limit, containing=containing)

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        self._may_fail(self.writes_fail)
        await super().put_plots(plots)

    async def plots(self, *, containing: str = "") -> list[str]:
        self._may_fail(self.reads_fail)
        return await super().plots(containing=containing)

    async def compactions(self) -> list[StoredCompaction]:
        self._may_fail(self.reads_fail)
        return await super().compactions()

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        self._may_fail(self.writes_fail)
        return await super().delete(scope=scope, unused_since_s=unused_since_s, covered_hash=covered_hash)

    async def aclose(self) -> None:
        """Keeps what it has, as a file does."""

    def _may_fail(self, fails: bool) -> None:
        if fails:
            raise StoreError("disk full")


class Steady:
    """A steady store over a failing one, with a clock."""

    def __init__(self) -> None:
        self.durable = Failing()
        self.now_s = 0.0
        self.store = SteadyStore(self.durable, MemoryStore(ttl_s=100, max_bytes=1_000_000), clock=lambda: self.now_s)


async def test_what_a_full_disk_does_not_take_is_found_all_the_same() -> None:
    """Beside what was there before, longest first, the later of two that cover the same."""
    made = Steady()
    await made.store.put("team", compaction("h2", covered=2))
    await made.store.put("team", compaction("h4", covered=4, text="before"))
    made.durable.writes_fail = True
    await made.store.put("team", compaction("h3", covered=3))
    await made.store.put("team", compaction("h4", covered=4, text="after"))
    found = await made.store.find("team", ["h1", "h2", "h3", "h4"])
    assert [(each.covered_hash, each.summary) for each in found] == [
        ("h4", "after"),
        ("h3", "What happened."),
        ("h2", "What happened."),
    ]
    made.durable.writes_fail = False
    await made.store.put("team", compaction("h5", covered=5))
    assert len(await made.durable.find("team", ["h5"])) == 1


async def test_settings_are_never_kept_in_the_memory_of_one_process() -> None:
    """Whoever chooses or asks is told, so that no worker goes its own way."""
    made = Steady()
    await made.store.put_setting("mode", "observe")
    assert await made.store.get_setting("mode") == "observe"
    made.durable.reads_fail = made.durable.writes_fail = True
    with pytest.raises(StoreError, match="disk full"):
        await made.store.put_setting("mode", "off")
    with pytest.raises(StoreError, match="disk full"):
        await made.store.get_setting("mode")


async def test_nothing_but_deleting_and_settings_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Every other call works while nothing below does; one warning, and one more an hour later."""
    made = Steady()
    made.durable.reads_fail = made.durable.writes_fail = True
    for _ in range(3):
        await made.store.put("team", compaction("h"))
        assert len(await made.store.find("team", ["h"])) == 1
        await made.store.put_fact("model", "ratio", "1")
        assert await made.store.get_fact("model", "ratio") == "1"
        assert await made.store.get_fact("model", "other") is None
        await made.store.add_event(1e12, "{}")
        assert [event.text for event in await made.store.events(limit=1)] == ["{}"]
        await made.store.put_plots([Plot("talk", 1e12, "{}")])
        assert await made.store.plots() == ["{}"]
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
    made.durable.reads_fail = made.durable.writes_fail = True
    await made.store.put("team", compaction("h4", text="during"))
    await made.store.put_fact("model", "ratio", "1")
    await made.store.add_event(1e12, "before")
    await made.store.add_event(1e12, "during")
    made.durable.reads_fail = made.durable.writes_fail = False
    await handed_over(made)
    assert [each.summary for each in await made.durable.find("team", ["h4"])] == ["during"]
    assert await made.durable.get_fact("model", "ratio") == "1"
    assert [event.text for event in await made.store.events()] == ["before", "during"]
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
    made.durable.reads_fail = made.durable.writes_fail = True
    assert await made.store.merge_fact("model", "letters", "c", letters) == "c"
    made.durable.reads_fail = made.durable.writes_fail = False
    assert await made.store.get_fact("model", "letters") == "bc"
    await made.durable.merge_fact("model", "letters", "a", letters)
    await handed_over(made)
    assert await made.durable.get_fact("model", "letters") == "abc"
    assert await made.store.get_fact("model", "letters") == "abc"


async def test_a_newer_value_counts_before_the_hand_over() -> None:
    """Whatever the spare has kept of the outage."""
    made = Steady()
    made.durable.writes_fail = True
    await made.store.put("team", compaction("h4", text="during"))
    await made.store.put_fact("model", "ratio", "1")
    made.now_s += 1
    made.durable.writes_fail = False
    await made.store.put("team", compaction("h4", text="after"))
    await made.store.put_fact("model", "ratio", "2")
    assert [each.summary for each in await made.store.find("team", ["h4"])] == ["after"]
    assert await made.store.get_fact("model", "ratio") == "2"


async def test_a_hand_over_that_fails_is_tried_again() -> None:
    """Nothing is lost when the store fails a second time."""
    made = Steady()
    made.durable.writes_fail = True
    for number in range(5):
        await made.store.put("team", compaction(f"h{number}"))
    await handed_over(made)
    assert await made.durable.compactions() == []
    assert len(await made.store.compactions()) == 5
    made.durable.writes_fail = False
    await handed_over(made)
    assert len(await made.durable.compactions()) == 5


async def test_what_is_purged_while_it_is_handed_over_stays_purged() -> None:
    """A purge waits for the hand-over, which would write anew."""
    made = Steady()
    made.durable.writes_fail = True
    for number in range(5):
        await made.store.put("team", compaction(f"h{number}"))
    made.durable.writes_fail, made.now_s = False, 10.0
    await made.store.find("team", ["none"])
    await made.store.delete()
    await handed_over(made)
    assert await made.durable.compactions() == await made.store.compactions() == []


async def test_an_outage_that_comes_and_goes_is_not_told_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """Once a minute at most."""
    caplog.set_level(logging.INFO)
    made = Steady()
    for _ in range(10):
        made.durable.reads_fail = True
        await made.store.find("team", ["h"])
        made.durable.reads_fail = False
        await made.store.find("team", ["h"])
        made.now_s += 1
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["store_failed", "store_recovered"]
    made.now_s += 61
    made.durable.reads_fail = True
    await made.store.find("team", ["h"])
    assert len(caplog.records) == 3


async def test_what_is_too_large_for_the_store_holds_nothing_else_up(caplog: pytest.LogCaptureFixture) -> None:
    """This process keeps it; it is no outage, and what stands behind it in one is handed over."""
    caplog.set_level(logging.INFO)
    made = Steady()
    await made.store.put("team", compaction("large", text="x" * 2000))
    assert len(await made.store.find("team", ["large"])) == 1
    assert [record.getMessage() for record in caplog.records] == ["store_refused too large; this process keeps it"]
    made.durable.writes_fail = True
    for name in ("a", "larger", "b"):
        await made.store.put("team", compaction(name, text="x" * 2000 if name == "larger" else "x"))
    made.durable.writes_fail = False
    await handed_over(made)
    assert {each.compaction.covered_hash for each in await made.durable.compactions()} == {"a", "b"}
    assert caplog.records[-1].getMessage().startswith("store_recovered")


class Slow(Failing):
    """Takes a while, and does what it is asked at the end of it."""

    delay_s = 0.0

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        await asyncio.sleep(self.delay_s)
        return await super().find(scope, hashes)

    async def put(self, scope: str, compaction: Compaction) -> None:
        await asyncio.sleep(self.delay_s)
        await super().put(scope, compaction)

    async def get_fact(self, scope: str, key: str) -> str | None:
        await asyncio.sleep(self.delay_s)
        return await super().get_fact(scope, key)

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        await asyncio.sleep(self.delay_s)
        await super().put_fact(scope, key, text)

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        await asyncio.sleep(self.delay_s)
        return await super().merge_fact(scope, key, text, join)


class Patient(Steady):
    """A steady store whose callers do not wait for long, in virtual time."""

    durable: Slow

    def __init__(self) -> None:
        self.durable = Slow()
        self.clock = asyncio.get_running_loop().time
        spare = MemoryStore(ttl_s=1e6, max_bytes=1_000_000)
        self.store = SteadyStore(self.durable, spare, patience=Patience(WAIT_S), clock=self.clock)

    async def hashes(self, *hashes: str) -> list[str]:
        return [each.covered_hash for each in await self.store.find("team", hashes)]


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    return played(test, test)


@in_virtual_time
async def test_no_request_waits_for_a_store_that_hangs() -> None:
    """20 ms once, however often it asks; what it writes is found all the same."""
    made = Patient()
    made.durable.delay_s = 3600.0
    await made.store.put("team", compaction("h2", covered=2))
    assert await made.hashes("h1", "h2") == ["h2"]
    await made.store.put_fact("team", "k", "1")
    assert await made.store.get_fact("team", "k") == "1"
    assert await made.store.merge_fact("team", "letters", "c", letters) == "c"
    assert await made.store.get_fact("team", "other") is None
    assert made.clock() <= 0.021
    await asyncio.gather(*(made.hashes("h1") for _ in range(100)))
    assert made.clock() <= 0.021
    await made.store.patience.settle()


@in_virtual_time
async def test_a_process_that_ends_hands_over_what_only_it_has() -> None:
    """Also where the store comes back a moment later; one that does not come back is not waited for."""
    made = Patient()
    for number, writes_fail_s in enumerate((0.0, 0.5, 3600.0)):
        made.durable.writes_fail = True
        await made.store.put("team", compaction(f"h{number}"))
        asyncio.get_running_loop().call_later(writes_fail_s, setattr, made.durable, "writes_fail", False)
        await made.store.aclose()
    assert [each.compaction.covered_hash for each in await made.durable.compactions()] == ["h1", "h0"]
    assert made.clock() < 5


@in_virtual_time
async def test_a_store_that_is_far_away_is_waited_for() -> None:
    """A record is worth 15 ms: without it a summary is made."""
    made = Patient()
    made.durable.delay_s = 0.015
    for number in range(20):
        await made.durable.put("team", compaction(f"h{number}"))
        assert await made.hashes(f"h{number}") == [f"h{number}"]


@in_virtual_time
async def test_what_comes_too_late_counts_for_the_next_turn() -> None:
    """Also where that does not wait, either; and no longer than the store itself is late."""
    made = Patient()
    await made.durable.put("team", compaction("h2", covered=2))
    await made.durable.put_fact("team", "k", "1")
    made.durable.delay_s = 0.2
    assert await made.hashes("h1", "h2") == []
    assert await made.store.get_fact("team", "k") is None
    await asyncio.sleep(0.3)
    assert await made.hashes("h1", "h2") == ["h2"]
    assert await made.store.get_fact("team", "k") == "1"
    await asyncio.sleep(0.3)
    made.durable.delay_s = 0.0
    await made.durable.delete()
    await asyncio.sleep(2)
    assert await made.hashes("h1", "h2") == []


@in_virtual_time
async def test_who_looks_again_before_paying_a_summary_waits_for_the_answer() -> None:
    """A hiccup of a tenth of a second must not cost a local model a minute; nothing is asked twice for it."""
    made = Patient()
    await made.durable.put("team", compaction("h2", covered=2))
    made.durable.delay_s = 0.1
    assert await made.hashes("h1", "h2") == []
    begun_s = made.clock()
    assert await made.hashes("h1", "h2") == ["h2"]
    assert 0.07 < made.clock() - begun_s < 0.1
    made.durable.delay_s = 0.0
    assert await made.hashes("h1", "h2") == ["h2"]


@in_virtual_time
async def test_an_answer_in_time_ends_the_lateness() -> None:
    """What asks while nobody waits looks whether it is over."""
    made = Patient()
    await made.durable.put("team", compaction("h2", covered=2))
    made.durable.delay_s = 0.1
    assert await made.hashes("one") == []
    made.durable.delay_s = 0.001
    assert await made.hashes("another") == []
    await asyncio.sleep(0.01)
    assert await made.hashes("h2") == ["h2"]
    assert made.clock() < 0.04
    await asyncio.sleep(0.1)


def test_what_is_written_too_late_and_fails_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """One warning; the spare has it, as where it fails at once, and the store in the end."""

    async def fails_late() -> None:
        made = Patient()
        made.durable.delay_s, made.durable.writes_fail = 0.2, True
        await made.store.put("team", compaction("h"))
        await made.store.put_fact("team", "k", "1")
        await asyncio.sleep(0.3)
        assert await made.hashes("h") == ["h"]
        made.durable.delay_s, made.durable.writes_fail = 0.0, False
        await asyncio.sleep(10)
        assert await made.hashes("h") == ["h"]
        await asyncio.sleep(1)
        assert len(await made.durable.find("team", ["h"])) == 1
        assert await made.durable.get_fact("team", "k") == "1"

    run(fails_late())
    assert caplog.text.count("store_failed") == 1


@in_virtual_time
async def test_what_is_deleted_while_it_is_written_stays_deleted() -> None:
    """Whoever deletes waits for it; and what came late is forgotten as well."""
    made = Patient()
    await made.durable.put("team", compaction("h1"))
    made.durable.delay_s = 0.2
    await made.hashes("h1")
    await made.store.put("team", compaction("h2"))
    assert await made.store.delete() == 2
    assert await made.hashes("h1", "h2") == []
    await asyncio.sleep(1)
    made.durable.delay_s = 0.0
    assert await made.hashes("h1", "h2") == []


@in_virtual_time
async def test_a_client_that_leaves_stops_no_write() -> None:
    """Another turn of its conversation may come."""
    made = Patient()
    made.durable.delay_s = 0.01
    task = asyncio.ensure_future(made.store.put("team", compaction("h")))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0.01)
    assert len(await made.durable.find("team", ["h"])) == 1
