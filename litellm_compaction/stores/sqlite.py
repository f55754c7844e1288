"""Rows in one SQLite file, which survives restarts and serves all workers of a machine.

One thread reads and writes, so that no event loop waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.rows import LINES_TTL_S, OVERHEAD_BYTES, SETTINGS, Change, Line, Row
from litellm_compaction.stores.sqlite_file import Connect, Job, SqliteFile

_Result = TypeVar("_Result")

# A disk that sleeps or a network that is gone holds a call for long; the request does not wait for it.
LIMIT_S = 5.0
# A process that ends does not hang with its disk.
_LAST_WAIT_S = 1.0
# How often copies of damaged files are looked at, which live no longer than their content.
_COPIES_EVERY_S = 3600.0
# SQLITE_MAX_VARIABLE_NUMBER was 999 until SQLite 3.32 (sqlite.org/limits.html).
_VARIABLES = 900
_EXPIRED_LINES_AT_ONCE = 16

# A setting has no `used_order`, so that nothing that goes through the order of use meets it. Eviction reads indices
# alone, never the bodies.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, created_s REAL NOT NULL,
    used_s REAL NOT NULL, size_bytes INTEGER NOT NULL, used_order INTEGER, UNIQUE (scope, key)
);
CREATE INDEX IF NOT EXISTS entry_by_use ON entry (used_order);
CREATE INDEX IF NOT EXISTS entry_by_time ON entry (used_s, used_order);
CREATE INDEX IF NOT EXISTS entry_by_scope ON entry (scope, used_order, size_bytes);
CREATE TABLE IF NOT EXISTS usage (id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO usage VALUES (1, 0);
CREATE TRIGGER IF NOT EXISTS entry_added AFTER INSERT ON entry
    BEGIN UPDATE usage SET bytes = bytes + new.size_bytes; END;
CREATE TRIGGER IF NOT EXISTS entry_gone AFTER DELETE ON entry
    BEGIN UPDATE usage SET bytes = bytes - old.size_bytes; END;
CREATE TRIGGER IF NOT EXISTS entry_resized AFTER UPDATE OF size_bytes ON entry
    BEGIN UPDATE usage SET bytes = bytes + new.size_bytes - old.size_bytes; END;
CREATE TABLE IF NOT EXISTS line (
    number INTEGER PRIMARY KEY AUTOINCREMENT, log TEXT NOT NULL, when_s REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS line_by_log ON line (log, number);
"""
_COLUMNS = "scope, key, body, created_s, used_s, size_bytes"
# A row that another program has written may hold any type in any column (sqlite.org/datatype3.html).
_WHOLE = (
    "typeof(key) = 'text' AND typeof(body) = 'blob' AND typeof(used_s) = 'real'"
    " AND typeof(created_s) = 'real' AND typeof(size_bytes) = 'integer'"
)
# One more than any before: clocks of several processes are not finer than requests.
_NEXT_ORDER = "(SELECT coalesce(max(used_order), 0) + 1 FROM entry)"
# The last used row of all stays, however large it is.
_OLDER = "used_order < (SELECT max(used_order) FROM entry)"


