"""Rows in SQLite: in a file, which survives restarts and serves all workers of a machine, or in memory.

`SqliteFile` opens it and keeps it usable: rights, version, damage, disappearance, other writers. `SqliteRows` are one
part of what is in it. One thread reads and writes a file, so that no event loop waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.places import make_private
from litellm_compaction.stores.rows import LINES_TTL_S, OVERHEAD_BYTES, SETTINGS, Change, Line, Row

logger = logging.getLogger("litellm_compaction")
_Result = TypeVar("_Result")
_Job: TypeAlias = "Callable[[sqlite3.Connection], _Result]"

# "lmcs" in ASCII; file(1) shows it, and it tells another program's database from an empty one of ours.
_APPLICATION_ID, _VERSION = 0x6C6D6373, 8
# A setting has no `used_order`, so that nothing that goes through the order of use meets it. Eviction reads indices
# alone, never the bodies.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, part TEXT NOT NULL, scope TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL,
    created_s REAL NOT NULL, used_s REAL NOT NULL, size_bytes INTEGER NOT NULL, used_order INTEGER,
    UNIQUE (part, scope, key)
);
CREATE INDEX IF NOT EXISTS entry_by_use ON entry (used_order);
CREATE INDEX IF NOT EXISTS entry_by_time ON entry (part, used_s, used_order);
CREATE INDEX IF NOT EXISTS entry_by_scope ON entry (part, scope, used_order, size_bytes);
CREATE TABLE IF NOT EXISTS usage (part TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS entry_added AFTER INSERT ON entry BEGIN
    INSERT OR IGNORE INTO usage VALUES (new.part, 0);
    UPDATE usage SET bytes = bytes + new.size_bytes WHERE part = new.part;
END;
CREATE TRIGGER IF NOT EXISTS entry_gone AFTER DELETE ON entry
    BEGIN UPDATE usage SET bytes = bytes - old.size_bytes WHERE part = old.part; END;
CREATE TABLE IF NOT EXISTS line (
    number INTEGER PRIMARY KEY AUTOINCREMENT, log TEXT NOT NULL, when_s REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS line_by_log ON line (log, number);
PRAGMA application_id={_APPLICATION_ID};
PRAGMA user_version={_VERSION};
COMMIT;
"""  # noqa: S608 - two numbers
_DAMAGED_SCHEMA = ("Could not decode", "no such table", "no such column", "has no column", "malformed database schema")
# A disk that sleeps or a network that is gone holds a call for long; the request does not wait for it. A process that
# ends does not hang with its disk.
LIMIT_S, _LAST_WAIT_S = 5.0, 1.0
# Another process holds the lock for well under a millisecond a write. SQLite's own pauses grow longer and longer, so
# that writers without a pause would starve others: they begin anew after a few, until a request has waited enough.
_BUSY_S = 2.0
_COPIES = ".corrupt-"


