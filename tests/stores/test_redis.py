"""Redis behind the store: others' keys and values, rights, TLS, loops and threads, scripts, and a restart."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import Store, board_of, open_store
from litellm_compaction.stores.redis import PATIENT_LIMIT_S, VALUE_MAX_BYTES, RedisRows, RedisServer, is_done
from tests.stores.compactions import compaction
from tests.stores.made import RedisStore
from tests.stores.servers import Server, any_program, free_port, running
from tests.virtual_time import VirtualLoop, in_virtual_time

TTL_S = 100.0


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with running(any_program()) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Server:
    """One that is empty and knows no script, so that no test sees another's."""
    started.tell("FLUSHALL")
    started.tell("SCRIPT", "FLUSH")
    return started


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., RedisStore]]:
    """Opens stores on a server by URL and ends them."""
    stores: list[RedisStore] = []

    def make(url: str) -> RedisStore:
        stores.append(RedisStore(url, limit_s=60.0, ttl_s=TTL_S))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


async def until_it_answers(store: Store) -> None:
    """Returns when the store is in use again."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with contextlib.suppress(StoreError):
            await store.events(limit=1)
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the store does not come back")


async def test_numbers_of_events_grow_over_a_server_that_lost_its_memory(
    server: Server, opened: Callable[..., RedisStore]
) -> None:
    """Whoever follows the history by its numbers sees what comes after a restart of the server."""
    store = opened(server.url)
    await store.add_event(time.time(), "before")
    [before] = await store.events()
    server.kill()
    server.start()
    await until_it_answers(store)
    await store.add_event(time.time(), "after")
    newest = (await store.events())[-1]
    assert newest.text == "after"
    assert newest.number > before.number


async def test_a_cancelled_put_is_finished(server: Server, opened: Callable[..., RedisStore]) -> None:
    """A client that goes away does not undo what was begun."""
    store = opened(server.url)
    await store.find("team", ["h"])
    task = asyncio.ensure_future(store.put("team", compaction("h")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline_s = time.monotonic() + 20
    while not await store.find("team", ["h"]):
        assert time.monotonic() < deadline_s


def calls(server: Server, name: str) -> int:
    """How often a command was run, in scripts, too."""
    lines = server.says("INFO", "commandstats").decode().splitlines()
    found = [line for line in lines if line.startswith(f"cmdstat_{name}:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


async def test_a_very_large_record_is_refused(server: Server, opened: Callable[..., RedisStore]) -> None:
    """The server is one thread, so that everybody would wait for it; the error names both sizes."""
    store = opened(server.url)
    with pytest.raises(StoreError, match=f"{VALUE_MAX_BYTES:,} bytes at most"):
        await store.put("team", compaction("h", text="x" * VALUE_MAX_BYTES))
    large = compaction("large", text="x" * (VALUE_MAX_BYTES - 2000))
    await store.put("team", large)
    assert await store.find("team", ["large"]) == [large]


async def test_the_rights_that_the_documentation_names_are_enough(
    server: Server, opened: Callable[..., RedisStore]
) -> None:
    """A user of our own, with our keys alone; nothing of others can be read with its password."""
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    found = re.search(r"^ACL SETUSER compaction on >password (.*)$", text, re.MULTILINE)
    assert found is not None
    server.tell("ACL", "SETUSER", "compaction", "on", ">hunter2", *found[1].split())
    store = opened(server.url.replace("127", "compaction:hunter2@127", 1))
    await store.put("team", compaction("h"))
    await store.put_fact("model", "k", "1")
    await store.put_setting("mode", "off")
    await store.add_event(time.time(), "{}")
    assert await store.find("team", ["h"]) == [compaction("h")]
    assert (len(await store.compactions()), len(await store.events())) == (1, 1)
    assert await store.get_setting("mode") == "off"
    board = Leases(RedisRows(store.server, prefix="compaction:board", ttl_s=10))
    assert await board.update("pool", lambda others: ("1", len(others))) == 0
    assert await store.delete(unused_since_s=time.time() + 10) == 1
    assert await store.delete() == 0
    with pytest.raises(StoreError, match="NoPermission"):
        await store.says("GET", "other")


async def test_a_refusal_is_told_in_our_words_and_is_no_outage() -> None:
    """A replica takes no write and still finds; of a missing right the server's own words would name the user."""
    with running(any_program()) as server:
        store = RedisStore(server.url, limit_s=10)
        await store.put("team", compaction("before"))
        server.tell("REPLICAOF", "127.0.0.1", str(free_port()))
        with pytest.raises(StoreError, match="ReadOnly"):
            await store.put("team", compaction("h"))
        assert await store.find("team", ["before"]) == [compaction("before")]
        server.tell("REPLICAOF", "NO", "ONE")
        await store.put("team", compaction("after"))
        server.tell("ACL", "SETUSER", "default", "-@all", "+ping", "+eval", "+evalsha", "+acl", "+hgetall")
        for write in (store.put_setting("mode", "off"), store.put("team", compaction("h"))):
            with pytest.raises(StoreError, match=r"NoPermission|ResponseError|refuses: ACL") as raised:
                await write
            assert "default" not in str(raised.value)
        assert store.server._rests_until_s < 0
        await store.aclose()


