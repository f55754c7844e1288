"""A Redis that is slow, full, read-only, failing over or gone: a miss that is told once, and noticed when it ends.

Each test has a real server of its own, which it stops, fills or kills by its handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError
from litellm_compaction.places import parse_redis
from litellm_compaction.proxy.litellm_api import redis_of
from litellm_compaction.stores import Store, open_store
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore, RedisStore, SteadyStore
from tests.stores.servers import Server, any_program, free_port, running

# What a request would wait for an answer that does not come; a machine that is busy with other tests needs some.
LIMIT_S = 1.0
# Calls that waited each would take longer than this.
MANY_CALLS, FAR_LESS_S = 300, 60.0
# Of a store whose clients are made otherwise.
ANY = "redis://127.0.0.1"


@pytest.fixture
def server() -> Iterator[Server]:
    with running(any_program()) as server:
        yield server


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., RedisStore]]:
    """Opens stores on a server by URL and ends them."""
    stores: list[RedisStore] = []

    def make(url: str, *, limit_s: float = LIMIT_S, clients: Callable[[], Any] | None = None) -> RedisStore:
        stores.append(RedisStore(url, limit_s=limit_s, clients=clients))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def steady(durable: RedisStore, clock: Callable[[], float] = time.monotonic) -> SteadyStore:
    return SteadyStore(durable, MemoryStore(ttl_s=1000, max_bytes=10_000_000), clock=clock)


def own_redis(**said: Any) -> Callable[[], Any]:
    """Makes the client of a proxy that is configured so: LiteLLM's, with sentinels or a cluster."""
    return redis_of({"general_settings": {"coordination_redis": said}})


def nodes(*servers: Server) -> list[dict[str, Any]]:
    return [{"host": "127.0.0.1", "port": server.port} for server in servers]


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    """Returns when a look says so."""
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(StoreError):
            if await look():
                return
        assert time.monotonic() < deadline_s, "it does not come to pass"
        await asyncio.sleep(0.02)


async def finds(store: Store, name: str) -> bool:
    return [each.covered_hash for each in await store.find("team", [name])] == [name]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" ")[0] for record in caplog.records if "store_" in record.getMessage()]


