"""Redis behind the store: others' keys and values, rights, TLS, loops and threads, scripts, and a restart."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ClusterDownError, ResponseError
from redis.exceptions import ConnectionError as NotConnected

from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.errors import StoreError
from litellm_compaction.stores.redis import RedisRows, RedisServer, is_done
from tests.stores.compactions import compaction
from tests.stores.made import RedisStore
from tests.stores.servers import Server, any_program, free_port, running
from tests.virtual_time import Complaints, in_virtual_time

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


async def test_a_very_large_record_is_refused(server: Server, opened: Callable[..., RedisStore]) -> None:
    """The server is one thread, so that everybody would wait for it; the error names both sizes."""
    store = opened(server.url)
    with pytest.raises(StoreError, match="takes 4,194,304 bytes at most"):
        await store.put("team", compaction("h", text="x" * 4_194_304))
    large = compaction("large", text="x" * (4_194_304 - 2000))
    await store.put("team", large)
    assert await store.find("team", ["large"]) == [large]
    for size, is_setting in ((65_536, True), (65_537, False)):
        await store.put_setting("mode", "x" * size)
        assert bool(await store.get_setting("mode")) is is_setting, "no more is taken for one of ours"


async def test_the_server_forgets_by_itself(server: Server, opened: Callable[..., RedisStore]) -> None:
    """Rows after their time and lines after a month, whether or not anybody comes back; settings never."""
    store = opened(server.url)
    await store.put("team", compaction("h"))
    await store.rows.change("team", "row", lambda *_: b"1")
    await store.put_setting("mode", "off")
    await store.add_event(time.time(), "{}")
    for row in ("c:h", "row"):
        for is_used in (False, True):
            if is_used:
                await store.says("PERSIST", f"compaction:{{team}}:{row}")
                assert len(await store.rows.find("team", [row])) == 1
            assert 90_000 < await store.says("PTTL", f"compaction:{{team}}:{row}") <= 100_000
    beside = store.rows.beside("originals", ttl_s=TTL_S, max_bytes=1)
    await beside.put("team", "row", b"1")
    await store.says("PERSIST", "compaction:originals:{team}:row")
    assert len(await beside.find("team", ["row"])) == 1
    for key in ("originals:{team}:row", "{settings}:mode"):
        assert await store.says("PTTL", f"compaction:{key}") == -1, "it is not renewed"
    month_ms = 30 * 86_400_000
    assert month_ms - 10_000 < await store.says("PTTL", "compaction:log:{events}:lines") <= month_ms


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


async def test_a_server_that_takes_no_write_still_finds(server: Server, opened: Callable[..., RedisStore]) -> None:
    """A replica; that is no outage."""
    store = opened(server.url)
    await store.put("team", compaction("h"))
    server.tell("REPLICAOF", "127.0.0.1", str(free_port()))
    with pytest.raises(StoreError, match="ReadOnly"):
        await store.put("team", compaction("i"))
    assert await store.find("team", ["h"]) == [compaction("h")]
    server.tell("REPLICAOF", "NO", "ONE")
    await store.put("team", compaction("i"))


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


@pytest.mark.parametrize(("late_s", "steps", "is_answered"), [(0.25, 8, True), (0.0, 20, True), (0.1, 1000, False)])
@in_virtual_time
async def test_a_busy_process_does_not_take_a_server_for_slow(late_s: float, steps: int, is_answered: bool) -> None:
    """A limit counts how often the process could look."""
    loop: Any = asyncio.get_running_loop()

    async def answer() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
            loop.jump(late_s)

    task = asyncio.ensure_future(answer())
    assert await is_done(task, 0.25) is is_answered
    task.cancel()


class Silent:
    """A client whose server gives the answers that it has, and then none."""

    def __init__(self, *answers: list[object]) -> None:
        self._answers = list(answers)

    def pipeline(self, **_: object) -> Silent:
        return self

    def execute_command(self, *_: object, **__: object) -> None:
        """Its answer comes with the others."""

    async def execute(self, **_: object) -> list[object]:
        if not self._answers:
            await asyncio.Event().wait()
        return self._answers.pop(0)

    async def scan_iter(self, **_: object) -> AsyncIterator[object]:
        for name in await self.execute():
            yield name


ROW = struct.pack(">dd", 1e12, 1e12) + b"body"


@pytest.mark.parametrize(
    ("job", "answers", "limit_s"),
    [
        (lambda rows: rows.tail("log", most=1), [], 0.25),
        (lambda rows: rows.delete(scope="team", key="row"), [[[ROW]], [1, 1]], 0.25),
        (lambda rows: rows.scan(), [["p:{team}:row"]], 10.0),
        (lambda rows: rows.delete(), [["p:{team}:row"], [[ROW]]], 10.0),
        (lambda rows: rows.delete(), [[], ["p:log:{log}:lines"], [[(b"1-0", {b"when_s": b"1", b"body": b""})]]], 10.0),
    ],
)
@in_virtual_time
async def test_a_silent_server_holds_up_one_call_for_its_limit(job: Any, answers: Any, limit_s: float) -> None:
    """An operator waits longer than a request; whoever asks next waits for nothing, and nobody for what comes late."""
    client, complaints = Silent(*answers), Complaints()
    server = RedisServer(lambda: client, "redis://h", owns=False, limit_s=0.25)  # type: ignore[arg-type, return-value]
    rows = RedisRows(server, prefix="p", ttl_s=1e12)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"did not answer in {limit_s:g} s|cannot be reached"):
            await job(rows)
    assert asyncio.get_running_loop().time() == pytest.approx(limit_s)
    await asyncio.sleep(20)
    await server.aclose()
    assert complaints.heard() == []
    with pytest.raises(StoreError, match="closed"):
        await job(rows)


@pytest.mark.parametrize(("new", "lost"), [(b"body", 0), (b"new", 39), (b"new", 40)])
@in_virtual_time
async def test_a_change_asks_as_often_as_it_has_to(new: bytes, lost: int) -> None:
    """Once where it changes nothing, since processes look four times a second; not for ever where others are faster."""
    answers: list[list[object]] = [[b"1e12", ROW], [0]] * lost + [[b"1e12", ROW], [1]][: 2 if lost else 1]
    server = RedisServer(lambda: Silent(*answers), "redis://h", owns=True)  # type: ignore[arg-type, return-value]
    rows = RedisRows(server, prefix="p", ttl_s=1e12)
    with pytest.raises(StoreError, match="too many") if lost == 40 else contextlib.nullcontext():
        await rows.change("team", "row", lambda *_: new)


@pytest.mark.parametrize(
    ("error", "said", "rest_s"),
    [
        (ResponseError("OOM hunter2"), "refuses: OOM", 0.0),
        (ResponseError("ERR hunter2"), "fails: ResponseError", 0.0),
        (ClusterDownError("CLUSTERDOWN hunter2"), "refuses: CLUSTERDOWN", 1.0),
        (NotConnected("hunter2"), "cannot be reached", 1.0),
        (OSError("hunter2"), "cannot be reached", 1.0),
        (ValueError("hunter2"), "fails: ValueError", 1.0),
    ],
)
@in_virtual_time
async def test_a_failure_is_told_in_our_words(
    error: Exception, said: str, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own may quote names and keys; one that cannot answer is left alone for a second."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    server = RedisServer(Silent, "redis://h", owns=False)  # type: ignore[arg-type, return-value]

    async def fails(_: object) -> None:
        raise error

    async def works(_: object) -> int:
        return 1

    with pytest.raises(StoreError, match=f"^store redis://h {said}$"):
        await server.call(fails, is_patient=False)
    if rest_s:
        await asyncio.sleep(rest_s - 0.1)
        with pytest.raises(StoreError, match=f"^store redis://h {said}$"):
            await server.call(works, is_patient=False)
        await asyncio.sleep(0.1)
    assert await server.call(works, is_patient=False) == 1


@in_virtual_time
async def test_an_end_waits_for_what_was_begun_as_for_an_answer() -> None:
    """Whoever asked for it may have gone; what takes longer is ended."""
    server, told = RedisServer(Silent, "redis://h", owns=False, limit_s=0.25), []  # type: ignore[arg-type, return-value]

    async def takes(seconds: float) -> None:
        told.append(seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            told.append(asyncio.get_running_loop().time())

    for seconds in (0.1, 60.0):
        task = asyncio.ensure_future(server.call(lambda _, seconds=seconds: takes(seconds), is_patient=False))
        await asyncio.sleep(0)
        task.cancel()
    await server.aclose()
    assert told == [0.1, 60.0, 0.1, 0.25]