class SqliteRows:
    """Rows in a file, for several event loops. The file is opened by the first call.

    Args:
        path: need not exist; it and its folder are made for this user alone.
        create: whether to make and repair the file; if not, its faults are errors.
        clock: seconds, the same in all processes.
        limit_s: seconds after which a call is no longer waited for.
        rests: seconds, for the pause after a write that failed.
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
        rests: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._limit_s = limit_s
        self._file = SqliteFile(path, _SCHEMA, create=create, connect=connect, clock=rests)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="litellm-compaction-store")
        self._hanging: Future[object] | None = None
        self._copies_seen_s = -math.inf

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        now_s = self._clock()
        found = await self._read(lambda connection: _found(connection, scope, keys))
        if scope == SETTINGS:
            return [found[key] for key in keys if key in found]
        if found:
            # When no caller waits for it.
            self._later(lambda: self._file.write(lambda each: _note_use(each, scope, list(found), now_s, self._ttl_s)))
        return [found[key] for key in keys if key in found and self._is_alive(found[key], now_s)]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        await self._write(lambda connection: self._put(connection, scope, key, body))
        self._later(self._file.erase_remains)
        if (now_s := self._clock()) >= self._copies_seen_s + _COPIES_EVERY_S:
            self._copies_seen_s = now_s
            self._later(lambda: self._file.delete_copies(before_s=now_s - self._ttl_s))

    async def change(self, scope: str, key: str, change: Change) -> None:
        def write(connection: sqlite3.Connection) -> None:
            now_s = self._clock()
            row = _found(connection, scope, [key]).get(key)
            before = row.body if row is not None and self._is_alive(row, now_s) else None
            after = change(before, now_s)
            if after is None:
                connection.execute("DELETE FROM entry WHERE scope = ? AND key = ?", (scope, key))
            elif after != before:
                self._put(connection, scope, key, after)

        await self._write(write)

    async def scan(self) -> list[Row]:
        alive = f"SELECT {_COLUMNS} FROM entry WHERE used_order IS NOT NULL AND used_s >= ? AND {_WHOLE}"  # noqa: S608
        since_s = self._clock() - self._ttl_s
        return await self._read(
            lambda connection: [
                Row(*row) for row in connection.execute(f"{alive} ORDER BY used_order DESC", (since_s,))
            ]
        )

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        deleted = await self._write(lambda connection: _deleted(connection, scope, before_s, key))
        self._file.owes_erasing = True
        if key is not None:
            # While a request waits: its text is gone, its room is used again.
            self._later(self._file.erase_remains)
            return deleted

        def shrink(connection: sqlite3.Connection) -> None:
            # Another process may be reading: then the room is used again in time.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("VACUUM")

        with contextlib.suppress(StoreError):
            await self._read(shrink)
        await self._run(self._file.erase_remains)
        # The owner of a damaged file's text is unknown.
        await self._run(lambda: self._file.delete_copies(before_s=before_s))
        return deleted

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        expired_s = self._clock() - LINES_TTL_S
        await self._write(lambda connection: _append(connection, log, when_s, body, most, expired_s))

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        lines = (
            "SELECT number, when_s, body FROM line WHERE log = ? AND number > ? AND when_s >= ? AND instr(body, ?)"
            " AND typeof(body) = 'blob' ORDER BY number DESC LIMIT ?"
        )
        values = (log, after, self._clock() - LINES_TTL_S, containing, most)
        return await self._read(lambda connection: [Line(*line) for line in connection.execute(lines, values)][::-1])

    async def aclose(self) -> None:
        if self._hanging is not None:
            # What was begun is finished, if the disk answers by then.
            await asyncio.wait({asyncio.wrap_future(self._hanging)}, timeout=_LAST_WAIT_S)
        with contextlib.suppress(StoreError):
            await self._run(self._file.close)
        self._thread.shutdown(wait=False)

    def _is_alive(self, row: Row, now_s: float) -> bool:
        return row.used_s >= now_s - self._ttl_s

    def _put(self, connection: sqlite3.Connection, scope: str, key: str, body: bytes) -> None:
        """Writes a row; then expired ones go, and others until the bound holds. Runs in a transaction."""
        now_s = self._clock()
        before = connection.total_changes
        connection.execute("DELETE FROM entry WHERE scope = ? AND key = ?", (scope, key))
        connection.execute("DELETE FROM entry WHERE used_order IS NOT NULL AND used_s < ?", (now_s - self._ttl_s,))
        self._file.owes_erasing |= connection.total_changes > before
        # The clock has been set back: they would outlive their time by as much.
        connection.execute(
            "UPDATE entry SET used_s = ? WHERE used_order IS NOT NULL AND used_s > ?", (now_s, now_s + self._ttl_s)
        )
        size_bytes, order = (0, "NULL") if scope == SETTINGS else (len(body) + OVERHEAD_BYTES, _NEXT_ORDER)
        connection.execute(
            f"INSERT INTO entry ({_COLUMNS}, used_order) VALUES (?, ?, ?, ?, ?, ?, {order})",  # noqa: S608
            (scope, key, body, now_s, now_s, size_bytes),
        )
        self._file.owes_erasing |= _evict(connection, self._max_bytes)

    async def _read(self, job: Job[_Result]) -> _Result:
        return await self._run(lambda: self._file.read(job))

    async def _write(self, job: Job[_Result]) -> _Result:
        return await self._run(lambda: self._file.write(job))

    async def _run(self, call: Callable[[], _Result]) -> _Result:
        """Returns the result of `call` in the thread; a caller who is cancelled, or tires, does not stop it."""
        if self._hanging is not None and not self._hanging.done():
            raise StoreError(f"store {self._file.path} still hangs")
        try:
            job = self._thread.submit(_attempt, call)
        except RuntimeError as exc:
            raise StoreError(f"store {self._file.path} is closed") from exc
        answered = asyncio.wrap_future(job)
        done, _ = await asyncio.wait({answered}, timeout=self._limit_s)
        if not done:
            self._hanging = job  # type: ignore[assignment] # whatever it will give
            raise StoreError(f"store {self._file.path} did not answer in {self._limit_s:g} s")
        result = answered.result()
        if isinstance(result, StoreError):
            raise result
        return result

    def _later(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.submit(_attempt, call)


def _attempt(call: Callable[[], _Result]) -> _Result | StoreError:
    # A value, so that asyncio does not complain about an error without a waiter.
    try:
        return call()
    except StoreError as error:
        return error
    except OSError as error:
        return StoreError(f"a copy that was set aside because it was damaged cannot be deleted: {error}")


def _found(connection: sqlite3.Connection, scope: str, keys: Sequence[str]) -> dict[str, Row]:
    """The rows under `keys`, expired ones too."""
    found: dict[str, Row] = {}
    for start in range(0, len(keys), _VARIABLES):
        some = keys[start : start + _VARIABLES]
        marks = ",".join("?" * len(some))
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM entry WHERE scope = ? AND key IN ({marks}) AND {_WHOLE}",  # noqa: S608
            (scope, *some),
        )
        found |= {row[1]: Row(*row) for row in rows}
    return found


def _note_use(connection: sqlite3.Connection, scope: str, keys: Sequence[str], now_s: float, ttl_s: float) -> None:
    """Marks those that are alive as used now, the last of `keys` as the latest."""
    for key in keys:
        connection.execute(
            f"UPDATE entry SET used_s = max(used_s, ?), used_order = {_NEXT_ORDER}"  # noqa: S608
            " WHERE scope = ? AND key = ? AND used_s >= ?",
            (now_s, scope, key, now_s - ttl_s),
        )


def _evict(connection: sqlite3.Connection, max_bytes: int) -> bool:
    """Deletes the least recently used of the scope that has most until the bound holds; True if there were any.

    So one tenant's records take nothing from tenants with fewer.
    """
    [used_bytes] = connection.execute("SELECT bytes FROM usage").fetchone() or [None]
    if not isinstance(used_bytes, int):
        raise sqlite3.DatabaseError("the table `usage` is damaged")
    excess_bytes = used_bytes - max_bytes
    if excess_bytes <= 0:
        return False
    left = dict(connection.execute(f"SELECT scope, sum(size_bytes) FROM entry WHERE {_OLDER} GROUP BY scope"))  # noqa: S608
    oldest = f"SELECT id, size_bytes FROM entry WHERE scope = ? AND {_OLDER} ORDER BY used_order"  # noqa: S608
    cursors: dict[str, sqlite3.Cursor] = {}
    doomed: list[tuple[int]] = []
    while excess_bytes > 0 and left:
        scope = max(left, key=left.__getitem__)
        if scope not in cursors:
            cursors[scope] = connection.execute(oldest, (scope,))
        row = cursors[scope].fetchone()
        if row is None:
            del left[scope]
            continue
        doomed.append((row[0],))
        left[scope] -= row[1]
        excess_bytes -= row[1]
    connection.executemany("DELETE FROM entry WHERE id = ?", doomed)
    return bool(doomed)


def _deleted(connection: sqlite3.Connection, scope: str | None, before_s: float | None, key: str | None) -> list[str]:
    matches = (
        "used_order IS NOT NULL AND (:scope IS NULL OR scope = :scope)"
        " AND (:before_s IS NULL OR used_s < :before_s) AND (:key IS NULL OR key = :key)"
    )
    values = {"scope": scope, "before_s": before_s, "key": key}
    keys = [str(row[0]) for row in connection.execute(f"SELECT key FROM entry WHERE {matches}", values)]  # noqa: S608
    connection.execute(f"DELETE FROM entry WHERE {matches}", values)  # noqa: S608
    if scope is None and key is None:
        connection.execute("DELETE FROM line WHERE :before_s IS NULL OR when_s < :before_s", values)
    return keys


def _append(connection: sqlite3.Connection, log: str, when_s: float, body: bytes, most: int, expired_s: float) -> None:
    """Adds a line; the oldest go beyond `most`, and expired ones a few at a time."""
    connection.execute("INSERT INTO line (log, when_s, body) VALUES (?, ?, ?)", (log, when_s, body))
    connection.execute(
        "DELETE FROM line WHERE log = :log AND number <="
        " (SELECT number FROM line WHERE log = :log ORDER BY number DESC LIMIT 1 OFFSET :most)",
        {"log": log, "most": most},
    )
    connection.execute(
        "DELETE FROM line WHERE when_s < ? AND number IN (SELECT number FROM line ORDER BY number LIMIT ?)",
        (expired_s, _EXPIRED_LINES_AT_ONCE),
    )