class SqliteFile:
    """The database file, in one thread. A damaged or deleted one is replaced; the damaged one is set aside.

    Any other trouble is a `StoreError`: text of a damaged file can make the driver raise anything. The first call makes
    the file and its folder for this user alone, if it may `create` them; otherwise every fault is an error. Without a
    path it is in memory.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        create: bool = True,
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
        limit_s: float = LIMIT_S,
    ) -> None:
        # The journal holds text that is gone.
        self.owes_erasing = False
        self._path, self._create, self._connect, self._limit_s = path, create, connect, limit_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="litellm-compaction-store")
        self._lock = threading.Lock()
        self._hanging: Future[Any] | None = None
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        # Spent once: behind a lock that is kept no further write waits, until one gets through.
        self._patience_s = _BUSY_S

    async def run(self, job: _Job[_Result], *, writes: bool = False) -> _Result:
        """Returns the result of `job`, in one transaction if it writes; a caller who leaves does not stop it."""
        if self._path is None:
            return self._do(job, writes)
        if self._hanging is not None and not self._hanging.done():
            raise StoreError(f"store {self._path} still hangs")
        try:
            begun = self._thread.submit(self._do, job, writes)
        except RuntimeError as exc:
            raise StoreError(f"store {self._path} is closed") from exc
        answered = asyncio.wrap_future(begun)
        # The event loop would complain of an error that is not waited for.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({answered}, timeout=self._limit_s)
        if not answered.done():
            self._hanging = begun
            raise StoreError(f"store {self._path} did not answer in {self._limit_s:g} s")
        return answered.result()

    def forget_copies(self, before_s: float | None) -> None:
        """Deletes copies that were set aside before a time (since 1970), or all: whose text they hold is not known."""
        for copy in self._path.parent.glob(f"{glob.escape(self._path.name)}{_COPIES}*") if self._path else ():
            # Another process may be faster; of a link only the link goes.
            with contextlib.suppress(FileNotFoundError):
                if before_s is None or copy.lstat().st_mtime < before_s:
                    copy.unlink()

    async def aclose(self) -> None:
        """Closes the file after what was begun, if the disk answers by then; any number of times."""
        with contextlib.suppress(RuntimeError):
            closing = asyncio.wrap_future(self._thread.submit(self._let_go))
            self._thread.shutdown(wait=False)
            await asyncio.wait({closing}, timeout=_LAST_WAIT_S)

    def _do(self, job: _Job[_Result], writes: bool, *, repairs: bool = True) -> _Result:
        try:
            # Event loops of several threads may share what is in memory.
            with self._lock:
                return self._done(self._opened(), job, writes)
        except StoreError:
            raise
        except Exception as exc:
            if repairs and self._create and self._path and _is_damage(exc):
                self._set_aside(self._path)
                return self._do(job, writes, repairs=False)
            if "I/O" in str(exc):
                # What stands in the connection's memory may not be what is on the disk any more.
                self._let_go()
            # A store that raises must never decide about a request. A decoding error quotes what it read.
            said = type(exc).__name__ if isinstance(exc, UnicodeError) else str(exc)
            raise StoreError(f"store {self._path} cannot be used: {said}") from exc

    def _done(self, connection: sqlite3.Connection, job: _Job[_Result], writes: bool) -> _Result:
        if not writes:
            return job(connection)
        patience_s, self._patience_s = self._patience_s, 0.0
        _patiently(connection, "BEGIN IMMEDIATE", patience_s)
        self._patience_s = _BUSY_S
        with connection:
            result = job(connection)
        if self.owes_erasing:
            # While another process reads, the next write empties it.
            self.owes_erasing = bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
        return result

    def _opened(self) -> sqlite3.Connection:
        if self._path is not None and self._connection is not None and _identity(self._path) != self._identity:
            logger.warning("store_file_replaced path=%s; it was deleted or moved while in use", self._path)
            self._let_go()
        if self._connection is None:
            if self._path is not None and self._create:
                _make_private(self._path)
            elif self._path is not None and not self._path.is_file():
                raise StoreError(f"there is no store at {self._path} yet; a proxy makes it with its first compaction")
            self._identity = None if self._path is None else _identity(self._path)
            place = str(self._path or ":memory:")
            self._connection = self._connect(place, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            # Of a store that nobody closes, such as one in memory; Python 3.13 warns of it.
            weakref.finalize(self, self._connection.close)
            try:
                self._prepare(self._connection)
            except BaseException:
                # Half prepared it would be taken for ready by the next call.
                self._let_go()
                raise
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # First: another process may be making it.
        is_empty = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None
        version, application = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        if is_empty and application in (0, _APPLICATION_ID):
            # The switch needs the file alone and does not always wait for it (sqlite.org/wal.html, 2.2 and 8): several
            # workers that start together would meet here. Once made, it is kept by the file.
            _patiently(connection, "PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)
        elif application != _APPLICATION_ID:
            raise StoreError(f"{self._path} is a database of another program; name another file in `store`")
        elif version != _VERSION:
            raise StoreError(
                f"store {self._path} has schema version {version} and this version of litellm_compaction knows "
                f"{_VERSION}: update it, or name another file in `store`"
            )
        # A commit then costs no fsync, and a crash loses the last ones but no file. Deleted text is overwritten.
        for pragma in ("synchronous=NORMAL", "secure_delete=ON", "journal_size_limit=4194304", "busy_timeout=50"):
            connection.execute(f"PRAGMA {pragma}").close()

    def _set_aside(self, path: Path) -> None:
        """Renames the damaged file, unless another process has done so already."""
        is_same = _identity(path) == self._identity
        self._let_go()
        if not is_same:
            return
        aside = f"{path}{_COPIES}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        # The journal first: it must never meet the fresh file.
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
        logger.warning("store_corrupt path=%s; set aside as %s, a fresh one is made", path, aside)

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def _patiently(connection: sqlite3.Connection, statement: str, patience_s: float = _BUSY_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return connection.execute(statement).close()
        except sqlite3.OperationalError as error:  # noqa: PERF203 - a wait
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.001)


def _is_damage(error: Exception) -> bool:
    # CORRUPT and NOTADB are raised as DatabaseError itself, all other trouble as a subclass (CPython,
    # Modules/_sqlite/util.c), text that is no UTF-8 as either; of a schema of ours nothing is missing.
    is_damage = type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError)
    return is_damage or any(map(str(error).__contains__, _DAMAGED_SCHEMA))


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _make_private(path: Path) -> None:
    """Makes the file if it is missing, for this user alone; SQLite gives -wal and -shm the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for suffix in ("", "-wal", "-shm"):
        # Also if a link has been put in its place: its target is not ours to close.
        with contextlib.suppress(OSError):
            make_private(Path(f"{path}{suffix}"))


