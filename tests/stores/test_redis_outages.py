"""A Redis that is slow, full, read-only, failing over or gone: a miss that is told once, and noticed when it ends.

Each test has a real server of its own, which it stops, fills or kills by its handle.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.litellm_api import redis_of
from litellm_compaction.stores import Store
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


async def finds(store: Store, name: str) -> bool:
    return [each.covered_hash for each in await store.find("team", [name])] == [name]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" ")[0] for record in caplog.records if "store_" in record.getMessage()]


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
