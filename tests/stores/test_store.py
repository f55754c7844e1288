"""The store property: in any order of calls, every backend does what rows in a dict with times would do.

What no order of calls shows stands below it: two connections at once, bounds, very many hashes, the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from litellm_compaction.core.compaction import State, compaction_id
from litellm_compaction.stores import Store
from litellm_compaction.stores.rows import Row
from litellm_compaction.stores.sqlite import MemoryRows
from litellm_compaction.stores.store import encode_text
from tests.stores.compactions import compaction, states
from tests.stores.made import FailingRows, MemoryStore, RedisStore, SqliteStore, SteadyStore
from tests.stores.servers import KINDS as SERVERS
from tests.stores.servers import program_of, running
from tests.virtual_time import Clock

TTL_S = 100.0
LINES_TTL_S = 30 * 86_400.0
HASHES = ["h1", "h2", "h3"]
KEYS = ["ratio", "words*}"]
KINDS = ("memory", "sqlite", "steady", *SERVERS)

scopes = st.sampled_from(["team", "}a:{*", "ü"])
hashes = st.sampled_from(HASHES)
keys = st.sampled_from(KEYS)
texts = st.text(st.characters(), max_size=8)
words = st.sampled_from(["a", "b", "\ud83d"])


@pytest.fixture(scope="module")
def server_url() -> Iterator[Callable[[str], str]]:
    """The URL of a real server by the kind of its program, started when a test first wants it."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as ending:

        def url(kind: str) -> str:
            if kind not in urls:
                if (program := program_of(kind)) is None:
                    pytest.skip(f"no {kind}-server on this machine")
                urls[kind] = ending.enter_context(running(program)).url
            return urls[kind]

        yield url


Opening = Callable[[str, Clock], Store]


@pytest.fixture
def opening(request: pytest.FixtureRequest, tmp_path: Path, server_url: Callable[[str], str]) -> Opening:
    """Opens stores of one kind: those of one name are connections to the same rows, but in memory."""
    kind: str = request.param
    url = server_url(kind) if kind in SERVERS else ""

    def make(name: str, clock: Clock) -> Store:
        if kind == "memory":
            return MemoryStore(ttl_s=TTL_S, max_bytes=10_000_000, clock=clock)
        if kind == "sqlite":
            return SqliteStore(tmp_path / name, ttl_s=TTL_S, max_bytes=10_000_000, clock=clock)
        if kind == "steady":
            # Its rows are young again behind an outage; so time does not matter here.
            durable, spare = (MemoryStore(ttl_s=1e9, max_bytes=10_000_000, clock=clock) for _ in range(2))
            return SteadyStore(Store(FailingRows(durable.rows)), spare, clock=clock)
        return RedisStore(f"{url}?prefix={name}", limit_s=10, ttl_s=TTL_S, clock=clock)

    return make


@dataclass
class Kept:
    value: Any
    created_s: float
    used_s: float