_COLUMNS = "scope, key, body, created_s, used_s, size_bytes"
# A row that another program has written may hold any type in any column (sqlite.org/datatype3.html).
_ALIVE = f"""
SELECT {_COLUMNS} FROM entry WHERE part = :part AND (used_s >= :since_s OR used_order IS NULL)
    AND typeof(key) = 'text' AND typeof(body) = 'blob' AND typeof(used_s) = 'real'
    AND typeof(created_s) = 'real' AND typeof(size_bytes) = 'integer' AND
"""  # noqa: S608
_FOUND = f"{_ALIVE} scope = :scope AND key IN (SELECT value FROM json_each(:keys))"  # noqa: S608
_ALL = f"{_ALIVE} used_order IS NOT NULL ORDER BY used_order DESC"
_NAMED = "part = :part AND scope = :scope AND key = :key"
# One more than any before: clocks of several processes are not finer than requests.
_NEXT = "(SELECT coalesce(max(used_order), 0) + 1 FROM entry)"
_USE = f"UPDATE entry SET used_s = max(used_s, :now_s), used_order = {_NEXT} WHERE {_NAMED}"  # noqa: S608
_DROP = f"DELETE FROM entry WHERE {_NAMED}"  # noqa: S608
_AGING = "part = :part AND used_order IS NOT NULL AND used_s"
_EXPIRE = f"DELETE FROM entry WHERE id IN (SELECT id FROM entry WHERE {_AGING} < :since_s LIMIT 256)"  # noqa: S608
# The clock has been set back: they would outlive their time by as much.
_SET_BACK = f"UPDATE entry SET used_s = :now_s WHERE {_AGING} > :latest_s"  # noqa: S608
_ADD = f"""
INSERT INTO entry (part, {_COLUMNS}, used_order) VALUES (:part, :scope, :key, :body, :now_s, :now_s, :size_bytes,
    CASE WHEN :size_bytes THEN {_NEXT} END)
"""  # noqa: S608
_BYTES = "SELECT coalesce(sum(bytes), 0) FROM usage WHERE part = :part"
# Beyond what it adds a write takes few rows: the bound may have been lowered, and others wait for the file meanwhile.
_IS_FULL = "SELECT bytes > :max_bytes AND (bytes > :before_bytes OR :more_rows > 0) FROM usage WHERE part = :part"
# One tenant's records take nothing from tenants with fewer; the last used row of all stays, however large.
_OLDER = f"part = :part AND used_order < {_NEXT} - 1"
_LARGEST = f"SELECT scope FROM entry WHERE {_OLDER} GROUP BY scope ORDER BY sum(size_bytes) DESC LIMIT 1"  # noqa: S608
_OLDEST = f"SELECT id FROM entry WHERE {_OLDER} AND scope = ({_LARGEST}) ORDER BY used_order LIMIT 1"  # noqa: S608
_EVICT = f"DELETE FROM entry WHERE id = ({_OLDEST})"  # noqa: S608
_DOOMED = """
part = :part AND used_order IS NOT NULL AND (:scope IS NULL OR scope = :scope)
    AND (:before_s IS NULL OR used_s < :before_s) AND (:key IS NULL OR key = :key)
"""
# Expired lines go a few at a time.
_SHORTEN = """
DELETE FROM line WHERE when_s < :since_s AND number IN (SELECT number FROM line ORDER BY number LIMIT 16) OR
    log = :log AND number <= (SELECT number FROM line WHERE log = :log ORDER BY number DESC LIMIT 1 OFFSET :most)
"""
_TAIL = """
SELECT number, when_s, body FROM line WHERE log = :log AND when_s >= :since_s AND instr(body, :containing)
    AND typeof(body) = 'blob' ORDER BY number DESC LIMIT :most
"""