async def test_a_board_that_ends_leaves_its_store_at_work(server: Server) -> None:
    """They share a server: what is written at the end of a process comes after the last note."""
    store = open_store(server.url, ttl_s=TTL_S, max_bytes=1_000_000)
    board = board_of(store)
    assert board is not None
    await board.put("pool", "notes", b"1")
    await Leases(board).aclose()
    await store.put_setting("mode", "off")
    await store.aclose()
    with pytest.raises(StoreError, match="closed"):
        await store.get_setting("mode")


async def test_a_note_that_says_nothing_new_is_read_and_not_written(server: Server) -> None:
    """Processes look four times a second; it is written again when a fifth of its life is over."""
    store = RedisStore(server.url, limit_s=60.0)
    leases = Leases(store.rows)
    writes = []
    for note in ("1", "1", "2", "2", None, None):
        before = calls(server, "set") + calls(server, "del")
        await leases.update("pool", lambda _, note=note: (note, None))
        writes.append(calls(server, "set") + calls(server, "del") - before)
    assert writes == [1, 0, 1, 0, 1, 0]
    await store.aclose()


async def test_a_client_that_decodes_what_it_reads_will_do(server: Server) -> None:
    """LiteLLM's may be configured so; half surrogate pairs and bytes come back as they were."""
    store = RedisStore(
        server.url, limit_s=60.0, clients=lambda: Redis.from_url(server.url, decode_responses=True, protocol=3)
    )
    await store.put("team", compaction("h", text="\ud83d"))
    await store.add_event(time.time(), "\ud83d")
    assert await store.find("team", ["h"]) == [compaction("h", text="\ud83d")]
    assert [each.scope for each in await store.compactions()] == ["team"]
    assert [event.text for event in await store.events()] == ["\ud83d"]
    assert await store.delete() == 1
    await store.aclose()


class Busy(VirtualLoop):
    """A loop whose looks are late by as much each."""

    late_s = 0.0

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._jumping.now_s += self.late_s


@pytest.mark.parametrize(("late_s", "steps", "is_answered"), [(0.25, 8, True), (0.0, 20, True), (0.1, 1000, False)])
def test_a_busy_process_does_not_take_a_server_for_slow(late_s: float, steps: int, is_answered: bool) -> None:
    """A limit counts how often the process could look."""

    async def answer() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    async def ask() -> bool:
        task = asyncio.ensure_future(answer())
        try:
            return await is_done(task, 0.25)
        finally:
            task.cancel()

    loop = Busy()
    loop.late_s = late_s
    try:
        assert loop.run_until_complete(ask()) is is_answered
    finally:
        loop.close()


@pytest.mark.parametrize(("options", "limit_s"), [({}, 0.25), ({"is_patient": True}, PATIENT_LIMIT_S)])
@in_virtual_time
async def test_a_silent_server_holds_up_one_call_for_its_limit(options: dict[str, bool], limit_s: float) -> None:
    """An operator waits longer than a request; whoever asks next waits for nothing."""
    server = RedisServer(object, "redis://h", owns=False, limit_s=0.25)
    for _ in range(2):
        # Which of two limits of 10 s ends first is the loop's business.
        with pytest.raises(StoreError, match=f"did not answer in {limit_s:g} s|cannot be reached"):
            await server.call(lambda _: asyncio.Event().wait(), **options)
    assert asyncio.get_running_loop().time() == pytest.approx(limit_s)
    await server.aclose()