class AnyOrder(RuleBasedStateMachine):
    """A store beside its model: rows by scope and key, settings, and a log."""

    def __init__(self, opening: Opening) -> None:
        super().__init__()
        self.opening, self.name, self.clock = opening, uuid.uuid4().hex, Clock()
        self.loop = asyncio.new_event_loop()
        self.store = opening(self.name, self.clock)
        self.failing = self.store.rows.durable if isinstance(self.store, SteadyStore) else None
        self.rows: dict[tuple[str, str], Kept] = {}
        self.has_expired = False
        self.settings: dict[str, str] = {}
        self.log: list[tuple[float, str]] = []

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    def keep(self, scope: str, key: str, value: Any) -> None:
        self.rows[scope, key] = Kept(value, self.clock.now_s, self.clock.now_s)

    def use(self, scope: str, key: str) -> Any:
        """The value of a row, which is used by this; None for none."""
        if (row := self.rows.get((scope, key))) is not None:
            row.used_s = self.clock.now_s
        return row and row.value

    @property
    def is_failing(self) -> bool:
        return self.failing is not None and bool(self.failing.failing)

    @rule(scope=scopes, covered_hash=hashes, text=texts, state=states)
    def put(self, scope: str, covered_hash: str, text: str, state: State) -> None:
        made = compaction(covered_hash, covered=1 + HASHES.index(covered_hash), text=text, state=state)
        self.do(self.store.put(scope, made))
        self.keep(scope, f"c:{covered_hash}", made)

    @rule(scope=scopes, asked=st.sets(hashes | st.just("h0")))
    def find(self, scope: str, asked: set[str]) -> None:
        """Those that are there, and no other scope's (P9), the longest first."""
        found = self.do(self.store.find(scope, sorted(asked)))
        wanted = [self.use(scope, f"c:{each}") for each in sorted(asked, reverse=True)]
        assert found == [each for each in wanted if each is not None]

    @rule(owner=scopes, scope=scopes, covered_hash=hashes)
    def name_one(self, owner: str, scope: str, covered_hash: str) -> None:
        self.do(self.store.name(owner, scope, compaction(covered_hash)))
        self.keep(owner, f"n:{compaction_id(scope, covered_hash)}", (scope, covered_hash))

    @rule(owner=scopes, scope=scopes, covered_hash=hashes)
    def look_up(self, owner: str, scope: str, covered_hash: str) -> None:
        """A record is found by its owner alone, and only while it is there."""
        record = compaction_id(scope, covered_hash)
        stored = self.do(self.store.named(owner, record))
        is_named = self.use(owner, f"n:{record}") is not None
        wanted = self.use(scope, f"c:{covered_hash}") if is_named else None
        assert (stored and (stored.scope, stored.compaction, stored.id)) == (wanted and (scope, wanted, record))

    @rule(scope=scopes, key=keys, text=words)
    def put_fact(self, scope: str, key: str, text: str) -> None:
        self.do(self.store.put_fact(scope, key, text))
        self.keep(scope, f"f:{key}", text)

    @rule(scope=scopes, key=keys)
    def get_fact(self, scope: str, key: str) -> None:
        assert self.do(self.store.get_fact(scope, key)) == self.use(scope, f"f:{key}")

    @rule(scope=scopes, key=keys, text=words)
    @precondition(lambda self: not self.is_failing)
    def merge_fact(self, scope: str, key: str, text: str) -> None:
        """As one step of all."""
        self.do(self.store.rows.change(scope, f"f:{key}", lambda kept, _: max(kept or b"", encode_text(text))))
        self.keep(scope, f"f:{key}", max(self.use(scope, f"f:{key}") or "", text))
        self.get_fact(scope, key)

    @rule(key=keys, text=texts.filter(bool))
    @precondition(lambda self: not self.is_failing)
    def put_setting(self, key: str, text: str) -> None:
        self.do(self.store.put_setting(key, text))
        self.settings[key] = text

    @rule(key=keys)
    def get_setting(self, key: str) -> None:
        """No time, no bound and no purge takes them."""
        assert self.do(self.store.get_setting(key)) == self.settings.get(key)

    @rule(text=texts, early_s=st.sampled_from([0.0, 50.0]))
    @precondition(lambda self: not self.is_failing)
    def add_line(self, text: str, early_s: float) -> None:
        self.do(self.store.add_event(self.clock.now_s - early_s, text))
        self.log.append((self.clock.now_s - early_s, text))

    @rule(containing=st.just("") | words, limit=st.integers(0, 3))
    def read_lines(self, containing: str, limit: int) -> None:
        """The newest few, oldest first."""
        young = [(when_s, text) for when_s, text in self.log if when_s >= self.clock.now_s - LINES_TTL_S]
        events = self.do(self.store.events())
        numbers = [event.number for event in events]
        assert [(event.when_s, event.text) for event in events] == young
        assert numbers == sorted(set(numbers))
        found = self.do(self.store.events(limit=limit, containing=containing))
        holding = [event for event in events if containing in event.text]
        assert found == holding[len(holding) - min(limit, len(holding)) :]

    @rule()
    def list_all(self) -> None:
        """The last used first; a look is no use of them."""
        for _ in range(2):
            stored = self.do(self.store.compactions())
            rows = {name: row for name, row in self.rows.items() if name[1].startswith("c:")}
            assert {(each.scope, f"c:{each.compaction.covered_hash}"): each.compaction for each in stored} == {
                name: row.value for name, row in rows.items()
            }
            assert len(stored) == len(rows)
            assert all(100 < each.size_bytes < 2000 for each in stored)
            if self.failing is None:
                times = [(each.created_s, each.used_s) for each in stored]
                assert sorted(times) == sorted((row.created_s, row.used_s) for row in rows.values())
                assert times == sorted(times, key=lambda each: -each[1])

    @rule(
        scope=st.none() | scopes,
        age_s=st.none() | st.sampled_from([-1.0, 0.0, 1.0, TTL_S]),
        covered_hash=st.none() | hashes,
    )
    @precondition(lambda self: not self.is_failing)
    def delete(self, scope: str | None, age_s: float | None, covered_hash: str | None) -> None:
        """What is named is gone, facts too, and lines if it is everybody's; nothing else is."""
        if covered_hash is not None:
            scope, age_s = scope or "team", None
        if self.failing is not None:
            # What was handed over is young again.
            age_s = None
            self.let_hand_over()
        before_s = None if age_s is None else self.clock.now_s - age_s
        count = self.do(self.store.delete(scope=scope, unused_since_s=before_s, covered_hash=covered_hash))
        doomed = [
            (owner, key)
            for (owner, key), row in self.rows.items()
            if scope in (None, owner)
            and (before_s is None or row.used_s < before_s)
            and (covered_hash is None or key == f"c:{covered_hash}")
        ]
        for name in doomed:
            del self.rows[name]
        known = sum(key.startswith("c:") for _, key in doomed)
        # An expired row may be there still.
        assert count == known or (self.has_expired and count > known)
        if scope is None:
            self.log = [line for line in self.log if before_s is not None and line[0] >= before_s]

    @rule(pause_s=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S, TTL_S + 1, LINES_TTL_S - 50]))
    def wait(self, pause_s: float) -> None:
        """A row lives for its time to the second, and begins it anew with each use."""
        self.clock.now_s += pause_s
        if self.failing is None:
            alive = {name: row for name, row in self.rows.items() if row.used_s >= self.clock.now_s - TTL_S}
            self.has_expired |= len(alive) < len(self.rows)
            self.rows = alive

    @rule()
    @precondition(lambda self: not isinstance(self.store.rows, MemoryRows) and self.failing is None)
    def restart(self) -> None:
        """Another process finds the same."""
        self.do(self.store.aclose())
        self.store = self.opening(self.name, self.clock)

    @rule()
    @precondition(lambda self: self.failing is not None)
    def begin_or_end_an_outage(self) -> None:
        """Nothing that is put in one is lost."""
        assert self.failing is not None
        self.failing.failing ^= {"put", "change", "append", "delete"}

    @rule()
    @precondition(lambda self: self.failing is not None and not self.is_failing)
    def let_hand_over(self) -> None:
        """When it is over, other processes find what was written in it, and nothing else."""
        assert self.failing is not None
        self.clock.now_s += 10

        async def look() -> list[Row]:
            await self.store.rows.find("none", ["none"])
            return await self.failing.scan()  # type: ignore[union-attr]

        assert {(row.scope, row.key) for row in self.do(look())} == set(self.rows)

    def teardown(self) -> None:
        if self.failing is not None:
            self.failing.failing.clear()
        self.do(self.store.aclose())
        self.loop.close()