class SqliteRows:
    """A part of what is in a file, with a time to live and a bound of its own; the one without a name has the logs."""

    def __init__(
        self,
        file: SqliteFile,
        *,
        ttl_s: float,
        max_bytes: int,
        part: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file, self._part, self._clock = file, part, clock
        self._ttl_s, self._max_bytes = ttl_s, max_bytes

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> SqliteRows:
        return SqliteRows(self._file, part=part, ttl_s=ttl_s, max_bytes=max_bytes, clock=self._clock)

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        def read(connection: sqlite3.Connection) -> list[Row]:
            values = self._values(scope=scope)
            rows = _found(connection, keys, values)
            # The first is the one that is wanted most: it was used last.
            kept = () if scope == SETTINGS or self._part else reversed(keys)
            used = [{**values, "key": key} for key in kept if key in rows]
            # A file that is full or locked refuses to note the use, and still finds.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.executemany(_USE, used)
            return [rows[key] for key in keys if key in rows]

        return await self._file.run(read)

    async def put(self, scope: str, key: str, body: bytes) -> None:
        def write(connection: sqlite3.Connection) -> None:
            self._file.forget_copies(self._clock() - self._ttl_s)
            self._file.owes_erasing |= self._put(connection, scope, key, body)

        await self._file.run(write, writes=True)

    async def change(self, scope: str, key: str, change: Change) -> None:
        def write(connection: sqlite3.Connection) -> None:
            values = self._values(scope=scope, key=key)
            row = _found(connection, [key], values).get(key)
            before = row and row.body
            after = change(before, values["now_s"])
            if after is None:
                connection.execute(_DROP, values)
            elif after != before:
                self._put(connection, scope, key, after)

        await self._file.run(write, writes=True)

    async def scan(self) -> list[Row]:
        values = self._values()
        return await self._file.run(lambda connection: [Row(*row) for row in connection.execute(_ALL, values)])

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        values = self._values(scope=scope, before_s=before_s, key=key)

        def write(connection: sqlite3.Connection) -> list[str]:
            self._file.owes_erasing = True
            keys = [str(row[0]) for row in connection.execute(f"SELECT key FROM entry WHERE {_DOOMED}", values)]  # noqa: S608
            connection.execute(f"DELETE FROM entry WHERE {_DOOMED}", values)  # noqa: S608
            if key is None:
                self._file.forget_copies(before_s)
            if not self._part and scope is None and key is None:
                connection.execute("DELETE FROM line WHERE :before_s IS NULL OR when_s < :before_s", values)
            return keys

        return await self._file.run(write, writes=True)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        values = {"log": log, "when_s": when_s, "body": body, "most": most, "since_s": self._clock() - LINES_TTL_S}

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO line (log, when_s, body) VALUES (:log, :when_s, :body)", values)
            connection.execute(_SHORTEN, values)

        await self._file.run(write, writes=True)

    async def tail(self, log: str, *, most: int, containing: bytes = b"") -> list[Line]:
        values = {"log": log, "since_s": self._clock() - LINES_TTL_S, "containing": containing, "most": most}
        return await self._file.run(
            lambda connection: [Line(*line) for line in connection.execute(_TAIL, values)][::-1]
        )

    async def aclose(self) -> None:
        await self._file.aclose()

    def _values(self, **values: Any) -> dict[str, Any]:
        """Returns the values that statements on rows take, as of now."""
        now_s = self._clock()
        return {"part": self._part, "now_s": now_s, "since_s": now_s - self._ttl_s, **values}

    def _put(self, connection: sqlite3.Connection, scope: str, key: str, body: bytes) -> bool:
        """Writes a row; expired ones go, and others until the bound holds, or some of them. True if any text went."""
        values = self._values(scope=scope, key=key, body=body, max_bytes=self._max_bytes, more_rows=16)
        values["size_bytes"] = 0 if scope == SETTINGS else len(body) + OVERHEAD_BYTES
        values["latest_s"] = values["now_s"] + self._ttl_s
        is_less = connection.execute(_DROP, values).rowcount + connection.execute(_EXPIRE, values).rowcount > 0
        connection.execute(_SET_BACK, values)
        (values["before_bytes"],) = connection.execute(_BYTES, values).fetchone()
        connection.execute(_ADD, values)
        while connection.execute(_IS_FULL, values).fetchone()[0] and connection.execute(_EVICT, values).rowcount:
            is_less, values["more_rows"] = True, values["more_rows"] - 1
        return is_less


def _found(connection: sqlite3.Connection, keys: Sequence[str], values: dict[str, Any]) -> dict[str, Row]:
    """The rows under `keys` that are alive."""
    rows = connection.execute(_FOUND, {**values, "keys": json.dumps(keys)})
    return {row[1]: Row(*row) for row in rows}


class MemoryRows(SqliteRows):
    """Rows in the memory of this process, which end with it."""

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(SqliteFile(None), ttl_s=ttl_s, max_bytes=max_bytes, clock=clock)
