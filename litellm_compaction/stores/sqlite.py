"""A store in one SQLite file, which survives restarts and serves all workers of a machine."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import sqlite_tables as tables
from litellm_compaction.stores.protocol import (
    MAX_EVENTS,
    Join,
    Plot,
    StoredCompaction,
    StoredEvent,
    decode,
    decode_text,
    encode,
    encode_text,
)
from litellm_compaction.stores.sqlite_file import Connect, SqliteFile
from litellm_compaction.stores.sqlite_thread import FileThread

_Result = TypeVar("_Result")

# A disk that sleeps or a network that is gone holds a call for long; the request does not wait for it.
LIMIT_S = 5.0
# How often copies of damaged files are looked at, which live no longer than what was in them.
_COPIES_EVERY_S = 3600.0


class SqliteStore:
    """Rows in a file, read and written by one thread, so that the event loop never waits for a disk.

    May be used from several event loops. The file is opened by the first call.

    Args:
        path: need not exist.
        ttl_s: seconds after which an entry that nobody used is forgotten.
        max_bytes: bound on all entries together; the newest one is kept however large it is.
        create: whether to make and repair the file; otherwise what is wrong with it is an error.
        clock: wall clock, seconds since 1970.
        connect: opens a database.
        limit_s: seconds after which a call is no longer waited for.
    """

    def __init__(
        self,
        path: Path,
        *,
        ttl_s: float,
        max_bytes: int,
        create: bool = True,
        clock: Callable[[], float] = time.time,
        connect: Connect = sqlite3.connect,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._file = SqliteFile(path, tables.MIGRATIONS, create=create, connect=connect)
        self._thread = FileThread(self._file, limit_s=limit_s)
        self._owes_erasing = False
        self._copies_seen_s = 0.0
        # The file may have been written by a process with another idea of the time.
        self._written_s = math.inf

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """The compactions in `scope` whose covered hash is one of `hashes`, the one that covers most first."""
        if not hashes:
            return []
        found = await self._use("compaction", scope, hashes, decode)
        return [found[covered_hash] for covered_hash in reversed(hashes) if covered_hash in found]

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps `compaction`, in place of an earlier one that covers the same messages."""
        await self._put("compaction", scope, compaction.covered_hash, lambda _: encode(compaction))

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What was last put under `key`."""
        return (await self._use("fact", scope, [key], _text)).get(key)

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps `text`, in place of an earlier one under the same key."""
        await self._put("fact", scope, key, lambda _: encode_text(text))

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        """Adds `text` to what is kept under `key`, in one transaction; gives both together."""
        alive_since_s = self._clock() - self._ttl_s
        both = text

        def body(connection: sqlite3.Connection) -> bytes:
            nonlocal both
            kept = [each for each in tables.find(connection, "fact", scope, [key]) if each.used_s >= alive_since_s]
            known = _text(kept[0].body) if kept else None
            both = text if known is None else join(known, text)
            return encode_text(both)

        await self._put("fact", scope, key, body)
        return both

    async def get_setting(self, key: str) -> str | None:
        """What an operator chose under `key`."""
        body = await self._read(lambda connection: tables.get_setting(connection, key))
        return None if body is None else _text(body)

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps a choice until it is replaced."""
        body = encode_text(text)
        await self._write(lambda connection: tables.put_setting(connection, key, body))

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds a line to the history."""
        now_s = self._clock()
        body = encode_text(text)
        await self._write(lambda connection: tables.add_event(connection, when_s, body, now_s))

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The newest `limit` events with a number above `after` and these characters in them, oldest first."""
        now_s, part = self._clock(), encode_text(containing)
        rows = await self._read(lambda connection: tables.events(connection, after, limit, part, now_s))
        texts = ((number, when_s, _text(body)) for number, when_s, body in rows)
        return [StoredEvent(number, when_s, text) for number, when_s, text in texts if text is not None]

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps plots, in place of earlier ones under the same keys."""
        now_s = self._clock()
        rows = [(plot.key, plot.when_s, encode_text(plot.text)) for plot in plots]
        await self._write(lambda connection: tables.put_plots(connection, rows, now_s))

    async def plots(self, *, containing: str = "") -> list[str]:
        """The texts with these characters in them, the newest first."""
        now_s, part = self._clock(), encode_text(containing)
        bodies = await self._read(lambda connection: tables.plots(connection, part, now_s))
        return [text for body in bodies if (text := _text(body)) is not None]

    async def compactions(self) -> list[StoredCompaction]:
        """All that are alive, the most recently used first."""
        alive_since_s = self._clock() - self._ttl_s

        def read(connection: sqlite3.Connection) -> list[StoredCompaction]:
            rows = tables.compactions(connection, alive_since_s)
            return [
                StoredCompaction(scope, compaction, created_s, used_s, size_bytes)
                for scope, body, created_s, used_s, size_bytes in rows
                if (compaction := decode(body)) is not None
            ]

        return await self._read(read)

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets what matches, and gives its room on the disk back; how many compactions there were among it.

        Copies of damaged files go with it, whatever the scope, and what the journal still holds.
        """
        count = await self._write(lambda connection: tables.delete(connection, scope, unused_since_s, covered_hash))
        if covered_hash is not None:
            # While a request waits: its text is gone, its room is used again.
            self._owes_erasing = True
            self._behind(self._erase_remains)
            return count

        def shrink(connection: sqlite3.Connection) -> None:
            # Another process may be reading: then the room is used again in time.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("VACUUM")

        with contextlib.suppress(StoreError):
            await self._read(shrink)
        self._owes_erasing = True
        await self._thread.run(self._erase_remains)
        # Nobody knows whose text a damaged file holds.
        await self._thread.run(lambda: self._file.erase_copies(before_s=unused_since_s))
        return count

    async def aclose(self) -> None:
        """Finishes what has begun and closes the file."""
        await self._thread.aclose()

    async def _use(
        self, kind: tables.Kind, scope: str, keys: Sequence[str], parse: Callable[[bytes], _Result | None]
    ) -> dict[str, _Result]:
        """The entries under `keys` that are alive and readable; their use is written down when nobody waits for it."""
        now_s = self._clock()
        alive_since_s = now_s - self._ttl_s

        def read(connection: sqlite3.Connection) -> tuple[dict[str, _Result], list[int]]:
            entries = tables.find(connection, kind, scope, keys)
            alive = (entry for entry in entries if entry.used_s >= alive_since_s)
            found = {entry.key: value for entry in alive if (value := parse(entry.body)) is not None}
            return found, [entry.id for entry in entries]

        found, ids = await self._read(read)
        if ids:
            note = partial(tables.note_use, ids=ids, now_s=now_s, expired_before_s=alive_since_s)
            self._behind(lambda: self._file.write(note))
        return found

    async def _put(self, kind: tables.Kind, scope: str, key: str, body: Callable[[sqlite3.Connection], bytes]) -> None:
        now_s = self._clock()
        expired_before_s = now_s - self._ttl_s
        is_set_back, self._written_s = now_s < self._written_s, now_s

        def write(connection: sqlite3.Connection) -> None:
            if is_set_back:
                tables.put_back(connection, now_s)
            is_replaced = tables.put(connection, kind, scope, key, body(connection), now_s)
            is_evicted = tables.evict(connection, expired_before_s=expired_before_s, max_bytes=self._max_bytes)
            self._owes_erasing |= is_evicted or (is_replaced and kind == "compaction")

        await self._write(write)
        self._behind(self._erase_remains)
        if now_s >= self._copies_seen_s + _COPIES_EVERY_S:
            self._copies_seen_s = now_s
            self._behind(lambda: self._file.erase_copies(before_s=expired_before_s))

    def _erase_remains(self) -> None:
        """Empties the journal where it holds text that is gone; beside a reader it is tried again with the next write.

        Runs in the thread.
        """
        if self._owes_erasing:
            self._owes_erasing = not self._file.erase_journal()

    def _behind(self, call: Callable[[], object]) -> None:
        """Has something done when nobody waits for it."""
        self._thread.submit(call)

    async def _read(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        return await self._thread.run(lambda: self._file.read(work))

    async def _write(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        return await self._thread.run(lambda: self._file.write(work))


def _text(body: bytes) -> str | None:
    try:
        return decode_text(body)
    except ValueError:
        return None