@pytest.mark.parametrize("opening", KINDS, indirect=True)
def test_any_order_of_calls_does_what_a_dict_would_do(opening: Opening) -> None:
    """P4 and P9 of a store: records, names, facts, settings, logs, listing, deletion, expiry, restart, outage."""
    run_state_machine_as_test(lambda: AnyOrder(opening), settings=settings(stateful_step_count=40))


@pytest.fixture
async def pair(opening: Opening) -> AsyncIterator[tuple[Store, Store]]:
    """Two connections to one store, as two workers have; in memory it is one."""
    clock, name = Clock(), uuid.uuid4().hex
    first = opening(name, clock)
    second = opening(name, clock) if isinstance(first, (SqliteStore, RedisStore)) else first
    yield first, second
    for store in (first, second):
        # Any number of times.
        await store.aclose()
        await store.aclose()


@pytest.mark.parametrize("opening", KINDS, indirect=True)
async def test_a_log_keeps_its_newest_lines(pair: tuple[Store, Store]) -> None:
    """So many as its writer says; other logs have a bound of their own."""
    rows = pair[0].rows
    await rows.append("other", 1000.0, b"stays", most=1)
    for number in range(5):
        await rows.append("log", 1000.0 + number, b"%d" % number, most=3)
    assert [line.body for line in await rows.tail("log", most=9)] == [b"2", b"3", b"4"]
    assert [line.body for line in await rows.tail("other", most=9)] == [b"stays"]
    await rows.delete(before_s=1003.0)
    assert [line.body for line in await rows.tail("log", most=9)] == [b"3", b"4"]