@pytest.mark.parametrize("kind", ["gone", "slow"])
async def test_an_outage_is_a_miss_and_ends_by_itself(
    server: Server, opened: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """One bounded wait, then none; what was made meanwhile is there for others afterwards; two lines in the log."""
    caplog.set_level(logging.INFO, "litellm_compaction")
    durable = opened(server.url)
    store = steady(durable)
    await store.put("team", compaction("before"))
    server.kill() if kind == "gone" else server.signal(signal.SIGSTOP)
    assert await store.find("team", ["before"]) == []
    assert durable.is_resting

    async def go_on() -> None:
        for number in range(MANY_CALLS):
            await store.put("team", compaction(f"during{number}"))
            assert await finds(store, f"during{number}")
            assert await store.get_fact("model", "ratio") is None
            await store.add_event(time.time(), f"{number}")
        with pytest.raises(StoreError):
            await store.get_setting("mode")

    await asyncio.wait_for(go_on(), FAR_LESS_S)
    assert told(caplog) == ["store_failed"]
    server.start() if kind == "gone" else server.signal(signal.SIGCONT)
    another = opened(server.url)

    async def is_handed_over() -> bool:
        await store.find("team", ["none"])
        return await finds(another, f"during{MANY_CALLS - 1}")

    await eventually(is_handed_over)
    await eventually(lambda: finds(store, "during0"))
    assert await another.events() == [], "the history of an outage stays in the process"
    assert await finds(another, "before") == (kind == "slow")
    assert told(caplog) == ["store_failed", "store_recovered"]


async def test_a_full_server_still_finds(server: Server, opened: Callable[..., RedisStore]) -> None:
    """What it refuses is kept by this process; nothing waits, and nothing of anybody is evicted."""
    store = opened(server.url)
    await store.put("team", compaction("before"))
    server.tell("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.tell("CONFIG", "SET", "maxmemory", "1")
    for write in (
        lambda: store.put("team", compaction("h")),
        lambda: store.put("team", compaction("before", text="newer")),
        lambda: store.put_fact("m", "k", "1"),
        lambda: store.add_event(1.0, "{}"),
        lambda: store.add_turn(1e12, "{}"),
        lambda: store.put_setting("mode", "off"),
    ):
        with pytest.raises(StoreError, match=r"refuses: OOM|OutOfMemory"):
            await write()
    assert not store.is_resting
    assert await finds(store, "before")
    # Long enough between any two calls to try again what was refused.
    both = steady(store, itertools.count(step=10).__next__)
    await both.put("team", compaction("during"))
    assert await finds(both, "during")
    server.tell("CONFIG", "SET", "maxmemory", "0")
    await both.put("team", compaction("after"))

    async def is_handed_over() -> bool:
        await finds(both, "another")
        return await finds(store, "during")

    await eventually(is_handed_over)


async def test_a_refusal_is_told_in_our_words_and_is_no_outage(
    server: Server, opened: Callable[..., RedisStore]
) -> None:
    """A replica takes no write and still finds; of a missing right the server's own words would name the user."""
    store = opened(server.url)
    await store.put("team", compaction("before"))
    server.tell("REPLICAOF", "127.0.0.1", str(free_port()))
    with pytest.raises(StoreError, match="ReadOnly"):
        await store.put("team", compaction("h"))
    assert await finds(store, "before")
    server.tell("REPLICAOF", "NO", "ONE")
    await store.put("team", compaction("after"))
    server.tell("ACL", "SETUSER", "default", "-@all", "+ping", "+eval", "+evalsha", "+acl", "+hgetall")
    for write in (store.put_setting("mode", "off"), store.put("team", compaction("h"))):
        with pytest.raises(StoreError, match=r"NoPermission|ResponseError|refuses: ACL") as raised:
            await write
        assert "default" not in str(raised.value)
    assert not store.is_resting


async def test_a_wrong_password_is_told_without_it(
    server: Server, opened: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the server's place; the right one works."""
    caplog.set_level(logging.DEBUG)
    server.tell("CONFIG", "SET", "requirepass", "right")
    for credentials in ("", ":hunter2@", "anna:hunter2@"):
        durable = opened(server.url.replace("127", f"{credentials}127", 1))
        store = steady(durable)
        assert await store.find("team", ["h"]) == []
        with pytest.raises(StoreError) as raised:
            await store.get_setting("mode")
        address = parse_redis(durable.url)
        assert "hunter2" not in str(raised.value) + repr(raised.value.__cause__) + repr(address)
    assert "hunter2" not in caplog.text
    assert "anna" not in caplog.text
    assert caplog.text.count("store_failed") == 3
    assert caplog.text.count("AuthenticationError") == 3
    right = opened(server.url.replace("127", ":right@127", 1))
    await right.put("team", compaction("h"))
    assert await finds(right, "h")


async def test_nobody_there_is_asked_seldom(opened: Callable[..., RedisStore]) -> None:
    """Thousands of calls are no storm of connections: one attempt, and a look now and then."""
    attempts = 0

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    try:
        store = steady(opened(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"))
        for _ in range(20):
            await asyncio.gather(*(store.find("team", ["h"]) for _ in range(100)))
        # Those that were there before the first answer, and looks that are further and further apart.
        assert attempts < 120
    finally:
        listener.close()
        await listener.wait_closed()


async def test_a_server_that_hangs_is_waited_for_once() -> None:
    """One that takes everything and says nothing: the first call waits a quarter of a second, the others not at all."""
    reading = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reading.set()
        while await reader.read(1 << 16):
            pass
        writer.close()

    listener = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    store = open_store(f"redis://127.0.0.1:{port}", ttl_s=1000, max_bytes=1_000_000)

    async def go_on() -> None:
        for turn in range(MANY_CALLS):
            await store.put("team", compaction(f"h{turn}"))
            assert await finds(store, f"h{turn}")
            assert reading.is_set()

    try:
        await asyncio.wait_for(go_on(), FAR_LESS_S)
        with pytest.raises(StoreError, match=r"did not answer in 0\.25 s"):
            await store.get_setting("mode")
    finally:
        listener.close()
        await store.aclose()
        await listener.wait_closed()


class Sentinels:
    """A master, a replica, and a sentinel that promotes it."""

    def __init__(self, folder: Path) -> None:
        program = any_program()
        for name in ("master", "replica"):
            (folder / name).mkdir()
        self.master = Server(program, folder / "master").start()
        replica_of = ("--replicaof", "127.0.0.1", str(self.master.port))
        self.replica = Server(program, folder / "replica", (*replica_of, "--repl-diskless-sync-delay", "0")).start()
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor mymaster 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\n"
            "sentinel failover-timeout mymaster 3000\n"
        )
        self.sentinel = Server(program, folder, first=(str(config), "--sentinel")).start()

    def clients(self, *gone: int) -> Callable[[], Any]:
        """Makes clients that ask the sentinel, and before it some that are not there."""
        places = [["127.0.0.1", port] for port in (*gone, self.sentinel.port)]
        return own_redis(sentinel_nodes=places, service_name="mymaster")

    async def knows_the_replica(self) -> bool:
        return str(self.replica.port).encode() in self.sentinel.says("SENTINEL", "REPLICAS", "mymaster")

    def end(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.kill()


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    made = Sentinels(tmp_path)
    try:
        yield made
    finally:
        made.end()


async def test_a_failover_is_followed(sentinels: Sentinels, opened: Callable[..., RedisStore]) -> None:
    """The master is killed, a replica promoted: what was replicated is found, and writes go on there."""
    store = opened(ANY, clients=sentinels.clients(free_port()))

    async def is_written() -> bool:
        await store.put("team", compaction("before"))
        return True

    await eventually(is_written)

    async def is_replicated() -> bool:
        key = "compaction:{team}:c:before"
        return sentinels.replica.says("EXISTS", key) == b":1\r\n" and b"num-slaves" in sentinels.sentinel.says(
            "SENTINEL", "MASTER", "mymaster"
        )

    await eventually(is_replicated)

    await eventually(sentinels.knows_the_replica)
    sentinels.master.kill()
    both = steady(store)
    await both.put("team", compaction("during"))
    assert await finds(both, "during")

    async def goes_on() -> bool:
        await store.put("team", compaction("after"))
        return await finds(store, "before")

    await eventually(goes_on)
    assert sentinels.replica.says("EXISTS", "compaction:{team}:c:after") == b":1\r\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Server]]:
    """Two masters that share the slots."""
    program = any_program()
    servers = []
    try:
        for number, slots in enumerate(((0, 8191), (8192, 16383))):
            folder = tmp_path / str(number)
            folder.mkdir()
            server = Server(program, folder, ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"))
            servers.append(server.start())
            server.tell("CLUSTER", "ADDSLOTSRANGE", *map(str, slots))
        servers[1].tell("CLUSTER", "SET-CONFIG-EPOCH", "2")
        servers[0].tell("CLUSTER", "MEET", "127.0.0.1", str(servers[1].port))
        deadline_s = time.monotonic() + 60
        while not all(b"cluster_state:ok" in server.says("CLUSTER", "INFO") for server in servers):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield servers
    finally:
        for server in servers:
            server.kill()


async def test_a_cluster_keeps_scopes_on_all_its_servers(
    cluster: list[Server], opened: Callable[..., RedisStore]
) -> None:
    """Put, found, listed and deleted wherever their slot is; history, plots and settings too."""
    store = opened(ANY, limit_s=10, clients=own_redis(startup_nodes=nodes(cluster[0])))
    scopes = [f"team{number}" for number in range(20)]
    for scope in scopes:
        await store.put(scope, compaction("h"))
        await store.put_fact(scope, "k", "1")
    for server in cluster:
        assert int(server.says("DBSIZE")[1:]) > 4
    assert [len(await store.find(scope, ["g", "h"])) for scope in scopes] == [1] * 20
    assert sorted(stored.scope for stored in await store.compactions()) == sorted(scopes)
    await store.add_event(time.time(), "{}")
    await store.put_setting("mode", "off")
    assert (len(await store.events()), await store.turns(), await store.get_setting("mode")) == (1, [], "off")
    assert await store.delete(scope="team3") == 1
    assert await store.delete(unused_since_s=time.time() + 10) == 19
    assert await store.compactions() == []
    await store.put("team", compaction("h"))
    assert await store.delete() == 1


async def test_a_cluster_that_lost_a_server_is_a_miss(cluster: list[Server], opened: Callable[..., RedisStore]) -> None:
    """And noticed when it is back."""
    store = opened(ANY, limit_s=5, clients=own_redis(startup_nodes=nodes(*cluster)))
    both = steady(store)
    for number in range(10):
        await both.put(f"team{number}", compaction("h"))
    cluster[1].kill()
    made: Compaction = compaction("during")
    for number in range(10):
        await both.put(f"team{number}", made)
        assert await both.find(f"team{number}", ["during"]) == [made]
    cluster[1].start()

    async def all_are_there() -> bool:
        await both.find("team", ["none"])
        return all([await store.find(f"team{number}", ["during"]) for number in range(10)])

    await eventually(all_are_there)
