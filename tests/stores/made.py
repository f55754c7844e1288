"""Stores and boards by what they are made of, for tests that subclass them or look inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litellm_compaction.errors import StoreError
from litellm_compaction.places import parse_redis
from litellm_compaction.stores import Store
from litellm_compaction.stores.redis import LIMIT_S, RedisRows, RedisServer, client_of
from litellm_compaction.stores.rows import Rows, SteadyRows
from litellm_compaction.stores.sqlite import MemoryRows, SqliteFile, SqliteRows


class MemoryStore(Store):
    rows: MemoryRows

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes, clock=clock))


class SqliteStore(Store):
    rows: SqliteRows

    def __init__(
        self, path: Path, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time, **file: Any
    ) -> None:
        super().__init__(SqliteRows(SqliteFile(path, **file), ttl_s=ttl_s, max_bytes=max_bytes, clock=clock))


class SteadyStore(Store):
    """A durable store's rows with another one's to fall back on."""

    rows: SteadyRows

    def __init__(self, durable: Store, spare: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(SteadyRows(durable.rows, spare.rows, clock=clock))


class FailingRows:
    """Rows whose methods raise while their names are in `failing`."""

    def __init__(self, rows: Rows) -> None:
        self.failing: set[str] = set()
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            if name in self.failing:
                raise StoreError("disk full")
            return await getattr(self._rows, name)(*arguments, **options)

        return call


class RedisStore(Store):
    """A store on a server by its URL."""

    rows: RedisRows

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float = 1000.0,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] | None = None,
        clients: Callable[[], Any] | None = None,
    ) -> None:
        self.url = url
        address = parse_redis(url)
        made = clients or (lambda: client_of(address.url, limit_s=limit_s))
        self.server = RedisServer(made, address.place, owns=True, limit_s=limit_s)
        super().__init__(RedisRows(self.server, prefix=address.prefix, ttl_s=ttl_s, clock=clock))

    async def says(self, *words: str | bytes) -> Any:
        """What the server answers to a command."""
        return await self.server.call(lambda client: client.execute_command(*words), is_patient=False)


class MemoryBoard(MemoryRows):
    """Rows of notes that several processes of a test share."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        super().__init__(ttl_s=120.0, max_bytes=1_000_000, clock=clock)

    async def aclose(self) -> None:
        """Nothing: other processes of the test have it as well."""

    @property
    def topics(self) -> list[str]:
        """Those that have notes."""
        asked = "SELECT DISTINCT scope FROM entry"
        return [topic for (topic,) in self._file._opened().execute(asked)]