@pytest.mark.parametrize("opening", KINDS, indirect=True)
async def test_changes_of_two_come_one_after_the_other(pair: tuple[Store, Store]) -> None:
    """None is lost, whoever else changes the row at the same time."""

    def add(kept: bytes | None, _: float) -> bytes:
        return b"%d" % (int(kept or b"0") + 1)

    await asyncio.gather(*(store.rows.change("topic", "row", add) for store in pair for _ in range(30)))
    assert [row.body for row in await pair[1].rows.find("topic", ["row"])] == [b"60"]
    await pair[0].rows.change("topic", "row", lambda *_: None)
    assert await pair[1].rows.find("topic", ["row"]) == []


@pytest.mark.parametrize("opening", KINDS, indirect=True)
async def test_a_cancelled_put_is_finished(pair: tuple[Store, Store]) -> None:
    """The summary is paid for; whoever asked for it may have gone."""
    task = asyncio.ensure_future(pair[0].put("team", compaction("h")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert any([await pair[0].find("team", ["h"]) for _ in range(100)])


# The size of a body, whose it is, and if an older row is used instead.
puts = st.lists(st.tuples(st.integers(1, 3000), st.sampled_from("aaab") | st.just("c"), st.booleans()), max_size=25)


@given(puts)
def test_a_bound_takes_the_oldest_of_who_has_most(puts: list[tuple[int, str, bool]]) -> None:
    """The bytes never pass the bound but for one row; nothing goes that has room, and the newest stays.

    Threat: a tenant that floods the store pushes out everybody's records.
    """
    bound = 10_000
    rows = MemoryRows(ttl_s=100, max_bytes=bound)

    async def play() -> None:
        after: list[Row] = []
        for number, (size, scope, is_use) in enumerate(puts):
            before = (await rows.scan())[::-1]
            if is_use and before:
                await rows.find(before[0].scope, [before[0].key])
                before = [*before[1:], before[0]]
            await rows.put(scope, f"{number:02}", b"x" * size)
            after = (await rows.scan())[::-1]
            check(before, after, (scope, f"{number:02}"))
        await rows.put("settings", "mode", b"x" * 2 * bound)
        assert [row.size_bytes for row in await rows.find("settings", ["mode"])] == [0]
        assert await rows.scan() == after[::-1], "settings take nothing from others"
        await rows.aclose()

    def check(before: list[Row], after: list[Row], newest: tuple[str, str]) -> None:
        names = [(row.scope, row.key) for row in after]
        assert names[-1] == newest
        assert sum(row.size_bytes for row in after) <= bound or len(after) == 1
        assert all(row.size_bytes == 500 + len(row.body) for row in after)
        gone = [row for row in before if (row.scope, row.key) not in names]
        assert names[:-1] == [(row.scope, row.key) for row in before if row not in gone], "nothing else has moved"
        if not gone:
            return
        total = sum(row.size_bytes for row in after)
        assert total + max(row.size_bytes for row in gone) > bound, "no more than has to"
        left = Counter[str]()
        for row in after:
            left[row.scope] += row.size_bytes
        for scope in {row.scope for row in gone}:
            own = [row for row in before if row.scope == scope]
            lost = [row for row in gone if row.scope == scope]
            assert own[: len(lost)] == lost, "the least recently used ones"
            # When its last row went, nobody had more.
            assert left[scope] + lost[-1].size_bytes + after[-1].size_bytes >= max(left.values())

    asyncio.run(play())


@pytest.mark.parametrize("opening", KINDS, indirect=True)
async def test_records_of_equal_words_are_found_only_while_all_are_there(opening: Opening) -> None:
    """One that has been forgotten, or pushed out by others, may have been the one that is meant (P9)."""
    store = opening(uuid.uuid4().hex, Clock())
    made = [replace(compaction(f"h{number}"), words_hash="words") for number in range(5)]

    async def found(*hashes: str) -> list[str]:
        return sorted(each.covered_hash for each in await store.find("s", hashes, ["words", "others"]))

    await store.put("s", made[0])
    await store.put("s", made[1])
    assert await found("h1") == ["h0", "h1"]
    await store.delete(scope="s", covered_hash="h0")
    assert [await found("h1"), await found()] == [["h1"], []]
    for each in made:
        await store.put("s", each)
        if each is made[3]:
            assert await found() == ["h0", "h1", "h2", "h3"]
    assert [await found("h4"), await found()] == [["h4"], []]
    await store.aclose()
